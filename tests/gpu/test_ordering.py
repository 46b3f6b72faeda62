"""Order under load: streams that are held up and memory that is poisoned change no bit.

Before each thing that another stream must wait for, the stream that makes it is held up for some milliseconds, and
whatever is read too early is NaN: outputs, inputs after their use, and the pools' memory, where BW_POOL_POISON=1 is set
for the process, as `make gpu` does. A missing edge is then a NaN. Holding up proves nothing if the host waits
meanwhile, so tests assert that streams were still busy when the work was issued: mostly, because the driver may wait
where a kernel is launched for the first time.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels import ops
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool
from tests.gpu.device import DEVICE
from tests.gpu.local_ranks import GivenGrads, in_world, on_cpu_ranks

F32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
HOLD_S = 0.02
NUMEL = 100_003


@pytest.fixture(autouse=True)
def quick_switches(_device: None) -> Iterator[None]:
    """A rank must not run for as long as the others' streams are held up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(HOLD_S / 40)
    yield
    sys.setswitchinterval(before)
    DEVICE.synchronize()


def assert_mostly(busy: list[bool]) -> None:
    assert 2 * sum(busy) > len(busy), f"streams were idle when they should have been held up: {busy}"


def given(rank: int, seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def poisoned(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.full((numel,), math.nan, dtype=dtype, device=DEVICE.tensors)


def numel_of(world: int) -> int:
    return DEVICE.size(NUMEL, 1_003) * world


def sums(world: int, seed: int, dtype: torch.dtype) -> Tensor:
    """What reduce-scatter makes of `given` on all ranks, in rank order."""
    total = given(0, seed, numel_of(world), dtype).float()
    for rank in range(1, world):
        total = total + given(rank, seed, numel_of(world), dtype).float()
    return total.to(dtype)


# ---- collectives


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_reduce_scatter_waits_for_its_inputs_and_is_waited_for(world: int, dtype: torch.dtype) -> None:
    """Each rank in a stream of its own. Inputs come late and are overwritten as soon as the handle allows."""

    def body(rank: int, comm: Communicator) -> None:
        stream = DEVICE.stream()
        sources = [given(rank, seed, numel_of(world), dtype).to(DEVICE.tensors) for seed in range(4)]
        with DEVICE.on(stream):
            full, shard = poisoned(numel_of(world), dtype), poisoned(numel_of(world) // world, dtype)
            got, busy = [], []
            for source in sources:
                DEVICE.hold(HOLD_S)
                full.copy_(source)
                handle = bw.reduce_scatter(shard, full, comm)
                busy.append(not DEVICE.is_idle(stream))
                handle.wait()
                full.fill_(math.nan)
                got.append(shard.clone())
                shard.fill_(math.nan)
        DEVICE.join(stream)
        assert_mostly(busy)
        for seed, part in enumerate(got):
            begin = rank * (numel_of(world) // world)
            expected = sums(world, seed, dtype)[begin : begin + part.numel()]
            assert torch.equal(DEVICE.get(part), expected), f"rank {rank}, operation {seed}"

    in_world(world, body)


@pytest.mark.parametrize("world", [2, 4])
def test_all_gather_waits_for_its_inputs_and_another_stream_for_it(world: int) -> None:
    """Issued in one stream, read in a second one, whose only edge is the handle."""

    def body(rank: int, comm: Communicator) -> None:
        numel = numel_of(1)
        got, busy = [], []
        for seed in range(4):
            source = given(rank, seed, numel, F32).to(DEVICE.tensors)
            full = poisoned(numel * world, F32)
            maker, reader = DEVICE.stream(), DEVICE.stream()  # behind both
            with DEVICE.on(maker):
                shard = poisoned(numel, F32)
                DEVICE.hold(HOLD_S)
                shard.copy_(source)
                handle = bw.all_gather(full, shard, comm)
            handle.wait(reader)
            with DEVICE.on(reader):
                got.append(full.clone())
            busy.append(not DEVICE.is_idle(reader))
            DEVICE.join(reader)
            full.fill_(math.nan)
        assert_mostly(busy)
        for seed, full in enumerate(got):
            expected = torch.cat([given(r, seed, numel, F32) for r in range(world)])
            assert torch.equal(DEVICE.get(full), expected), f"rank {rank}, operation {seed}"

    in_world(world, body)


def test_tensors_and_handles_may_be_dropped() -> None:
    """The memory of dropped inputs is not given to others while the operation reads it."""
    world, count = 2, 6

    def body(rank: int, comm: Communicator) -> None:
        numel = numel_of(world)
        stream = DEVICE.stream()
        with DEVICE.on(stream):
            shards, busy = [], []
            for seed in range(count):
                source = given(rank, seed, numel, F32).to(DEVICE.tensors)
                full = torch.empty_like(source)
                DEVICE.hold(HOLD_S)
                full.copy_(source)
                shards.append(poisoned(numel // world, F32))
                handle = bw.reduce_scatter(shards[-1], full, comm)
                if seed < count - 1:
                    del handle
                del full
                busy.append(not DEVICE.is_idle(stream))
                gc.collect()
                poisoned(numel, F32)  # may get the memory of what was dropped
            handle.wait()
            got = [shard.clone() for shard in shards]
        DEVICE.join(stream)
        assert_mostly(busy)
        for seed, part in enumerate(got):
            begin = rank * (numel // world)
            assert torch.equal(DEVICE.get(part), sums(world, seed, F32)[begin : begin + part.numel()]), seed

    in_world(world, body)


# ---- the pool


def test_pools_are_poisoned() -> None:
    if os.environ.get("BW_POOL_POISON") != "1":
        pytest.skip("BW_POOL_POISON=1 is not set, so the communicators' pools are not poisoned")
    with Pool("cuda").acquire("", 4096) as lease:
        assert torch.isnan(DEVICE.get(lease.tensor(F32, 1024))).all()


@pytest.mark.parametrize("upstream", ["cuda", "torch"])
def test_the_next_owner_waits_for_the_last_one(upstream: str) -> None:
    """The first owner is held up while the second gets the same bytes in another stream."""
    pool = Pool(upstream, poison=True)
    numel = DEVICE.size(1_000_000, 1_000)
    streams = [DEVICE.stream() for _ in range(3)]
    seen, places, busy = [], [], []
    for turn in range(9):
        stream = streams[turn % 3]
        with DEVICE.on(stream):
            lease = pool.acquire("owner", 4 * numel, stream=stream)
            places.append(lease.place)
            memory = lease.tensor(F32, numel)
            DEVICE.hold(HOLD_S)
            memory.fill_(float(turn))
            DEVICE.hold(HOLD_S)
            seen.append(memory.clone())
            del memory
            lease.release(after=stream)
        busy.append(not DEVICE.is_idle(stream))
    for stream in streams:
        DEVICE.join(stream)
    assert_mostly(busy)
    for turn, values in enumerate(seen):
        assert torch.all(DEVICE.get(values) == turn), f"owner {turn}"
    assert len(set(places)) == 1
    assert pool.stats().reuses == 8
    if not DEVICE.is_simulated:
        assert pool.stats().waits >= 4
    pool.check()
    pool.expect_no_leases()


# ---- the optimizer


class Late(torch.autograd.Function):
    """Its gradient takes long: the stream of the backward is held up before it is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        DEVICE.hold(HOLD_S / 10)
        late = torch.full_like(grad, math.nan)
        late.copy_(grad)
        return late


class LateGrads(GivenGrads):
    def forward(self, grads: list[Tensor]) -> Tensor:
        pairs = zip(self.weights, grads, strict=True)
        return torch.stack([(Late.apply(p) * g).sum() for p, g in pairs]).sum()


def trained(comm: Communicator | None, device: torch.device, streams: str, **options: Any) -> list[Tensor]:
    """Parameters and norms of three steps. ``streams``: where the forward, the backward and the step run."""
    is_loaded = device == DEVICE.tensors and streams != "none"
    rank = comm.rank if comm is not None else 0
    model = (LateGrads if is_loaded else GivenGrads)(BF16, device, seed=rank)
    if comm is not None:
        options |= {"process_group": comm, "bucket_cap_mb": 0.02}
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
    if options.get("overlap_param_sync"):
        opt.prefetch_params(model)
    out = []
    for step in range(3):
        grads = model.draw_here(100 * rank + step)
        side = DEVICE.stream() if streams != "none" else None
        if streams == "backward":
            with DEVICE.on(side):
                model(grads).backward()
            DEVICE.join(side)  # as torch has it: the gradients are there in the stream of the backward
            out += finish(opt, model)
        elif streams == "all":
            with DEVICE.on(side):
                model(grads).backward()
                out += finish(opt, model)
            DEVICE.join(side)
        else:
            model(grads).backward()
            out += finish(opt, model)
    opt.close()
    return [x.cpu() for x in out]


def finish(opt: bw.ShardedAdamW, model: torch.nn.Module) -> list[Tensor]:
    """Clip, step, and copies of what another forward would read."""
    norm = opt.clip_grad_norm_(0.3).clone()
    opt.step()
    opt.zero_grad()
    opt.param_sync()
    return [norm, *(p.detach().clone() for p in model.parameters())]


OPTIONS: list[dict[str, Any]] = [{}, {"overlap_param_sync": True}, {"max_inflight_buckets": 1}]


@pytest.mark.parametrize("world", [0, 2, 4])
@pytest.mark.parametrize("streams", ["default", "backward", "all"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_under_load_has_the_bits_of_the_cpu(world: int, streams: str, options: dict[str, Any]) -> None:
    """World 0: without a communicator. Gradients come late, from any stream: G18 of the optimizer's test rows."""
    expected = on_cpu_ranks(world, lambda rank, comm: trained(comm, CPU, "none", **options))
    got = in_world(world, lambda rank, comm: trained(comm, DEVICE.tensors, streams, **options))
    for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), f"rank {rank}: {index} of {len(theirs)}"


def test_ops_run_in_the_current_stream() -> None:
    """adam_step, l2_norm and copies follow the stream that makes their inputs, with no other edge."""
    numel = DEVICE.size(1_000_003, 10_003)
    busy = []
    for seed in range(3):
        start = [given(k, seed, numel, F32) for k in range(4)]
        start[3].abs_()
        sources = [x.to(DEVICE.tensors, copy=True) for x in start]
        stream = DEVICE.stream()
        with DEVICE.on(stream):
            held = [poisoned(numel, F32) for _ in range(4)]
            DEVICE.hold(HOLD_S)
            for tensor, source in zip(held, sources, strict=True):
                tensor.copy_(source)
            ops.adam_step(*([x] for x in held), 3, lr=1e-2)
            norm = ops.l2_norm(held[:3])
            copy = poisoned(numel, F32)
            core.copy_all([copy], [held[0]])
            busy.append(not DEVICE.is_idle(stream))
            kept = [x.clone() for x in (*held, copy)]
            for tensor in held:
                tensor.fill_(math.nan)
        DEVICE.join(stream)
        with DEVICE.cpu():
            ops.adam_step(*([x] for x in start), 3, lr=1e-2)
            expected_norm = ops.l2_norm(start[:3])
        for got, expected in zip(kept, [*start, start[0]], strict=True):
            assert torch.equal(DEVICE.get(got), expected)
        assert torch.equal(DEVICE.get(norm), expected_norm)
    assert_mostly(busy)
