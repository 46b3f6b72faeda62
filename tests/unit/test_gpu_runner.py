"""`make gpu` without a GPU: what it says of parts that fail, hang, refuse and print results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import run_all
from tests.gpu.run_all import Part

REFUSAL = "========= Error: Device not supported. See the supported devices"
RESULTS = "print('BW_JSON {\"case\": 1}'); print('{\"case\": 2}'); print('{not json}'); print('7 passed')"


def test_a_run_goes_on_past_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def python(name: str, code: str) -> Part:
        return Part(name, (sys.executable, "-c", code), 3.0)

    monkeypatch.setattr(run_all, "GRACE_S", 0.2)
    refuses = python("refuses", f"print({REFUSAL!r}); print('more'); raise SystemExit(9)")
    warns = python("warns", "print('works, with warnings'); raise SystemExit(1)")
    parts = {
        python("fails", "print('about to fail'); raise SystemExit(3)"): "failed",
        python("hangs", "import time; time.sleep(300)"): "timed out",
        Part("absent", ("/nowhere/program",), 5.0): "failed",
        Part("sanitizer", ("", "--tool"), 5.0, missing="compute-sanitizer is not installed"): "left out",
        replace(refuses, unfit="Device not supported", refuses=True): "left out",
        replace(refuses, name="finds", unfit="another text", refuses=True): "failed",
        replace(warns, warns="works, with warnings"): "ok",
        replace(warns, name="does not say so"): "failed",
        python("works", RESULTS): "ok",
    }
    monkeypatch.setattr(run_all, "all_parts", lambda: list(parts))
    assert run_all.main(["--out", str(tmp_path)]) == 5
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines if "outcome" in line] == list(parts.values())
    assert [line for line in lines if "outcome" not in line] == [{"part": "works", "case": n} for n in (1, 2)]
    rows = (tmp_path / "table.txt").read_text().splitlines()
    assert capsys.readouterr().out.splitlines()[-len(rows) :] == rows and rows[-1].startswith("9 parts, 5 failed, ")


def test_every_part_has_its_file_and_its_name() -> None:
    parts = run_all.all_parts()
    assert len({part.name for part in parts}) == len(parts) and run_all.LIMIT_S <= 480
    assert [part.name for part in parts[:3]] == ["build", "bench host", "bench sweep"]
    for part in parts:
        assert all((run_all.ROOT / word).is_file() for word in part.argv if word.endswith(".py")), part.name
