"""The folder of built modules: where it is, who builds in it, how an entry gets there and is trusted.

An entry is a folder with a module and its manifest. See [Note: one build] in `bucketwheel.native.modules`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bucketwheel.errors import BuildError
from bucketwheel.native import env, trust
from bucketwheel.native.toolchain import Module, explain, say

__all__ = ["CacheFolder", "cache_dir", "cached", "checked", "choose_folder", "holder", "is_held", "is_network"]
__all__ += ["private_folder", "prune", "publish", "read_manifest", "take", "timeout_s", "touch", "unwritable", "write"]

REPORT_S = 10.0
NOBODY = "an unnamed process"
_NETWORK_FILE_SYSTEMS = set(
    "9p afs beegfs ceph cifs fuse.ceph fuse.glusterfs fuse.sshfs gpfs lustre nfs nfs4 panfs smb3 smbfs virtiofs wekafs".split()
)
_UNUSED_DAYS = 60


@dataclass(frozen=True)
class CacheFolder:
    """Where the cache is, and for what reason it is there."""

    path: Path
    why: str


def cache_dir() -> Path:
    """The folder of built modules. Not created, and not promised to be writable, if ``BW_CACHE_DIR`` names it.

    Raises `BuildError` where it is not trusted: [Note: trusted files] in `bucketwheel.native.trust`.
    """
    chosen = choose_folder()
    if chosen.path.exists() and not chosen.path.is_dir():
        raise unwritable(chosen.path, f"it is no folder ({chosen.why})")
    trust.expect_trusted(chosen.path)
    return chosen.path


def choose_folder() -> CacheFolder:
    if named := env.text("BW_CACHE_DIR"):
        return CacheFolder(Path(named).expanduser().absolute(), f"BW_CACHE_DIR={named}")
    variable = "XDG_CACHE_HOME" if os.environ.get("XDG_CACHE_HOME") else "HOME"
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = home / "bucketwheel"
    if not home.is_absolute():
        why = f"{variable} has no absolute path"
    elif is_network(home):
        why = f"{home} is on a network file system"
    else:
        try:
            trust.make_folder(folder)
        except OSError:
            pass
        if os.access(folder, os.W_OK):
            return CacheFolder(folder, f"by {variable}")
        why = f"{folder} cannot be written"
    local = Path(tempfile.gettempdir(), f"bucketwheel-{os.getuid()}")
    try:
        local.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise unwritable(local, error) from error
    return CacheFolder(local, f"in the temporary folder, because {why}")


def unwritable(folder: Path, why: object) -> BuildError:
    return explain(
        f"the cache folder {folder} cannot be used: {why}", remedies=["name a writable one: BW_CACHE_DIR=..."]
    )


def is_network(path: Path) -> bool:
    """Whether the longest mount point above ``path`` is of a network file system."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return False
    path = path.resolve()
    best, kind = "", ""
    for line in mounts:
        _, point, file_system, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, file_system
    return kind in _NETWORK_FILE_SYSTEMS


def prune(cache: Path) -> None:
    """Remove what dead builders left, and objects unused for a long time. Never fails: it is housekeeping."""
    oldest = time.time() - _UNUSED_DAYS * 86400
    for folder in (cache / "tmp").glob("*"):
        try:
            if folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.name.startswith(f"{socket.gethostname()}-"):
                continue  # a lock tells of this host's processes only
            with open(folder / "alive", "r+b") as alive:  # NFS locks only what may be written
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its builder lives, or has not locked it yet, or somebody else removed it
    for path in (cache / "objects").glob("*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except OSError:
            continue


# ---- locks -----------------------------------------------------------------------------------------------------------


def timeout_s() -> float:
    """The limit for one build, and for waiting for one."""
    return env.seconds("BW_BUILD_TIMEOUT", 600.0)


def take(fd: int, path: Path, module: Module) -> bool:
    """Take the lock; whether another process had it. Raises `BuildError` after ``BW_BUILD_TIMEOUT`` seconds."""
    start = time.monotonic()
    reported = start
    waited = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return waited
        except BlockingIOError:
            waited = True
        except OSError:
            return waited  # a file system without locks: see [Note: one build]
        now = time.monotonic()
        if now - start > timeout_s():
            raise explain(
                f"waited {now - start:.0f} s (BW_BUILD_TIMEOUT) for another build: {holder(path)}",
                module=module,
                remedies=[f"look at that process; the lock is {path}", "set another BW_CACHE_DIR"],
            )
        if now - reported >= REPORT_S:
            reported = now
            say(f"waited {now - start:.0f} s for the {module.title}, being built by {holder(path)}")
        time.sleep(0.05)


def holder(path: Path) -> str:
    """Who wrote into the lock last: the process that has it, if any has."""
    try:
        return path.read_text().partition("\n")[0] or NOBODY
    except OSError:
        return NOBODY


def is_held(path: Path) -> bool:
    """Whether some process has the lock now."""
    try:
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # gone, or a file system without locks
    return False


def write(lock: IO[str], text: str) -> None:
    """Replace what the lock says of its holder."""
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()


# ---- entries ---------------------------------------------------------------------------------------------------------


def checked(entry: Path, module: Module, wanted: dict[str, str]) -> Path | None:
    """The module in ``entry`` if its manifest says ``wanted`` and its bytes are the published ones, else None."""
    path = entry / module.file
    try:
        wanted = {**wanted, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except OSError:
        return None
    manifest = read_manifest(entry, module)
    return path if all(manifest.get(name) == value for name, value in wanted.items()) else None


def cached(entry: Path, module: Module, key: str) -> Path | None:
    """The module that was published in ``entry``. Raises `BuildError` where somebody else may have put it there."""
    for path in (entry, entry / module.manifest, entry / module.file):
        trust.expect_trusted(path, module=module)
    return checked(entry, module, {"key": key})


def read_manifest(entry: Path, module: Module) -> dict[str, Any]:
    """What it says; nothing, where it is not there or is none."""
    try:
        manifest = json.loads((entry / module.manifest).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def touch(path: Path, module: Module) -> None:
    """Remember that a module was used now: its manifest's time says so. A cache that is only read keeps no such time."""
    with suppress(OSError):
        os.utime(path.parent / module.manifest)


@contextmanager
def private_folder(cache: Path) -> Iterator[Path]:
    """A folder that `prune` leaves alone while this process lives."""
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    try:
        alive = _make_locked(cache / "tmp" / f".{name}", cache / "tmp" / name)
    except OSError as error:
        raise unwritable(cache, error) from error
    try:
        with alive:
            yield cache / "tmp" / name
    finally:  # once the file is closed: NFS keeps the name of an open one, and so the folder
        shutil.rmtree(cache / "tmp" / name, ignore_errors=True)


def _make_locked(unlocked: Path, folder: Path) -> IO[bytes]:
    unlocked.mkdir(mode=0o700)
    with ExitStack() as opened:
        alive = opened.enter_context(open(unlocked / "alive", "wb"))
        with suppress(OSError):  # a file system without locks: nobody can take it away either
            fcntl.flock(alive, fcntl.LOCK_EX)
        unlocked.rename(folder)  # only now, locked, does it have a name that prune looks at
        opened.pop_all()
        return alive


def publish(out: Path, entry: Path, module: Module, key: str) -> Path:
    """Rename the finished folder to its place, all at once, after its bytes are on the disk."""
    try:
        return _publish(out, entry, module, key)
    except OSError as error:
        raise unwritable(entry.parent, error) from error


def _publish(out: Path, entry: Path, module: Module, key: str) -> Path:
    for path in [*out.iterdir(), out]:
        trust.close_to_others(path)  # by umask 002 a group could write, and the entry would not be trusted
        _sync(path)
    for _ in range(600):
        try:
            out.rename(entry)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Somebody published first (seen late on network file systems), or a damaged entry is in the way.
            if (published := checked(entry, module, {"key": key})) is not None:
                return published
            with suppress(OSError):
                entry.rename(out.parent / f"damaged-{uuid.uuid4().hex[:12]}")
            time.sleep(0.1)
    else:
        raise unwritable(entry.parent, f"{entry.name} stays in the way")
    _sync(entry.parent)
    return entry / module.file


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise  # those only say that this file system knows no such thing for folders
    finally:
        os.close(fd)
