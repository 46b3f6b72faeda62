"""Builds the C++ tests by cmake/ and runs them: plain, under sanitizers, with the streams' test modes, under valgrind,
and for aarch64 under qemu.

A line ``// runs: address`` in a test_*.cpp names the only runs that say something about this test, and has them in the
default run; ``// slow: thread`` leaves runs to `make test-all`. One that names none is compiled once for the default run:
for the thread sanitizer or, where that is slow, plain, and then it is run with inline and with fuzzed streams too.
valgrind and aarch64 run them all. cmake/CMakeLists.txt says what the other lines mean.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from bucketwheel.native import compile, toolchain
from tests.native.cmake import HERE, ROOT, built, find_tool, run_checked
from tests.support.requirements import need_aarch64, need_valgrind

TESTS = sorted(path.stem for path in HERE.glob("test_*.cpp"))
# The preset and the environment of each run.
RUNS = {
    "plain": ("plain", {}),
    "thread": ("thread", {}),
    "address": ("address", {}),
    "inline": ("plain", {"BW_HOST_STREAM": "inline"}),
    "fuzzed": ("plain", {"BW_HOST_STREAM_FUZZ": "1"}),
}
SANITIZED = {
    f"fuzzed {preset} {seed}": (preset, {"BW_HOST_STREAM_FUZZ": seed, "BW_POOL_POISON": "1"})
    for preset in ("address", "thread")
    for seed in ("2", "3")
}
RUN_TIMEOUT_S = 640.0
EMULATED_TIMEOUT_S = 400.0
VALGRIND = [
    "--quiet",
    "--leak-check=full",
    "--show-leak-kinds=definite,indirect",
    "--errors-for-leak-kinds=definite,indirect",
    "--error-exitcode=9",
    "--fair-sched=yes",  # threads that wait for each other by spinning get their turns
    # Half of what lies between the stacks of an emulated kernel's threads: who goes from one to the other has not left
    # what is between them.
    "--max-stackframe=131072",
]


def words(test: str, key: str) -> list[str]:
    """What a line ``// key: ...`` of the test says."""
    found = re.search(rf"^// {key}: (.*)$", (HERE / f"{test}.cpp").read_text(), re.MULTILINE)
    return found.group(1).split() if found else []


def case_of(test: str, run: str) -> object:
    default = "plain" if "thread" in words(test, "slow") else "thread"
    is_default = run in words(test, "runs") or (run in RUNS and RUNS[run][0] == default)
    is_slow = not is_default or run in words(test, "slow")
    return pytest.param(test, run, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.timeout_s(800)
@pytest.mark.parametrize(
    ("test", "run"),
    [case_of(test, run) for run in RUNS for test in TESTS if run in words(test, "runs") or not words(test, "runs")]
    + [case_of(test, run) for run in SANITIZED for test in TESTS if not words(test, "runs")],
)
def test_native(test: str, run: str) -> None:
    preset, env = {**RUNS, **SANITIZED}[run]
    folder = built(test, preset).parent
    argv = [find_tool("ctest"), "--test-dir", str(folder), "-R", f"^{test}$", "--no-tests=error", "--output-on-failure"]
    run_checked(argv, RUN_TIMEOUT_S, env={**os.environ, **env})


def run_under(watcher: list[str], binary: Path, **env: str) -> None:
    out = run_checked([*watcher, str(binary)], EMULATED_TIMEOUT_S, env={**os.environ, **env})
    assert re.search(r"^[1-9]\d* passed$", out, re.MULTILINE), out


@pytest.mark.timeout_s(800)
def test_bits_of_the_plain_kernels() -> None:
    """And test_native those of the best kernels that this processor runs, test_aarch64 those of another."""
    run_under([], built("test_bits"), BW_CPU_ISA="plain")


@pytest.mark.slow
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("test", TESTS)
def test_aarch64(test: str) -> None:
    """Without the kernels for AVX, and with the memory order and the system calls of another machine, as far as qemu
    has them."""
    emulator = need_aarch64()
    run_under(emulator, built(test, "aarch64"), BW_TEST_EMULATOR="qemu")


@pytest.mark.slow
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("test", TESTS)
def test_valgrind(test: str) -> None:
    """No leak, and no decision by what was never written, which the sanitizers do not see."""
    run_under([need_valgrind(), *VALGRIND], built(test), BW_CPU_ISA="avx2", BW_TEST_EMULATOR="valgrind")


@pytest.mark.slow
@pytest.mark.timeout_s(800)
def test_each_header_compiles_alone() -> None:
    built("all_verify_interface_header_sets", "syntax")


# ---- cmake/ compiles as the build at first use does ------------------------------------------------------------------


def parsed(argv: list[str], folder: Path) -> tuple[frozenset[Path], list[str]]:
    """The sources of a compile command, and its flags that change the object."""
    sources, flags = set(), []
    words = iter(argv[1:])
    for word in words:
        if word in ("-c", "-include"):
            path = folder / next(words)
            if path.parent.name == "Unity":
                sources |= {Path(name) for name in re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE)}
            elif not path.name.startswith("cmake_pch"):
                sources.add(path)
        elif word in ("-o", "-MF"):
            next(words)
        elif word == "-isystem":
            flags.append(f"-isystem {next(words)}")
        elif not word.startswith(("-I", "-W", "-M")):
            flags.append(word)
    return frozenset(sources), sorted(flags)


@pytest.mark.timeout_s(800)
def test_units_are_compiled_as_in_the_build_at_first_use() -> None:
    recipe, tools = toolchain.read_recipe(ROOT / "csrc"), toolchain.find_toolchain()
    ours = dict(
        parsed(list(compile.command(recipe, tools, *unit, out=Path("unit.o"))), recipe.csrc)
        for unit in compile.units(recipe)
    )
    folder = built("build.ninja").parent
    found = json.loads((folder / "compile_commands.json").read_text())
    theirs = dict(parsed(shlex.split(entry["command"]), Path(entry["directory"])) for entry in found)
    assert len(ours) > 15
    assert {unit: theirs.get(unit) for unit in ours} == ours
