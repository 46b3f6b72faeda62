"""benchmarks/bench_pool.py measures every case in native code and in Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_every_case_has_its_line(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_pool.py", "--quick", "--json", str(tmp_path / "lines")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    native = {f"native, {case}" for case in ("alone", "live", "fenced")}
    assert {line["case"] for line in lines} == native | {"Python, alone", "Python, live"}
    for line in lines:
        assert line["samples"] == 7 and 0 < line["ours_s"] < 1e-3
        assert line["limit_s"] == (300e-9 if line["case"] in native else 2e-6)
