"""Conformance: what the collectives compute."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import wait_all
from bucketwheel.kernels.ops import PreMulSum, all_gather, reduce_scatter
from bucketwheel.native import core
from tests.support.bits import assert_bitwise_equal
from tests.support.comm_cases import (
    MEMORIES,
    are_our_sums,
    check_all_gather,
    check_broadcast,
    check_reduce_scatter,
    data_of,
    filled,
    memory_of,
    on_device,
)

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = (0, 1, 2, 3, 63, 4095, 4096, 4097, 10_007, 300_001)
SUMMED = (F32, BF16, F16, F64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NATIVE = (*SUMMED, *INTEGERS)
ANY = (*NATIVE, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)


def every_size_in_every_memory(comm: Communicator) -> None:
    for kind in MEMORIES:
        for numel in SIZES:
            for dtype in (F32, BF16):
                check_all_gather(comm, [(dtype, numel)], kind)
                check_reduce_scatter(comm, [(dtype, numel)], kind)


def sums(comm: Communicator) -> None:
    """16-bit dtypes are summed in float32 and rounded once, whatever is done to the sum: see `expect_sum`."""
    for op in ("sum", "avg", PreMulSum(1 / 3), PreMulSum(-3)):
        for kind in ("foreign", "pool", "offset", "in_place"):
            check_reduce_scatter(comm, [(dtype, numel) for numel in (1, 0, 4099) for dtype in SUMMED], kind, op)


def integer_sums(comm: Communicator) -> None:
    """They wrap around. On the CPU, and nothing but sums."""
    specs = [(dtype, numel) for numel in (1, 0, 4099, 70_000) for dtype in INTEGERS]
    if comm.device >= 0:
        with pytest.raises(ValueError, match="reduce_scatter of int64 on a CUDA device"):
            check_reduce_scatter(comm, specs[:1], "foreign")
        return
    for kind in ("foreign", "pool", "offset", "in_place"):
        check_reduce_scatter(comm, specs, kind)
    large = torch.full((comm.size * 3,), 2**62, dtype=torch.int64)
    out = torch.empty(3, dtype=torch.int64)
    reduce_scatter(out, large, comm).wait()
    assert out.tolist() == [(comm.size * 2**62 + 2**63) % 2**64 - 2**63] * 3
    for op in ("avg", PreMulSum(2.0)):
        with pytest.raises(ValueError, match="use 'sum' for integers"):
            reduce_scatter(out, large, comm, op=op)
    with pytest.raises(TypeError, match="unsupported dtype"):
        reduce_scatter(torch.zeros(1, dtype=torch.bool), torch.zeros(comm.size, dtype=torch.bool), comm)


def exact(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Sixteenths of small integers: products with powers of two and sums over a few ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-64, 65, (numel,), generator=generator).to(dtype) / 16


def exact_sums(comm: Communicator) -> None:
    """The same bits from every backend, in whatever order and dtype it adds and multiplies."""
    numel = 5001
    for op, factor in (("sum", 1.0), ("avg", 1 / comm.size), (PreMulSum(0.5), 0.5), (PreMulSum(4.0), 4.0)):
        if op == "avg" and comm.size == 3:
            continue  # no power of two
        outs, ins, wanted = [], [], []
        for dtype in SUMMED:
            ins.append(on_device(comm, exact(comm.rank, comm.size * numel, dtype)))
            outs.append(filled(comm, numel, dtype=dtype))
            total = torch.stack([exact(rank, comm.size * numel, F64) for rank in range(comm.size)]).sum(0)
            wanted.append((factor * total[comm.rank * numel : (comm.rank + 1) * numel]).to(dtype))
        reduce_scatter(outs, ins, comm, op=op).wait()
        assert_bitwise_equal(outs, wanted, str(op))


def coalesced(comm: Communicator) -> None:
    for kind in ("foreign", "pool", "by_rank"):
        dtypes = ANY if kind == "foreign" else NATIVE  # a lease makes tensors of native code's dtypes alone
        check_all_gather(comm, [(dtype, numel) for numel in (0, 1, 7, 5000, 70_000) for dtype in dtypes], kind)
        summed = [(dtype, numel) for numel in (3, 0, 4097, 130_000) for dtype in SUMMED]
        check_all_gather(comm, summed, kind)
        check_reduce_scatter(comm, summed, kind)
        check_reduce_scatter(comm, summed, kind, "avg")


def views_of_pool_memory(comm: Communicator) -> None:
    """Of dtypes that are only moved: where they are, without a copy."""
    numel = 70_001
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        lease = comm.pool.acquire("", comm.size * numel)
        full = lease.tensor(torch.uint8, (comm.size * numel,)).view(dtype)
        own = full[comm.rank * numel : (comm.rank + 1) * numel]
        own.copy_(on_device(comm, data_of(comm.rank, (dtype, numel), 0, numel)))
        all_gather(full, own, comm).wait()
        for rank in range(comm.size):
            got = full[rank * numel : (rank + 1) * numel].view(torch.uint8)
            assert torch.equal(got.cpu(), data_of(rank, (dtype, numel), 0, numel).view(torch.uint8))
        del full, own
        lease.release()


def empty_lists(comm: Communicator) -> None:
    """Operations like others: all ranks meet in them."""
    gathered = all_gather([], [], comm)
    reduced = reduce_scatter([], [], comm, op="avg")
    gathered.wait()
    reduced.wait()
    assert (reduced.seq, gathered.nbytes, reduced.nbytes) == (gathered.seq + 1, 0, 0)
    check_all_gather(comm, [(F32, 0), (BF16, 0)], "foreign")
    check_reduce_scatter(comm, [(F32, 0), (F16, 0)], "foreign")
    check_all_gather(comm, [(F32, 0), (torch.bool, 0), (torch.bool, 77)], "foreign")


def broadcasts(comm: Communicator) -> None:
    specs = [*zip(NATIVE, (1, 0, 17, 4097, 100_003, 0, 2, 4099, 3), strict=True), (torch.int32, 5)]
    for kind in ("foreign", "pool", "offset", "by_rank"):
        for root in range(comm.size):
            check_broadcast(comm, specs, kind, root)


def all_reduces(comm: Communicator) -> None:
    """What the ranks share equally, and the rest: exact in any order."""
    sum_of_torch, average_of_torch = dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.AVG)
    ops = [("sum", 1.0), (sum_of_torch, 1.0), (average_of_torch, 1 / comm.size), (PreMulSum(0.5), 0.5)]
    for kind in ("foreign", "pool", "offset"):
        for op, factor in ops[: 2 if comm.size == 3 else 4]:  # a third is no power of two
            with memory_of(comm, kind) as memory:
                shapes = [(dtype, n) for dtype in SUMMED for n in (0, 1, comm.size, comm.size + 1, 70_001)]
                tensors = [memory.tensor(*shape).copy_(exact(comm.rank, shape[1], shape[0])) for shape in shapes]
                wait_all([comm.all_reduce(tensor, op) for tensor in tensors])
                for (dtype, numel), tensor in zip(shapes, tensors, strict=True):
                    total = sum((exact(rank, numel, F64) for rank in range(comm.size)), torch.zeros(numel, dtype=F64))
                    assert_bitwise_equal(tensor, (factor * total).to(dtype), f"{kind} {op} of {dtype}[{numel}]")


def all_reduced_bits(comm: Communicator) -> None:
    """All ranks have the same, of numbers whose sums depend on the order: rank order, where we add. Of any shape."""
    for numel in (3, 5003):
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
        tensor = on_device(comm, parts[comm.rank]).view(1, numel)
        comm.all_reduce(tensor).wait()
        assert tensor._version == 1
        everyone = filled(comm, comm.size * numel)
        all_gather(everyone, tensor, comm).wait()
        assert_bitwise_equal(everyone, everyone[:numel].repeat(comm.size))
        if are_our_sums(comm):
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            assert_bitwise_equal(tensor.view(-1), total)
    if comm.device < 0:
        large = torch.full((3,), 2**62)
        comm.all_reduce(large).wait()
        assert large.tolist() == [(comm.size * 2**62 + 2**63) % 2**64 - 2**63] * 3


def flags(comm: Communicator) -> None:
    """Broadcasts move any dtype."""
    for dtype in ANY:
        tensor = filled(comm, 3, comm.rank, dtype)
        comm.broadcast(tensor, comm.size - 1).wait()
        assert tensor.cpu().tolist() == filled(comm, 3, comm.size - 1, dtype).cpu().tolist() and tensor._version == 1


def flat_buffer(comm: Communicator) -> None:
    """One operation, however long the buffer is."""
    spec = (BF16, 6_000_001)
    flat = on_device(comm, data_of(comm.rank, spec, 0, spec[1]))
    before = all_gather([], [], comm)
    comm.broadcast(flat, 0).wait()
    assert all_gather([], [], comm).wait().seq == before.seq + 2
    assert_bitwise_equal(flat, data_of(0, spec, 0, spec[1]))


def sinks(comm: Communicator) -> None:
    """Sums go to a gradient shard, which adds them up and knows its sum of squares."""
    for wire, kept in ((F32, F32), (F32, BF16), (BF16, BF16), (F64, F64)):
        sums_in(comm, wire, kept)


def few_bits(rank: int, numel: int) -> torch.Tensor:
    """`exact`, but so small that sums of all turns are exact in bfloat16."""
    return (exact(rank, numel, F32) * 2).trunc() / 16 + 0.0  # no -0, which zeros add up to 0 with


def sums_in(comm: Communicator, wire: torch.dtype, kept: torch.dtype) -> None:
    numel = 4099
    shard = filled(comm, numel).to(kept)
    if comm.device >= 0:
        sums = torch.zeros(core.ShardAccumulatorCuda.max_spans(1), dtype=F64, device=shard.device)
        sink = core.ShardAccumulatorCuda(shard, [(0, numel)], sums)
        sum_of_squares = lambda: float(sums.sum())  # noqa: E731
    else:
        sink = core.ShardAccumulator(shard, [(0, numel)])
        sum_of_squares = lambda: sink.results()[0][0]  # noqa: E731
    total = torch.zeros(numel, dtype=F64)
    for turn in range(3):
        with comm.pool.acquire("full", wire.itemsize * comm.size * numel) as lease:
            full = lease.tensor(wire, (comm.size * numel,))
            full.copy_(few_bits(comm.rank + 10 * turn, comm.size * numel))
            sink.start(turn > 0)
            comm._native.reduce_scatter_to_sink(full, sink).wait()
        for rank in range(comm.size):
            total += few_bits(rank + 10 * turn, comm.size * numel)[comm.rank * numel :][:numel]
        assert_bitwise_equal(shard, total.to(kept), f"turn {turn}, {wire} into {kept}")
        assert sum_of_squares() == float(total.square().sum())
    other = torch.zeros(comm.size * numel, dtype=F32 if kept == F64 else F64, device=shard.device)
    with pytest.raises(ValueError, match="into a sink that does not take it: a float64 shard takes float64"):
        comm._native.reduce_scatter_to_sink(other, sink)


CASES = (
    every_size_in_every_memory,
    sums,
    integer_sums,
    exact_sums,
    coalesced,
    views_of_pool_memory,
    empty_lists,
    broadcasts,
    all_reduces,
    all_reduced_bits,
    flags,
    flat_buffer,
    sinks,
)
