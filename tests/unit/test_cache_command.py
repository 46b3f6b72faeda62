"""``python -m bucketwheel cache``: what it lists, and what it removes while others build."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest

from bucketwheel import __main__
from bucketwheel.tools import cache_command
from tests.unit.test_build import wait_until
from tests.unit.tiny_tree import TinyTree

# The command alone: __main__ imports torch.
CACHE = "import argparse, sys; from bucketwheel.tools import cache_command as command\n"
CACHE += "parser = argparse.ArgumentParser(); command.add_arguments(parser)\n"
CACHE += "sys.exit(command.main(parser.parse_args(sys.argv[1:])))"


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[TinyTree]:
    tree = TinyTree(tmp_path)
    tree.add_cuda()
    yield tree
    tree.release_compiler()  # whatever has failed: nothing may hang on


def run(tree: TinyTree, *arguments: str, status: int = 0, **changes: str | None) -> Any:
    """An object with --json, else text."""
    code = CACHE.replace("sys.argv[1:]", repr(list(arguments)))
    process = tree.start(code, **changes)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, (out, err)
    return json.loads(out) if "--json" in arguments else out


def bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


# ---- listing ---------------------------------------------------------------------------------------------------------


def test_an_empty_cache(tree: TinyTree) -> None:
    found = run(tree, "--json")
    assert found["path"] == str(tree.cache) and found["why"] == f"BW_CACHE_DIR={tree.cache}"
    assert found["entries"] == found["locks"] == [] and found["size_bytes"] == 0 and found["refused"] is None
    assert not tree.cache.exists()
    home = tree.root / "home"
    assert run(tree, "--json", BW_CACHE_DIR=None, XDG_CACHE_HOME=str(home))["why"] == "by XDG_CACHE_HOME"
    temporary = tree.root / "temporary"
    temporary.mkdir()
    changes = {"BW_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": "/dev/null", "TMPDIR": str(temporary)}
    found = run(tree, "--json", **changes)
    assert found["why"] == "in the temporary folder, because /dev/null/.cache/bucketwheel cannot be written"


def test_what_is_listed(tree: TinyTree) -> None:
    tree.run()
    tree.write("base/answer.h", "#define ANSWER 43\n")
    tree.run()
    old, new = sorted(tree.entries(), key=lambda path: (path / "_cpu.json").stat().st_mtime)
    others = [new.name.replace("cpython-3", "cpython-9"), new.name.replace("-0.1.0-", "-0.0.1-"), f"{new.name[:-2]}ff"]
    for name in others:
        shutil.copytree(new, tree.cache / name)
    (tree.cache / others[2] / "_cpu.json").write_text("{")
    os.utime(old / "_cpu.json", (1e9, 1e9))
    found = run(tree, "--json")
    entries = {entry["name"]: entry for entry in found["entries"]}
    assert sorted(entries) == sorted([old.name, new.name, *others])
    assert [entry["name"] for entry in found["entries"] if entry["is_in_use"]] == [new.name]
    assert entries[new.name]["fits"] == "this Python" and entries[new.name]["module"] == "_cpu"
    assert entries[new.name]["key"] == new.name[-16:] and entries[new.name]["size_bytes"] == bytes_below(new)
    assert entries[old.name]["fits"] == "this Python; other sources, flags or compiler"
    assert entries[old.name]["last_use"].startswith("2001-09-0") and found["entries"][-1]["name"] == old.name
    assert entries[others[0]]["fits"].startswith("another Python, cpython-9")
    assert entries[others[1]]["fits"] == "another bucketwheel, 0.0.1"
    assert entries[others[2]]["fits"].startswith("damaged")
    assert found["objects"]["number"] == 3 and found["size_bytes"] == bytes_below(tree.cache)
    (old / "_cpu.json").chmod(0o666)
    assert "others may write into" in {e["name"]: e for e in run(tree, "--json")["entries"]}[old.name]["fits"]
    text = run(tree)
    assert f"cache {tree.cache} (BW_CACHE_DIR={tree.cache})" in text and f"* _cpu  {new.name[-16:]}" in text
    assert "5 entries, 3 objects" in text


def test_a_cache_that_is_refused(tree: TinyTree) -> None:
    objects = tree.cache / "objects"
    objects.mkdir(parents=True)
    (objects / f"{'0' * 64}.o").write_bytes(b"12345")
    tree.cache.chmod(0o777)
    text = run(tree, status=1)
    assert f"not used: others may write into {tree.cache} (mode 0777)" in text and "1 objects" in text
    text = run(tree, "--clear", status=1)
    assert "is not used, because others may write" in text and "chmod" in text
    assert len(list(objects.iterdir())) == 1


# ---- clearing --------------------------------------------------------------------------------------------------------


def test_clear_removes_what_is_ours_and_says_so(tree: TinyTree) -> None:
    tree.run()
    (entry,) = tree.entries()
    dead = tree.cache / "tmp" / f"{socket.gethostname()}-1-0123456789ab"
    dead.mkdir()
    (dead / "alive").write_bytes(b"12345")
    size_bytes = bytes_below(tree.cache)
    mine = [tree.cache / name for name in ("notes.txt", "objects/notes.txt", "tmp/notes", "bucketwheel_notes")]
    for path in mine:
        path.write_text("mine")
    elsewhere = tree.root / "elsewhere"
    shutil.copytree(entry, elsewhere)
    (tree.cache / f"{entry.name[:-2]}00").symlink_to(elsewhere)  # what a link leads to is not ours
    found = run(tree, "--clear", "--json")
    cleared = found["cleared"]
    assert cleared["kept"] == cleared["failed"] == []
    assert cleared["size_bytes"] == sum(one["size_bytes"] for one in cleared["removed"])
    assert size_bytes <= cleared["size_bytes"] <= size_bytes + 4096  # the link
    assert {entry.name, dead.name} <= {one["name"] for one in cleared["removed"]}
    assert found["entries"] == [] and found["size_bytes"] == 0
    assert sorted(path for path in tree.cache.rglob("*") if not path.is_dir()) == sorted(mine)
    assert (elsewhere / "_cpu.json").exists()
    assert "removed 0 things, 0 bytes" in run(tree, "--clear")
    assert tree.run()[0] == "42"


def test_clear_leaves_a_living_builder_alone(tree: TinyTree) -> None:
    tree.run()
    (old,) = tree.entries()
    tree.write("base/answer.h", "#define ANSWER 43\n")
    tree.hold_compiler()
    builder = tree.start()
    wait_until(lambda: tree.compiled().count("bindings/module.cpp") == 2, "the second build")
    found = run(tree, "--json")
    (held,) = [lock for lock in found["locks"] if lock["is_held"]]
    assert held["holder"].startswith(f"process {builder.pid} on ") and held["name"] != old.name
    assert [one["is_alive"] for one in found["builders"]] == [True]
    text = run(tree, "--clear")
    assert f"removed {old.name}" in text and f"kept {held['name']}: held by process {builder.pid}" in text
    assert "kept objects: builders link them where they lie" in text and f"building {held['name']}" in text
    assert not old.exists() and len(list((tree.cache / "objects").iterdir())) == 2
    tree.release_compiler()
    out, err = builder.communicate(timeout=60)
    assert out == "43\n" and builder.returncode == 0, err
    assert len(tree.entries()) == 1


def test_builders_of_other_hosts_and_without_locks_may_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "bucketwheel_cpu-0.1.0-cpython-311-x86_64-linux-gnu-0123456789abcdef"
    for path in (tmp_path / "tmp" / "elsewhere-7-0123456789ab", tmp_path / "locks"):
        path.mkdir(parents=True)
    (tmp_path / "locks" / name).write_text("process 7 on elsewhere")
    (tmp_path / "locks" / f"{name[:-2]}00").write_text("")

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache_command.fcntl, "flock", no_locks)
    cleared = cache_command.clear(tmp_path)
    assert [one["name"] for one in cleared["kept"]] == [name, "elsewhere-7-0123456789ab"]
    assert "process 7 on elsewhere, if it lives" in cleared["kept"][0]["why"]
    assert [one["name"] for one in cleared["removed"]] == [f"{name[:-2]}00"]


def test_an_entry_is_kept_whose_lock_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "bucketwheel_cpu-0.1.0-cpython-311-x86_64-linux-gnu-0123456789abcdef"
    for folder in (name, "locks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "locks" / name).write_text("process 7 on elsewhere")
    refuse = mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(cache_command, "open", refuse, raising=False)
    cleared = cache_command.clear(tmp_path)
    why = "held by somebody, perhaps: its lock cannot be opened (Permission denied)"
    assert cleared["kept"] == [{"name": name, "why": why}] * 2  # the entry and its lock
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("may_write", [True, False])
def test_an_entry_is_free_where_its_lock_is(may_write: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, which locks only what may be written; and where another user's lock may only be read."""
    names = ["bucketwheel_cpu-0.1.0-cpython-311-x86_64-linux-gnu-" + 16 * digit for digit in "01"]
    (tmp_path / "locks").mkdir()
    for name in names:
        (tmp_path / "locks" / name).write_text("process 7 on elsewhere")
    lock = fcntl.flock

    def lock_as_nfs(file: IO[bytes], operation: int) -> None:
        if may_write and not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(file, operation)

    def open_as_another(path: Path, mode: str) -> IO[bytes]:
        if not may_write and "+" in mode:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, mode)

    monkeypatch.setattr(cache_command, "open", open_as_another, raising=False)
    with open(tmp_path / "locks" / names[0], "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(cache_command.fcntl, "flock", lock_as_nfs)
        cleared = cache_command.clear(tmp_path)
    assert [(one["name"], one["why"]) for one in cleared["kept"]] == [(names[0], "held by process 7 on elsewhere")]
    assert [one["name"] for one in cleared["removed"]] == [names[1]]


def test_what_cannot_be_removed_is_told(tree: TinyTree, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    entry = tree.cache / "bucketwheel_cpu-0.1.0-cpython-311-x86_64-linux-gnu-0123456789abcdef"
    entry.mkdir(parents=True)
    monkeypatch.setenv("BW_CACHE_DIR", str(tree.cache))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cache_command.shutil, "rmtree", refuse)
    assert __main__.main(["cache", "--clear"]) == 1
    out = capsys.readouterr().out
    assert f"could not remove {entry.name}: [Errno 13] Permission denied" in out and entry.exists()
