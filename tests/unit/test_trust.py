"""Whose files are loaded as code: [Note: trusted files] in `bucketwheel.native.trust`. With real owners and modes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bucketwheel.native import trust
from tests.support.requirements import need_root
from tests.unit.tiny_tree import LOAD, TinyTree

STRANGER = 12345


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> TinyTree:
    tree = TinyTree(tmp_path_factory.mktemp("built"))
    tree.run()
    return tree


def give_to_stranger(path: Path) -> None:
    need_root()
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def make(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    return path


# ---- one path --------------------------------------------------------------------------------------------------------


def test_what_is_ours_alone_is_trusted(tmp_path: Path) -> None:
    cache = make(tmp_path / "cache")
    assert trust.why_not(cache) is None
    assert trust.why_not(cache / "to" / "be" / "made") is None
    (cache / "link").symlink_to(tmp_path)
    assert trust.why_not(cache / "link" / "cache" / ".." / "cache") is None


@pytest.mark.parametrize(
    ("mode", "who"), [(0o775, "its group"), (0o777, "others"), (0o757, "others"), (0o1777, "others")]
)
def test_the_folder_itself(tmp_path: Path, mode: int, who: str) -> None:
    """A sticky one, too: a stranger's entry could have any name in it."""
    cache = make(tmp_path / "cache", mode)
    assert trust.why_not(cache) == f"{who} may write into {cache} (mode {mode:04o})"


def test_a_folder_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = make(tmp_path / "above")
    cache = make(above / "home" / "cache")
    for mode, is_trusted in [(0o777, False), (0o1777, True), (0o757, False), (0o755, True)]:
        above.chmod(mode)
        assert (trust.why_not(cache) is None) == is_trusted, oct(mode)
    above.chmod(0o775)
    monkeypatch.setattr(trust, "_is_private", lambda gid: gid != above.stat().st_gid)
    assert trust.why_not(cache) == f"its group may write into {above} (mode 0775)"
    monkeypatch.setattr(trust, "_is_private", lambda gid: gid == above.stat().st_gid)
    assert trust.why_not(cache) is None


def test_a_private_group(monkeypatch: pytest.MonkeyPatch) -> None:
    user = trust.pwd.struct_passwd(("ann", "x", os.geteuid(), 70, "", "/", "/bin/sh"))
    groups = {70: ("ann", []), 71: ("ann", []), 72: ("staff", ["ann"])}
    everyone = [user]
    monkeypatch.setattr(trust, "_owners_of_group", trust._owners_of_group.__wrapped__)
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(trust.pwd, "getpwall", lambda: everyone)
    monkeypatch.setattr(
        trust.grp, "getgrgid", lambda gid: trust.grp.struct_group((groups[gid][0], "x", gid, groups[gid][1]))
    )
    assert [gid for gid in (70, 71, 72, 73) if trust._is_private(gid)] == [70]
    groups[70] = ("ann", ["ann"])
    assert trust._is_private(70)
    groups[70] = ("ann", ["ann", "bob"])
    assert not trust._is_private(70)
    groups[70] = ("ann", [])
    for name, uid, gid, is_private in [
        ("bob", user.pw_uid + 1, 71, True),
        ("also-ann", user.pw_uid, 70, True),
        ("bob", user.pw_uid + 1, 70, False),
    ]:
        everyone[1:] = [trust.pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh"))]
        assert trust._is_private(70) == is_private, name


def test_the_users_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(trust.pwd, "getpwall", lambda: asked.append(1) or [])
    trust._owners_of_group.cache_clear()
    assert [trust._owners_of_group(70) for _ in range(3)] == [frozenset()] * 3
    trust._owners_of_group.cache_clear()
    assert asked == [1]


def test_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(tmp_path / "above" / "cache")
    for path in (cache, cache.parent):
        give_to_stranger(path)
        assert trust.why_not(cache) == f"{path} belongs to another user, {STRANGER}"
        os.chown(path, 0, 0)
    assert trust.why_not(cache) is None
    give_to_stranger(cache)
    monkeypatch.setattr(trust, "trusted_owners", lambda: {0, STRANGER})
    assert trust.why_not(cache) is None


def test_whoever_owns_the_package_is_trusted() -> None:
    assert trust.trusted_owners() == {0, os.geteuid(), os.stat(trust.__file__).st_uid}


def test_links_lead_no_way_around(tmp_path: Path) -> None:
    shared = make(tmp_path / "shared", 0o777)
    make(shared / "cache")
    (tmp_path / "link").symlink_to("shared/cache")
    assert trust.why_not(tmp_path / "link") == f"others may write into {shared} (mode 0777)"
    shared.chmod(0o1777)
    assert trust.why_not(tmp_path / "link") is None
    # a link in a folder where others may replace it, to one where they may not
    closed = make(tmp_path / "closed" / "cache")
    (shared / "out").symlink_to(closed)
    shared.chmod(0o777)
    assert "shared" in (trust.why_not(shared / "out") or "")
    (tmp_path / "round").symlink_to("round")
    assert "more than 40 symbolic links" in (trust.why_not(tmp_path / "round") or "")


def test_a_strangers_link(tmp_path: Path) -> None:
    shared = make(tmp_path / "shared", 0o1777)
    closed = make(tmp_path / "closed")
    (shared / "out").symlink_to(closed)
    assert trust.why_not(shared / "out") is None
    give_to_stranger(shared / "out")
    assert trust.why_not(shared / "out") == f"{shared / 'out'} belongs to another user, {STRANGER}"


def test_the_overflow_user_owns_folders_above_in_a_user_namespace_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(tmp_path / "above" / "cache")
    give_to_stranger(cache.parent)
    monkeypatch.setattr(trust, "_is_unmapped", lambda uid: uid == STRANGER)
    assert trust.why_not(cache) is None
    give_to_stranger(cache)
    assert trust.why_not(cache) == f"{cache} belongs to another user, {STRANGER}"


@pytest.mark.parametrize(
    ("uid_map", "uid", "is_unmapped"),
    [("0 0 4294967295\n", 65534, False), ("1000 1000 1\n", 65534, True), ("1000 1000 1\n", 0, False)],
)
def test_user_namespaces(monkeypatch: pytest.MonkeyPatch, uid_map: str, uid: int, is_unmapped: bool) -> None:
    texts = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": uid_map}
    monkeypatch.setattr(trust.Path, "read_text", lambda path: texts[str(path)])
    assert trust._is_unmapped(uid) == is_unmapped


# ---- what is refused -------------------------------------------------------------------------------------------------


@contextmanager
def changed(path: Path, mode: int | None = None, owner: int | None = None) -> Iterator[None]:
    before = path.stat()
    if mode is not None:
        path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)
    yield
    os.chown(path, before.st_uid, before.st_gid)
    path.chmod(before.st_mode)


def expect_refused(message: str, path: Path) -> None:
    assert f"{path} is not used, because" in message, message
    assert "chmod -R go-w" in message and "BW_CACHE_DIR=" in message and "only read" in message


@pytest.mark.parametrize("what", ["cache", "entry", "module", "manifest"])
def test_a_cache_that_others_may_write_to(built: TinyTree, what: str) -> None:
    (entry,) = built.entries()
    paths = {"cache": built.cache, "entry": entry, "module": next(entry.glob("*.so")), "manifest": entry / "_cpu.json"}
    path = paths[what]
    with changed(path, mode=0o775 if path.is_dir() else 0o664):
        expect_refused(built.error(), path)
    if os.geteuid() == 0:
        with changed(path, owner=STRANGER):
            expect_refused(built.error(), path)


def test_a_default_cache_that_others_may_write_to(built: TinyTree) -> None:
    home = make(built.root / "home")
    folder = make(home / "bucketwheel", 0o777)
    expect_refused(built.error(BW_CACHE_DIR=None, XDG_CACHE_HOME=str(home)), folder)


def test_a_native_dir_that_others_may_write_to(built: TinyTree) -> None:
    (entry,) = built.entries()
    (module,) = entry.glob("*.so")
    for path, mode in ((entry, 0o777), (module, 0o666), (built.cache, 0o777)):
        with changed(path, mode):
            assert f"others may write into {path}" in built.error(BW_NATIVE_DIR=str(entry))
    assert built.run(LOAD, BW_NATIVE_DIR=str(entry)) == ("42", "")


@pytest.mark.parametrize("folder", ["objects", "tmp", "locks"])
def test_a_folder_that_builders_use(tmp_path: Path, folder: str) -> None:
    tree = TinyTree(tmp_path)
    make(tree.cache / folder, 0o777)
    expect_refused(tree.error(), tree.cache / folder)
    assert tree.compiled() == []


def test_a_strangers_object_is_compiled_again(built: TinyTree) -> None:
    (entry,) = built.entries()
    shutil.rmtree(entry)
    objects = sorted((built.cache / "objects").iterdir())
    objects[0].chmod(0o666)
    built.run()
    assert len(built.compiled()) == 3 + 2  # it and the link
    assert objects[0].stat().st_mode & 0o022 == 0
