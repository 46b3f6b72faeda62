"""Threads of ours that are left when the process ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from bucketwheel.comm import background

# The interpreter takes its time to go; meanwhile a thread that has waited in torch comes back for the GIL.
LEFT = """
import os, time
from datetime import timedelta
import torch.distributed as dist
from bucketwheel.comm import background
from bucketwheel.native.modules import native

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


class Starting(threading.Thread):
    """As one is for a moment: it has its ident, and is not said to be alive."""

    ident = 1

    def is_alive(self) -> bool:
        return False


def test_a_thread_that_is_just_starting_is_not_taken_for_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = Starting()
    background._threads[thread] = None
    with monkeypatch.context() as patch:
        patch.setattr(background.threading, "enumerate", lambda: [thread])
        background.start(lambda: None)
        assert thread in background._threads
    background.start(lambda: None)
    assert thread not in background._threads
