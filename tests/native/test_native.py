"""Builds and runs the C++ tests: plain, under sanitizers, with the streams' test modes, under valgrind, and for
aarch64 under qemu.

Each test_*.cpp has a line ``// needs: base device pool``: the folders of csrc/ that it is linked with. A line ``//
with: fake_cuda/fibers.cpp kernels/adam_cuda.cu`` adds sources from this folder or csrc/, CUDA ones compiled as C++ with
the emulation of fake_cuda/; ``// link: -rdynamic`` adds flags of the link; ``// runs: address`` names the only runs
that say something about this test, and has them in the default run; ``// slow: thread`` leaves runs to `make test-all`.
One that names none is compiled once for the default run: for the thread sanitizer or, where that is slow, plain, and then
it is run with inline and with fuzzed streams too. valgrind and aarch64 run them all. Objects and binaries are kept in build/native for as long as their sources do not
change.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.native.objects import (
    HERE,
    ROOT,
    in_parallel,
    module_objects,
    object_of,
    program,
    run_checked,
)
from tests.support.requirements import need_aarch64, need_valgrind

TESTS = sorted(path.stem for path in HERE.glob("test_*.cpp"))
RUN_ENV = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # The fork tests start a thread in the child.
    "TSAN_OPTIONS": "die_after_fork=0 halt_on_error=1 second_deadlock_stack=1",
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


def for_tests_that_run(run: str, *, build: str = "plain") -> pytest.MarkDecorator:
    """The tests that do this run, which needs this build: all that name none, and those that name it."""
    chosen = [test for test in TESTS if run in words(test, "runs") or not words(test, "runs")]

    def marks_of(test: str) -> list[pytest.MarkDecorator]:
        default = "plain" if "thread" in words(test, "slow") else "thread"
        is_default = bool(words(test, "runs")) or build == default
        return [] if is_default and run not in words(test, "slow") else [pytest.mark.slow]

    return pytest.mark.parametrize("test", [pytest.param(test, marks=marks_of(test)) for test in chosen])


def binary(test: str, build: str) -> Path:
    """The binary of one test, from build/native or compiled now."""
    folders = words(test, "needs")
    assert folders, f"{test}.cpp does not say what it needs"
    extra = [HERE / name if (HERE / name).exists() else ROOT / "csrc" / name for name in words(test, "with")]
    objects = in_parallel(lambda path: object_of(path, build=build), [HERE / f"{test}.cpp", *extra])
    objects += module_objects(folders, build)
    return program(f"run_{test}", objects, *words(test, "link"), build=build)


def run(test: str, build: str, *under: str, **env: str) -> None:
    """Runs all of a test, ``under`` a program that runs or watches others."""
    limit_s = EMULATED_TIMEOUT_S if under else RUN_TIMEOUT_S
    out = run_checked([*under, str(binary(test, build))], limit_s, env={**os.environ, **RUN_ENV, **env})
    assert re.search(r"^[1-9]\d* passed$", out, re.MULTILINE), out


@pytest.mark.timeout_s(800)
@for_tests_that_run("plain")
def test_plain(test: str) -> None:
    run(test, "plain")


@pytest.mark.timeout_s(800)
@for_tests_that_run("thread", build="thread")
def test_threads(test: str) -> None:
    run(test, "thread")


@pytest.mark.timeout_s(800)
@for_tests_that_run("address", build="address")
def test_address(test: str) -> None:
    run(test, "address")


@pytest.mark.timeout_s(800)
def test_bits_of_the_plain_kernels() -> None:
    """And test_plain those of the best kernels that this processor runs, test_aarch64 those of another."""
    run("test_bits", "plain", BW_CPU_ISA="plain")


@pytest.mark.timeout_s(800)
@for_tests_that_run("inline")
def test_inline_streams(test: str) -> None:
    run(test, "plain", BW_HOST_STREAM="inline")


@pytest.mark.timeout_s(800)
@for_tests_that_run("fuzzed")
def test_fuzzed_streams(test: str) -> None:
    run(test, "plain", BW_HOST_STREAM_FUZZ="1")


@pytest.mark.slow
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("test", TESTS)
def test_aarch64(test: str) -> None:
    """Without the kernels for AVX, and with the memory order and the system calls of another machine, as far as qemu
    has them."""
    run(test, "aarch64", *need_aarch64(), BW_TEST_EMULATOR="qemu")


@pytest.mark.slow
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("test", TESTS)
def test_valgrind(test: str) -> None:
    """No leak, and no decision by what was never written, which the sanitizers do not see."""
    run(test, "plain", need_valgrind(), *VALGRIND, BW_CPU_ISA="avx2", BW_TEST_EMULATOR="valgrind")


@pytest.mark.slow
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("seed", ["2", "3"])
@pytest.mark.parametrize("build", ["address", "thread"])
@for_tests_that_run("fuzzed")
def test_fuzzed_streams_under_sanitizers(test: str, build: str, seed: str) -> None:
    run(test, build, BW_HOST_STREAM_FUZZ=seed, BW_POOL_POISON="1")


@pytest.mark.slow
@pytest.mark.timeout_s(500)
@pytest.mark.parametrize("name", ["module.cpp", "cuda_module.cpp"])
def test_the_bindings_compile_without_a_warning(name: str) -> None:
    """As the rest of csrc/ does in the tests' other builds."""
    object_of(ROOT / "csrc" / "bindings" / name)


def test_an_unknown_setting_is_refused() -> None:
    done = subprocess.run(
        [binary("test_device", "plain"), "preconditions"],
        env={**os.environ, "BW_HOST_STREAM": "inlined"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode != 0
    assert "BW_HOST_STREAM='inlined': expected 'thread' or 'inline'" in done.stderr
