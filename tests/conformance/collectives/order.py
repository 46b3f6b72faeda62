"""Conformance: handles, streams, order, and what is dropped, outlived or failed."""

from __future__ import annotations

import contextlib
import gc
from datetime import timedelta
from typing import Any

import pytest
import torch

from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import wait_all
from bucketwheel.errors import ClosedError, CommError, CommTimeout
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.native import core
from tests.gpu.device import Device, SimulatedDevice
from tests.support.bits import assert_bitwise_equal
from tests.support.comm_cases import (
    are_our_sums,
    check_usable,
    data_of,
    expect_sum,
    expected_gather,
    filled,
    memory_of,
)

F32 = torch.float32
HOLD_S = 0.01


def device_of(comm: Communicator) -> Device:
    """CPU ranks have no streams of torch's either."""
    return Device() if comm.device >= 0 and not core.is_posing() else SimulatedDevice()


def by_rank(comm: Communicator, numel: int, first: float = 0.0) -> torch.Tensor:
    """What gathering ``numel`` times the number of the rank gives."""
    return torch.arange(first, first + comm.size).repeat_interleave(numel)


def barriers(comm: Communicator) -> None:
    """The last rank comes late: nobody is through before, and a time limit of the others leaves them where they are."""
    comm.barrier()
    is_late = comm.rank == comm.size - 1
    if not is_late:
        with pytest.raises(CommTimeout, match="still running"):
            comm.barrier(0.01)
        handle = all_gather([], [], comm)
        with pytest.raises(CommTimeout, match="still running"):
            handle.wait(timeout=timedelta(milliseconds=10))
    comm.exchange(b"")
    if is_late:
        comm.barrier()
        handle = all_gather([], [], comm)
    assert comm.barrier(timedelta(seconds=30)).query() and handle.wait(timeout=30.0).query()
    check_usable(comm)


def many_in_flight(comm: Communicator) -> None:
    """Handles asked for out of order; every third one is dropped together with its input, and what is made next must not
    lie in its memory."""
    spec = (F32, 3000)
    first = all_gather([], [], comm).seq + 1
    with memory_of(comm, "foreign") as memory:
        kept = []
        for index in range(60):
            full, shard = memory.pair(*spec)
            gathers = index % 2 == 0
            (shard if gathers else full).copy_(data_of(comm.rank, spec, index, (1 if gathers else comm.size) * spec[1]))
            handle = all_gather(full, shard, comm) if gathers else reduce_scatter(shard, full, comm)
            assert handle.seq == first + index
            if index % 3 != 0:
                kept.append((index, handle, full if gathers else shard))
            del handle, full, shard
        gc.collect()
        junk = [filled(comm, numel) for _ in range(8) for numel in (spec[1], comm.size * spec[1])]
        for index, handle, out in reversed(kept):
            handle.wait()
            if index % 2 == 0:
                assert_bitwise_equal(out, expected_gather(comm.size, spec, index), f"operation {index}")
            else:
                expect_sum(comm, out, spec, index, name=f"operation {index}")
        assert len(junk) == 16


def handles(comm: Communicator) -> None:
    shard, full = filled(comm, 1000, float(comm.rank)), filled(comm, comm.size * 1000)
    first = all_gather(full, shard, comm, timing=True)
    second = all_gather(torch.empty_like(full), shard, comm, after=[first], timing=True)
    assert (second.seq, first.nbytes) == (first.seq + 1, 4 * 1000 * comm.size)
    with second:
        pass
    assert first.synchronize() and first.query() and second.synchronize().query() and first.event.query()
    assert first.elapsed_time(second) > 0 > second.elapsed_time(first)
    assert first.wait() is first and first.synchronize(0.0) is first
    with pytest.raises(ValueError, match="timing"):
        first.elapsed_time(all_gather(full, shard, comm).wait())


def held_up(comm: Communicator) -> None:
    """Inputs that the caller's stream has still to write, and outputs that it has still to read."""
    numel, device = 10_007, device_of(comm)
    shard, full = filled(comm, numel), filled(comm, comm.size * numel)
    seen = []
    for turn in range(4):
        device.hold(HOLD_S)
        shard.fill_(10.0 * turn + comm.rank)
        all_gather(full, shard, comm).wait()
        shard.fill_(float("nan"))
        seen.append(full.clone())
        full.fill_(float("nan"))
    for turn, copy in enumerate(seen):
        assert_bitwise_equal(copy, by_rank(comm, numel, 10.0 * turn), f"turn {turn}")


def streams(comm: Communicator) -> None:
    """Two streams besides the communicator's: each operation reads what the one before wrote, with no edge of its own;
    ``after`` orders it behind another's. And a stream of torch."""
    if comm.backend == "local" and comm.device >= 0:
        with pytest.raises(ValueError, match="one stream for all ranks"):
            one = core.Stream("one", comm.device)
            all_gather(filled(comm, comm.size), filled(comm, 1), comm, stream=one)
        return
    numel = 1000
    sides = [core.Stream(name, comm.device) for name in ("one", "two")]
    start = filled(comm, comm.size * numel, comm.rank + 1.0)
    outs = [torch.zeros_like(start) for _ in range(24)]
    if comm.device >= 0:
        written = core.current_stream(comm.device).record()
        for side in sides:
            side.wait(written)
    before, kept = start, []
    for index, out in enumerate(outs):
        mine = before[comm.rank * numel : (comm.rank + 1) * numel]
        if are_our_sums(comm):  # a pause of the host's threads
            sides[index % 2].pause(0.001 * (index % 3))
        after = kept[-1:] if index >= 12 else []
        kept.append(all_gather(out, mine, comm, stream=(*sides, None)[index % 3], after=after))
        before = out
    wait_all(kept)
    for index, out in enumerate(outs):
        assert_bitwise_equal(out, by_rank(comm, numel, 1.0), f"operation {index}")
    device = device_of(comm)
    torchs = device.stream()
    with device.on(torchs):
        own = start.clone()
        handle = all_gather(outs[0], own[comm.rank * numel : (comm.rank + 1) * numel], comm, stream=torchs)
    handle.wait()
    assert_bitwise_equal(outs[0], by_rank(comm, numel, 1.0), "a stream of torch")


def outputs_tell_autograd(comm: Communicator) -> None:
    """Calls and requests."""
    shard, full = filled(comm, 4, 0.0), filled(comm, comm.size)
    for is_call in (True, False):
        weight = filled(comm, comm.size * 4, 3.0).requires_grad_()
        square = (weight**2).sum()
        ins = [shard, shard[:1]]
        outs = [weight.detach(), full.clone()]
        start = AllGatherRequest(outs, ins, comm).start if not is_call else lambda: all_gather(outs, ins, comm)  # noqa: B023
        for turn in range(3):
            start().wait()
            assert outs[1]._version == turn + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()
        reduced, whole = filled(comm, 4), filled(comm, comm.size * 4, 1.0)
        if is_call:
            reduce_scatter(reduced, whole, comm).wait()
        else:
            ReduceScatterRequest(reduced, whole, comm).start().wait()
        assert reduced._version == 1


def communicator_dropped(comm: Communicator) -> None:
    """A handle of an operation in flight is all that is left of its communicator; then the native one alone."""
    part = comm.split(0, comm.rank)
    assert part is not None
    full, shard = filled(comm, comm.size * 1000), filled(comm, 1000, float(part.rank))
    is_last = comm.rank == comm.size - 1
    if is_last:
        comm.exchange(b"dropped")
    handle = all_gather(full, shard, part)
    del part
    gc.collect()
    if not is_last:
        comm.exchange(b"dropped")
    native_handle = handle.wait()._native
    assert_bitwise_equal(full, by_rank(comm, 1000))
    del handle
    gc.collect()
    native_handle.synchronize(5.0)
    assert native_handle.query()
    check_usable(comm)


# ---- ends


def closed(comm: Communicator) -> None:
    """Handles answer when their communicator is closed, and what has been gathered stays; requests start no more."""
    out, full = filled(comm, comm.size), filled(comm, comm.size * 10)
    request = AllGatherRequest(out, filled(comm, 1, 1.0), comm)
    good = all_gather(full, filled(comm, 10, float(comm.rank)), comm, timing=True)
    later = all_gather(torch.empty_like(full), filled(comm, 10, 1.0), comm, timing=True)
    started = request.start()
    comm.close()
    assert good.query() and later.synchronize(1.0).query() and good._native.is_ordered and good.event.query()
    wait_all([later, good, started])
    assert_bitwise_equal(full, by_rank(comm, 10))
    assert (later.seq, started.seq) == (good.seq + 1, good.seq + 2) and good.elapsed_time(later) >= 0
    assert f"rank {comm.rank}/{comm.size}" in repr(good)
    made_late = ReduceScatterRequest(filled(comm, 1), out, comm)
    for one in (request, made_late):
        with pytest.raises(ClosedError, match="the communicator is closed"):
            one.start()
    assert out._version == 1 and out.tolist() == [1.0] * comm.size


def aborted(comm: Communicator) -> None:
    """The first error is raised behind all, by calls and by requests. Handles of operations that were over stay good; on
    CUDA that takes more than a wait(), which orders a stream and nothing else: others fail with the abort."""
    out, one = filled(comm, comm.size), filled(comm, 1, 1.0)
    request = AllGatherRequest(out, one, comm)
    good = request.start().synchronize()
    alone = [request.start() for _ in range(2)] if comm.rank == 0 and comm.size > 1 else []
    with contextlib.suppress(CommError):  # the abort may come first
        comm.exchange(b"issued")
    if comm.rank != 0 or comm.size == 1:
        comm.abort("enough")
    for handle in alone:  # on CUDA its wait() does not wait for the abort
        with pytest.raises(CommError, match="aborted by rank .: enough"):
            handle.synchronize(10.0)
    version = out._version
    calls: list[Any] = [request.start, lambda: all_gather(out, one, comm), *(handle.wait for handle in alone)]
    if alone:
        calls.insert(0, lambda: wait_all([good, *alone, good]))
    for call in (*calls, *calls):
        with pytest.raises(CommError, match="aborted by rank .: enough"):
            call()
    assert good.wait().query() and out._version == version


# ---- graphs


def replayed(comm: Communicator) -> None:
    """A captured graph with calls and requests of both kinds, between torch's operations, reads its inputs anew; eager
    calls have their turn between the replays."""
    device = device_of(comm)
    shard, reduced = filled(comm, 1000), filled(comm, 1000)
    full, other = filled(comm, 1000 * comm.size), filled(comm, 1000 * comm.size)
    gather, reduce = AllGatherRequest(other, reduced, comm), ReduceScatterRequest(reduced, full, comm)

    def call() -> None:
        shard.mul_(2.0)
        all_gather(full, shard, comm).wait()
        full.add_(1.0)
        reduce.start()
        gather.start().wait()

    shard.fill_(1.0)
    device.warm_up(call)
    device.synchronize()
    shard.fill_(0.0)
    other.fill_(0.0)
    replay = device.capture(call)
    assert not other.any() and not shard.any(), "capturing must not run anything"
    for start in (3.0, 5.0):
        shard.fill_(start + comm.rank)
        for turn in range(3):
            replay()
            wanted = [comm.size * ((start + rank) * 2.0 ** (turn + 1) + 1.0) for rank in range(comm.size)]
            assert_bitwise_equal(other, torch.tensor(wanted).repeat_interleave(1000), f"replay {turn}")
            eager = torch.zeros_like(other)
            all_gather(eager, reduced, comm).wait()
            assert torch.equal(eager, other)


CASES = (
    barriers,
    many_in_flight,
    handles,
    held_up,
    streams,
    outputs_tell_autograd,
    communicator_dropped,
)
ENDS = (closed, aborted)
GRAPHS = (replayed,)
