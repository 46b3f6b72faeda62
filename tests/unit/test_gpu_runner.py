"""`make gpu` without a GPU: false parts that fail, hang, print results and leave processes behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import run_all
from tests.gpu.run_all import Part

ROOT = Path(__file__).resolve().parents[2]
# Stays when its group is ended politely, and has a child in a group of its own that does too.
HANG = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
stray = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
stray.stdout.readline()
open(sys.argv[1], "w").write(f"{os.getpid()} {stray.pid}")
print("hanging", flush=True)
time.sleep(300)
"""


def python(name: str, code: str, *arguments: str, timeout_s: float = 30.0) -> Part:
    return Part(name, (sys.executable, "-c", code, *arguments), timeout_s)


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def assert_gone(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, f"still there: {alive}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_goes_on_past_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "GRACE_S", 0.2)
    pids = tmp_path / "pids"
    parts = [
        python("fails", "print('about to fail'); raise SystemExit(3)"),
        python("hangs", HANG, str(pids), timeout_s=3.0),
        Part("absent", ("/nowhere/program",), 5.0),
        Part("sanitizer", ("", "--tool"), 5.0, missing="compute-sanitizer is not installed"),
        python(
            "works", "print('BW_JSON {\"case\": 1}'); print('{\"case\": 2}'); print('{not json}'); print('7 passed')"
        ),
    ]
    outcomes = run_all.run_all(parts, tmp_path / "out")
    assert [outcome.outcome for outcome in outcomes] == ["failed", "timed out", "failed", "left out", "ok"]
    assert [outcome.exit_code for outcome in outcomes] == [3, None, None, None, 0]
    assert [outcome.last_line for outcome in outcomes[:2]] == ["about to fail", "hanging"]
    assert outcomes[3].last_line == "compute-sanitizer is not installed"
    assert outcomes[4].last_line == "7 passed"
    assert 3.0 <= outcomes[1].seconds < 10
    assert_gone([int(pid) for pid in pids.read_text().split()])

    found = lines(tmp_path / "out")
    assert [line["part"] for line in found] == ["fails", "hangs", "absent", "sanitizer", "works", "works", "works"]
    assert found[0] == {
        "part": "fails",
        "outcome": "failed",
        "seconds": outcomes[0].seconds,
        "exit_code": 3,
        "last_line": "about to fail",
        "ok": False,
    }
    assert found[4:6] == [{"part": "works", "case": 1}, {"part": "works", "case": 2}]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logs.txt", "results.jsonl", "table.txt"]
    logs = (tmp_path / "out" / "logs.txt").read_text()
    assert logs.index("==== fails:") < logs.index("about to fail") < logs.index("==== hangs:") < logs.index("hanging")


REFUSAL = "========= Error: Device not supported. See the supported devices"


def test_a_sanitizer_that_refuses_the_device_is_left_out(tmp_path: Path) -> None:
    """Whatever it ends with then; other parts that say so have failed."""
    for code in (0, 1, 9):
        part = python("memcheck", f"print({REFUSAL!r}); print('more'); raise SystemExit({code})")
        outcome = run_all.run_part(replace(part, unfit="Device not supported", refuses=True), tmp_path / "log", 30.0)
        assert (outcome.outcome, outcome.last_line, outcome.ok) == ("left out", REFUSAL, True)
        assert run_all.run_part(part, tmp_path / "log", 30.0).ok == (code == 0)
    found = replace(
        python("memcheck", "print('an invalid read'); raise SystemExit(9)"), unfit="Device not supported", refuses=True
    )
    assert run_all.run_part(found, tmp_path / "log", 30.0).outcome == "failed"
    parts = {part.name: part for part in run_all.all_parts()}
    assert all(float(parts[tool].argv[-1]) < parts[tool].timeout_s for tool in ("memcheck", "racecheck"))
    assert all(
        parts[tool].refuses and parts[tool].unfit and parts[tool].unfit in REFUSAL for tool in ("memcheck", "racecheck")
    )


@pytest.mark.parametrize(("lib", "missing"), [("", True), ("/nccl/libnccl.so.2", False)])
def test_ranks_that_share_a_gpu_openly_need_another_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lib: str, missing: bool
) -> None:
    """Left out with the reason where BW_NCCL_LIB names none, and where what it names is too old, as the part says."""
    monkeypatch.setenv("BW_NCCL_LIB", lib)
    parts = {part.name: part for part in run_all.all_parts()}
    multi = parts["nccl multi"]
    assert bool(multi.missing) == missing and dict(multi.variables)["BW_GPU_RANKS"] == "multi"
    refusal = f"SKIPPED [22] tests/gpu/test_nccl_ranks.py:1: {run_all.MULTI_RANK_UNFIT}; {lib} is 2.28.9"
    part = replace(multi, argv=(sys.executable, "-c", f"print({refusal!r})"))
    outcome = run_all.run_part(part, tmp_path / "log", 30.0)
    assert outcome.outcome == "left out" and "need NCCL 2.30 or newer" in outcome.last_line
    for code, expected in [("raise SystemExit(1)", "failed"), ("import time; time.sleep(60)", "timed out")]:
        part = replace(multi, missing="", argv=(sys.executable, "-c", f"print({refusal!r}, flush=True); {code}"))
        assert run_all.run_part(part, tmp_path / "log", 1.5).outcome == expected, "the skipped test is not all of it"
    for name in ("nccl one", "bench nccl"):
        assert dict(parts[name].variables)["BW_NCCL_LIB"] == "", "torch's own"


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ('print(\'{"status": 1, "warnings": ["the cache is far away"]}\'); raise SystemExit(1)', "ok"),
        ('print(\'{"status": 2, "warnings": []}\'); raise SystemExit(2)', "failed"),
        ("print('{\"status\": 2}'); raise SystemExit(1)", "failed"),
        ("raise RuntimeError('no verdict')", "failed"),
    ],
)
def test_a_build_with_warnings_is_no_failure(tmp_path: Path, code: str, outcome: str) -> None:
    """The doctor says 1 of itself then; a crash ends with 1 and says nothing."""
    build = run_all.all_parts()[0]
    part = replace(build, argv=(sys.executable, "-c", code))
    done = run_all.run_part(part, tmp_path / "log", 30.0)
    assert done.outcome == outcome, done
    assert ("the cache is far away" in done.last_line) == (outcome == "ok")


def test_processes_left_behind_are_ended(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid)"
    outcome = run_all.run_part(python("leaves", code), tmp_path / "log", 30.0)
    assert outcome.outcome == "ok"
    assert_gone([int(outcome.last_line)])


def test_the_overall_limit_cuts_the_last_parts_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "GRACE_S", 0.5)
    monkeypatch.setattr(run_all, "LEAST_S", 1.0)
    sleep = "import time; time.sleep(100)"
    start = time.monotonic()
    outcomes = run_all.run_all([python(name, sleep, timeout_s=2.0) for name in "abc"], tmp_path, limit_s=4.0)
    assert time.monotonic() - start < 8
    assert [outcome.outcome for outcome in outcomes] == ["timed out", "timed out", "no time"]
    assert outcomes[0].seconds >= 2.0 > outcomes[1].seconds
    assert [line["ok"] for line in lines(tmp_path)] == [False] * 3


def test_the_table_and_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    parts = [python("one", "print('fine')"), python("two words", "raise SystemExit(1)"), python("three", "1 / 0")]
    monkeypatch.setattr(run_all, "all_parts", lambda: parts)
    assert run_all.main(["--out", str(tmp_path / "a")]) == 2
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert (tmp_path / "a" / "table.txt").read_text().splitlines() == rows
    assert [row.split("  ")[0].strip() for row in rows[:3]] == ["one", "two words", "three"]
    assert " ok " in rows[0] and rows[0].endswith("fine") and "failed" in rows[1]
    assert rows[2].endswith("ZeroDivisionError: division by zero") and rows[3].startswith("3 parts, 2 failed, ")
    assert run_all.main(["--out", str(tmp_path / "b"), "--only", "one"]) == 0
    assert [line["part"] for line in lines(tmp_path / "b")] == ["one"]
    with pytest.raises(SystemExit):
        run_all.main(["--out", str(tmp_path / "c"), "--only", "four"])
    assert "no such part: four" in capsys.readouterr().err


def test_an_interrupted_run_ends_its_part_and_keeps_the_logs(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = "import sys; from tests.gpu import run_all; from pathlib import Path; import signal\n"
    code += "signal.signal(signal.SIGTERM, run_all._interrupted); run_all.GRACE_S = 0.2\n"
    code += "part = run_all.Part('hangs', (sys.executable, '-c', sys.argv[1], sys.argv[2]), 60.0)\n"
    code += "run_all.run_all([part], Path(sys.argv[3]))\n"
    command = [sys.executable, "-c", code, HANG, str(pids), str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as runner:
        end = time.monotonic() + 30
        while not (pids.exists() and len(pids.read_text().split()) == 2):
            assert time.monotonic() < end and runner.poll() is None
            time.sleep(0.02)
        runner.send_signal(signal.SIGTERM)
        runner.communicate(timeout=30)
    assert_gone([int(pid) for pid in pids.read_text().split()])
    assert "==== hangs" in (tmp_path / "out" / "logs.txt").read_text()


def test_a_long_log_keeps_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "LOG_BYTES", 100)
    run_all.run_all([python("talks", "print('first'); print('x' * 500); print('last')")], tmp_path)
    text = (tmp_path / "logs.txt").read_text()
    assert "first" in text and "last" in text and "bytes left out" in text and text.count("x") < 120


def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    for name in ("first", "second"):
        run_all.run_all([python(name, "pass")], tmp_path)
    assert [line["part"] for line in lines(tmp_path)] == ["second"]


def test_the_parts_fit_and_are_named_once() -> None:
    parts = run_all.all_parts("python3")
    assert len({part.name for part in parts}) == len(parts)
    assert parts[0].name == "build" and run_all.LIMIT_S <= 480
    order = [part.name for part in parts]
    assert order.index("bench adam") < order.index("bench norm") < order.index("bench nccl") < order.index("memcheck")
    assert all(part.timeout_s <= 60.0 for part in parts if "nccl" in part.name)
    assert all(part.timeout_s < run_all.LIMIT_S for part in parts)


def test_parts_run_from_the_source_tree_with_everything_required(tmp_path: Path) -> None:
    code = "import bucketwheel, json, os; keys = ('BW_REQUIRE', 'BW_CACHE_DIR')\n"
    code += "print(json.dumps({'file': bucketwheel.__file__, **{key: os.environ.get(key) for key in keys}}))\n"
    code += "assert os.environ['ONLY_HERE'] == 'yes'"
    part = Part("sees", (sys.executable, "-c", code), 60.0, variables=(("ONLY_HERE", "yes"),))
    assert run_all.run_part(part, tmp_path / "log", 60.0).ok
    assert "ONLY_HERE" not in run_all.environment()
    (found,) = run_all.results_of("sees", tmp_path / "log")
    assert found["file"] == str(ROOT / "python" / "bucketwheel" / "__init__.py")
    assert found["BW_REQUIRE"] == "gpu,nvcc" and found["BW_CACHE_DIR"]


@pytest.mark.parametrize(("require", "status", "says"), [("", 0, "1 skipped"), ("gpu", 1, "BW_REQUIRE=gpu")])
def test_tests_of_the_folder_are_skipped_without_a_gpu(tmp_path: Path, require: str, status: int, says: str) -> None:
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text("def test_it(): raise AssertionError\n")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "BW_REQUIRE": require}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-ra",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == status, done.stdout
    assert says in done.stdout and "sees no CUDA device" in done.stdout and "needs gpu" in done.stdout
