"""Finds the native modules, or builds each once for everybody who shares the cache.

``bucketwheel._cpu`` has every bound class. ``bucketwheel._cuda`` has the CUDA runtime and kernels as one table, the capsule
``api``. Building it needs nvcc; importing it needs neither torch nor a GPU. `native()` and `cuda()` look, in this order, into

1. ``BW_NATIVE_DIR``: a folder with ``_cpu*.so`` (and ``_cuda*.so``), taken as they are;
2. the package itself: compiled at install (``BW_AOT=cpu``, or ``cuda`` for both) from these same sources;
3. the cache, under a name that holds a hash of all that the binary depends on: see `bucketwheel.native.cache`;

and else build, unless ``BW_JIT=0``.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
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
from typing import Any

from bucketwheel._version import __version__
from bucketwheel.errors import BuildError
from bucketwheel.native import cache as _cache
from bucketwheel.native import compile, env
from bucketwheel.native import toolchain as _toolchain
from bucketwheel.native.toolchain import CPU, CUDA, Module, Recipe, Toolchain, explain, say

_PACKAGE = Path(__file__).resolve().parents[1]
_guards = {CPU: threading.Lock(), CUDA: threading.Lock()}

# Imports a module in a fresh process: one that crashes does not take the caller with it. The package around it is an
# empty one, because the real one would import torch.
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
    return sys.modules.get("bucketwheel._cpu") or _load(CPU)


def cuda() -> ModuleType:
    """The CUDA module, likewise. Importing it touches no device."""
    return sys.modules.get("bucketwheel._cuda") or _load(CUDA)


def _load(module: Module) -> ModuleType:
    name = f"bucketwheel.{module.name}"
    with _guards[module]:
        if name in sys.modules:
            return sys.modules[name]
        path = locate(module)
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        try:
            loaded = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore[arg-type]
            loader.exec_module(loaded)
        except ImportError as error:
            remedy = f"remove {path.parent}"
            if env.text("BW_NATIVE_DIR"):
                remedy = "unset BW_NATIVE_DIR, or set it to a folder for this Python"
            raise explain(f"{path} cannot be loaded: {error}", module=module, remedies=[remedy]) from error
        sys.modules[name] = loaded
        setattr(sys.modules["bucketwheel"], module.name, loaded)
        return loaded


# ---- finding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Where a module is, or what it would be built from."""

    origin: str  # "named" by BW_NATIVE_DIR, "installed", "cached"; "missing": not built yet
    path: Path | None = None  # None: missing
    entry: Path | None = None  # its place in the cache; None, as the next two, if the cache was not asked
    recipe: Recipe | None = None
    toolchain: Toolchain | None = None


def find(module: Module) -> Found:
    """Look for a module without building it. Raises `BuildError` if it is missing and cannot be built."""
    if folder := env.text("BW_NATIVE_DIR"):
        return Found("named", _named(module, folder))
    csrc = _toolchain.find_csrc()
    installed = _PACKAGE / "_native"
    if (installed / module.manifest).is_file():
        digest = _toolchain.sources_digest(csrc)
        if (compiled := _cache.checked(installed, module, {"sources": digest})) is not None:
            return Found("installed", compiled)
        why = "was compiled at install from other sources or for another Python"
        warnings.warn(f"{installed / module.name} {why}: it is not used", stacklevel=2)
    recipe, toolchain = _read(module, csrc)
    key = _toolchain.build_key(recipe, toolchain)
    entry = _cache.cache_dir() / _entry_name(module, key)
    cached = _cache.checked(entry, module, {"key": key})
    return Found("missing" if cached is None else "cached", cached, entry, recipe, toolchain)


def _named(module: Module, folder: str) -> Path:
    """The module in the folder that BW_NATIVE_DIR names."""
    for name in (module.file, f"{module.name}.so"):
        if (path := Path(folder).expanduser() / name).is_file():
            _cache.expect_trusted(path.parent, module)
            _cache.expect_trusted(path, module)
            return path
    others = sorted(path.name for path in Path(folder).expanduser().glob(f"{module.name}.*.so"))
    has = f"; it has {', '.join(others)}, for another Python" if others else ""
    what = f"BW_NATIVE_DIR={folder!r} has no {module.file}{has}"
    raise explain(what, module=module, remedies=["unset BW_NATIVE_DIR to build it"])


def _read(module: Module, csrc: Path) -> tuple[Recipe, Toolchain]:
    recipe = _toolchain.read_recipe(csrc, module=module)
    return recipe, _toolchain.find_cuda_toolchain() if module is CUDA else _toolchain.find_toolchain()


def _entry_name(module: Module, key: str) -> str:
    return f"{module.kind}-{__version__}-{sysconfig.get_config_var('SOABI')}-{key[:16]}"


def locate(module: Module) -> Path:
    """The file of a module, found or built now."""
    may_build = env.flag("BW_JIT", default=True)
    try:
        found = find(module)
    except BuildError as error:
        if may_build or env.text("BW_NATIVE_DIR"):
            raise
        why = str(error)
        remedy = "use the compiler, Python and pybind11 that filled the cache: they are part of the name of an entry"
    else:
        if found.path is not None:
            return found.path
        if may_build and found.recipe and found.toolchain and found.entry:
            return _build_once(found.recipe, found.toolchain, found.entry.parent)
        why, remedy = f"the cache has no {found.entry}", "unset BW_JIT to build it"
    what = f"BW_JIT=0 forbids building it, and no built module was found: {why}"
    raise explain(what, module=module, remedies=[remedy])


# ---- building --------------------------------------------------------------------------------------------------------


def _build_once(recipe: Recipe, toolchain: Toolchain, cache: Path) -> Path:
    """Build the module and publish it, unless another process does: [Note: one build] in `bucketwheel.native.cache`."""
    module = recipe.module
    made_by = repr((toolchain.identity, toolchain.nvcc_identity))
    hashes = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in (made_by, str(recipe.csrc))]
    folder = cache / "builds" / "-".join([module.kind, *hashes])
    failure = folder / "failed.txt"
    try:
        for made in (cache, cache / "builds"):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            _cache.expect_trusted(made, module)
        with _cache.take(folder, module) as (waited, lock):
            recipe = compile.copy_sources(recipe, folder)  # what is compiled now, whatever is edited meanwhile
            key = _toolchain.build_key(recipe, toolchain)
            entry = cache / _entry_name(module, key)
            if (built := _cache.checked(entry, module, {"key": key})) is not None:
                return built
            if waited and failure.exists():  # while we waited: the same sources would fail again
                failed_key, _, message = failure.read_text().partition("\n")
                if failed_key == key:
                    raise BuildError(message)
            failure.unlink(missing_ok=True)
            _cache.prune(cache)
            archs = f" for GPU architectures {toolchain.archs} ({toolchain.archs.origin})" if toolchain.archs else ""
            usual = module.usual_time and f", usually {module.usual_time}"
            say(f"building the {module.title}{archs} (once{usual}; later starts find it in the cache)")
            start = time.monotonic()
            try:
                path = compile.compile_module(recipe, toolchain, folder, folder / "build.log", lock)
                try_import(module, path, folder / "build.log")
            except BuildError as error:
                failure.write_text(f"{key}\n{error}")
                raise
            path = _cache.publish(path, module, _manifest(recipe, toolchain), entry)
            say(f"built in {time.monotonic() - start:.1f} s: {path}")
            return path
    except OSError as error:
        raise _cache.unwritable(cache, error) from error


def _manifest(recipe: Recipe, toolchain: Toolchain) -> dict[str, Any]:
    """What a module is built from. `find` compares the first two; the others are for people."""
    return {
        "key": _toolchain.build_key(recipe, toolchain),
        "sources": _toolchain.sources_digest(recipe.csrc),
        "compiler": toolchain.identity,
        "flags": " ".join(recipe.flags),
        **({"nvcc": toolchain.nvcc_identity, "archs": str(toolchain.archs)} if toolchain.archs else {}),
    }


def try_import(module: Module, path: Path, log: Path | None = None) -> None:
    """Import a module in a child process. Raises `BuildError` if that fails; it names the ``log`` of the build."""
    command = [sys.executable, "-c", _TRY, f"bucketwheel.{module.name}", str(path), str(_PACKAGE)]
    remedy = "check that the compiler and its C++ runtime library belong together: choose with CXX=..."
    try:
        subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True)
        return
    except subprocess.CalledProcessError as error:
        outcome, lines = f"ended with status {error.returncode}", error.stdout.splitlines()
    except subprocess.TimeoutExpired:
        outcome, lines = "did not end within 60 s", []
    except OSError as error:  # for one, sys.executable is empty where Python is embedded
        outcome, lines = f"could not be started: {error}", []
        remedy = f"build it with an ordinary Python: python -m bucketwheel doctor --build {module.kind}"
    raise explain(
        f"the module was compiled, but the process that imported it {outcome}",
        module=module,
        command=f"{sys.executable} -c 'import ...' {path.name}",
        lines=lines,
        log=log,
        remedies=[remedy],
    )


def build_into(folder: Path, modules: tuple[Module, ...] = (CPU,)) -> None:
    """Compile for `BW_AOT`: put modules and their manifests into ``folder``, where `find` looks for them."""
    log = folder.parent / "native_build.log"  # stays, for the caller to read, if this fails
    for module in modules:
        recipe, toolchain = _read(module, _toolchain.find_csrc())
        with tempfile.TemporaryDirectory() as work:
            recipe = compile.copy_sources(recipe, Path(work))
            built = compile.compile_module(recipe, toolchain, Path(work), log)
            try_import(module, built, log)
            _cache.write_entry(built, module, _manifest(recipe, toolchain), folder)
    log.unlink()
