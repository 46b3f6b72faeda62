"""Builds and runs the C++ tests: plain, under sanitizers, and with the streams' test modes.

Each test_*.cpp has a line ``// needs: base device pool``: the folders of csrc/ that it is linked with. A line ``//
with: fake_cuda/fibers.cpp kernels/adam_cuda.cu`` adds sources from this folder or csrc/, CUDA ones compiled as C++ with
the emulation of fake_cuda/; ``// link: -rdynamic`` adds flags of the link; ``// runs: address`` names the only runs
that say something about this test, and has them in the default run; ``// slow: thread`` leaves runs to `make test-all`. Objects and binaries are kept in build/native for
as long as their sources do not change.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bucketwheel import _toolchain
from bucketwheel._compile import closure

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "native"
OUT = ROOT / "build" / "native"

TESTS = sorted(path.stem for path in HERE.glob("test_*.cpp"))
CUDA_AS_CXX = [f"-I{HERE / 'fake_cuda'}", "-Wno-unknown-pragmas"]
SANITIZERS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1"],
    "thread": ["-fsanitize=thread", "-O1", "-g1"],
}
RUN_ENV = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # The fork tests start a thread in the child.
    "TSAN_OPTIONS": "die_after_fork=0 halt_on_error=1 second_deadlock_stack=1",
}
BUILD_TIMEOUT_S = 400.0
RUN_TIMEOUT_S = 100.0


def words(test: str, key: str) -> list[str]:
    """What a line ``// key: ...`` of the test says."""
    found = re.search(rf"^// {key}: (.*)$", (HERE / f"{test}.cpp").read_text(), re.MULTILINE)
    return found.group(1).split() if found else []


def for_tests_that_run(run: str, *, slow: bool = False) -> pytest.MarkDecorator:
    """The tests that do this run: all that name none, slow ones if ``slow``, and those that name it."""
    chosen = [test for test in TESTS if run in words(test, "runs") or not words(test, "runs")]

    def marks_of(test: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] if run in words(test, "slow") or (slow and not words(test, "runs")) else []

    return pytest.mark.parametrize("test", [pytest.param(test, marks=marks_of(test)) for test in chosen])


def run_checked(argv: list[str], timeout_s: float, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    assert done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return done.stdout


def stored(stem: str, inputs: list[Path], argv: list[str]) -> Path:
    """``argv + ["-o", path]`` run once for each content of ``inputs``; the path."""
    digest = hashlib.sha256(repr((_toolchain.find_toolchain().identity, argv)).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    place = OUT / f"{stem}-{digest.hexdigest()[:16]}"
    if not place.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        for stale in OUT.glob(f"{stem}-*"):
            if stale != place:  # made meanwhile, by a test that runs beside this one
                stale.unlink(missing_ok=True)
        unfinished = OUT / f".{place.name}.{os.getpid()}"
        run_checked([*argv, "-o", str(unfinished)], BUILD_TIMEOUT_S)
        unfinished.rename(place)
    return place


def build(test: str, sanitizer: str) -> Path:
    """The binary of one test, from build/native or compiled now."""
    source = HERE / f"{test}.cpp"
    folders = words(test, "needs")
    assert folders, f"{source} does not say what it needs"
    extra = [HERE / name if (HERE / name).exists() else ROOT / "csrc" / name for name in words(test, "with")]
    recipe = _toolchain.read_recipe(ROOT / "csrc")
    cxx = [*_toolchain.find_toolchain().cxx, *recipe.flags, *SANITIZERS[sanitizer]]
    compile_argv = [*cxx, f"-I{recipe.csrc}", f"-I{HERE}", "-c"]
    own_argv = [*compile_argv, *(CUDA_AS_CXX if extra else [])]
    fake_toolkit = sorted((HERE / "fake_cuda").glob("*.h")) if extra else []

    def compile_part(path: Path, flags: tuple[str, ...]) -> Path:
        # What it includes and no more: every source is compiled once for all tests.
        return stored(f"{path.stem}-{sanitizer}", closure(recipe.csrc, str(path)), [*compile_argv, str(path), *flags])

    def compile_extra(path: Path) -> Path:
        seen = [*closure(recipe.csrc, str(path)), *fake_toolkit]
        return stored(f"{path.parent.name}_{path.stem}-{sanitizer}", seen, [*own_argv, "-x", "c++", str(path)])

    parts = [(recipe.csrc / part.path, part.flags) for part in recipe.sources if part.path.split("/")[0] in folders]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        seen = [*closure(recipe.csrc, str(source)), *fake_toolkit]
        main = pool.submit(stored, f"{test}-{sanitizer}", seen, [*own_argv, str(source)])
        objects = [*pool.map(compile_extra, extra), *pool.map(lambda part: compile_part(*part), parts)]
        objects.append(main.result())
    return stored(f"run_{test}-{sanitizer}", objects, [*cxx, *map(str, objects), *words(test, "link"), "-ldl"])


def run(test: str, sanitizer: str, **env: str) -> None:
    out = run_checked([str(build(test, sanitizer))], RUN_TIMEOUT_S, {**os.environ, **RUN_ENV, **env})
    assert re.search(r"^[1-9]\d* passed$", out, re.MULTILINE), out


@pytest.mark.timeout_s(600)
@for_tests_that_run("plain")
def test_plain(test: str) -> None:
    run(test, "plain")


@pytest.mark.timeout_s(600)
@for_tests_that_run("thread")
def test_threads(test: str) -> None:
    run(test, "thread")


@pytest.mark.timeout_s(600)
@for_tests_that_run("address", slow=True)
def test_address(test: str) -> None:
    run(test, "address")


@pytest.mark.timeout_s(600)
@for_tests_that_run("inline")
def test_inline_streams(test: str) -> None:
    run(test, "plain", BW_HOST_STREAM="inline")


@pytest.mark.timeout_s(600)
@for_tests_that_run("fuzzed")
def test_fuzzed_streams(test: str) -> None:
    run(test, "plain", BW_HOST_STREAM_FUZZ="1")


@pytest.mark.slow
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("seed", ["2", "3", "4"])
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@for_tests_that_run("fuzzed")
def test_fuzzed_streams_under_sanitizers(test: str, sanitizer: str, seed: str) -> None:
    run(test, sanitizer, BW_HOST_STREAM_FUZZ=seed, BW_POOL_POISON="1")


def test_an_unknown_setting_is_refused() -> None:
    done = subprocess.run(
        [build("test_device", "plain"), "preconditions"],
        env={**os.environ, "BW_HOST_STREAM": "inlined"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode != 0
    assert "BW_HOST_STREAM='inlined': expected 'thread' or 'inline'" in done.stderr
