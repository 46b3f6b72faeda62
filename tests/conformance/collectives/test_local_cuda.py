"""The local backend on CUDA, simulated: who waits for whom, what is kept alive, and how it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CaptureError, CommError, CommTimeout, DeviceError, MismatchError, PeerError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool
from bucketwheel.testing import run_threads
from tests.support.counted_cuda import plan_cuda_fault
from tests.support.simulated_cuda import Calls, Graph, posing

pytestmark = pytest.mark.dist


@pytest.fixture(autouse=True)
def simulated() -> Iterator[Any]:
    with posing(delays=11) as library:
        yield library


def on_ranks(world: int, body: Callable[[Communicator], Any], timeout_s: float = 20.0) -> list[Any]:
    places = LocalWorld(world)

    def rank_main(rank: int, _: int) -> Any:
        comm = Communicator(places.rank(rank), timeout_s=timeout_s, device="cuda")
        try:
            return body(comm)
        finally:
            comm.close(2.0)

    return run_threads(rank_main, world)


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
            assert not any(handle.is_ordered() or handle.query() for handle in handles)
            assert not handles[0].await_order(0.05)
            with pytest.raises(CommTimeout, match="was still running"):
                handles[0].synchronize(0.05)
            came.set()
        for handle, out in zip(handles, outs, strict=True):
            handle.wait()
            assert out.tolist() == [0.0] * 4 + [1.0] * 4
            assert handle.is_ordered()

    on_ranks(2, body)


def test_an_operation_runs_behind_the_work_that_each_rank_has_enqueued() -> None:
    """Inputs that a slow stream still writes: the wait is an edge between streams, the host goes on."""

    def body(comm: Communicator) -> None:
        stream = core.Stream("producer", 0)
        for turn in range(5):
            pool = comm.pool
            lease = pool.acquire("in", 64, stream)
            full = lease.tensor(torch.uint8, 64)
            stream.pause(0.01 * (comm.rank + 1))
            stream.fill(full, turn + 1)
            current = core.current_stream(0)
            current.wait(stream.record())
            out = torch.zeros(comm.size * 64, dtype=torch.uint8)
            handle = all_gather(out, full, comm)
            lease.release(after=handle)
            handle.wait()
            assert out.tolist() == [turn + 1] * (64 * comm.size)

    on_ranks(2, body)


def test_what_an_operation_uses_lives_until_it_is_over() -> None:
    """Inputs are dropped by their owner before the device has begun; their memory must not be given to the next tensors."""

    def body(comm: Communicator) -> None:
        for turn in range(20):
            out = torch.zeros(2000)
            given = torch.full((1000,), float(turn))
            all_gather(torch.zeros(2), torch.ones(1), comm).wait()  # there is a stream now
            if comm.rank == 0:
                comm.stream.pause(0.05)  # keeps the device behind
            comm.exchange(b"paused")
            handle = all_gather(out, given, comm)
            del given
            assert not handle.query()
            junk = [torch.full((1000,), float("nan")) for _ in range(4)]
            handle.wait()
            assert out.tolist() == [float(turn)] * 2000
            assert len(junk) == 4

    on_ranks(2, body)


def test_bucket_memory_is_given_on_without_waiting_for_the_device() -> None:
    """release(after=handle), then acquire: the next owner's stream waits, the host does not."""

    def body(comm: Communicator) -> None:
        for _ in range(3):  # warm: staging, events
            lease = comm.pool.acquire("bucket", 4096)
            handle = reduce_scatter(torch.zeros(512), lease.tensor(torch.float32, 1024).fill_(1.0), comm)
            lease.release(after=handle)
        comm.exchange(b"warm")
        calls = Calls()  # of both ranks: the counters are the process's
        comm.exchange(b"begin")
        places = set()
        for turn in range(10):
            lease = comm.pool.acquire("bucket", 4096)
            places.add(lease.place)
            full = lease.tensor(torch.float32, 1024).fill_(float(turn))
            out = torch.zeros(512)
            handle = reduce_scatter(out, full, comm)
            lease.release(after=handle)
            handle.wait()
            assert torch.equal(out, torch.full((512,), 2.0 * turn))
        made = calls.since()
        comm.exchange(b"end")
        assert made["launch_reduce"] >= 10
        assert "event_synchronize" not in made
        assert len(places) == 1

    on_ranks(2, body)


def test_a_collective_is_not_captured(simulated: Any) -> None:
    """It is refused before anything is issued: afterwards the ranks go on together."""

    def expect_refusals(comm: Communicator) -> None:
        out, given = torch.zeros(8), torch.ones(4)
        for call in (lambda: all_gather(out, given, comm), lambda: reduce_scatter(given, out, comm)):
            with pytest.raises(CaptureError, match="the local backend cannot be captured in a CUDA graph"):
                call()

    def body(comm: Communicator) -> None:
        comm.exchange(b"begin")
        if comm.rank == 0:
            with Graph(simulated):  # of the default stream, which is every rank's
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

    on_ranks(2, body)


def test_ranks_that_call_different_things_are_told() -> None:
    def body(comm: Communicator) -> None:
        out, given = torch.zeros(8), torch.zeros(4)
        handle = all_gather(out, given, comm) if comm.rank == 0 else reduce_scatter(given, out, comm)
        with pytest.raises(MismatchError) as caught:
            handle.wait()
        assert "rank 0: all_gather" in str(caught.value) and "rank 1: reduce_scatter" in str(caught.value)
        with pytest.raises(MismatchError):
            handle.synchronize()
        with pytest.raises(MismatchError):
            all_gather(out, given, comm)

    on_ranks(2, body)


def test_a_peer_that_does_not_come_is_a_timeout() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            handle = all_gather(torch.zeros(8), torch.zeros(4), comm)
            begin = time.monotonic()
            with pytest.raises(CommTimeout, match="Not arrived: rank 1") as caught:
                handle.wait()
            assert (caught.value.op, caught.value.seq, caught.value.last_seqs) == ("all_gather", 1, (1, 0))
            assert 0.3 < time.monotonic() - begin < 5
            with pytest.raises(CommTimeout):
                all_gather(torch.zeros(8), torch.zeros(4), comm)
        else:
            time.sleep(1.0)
            with pytest.raises(CommTimeout):
                all_gather(torch.zeros(8), torch.zeros(4), comm)

    on_ranks(2, body, timeout_s=0.4)


def test_a_peer_that_leaves_or_aborts_is_named() -> None:
    def leaving(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.close()
            return
        with pytest.raises(PeerError, match="rank 1"):
            all_gather(torch.zeros(8), torch.zeros(4), comm).wait()

    def aborting(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.abort("out of patience")
            return
        with pytest.raises(CommError, match="aborted by rank 1: out of patience"):
            all_gather(torch.zeros(8), torch.zeros(4), comm).wait()

    on_ranks(2, leaving)
    on_ranks(2, aborting)


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

    on_ranks(2, body)

    def works(comm: Communicator) -> None:
        out = torch.zeros(4)
        reduce_scatter(out, torch.ones(8), comm).wait()
        assert out.tolist() == [2.0] * 4

    on_ranks(2, works)


def test_a_cpu_sink_is_refused() -> None:
    """The accumulator of host memory cannot take sums that are on the device, and says so on every rank."""

    def body(comm: Communicator) -> None:
        core.set_posing(False)
        accumulator = core.ShardAccumulator(torch.zeros(4), [(0, 4)])
        core.set_posing(True)
        comm.exchange(b"")
        handle = comm.reduce_scatter_into(torch.zeros(4), core.ShardSink(accumulator))
        with pytest.raises(CommError, match="the sink takes sums in host memory"):
            handle.synchronize(10.0)

    on_ranks(1, body)


def test_a_sink_has_its_memory_before_its_first_operation() -> None:
    """Operations are enqueued under a lock, and emptying caches for memory may wait for operations that need it."""

    def sink_of(shard: torch.Tensor) -> Any:
        accumulator = core.ShardAccumulatorCuda(shard, [(0, 4)], torch.zeros(3, dtype=torch.float64))
        return core.ShardSinkCuda(accumulator)

    def body(comm: Communicator) -> None:
        shard = torch.zeros(4)
        sink = sink_of(shard)
        comm.exchange(b"made")
        calls = Calls()  # of both ranks: the counters are the process's
        comm.exchange(b"begin")
        sink.begin(False)
        comm.reduce_scatter_into(torch.ones(8), sink).synchronize(10.0)
        comm.exchange(b"reduced")
        made = calls.since()
        comm.exchange(b"end")
        assert made["launch_accumulate"] == 2 and "malloc_device" not in made
        assert shard.tolist() == [2.0] * 4
        if comm.rank == 0:
            for nth in (1, 2):  # again after the caches were emptied
                plan_cuda_fault("malloc_device", countdown=nth, error=2)
            with pytest.raises(DeviceError, match="out of memory .*; pools gave back"):
                sink_of(shard)

    on_ranks(2, body)


def test_a_world_is_of_one_device_and_each_rank_joins_once() -> None:
    world = LocalWorld(2)
    comm = Communicator(world.rank(0), device="cuda")
    assert (comm.device, comm.backend) == (0, "local")
    assert isinstance(comm.pool, Pool) and comm.pool.device == 0
    with pytest.raises(ValueError, match="rank 0 has joined already"):
        Communicator(world.rank(0), device="cuda")
    with pytest.raises(ValueError, match="backend 'shm' is for CPU tensors"):
        Communicator(backend="shm", device="cuda")
    comm.close(0.1)
