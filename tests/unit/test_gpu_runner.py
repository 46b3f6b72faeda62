"""`make gpu` without a GPU: what it says of parts that fail, hang, refuse and print results."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import run_all
from tests.gpu.run_all import Part

ROOT = Path(__file__).resolve().parents[2]
REFUSAL = "========= Error: Device not supported. See the supported devices"
HANG = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(300)"
RESULTS = "print('BW_JSON {\"case\": 1}'); print('{\"case\": 2}'); print('{not json}'); print('7 passed')"


def python(name: str, code: str, *, timeout_s: float = 30.0) -> Part:
    return Part(name, (sys.executable, "-c", code), timeout_s)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_run_goes_on_past_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_all, "GRACE_S", 0.2)
    parts = [
        python("fails", "print('about to fail'); raise SystemExit(3)"),
        python("hangs", HANG, timeout_s=3.0),
        Part("absent", ("/nowhere/program",), 5.0),
        Part("sanitizer", ("", "--tool"), 5.0, missing="compute-sanitizer is not installed"),
        python("works", RESULTS),
    ]
    monkeypatch.setattr(run_all, "all_parts", lambda: parts)
    out = tmp_path / "out"
    assert run_all.main(["--out", str(out)]) == 3
    ended = {line["part"]: line for line in lines(out) if "outcome" in line}
    assert [line["outcome"] for line in ended.values()] == ["failed", "timed out", "failed", "left out", "ok"]
    assert [line["ok"] for line in ended.values()] == [False, False, False, True, True]
    assert [line["exit_code"] for line in ended.values()] == [3, None, None, None, 0]
    assert (ended["fails"]["last_line"], ended["works"]["last_line"]) == ("about to fail", "7 passed")
    while is_running(int(ended["hangs"]["last_line"])):
        time.sleep(0.02)
    found = [line for line in lines(out) if "outcome" not in line]
    assert found == [{"part": "works", "case": 1}, {"part": "works", "case": 2}]
    rows = (out / "table.txt").read_text().splitlines()
    assert capsys.readouterr().out.splitlines()[-len(rows) :] == rows and rows[-1].startswith("5 parts, 3 failed, ")

    assert run_all.main(["--out", str(out), "--only", "works"]) == 0
    assert [line["part"] for line in lines(out)] == ["works"] * 3, "a second run replaces the first"


def test_a_sanitizer_that_refuses_the_device_is_left_out(tmp_path: Path) -> None:
    """Whatever it ends with then; other parts that say so have failed."""
    for code in (0, 1, 9):
        part = python("memcheck", f"print({REFUSAL!r}); print('more'); raise SystemExit({code})")
        outcome = run_all.run_part(replace(part, unfit="Device not supported", refuses=True), tmp_path / "log", 30.0)
        assert (outcome.outcome, outcome.last_line, outcome.ok) == ("left out", REFUSAL, True)
        assert run_all.run_part(part, tmp_path / "log", 30.0).ok == (code == 0)
    found = python("memcheck", "print('an invalid read'); raise SystemExit(9)")
    found = replace(found, unfit="Device not supported", refuses=True)
    assert run_all.run_part(found, tmp_path / "log", 30.0).outcome == "failed"


def test_every_part_has_its_file_and_its_name() -> None:
    parts = run_all.all_parts()
    assert len({part.name for part in parts}) == len(parts) and run_all.LIMIT_S <= 480
    for part in parts:
        assert all((ROOT / word).is_file() for word in part.argv if word.endswith(".py")), part.name
