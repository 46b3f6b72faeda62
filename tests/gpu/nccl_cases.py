"""What must hold on an NCCL communicator of any number of ranks: cases, each a function of the communicator.

A sum of two ranks is one addition, correctly rounded in any order and in float32 too: so it has the bits of our own
backends in every dtype. A factor that NCCL multiplies by is in the tensors' dtype and may be fused with the addition:
only powers of two keep the bits, and only of values that are far from the smallest ones.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from comm_cases import (
    MEMORIES,
    Spec,
    check_all_gather,
    check_broadcast,
    check_reduce_scatter,
    check_usable,
    data_of,
    expected_gather,
    expected_reduce,
)
from torch import Tensor

from bucketwheel._build import native
from bucketwheel.comm import Communicator
from bucketwheel.device import torch_device
from bucketwheel.handle import wait_all
from bucketwheel.ops import PreMulSum, all_gather, reduce_scatter
from bucketwheel.request import AllGatherRequest, ReduceScatterRequest
from bucketwheel.testing import assert_bitwise_equal
from tests.gpu.device import DEVICE

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = (0, 1, 3, 4097, 300_001)
BYTES = (torch.uint8, torch.int64)
HOLD_S = 0.01


def on_device(comm: Communicator, tensor: Tensor) -> Tensor:
    return tensor.to(torch_device(comm.device), copy=True)


def poisoned(comm: Communicator, numel: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full((numel,), math.nan, dtype=dtype, device=torch_device(comm.device))


# ---- data


def every_memory(comm: Communicator) -> None:
    for kind in MEMORIES:
        check_all_gather(comm, [(dtype, numel) for numel in SIZES for dtype in (F32, BF16)], kind)
        check_reduce_scatter(comm, [(dtype, numel) for numel in SIZES for dtype in (F32, F64)], kind)
    check_all_gather(comm, [(F32, 4097)], "in_place_pool")
    check_reduce_scatter(comm, [(F32, 4097)], "in_place_pool")


def sums_of_16_bits(comm: Communicator) -> None:
    for kind in ("foreign", "offset", "in_place_pool"):
        check_reduce_scatter(comm, [(dtype, numel) for numel in SIZES for dtype in (BF16, F16)], kind)


def mixed_lists(comm: Communicator) -> None:
    gathered = [(dtype, numel) for numel in (0, 1, 7, 70_000) for dtype in (F32, BF16, F16, F64, *BYTES)]
    check_all_gather(comm, gathered, "by_rank")
    before = all_gather([], [], comm).synchronize()
    after = reduce_scatter([], [], comm).synchronize()
    assert (before.nbytes, after.seq) == (0, before.seq + 1)
    check_all_gather(comm, [(F32, 0), (torch.bool, 0), (torch.bool, 77)], "foreign")


def exact(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Sixteenths of small integers: products with powers of two and sums over a few ranks are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-64, 65, (numel,), generator=generator).to(dtype) / 16


def reductions(comm: Communicator) -> None:
    numel = 5001
    for op, factor in (("sum", 1.0), ("avg", 1 / comm.size), (PreMulSum(0.5), 0.5), (PreMulSum(4.0), 4.0)):
        outs, ins, wanted = [], [], []
        for dtype in (F32, BF16, F16, F64):
            ins.append(on_device(comm, exact(comm.rank, comm.size * numel, dtype)))
            outs.append(poisoned(comm, numel, dtype))
            total = torch.stack([exact(rank, comm.size * numel, F64) for rank in range(comm.size)]).sum(0)
            wanted.append((factor * total[comm.rank * numel : (comm.rank + 1) * numel]).to(dtype))
        reduce_scatter(outs, ins, comm, op=op).wait()
        assert_bitwise_equal(outs, wanted, str(op))
    spec: Spec = (F32, numel)
    out = poisoned(comm, numel)
    reduce_scatter(
        out, on_device(comm, data_of(comm.rank, spec, 0, comm.size * numel)), comm, op=PreMulSum(1 / 3)
    ).wait()
    parts = [data_of(r, spec, 0, comm.size * numel)[comm.rank * numel :][:numel].abs() for r in range(comm.size)]
    off = (out.cpu() - expected_reduce(comm.rank, comm.size, spec, 0, PreMulSum(1 / 3))).abs()
    assert bool((off <= 2**-22 * torch.stack(parts).sum(0)).all())


def broadcasts(comm: Communicator) -> None:
    dtypes = (F32, BF16, F64, torch.int64, torch.uint8)
    specs = [(dtypes[i % len(dtypes)], numel) for i, numel in enumerate([1, 0, 17, 4097, 100_003])]
    for root in range(comm.size):
        check_broadcast(comm, specs, ("foreign", "pool")[root % 2], root)


def sinks(comm: Communicator) -> None:
    """Sums go to a gradient shard, which adds them up and knows its sum of squares."""
    numel, device = 4099, torch_device(comm.device)
    shard = torch.zeros(numel, device=device)
    sums = torch.zeros(native().ShardAccumulatorCuda.max_spans(1), dtype=F64, device=device)
    sink = native().ShardSinkCuda(native().ShardAccumulatorCuda(shard, [(0, numel)], sums))
    total = torch.zeros(numel)
    for turn in range(3):
        with comm.pool.acquire("full", 4 * comm.size * numel) as lease:
            full = lease.tensor(F32, (comm.size * numel,))
            full.copy_(exact(comm.rank + 10 * turn, comm.size * numel, F32))
            sink.begin(turn > 0)
            comm.reduce_scatter_into(full, sink).wait()
        for rank in range(comm.size):
            total += exact(rank + 10 * turn, comm.size * numel, F32)[comm.rank * numel :][:numel]
        assert_bitwise_equal(shard, total, f"turn {turn}")
    assert float(sums.sum()) == float(total.double().square().sum())


# ---- requests, order, handles


def requests(comm: Communicator) -> None:
    """Started again with other values, several in flight at once, feeding each other."""
    numel = 3001
    full, shard, other = (poisoned(comm, n * numel) for n in (comm.size, 1, comm.size))
    reduce = ReduceScatterRequest(shard, full, comm)
    gather = AllGatherRequest([full, other], [shard, shard], comm)
    for turn in range(2):
        full.fill_(turn + 1.0)
        handles = [start() for _ in range(4) for start in (reduce.start, gather.start)]
        assert [handle.seq for handle in handles] == list(range(handles[0].seq, handles[0].seq + 8))
        wait_all(handles)
        assert_bitwise_equal(full, torch.full((comm.size * numel,), (turn + 1.0) * comm.size**4))
        assert torch.equal(other, full)


def held_up(comm: Communicator) -> None:
    """Inputs that the caller's stream has still to write, and outputs that it has still to read."""
    numel = 10_007
    shard, full = poisoned(comm, numel), poisoned(comm, comm.size * numel)
    seen = []
    for turn in range(4):
        DEVICE.hold(HOLD_S)
        shard.fill_(10.0 * turn + comm.rank)
        all_gather(full, shard, comm).wait()
        shard.fill_(math.nan)
        seen.append(full.clone())
        full.fill_(math.nan)
    for turn, copy in enumerate(seen):
        wanted = torch.tensor([10.0 * turn + rank for rank in range(comm.size)]).repeat_interleave(numel)
        assert_bitwise_equal(copy, wanted, f"turn {turn}")


def dropped(comm: Communicator) -> None:
    """Handles out of order; every third one is dropped together with its input."""
    spec: Spec = (F32, 3000)
    kept: list[tuple[int, Any, Tensor]] = []
    for index in range(12):
        gathers = index % 2 == 0
        mine = on_device(comm, data_of(comm.rank, spec, index, (1 if gathers else comm.size) * spec[1]))
        out = poisoned(comm, (comm.size if gathers else 1) * spec[1])
        handle = all_gather(out, mine, comm) if gathers else reduce_scatter(out, mine, comm)
        if index % 3:
            kept.append((index, handle, out))
        del handle, mine, out
    gc.collect()
    junk = [poisoned(comm, comm.size * spec[1]) for _ in range(8)]
    for index, handle, out in reversed(kept):
        handle.wait()
        reduced = lambda index=index: expected_reduce(comm.rank, comm.size, spec, index)  # noqa: E731
        assert_bitwise_equal(out, reduced() if index % 2 else expected_gather(comm.size, spec, index), f"{index}")
    assert len(junk) == 8


def streams(comm: Communicator) -> None:
    """Two streams besides the communicator's: each operation reads what the one before wrote, with no edge of its own."""
    sides = [native().Stream("one", comm.device), native().Stream("two", comm.device)]
    numel = 1000
    before = poisoned(comm, comm.size * numel)
    before.fill_(comm.rank + 1.0)
    first = before.clone()
    ready = native().current_stream(comm.device).record()
    for side in sides:
        side.wait(ready)
    outs = [torch.zeros_like(before) for _ in range(6)]
    for side in sides:
        side.wait(native().current_stream(comm.device).record())
    kept = []
    for index, out in enumerate(outs):
        mine = before[comm.rank * numel : (comm.rank + 1) * numel]
        kept.append(all_gather(out, mine, comm, stream=(*sides, None)[index % 3], after=kept[-1:]))
        before = out
    wait_all(kept)
    wanted = torch.arange(1.0, comm.size + 1).repeat_interleave(numel)
    for index, out in enumerate(outs):
        assert_bitwise_equal(out, wanted, f"operation {index}")
    torchs = DEVICE.stream()
    with DEVICE.on(torchs):
        own = first.clone()
        handle = all_gather(outs[0], own[comm.rank * numel : (comm.rank + 1) * numel], comm, stream=torchs)
    handle.wait()
    assert_bitwise_equal(outs[0], wanted, "a stream of torch")


def handles(comm: Communicator) -> None:
    shard, full = on_device(comm, torch.full((1000,), float(comm.rank))), poisoned(comm, 1000 * comm.size)
    first = all_gather(full, shard, comm, timing=True)
    second = all_gather(torch.empty_like(full), shard, comm, after=[first], timing=True)
    with second:
        pass
    assert first.synchronize().query() and second.synchronize().query() and first.event.query()
    assert first.nbytes == 4000 * comm.size and second.seq == first.seq + 1
    assert first.elapsed_time(second) > 0 > second.elapsed_time(first)
    with pytest.raises(ValueError, match="timing"):
        first.elapsed_time(all_gather(full, shard, comm).wait())
    with pytest.raises(ValueError, match=r"outputs\[0\] has shape"):
        all_gather(full[:-1], shard, comm)
    check_usable(comm)


def replayed(comm: Communicator) -> None:
    """A captured graph with calls and requests of both kinds, between torch's operations, reads its inputs anew; eager
    calls have their turn between the replays."""
    shard, reduced = poisoned(comm, 1000), poisoned(comm, 1000)
    full, other = poisoned(comm, 1000 * comm.size), poisoned(comm, 1000 * comm.size)
    gather, reduce = AllGatherRequest(other, reduced, comm), ReduceScatterRequest(reduced, full, comm)

    def call() -> None:
        shard.mul_(2.0)
        all_gather(full, shard, comm).wait()
        full.add_(1.0)
        reduce.start()
        gather.start().wait()

    shard.fill_(1.0)
    DEVICE.warm_up(call)
    DEVICE.synchronize()
    shard.fill_(0.0)
    other.fill_(0.0)
    replay = DEVICE.capture(call)
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


CONFORMANCE: Sequence[Any] = (
    every_memory,
    sums_of_16_bits,
    mixed_lists,
    reductions,
    broadcasts,
    sinks,
    requests,
    held_up,
    dropped,
    streams,
    handles,
)
