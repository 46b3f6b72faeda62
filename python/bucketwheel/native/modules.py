"""Finds the native modules, or builds each once for everybody who shares the cache.

``bucketwheel._cpu`` owns every bound class. ``bucketwheel._cuda`` hands it the CUDA runtime and kernels as one table,
the capsule ``api``; it is asked for at the first CUDA tensor, needs nvcc to be built, and neither torch nor a GPU to be
imported.

`native()` and `cuda()` look, in this order, into

1. ``BW_NATIVE_DIR``: a folder with ``_cpu*.so`` (and ``_cuda*.so``), taken as they are;
2. the package itself: compiled at install (``BW_AOT=cpu``, or ``cuda`` for both) from these same sources;
3. the cache (``BW_CACHE_DIR``, default ``~/.cache/bucketwheel``, or a folder local to the node where home is a network
   file system), under a name that holds a hash of all that the binary depends on;

and else build, unless ``BW_JIT=0``.

[Note: one build]
Builders of one key take turns by ``flock``, which the kernel ends with its holder, however that dies. The lock is only
an economy: each builder works in a private folder, tries the module in a child process, and publishes by renaming the
folder, so a reader sees all of it or nothing, and two builders that both hold the lock (a network file system) do no
harm.
"""

from __future__ import annotations

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
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from bucketwheel._version import __version__
from bucketwheel.errors import BuildError
from bucketwheel.native import cache as _cache
from bucketwheel.native import compile, env, nvcc, trust
from bucketwheel.native import toolchain as _toolchain
from bucketwheel.native.toolchain import CPU, CUDA, Module, Recipe, Toolchain, explain, say

__all__ = ["Found", "build_into", "cuda", "find", "locate", "native", "try_import"]

_PACKAGE = Path(__file__).resolve().parents[1]

_native: ModuleType | None = None
_cuda: ModuleType | None = None
_guards = {CPU: threading.Lock(), CUDA: threading.Lock()}

# Imports a module under its name in a fresh process, with an empty package around it: importing the real one would
# import torch, and a module that crashes must not take the caller with it.
_TRY = """
import importlib.machinery, importlib.util, sys, types
name, path, package = sys.argv[1:]
sys.modules["bucketwheel"] = parent = types.ModuleType("bucketwheel")
parent.__path__ = [package]
loader = importlib.machinery.ExtensionFileLoader(name, path)
loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader)))
"""


def native() -> ModuleType:
    """The native module, found or built at the first call. Raises `BuildError` with one screen of what to do."""
    global _native
    if _native is None:
        _native = _load(CPU)
    return _native


def cuda() -> ModuleType:
    """The CUDA module, likewise. Importing it touches no device."""
    global _cuda
    if _cuda is None:
        _cuda = _load(CUDA)
    return _cuda


def _load(module: Module) -> ModuleType:
    with _guards[module]:
        return sys.modules.get(f"bucketwheel.{module.name}") or _import(module, locate(module))


def _import(module: Module, path: Path) -> ModuleType:
    name = f"bucketwheel.{module.name}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    try:
        loaded = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore[arg-type]
        loader.exec_module(loaded)
    except ImportError as error:
        is_named = bool(env.text("BW_NATIVE_DIR"))
        remedy = "unset BW_NATIVE_DIR, or name a folder for this Python" if is_named else f"remove {path.parent}"
        raise explain(f"{path} does not load: {error}", module=module, remedies=[remedy]) from error
    sys.modules[name] = loaded
    setattr(sys.modules["bucketwheel"], module.name, loaded)
    return loaded


# ---- finding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Where a module is (``path``), or where it would be published (``entry``) once built from ``recipe``."""

    origin: str  # "named" by BW_NATIVE_DIR, "installed", "cached"; "missing": not built yet
    path: Path | None = None
    entry: Path | None = None
    recipe: Recipe | None = None
    toolchain: Toolchain | None = None


def find(module: Module) -> Found:
    """Look for a module without building it. Raises `BuildError` where it is not there and could not be built."""
    if folder := env.text("BW_NATIVE_DIR"):
        return Found("named", _named(module, folder))
    csrc = _toolchain.find_csrc()
    installed = _PACKAGE / "_native"
    if (installed / module.manifest).is_file():
        digest = _toolchain.sources_digest(csrc)
        if (compiled := _cache.checked(installed, module, {"sources": digest})) is not None:
            return Found("installed", compiled)
        warnings.warn(
            f"{installed / module.name} was compiled at install from other sources or for another Python: it is not used",
            stacklevel=2,
        )
    recipe, toolchain = _read(module, csrc)
    key = _toolchain.build_key(recipe, toolchain)
    entry = _cache.cache_dir() / _entry_name(module, key)
    cached = _cache.cached(entry, module, key)
    return Found("missing" if cached is None else "cached", cached, entry, recipe, toolchain)


def _named(module: Module, folder: str) -> Path:
    """The module in the folder that BW_NATIVE_DIR names."""
    for name in (module.file, f"{module.name}.so"):
        if (path := Path(folder).expanduser() / name).is_file():
            trust.expect_trusted(path.parent, module=module)
            trust.expect_trusted(path, module=module)
            return path
    others = sorted(path.name for path in Path(folder).expanduser().glob(f"{module.name}.*.so"))
    has = f"; it has {', '.join(others)}, for another Python" if others else ""
    raise explain(
        f"BW_NATIVE_DIR={folder!r} has no {module.file}{has}",
        module=module,
        remedies=["unset BW_NATIVE_DIR to build it"],
    )


def _read(module: Module, csrc: Path) -> tuple[Recipe, Toolchain]:
    recipe = _toolchain.read_recipe(csrc, module=module)
    return recipe, nvcc.find_cuda_toolchain() if module is CUDA else _toolchain.find_toolchain()


def _entry_name(module: Module, key: str) -> str:
    return f"bucketwheel_{module.kind}-{__version__}-{sysconfig.get_config_var('SOABI')}-{key[:16]}"


def locate(module: Module) -> Path:
    """The file of a module, found or built now."""
    may_build = env.flag("BW_JIT", default=True)
    try:
        found = find(module)
    except BuildError as error:
        if may_build or env.text("BW_NATIVE_DIR"):
            raise
        same = "have here what the cache was filled with: an entry is found by its compiler, Python and pybind11"
        raise _forbidden(module, str(error), same) from error
    if found.path is not None:
        if found.origin == "cached":
            _cache.touch(found.path, module)
        return found.path
    if not may_build:
        raise _forbidden(module, f"the cache has no {found.entry}", "unset BW_JIT to have it built")
    assert found.recipe and found.toolchain and found.entry
    return _build_once(found.recipe, found.toolchain, found.entry)


def _forbidden(module: Module, why: str, remedy: str) -> BuildError:
    return explain(
        f"BW_JIT=0 forbids building it, and it is not there: {why}",
        module=module,
        remedies=[remedy],
    )


# ---- building --------------------------------------------------------------------------------------------------------


def _build_once(recipe: Recipe, toolchain: Toolchain, entry: Path) -> Path:
    cache, module, key = entry.parent, recipe.module, _toolchain.build_key(recipe, toolchain)
    _cache.timeout_s()  # of a bad one nobody is to hear in the midst of a build
    try:
        for folder in ("locks", "tmp", "objects", "logs"):
            trust.make_folder(cache / folder)
            trust.expect_trusted(cache / folder, module=module)
        lock = os.fdopen(os.open(cache / "locks" / entry.name, os.O_RDWR | os.O_CREAT, 0o644), "r+")
    except OSError as error:
        raise _cache.unwritable(cache, error) from error
    with lock:
        waited = _cache.take(lock.fileno(), cache / "locks" / entry.name, module)
        if (built := _cache.cached(entry, module, key)) is not None:
            return built
        lock.seek(0)
        verdict = lock.read()
        if waited and verdict.startswith("failed\n"):  # while we waited, from the same key: it would fail again
            raise BuildError(verdict.removeprefix("failed\n"))
        _cache.write(lock, f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%H:%M:%S')}")
        _cache.prune(cache)
        say(f"building the {module.title}{toolchain.note} (once; later starts find it in the cache)")
        start = time.monotonic()
        try:
            with _cache.private_folder(cache) as work:
                log = cache / "logs" / f"{entry.name}.log"
                out = _build(recipe, toolchain, work, objects=cache / "objects", log=log)
                path = _cache.publish(out, entry, module, key)
        except BuildError as error:
            _cache.write(lock, f"failed\n{error}")
            raise
        say(f"built in {time.monotonic() - start:.1f} s: {path}")
        _cache.write(lock, "")
        return path


def _build(recipe: Recipe, toolchain: Toolchain, work: Path, *, objects: Path | None, log: Path) -> Path:
    """Compile in ``work``; the module, tried in a child process, and its manifest are then in the returned folder."""
    scratch, out = work / "scratch", work / "out"
    with compile.writing(work, recipe.module):
        scratch.mkdir()
        out.mkdir()
    timeout_s = _cache.timeout_s()
    made = compile.compile_module(recipe, toolchain, scratch, objects=objects, log=log, timeout_s=timeout_s)
    path = out / made.name
    with compile.writing(work, recipe.module):
        made.rename(path)
    try_import(recipe.module, path, log)
    manifest = {
        "key": _toolchain.build_key(recipe, toolchain),
        "sources": _toolchain.sources_digest(recipe.csrc),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "version": __version__,
        "soabi": sysconfig.get_config_var("SOABI"),
        "compiler": toolchain.identity,
        "flags": " ".join(recipe.flags),
        **(
            {"nvcc": [*toolchain.nvcc, *recipe.nvcc_flags], "nvcc_version": toolchain.nvcc_identity}
            if toolchain.nvcc
            else {}
        ),
    }
    with compile.writing(work, recipe.module):
        (out / recipe.module.manifest).write_text(json.dumps(manifest, indent=1) + "\n")
    return out


def try_import(module: Module, path: Path, log: Path | None = None) -> None:
    """Import a module in a child process. Raises `BuildError` where that fails, with the ``log`` of its build."""
    command = [sys.executable, "-c", _TRY, f"bucketwheel.{module.name}", str(path), str(_PACKAGE)]
    remedy = "check that the compiler and its C++ runtime library belong together: choose with CXX=..."
    try:
        subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True)
        return
    except subprocess.CalledProcessError as error:
        outcome, lines = f"ended with status {error.returncode}", error.stdout.splitlines()
    except subprocess.TimeoutExpired:
        outcome, lines = "did not end within 60 s", []
    except OSError as error:  # sys.executable is empty where Python is embedded
        outcome, lines = f"could not be started: {error}", []
        remedy = "have it built once by an ordinary Python: python -m bucketwheel doctor --build " + module.kind
    raise explain(
        f"it was compiled, but the process that imported it {outcome}",
        module=module,
        command=f"{sys.executable} -c 'import ...' {path.name}",
        lines=lines,
        log=log,
        remedies=[remedy],
    )


def build_into(folder: Path, modules: tuple[Module, ...] = (CPU,)) -> None:
    """Compile for `BW_AOT`: put modules and their manifests into ``folder``, from where they are taken."""
    log = folder.parent / "native_build.log"  # stays, for the caller to read, if this fails
    for module in modules:
        recipe, toolchain = _read(module, _toolchain.find_csrc())
        with tempfile.TemporaryDirectory() as work:
            out = _build(recipe, toolchain, Path(work), objects=None, log=log)
            shutil.copytree(out, folder, dirs_exist_ok=True)
    log.unlink()
