"""Examples started as a user starts them: by Python, or by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example_env() -> dict[str, str]:
    paths = [str(EXAMPLES.parent / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


def run_example(
    name: str, ranks: int, *flags: str, directory: Path | None = None, timeout_s: float = 240
) -> tuple[int, str]:
    """Exit code and output (stdout and stderr) of an example, or of another script by its whole path; ``ranks`` 0 means
    plain Python.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    process = subprocess.Popen(
        [sys.executable, *torchrun, str(EXAMPLES / name), *flags],
        cwd=directory,
        env=example_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks; they lead sessions of their own, where no signal from here comes
        try:
            output, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output = "(no output: its processes hold the pipe)"
        pytest.fail(f"{name} did not finish within {timeout_s:g} s:\n{output}")
    return process.returncode, output
