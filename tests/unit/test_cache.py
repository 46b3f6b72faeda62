"""The folder of built modules where it is on other file systems, of other Pythons, damaged, or only to be read."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from bucketwheel.native import cache as _cache
from bucketwheel.native import compile
from bucketwheel.native.toolchain import CPU
from bucketwheel.tools import cache_command
from tests.support.requirements import need_mounts, need_root, slow_case
from tests.unit.test_build import wait_until
from tests.unit.tiny_tree import LOAD, TinyTree

STRANGER = 12345  # no account of this machine, and not the user as whom unmapped ones appear


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[TinyTree]:
    tree = TinyTree(tmp_path)
    yield tree
    tree.release_compiler()  # whatever has failed: nothing may hang on


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> TinyTree:
    """For tests that leave its cache as it is."""
    tree = TinyTree(tmp_path_factory.mktemp("built"))
    tree.run()
    return tree


def failing(function: str, error: str, condition: str = "True") -> str:
    """Code that makes ``function`` (module.name) fail with errno ``error`` where ``condition`` holds of its ``args``."""
    module, name = function.split(".")
    return (
        f"import errno, os, stat, {module}\n"
        f"real = {function}\n"
        "def fails(*args, **named):\n"
        f"    if {condition}: raise OSError(errno.{error}, os.strerror(errno.{error}))\n"
        "    return real(*args, **named)\n"
        f"{module}.{name} = fails\n"
    )


# ---- network file systems --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["ENOLCK", slow_case("EOPNOTSUPP")])
def test_without_locks_two_builders_do_no_harm(tree: TinyTree, error: str) -> None:
    """Both build; one publishes first, the other finds its entry in the way and takes it."""
    tree.hold_compiler()
    builders = [tree.start(failing("fcntl.flock", error) + LOAD) for _ in range(2)]
    wait_until(lambda: tree.compiled().count("bindings/module.cpp") == 2, "both compile")
    tree.release_compiler()
    for builder in builders:
        out, err = builder.communicate(timeout=60)
        assert out == "42\n" and "built in" in err, err
    assert len(tree.entries()) == 1 and list((tree.cache / "tmp").iterdir()) == []
    assert tree.run(failing("fcntl.flock", error) + LOAD) == ("42", "")


def test_a_builder_that_dies_cuts_no_object_of_another_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host's, say, whose process has the same number: it begins once the first one has copied, and dies."""
    made, place = tmp_path / "made.o", tmp_path / "objects" / f"{'0' * 64}.o"
    made.write_bytes(b"x" * 5000)

    def die(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"x" * 1000)
        raise KeyboardInterrupt

    def meanwhile(path: Path) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(compile.shutil, "copyfile", die)
        with pytest.raises(KeyboardInterrupt):
            compile.store(made, place)

    monkeypatch.setattr(compile._trust, "close_to_others", meanwhile)
    compile.store(made, place)
    assert place.read_bytes() == made.read_bytes()
    (left,) = [path for path in place.parent.iterdir() if path != place]
    assert cache_command._OBJECT.fullmatch(left.name), "what the dead one leaves is no object to `--clear`"


def test_a_stale_handle_costs_another_look(built: TinyTree) -> None:
    stale = "from pathlib import Path\nreal = Path.read_bytes\ncalls = []\n"
    stale += "def read(path):\n    import errno\n    if path.suffix == '.so' and not calls:\n"
    stale += "        calls.append(path); raise OSError(errno.ESTALE, 'Stale file handle')\n    return real(path)\n"
    stale += "Path.read_bytes = read\n"
    assert built.run(stale + LOAD + "; assert calls") == ("42", "")
    assert len(built.compiled()) == 3


def test_a_file_system_that_cannot_sync_folders(tree: TinyTree) -> None:
    is_folder = "stat.S_ISDIR(os.fstat(args[0]).st_mode)"
    out, err = tree.run(failing("os.fsync", "EINVAL", is_folder) + LOAD)
    assert out == "42" and "built in" in err
    assert tree.run() == ("42", "")


def test_a_full_disk_is_told(tree: TinyTree) -> None:
    message = tree.error(failing("os.fsync", "ENOSPC", "'tmp' in os.readlink(f'/proc/self/fd/{args[0]}')") + LOAD)
    assert f"the cache folder {tree.cache} cannot be used" in message and "No space left" in message
    assert tree.entries() == [] and list((tree.cache / "tmp").iterdir()) == []


def test_a_builders_folder_of_another_host_stays_until_it_is_old(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    for name in ("elsewhere-1-0123456789ab", "elsewhere-2-0123456789ab", ".elsewhere-3-0123456789ab"):
        (tmp / name).mkdir(parents=True)
    long_ago = time.time() - 61 * 86400
    for name in ("elsewhere-2-0123456789ab", ".elsewhere-3-0123456789ab"):
        os.utime(tmp / name, (long_ago, long_ago))
    _cache.prune(tmp_path)
    assert [path.name for path in tmp.iterdir()] == ["elsewhere-1-0123456789ab"]


def run_read_only(tree: TinyTree) -> subprocess.CompletedProcess[str]:
    """Where the cache is on a file system that is mounted read-only, for the process alone."""
    cache = shlex.quote(str(tree.cache))
    script = f"mount --bind {cache} {cache} && mount -o remount,bind,ro {cache} && exec {shlex.quote(sys.executable)} "
    command = ["unshare", "--mount", "sh", "-c", script + f"-c {shlex.quote(LOAD)}"]
    environment = tree.environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_read_only_file_system_serves_what_it_has(tree: TinyTree) -> None:
    need_mounts()
    tree.run()
    done = run_read_only(tree)
    assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr
    tree.write("base/answer.h", "#define ANSWER 43\n")
    done = run_read_only(tree)
    assert done.returncode == 1 and "Read-only file system" in done.stderr, done.stderr
    assert f"the cache folder {tree.cache} cannot be used" in done.stderr and "BW_CACHE_DIR=" in done.stderr
    assert len(tree.compiled()) == 3


# ---- what is not the cache's fault -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["EACCES", "ENOENT"])
def test_an_object_of_another_user_is_linked_and_a_removed_one_compiled(tree: TinyTree, error: str) -> None:
    tree.run()
    tree.write("bindings/module.cpp", (tree.csrc / "bindings/module.cpp").read_text() + "\n")
    is_object = "str(args[0]).endswith('.o')" + (" and (os.unlink(args[0]) or True)" if error == "ENOENT" else "")
    assert tree.run(failing("os.utime", error, is_object) + LOAD)[0] == "42"
    compiled = (
        ["bindings/module.cpp", "link"] if error == "EACCES" else ["base/second.cpp", "bindings/module.cpp", "link"]
    )
    assert sorted(tree.compiled()[3:]) == compiled


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.executable = ''\n", "the process that imported it could not be started: [Errno 13]"),
        (failing("subprocess.Popen", "ENOMEM", "'ninja' in args[0][0]"), "ninja cannot be started: [Errno 12]"),
    ],
    ids=["embedded", "no memory"],
)
def test_a_process_that_does_not_start_is_not_the_caches_fault(tree: TinyTree, code: str, said: str) -> None:
    message = tree.error(code + LOAD)
    assert said in message and "the cache folder" not in message and "BW_NATIVE_DIR=" in message
    assert list((tree.cache / "tmp").iterdir()) == [] and tree.run()[0] == "42"


def test_a_log_that_cannot_be_written_is_named(tree: TinyTree) -> None:
    wrong = "from pathlib import Path\nreal = Path.write_text\ndef write(path, *text):\n    import errno\n"
    wrong += (
        "    if path.suffix == '.log': raise OSError(errno.ENOSPC, 'No space left')\n    return real(path, *text)\n"
    )
    message = tree.error(wrong + "Path.write_text = write\n" + LOAD)
    assert (
        f"{tree.cache / 'logs'} cannot be written: [Errno 28] No space left" in message and "BW_CACHE_DIR=" in message
    )


# ---- other Pythons, damaged manifests --------------------------------------------------------------------------------


def test_an_entry_of_another_python_is_not_looked_at(built: TinyTree) -> None:
    (entry,) = built.entries()
    other = entry.with_name(entry.name.replace("cpython-3", "cpython-9"))
    assert other != entry
    entry.rename(other)
    assert f"the cache has no {entry}" in built.error(BW_JIT="0")
    other.rename(entry)
    assert built.run(BW_JIT="0") == ("42", "")


GARBAGE = [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe\x00", b'{"key": 7}', b"[" * 200_000]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda text: repr(text[:12]))
def test_what_is_no_manifest_says_nothing(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / CPU.file).write_bytes(b"module")
    (tmp_path / CPU.manifest).write_bytes(garbage)
    assert _cache.checked(tmp_path, CPU, {"key": "7"}) is None
    assert _cache.checked(tmp_path, CPU, {}) is None


def test_an_entry_whose_manifest_is_no_object_is_not_used(built: TinyTree) -> None:
    """test_build.py shows that damaged entries are built again."""
    (entry,) = built.entries()
    text = (entry / CPU.manifest).read_text()
    assert json.loads(text)["soabi"] in entry.name
    (entry / CPU.manifest).write_text("[]")
    assert f"the cache has no {entry}" in built.error(BW_JIT="0")
    (entry / CPU.manifest).write_text(text)
    assert built.run(BW_JIT="0") == ("42", "")


def test_a_folder_for_another_python_is_told(tree: TinyTree) -> None:
    folder = tree.root / "elsewhere"
    folder.mkdir()
    (folder / "_cpu.cpython-39-x86_64-linux-gnu.so").touch()
    message = tree.error(BW_NATIVE_DIR=str(folder))
    assert "it has _cpu.cpython-39-x86_64-linux-gnu.so, for another Python" in message
    (folder / "_cpu.so").write_bytes(b"\x7fELF, of another machine")
    message = tree.error(BW_NATIVE_DIR=str(folder))
    assert "_cpu.so does not load" in message and "unset BW_NATIVE_DIR" in message and "remove" not in message


def test_a_builders_folder_goes_once_its_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps a name for an open file that is removed, and so the folder that it is in."""
    (tmp_path / "tmp").mkdir()
    still_open: list[str] = []

    def look(folder: Path, **_: object) -> None:
        files = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        still_open.extend(file for file in files if file.startswith(str(folder)))
        still_open.append("looked")

    monkeypatch.setattr(_cache.shutil, "rmtree", look)
    with _cache.private_folder(tmp_path) as folder:
        assert (folder / "alive").exists()
    assert still_open == ["looked"]


def test_what_a_dead_builder_left_goes_on_nfs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no lock of a file's only holder for one that is opened for reading."""
    left = tmp_path / "tmp" / f"{socket.gethostname()}-1-dead"
    left.mkdir(parents=True)
    (left / "alive").touch()
    lock = fcntl.flock

    def lock_as_nfs(file: IO[bytes], operation: int) -> None:
        if operation & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(file, operation)

    monkeypatch.setattr(_cache.fcntl, "flock", lock_as_nfs)
    _cache.prune(tmp_path)
    assert not left.exists()


# ---- written by one, read by others ----------------------------------------------------------------------------------


@pytest.fixture
def open_tree() -> Iterator[TinyTree]:
    """Where another user can read it: pytest's folders are closed."""
    need_root()
    with tempfile.TemporaryDirectory(prefix="bucketwheel-") as name:
        Path(name).chmod(0o755)
        yield TinyTree(Path(name))


# Python itself may be where that user cannot read: everything is imported before.
AS_STRANGER = f"""
import os
from bucketwheel.native import modules
from bucketwheel.native import toolchain
modules.find(toolchain.CPU)
includes = toolchain._python_includes()
toolchain._python_includes = lambda: includes
os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})
"""


def test_a_cache_of_root_serves_other_users(open_tree: TinyTree) -> None:
    open_tree.run()
    (entry,) = open_tree.entries()
    before = (entry / CPU.manifest).stat().st_mtime_ns
    assert open_tree.run(AS_STRANGER + LOAD) == ("42", "")
    assert (entry / CPU.manifest).stat().st_mtime_ns == before
    shutil.rmtree(entry)
    message = open_tree.error(AS_STRANGER + LOAD)
    assert f"the cache folder {open_tree.cache} cannot be used" in message and "Permission denied" in message
    assert "BW_CACHE_DIR=" in message


def test_by_any_umask_only_the_owner_can_write(tree: TinyTree) -> None:
    """Into what is made, and into the missing folders above."""
    above = tree.root / "a" / "b"
    tree.cache = above / "cache"
    assert tree.run("import os; os.umask(0)\n" + LOAD)[0] == "42"
    assert [oct(path.stat().st_mode & 0o777) for path in (above.parent, above, tree.cache)] == ["0o755"] * 3
    found = subprocess.run(
        ["find", tree.cache, "-perm", "/022"], capture_output=True, text=True, timeout=60, check=True
    )
    assert [line for line in found.stdout.splitlines() if "/logs/" not in line] == []
    assert tree.run() == ("42", "")


def test_last_use_is_remembered(built: TinyTree) -> None:
    (entry,) = built.entries()
    os.utime(entry / CPU.manifest, (1e9, 1e9))
    built.run()
    assert (entry / CPU.manifest).stat().st_mtime > 1.5e9
