"""`make matrix`: the Pythons and torches that the package installs beside, builds for and passes its tests with, on CPUs.

    python tests/matrix.py --cuda-builds                     # all cells, one after the other, minutes each
    python tests/matrix.py --allow-unrun                     # those that need no torch of several GB
    python tests/matrix.py --cell 3.10:2.10.0 --cuda-builds  # one, though its torch is of several GB
    python tests/matrix.py --cell 3.12:none                  # the native module alone: it needs no torch

A cell is a virtual environment of its own, removed afterwards. The package is installed from the sdist, as users do; its
native module is built there with an empty cache, a training on two ranks runs with it, and `TESTS` run in the source
tree (`pythonpath` of pyproject.toml), so of the installed package the build and the training are the proof. A cell that
could not be run says why, and is a failure but for ``--allow-unrun``. The table of all cells is printed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.packages import copy_tree, make_sdist, plain_environment

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("none", "2.10.0", "2.13.0", "2.15.0")
TESTS = (
    *(
        "tests/unit/test_build.py",
        "tests/unit/test_adam.py",
        "tests/unit/test_norm.py",
        "tests/unit/test_pack.py",
    ),
    "tests/unit/test_doctor.py::test_nothing_is_built_unless_asked",
    "tests/unit/test_rendezvous.py",
    *(
        "tests/conformance/collectives/test_comm_c10d.py",
        "tests/conformance/collectives/test_comm_c10d_backends.py",
        "tests/conformance/collectives/test_comm_shm.py",
    ),
    *(
        "tests/conformance/collectives/test_comm.py",
        "tests/conformance/optimizer/test_suite.py",
        "tests/conformance/optimizer/test_optim_state.py",
    ),
    *(
        "tests/conformance/optimizer/test_optim_compiled.py",
        "tests/conformance/optimizer/test_prefetch.py",
        "tests/stock/test_stock.py",
        "tests/unit/test_format.py",
        "tests/unit/test_writer.py",
        "tests/unit/test_reader.py",
    ),
)
NEEDED = ("pytest>=8", "pytest-xdist", "numpy", "cmake>=3.24")
EXAMPLE = (
    "--layers 2 --width 32 --heads 2 --context 32 --batch 4 --steps 24 --lr 3e-3 --warmup 2 --evaluate-every 8 "
    "--evaluate-batches 2 --text-bytes 300000 --compare ddp"
).split()
WORKERS = ("-n", "2", "--dist", "loadfile")

# The native module alone, without the package around it, whose import needs torch.
BUILD_ALONE = """
import sys, types
package = types.ModuleType("bucketwheel")
package.__path__ = [sys.argv[1]]
sys.modules["bucketwheel"] = package
from bucketwheel.native import modules
modules.native()
"""
BUILD = (
    "import bucketwheel as bw, torch, bucketwheel.native.modules as build; build.native(); bw.l2_norm([torch.ones(3)])"
)


@dataclass
class Result:
    """One cell. ``why`` says what is missing of it; without it everything was run and passed."""

    python: str
    torch: str
    version: str = ""  # of torch, as installed
    build_s: float | None = None
    build_cpu_s: float | None = None  # of all processes: what other work on the machine changes less
    passed: int | None = None
    failed: int | None = None
    skipped: int | None = None
    example: str = ""
    why: str = ""
    commit: str = ""

    @property
    def is_well(self) -> bool:
        return self.example in ("", "passed") and "failed" not in self.why

    @property
    def is_run(self) -> bool:
        """Not where there is no such Python, or only a torch that was not to be installed."""
        return self.build_s is not None or not self.is_well


@dataclass(frozen=True)
class Source:
    """What is tried: a copy of the tree, so that edits meanwhile do not matter, and the sdist of it."""

    tree: Path
    sdist: Path
    commit: str


class StepFailed(Exception):
    """A step of a cell did not work; the text is the last line of what it said."""


class Cell:
    def __init__(self, python: str, torch: str, source: Source, folder: Path, *, cuda_builds: bool) -> None:
        self.result = Result(python, torch, commit=source.commit)
        self.source = source
        self.folder = source.tree.parent / f"{python}-{torch}"
        self.cuda_builds = cuda_builds
        self.bin = self.folder / "venv" / "bin"
        self.log = folder / f"{python}-{torch}.log"

    def run(self) -> Result:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.log.write_text("")
        try:
            self.fill()
        except StepFailed as error:
            self.result.why = str(error)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.result

    def fill(self) -> None:
        interpreter = find_python(self.result.python)
        if interpreter is None:
            raise StepFailed(f"there is no Python {self.result.python}")
        self.step("making the environment", interpreter, "-m", "venv", "--upgrade-deps", self.folder / "venv")
        python = self.bin / "python"
        if self.result.torch == "none":
            self.pip("pybind11>=2.13", "ninja")
            package = self.source.tree / "python" / "bucketwheel"
            self.build(python, "-c", BUILD_ALONE, package)
            return
        wanted = self.choose_torch()
        self.pip(f"torch=={wanted}")
        self.pip(f"bucketwheel[demo] @ {self.source.sdist.as_uri()}", *NEEDED, f"torch=={wanted}")
        self.build(python, "-c", BUILD)
        self.train()
        self.test()

    def choose_torch(self) -> str:
        """The version that pip would take; its wheels for CUDA, with all they need, only where they are asked for."""
        asked = f"torch=={self.result.torch}"
        dry_run = ("install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--report", "-", asked)
        text = self.step("asking for torch", self.bin / "python", "-m", "pip", *dry_run)
        (found,) = json.loads(text[text.index("{") : text.rindex("}") + 1])["install"]
        self.result.version = str(found["metadata"]["version"])
        if any(need.startswith(("nvidia-", "cuda-")) for need in found["metadata"].get("requires_dist", ())):
            self.result.version += " (CUDA build)"
            if not self.cuda_builds:
                raise StepFailed("only a CUDA build of several GB is offered")
        return str(found["metadata"]["version"])

    def train(self) -> None:
        command = [self.bin / "torchrun", "--standalone", "--nproc-per-node", "2"]
        self.result.example = "failed"
        with contextlib.suppress(StepFailed):
            self.step("training", *command, self.source.tree / "examples" / "train_gpt.py", *EXAMPLE)
            self.result.example = "passed"

    def test(self) -> None:
        report = self.folder / "report.xml"
        command = ["-m", "pytest", *WORKERS, "-m", "not slow", f"--junitxml={report}", "-p", "no:cacheprovider", *TESTS]
        try:
            self.step("testing", self.bin / "python", *command, cwd=self.source.tree, timeout_s=1200)
        finally:
            if report.is_file():
                count(report, self.result)

    def pip(self, *what: str) -> None:
        self.step("installing", self.bin / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir", *what)

    def build(self, *command: object) -> None:
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        self.step("building", *command)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.result.build_s = round(time.monotonic() - start, 1)
        self.result.build_cpu_s = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)

    def step(self, name: object, *command: object, cwd: Path | None = None, timeout_s: float = 900.0) -> str:
        """Its stdout. All of its output goes into the log of the cell."""
        words = [str(word) for word in command]
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        with subprocess.Popen(
            words,
            cwd=cwd or self.folder,
            env=plain_environment(BW_CACHE_DIR=str(self.folder / "cache"), PATH=path, OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks and workers, too
                self.write_down(words, *process.communicate())
                if isinstance(error, subprocess.TimeoutExpired):
                    raise StepFailed(f"{name} failed: not over after {timeout_s:.0f} s") from error
                raise
        self.write_down(words, out, err)
        if process.returncode != 0:
            raise StepFailed(f"{name} failed: {telling(out, err) or f'status {process.returncode}'}")
        return out

    def write_down(self, words: Sequence[str], *output: str) -> None:
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(words)}\n{''.join(output)}\n")


def telling(*output: str) -> str:
    """The line that says most about a failure: pytest's of a crash, pip's of an error, else the last one."""
    lines = [line.strip() for text in output for line in text.splitlines() if line.strip()]
    found = [line for line in lines if line.startswith(("worker '", "ERROR: ", "FAILED ", "Fatal Python error: "))]
    return [*found, *lines[-1:], ""][0]


def count(report: Path, result: Result) -> None:
    """How the tests ended, by the report of pytest."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    tests, failed, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    result.failed, result.skipped = failed + errors, skipped
    result.passed = tests - failed - errors - skipped


def find_python(version: str) -> str | None:
    """``python3.x`` on PATH, else pyenv's."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += [str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    for path in filter(None, candidates):
        try:  # pyenv's stand-ins are on PATH for versions that are not chosen, too
            done = subprocess.run([path, "--version"], check=False, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return path
    return None


def commit() -> str:
    """With a "+" where files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")


def table(results: Sequence[Result]) -> str:
    lines = ["| Python | torch | cold build, s (CPU s) | tests: passed / failed / skipped | training | commit |"]
    lines.append("|---|---|---|---|---|---|")
    for result in results:
        build = "" if result.build_s is None else f"{result.build_s:.0f} ({result.build_cpu_s or 0:.0f})"
        counts = [result.passed, result.failed, result.skipped]
        tests = "" if None in counts else " / ".join(map(str, counts))
        tests = "; ".join(filter(None, [tests, result.why]))
        torch = "none: the native module alone" if result.torch == "none" else result.version or result.torch
        lines.append(
            f"| {result.python} | {torch} | {build} | {tests or 'built and imported'} | {result.example} "
            f"| {result.commit} |"
        )
    return "\n".join(lines)


def verdict(ran: Sequence[Result], *, allow_unrun: bool) -> tuple[str, int]:
    """What is said last, and the exit status: of cells that failed, and of those that were not run."""
    run = [result for result in ran if result.is_run]
    failed = [result for result in run if not result.is_well]
    text = f"{len(run)} of {len(ran)} run, {len(failed)} failed"
    return text, int(bool(failed) or (len(run) < len(ran) and not allow_unrun))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", metavar="PYTHON:TORCH", help="this one; may be repeated")
    parser.add_argument("--cuda-builds", action="store_true", help="install torch though it is a CUDA build")
    parser.add_argument("--allow-unrun", action="store_true", help="cells that could not be run are no failure")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "matrix", help="logs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells = options.cell or [f"{python}:{torch}" for python in PYTHONS for torch in TORCHES]
    # Not in build/, where pytest looks for no tests.
    with tempfile.TemporaryDirectory(prefix="bucketwheel-matrix-") as name:
        folder = Path(name)
        tree = copy_tree(folder / "tree")
        source = Source(tree, make_sdist(tree, folder), commit())
        ran = []
        for python, _, torch in (text.partition(":") for text in cells):
            print(f"{datetime.datetime.now():%H:%M:%S} Python {python}, torch {torch}", flush=True)
            cell = Cell(python, torch, source, options.out.resolve(), cuda_builds=options.cuda_builds)
            ran.append(cell.run())
            print(table(ran[-1:]).splitlines()[-1], flush=True)
    text, status = verdict(ran, allow_unrun=options.allow_unrun)
    print(f"{table(ran)}\n{text}")
    return status


if __name__ == "__main__":
    sys.exit(main())
