"""The fake NCCL as ranks meet it: processes, streams of the simulated device, captured graphs. What its functions do is
tested by tests/native/test_fake_nccl.cpp."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather
from bucketwheel.testing import RankPool
from tests.support import simulated_cuda, simulated_nccl
from tests.support.requirements import slow_case

FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


def checked(script: ctypes.CDLL, function: str, *args: Any) -> None:
    result = getattr(script, function)(*args)
    assert result == 0, (function, result, script.ncclGetLastError(None))


def new_comm(script: ctypes.CDLL, rank: int, world: int, id_bytes: bytes) -> ctypes.c_void_p:
    comm = ctypes.c_void_p()
    unique_id = UniqueId.from_buffer_copy(id_bytes)
    checked(script, "ncclCommInitRankConfig", ctypes.byref(comm), world, unique_id, rank, None)
    return comm


def all_reduce(script: ctypes.CDLL, data: torch.Tensor, comm: ctypes.c_void_p, stream: int = 0) -> None:
    place = ctypes.c_void_p(data.data_ptr())
    count = ctypes.c_size_t(data.numel())
    checked(script, "ncclAllReduce", place, place, count, FLOAT32, SUM, comm, ctypes.c_void_p(stream))


# Top-level: rank processes find them by name.


def make_id(rank: int, world: int) -> bytes:
    from bucketwheel.comm import nccl_library

    simulated_nccl.install()
    return nccl_library.unique_id()


def sum_over_ranks(rank: int, world: int, id_bytes: bytes) -> tuple[torch.Tensor, int, str]:
    from bucketwheel.comm import nccl_library

    script = simulated_nccl.install()
    comm = new_comm(script, rank, world, id_bytes)
    data = torch.arange(100_000, dtype=torch.float32) * (rank + 1)
    all_reduce(script, data, comm)
    checked(script, "ncclCommDestroy", comm)
    return data, script.fake_nccl_live_comms(), nccl_library.info().found


def capture_and_replay(rank: int, world: int) -> None:
    script = simulated_nccl.install()
    comm = new_comm(script, 0, 1, make_id(0, 1))
    op = ctypes.c_int()
    two = struct.pack("f", 2.0)
    checked(script, "ncclRedOpCreatePreMulSum", ctypes.byref(op), two, FLOAT32, 1, comm)
    data = torch.ones(4)
    place = ctypes.c_void_p(data.data_ptr())
    with simulated_cuda.posing() as device:
        device.fake_cuda_begin_capture()
        checked(script, "ncclAllReduce", place, place, ctypes.c_size_t(4), FLOAT32, op, comm, None)
        size = device.fake_cuda_capture_position()
        graph = device.fake_cuda_end_capture()
        assert data.tolist() == [1.0] * 4 and size == 1
        for times in (1, 2, 3):
            device.fake_cuda_replay_range(graph, 0, size)
            assert data.tolist() == [2.0**times] * 4
            # Work outside of graphs has its turn in between.
            checked(script, "ncclAllReduce", place, place, ctypes.c_size_t(4), FLOAT32, SUM, comm, None)
        device.fake_cuda_free_graph(graph)
    checked(script, "ncclCommDestroy", comm)


def counts_only(rank: int, world: int) -> None:
    script = simulated_nccl.install()
    with simulated_cuda.posing(), Communicator(backend="nccl", device="cuda") as comm:
        outs, ins = [torch.zeros(world * 4) for _ in range(2)], [torch.full((4,), rank + 1.0) for _ in range(2)]
        with simulated_nccl.counting():
            before, cuda = script.fake_nccl_calls(b"ncclAllGather"), simulated_cuda.Calls()
            assert all_gather(outs, ins, comm).synchronize().query()
            assert script.fake_nccl_calls(b"ncclAllGather") == before + 2 and cuda.since()["event_record"] >= 1
            assert not any(out.any() for out in outs)
        all_gather(outs, ins, comm).synchronize()
        assert outs[1].tolist() == [r + 1.0 for r in range(world) for _ in range(4)]


@pytest.mark.timeout_s(400)
@pytest.mark.parametrize("world", [1, slow_case(2), 4])
def test_processes(world: int) -> None:
    with RankPool(world, backend=None, forked=True) as pool:
        id_bytes = pool.run(make_id)[0]
        results = pool.run(sum_over_ranks, id_bytes)
    expected = torch.zeros(100_000)
    for rank in range(world):
        expected += torch.arange(100_000, dtype=torch.float32) * (rank + 1)
    for data, live, found in results:
        assert torch.equal(data, expected) and live == 0 and found == "BW_NCCL_LIB"
    name = id_bytes.rstrip(b"\0").decode()
    assert not Path(name).exists()


@pytest.mark.timeout_s(400)
def test_captured_work_runs_at_each_replay() -> None:
    with RankPool(1, backend=None, forked=True) as pool:
        pool.run(capture_and_replay)


@pytest.mark.timeout_s(400)
def test_counting_does_nothing_else() -> None:
    with RankPool(2, forked=True) as pool:
        pool.run(counts_only)
