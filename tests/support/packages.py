"""The sdist of this tree, made from a copy of it, so that no build leaves anything behind here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache")
TIMEOUT_S = 500


def plain_environment(**changes: str) -> dict[str, str]:
    """This process's, without what would steer a build or lead Python to the source tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BW_", "PYTHONPATH"))}
    return {**kept, **changes}


def copy_tree(target: Path) -> Path:
    """The whole source tree, tests and all: what the sdist leaves out is MANIFEST.in's to say."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        here = {"build", "dist"} if Path(folder) == ROOT else set()  # but tests/dist is ours
        return LEFT_OUT(folder, names) | here

    return Path(shutil.copytree(ROOT, target, ignore=left_out))


def make_sdist(tree: Path, folder: Path) -> Path:
    """Needs the package index, for setuptools, as `pip install .` does."""
    backend = folder / "backend"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(backend), "setuptools>=77"], cwd=folder)
    code = "import sys, build_backend; print(build_backend.build_sdist(sys.argv[1]))"
    path = os.pathsep.join([str(tree), str(backend)])
    out = run([sys.executable, "-c", code, str(folder)], cwd=tree, PYTHONPATH=path)
    return folder / out.splitlines()[-1]


def run(command: list[str], *, cwd: Path, timeout_s: float = TIMEOUT_S, **changes: str) -> str:
    """Its stdout; fails with all that it said."""
    environment = plain_environment(**changes)
    done = subprocess.run(
        command, check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
