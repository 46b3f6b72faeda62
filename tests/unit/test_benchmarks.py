"""benchmarks/bench_*.py notice results that are wrong, and write a line for every case."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_checkpoint  # noqa: E402
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
        ("bench_comm", "reduce_scatter", 2, "1 MiB reduce-scatter: the results differ from gloo's"),
        ("bench_comm", "all_gather", 9, ""),
        ("bench_peer_reads", "reduce_scatter", 2, "pack + reduce-scatter: the result is wrong"),
    ],
)
def test_a_collective_that_does_nothing_is_noticed(module: str, collective: str, place: int, says: str) -> None:
    assert run_ranks(2, notices, module, collective, place, timeout_s=120).values == [says, says]


class Files:
    """A checkpoint in memory, and what trains."""

    def __init__(self, trains: bool = True, loads: bool = True) -> None:
        self.trains, self.loads = trains, loads
        self.live = torch.zeros(3)

    def tensors(self) -> list[torch.Tensor]:
        return [self.live]

    def save(self) -> None:
        self.saved = self.live.clone()

    def load(self) -> None:
        self.live[: 3 if self.loads else 2] = self.saved[: 3 if self.loads else 2]

    def zero_grad(self) -> None:
        pass

    def train_step(self, tokens: torch.Tensor) -> None:
        self.live += tokens if self.trains else 0


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (Files(), ""),
        (Files(loads=False), "x: tensor 0 of 1 is not what was saved"),
        (Files(trains=False), "x: a training step has changed nothing"),
    ],
)
def test_a_load_that_does_not_restore_is_noticed(files: Files, says: str) -> None:
    found = ""
    try:
        bench_checkpoint.expect_restored("x", files, files, torch.ones(()))
    except RuntimeError as error:
        found = str(error)
    assert found == says


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_checkpoints_have_a_line_for_every_case_and_peer(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_checkpoint.py", "--quick", "--mib", "8", "--dir", str(tmp_path)]
    command += ["--json", str(tmp_path / "lines")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {(line["case"], line["peer"]): line for line in map(json.loads, (tmp_path / "lines").open())}
    assert list(found) == [
        *(("save", peer) for peer in ("bare", "fsdp2")),
        *((what, peer) for what in ("load", "load again", "load from the disk") for peer in ("bare", "fsdp2", "limit")),
        ("async_save: stall", "its processor time"),
        ("async_save: stall", "save"),
        ("stock dcp.async_save: call", "memcpy"),
        ("snapshots: in step, 1 x 64 tokens", "memcpy"),
        ("snapshots: step of 1 x 64 tokens", "without"),
    ]
    for (case, peer), line in found.items():
        is_stall = case == "async_save: stall"  # which may be lost in noise
        assert is_stall or (line["peer_s"] > 0 and line["ours_s"] > 0), line
        assert case.startswith(("stock", "snapshots")) or peer == "its processor time" or line["ours_extra_mib"] < 64
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("script", "lines"), [("bench_calls", 70), ("bench_comm", 18), ("bench_peer_reads", 3), ("bench_pool", 45)]
)
def test_every_case_has_its_line(tmp_path: Path, script: str, lines: int) -> None:
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--json", str(tmp_path / "lines")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert len({(line["case"], line.get("backend")) for line in found}) == len(found) == lines
    for line in found:
        assert line["command"] == f"python benchmarks/{script}.py --quick"
        assert line["ours_s"] > 0 and (line["peer_s"] is None or line["peer_s"] > 0)
