"""`make matrix`: the Pythons and torches that the package installs beside, builds for and passes its tests with, on CPUs.

    python tests/matrix.py --cuda-builds                     # all cells, one after the other, minutes each
    python tests/matrix.py --cell 3.10:2.10.0 --cuda-builds  # one, though its torch is of several GB
    python tests/matrix.py --cell 3.12:none                  # the native module alone: it needs no torch

A cell is a virtual environment of its own, removed afterwards. The package is installed from the sdist, as users do; its
native module is built there with an empty cache, a training on two ranks runs with it, and `TESTS` run in the source
tree (`pythonpath` of pyproject.toml), so of the installed package the build and the training are the proof. A cell that
fails or cannot be run says why, and is a failure; build/matrix has the logs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.packages import copy_tree, make_sdist, plain_environment

LOGS = Path(__file__).resolve().parents[1] / "build" / "matrix"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("none", "2.10.0", "2.13.0", "2.15.0")
UNIT = "build adam norm pack rendezvous format writer reader doctor".split()
CONFORMANCE = "collectives/test_comm_c10d collectives/test_comm_c10d_backends collectives/test_comm_shm".split()
CONFORMANCE += "collectives/test_comm optimizer/test_suite optimizer/test_optim_state".split()
CONFORMANCE += "optimizer/test_optim_compiled optimizer/test_prefetch".split()
TESTS = [f"tests/unit/test_{name}.py" for name in UNIT] + [f"tests/conformance/{name}.py" for name in CONFORMANCE]
TESTS += ["tests/stock/test_stock.py"]
NEEDED = ("pytest>=8", "pytest-xdist", "numpy", "cmake>=3.24")
EXAMPLE = (
    "--layers 2 --width 32 --heads 2 --context 32 --batch 4 --steps 24 --lr 3e-3 --warmup 2 --evaluate-every 8 "
    "--evaluate-batches 2 --text-bytes 300000 --compare ddp"
).split()

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


class Cell:
    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        self.bin = folder / "venv" / "bin"
        self.python = self.bin / "python"

    def run(self, python: str, torch: str, tree: Path, sdist: Path, *, cuda_builds: bool) -> str:
        """Its row of the table. Raises RuntimeError where a step fails."""
        self.step(find_python(python), "-m", "venv", "--upgrade-deps", self.folder / "venv")
        if torch == "none":
            self.pip("pybind11>=2.13", "ninja")
            return f"built in {self.timed('-c', BUILD_ALONE, tree / 'python' / 'bucketwheel'):.0f} s"
        dry_run = ("install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--report", "-")
        text = self.step(self.python, "-m", "pip", *dry_run, f"torch=={torch}")
        (found,) = json.loads(text[text.index("{") : text.rindex("}") + 1])["install"]
        needs = found["metadata"].get("requires_dist", ())
        if any(need.startswith(("nvidia-", "cuda-")) for need in needs) and not cuda_builds:
            raise RuntimeError("only a CUDA build of several GB is offered: --cuda-builds")
        wanted = f"torch=={found['metadata']['version']}"
        self.pip(wanted)
        self.pip(f"bucketwheel[demo] @ {sdist.as_uri()}", *NEEDED, wanted)
        build_s = self.timed("-c", BUILD)
        example = (tree / "examples" / "train_gpt.py", *EXAMPLE)
        self.step(self.bin / "torchrun", "--standalone", "--nproc-per-node", "2", *example)
        options = "-q -n 2 --dist loadfile -p no:cacheprovider -m".split()
        said = self.step(self.python, "-m", "pytest", *options, "not slow", *TESTS, cwd=tree, timeout_s=1200)
        return f"{wanted}: built in {build_s:.0f} s, trained; {said.strip().splitlines()[-1]}"

    def pip(self, *what: str) -> None:
        self.step(self.python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *what)

    def timed(self, *words: object) -> float:
        start = time.monotonic()
        self.step(self.python, *words)
        return time.monotonic() - start

    def step(self, *command: object, cwd: Path | None = None, timeout_s: float = 900.0) -> str:
        """Its stdout. All of its output goes into the log of the cell."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        environment = plain_environment(BW_CACHE_DIR=str(self.folder / "cache"), PATH=path, OMP_NUM_THREADS="1")
        words = [str(word) for word in command]
        with subprocess.Popen(
            words,
            cwd=cwd or self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, _ = process.communicate(timeout=timeout_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks and workers, too
                raise RuntimeError(f"{' '.join(words)[:60]}: {error}") from error
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(words)}\n{out}\n")
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(words)[:60]} failed: {[*out.strip().splitlines(), ''][-1]}")
        return out


def find_python(version: str) -> str:
    """``python3.x`` on PATH, else pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))]
    for path in filter(None, found):  # pyenv's stand-ins are on PATH for versions that are not chosen, too
        done = subprocess.run([path, "--version"], check=False, capture_output=True, text=True, timeout=60)
        if done.stdout.startswith(f"Python {version}."):
            return path
    raise RuntimeError(f"there is no Python {version}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", metavar="PYTHON:TORCH", help="this one; may be repeated")
    parser.add_argument("--cuda-builds", action="store_true", help="install torch though it is a CUDA build")
    options = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    # Not in build/, where pytest looks for no tests.
    with tempfile.TemporaryDirectory(prefix="bucketwheel-matrix-") as name:
        tree = copy_tree(Path(name, "tree"))
        sdist = make_sdist(tree, Path(name))
        for text in options.cell or [f"{python}:{torch}" for python in PYTHONS for torch in TORCHES]:
            log = LOGS / f"{text.replace(':', '-')}.log"
            log.unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(dir=name) as folder:
                try:
                    python, _, torch = text.partition(":")
                    row = Cell(Path(folder), log).run(python, torch, tree, sdist, cuda_builds=options.cuda_builds)
                except RuntimeError as error:
                    row = f"FAILED: {error}"
                    failed += 1
            print(f"Python {python}, torch {torch}: {row}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
