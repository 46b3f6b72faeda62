"""Requests on every backend: each start is an operation like others, on the memory that the tensors had."""

from __future__ import annotations

import contextlib
import gc
import time

import pytest
import torch

from bucketwheel.comm import Communicator
from bucketwheel.errors import ClosedError, CommError
from bucketwheel.handle import wait_all
from bucketwheel.ops import PreMulSum, all_gather
from bucketwheel.request import AllGatherRequest, ReduceScatterRequest
from bucketwheel.testing import assert_bitwise_equal
from comm_cases import check_usable, data_of, expected_gather, expected_reduce, in_few_places, memory_of

pytestmark = pytest.mark.dist
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def gathers_again(comm: Communicator, kind: str) -> None:
    specs = [(F32, 3000), (BF16, 17), (torch.uint8, 5), (F32, 0)]
    with memory_of(comm, kind) as memory:
        pairs = [memory.pair(*spec) for spec in specs]
        request = AllGatherRequest([full for full, _ in pairs], [shard for _, shard in pairs], comm)
        for turn in range(8):
            for index, (spec, (full, shard)) in enumerate(zip(specs, pairs, strict=True)):
                full.zero_()
                shard.copy_(data_of(comm.rank, spec, turn + index, spec[1]))
            assert request.start().wait().seq == turn + 1
            for index, (spec, (full, _)) in enumerate(zip(specs, pairs, strict=True)):
                wanted = expected_gather(comm.size, spec, turn + index)
                assert_bitwise_equal(full, wanted, f"{kind} turn {turn} output {index} of {spec}")


def reduces_again(comm: Communicator, kind: str, op: str | PreMulSum) -> None:
    specs = [(F32, 3000), (BF16, 17), (F16, 4097), (torch.float64, 1), (F32, 0)]
    with memory_of(comm, kind) as memory:
        pairs = [memory.pair(*spec) for spec in specs]
        request = ReduceScatterRequest([shard for _, shard in pairs], [full for full, _ in pairs], comm, op=op)
        for turn in range(8):
            for index, (spec, (full, _)) in enumerate(zip(specs, pairs, strict=True)):
                full.copy_(data_of(comm.rank, spec, turn + index, comm.size * spec[1]))
            assert request.start().wait().seq == turn + 1
            for index, (spec, (_, shard)) in enumerate(zip(specs, pairs, strict=True)):
                wanted = expected_reduce(comm.rank, comm.size, spec, turn + index, op, backend=comm.backend)
                assert_bitwise_equal(shard, wanted, f"{kind} turn {turn} output {index} of {spec}")


@pytest.mark.parametrize("kind", ["foreign", "pool", "in_place", "by_rank"])
def test_started_again_with_other_values(run, kind):
    run(gathers_again, kind)
    run(reduces_again, kind, "sum")


@pytest.mark.parametrize("op", ["avg", PreMulSum(0.3)], ids=str)
def test_every_reduction(run, op):
    run(reduces_again, "pool", op)


def chained(comm: Communicator) -> None:
    """Two requests that feed each other, and a plain call between them: all in flight at once, in the order of the
    calls."""
    full, shard = torch.ones(comm.size * 1000), torch.empty(1000)
    other = torch.empty_like(full)
    reduce = ReduceScatterRequest(shard, full, comm)
    gather = AllGatherRequest(full, shard, comm)
    handles = []
    for _ in range(5):
        handles += [reduce.start(), gather.start(), all_gather(other, shard, comm)]
    assert [handle.seq for handle in handles] == list(range(1, 16))
    wait_all(reversed(handles))
    wanted = [float(comm.size**5)] * full.numel()
    assert full.tolist() == wanted and other.tolist() == wanted


def test_requests_and_calls_keep_their_order(run):
    run(chained)


def dropped(comm: Communicator) -> None:
    """Request, handle and inputs go while the operation waits for the last rank."""
    spec = (F32, 5000)
    full = torch.zeros(comm.size * 5000)
    request = AllGatherRequest(full, data_of(comm.rank, spec, 3, 5000).clone(), comm)
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
    request.start()
    request.start()
    del request
    gc.collect()
    junk = [torch.full((5000,), float("nan")) for _ in range(8)]
    all_gather(torch.empty(comm.size), torch.ones(1), comm).wait()  # behind both
    assert_bitwise_equal(full, expected_gather(comm.size, spec, 3))
    assert len(junk) == 8


@in_few_places
def test_dropped_while_it_runs(run):
    run(dropped)


def keeps_its_memory(comm: Communicator) -> None:
    """Nobody but the request has its tensors any more; what is made next must not lie in their memory."""
    spec = (F32, 50_000)
    full, shard = torch.zeros(comm.size * 50_000), data_of(comm.rank, spec, 0, 50_000).clone()
    back = torch.zeros(50_000)
    gather = AllGatherRequest(full, shard, comm)
    reduce = ReduceScatterRequest(back, full, comm, op="avg")
    del full, shard
    gc.collect()
    junk = [torch.full((50_000,), float("nan")) for _ in range(8)]
    gather.start()
    reduce.start().wait()
    own = data_of(comm.rank, spec, 0, 50_000)
    wanted = own.clone()
    for _ in range(comm.size - 1):
        wanted += own  # every rank has gathered the same
    assert_bitwise_equal(back, wanted / comm.size)
    assert len(junk) == 8


def test_a_request_keeps_the_memory_of_its_tensors(run):
    run(keeps_its_memory)


def options(comm: Communicator) -> None:
    full, shard = torch.empty(comm.size * 100), torch.ones(100)
    request = AllGatherRequest(full, shard, comm)
    first = request.start(timing=True)
    second = request.start(after=[first], timing=True)
    second.synchronize()
    assert first.elapsed_time(second) >= 0 and second.nbytes == 400 * comm.size
    with pytest.raises(ValueError, match="timing"):
        first.elapsed_time(request.start().synchronize())
    flags = torch.zeros(comm.size, dtype=torch.bool)  # not a dtype of native code
    AllGatherRequest(flags, torch.ones(1, dtype=torch.bool), comm).start().wait()
    assert flags.all() and flags._version == 1
    empty = AllGatherRequest([], [], comm)
    reduced = ReduceScatterRequest([], [], comm)
    assert [empty.start().seq, reduced.start().seq] == [5, 6]


def test_options_and_empty_lists(run):
    run(options)


def versions(comm: Communicator) -> None:
    weight = torch.randn(comm.size * 4, requires_grad=True)
    square = (weight**2).sum()
    outs = [weight.detach(), torch.zeros(comm.size)]
    request = AllGatherRequest(outs, [torch.zeros(4), torch.zeros(1)], comm)
    assert outs[1]._version == 0
    for turn in range(3):
        request.start().wait()
        assert outs[1]._version == turn + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()
    reduced = torch.zeros(4)
    ReduceScatterRequest(reduced, torch.ones(comm.size * 4), comm).start().wait()
    assert reduced._version == 1


@in_few_places
def test_starting_tells_autograd(run):
    run(versions)


def closed(comm: Communicator) -> None:
    out = torch.zeros(comm.size)
    request = AllGatherRequest(out, torch.ones(1), comm)
    request.start().wait()
    comm.close()
    made_late = ReduceScatterRequest(torch.zeros(1), torch.ones(comm.size), comm)
    for one in (request, made_late):
        with pytest.raises(ClosedError, match="the communicator is closed"):
            one.start()
    assert out._version == 1 and out.tolist() == [1.0] * comm.size


def test_after_close(run):
    run(closed)


def aborted(comm: Communicator) -> None:
    out = torch.zeros(comm.size)
    request = AllGatherRequest(out, torch.ones(1), comm)
    request.start().wait()
    with contextlib.suppress(CommError):  # a peer's abort may come first
        comm.exchange(b"")
    comm.abort("enough")
    for _ in range(2):
        with pytest.raises(CommError, match="aborted by rank .: enough"):
            request.start()
    assert out._version == 1


def test_after_a_failure(run):
    run(aborted)


# ---- bad arguments ---------------------------------------------------------------------------------------------------


def rejections(comm: Communicator) -> None:
    """On one rank only: it has enqueued nothing, so the ranks still agree on the number of the next operation."""
    full, shard, one = torch.zeros(comm.size * 4), torch.zeros(4), torch.zeros(1)
    gaps = torch.zeros(4, 2)[:, 0]
    calls = [
        (lambda: AllGatherRequest([full], [], comm), ValueError, "outputs has 1 tensors, inputs has 0"),
        (lambda: AllGatherRequest(full, torch.zeros(5), comm), ValueError, r"outputs\[0\] has shape"),
        (lambda: AllGatherRequest(full, shard.half(), comm), TypeError, r"outputs\[0\] is torch.float32"),
        (lambda: AllGatherRequest(full, [[1.0]], comm), TypeError, r"inputs\[0\]: expected a torch.Tensor, got list"),
        (lambda: AllGatherRequest([full, full], [shard, shard], comm), ValueError, "the output overlaps"),
        (lambda: AllGatherRequest(full, gaps, comm), ValueError, r"inputs\[0\] is not contiguous"),
        (lambda: ReduceScatterRequest(gaps, full, comm), ValueError, r"outputs\[0\] is not contiguous"),
        (lambda: ReduceScatterRequest(shard.long(), full.long(), comm), ValueError, "int64 is not supported"),
        (lambda: ReduceScatterRequest(shard, full, comm, op="max"), ValueError, "op 'max' is not supported"),
        (lambda: ReduceScatterRequest(shard, full, comm, op=2.0), TypeError, "op is 2.0, expected"),
        (lambda: AllGatherRequest(full, shard, comm).start(stream="s"), TypeError, "stream"),
        (lambda: comm.broadcast_into(full, comm.size), ValueError, f"rank {comm.size} in a world of {comm.size}"),
        (lambda: comm.broadcast_into(full, -1), ValueError, "rank -1 in a world"),
        (lambda: comm.broadcast_into(gaps, 0), ValueError, "tensor is not contiguous"),
        (lambda: comm.broadcast_into([1.0], 0), TypeError, "expected a torch.Tensor, got list"),
        (lambda: comm.broadcast_into(one.bool(), 0), TypeError, "unsupported dtype"),
    ]
    for call, error, message in calls if comm.rank == 0 else ():
        with pytest.raises(error, match=message):
            call()
    assert all_gather(torch.empty(comm.size), one, comm).wait().seq == 1
    assert full._version == shard._version == 0
    check_usable(comm)


def test_bad_arguments(run):
    run(rejections)
