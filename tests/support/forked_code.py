"""Code in a process of its own: as `python -c` runs it, two seconds sooner, or in a child forked from this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bucketwheel import _fork_server

HEAD = """
import os
for name, number in (({out!r}, 1), ({err!r}, 2)):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
"""


def run_code(code: str, env: dict[str, str], timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """``python -c code`` under ``env``; started from nothing where only such a process can follow ``env``."""
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryDirectory() as folder, open("/dev/null") as nothing:
        out, err = Path(folder, "out"), Path(folder, "err")
        head = HEAD.format(out=str(out), err=str(err))
        process = _fork_server.fork(head + code, nothing.fileno(), env)
        if process is None:
            return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
            raise
        return subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())


def run_in_child(body: Callable[[], None], timeout_s: float = 30) -> None:
    """``body`` in a child that is forked from here, with all that is here. It must neither raise nor take longer."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child was not over after {timeout_s} s")
        time.sleep(0.01)
    assert ended[1] == 0
