"""`make matrix`: a cell that fails, or is not run, is no pass. With false steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import matrix
from tests.matrix import Cell, Result, Source, StepFailed
from tests.support.packages import ROOT

REPORT = '<testsuites><testsuite tests="9" failures="{failed}" errors="1" skipped="2"/></testsuites>'


class FalseCell(Cell):
    """Its steps are written down; ``answers`` has what they say, or with what they fail."""

    def __init__(self, tmp_path: Path, torch: str = "2.10.0", *, cuda_builds: bool = False, **answers: Any) -> None:
        (tmp_path / "work" / "tree").mkdir(parents=True, exist_ok=True)
        source = Source(tmp_path / "work" / "tree", tmp_path / "bucketwheel-0.1.0.tar.gz", "0123abc")
        super().__init__(f"3.{sys.version_info.minor}", torch, source, tmp_path, cuda_builds=cuda_builds)
        self.answers, self.steps = answers, []

    def step(self, name: object, *command: object, cwd: Path | None = None, timeout_s: float = 0.0) -> str:
        self.steps.append(" ".join(map(str, (name, *command))))
        answer = self.answers.get(str(name).split()[0], "")
        if name == "testing" and answer != "broken":
            (self.folder / "report.xml").write_text(REPORT.format(failed=int(bool(answer))))
        if isinstance(answer, StepFailed):
            raise answer
        return str(answer)


def offer(version: str, *needs: str) -> str:
    return "a note\n" + json.dumps({"install": [{"metadata": {"version": version, "requires_dist": list(needs)}}]})


@pytest.fixture(autouse=True)
def this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "find_python", lambda version: sys.executable)


def test_a_cell(tmp_path: Path) -> None:
    cell = FalseCell(tmp_path, asking=offer("2.10.0+cpu", "filelock"))
    result = cell.run()
    assert (result.version, result.passed, result.failed, result.skipped) == ("2.10.0+cpu", 6, 1, 2)
    words = [step.split()[0] for step in cell.steps]
    assert words == ["making", "asking", "installing", "installing", "building", "training", "testing"]
    assert "torch==2.10.0+cpu" in cell.steps[2] and f"bucketwheel[demo] @ file://{tmp_path}" in cell.steps[3]
    assert all(test in cell.steps[6] for test in matrix.TESTS) and not cell.folder.exists()
    row = matrix.table([Result("3.10", "2.10.0", "2.10.0+cpu", 40.2, 71.0, 6, 1, 2, "passed", commit="0123abc")])
    assert row.splitlines()[2] == "| 3.10 | 2.10.0+cpu | 40 (71) | 6 / 1 / 2 | passed | 0123abc |"


def test_the_tests_of_a_cell_are_there() -> None:
    for test in matrix.TESTS:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), test


@pytest.mark.parametrize("step", ["asking", "installing", "building", "training", "testing"])
def test_a_step_that_fails(tmp_path: Path, step: str) -> None:
    answers = {"asking": offer("2.10.0+cpu"), step: StepFailed(f"{step} failed: because")}
    result = FalseCell(tmp_path, **answers).run()
    assert not result.is_well
    assert result.example == "failed" if step == "training" else result.why == f"{step} failed: because"


def test_a_step_fails_by_its_status_and_its_time(tmp_path: Path) -> None:
    cell = FalseCell(tmp_path)
    cell.folder.mkdir(parents=True)
    with pytest.raises(StepFailed, match=r"^looking failed: ValueError: no$"):
        Cell.step(cell, "looking", sys.executable, "-c", "raise ValueError('no')")
    with pytest.raises(StepFailed, match=r"^looking failed: not over after [01] s$"):
        Cell.step(cell, "looking", "sh", "-c", "echo begun; sleep 300; true", timeout_s=0.5)


def test_what_was_not_run_is_no_pass(tmp_path: Path) -> None:
    passed = Result("3.10", "2.10.0", build_s=40.0, example="passed", passed=6, failed=0)
    left_out = FalseCell(tmp_path, asking=offer("2.13.0", "nvidia-cublas-cu12==12.8.4.1")).run()
    assert left_out.why == "only a CUDA build of several GB is offered" and left_out.build_s is None
    assert FalseCell(tmp_path, asking=offer("2.13.0", "cuda-toolkit"), cuda_builds=True).run().passed == 6
    broken = Result("3.12", "2.10.0", why="installing failed: because")
    for ran, allow_unrun, text, status in (
        ([passed], False, "1 of 1 run, 0 failed", 0),
        ([passed, left_out], False, "1 of 2 run, 0 failed", 1),
        ([passed, left_out], True, "1 of 2 run, 0 failed", 0),
        ([passed, broken, left_out], True, "2 of 3 run, 1 failed", 1),
    ):
        assert matrix.verdict(ran, allow_unrun=allow_unrun) == (text, status)
