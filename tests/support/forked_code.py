"""Code in a process of its own: as `python -c` runs it, two seconds sooner, or in a child forked from this one."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import ranks


def run_code(code: str, env: dict[str, str], timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """``python -c code`` under ``env``; started from nothing if ``env`` has what a forked process could not follow."""
    command = [sys.executable, "-c", code]
    changed = [name for name in env.keys() | os.environ.keys() if env.get(name) != os.environ.get(name)]
    if not ranks.is_followed(changed):
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = ranks.start_process(_execute, code, str(out), str(err), env=env, forked=True)
        process.join(timeout_s)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
            raise subprocess.TimeoutExpired(command, timeout_s)
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _execute(code: str, out: str, err: str) -> None:
    for name, number in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    exec(code, {"__name__": "__main__"})
    ctypes.pythonapi.Py_Exit(0)  # as `python -c` ends, all taken apart


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
