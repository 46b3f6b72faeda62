"""``bucketwheel cache``: what it lists, what it removes and what it leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bucketwheel.native import cache
from tests.support.requirements import need_root
from tests.unit.tiny_tree import WAIT, TinyTree

OLD, OF_CUDA, LINK = (
    f"{name}-cpython-39-x86_64-linux-gnu-0123456789abcdef" for name in ("cpu-0", "cuda-0", "cpu-link")
)
IDLE = "cpu-0123456789ab-0123456789ab"
NOT_OURS = {LINK, "photos", "cpu-notes"}  # left alone


@pytest.fixture
def tree(tmp_path: Path) -> TinyTree:
    """With its module and build folder, others, links out of the cache, and what no build has made."""
    tree = TinyTree(tmp_path)
    tree.add_cuda()
    tree.run()
    elsewhere = tmp_path / "elsewhere"
    for folder in (*(tree.cache / name for name in (OLD, OF_CUDA, f"builds/{IDLE}", "photos", "cpu-notes")), elsewhere):
        folder.mkdir()
        (folder / "file").write_bytes(bytes(2**20))
    for link in (LINK, f"{OLD}/link", f"builds/{IDLE}/link"):
        (tree.cache / link).symlink_to(elsewhere)
    return tree


def run(tree: TinyTree, *words: str, status: int = 0, **changes: str | None) -> str:
    code = f"import sys; sys.modules['torch'] = None; from bucketwheel.__main__ import main; sys.exit(main({words!r}))"
    process = tree.start(code, **{"NVCC": "no-such-nvcc", **changes})
    out, err = process.communicate(timeout=100)
    assert process.returncode == status and bool(err) == bool(status), (out, err)
    return err if status else out


def left(tree: TinyTree) -> set[str]:
    """All that is in the cache and in builds/, but the locks; checks that nothing is lost behind a link."""
    assert (tree.root / "elsewhere" / "file").exists()
    found = [*tree.cache.iterdir(), *tree.cache.glob("builds/*")]
    return {path.name for path in found if path.suffix != ".lock"} - {"builds"}


def own(tree: TinyTree) -> tuple[str, str]:
    """The module and the build folder that the tree has made."""
    (module,) = {path.name for path in tree.entries()} - {OLD, LINK, "cpu-notes"}
    (build,) = {path.name for path in tree.cache.glob("builds/*-*[!k]")} - {IDLE}
    return module, build


def test_a_list(tree: TinyTree) -> None:
    module, build = own(tree)
    found = json.loads(run(tree, "cache", "--json"))
    states = {Path(item["path"]).name: item["state"] for item in found["items"]}
    assert states == {
        **{module: "used here", OLD: "not used here", OF_CUDA: "not known"},
        **dict.fromkeys((build, IDLE), "build folder"),
    }
    (unknown,) = found["unknown"]
    assert "CUDA module: NVCC='no-such-nvcc' is not a program" in unknown and found["folder"] == str(tree.cache)
    (old,) = (item for item in found["items"] if Path(item["path"]).name == OLD)
    assert 2**20 < old["size_bytes"] < 2**20 + 16_384 and old["written_at"] > 1.6e9
    text = run(tree, "cache")
    assert f"\n{tree.cache}: modules: 3, build folders: 2, " in text and unknown in text
    assert any(line.startswith("used here") and line.endswith(module) for line in text.splitlines())
    tree.write("base/answer.h", "#define ANSWER 43\n")
    assert "used here" not in run(tree, "cache").partition(str(tree.cache))[0].replace("not used here", "")
    assert "none: modules: 0, build folders: 0, 0.0 MiB" in run(tree, "cache", BW_CACHE_DIR=str(tree.root / "none"))


def test_clear_keeps_what_is_used_or_may_be(tree: TinyTree) -> None:
    module, _ = own(tree)
    assert "removed: modules: 1, build folders: 2, " in run(tree, "cache", "clear")
    assert left(tree) == {module, OF_CUDA, *NOT_OURS}
    assert tree.run() == ("42", "")
    tree.write("base/answer.h", "#define ANSWER 43\n")
    assert tree.run()[0] == "43"


def test_clear_all(tree: TinyTree) -> None:
    said = run(tree, "cache", "clear", "--all")
    assert "removed: modules: 3, build folders: 2, " in said and "kept: modules: 0, build folders: 0, 0.0 MiB" in said
    assert left(tree) == NOT_OURS
    assert "removed: modules: 0" in run(tree, "cache", "clear", "--all")
    assert tree.run()[0] == "42"


def test_a_build_that_runs_keeps_its_folder(tree: TinyTree) -> None:
    """Also the folder that somebody has waited for while it was removed."""
    _, build = own(tree)
    with cache.try_take(tree.cache / "builds" / build) as is_free:
        assert is_free
        said = run(tree, "cache", "clear", "--all")
        assert f"{build} is locked by process " in said and left(tree) == {build, *NOT_OURS}
        waiter = tree.start(WAIT)
        assert waiter.stderr is not None and "being built by process" in waiter.stderr.readline()
        (tree.cache / "builds" / build).rename(tree.root / "removed")
    assert waiter.communicate(timeout=60)[0] == "42\n"


def test_a_folder_behind_a_link(tree: TinyTree) -> None:
    """The cache may be a link; builds/ in it may not."""
    link = tree.root / "link"
    link.symlink_to(tree.cache)
    (tree.cache / "builds").rename(tree.root / "builds")
    (tree.cache / "builds").symlink_to(tree.root / "builds")
    module, build = own(tree)
    assert "removed: modules: 2, build folders: 0, " in run(
        tree, "cache", "clear", BW_CACHE_DIR=str(link), NVCC=str(tree.nvcc)
    )
    assert {build, IDLE, module} <= left(tree)


def test_a_cache_that_is_not_ours(tree: TinyTree) -> None:
    tree.cache.chmod(0o777)
    assert "other users can write to it" in run(tree, "cache", "clear", "--all", status=1)
    tree.cache.chmod(0o700)
    need_root()
    before = left(tree)
    os.chown(
        tree.root / "python" / "bucketwheel" / "native" / "cache.py", 12345, 12345
    )  # whose package it is, is trusted
    os.chown(tree.cache, 12345, 12345)
    assert "used here" in run(tree, "cache")
    said = run(tree, "cache", "clear", "--all", status=1)
    assert "only user 12345 may remove modules" in said and "BW_CACHE_DIR=..." in said
    assert left(tree) == before
