"""C++ for the tests, compiled by cmake/ in build/cmake/<preset>: ninja knows what is out of date, in 20 ms."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from bucketwheel.native import toolchain

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "native"
BUILD_TIMEOUT_S = 780.0
BUILT = "TESTS_BUILT"  # the environment variable that tells ranks what is built: they must not wait for another build


def run_checked(
    argv: Sequence[str], timeout_s: float, *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr}"
    return done.stdout


def find_tool(name: str) -> str:
    """cmake or ctest: the one beside this Python, where `make` installs it, else the one on PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert found is not None, f"{name} is not installed (pip install 'cmake>=3.24')"
    return found


def built(target: str, preset: str = "plain") -> Path:
    """The path of a target, which was up to date when this process, or the one that started it, asked first. Processes
    that ask at once wait for each other. The preset ``syntax`` makes no files: each run parses all again."""
    folder = ROOT / "build" / "cmake" / preset
    known = os.environ.get(BUILT, "").split(os.pathsep)
    if str(folder / target) in known:
        return folder / target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=BUILD_TIMEOUT_S):
        if not is_configured(folder):
            compiler = {"CXX": shlex.join(toolchain.find_compiler())}
            argv = [find_tool("cmake"), "-S", str(ROOT / "cmake"), "--preset", preset]
            run_checked([*argv, f"-DPython_EXECUTABLE={sys.executable}"], 100, env={**os.environ, **compiler})
        # As `cmake --build` does, which takes three times as long where there is nothing to do.
        run_checked([cached(folder, "CMAKE_MAKE_PROGRAM"), "-C", str(folder), target], BUILD_TIMEOUT_S)
    os.environ[BUILT] = os.pathsep.join([*known, str(folder / target)])
    return folder / target


def is_configured(folder: Path) -> bool:
    """Whether build.ninja is there, made with this Python and these presets. It looks for changes of all else itself."""
    ninja, presets = folder / "build.ninja", ROOT / "cmake" / "CMakePresets.json"
    is_new = ninja.is_file() and ninja.stat().st_mtime > presets.stat().st_mtime
    return is_new and cached(folder, "Python_EXECUTABLE") == sys.executable


def cached(folder: Path, name: str) -> str:
    """A value in the folder's CMakeCache.txt."""
    found = re.search(rf"^{name}:\w+=(.*)$", (folder / "CMakeCache.txt").read_text(), re.MULTILINE)
    return found[1] if found else ""
