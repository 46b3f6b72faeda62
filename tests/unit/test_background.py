"""Threads of ours that are left when the process ends."""

from __future__ import annotations

import subprocess
import sys

# The interpreter takes its time to go; meanwhile a thread that has waited in torch comes back for the GIL.
LEFT = """
import time
from datetime import timedelta
import torch.distributed as dist
from bucketwheel import background
from bucketwheel._build import native

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)

native()
slow = Slow()
background._EXIT_S = 0.2
background.start(dist.HashStore().wait, ["never"], timedelta(seconds=1))
raise SystemExit(7)
"""


def test_a_thread_that_comes_back_when_the_interpreter_has_gone_does_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, "")
