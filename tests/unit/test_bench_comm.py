"""benchmarks/bench_comm.py and bench_peer_reads.py: lines for every case, a plot, and checks that notice what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

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
        ("bench_comm", "all_gather", 1, "1 MiB all-gather: the results differ from gloo's"),
        ("bench_comm", "all_gather", 2, "1 MiB all-gather: the results differ from gloo's"),
        ("bench_comm", "all_gather", 3, "1 MiB all-gather: the results differ from gloo's"),
        ("bench_comm", "reduce_scatter", 1, "1 MiB reduce-scatter: the results differ from gloo's"),
        ("bench_comm", "reduce_scatter", 2, "1 MiB reduce-scatter: the results differ from gloo's"),
        ("bench_comm", "all_gather", 9, ""),
        ("bench_peer_reads", "all_gather", 1, "all-gather: the result is wrong"),
        ("bench_peer_reads", "reduce_scatter", 2, "pack + reduce-scatter: the result is wrong"),
        ("bench_peer_reads", "reduce_scatter", 9, ""),
    ],
)
def test_a_collective_that_does_nothing_is_noticed(module: str, collective: str, place: int, says: str) -> None:
    assert run_ranks(2, notices, module, collective, place, timeout_s=120).values == [says, says]


def notices_the_sink(rank: Rank) -> str:
    nothing = mock.Mock(return_value=Nothing())
    with mock.patch.object(Communicator, "reduce_scatter_into", nothing), Communicator(backend="shm") as comm:
        try:
            bench_comm.cases_of(comm, "1 MiB", 1 << 20)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_reduction_into_a_sink_that_does_nothing_is_noticed() -> None:
    says = "1 MiB reduce-scatter to a sink: the results differ from gloo's"
    assert run_ranks(2, notices_the_sink, timeout_s=120).values == [says, says]


def lines_of(tmp_path: Path, script: str, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, f"benchmarks/{script}", "--quick", "--json", str(tmp_path / "lines"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_every_case_has_its_line_and_its_curve(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    lines = lines_of(tmp_path, "bench_comm.py", "--plot", str(plot))
    by_backend = {backend: [line for line in lines if line.get("backend") == backend] for backend in ("shm", "c10d")}
    assert {backend: len(found) for backend, found in by_backend.items()} == {"shm": 2 * 6, "c10d": 2 * 2}
    for line in lines:
        assert line["command"] == "python benchmarks/bench_comm.py --quick"
        assert line["ours_s"] > 0 and line["peer_s"] > 0
        assert "agreement" in line["case"] or line["limit_s"] > 0
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_reads_are_compared_with_packing_too(tmp_path: Path) -> None:
    cases = [line["case"] for line in lines_of(tmp_path, "bench_peer_reads.py")]
    assert cases == [f"16 MiB {case}" for case in ("all-gather", "reduce-scatter", "pack + reduce-scatter")]
