#!/usr/bin/env python3
"""All that needs a GPU, in one command of at most 8 minutes: ``make gpu``, or ``python3 tests/gpu/run_all.py --out
DIR``.

Runs from the source tree with the Python that starts it: nothing is installed or downloaded. Each part is a process
with a time limit of its own; the run goes on past parts that fail, and the overall limit cuts the last ones short, so
the most important come first. ``--out`` gets

    results.jsonl   one line when a part ends: part, outcome, ok, seconds, exit_code, last_line; and before it each line
                    of its output that is a JSON object, alone or after "BW_JSON ", with "part" added
    PART.log        the output of a part
    table.txt       the table that is printed last, one line a part

The exit status is the number of parts that failed. docs/developers/testing.md says what has passed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 470.0  # of 8 minutes
LEAST_S = 5.0  # a part is not started with less
GRACE_S = 3.0  # between SIGTERM and SIGKILL
# What ranks that share a GPU openly say where they cannot.
MULTI_RANK_UNFIT = "ranks that share a GPU need NCCL 2.30 or newer"
_RESULT = re.compile(r"(?:BW_JSON )?(\{.*\})\s*")


@dataclass(frozen=True)
class Part:
    """``missing``: what this machine does not have for the part; it is left out then, which is no failure.
    ``unfit``: what a line of the output says where the part cannot work on this machine: left out too, if all else
    in it passed. ``refuses``: it fails then, whatever it would have found.
    ``warns``: the last line of a part that ends with 1 because it works with warnings.
    ``variables``: of its environment alone."""

    name: str
    argv: tuple[str, ...]
    timeout_s: float
    missing: str = ""
    unfit: str = ""
    refuses: bool = False
    warns: str = ""
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    part: str
    outcome: str  # "ok", "failed", "timed out", "no time", "left out"
    seconds: float
    exit_code: int | None = None
    last_line: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome in ("ok", "left out")


def all_parts(python: str = sys.executable) -> list[Part]:
    """What matters most first."""
    sanitizer = find_sanitizer()

    def test(name: str, timeout_s: float, **variables: str) -> Part:
        argv = (python, "-m", "pytest", "-q", "-ra", f"tests/gpu/test_{name}.py")
        return Part(name, argv, timeout_s, variables=tuple(variables.items()))

    def sanitize(tool: str, timeout_s: float) -> Part:
        cases = ("tests/gpu/sanitizer_cases.py", tool, "--seconds", str(timeout_s - 12.0))
        argv = (sanitizer, "--tool", tool, "--error-exitcode", "9", python, *cases)
        missing = "" if sanitizer else "compute-sanitizer is not installed"
        return Part(tool, argv, timeout_s, missing=missing, unfit="Device not supported", refuses=True)

    def ranks(name: str, which: str, **more: Any) -> Part:
        argv = (python, "-m", "pytest", "-q", "-ra", "tests/gpu/test_nccl_ranks.py", "-k", which)
        return Part(name, argv, 60.0, **more)

    def multi(name: str, which: str) -> Part:
        missing = "" if os.environ.get("BW_NCCL_LIB") else f"{MULTI_RANK_UNFIT}, and BW_NCCL_LIB names none"
        return ranks(name, which, variables=(("BW_GPU_RANKS", "multi"),), missing=missing, unfit=MULTI_RANK_UNFIT)

    def bench(section: str, timeout_s: float, **variables: str) -> Part:
        argv = (python, "benchmarks/bench_gpu.py", "--section", section, "--json", "/dev/stdout")
        return Part(f"bench {section}", argv, timeout_s, variables=tuple(variables.items()))

    doctor = (python, "-m", "bucketwheel", "doctor", "--build", "cpu", "--build", "cuda")
    return [
        Part("build", doctor, 180.0, warns="works, with warnings"),
        bench("host", 60.0),
        bench("sweep", 60.0),
        test("kernels", 90.0),
        test("optim", 75.0),
        test("shard", 50.0, BW_NCCL_LIB=""),
        bench("shard", 40.0, BW_NCCL_LIB=""),
        test("ordering", 60.0, BW_POOL_POISON="1"),
        test("pool_plan", 60.0),
        test("graphs", 40.0),
        test("checkpoint", 60.0),
        # The NCCL that torch brings, whatever BW_NCCL_LIB names.
        replace(test("nccl", 60.0, BW_NCCL_LIB=""), name="nccl one"),
        ranks("nccl two", "not conformance", variables=(("BW_GPU_RANKS", "hosts"),)),
        ranks("nccl two conformance", "conformance", variables=(("BW_GPU_RANKS", "hosts"),)),
        multi("nccl multi", "not conformance"),
        multi("nccl multi conformance", "conformance"),
        bench("adam", 65.0),
        bench("norm", 35.0),
        bench("nccl", 60.0, BW_NCCL_LIB=""),
        sanitize("memcheck", 60.0),
        sanitize("racecheck", 40.0),
        bench("layouts", 25.0),
        bench("gpt", 40.0),
    ]


def find_sanitizer() -> str:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    folders = [f"{home}/bin", f"{home}/compute-sanitizer"]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=":".join(folders)) or ""


def environment() -> dict[str, str]:
    """What every part gets: the source tree as it stands, and no skips for want of a GPU."""
    paths = [str(ROOT / "python"), str(ROOT / "tests"), str(ROOT)]
    return {
        "BW_CACHE_DIR": str(ROOT / "build" / "cache"),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "BW_REQUIRE": "gpu,nvcc",
    }


# ---- one part --------------------------------------------------------------------------------------------------------


def run_part(part: Part, log: Path, limit_s: float) -> Outcome:
    """Run a part for at most ``limit_s``; no process of its group is left when this returns or raises."""
    if part.missing:
        return Outcome(part.name, "left out", 0.0, last_line=part.missing)
    start = time.monotonic()
    with open(log, "wb") as output:
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
            "cwd": ROOT,
        }
        try:
            process = subprocess.Popen(part.argv, env=environment() | dict(part.variables), **options)
        except OSError as error:
            return Outcome(part.name, "failed", 0.0, last_line=str(error))
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            exit_code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    verdict, says = _verdict(part, log, exit_code)
    return Outcome(part.name, verdict, round(time.monotonic() - start, 2), exit_code, says[:200])


def _verdict(part: Part, log: Path, exit_code: int | None) -> tuple[str, str]:
    """The outcome of a part that ended with ``exit_code`` (None: not in time), and the line that tells most about it."""
    lines = [line.strip() for line in _lines(log) if line.strip() and not _RESULT.fullmatch(line)]
    last = lines[-1] if lines else ""
    refusal = next((line for line in lines if part.unfit and part.unfit in line), None)
    if refusal is not None and exit_code is not None and (exit_code == 0 or part.refuses):
        return "left out", refusal
    is_well = exit_code == 0 or (exit_code == 1 and last == part.warns)
    return "timed out" if exit_code is None else "ok" if is_well else "failed", last


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def results_of(part: str, log: Path) -> list[dict[str, object]]:
    """The JSON objects among the lines of a part's output."""
    found = []
    for line in _lines(log):
        if match := _RESULT.fullmatch(line):
            try:
                found.append({"part": part, **json.loads(match[1])})
            except ValueError:
                continue
    return found


# ---- the run ---------------------------------------------------------------------------------------------------------


def run_all(parts: Sequence[Part], out: Path, limit_s: float = LIMIT_S) -> list[Outcome]:
    """Run the parts in order, whatever becomes of each; ``out`` holds their results when this returns."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in [*out.glob("*.log"), *(out / name for name in ("results.jsonl", "table.txt"))]:
        stale.unlink(missing_ok=True)
    start = time.monotonic()
    outcomes = []
    for part in parts:
        log = out / f"{part.name.replace(' ', '_')}.log"
        left_s = limit_s - (time.monotonic() - start)
        print(f"[{limit_s - left_s:5.0f} s] {part.name}", flush=True)
        if left_s < LEAST_S:
            outcome = Outcome(part.name, "no time", 0.0, last_line=f"{limit_s:.0f} s were over")
        else:
            outcome = run_part(part, log, min(part.timeout_s, left_s - min(GRACE_S, left_s / 2)))
        outcomes.append(outcome)
        lines = [*results_of(part.name, log), {**asdict(outcome), "ok": outcome.ok}]
        with open(out / "results.jsonl", "a") as results:
            results.writelines(json.dumps(line) + "\n" for line in lines)
        (out / "table.txt").write_text(table(outcomes) + "\n")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    width = max((len(outcome.part) for outcome in outcomes), default=0)
    rows = [f"{o.part:{width}}  {o.outcome:9}  {o.seconds:6.1f} s  {o.last_line[:90]}".rstrip() for o in outcomes]
    failed = sum(not outcome.ok for outcome in outcomes)
    total = sum(outcome.seconds for outcome in outcomes)
    return "\n".join([*rows, f"{len(outcomes)} parts, {failed} failed, {total:.0f} s"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    parser.add_argument("--only", default="", help="parts to run, with commas between")
    options = parser.parse_args(arguments)
    parts = all_parts()
    if options.only:
        names = options.only.split(",")
        if unknown := set(names) - {part.name for part in parts}:
            parser.error(f"no such part: {', '.join(sorted(unknown))}")
        parts = [part for part in parts if part.name in names]
    outcomes = run_all(parts, options.out.absolute())
    print(table(outcomes), flush=True)
    return min(100, sum(not outcome.ok for outcome in outcomes))


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that the running part is ended and the logs are bundled


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(main())
