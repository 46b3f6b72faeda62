"""`make matrix`: how a cell goes on and ends, and the table, with false steps."""

from __future__ import annotations

import json
import shutil
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
        (tmp_path / "work" / "tree").mkdir(parents=True)
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
    return "a note of pip\n" + json.dumps(
        {"install": [{"metadata": {"version": version, "requires_dist": list(needs)}}]}
    )


@pytest.fixture(autouse=True)
def this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "find_python", lambda version: sys.executable)


def test_a_cell(tmp_path: Path) -> None:
    cell = FalseCell(tmp_path, asking=offer("2.10.0+cpu", "filelock"))
    result = cell.run()
    assert (result.version, result.passed, result.failed, result.skipped) == ("2.10.0+cpu", 6, 1, 2)
    assert result.example == "passed" and result.build_s is not None and result.commit == "0123abc"
    words = [step.split()[0] for step in cell.steps]
    assert words == ["making", "asking", "installing", "installing", "building", "training", "testing"]
    assert "torch==2.10.0+cpu" in cell.steps[2] and f"bucketwheel[demo] @ file://{tmp_path}" in cell.steps[3]
    assert cell.steps[3].endswith("torch==2.10.0+cpu") and "nccl" not in cell.steps[3]
    assert all(test in cell.steps[6] for test in matrix.TESTS)
    assert not cell.folder.exists()


def test_the_tests_of_a_cell_are_there() -> None:
    for test in matrix.TESTS:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), test


@pytest.mark.parametrize("need", ["nvidia-cublas-cu12==12.8.4.1", "cuda-toolkit[cudart]==13.0.2"])
def test_a_cuda_build_is_installed_if_asked_for(tmp_path: Path, need: str) -> None:
    result = FalseCell(tmp_path, asking=offer("2.11.0", need)).run()
    assert result.why == "only a CUDA build of several GB is offered" and result.is_well and result.build_s is None
    shutil.rmtree(tmp_path / "work")
    result = FalseCell(tmp_path, asking=offer("2.11.0", need), cuda_builds=True).run()
    assert (result.version, result.why, result.passed) == ("2.11.0 (CUDA build)", "", 6)


def test_without_torch_the_native_module_is_built_alone(tmp_path: Path) -> None:
    cell = FalseCell(tmp_path, "none")
    assert cell.run().is_well
    assert [step.split()[0] for step in cell.steps] == ["making", "installing", "building"]
    assert cell.steps[1].endswith(" pybind11>=2.13 ninja")


@pytest.mark.parametrize("step", ["asking", "installing", "building", "training", "testing"])
def test_a_step_that_fails(tmp_path: Path, step: str) -> None:
    answers = {"asking": offer("2.10.0+cpu"), step: StepFailed(f"{step} failed: because")}
    result = FalseCell(tmp_path, **answers).run()
    assert not result.is_well
    assert result.example == "failed" if step == "training" else result.why == f"{step} failed: because"


def test_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "find_python", lambda version: None)
    assert FalseCell(tmp_path).run().why.startswith("there is no Python 3.")


def test_steps_are_run_logged_and_ended(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    cell = Cell("3.10", "none", Source(tmp_path / "work" / "tree", tmp_path / "sdist", ""), tmp_path, cuda_builds=False)
    cell.folder.mkdir()
    code = "import os, sys; print(os.environ['BW_CACHE_DIR']); print('WARNING: a note', file=sys.stderr)"
    assert cell.step("looking", sys.executable, "-c", code).strip() == str(cell.folder / "cache")
    assert "WARNING: a note" in cell.log.read_text()
    with pytest.raises(StepFailed, match=r"^looking failed: ValueError: no$"):
        cell.step("looking", sys.executable, "-c", "raise ValueError('no')")
    with pytest.raises(StepFailed, match=r"^looking failed: not over after [01] s$"):
        cell.step("looking", "sh", "-c", "echo begun; sleep 300; true", timeout_s=0.5)
    assert "begun" in cell.log.read_text()


def test_the_line_that_tells() -> None:
    crash = "worker 'gw0' crashed while running 'tests/a.py::b'"
    assert (
        matrix.telling(f"2 workers\n{crash}\nFAILED tests/a.py::b\n=== 1 failed ===\nExtension modules: x\n") == crash
    )
    assert matrix.telling("WARNING: a\nERROR: no torch\nWARNING: b") == "ERROR: no torch"
    assert matrix.telling("one\ntwo\n\n") == "two" and matrix.telling("") == ""


def test_what_was_not_run_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = Result("3.10", "2.10.0", build_s=40.0, example="passed", passed=6, failed=0)
    left_out = FalseCell(tmp_path, asking=offer("2.11.0", "nvidia-cublas-cu12")).run()
    broken = Result("3.12", "2.10.0", why="installing failed: because")
    for ran, allow_unrun, text, status in (
        ([passed], False, "1 of 1 run, 0 failed", 0),
        ([passed, left_out], False, "1 of 2 run, 0 failed", 1),
        ([passed, left_out], True, "1 of 2 run, 0 failed", 0),
        ([passed, broken, left_out], True, "2 of 3 run, 1 failed", 1),
    ):
        assert matrix.verdict(ran, allow_unrun=allow_unrun) == (text, status)
    monkeypatch.setattr(matrix, "copy_tree", lambda target: target)
    monkeypatch.setattr(matrix, "make_sdist", lambda tree, folder: folder)
    monkeypatch.setattr(Cell, "run", lambda cell: left_out)
    for words, status in (([], 1), (["--allow-unrun"], 0)):
        monkeypatch.setattr(sys, "argv", ["matrix.py", "--cell", "3.10:2.11.0", "--out", str(tmp_path / "out"), *words])
        assert matrix.main() == status


def test_the_table(tmp_path: Path) -> None:
    results: list[Result] = []
    for python, torch in (
        ("3.13", "newest"),
        ("3.10", "2.11.0"),
        ("3.10", "newest"),
        ("3.10", "2.10.0"),
        ("3.10", "none"),
    ):
        results = matrix.merged(results, Result(python, torch, version="2.15.0" if torch == "newest" else ""))
    assert [(one.python, one.torch) for one in results] == [
        *(("3.10", "none"), ("3.10", "2.10.0"), ("3.10", "2.11.0"), ("3.10", "newest"), ("3.13", "newest"))
    ]
    again = Result("3.10", "2.10.0", "2.10.0+cpu", 40.2, 71.0, 6, 1, 2, "passed", commit="0123abc")
    results = matrix.merged(results, again)
    assert len(results) == 5 and not Result(**{**vars(again), "why": "testing failed: 1 failed"}).is_well
    matrix.save(tmp_path / "results.json", results)
    assert matrix.load(tmp_path / "results.json") == results and matrix.load(tmp_path / "none.json") == []
    lines = matrix.table(results).splitlines()
    assert lines[3] == "| 3.10 | 2.10.0+cpu | 40 (71) | 6 / 1 / 2 | passed | 0123abc |"
    assert "newest: 2.15.0" in lines[5] and "none: the native module alone" in lines[2]


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "testing.md"
    path.write_text(f"above\n{matrix.BEGIN}\nold\n{matrix.END}\nbelow\n")
    matrix.write_between(path, "new")
    matrix.write_between(path, "newer")
    assert path.read_text() == f"above\n{matrix.BEGIN}\nnewer\n{matrix.END}\nbelow\n"
    path.write_text("no marks")
    with pytest.raises(ValueError, match="must have one line"):
        matrix.write_between(path, "new")
    text = (ROOT / "docs" / "testing.md").read_text()
    assert text.count(matrix.BEGIN) == text.count(matrix.END) == 1
