"""Threads of ours that are left when the process ends."""

from __future__ import annotations

import subprocess
import sys

# The interpreter takes its time to go; meanwhile a thread that has waited in torch comes back for the GIL.
LEFT = """
import os, time
from datetime import timedelta
import torch.distributed as dist
from bucketwheel import background
from bucketwheel._build import native

class Slow:
    def __del__(self, sleep=time.sleep, listdir=os.listdir, write=os.write):
        write(1, b"waits" if waiting in listdir("/proc/self/task") else b"came back too early")
        sleep(5.0)

native()
slow = Slow()
background._EXIT_S = 0.2
background.start(dist.HashStore().wait, ["never"], timedelta(seconds=3))
waiting = str(next(iter(background._threads)).native_id)
raise SystemExit(7)
"""


def test_a_thread_that_comes_back_when_the_interpreter_has_gone_does_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "waits", "")
