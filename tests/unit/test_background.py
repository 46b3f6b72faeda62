"""Threads of ours that are left when the process ends."""

from __future__ import annotations

import subprocess
import sys

LEFT = """
import dataclasses, os, time
from bucketwheel.comm import background, patience

def ends(after_s):
    time.sleep(after_s)
    os.write(1, b"ended")

patience.PATIENCE = dataclasses.replace(patience.PATIENCE, exit_s=1.0)
background.start(ends, 0.3)
background.start(ends, 60.0)
raise SystemExit(7)
"""


def test_the_end_of_the_process_waits_for_threads_a_little() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "ended", "")
