"""Code that tests run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forked_code import run_code, run_in_child


def test_output_and_status_are_those_of_python() -> None:
    code = "import os, sys; print(os.environ['BW_WORD']); print('no', file=sys.stderr); sys.exit(3)"
    done = run_code(code, {**os.environ, "BW_WORD": "yes"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "yes\n", "no\n")
    done = run_code("raise ValueError('bad')", dict(os.environ))
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ValueError: bad"


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    code = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        run_code(code, dict(os.environ), timeout_s=5)
    pid, until = int(path.read_text()), time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_raises_or_hangs_fails() -> None:
    run_in_child(lambda: None)
    with pytest.raises(AssertionError):
        run_in_child(lambda: sys.exit(0))
    with pytest.raises(AssertionError, match=r"not over after 0\.2 s"):
        run_in_child(lambda: time.sleep(60), timeout_s=0.2)
