"""The local backend on CUDA, simulated, beside the conformance suite: who waits for whom, refusals, launches that fail."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CaptureError, CommError, CommTimeout
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.native import core
from tests.support.comm_cases import check_usable
from tests.support.counted_cuda import plan_cuda_fault
from tests.support.failure_cases import on_threads
from tests.support.simulated_cuda import Calls, Graph, load, posing

pytestmark = pytest.mark.dist


def test_issuing_never_waits_for_a_peer() -> None:
    """Rank 0 issues everything while rank 1 sleeps; its handles are not ordered before rank 1 comes."""
    came = threading.Event()

    def body(comm: Communicator) -> None:
        outs = [torch.zeros(8) for _ in range(5)]
        if comm.rank == 1:
            assert came.wait(10)
        begin = time.monotonic()
        handles = [all_gather(out, torch.full((4,), float(comm.rank)), comm) for out in outs]
        if comm.rank == 0:
            assert time.monotonic() - begin < 5
            assert not any(handle._native.is_ordered or handle.query() for handle in handles)
            assert not handles[0]._native.is_ordered
            with pytest.raises(CommTimeout, match="was still running"):
                handles[0].synchronize(0.05)
            came.set()
        for handle, out in zip(handles, outs, strict=True):
            handle.wait()
            assert out.tolist() == [0.0] * 4 + [1.0] * 4
            assert handle._native.is_ordered

    on_threads("cuda", 2, body)


def test_a_world_that_is_done_goes_without_waiting_for_the_device() -> None:
    """It may be the collector of garbage that drops it, in the middle of a training step."""
    with posing(delays=11):
        world = LocalWorld(1)
        comm = Communicator(world.rank(0), device="cuda")
        all_gather(torch.zeros(4), torch.ones(4), comm).synchronize(10.0)
        calls = Calls()
        comm.close(10.0)
        del comm, world
        gc.collect()
        made = calls.since()
        assert made["stream_destroy"] == 1 and "stream_synchronize" not in made


def test_a_collective_is_not_captured() -> None:
    """It is refused before anything is issued: afterwards the ranks go on together."""

    def expect_refusals(comm: Communicator) -> None:
        out, given = torch.zeros(8), torch.ones(4)
        for call in (lambda: all_gather(out, given, comm), lambda: reduce_scatter(given, out, comm)):
            with pytest.raises(CaptureError, match="the local backend cannot be captured in a CUDA graph"):
                call()

    def body(comm: Communicator) -> None:
        comm.exchange(b"begin")
        if comm.rank == 0:
            with Graph(load()[1]):  # of the default stream, which is every rank's
                comm.exchange(b"capturing")
                expect_refusals(comm)
                comm.exchange(b"refused")
        else:
            comm.exchange(b"capturing")
            expect_refusals(comm)
            comm.exchange(b"refused")
        comm.exchange(b"over")
        out = torch.zeros(8)
        handle = all_gather(out, torch.full((4,), comm.rank + 1.0), comm).wait()
        assert handle.seq == 1
        assert out.tolist() == [1.0] * 4 + [2.0] * 4

    on_threads("cuda", 2, body)


@pytest.mark.parametrize("call", ["launch_reduce", "memcpy_async", "stream_wait_event"])
def test_a_launch_that_fails_fails_on_every_rank(call: str) -> None:
    """With the name of the call; a new world works."""

    def body(comm: Communicator) -> None:
        comm.exchange(b"")
        if comm.rank == 0:
            plan_cuda_fault(call, error=719)
        comm.exchange(b"")
        if call == "memcpy_async":
            handle = all_gather(torch.zeros(8), torch.zeros(4), comm)
        else:
            handle = reduce_scatter(torch.zeros(4), torch.zeros(8), comm)
        with pytest.raises(CommError, match=f"CUDA call {call} failed: unspecified launch failure"):
            handle.synchronize(10.0)

    on_threads("cuda", 2, body)
    on_threads("cuda", 2, check_usable)


def test_a_cpu_sink_is_refused() -> None:
    """The accumulator of host memory cannot take sums that are on the device, and says so on every rank."""

    def body(comm: Communicator) -> None:
        core.set_posing(False)
        accumulator = core.ShardAccumulator(torch.zeros(4), [(0, 4)])
        core.set_posing(True)
        comm.exchange(b"")
        handle = comm._native.reduce_scatter_to_sink(torch.zeros(4), accumulator)
        with pytest.raises(CommError, match="the sink takes sums in host memory"):
            handle.synchronize(10.0)

    on_threads("cuda", 1, body)


def test_a_rank_joins_once() -> None:
    world = LocalWorld(2)
    with posing():
        comm = Communicator(world.rank(0), device="cuda")
        assert (comm.device, comm.backend, comm.pool.device) == (0, "local", 0)
        with pytest.raises(ValueError, match="rank 0 has joined already"):
            Communicator(world.rank(0), device="cuda")
        with pytest.raises(ValueError, match="backend 'shm' is for CPU tensors"):
            Communicator(backend="shm", device="cuda")
        comm.close(0.1)
