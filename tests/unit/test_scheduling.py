"""tests/support/scheduling.py: a worker of pytest-xdist that crashes once fails one test, and all others still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILES = 12
CRASH = """
def test_crash():
    import os, pathlib
    once = pathlib.Path(__file__).with_suffix(".once")
    if not once.exists():
        once.touch()
        os.abort()
"""


def test_the_files_behind_a_crash_still_run(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    for number in range(FILES):
        test = "def test_one(): pass\n" + (CRASH if number == FILES // 2 else "")
        (tmp_path / f"test_{number:02}.py").write_text(test)
    options = "-p tests.support.scheduling -p no:cacheprovider -n 2 --dist loadfile --no-loadscope-reorder"
    argv = [sys.executable, "-m", "pytest", *options.split()]
    run = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert f"1 failed, {FILES + 1} passed" in run.stdout, run.stdout + run.stderr
