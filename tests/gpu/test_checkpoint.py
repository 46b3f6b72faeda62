"""Checkpoints of CUDA memory: stock DCP, save, load and async_save, whole states, snapshots; all bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.gpu.device import DEVICE, Tell
from tests.gpu.local_ranks import GivenGrads, in_world, on_cpu_ranks
from tests.support.checkpoint_jobs import save_parts

F32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BEHIND_S = 0.05  # of the device when a save is asked for
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": F32},
    "amsgrad": {"dtype": F32, "amsgrad": True},
    "masters": {"dtype": BF16},
    "remainders": {"dtype": BF16, "master_weights": "bf16_remainder"},
}
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


class Job:
    """A model whose gradients are given, and its optimizer."""

    def __init__(self, precision: str, comm: Communicator | None, device: torch.device, seed: int = 0) -> None:
        options = dict(PRECISIONS[precision])
        if comm is not None:
            options |= {"process_group": comm, "bucket_cap_mb": 0.02}
        self.model = GivenGrads(options.pop("dtype"), device, seed)
        self.optimizer = bw.ShardedAdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1, **options)

    def train(self, steps: range) -> None:
        for step in steps:
            self.model(self.model.draw_here(step)).backward()
            self.optimizer.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def whole(self) -> list[Tensor]:
        """Copies on the CPU of all parameters and states. Collective."""
        state = self.optimizer.full_state_dict(None)["state"]
        parts = [state[i][name] for i in sorted(state) for name in sorted(state[i])]
        return [DEVICE.get(x) for x in (*self.model.parameters(), *parts)]

    def state(self) -> dict[str, Any]:
        self.optimizer.param_sync()
        model = {name: p.clone() for name, p in self.model.state_dict().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def trained(precision: str, comm: Communicator | None, device: torch.device, steps: int = 3) -> Job:
    job = Job(precision, comm, device)
    job.train(range(steps))
    return job


def assert_equal(got: list[Tensor], expected: list[Tensor], what: object = "") -> None:
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"{what}: {index} of {len(expected)}"


def expected_of(precision: str, world: int, steps: int = 3) -> list[Tensor]:
    """What the CPU has after so many steps of as many ranks."""

    def body(rank: int, comm: Any) -> list[Tensor]:
        job = trained(precision, comm, CPU, steps)
        whole = job.whole()
        job.optimizer.close()
        return whole

    return on_cpu_ranks(world, body)[0]


# ---- stock DCP


def loaded_by_dcp(job: Job, reader: Any) -> list[Tensor]:
    state = job.state()
    dcp.load(state, storage_reader=reader, no_dist=True)
    job.load(state)
    try:
        return job.whole()
    finally:
        job.optimizer.close()


@pytest.mark.parametrize("world", [0, 2, 3])
@every_precision
def test_dcp_brings_it_to_another_device(precision: str, world: int, tmp_path: Path) -> None:
    """From CUDA, by our writer, into CUDA and CPU memory, by our reader and torch's. World 0: without a communicator."""

    def body(rank: int, comm: Any) -> tuple[dict[str, Any], list[Tensor]]:
        job = trained(precision, comm, DEVICE.tensors)
        state, whole = job.state(), job.whole()
        job.train(range(3, 4))  # what is exported is no view
        job.optimizer.close()
        return state, whole

    got = in_world(world, body)
    expected = expected_of(precision, world)
    assert_equal(got[0][1], expected)
    save_parts([state for state, _ in got], bw.checkpoint.Writer(tmp_path))
    assert_equal(loaded_by_dcp(Job(precision, None, DEVICE.tensors, 7), bw.checkpoint.Reader(tmp_path)), expected)
    with DEVICE.cpu():
        assert_equal(loaded_by_dcp(Job(precision, None, CPU, 7), dcp.FileSystemReader(tmp_path)), expected)


@pytest.mark.parametrize("pins", [True, False])
def test_a_stager_with_a_stream_of_its_own_reads_what_was_there(pins: bool) -> None:
    """States that the device has not computed yet when it begins; the copies stay as they are while training goes on."""
    DEVICE.need_gpu("streams")

    def body(rank: int, comm: Any) -> Any:
        job = trained("masters", comm, DEVICE.tensors, 2)
        stager = DefaultStager(StagingOptions(pins, False, True, True))
        DEVICE.hold(BEHIND_S)
        job.train(range(2, 3))
        state = job.state()
        staged = stager.stage(state)
        job.train(range(3, 6))
        taken, expected = staged.result(20.0), [*state["optimizer"]["state"].values()]
        for i, entry in enumerate(taken["optimizer"]["state"].values()):
            for name in entry.keys() - {"step"}:
                assert torch.equal(entry[name].piece, expected[i][name].piece.cpu()), (i, name)
        pieces = [entry["exp_avg"].piece for entry in taken["optimizer"]["state"].values()]
        assert any(piece.is_pinned() for piece in pieces) is pins
        stager.close()
        job.optimizer.close()

    in_world(2, body)


# ---- save, load, async_save


def loaded(precision: str, world: int, folder: Path) -> list[list[Tensor]]:
    def body(rank: int, comm: Any) -> list[Tensor]:
        job = Job(precision, comm, DEVICE.tensors, seed=7)
        assert bw.checkpoint.load(folder, job.model, job.optimizer) == {"step": 3}
        whole = job.whole()
        job.optimizer.close()
        return whole

    return in_world(world, body)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(0, 2), (2, 3), (3, 1)])
@every_precision
def test_save_and_load_at_other_worlds(precision: str, saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    """The save is asked for while the device is behind. Staging is small: parts follow each other through it."""

    def body(rank: int, comm: Any) -> None:
        job = trained(precision, comm, DEVICE.tensors, 2)
        DEVICE.hold(BEHIND_S)
        job.train(range(2, 3))
        bw.checkpoint.save(tmp_path, job.model, job.optimizer, {"step": 3}, staging_bytes=1 << 14)
        job.optimizer.close()

    in_world(saved_by, body)
    for whole in loaded(precision, loaded_by, tmp_path):
        assert_equal(whole, expected_of(precision, saved_by))


@pytest.mark.parametrize("staging_bytes", [1 << 14, 1 << 26])
@pytest.mark.parametrize("world", [0, 2])
@every_precision
def test_async_save_has_the_values_of_the_call(
    precision: str, world: int, staging_bytes: int, tmp_path: Path, tell: Tell
) -> None:
    """Steps follow at once; with little staging memory they wait, with much they copy."""

    def body(rank: int, comm: Any) -> Any:
        job = trained(precision, comm, DEVICE.tensors, 2)
        DEVICE.hold(BEHIND_S)
        job.train(range(2, 3))
        handle = bw.checkpoint.async_save(tmp_path, job.model, job.optimizer, {"step": 3}, staging_bytes=staging_bytes)
        job.train(range(3, 6))
        handle.wait(20.0)
        assert handle.done() and handle.stats.peak_staging_bytes <= staging_bytes
        whole = job.whole()
        job.optimizer.close()
        return whole

    after = in_world(world, body)
    assert_equal(after[0], expected_of(precision, world, 6), "training")
    for whole in loaded(precision, 1, tmp_path):
        assert_equal(whole, expected_of(precision, world), "saved")


# ---- whole states, snapshots


@every_precision
def test_whole_states_go_from_cuda_to_the_cpu_and_back(precision: str) -> None:
    def export(rank: int, comm: Any) -> Any:
        job = trained(precision, comm, DEVICE.tensors)
        full = job.optimizer.full_state_dict(1, chunk_bytes=4096)
        model = {name: DEVICE.get(p) for name, p in job.model.state_dict().items()}
        job.optimizer.close()
        return model, full

    def load(rank: int, comm: Any) -> list[Tensor]:
        job = Job(precision, comm, devices[0], seed=7)
        job.model.load_state_dict(model)
        job.optimizer.load_full_state_dict(full if rank == 0 else None, chunk_bytes=4096)
        whole = job.whole()
        job.optimizer.close()
        return whole

    (model, nothing), (_, full) = in_world(2, export)
    assert nothing == {}
    devices = [CPU]
    for whole in on_cpu_ranks(3, load):
        assert_equal(whole, expected_of(precision, 2), "on the CPU")
    devices = [DEVICE.tensors]
    for whole in in_world(3, load):
        assert_equal(whole, expected_of(precision, 2), "on the device")


@pytest.mark.parametrize("world", [0, 2])
@every_precision
def test_the_cpu_replays_what_the_device_did(precision: str, world: int) -> None:
    """100 steps; `verify` compares the replayed shard with the device's bit for bit. On the simulated device both are on the
    CPU: a process has its tensors on one of the two there."""

    def body(rank: int, comm: Any) -> int:
        job = Job(precision, comm, DEVICE.tensors)
        with bw.Snapshots(job.optimizer, every=2) as snapshots:
            job.train(range(DEVICE.size(100, 20)))
            done = snapshots.verify()
        job.optimizer.close()
        return done

    with DEVICE.cpu():
        steps = in_world(world, body, device=None if DEVICE.is_simulated else "cuda")
    assert steps == [DEVICE.size(100, 20)] * max(1, world)
