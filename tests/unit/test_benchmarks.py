"""benchmarks/bench_*.py notice results that are wrong, and write a line for every case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_comm  # noqa: E402
import bench_peer_reads  # noqa: E402
from harness import Rank, run_ranks  # noqa: E402

from bucketwheel.comm.communicator import Communicator  # noqa: E402


class Nothing:
    """The handle of a collective that was left out."""

    def wait(self) -> None:
        pass


def notices(rank: Rank, module_name: str, collective: str, place: int) -> str:
    """What the checks say where call number ``place`` of the collective does nothing."""
    module = sys.modules[module_name]
    right, calls = getattr(module, collective), 0

    def wrong(*words: Any) -> Any:
        nonlocal calls
        calls += 1
        return Nothing() if calls == place else right(*words)

    setattr(module, collective, wrong)
    try:
        with Communicator(backend="shm", timeout_s=30) as comm:
            if module is bench_comm:
                bench_comm.cases_of(comm, "1 MiB", 1 << 20)
            else:
                bench_peer_reads.cases_of(comm, 1 << 20)
    except RuntimeError as error:
        return str(error)
    finally:
        setattr(module, collective, right)
    return ""


@pytest.mark.parametrize(
    ("module", "collective", "place", "says"),
    [
        ("bench_comm", "all_gather", 3, "1 MiB all-gather: the results differ from gloo's"),
        pytest.param(
            *("bench_peer_reads", "reduce_scatter", 2, "pack + reduce-scatter: the result is wrong"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_collective_that_does_nothing_is_noticed(module: str, collective: str, place: int, says: str) -> None:
    assert run_ranks(2, notices, module, collective, place, timeout_s=120).values == [says, says]


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("script", "lines"),
    [
        *(("bench_calls", 70), ("bench_comm", 18), ("bench_peer_reads", 3), ("bench_pool", 45)),
        ("bench_optim --part host", 17),
        ("bench_shard --millions 1 --blocks 2", 14),
        ("bench_shard --millions 1 --blocks 2 --part memory", 1),
        ("bench_checkpoint --mib 8 --dir .", 16),
    ],
)
def test_every_case_has_its_line(tmp_path: Path, script: str, lines: int) -> None:
    name, *words = script.split()
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", *words, "--json", "lines"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert len({(line["case"], line["peer"], line.get("backend")) for line in found}) == len(found) == lines
    # Sharded, a peak of memory takes no time, and an overhead is a difference, which noise may hide.
    other = {"gpt step memory": "ours_live_bytes", "gpt step overhead": "ours_step_s"} if name == "bench_shard" else {}
    for line in found:
        what = other.get(line["case"].split(",")[0], "ours_s")
        assert line[what] > 0 or "stall" in line["case"]
