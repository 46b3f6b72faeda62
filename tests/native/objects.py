"""C++ compiled for tests: each source once for each set of flags, kept for as long as nothing of it changes.

What the native module consists of is taken from where `bucketwheel.native.modules` keeps its objects, if it was built here.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from bucketwheel.native import cache, compile
from bucketwheel.native import toolchain as _toolchain

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "native"
OUT = ROOT / "build" / "native"

CUDA_AS_CXX = [f"-I{HERE / 'fake_cuda'}", "-Wno-unknown-pragmas"]


@dataclasses.dataclass(frozen=True)
class Build:
    """One of the ways in which the tests' C++ is compiled, beside the flags of csrc/sources.txt."""

    flags: tuple[str, ...] = ()
    cross: str = ""  # a compiler for another machine, and that machine
    machine: str = ""


BUILDS = {
    "plain": Build(),
    "address": Build(("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1")),
    "thread": Build(("-fsanitize=thread", "-O1", "-g1")),
    "aarch64": Build(cross="aarch64-linux-gnu-g++", machine="aarch64"),
}
# What is not clean here is an error; where users build, it is none. The exceptions g++ 12 sees in std::string, and in
# its own headers for AVX-512 and registers that a CUDA kernel fills lane by lane.
_NO_ERRORS = ("array-bounds", "restrict", "maybe-uninitialized")
WARNINGS = ("-Werror", *(f"-Wno-error={name}" for name in _NO_ERRORS))
BUILD_TIMEOUT_S = 400.0

T = TypeVar("T")

# Found once, before there are threads: of two that are first to ask sysconfig at once, one is told too little
# (Python 3.11), and what it compiles gets another name.
toolchain = functools.cache(_toolchain.find_toolchain)


def run_checked(
    argv: Sequence[str], timeout_s: float, *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


def stored(
    stem: str, inputs: Sequence[Path], argv: Sequence[str], *, cwd: Path | None = None, suffix: str = ""
) -> Path:
    """``argv + ["-o", path]`` run once for each content of ``inputs``; the path."""
    digest = hashlib.sha256(repr((identity(argv[0]), list(argv))).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    place = OUT / f"{stem}-{digest.hexdigest()[:16]}{suffix}"
    if not place.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        with open(OUT / f".{stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a test that runs beside this one may be making it
            if not place.exists():
                _make(place, stem, argv, cwd)
    return place


def _make(place: Path, stem: str, argv: Sequence[str], cwd: Path | None) -> None:
    for stale in OUT.glob(f"{stem}-*"):
        stale.unlink(missing_ok=True)
    unfinished = OUT / f".{place.name}.{os.getpid()}"
    run_checked([*argv, "-o", str(unfinished)], BUILD_TIMEOUT_S, cwd=cwd)
    unfinished.rename(place)


def compiler(build: str) -> tuple[str, ...]:
    return (BUILDS[build].cross,) if BUILDS[build].cross else toolchain().cxx


@functools.cache
def identity(program: str) -> str:
    """What tells one version of a compiler from another."""
    if program == toolchain().cxx[0]:
        return toolchain().identity
    return run_checked([program, "--version"], 60)


def module_objects(folders: Sequence[str], build: str) -> list[Path]:
    """The objects of the CPU module's sources in these folders of csrc/."""
    recipe = _toolchain.read_recipe(ROOT / "csrc", BUILDS[build].machine or None)
    chosen = [unit for unit in compile.units(recipe) if unit[0].path.split("/")[0] in folders]
    if build == "thread":  # races are the same in loops that are not unrolled, and those compile sooner
        chosen = [tuple(_without_optimization(source) for source in unit) for unit in chosen]
    often_included = []
    if build != "plain":  # which the native module is
        often_included = precompiled(build)
        recipe = dataclasses.replace(recipe, flags=(*recipe.flags, *WARNINGS, *BUILDS[build].flags))
    tools = dataclasses.replace(toolchain(), cxx=compiler(build))

    def make(unit: tuple[_toolchain.Source, ...]) -> Path:
        built = cache.cache_dir() / "objects" / f"{compile.object_key(recipe, toolchain(), *unit)}.o"
        if build == "plain" and built.is_file():
            return built
        seen = [path for source in unit for path in compile.closure(recipe.csrc, source.path)]
        *argv, _, _ = compile.command(recipe, tools, *unit, out=Path("-"))  # without "-o -"
        if not unit[0].flags:
            argv[len(tools.cxx) : len(tools.cxx)] = often_included
        stem = f"{Path(unit[-1].path).stem}-{build}"
        return stored(stem, seen, argv, cwd=recipe.csrc)

    return in_parallel(make, chosen)


def object_of(path: Path, *flags: str, build: str = "plain") -> Path:
    """The object of one source; a CUDA one is compiled as C++, with the emulation of fake_cuda/."""
    argv = [*_compile_command(build), *precompiled(build), *flags]
    seen = [*compile.closure(ROOT / "csrc", str(path)), *sorted((HERE / "fake_cuda").glob("*.h"))]
    stem = "-".join([*(flag.strip("-") for flag in flags), f"{path.parent.name}_{path.stem}", build])
    return stored(stem, seen, [*argv, "-c", "-x", "c++", str(path)])


def precompiled(build: str) -> list[str]:
    """Flags that put often_included.h, compiled, in front of a source which has no other flags that matter to it."""
    header = HERE / "often_included.h"
    seen = compile.closure(ROOT / "csrc", str(header))
    argv = [*_compile_command(build), "-x", "c++-header", str(header)]
    compiled = stored(f"often_included-{build}", seen, argv, suffix=".h.gch")
    return ["-include", str(compiled.with_suffix("")), "-Winvalid-pch"]


def program(stem: str, objects: Sequence[Path], *flags: str, build: str = "plain") -> Path:
    """The objects, linked with ``flags``."""
    argv = [*compiler(build), *BUILDS[build].flags, "-pthread", *map(str, objects)]
    return stored(f"{stem}-{build}", objects, [*argv, *flags, "-ldl"])


def _compile_command(build: str) -> list[str]:
    recipe = _toolchain.read_recipe(ROOT / "csrc")
    includes = [f"-I{recipe.csrc}", f"-I{HERE}", *(w for folder in toolchain().includes for w in ("-isystem", folder))]
    return [*compiler(build), *recipe.flags, *WARNINGS, *BUILDS[build].flags, *CUDA_AS_CXX, *includes]


def _without_optimization(source: _toolchain.Source) -> _toolchain.Source:
    return dataclasses.replace(source, flags=tuple(flag for flag in source.flags if not flag.startswith("-O")))


def in_parallel(make: Callable[[T], Path], sources: Iterable[T]) -> list[Path]:
    toolchain()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(make, sources))
