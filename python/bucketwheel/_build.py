"""Finds the native module ``bucketwheel._cpu``, or builds it once for everybody who shares the cache.

`native()` looks, in this order, into

1. ``BW_NATIVE_DIR``: a folder with ``_cpu*.so``, taken as it is;
2. the package itself: compiled at install (``BW_AOT=cpu``) from these same sources;
3. the cache (``BW_CACHE_DIR``, default ``~/.cache/bucketwheel``, or a folder local to the node where home is a network
   file system), under a name that holds a hash of all that the binary depends on;

and else builds, unless ``BW_JIT=0``.

[Note: one build]
Builders of one key take turns by ``flock``, which the kernel ends with its holder, however that dies. The lock is only
an economy: each builder works in a private folder, tries the module in a child process, and publishes by renaming the
folder, so a reader sees all of it or nothing, and two builders that both hold the lock (a network file system) do no harm.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO

from bucketwheel import _toolchain
from bucketwheel._version import __version__
from bucketwheel.errors import BuildError

__all__ = ["build_into", "cache_dir", "native"]

_NAME = "bucketwheel._cpu"
_PACKAGE = Path(__file__).resolve().parent
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "afs")
_REPORT_S = 10.0
_UNUSED_DAYS = 60

_native: ModuleType | None = None
_guard = threading.Lock()

# Imports the module as bucketwheel._cpu in a fresh process, with an empty package around it: importing the real one
# would import torch, and a module that crashes must not take the caller with it.
_TRY = """
import importlib.machinery, importlib.util, sys, types
path, package = sys.argv[1:]
sys.modules["bucketwheel"] = parent = types.ModuleType("bucketwheel")
parent.__path__ = [package]
loader = importlib.machinery.ExtensionFileLoader("bucketwheel._cpu", path)
loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader)))
"""


def native() -> ModuleType:
    """The native module, found or built at the first call. Raises `BuildError` with one screen of what to do."""
    if _native is not None:
        return _native
    return _load()


def _load() -> ModuleType:
    global _native
    with _guard:
        if _native is None:
            _native = sys.modules.get(_NAME) or _import(_locate())
    return _native


def _import(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    try:
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(_NAME, loader))  # type: ignore[arg-type]
        loader.exec_module(module)
    except ImportError as error:
        raise _toolchain.explain(f"{path} does not load: {error}", remedies=[f"remove {path.parent}"]) from error
    sys.modules[_NAME] = module
    sys.modules["bucketwheel"]._cpu = module  # type: ignore[attr-defined]
    return module


def _locate() -> Path:
    if folder := os.environ.get("BW_NATIVE_DIR"):
        for name in (_toolchain.module_file(), "_cpu.so"):
            if (path := Path(folder, name)).is_file():
                return path
        raise _toolchain.explain(
            f"BW_NATIVE_DIR={folder!r} has no {_toolchain.module_file()}", remedies=["unset BW_NATIVE_DIR to build it"]
        )
    csrc = _toolchain.find_csrc()
    if (_PACKAGE / "_native" / "manifest.json").is_file():
        digest = _toolchain.sources_digest(csrc)
        if (installed := _checked(_PACKAGE / "_native", {"sources": digest})) is not None:
            return installed
        warnings.warn(
            f"{_PACKAGE / '_native'} was compiled at install from other sources or for another Python: it is not used",
            stacklevel=4,
        )
    may_build = os.environ.get("BW_JIT", "1") != "0"
    try:
        recipe, toolchain = _toolchain.read_recipe(csrc), _toolchain.find_toolchain()
    except BuildError as error:
        raise error if may_build else _forbidden(str(error)) from error
    key = _toolchain.build_key(recipe, toolchain)
    cache = cache_dir()
    entry = cache / _entry_name(key)
    if (cached := _checked(entry, {"key": key})) is not None:
        return cached
    if not may_build:
        raise _forbidden(f"the cache has no {entry}")
    return _build_once(recipe, toolchain, key, cache)


def _forbidden(why: str) -> BuildError:
    return _toolchain.explain(
        f"BW_JIT=0 forbids building it, and it is not there: {why}", remedies=["unset BW_JIT to have it built"]
    )


def _entry_name(key: str) -> str:
    return f"bucketwheel_cpu-{__version__}-{sysconfig.get_config_var('SOABI')}-{key[:16]}"


def _checked(entry: Path, wanted: dict[str, str]) -> Path | None:
    """The module in ``entry`` if its manifest says ``wanted`` and its bytes are the published ones, else None."""
    try:
        manifest = json.loads((entry / "manifest.json").read_text())
        path = entry / _toolchain.module_file()
        wanted = {**wanted, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except (OSError, ValueError):
        return None
    return path if all(manifest.get(name) == value for name, value in wanted.items()) else None


# ---- the cache -------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """The folder of built modules. Not created, and not promised to be writable if ``BW_CACHE_DIR`` names it."""
    if named := os.environ.get("BW_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if home.is_absolute() and not _is_network(home):
        try:
            (home / "bucketwheel").mkdir(parents=True, exist_ok=True)
        except OSError:
            pass
        if os.access(home / "bucketwheel", os.W_OK):
            return home / "bucketwheel"
    # Anybody may write into the temporary folder: code from there is loaded only if nobody else could have put it there.
    local = Path(tempfile.gettempdir(), f"bucketwheel-{os.getuid()}")
    try:
        local.mkdir(mode=0o700, exist_ok=True)
        status = local.lstat()
    except OSError as error:
        raise _unwritable(local, error) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise _unwritable(local, "it belongs to another user or others may write into it")
    return local


def _unwritable(folder: Path, why: object) -> BuildError:
    return _toolchain.explain(
        f"the cache folder {folder} cannot be used: {why}", remedies=["name a writable one: BW_CACHE_DIR=..."]
    )


def _is_network(path: Path) -> bool:
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


def _prune(cache: Path) -> None:
    """Remove what dead builders left, and objects unused for a long time. Never fails: it is housekeeping."""
    for folder in (cache / "tmp").glob(f"{socket.gethostname()}-*"):  # a lock tells of this host's processes only
        try:
            with open(folder / "alive", "rb") as alive:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its builder lives, or has not locked it yet, or somebody else removed it
    oldest = time.time() - _UNUSED_DAYS * 86400
    for path in (cache / "objects").glob("*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except OSError:
            continue


# ---- building --------------------------------------------------------------------------------------------------------


def _build_once(recipe: _toolchain.Recipe, toolchain: _toolchain.Toolchain, key: str, cache: Path) -> Path:
    entry = cache / _entry_name(key)
    try:
        for folder in ("locks", "tmp", "objects", "logs"):
            (cache / folder).mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(os.open(cache / "locks" / entry.name, os.O_RDWR | os.O_CREAT, 0o666), "r+")
    except OSError as error:
        raise _unwritable(cache, error) from error
    with lock:
        waited = _take(lock.fileno(), cache / "locks" / entry.name)
        if (built := _checked(entry, {"key": key})) is not None:
            return built
        lock.seek(0)
        verdict = lock.read()
        if waited and verdict.startswith("failed\n"):  # while we waited, from the same key: it would fail again
            raise BuildError(verdict.removeprefix("failed\n"))
        _write(lock, f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%H:%M:%S')}")
        _prune(cache)
        _say("building the native module (once; later starts find it in the cache)")
        start = time.monotonic()
        try:
            with _private_folder(cache) as work:
                log = cache / "logs" / f"{entry.name}.log"
                out = _build(recipe, toolchain, work, objects=cache / "objects", log=log)
                path = _publish(out, entry, key)
        except BuildError as error:
            _write(lock, f"failed\n{error}")
            raise
        _say(f"built in {time.monotonic() - start:.1f} s: {path}")
        _write(lock, "")
        return path


def _say(text: str) -> None:
    print(f"[bucketwheel] {text}", file=sys.stderr, flush=True)


def _write(lock: IO[str], text: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()


def _timeout_s() -> float:
    return float(os.environ.get("BW_BUILD_TIMEOUT", "600"))


def _take(fd: int, path: Path) -> bool:
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
        if now - start > _timeout_s():
            raise _toolchain.explain(
                f"waited {now - start:.0f} s (BW_BUILD_TIMEOUT) for another build: {_holder(path)}",
                remedies=[f"look at that process; the lock is {path}", "set another BW_CACHE_DIR"],
            )
        if now - reported >= _REPORT_S:
            reported = now
            _say(f"waited {now - start:.0f} s for the native module, being built by {_holder(path)}")
        time.sleep(0.05)


def _holder(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0] or "an unnamed process"
    except OSError:
        return "an unnamed process"


@contextmanager
def _private_folder(cache: Path) -> Iterator[Path]:
    """A folder that `_prune` leaves alone while this process lives."""
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    unlocked, folder = cache / "tmp" / f".{name}", cache / "tmp" / name
    try:
        unlocked.mkdir()
        with open(unlocked / "alive", "wb") as alive:
            with suppress(OSError):  # a file system without locks: nobody can take it away either
                fcntl.flock(alive, fcntl.LOCK_EX)
            unlocked.rename(folder)  # only now, locked, does it have a name that _prune looks at
            yield folder
    except OSError as error:
        raise _unwritable(cache, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build(
    recipe: _toolchain.Recipe, toolchain: _toolchain.Toolchain, work: Path, *, objects: Path | None, log: Path
) -> Path:
    """Compile in ``work``; the module, tried in a child process, and its manifest are then in the returned folder."""
    scratch, out = work / "scratch", work / "out"
    scratch.mkdir()
    out.mkdir()
    timeout_s = _timeout_s()
    made = _toolchain.compile_module(recipe, toolchain, scratch, objects=objects, log=log, timeout_s=timeout_s)
    module = out / made.name
    made.rename(module)
    _try(module, log)
    manifest = {
        "key": _toolchain.build_key(recipe, toolchain),
        "sources": _toolchain.sources_digest(recipe.csrc),
        "sha256": hashlib.sha256(module.read_bytes()).hexdigest(),
        "version": __version__,
        "compiler": toolchain.identity,
        "flags": " ".join(recipe.flags),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return out


def _try(module: Path, log: Path) -> None:
    command = [sys.executable, "-c", _TRY, str(module), str(_PACKAGE)]
    try:
        subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True)
        return
    except subprocess.CalledProcessError as error:
        outcome, lines = f"ended with status {error.returncode}", error.stdout.splitlines()
    except subprocess.TimeoutExpired:
        outcome, lines = "did not end within 60 s", []
    raise _toolchain.explain(
        f"it was compiled, but the process that imported it {outcome}",
        command=f"{sys.executable} -c 'import ...' {module.name}",
        lines=lines,
        log=log,
        remedies=["check that the compiler and its C++ runtime library belong together: choose with CXX=..."],
    )


def _publish(out: Path, entry: Path, key: str) -> Path:
    """Rename the finished folder to its place, all at once, after its bytes are on the disk."""
    for path in [*out.iterdir(), out]:
        _sync(path)
    for _ in range(600):
        try:
            out.rename(entry)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Somebody published first (seen late on network file systems), or a damaged entry is in the way.
            if (published := _checked(entry, {"key": key})) is not None:
                return published
            with suppress(OSError):
                entry.rename(out.parent / f"damaged-{uuid.uuid4().hex[:12]}")
            time.sleep(0.1)
    else:
        raise _unwritable(entry.parent, f"{entry.name} stays in the way")
    _sync(entry.parent)
    return entry / _toolchain.module_file()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def build_into(folder: Path) -> None:
    """Compile for `BW_AOT`: put the module and its manifest into ``folder``, from where `native` takes it."""
    recipe, toolchain = _toolchain.read_recipe(_toolchain.find_csrc()), _toolchain.find_toolchain()
    with tempfile.TemporaryDirectory() as work:
        # The log outlives the folder only where the caller keeps it: beside what was to be built.
        out = _build(recipe, toolchain, Path(work), objects=None, log=folder.parent / "native_build.log")
        shutil.copytree(out, folder, dirs_exist_ok=True)
    (folder.parent / "native_build.log").unlink()
