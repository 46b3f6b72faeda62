"""Conformance: requests. Each start is an operation like others, on the memory that the tensors had."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import wait_all
from bucketwheel.kernels.ops import PreMulSum, all_gather
from tests.support.bits import assert_bitwise_equal
from tests.support.comm_cases import (
    check_usable,
    data_of,
    expect_sum,
    expected_gather,
    filled,
    memory_of,
    on_device,
)

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
MEMORIES = ("foreign", "pool", "in_place", "by_rank")
TURNS = 5


def next_seq(comm: Communicator) -> int:
    return all_gather([], [], comm).wait().seq + 1


def gathers_again(comm: Communicator) -> None:
    """With other values each time."""
    specs = [(F32, 3000), (BF16, 17), (torch.uint8, 5), (F32, 0)]
    for kind in MEMORIES:
        with memory_of(comm, kind) as memory:
            pairs = [memory.pair(*spec) for spec in specs]
            request = AllGatherRequest([full for full, _ in pairs], [shard for _, shard in pairs], comm)
            seq = next_seq(comm)
            for turn in range(TURNS):
                for index, (spec, (full, shard)) in enumerate(zip(specs, pairs, strict=True)):
                    full.zero_()
                    shard.copy_(data_of(comm.rank, spec, turn + index, spec[1]))
                assert request.start().wait().seq == seq + turn
                for index, (spec, (full, _)) in enumerate(zip(specs, pairs, strict=True)):
                    wanted = expected_gather(comm.size, spec, turn + index)
                    assert_bitwise_equal(full, wanted, f"{kind} turn {turn} output {index} of {spec}")


def reduces_again(comm: Communicator) -> None:
    for kind in MEMORIES:
        _reduce_again(comm, kind, "sum")
    for op in ("avg", PreMulSum(0.3)):
        _reduce_again(comm, "pool", op)


def _reduce_again(comm: Communicator, kind: str, op: str | PreMulSum) -> None:
    specs = [(F32, 3000), (BF16, 17), (F16, 4097), (F64, 1), (F32, 0)]
    with memory_of(comm, kind) as memory:
        pairs = [memory.pair(*spec) for spec in specs]
        request = ReduceScatterRequest([shard for _, shard in pairs], [full for full, _ in pairs], comm, op=op)
        seq = next_seq(comm)
        for turn in range(TURNS):
            for index, (spec, (full, _)) in enumerate(zip(specs, pairs, strict=True)):
                full.copy_(data_of(comm.rank, spec, turn + index, comm.size * spec[1]))
            assert request.start().wait().seq == seq + turn
            for index, (spec, (_, shard)) in enumerate(zip(specs, pairs, strict=True)):
                expect_sum(comm, shard, spec, turn + index, op, f"{kind} turn {turn} output {index} of {spec}")


def chained(comm: Communicator) -> None:
    """Requests that feed each other, one of them coalesced, and a plain call between them: all in flight at once, in the
    order of the calls; twice, with other values."""
    numel = 3001
    full, shard, other, plain = (filled(comm, n * numel) for n in (comm.size, 1, comm.size, comm.size))
    reduce = ReduceScatterRequest(shard, full, comm)
    gather = AllGatherRequest([full, other], [shard, shard], comm)
    call = lambda: all_gather(plain, shard, comm)  # noqa: E731
    for turn in range(2):
        full.fill_(turn + 1.0)
        handles = [start() for _ in range(5) for start in (reduce.start, gather.start, call)]
        assert [handle.seq for handle in handles] == list(range(handles[0].seq, handles[0].seq + 15))
        wait_all(reversed(handles))
        for one in (full, other, plain):
            assert_bitwise_equal(one, torch.full((comm.size * numel,), (turn + 1.0) * comm.size**5))


def request_dropped(comm: Communicator) -> None:
    """Request, handle and input go while the operation waits for the last rank; what is made next must not lie in their
    memory."""
    spec = (F32, 5000)
    full = filled(comm, comm.size * 5000, 0.0)
    request = AllGatherRequest(full, on_device(comm, data_of(comm.rank, spec, 3, 5000)), comm)
    # Nothing that CUDA prepares at its first use may come while a kernel of NCCL waits for a rank that waits for us.
    junk = [filled(comm, 5000) for _ in range(8)]
    del junk
    if comm.rank == comm.size - 1:
        comm.exchange(b"dropped")
    request.start()
    request.start()
    del request
    gc.collect()
    junk = [filled(comm, 5000) for _ in range(8)]
    if comm.rank != comm.size - 1:
        comm.exchange(b"dropped")
    all_gather([], [], comm).wait()  # behind both
    assert_bitwise_equal(full, expected_gather(comm.size, spec, 3))
    assert len(junk) == 8


def request_keeps_its_memory(comm: Communicator) -> None:
    """Nobody but the request has its tensors any more; what is made next must not lie in their memory."""
    spec = (F32, 50_000)
    full, shard = filled(comm, comm.size * 50_000, 0.0), on_device(comm, data_of(comm.rank, spec, 0, 50_000))
    back = filled(comm, 50_000, 0.0)
    gather = AllGatherRequest(full, shard, comm)
    reduce = ReduceScatterRequest(back, full, comm)
    del full, shard
    gc.collect()
    junk = [filled(comm, 50_000) for _ in range(8)]
    gather.start()
    reduce.start().wait()
    own = data_of(comm.rank, spec, 0, 50_000)
    wanted = own.clone()
    for _ in range(comm.size - 1):
        wanted += own  # every rank has gathered the same
    assert_bitwise_equal(back, wanted)
    assert len(junk) == 8


def options(comm: Communicator) -> None:
    full, shard = filled(comm, comm.size * 100), filled(comm, 100, 1.0)
    request = AllGatherRequest(full, shard, comm)
    first = request.start(timing=True)
    second = request.start(after=[first], timing=True)
    second.synchronize()
    assert first.elapsed_time(second) >= 0 and second.nbytes == 400 * comm.size
    with pytest.raises(ValueError, match="timing"):
        first.elapsed_time(request.start().synchronize())
    flags = filled(comm, comm.size, False, torch.bool)  # not a dtype of native code
    AllGatherRequest(flags, filled(comm, 1, True, torch.bool), comm).start().wait()
    assert flags.all() and flags._version == 1
    empty = AllGatherRequest([], [], comm)
    reduced = ReduceScatterRequest([], [], comm)
    assert [empty.start().seq, reduced.start().seq] == [first.seq + 4, first.seq + 5]


def bad_arguments(comm: Communicator) -> None:
    """On one rank only: it has enqueued nothing, so the ranks still agree on the number of the next operation."""
    full, shard, one = (filled(comm, numel, 0.0) for numel in (comm.size * 4, 4, 1))
    gaps, bits = (filled(comm, 8, 0, dtype).view(4, 2)[:, 0] for dtype in (torch.float32, torch.bool))
    calls = [
        (lambda: AllGatherRequest([full], [], comm), ValueError, "outputs has 1 tensors, inputs has 0"),
        (lambda: AllGatherRequest(full, filled(comm, 5), comm), ValueError, r"outputs\[0\] has shape"),
        (lambda: all_gather(full[:-1], shard, comm), ValueError, r"outputs\[0\] has shape"),
        (lambda: AllGatherRequest(full, shard.half(), comm), TypeError, r"outputs\[0\] is torch.float32"),
        (lambda: AllGatherRequest(full, [[1.0]], comm), TypeError, r"inputs\[0\]: expected a torch.Tensor, got list"),
        (lambda: AllGatherRequest([full, full], [shard, shard], comm), ValueError, "the output overlaps"),
        (lambda: AllGatherRequest(full, gaps, comm), ValueError, r"inputs\[0\] is not contiguous"),
        (lambda: ReduceScatterRequest(gaps, full, comm), ValueError, r"outputs\[0\] is not contiguous"),
        (lambda: ReduceScatterRequest(shard.long(), full.long(), comm, op="avg"), ValueError, "use 'sum' for integers"),
        (lambda: ReduceScatterRequest(shard, full, comm, op="max"), ValueError, "op 'max' is not supported"),
        (lambda: comm.all_reduce(full, dist.ReduceOp.MAX), ValueError, "op 'max' is not supported"),
        (lambda: comm.all_reduce(gaps), ValueError, "tensor is not contiguous"),
        (lambda: comm.all_reduce(one.bool()), TypeError, "tensor: unsupported dtype torch.bool: float32"),
        (lambda: AllGatherRequest(full.bool(), bits, comm), ValueError, r"inputs\[0\] is not contiguous: shape \[4\]"),
        (lambda: comm.broadcast(bits), ValueError, r"tensor is not contiguous: shape \[4\], strides \[2\]"),
        (lambda: comm.all_reduce(torch._neg_view(one)), TypeError, "tensor: the tensor is a negative view"),
        (lambda: comm.broadcast(torch._neg_view(one)), TypeError, "tensor: the tensor is a negative view"),
        (lambda: ReduceScatterRequest(shard, full, comm, op=2.0), TypeError, "op is 2.0, expected"),
        (lambda: AllGatherRequest(full, shard, comm).start(stream="s"), TypeError, "stream"),
        (lambda: comm.broadcast(full, comm.size), ValueError, f"rank {comm.size} in a world of {comm.size}"),
        (lambda: comm.broadcast(full, -1), ValueError, "rank -1 in a world"),
        (lambda: comm.broadcast(gaps, 0), ValueError, "tensor is not contiguous"),
        (lambda: comm.broadcast([1.0], 0), TypeError, "expected a torch.Tensor, got list"),
    ]
    seq = next_seq(comm)
    for call, error, message in calls if comm.rank == 0 else ():
        with pytest.raises(error, match=message):
            call()
    assert all_gather(filled(comm, comm.size), one, comm).wait().seq == seq
    assert full._version == shard._version == 0
    check_usable(comm)


CASES = (
    gathers_again,
    reduces_again,
    chained,
    request_dropped,
    request_keeps_its_memory,
    options,
    bad_arguments,
)
