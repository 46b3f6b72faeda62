"""The cache of built modules: which folder, whether it can be trusted, one builder at a time, how a module gets in.

[Note: one build]
A folder cpu-VERSION-PYTHON-KEY is an entry: a module and its manifest. Who needs one that is missing takes the lock of the
build folder builds/cpu-COMPILER-SOURCES; the first builds, the others then find the entry. The kernel ends the lock with
its holder, and with what a killed one has left running ([Note: a builder that is killed]). An entry is made in a
temporary folder and renamed to its place: readers see all of it or nothing. If two build the same (two installations of
the same sources), the second to rename finds the first one's entry and takes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from bucketwheel.errors import BuildError
from bucketwheel.native import env
from bucketwheel.native.progress import Progress
from bucketwheel.native.toolchain import CPU, Module, explain

_BUILDER = "builder.txt"
_LOOK_S = 0.05  # between two tries for the lock
_NETWORK_FILE_SYSTEMS = set(
    "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.sshfs gpfs lustre nfs nfs4 panfs smb3 smbfs virtiofs wekafs".split()
)
_UNUSED_S = 60 * 86400.0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """The folder of built modules. It need not exist. Raises `BuildError` if it is no folder or not trusted."""
    folder = _choose_folder()
    if folder.exists() and not folder.is_dir():
        raise unwritable(folder, "it is not a folder")
    expect_trusted(folder)
    return folder


def _choose_folder() -> Path:
    """BW_CACHE_DIR; else the user's cache; if that is on a network file system or not writable, the temporary folder."""
    if named := env.text("BW_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = home / "bucketwheel"
    if home.is_absolute() and not is_network(home):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir(), f"bucketwheel-{os.getuid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)  # before somebody else does: the name is known
    return folder


def unwritable(folder: Path, why: object) -> BuildError:
    remedies = ["choose a writable folder: BW_CACHE_DIR=..."]
    return explain(f"the cache folder {folder} cannot be used: {why}", remedies=remedies)


def is_network(path: Path) -> bool:
    """Whether the longest mount point above ``path`` is of a network file system."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return False
    points = [(point.replace("\\040", " "), kind) for point, kind in (line.split(" ")[1:3] for line in lines)]
    above = [(point, kind) for point, kind in reversed(points) if path.resolve().is_relative_to(point)]
    return bool(above) and max(above, key=lambda mount: len(mount[0]))[1] in _NETWORK_FILE_SYSTEMS


def expect_trusted(path: Path, module: Module = CPU) -> None:
    """Raises `BuildError` if somebody else may write to ``path``: a module in it runs with all rights of this process.

    Its owner must be root, this user or the owner of this package, and nobody else may write. What does not exist passes.
    """
    try:
        status = path.stat()
    except OSError:
        return
    if path.is_symlink() and path.parent == Path(tempfile.gettempdir()):
        why = "it is a symbolic link, whose owner can redirect it"
    elif status.st_uid not in {0, os.geteuid(), os.stat(__file__).st_uid}:
        why = f"it belongs to another user, {status.st_uid}"
    elif status.st_mode & _WRITABLE_BY_OTHERS:
        why = f"other users can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    remedies = [
        "check its files; if they are yours, `chmod -R go-w FOLDER`, or remove the folder",
        "choose a folder of your own: BW_CACHE_DIR=...",
        "to share modules, let root or the user who installed bucketwheel own them, and others only read",
    ]
    what = f"{path} is not used, because {why}: another user could run code in this process"
    raise explain(what, module=module, remedies=remedies)


@contextmanager
def take(folder: Path, module: Module) -> Iterator[tuple[bool, int]]:
    """Hold the lock of a build folder; yields whether somebody else had it, and its file descriptor. `BuildError` after
    ``BW_BUILD_TIMEOUT``."""
    limit_s, start = env.build_timeout_s(), time.monotonic()
    with open(f"{folder}.lock", "a") as lock:
        has_waited, progress = False, Progress(module, folder / "build.log", folder)
        while not _is_locked_by(lock):
            builder = builder_of(folder)
            if time.monotonic() - start >= limit_s:
                gone = ", which has ended, but a process that it started holds the lock" if _has_ended(builder) else ""
                what = f"waited {limit_s:.0f} s (BW_BUILD_TIMEOUT) for another build: {builder}{gone}"
                remedy = f"check that process and its ninja; if neither runs, remove {folder}.lock"
                raise explain(what, module=module, remedies=[remedy, "set another BW_CACHE_DIR"])
            progress.show(builder)
            time.sleep(_LOOK_S)
            has_waited = True
        try:
            folder.mkdir(exist_ok=True)  # now: who had the lock may have removed it
            if not any(folder.iterdir()):
                _seed(folder)
            (folder / _BUILDER).write_text(
                f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%H:%M:%S')}"
            )
            yield has_waited, lock.fileno()
        finally:  # also where somebody else has inherited it: a server that a compiler has started
            fcntl.flock(lock, fcntl.LOCK_UN)


@contextmanager
def try_take(folder: Path) -> Iterator[bool]:
    """Hold the lock of a build folder if nobody else does; yields whether that is so."""
    with open(f"{folder}.lock", "a") as lock:
        yield _is_locked_by(lock)


def _is_locked_by(lock: IO[str]) -> bool:
    """Whether the lock could be taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def builder_of(folder: Path) -> str:
    """Who holds the lock of a build folder, or held it last."""
    with suppress(OSError):
        return (folder / _BUILDER).read_text()
    return "an unnamed process"


def _has_ended(builder: str) -> bool:
    """Whether the text of a builder.txt names a process of this host that is no more."""
    named = re.match(r"process (\d+) on (.+), since ", builder)
    return named is not None and named[2] == socket.gethostname() and not Path("/proc", named[1]).exists()


def _seed(folder: Path) -> None:
    """Start an empty build folder from a copy of one by the same compiler: two checkouts have most files in common."""
    for log in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*/.ninja_log"):
        with suppress(OSError), try_take(log.parent) as is_free:
            if not is_free:
                continue
            with tempfile.TemporaryDirectory(prefix="new-", dir=folder.parents[1], ignore_cleanup_errors=True) as name:
                shutil.copytree(log.parent, Path(name, "copy")).rename(folder)
                return


def checked(entry: Path, module: Module, wanted: Mapping[str, str]) -> Path | None:
    """The module in ``entry`` if its manifest says ``wanted`` and its bytes are the published ones, else None."""
    path = entry / module.file
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
    manifest = read_manifest(entry, module)
    return path if all(manifest.get(name) == value for name, value in {**wanted, "sha256": digest}.items()) else None


def read_manifest(entry: Path, module: Module) -> dict[str, Any]:
    """Its content; empty if it is missing or damaged."""
    try:
        return dict(json.loads((entry / module.manifest).read_text()))
    except (OSError, TypeError, ValueError, RecursionError):
        return {}


def publish(built: Path, module: Module, manifest: Mapping[str, Any], entry: Path) -> Path:
    """Copy a module and write its manifest into a temporary folder, then rename that to ``entry``."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=entry.parent, ignore_cleanup_errors=True) as name:
        made = Path(name, entry.name)
        write_entry(built, module, manifest, made)
        for _ in range(10):
            try:
                made.rename(entry)
                return entry / module.file
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # Somebody published first, or a damaged entry is in the way.
                if (path := checked(entry, module, {"key": manifest["key"]})) is not None:
                    return path
                with suppress(OSError):
                    entry.rename(Path(name, f"damaged-{time.monotonic_ns()}"))
    raise unwritable(entry.parent, f"{entry.name} stays in the way")


def write_entry(built: Path, module: Module, manifest: Mapping[str, Any], entry: Path) -> None:
    """A module and its manifest, that only their owner may write to, whatever the umask is."""
    entry.mkdir(exist_ok=True)
    shutil.copyfile(built, entry / module.file)
    digest = hashlib.sha256((entry / module.file).read_bytes()).hexdigest()
    (entry / module.manifest).write_text(json.dumps({**manifest, "sha256": digest}, indent=1) + "\n")
    for path in (entry, entry / module.file, entry / module.manifest):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITABLE_BY_OTHERS)


def prune(cache: Path) -> None:
    """Remove build folders and temporary folders that were not used for 60 days. Never fails: it is housekeeping."""
    for path in [*(cache / "builds").glob(f"*/{_BUILDER}"), *cache.glob("new-*/*")]:
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(path.parent, ignore_errors=True)
