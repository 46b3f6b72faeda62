"""benchmarks/bench_calls.py runs on every backend, and writes a line for each case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_every_backend_has_its_lines(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_calls.py", "--quick", "--json", str(tmp_path / "lines")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert len({line["case"] for line in lines}) == len(lines) == 5 * 2 * (4 + 3)
    for line in lines:
        assert line["ours_s"] > 0
        if "gather" in line["case"] or "scatter" in line["case"]:
            assert line["peer_s"] > 0 and line["limit_s"] == 5e-6
