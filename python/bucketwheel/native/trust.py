"""Whose files may be loaded as code: those that nobody else could have put there, or changed.

[Note: trusted files]
A native module runs with all rights of the process that loads it, and so does what was compiled from an object file.
Trusted are root, this user, and the owner of this package, whose code runs already. A cache, its entries and the files
in them belong to one of these and can be written by their owner only. Of the folders above the cache, which somebody
might rename or replace, the same is asked, except that

- a sticky one (the temporary folder) may be writable by all: nobody renames others' files in it;
- one may be writable by a private group, which has its user's name and no other members, nor is it the group of another
  user that the system lists: such users have umask 002;
- in a user namespace (Apptainer, rootless containers) one may belong to the overflow user, as whom root's appear.

Symbolic links are followed, and the folders above them and above their targets are asked too. There is no exception for
sites that share a group's folder on purpose: who may write there can run code as everybody who uses it. They share what
one of the trusted owns and others only read, by ``BW_CACHE_DIR`` or ``BW_NATIVE_DIR``.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path

from bucketwheel.errors import BuildError
from bucketwheel.native.toolchain import CPU, Module, explain

__all__ = ["close_to_others", "expect_trusted", "make_folder", "refusal", "trusted_owners", "why_not"]

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40


def expect_trusted(path: Path, *, module: Module = CPU) -> None:
    """Raises `BuildError` where ``path``, if it is there, or a folder above it is not trusted."""
    if (why := why_not(path)) is None:
        return
    raise refusal(path, why, module=module)


def refusal(path: Path, why: str, *, module: Module = CPU) -> BuildError:
    return explain(
        f"{path} is not used, because {why}: whoever writes there could run code in this process",
        module=module,
        remedies=[
            "look at what is in it; if it is yours, close it to others: `chmod -R go-w FOLDER`, or remove it",
            "name a folder of your own: BW_CACHE_DIR=...",
            "to share modules, let root or whoever installed bucketwheel own them, and the others only read",
        ],
    )


def why_not(path: Path) -> str | None:
    """Why ``path`` is not trusted, or None. See [Note: trusted files]; what is not there, somebody has yet to make."""
    here, rest, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while rest:
        name = rest.pop()
        if name == "..":
            here = here.parent
            continue
        one = here / name
        try:
            status = one.lstat()
            target = os.readlink(one) if stat.S_ISLNK(status.st_mode) else None
        except OSError:
            return None
        if (why := _why_not_one(one, status, is_above=bool(rest))) is not None:
            return why
        if target is None:
            here = one
            continue
        links += 1
        if links > _MAX_LINKS:
            return f"{path} leads over more than {_MAX_LINKS} symbolic links"
        here = Path("/") if os.path.isabs(target) else here
        rest += reversed([part for part in Path(target).parts if part != "/"])
    return None


def _why_not_one(path: Path, status: os.stat_result, *, is_above: bool) -> str | None:
    if status.st_uid not in trusted_owners() and not (is_above and _is_unmapped(status.st_uid)):
        return f"{path} belongs to {_name_of(status.st_uid)}"
    writers = status.st_mode & _WRITABLE_BY_OTHERS
    if not writers or stat.S_ISLNK(status.st_mode):
        return None
    if is_above and (status.st_mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _is_private(status.st_gid))):
        return None
    who = "its group" if writers == stat.S_IWGRP else "others"
    return f"{who} may write into {path} (mode {stat.S_IMODE(status.st_mode):04o})"


def trusted_owners() -> set[int]:
    return {0, os.geteuid(), os.stat(__file__).st_uid}


def _name_of(uid: int) -> str:
    try:
        return f"another user, {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"another user, {uid}"


def _is_private(gid: int) -> bool:
    """Whether it is the group that this user has alone."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if gid != user.pw_gid or group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        return False
    # Members are listed with the group only where it is not their own.
    return _owners_of_group(gid) <= {user.pw_uid}


@functools.cache
def _owners_of_group(gid: int) -> frozenset[int]:
    """Users whose own group it is. A list of all users may come from another machine."""
    return frozenset(user.pw_uid for user in pwd.getpwall() if user.pw_gid == gid)


def _is_unmapped(uid: int) -> bool:
    """Whether it stands for users that this user namespace does not know."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    except (OSError, ValueError, IndexError):
        return False
    return uid == overflow and mapped < 2**32 - 1


# ---- making ----------------------------------------------------------------------------------------------------------


def make_folder(path: Path, mode: int = 0o755) -> None:
    """With what is missing above it; not writable by others whatever the umask is."""
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode=mode, exist_ok=True)


def close_to_others(path: Path) -> None:
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITABLE_BY_OTHERS)
