"""What ranks take is what docs/memory.md says, byte for byte: flat memory, shards, states, buckets in flight, pools.

How many reduce-scatters are in flight depends on how fast they are. Here they are *slow*: over when somebody waits for
them and not before, so that the most memory that there may be is taken, and the formula must be met exactly.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.grads import inflight
from bucketwheel.optim import memory
from bucketwheel.optim.report import ShardedParts
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import run_threads
from tests.conformance.optimizer.test_bucket_slots import pair
from tests.support.optim_twins import SHAPES, make_params, run_local
from tests.support.replica_ranks import with_replicas
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing
from tests.support.slow_reductions import slow_reductions

pytestmark = pytest.mark.dist

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PRECISIONS: list[dict[str, Any]] = [
    {},
    {"reduce_dtype": BF16, "amsgrad": True},
    {"accum_dtype": BF16, "state_dtype": BF16},
    {"master_weights": "none", "reduce_dtype": F32},
    {"master_weights": "bf16_remainder"},
]
MIXES = [[F32], [BF16], [F32, BF16], [BF16, F64], [F16, F32]]
_POISON = pytest.mark.skipif("BW_POOL_POISON" in os.environ, reason="red zones make leases larger")


def params_of(dtypes: Sequence[torch.dtype]) -> list[Parameter]:
    params = make_params() + make_params()[:5]
    return [Parameter(p.detach().to(dtypes[i % len(dtypes)])) for i, p in enumerate(params)]


PARAMS = len(SHAPES) + 5


def parts_of(opt: ShardedAdamW) -> ShardedParts:
    return opt._engine._parts()  # type: ignore[union-attr]


def expect_sizes(opt: ShardedAdamW, options: dict[str, Any]) -> None:
    """What is there all the time: by the formula, by the summary, and by the tensors themselves."""
    parts = parts_of(opt)
    half = {"bf16_remainder": {"remainder": 2}, "none": {}}.get(options.get("master_weights", ""), {"master_param": 4})
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(options.get("amsgrad"))
    spaces = []
    for space in parts.spaces:
        is_double, is_half = space.dtype == F64, space.dtype in (BF16, F16)
        moment = 8 if is_double else 2 if "state_dtype" in options else 4
        kept = {name: moment for name in names} | (half if is_half else {})
        grad = 8 if is_double else 2 if "accum_dtype" in options else 4
        spaces.append(memory.SpaceSize(space.packing.numel, space.packing.padding, space.dtype.itemsize, grad, kept))
    expected = memory.expected_memory(spaces, parts.comm.size)
    found = opt.memory_summary()
    assert {name: found[name] for name in expected} == expected
    assert {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param", "remainder"} & set(found) <= set(expected)
    tensors: dict[str, list[Tensor]] = {}
    for space in parts.spaces:
        tensors.setdefault("params", []).append(space.flat.flat)
        tensors.setdefault("grads", []).append(space.grad)
        for name, shard in space.states.items():
            tensors.setdefault("states", []).append(shard)
            tensors.setdefault(name, []).append(shard)
    assert {name: sum(t.nbytes for t in listed) for name, listed in tensors.items()} == {
        name: nbytes for name, nbytes in expected.items() if name != "params_padding"
    }
    used = sum(p.nbytes for p in opt.param_groups[0]["params"])
    assert found["params"] - found["params_padding"] == used
    segments = sum(len(space.packing.segments(parts.comm.rank)) for space in parts.spaces)
    on_device = 8 * len(parts.infos) + 16 * segments + 8 * len(parts.buckets)
    assert found["bookkeeping"] == 19 * len(parts.infos) + (on_device if parts.comm.device >= 0 else 0)


def options_of(seed: int) -> tuple[list[torch.dtype], dict[str, Any], dict[str, Any]]:
    """(dtypes, precision, options) of an optimizer, the same on all ranks."""
    rng = random.Random(seed)
    precision = PRECISIONS[seed % len(PRECISIONS)]
    dtypes = [BF16] if "bf16_remainder" in precision.values() else rng.choice(MIXES)
    options = {
        "max_inflight_buckets": 1 + seed % 4,
        "overlap_grad_sync": rng.random() < 0.75,
        "overlap_param_sync": rng.random() < 0.5,
        "bucket_cap_mb": rng.choice([1e-4, 1e-3, 3e-3, 1.0]),
    }
    return dtypes, precision, options


def arrivals_of(seed: int, window: int, rank: int, world: int, in_step: bool) -> list[int]:
    """The parameters whose gradients come in a window, in random order; some again.

    Where there are several ranks all have all of them, or none has any, and none comes again but in the last window:
    whoever waits for a peer that does not come takes more memory ([Note: soft bound]).
    """
    same = random.Random(f"{seed} {window}")
    rng = random.Random(f"{seed} {window} {0 if in_step else rank}")
    order = list(range(PARAMS))
    if rng.random() < 0.3:
        order.reverse()
    else:
        rng.shuffle(order)
    if not in_step:
        order = order[: same.choice([PARAMS, PARAMS, PARAMS, PARAMS // 2 if world == 1 else PARAMS, 0])]
    again = rng.choice([0, 3, PARAMS]) if world == 1 or in_step else 3 * (window == 3)
    return order + rng.sample(order, min(len(order), again))


def expect_windows(
    seed: int, opt: ShardedAdamW, params: Sequence[Tensor], meet: Callable[[], object] | None = None
) -> tuple[int, int]:
    """Plays four windows beside the formula. ``meet``: called after each gradient, which then is the same on all ranks.

    Returns the most that buckets had of the pool, and how many late gradients came to a bucket of their own.
    """
    parts = parts_of(opt)
    sizes, limit, overlap = parts.bucket_sizes, 1 + seed % 4, parts.options.overlap_grad_sync
    slots = min(limit, len(sizes)) if parts.comm.is_registered else 0
    pool = parts.grads.launcher.pool
    at_rest = pool.stats()
    most = most_leased = late_count = 0
    for window in range(4):
        arrivals = arrivals_of(seed, window, parts.grid.rank, parts.grid.size, meet is not None)
        formula = memory.BucketMemory(sizes, limit, overlap=overlap, slots=slots)
        for index in arrivals:
            (params[index] * 0.5).sum().backward()
            formula.gradient(index)
            live = pool.stats().live_leases - at_rest.live_leases
            assert live == formula.count, (window, index)
            assert live < limit + max(formula.peak_gathering, 1)
            if meet is not None:
                meet()
        late_count += len(formula.late)
        mine = " ".join(map(str, [len(arrivals), *formula.late]))
        everyone = [list(map(int, said.decode().split())) for said in parts.grid.exchange(mine.encode())]
        opt.step()
        if any(count for count, *_ in everyone):  # else there is nothing to reduce
            formula.close({number for _, *late in everyone for number in late})
        opt.zero_grad()
        most, most_leased = max(most, formula.peak_bytes), max(most_leased, formula.peak_leased_bytes)
        stats = pool.stats()
        assert stats.live_leases == at_rest.live_leases and stats.live_bytes == at_rest.live_bytes
        assert stats.high_water_bytes == at_rest.live_bytes + most_leased, (window, seed)
        found = opt.memory_summary()
        assert found["buckets"] == 0 and found["buckets_peak"] == most
        assert formula.peak_count <= 2 * len(sizes)
    return most_leased, late_count


def on_comm(comm: Communicator, seed: int, **given: Any) -> int:
    """All of it for an optimizer; how often a late gradient took memory."""
    dtypes, precision, options = options_of(seed)
    params = params_of(dtypes)
    opt = ShardedAdamW(params, process_group=comm, **precision, **options, **given)
    expect_sizes(opt, precision)
    late = expect_windows(seed, opt, params)[1]
    opt.close()
    return late


def each_alone(world: int, seeds: Sequence[int]) -> list[int]:
    """A communicator for each optimizer: the pool's high water is then its own."""
    found = []
    with slow_reductions():
        for seed in seeds:
            found.append(sum(run_local(world, on_comm, seed)))
    return found


@_POISON
@pytest.mark.parametrize("world", [1, slow_case(2), 3, slow_case(4)])
def test_ranks_take_what_the_formula_says(world: int) -> None:
    assert sum(each_alone(world, range(16))) > 0, "no late gradient came"


def on_shm(rank: int, world: int, seeds: Sequence[int]) -> int:
    late = 0
    with slow_reductions():
        for seed in seeds:
            with Communicator(backend="shm", name=f"memory{seed}", timeout_s=30) as comm:
                late += on_comm(comm, seed)
    return late


@_POISON
@pytest.mark.parametrize("world", [2, 3])
def test_processes_take_what_the_formula_says(world: int, rank_pool: Any) -> None:
    assert sum(rank_pool(world).run(on_shm, range(20, 28))) > 0


def run_with_replicas(rank: int, shard: Communicator, replicate: Communicator, seed: int) -> int:
    dtypes, precision, options = options_of(seed)
    params = params_of(dtypes)
    before = replicate.pool.stats()
    groups = {"process_group": shard, "replicate_group": replicate}
    opt = ShardedAdamW(params, **groups, **precision, **options)
    expect_sizes(opt, precision)
    parts = parts_of(opt)
    late = expect_windows(seed, opt, params)[1]
    shards = [(b.numel // shard.size, 8 if b.dtype == F64 else 4) for b in parts.buckets]
    expected = memory.partial_sum_bytes(shards, replicate.size, options["max_inflight_buckets"])
    assert replicate.pool.stats().high_water_bytes - before.live_bytes == expected > 0
    assert 0 <= expected - opt.memory_summary()["partial_sums"] < 512 * options["max_inflight_buckets"]
    opt.close()
    return late


@_POISON
@pytest.mark.parametrize("grid", [(2, 2), (1, 3)], ids=str)
def test_replicas_take_what_the_formula_says(grid: tuple[int, int]) -> None:
    """Partial sums have memory of their own; the rest is as in one group."""
    with slow_reductions():
        assert sum(sum(with_replicas(*grid, run_with_replicas, seed)) for seed in range(30, 36)) > 0


@_POISON
@pytest.mark.parametrize("world", [1, 2, slow_case(3), slow_case(4)])
def test_simulated_cuda_takes_what_the_formula_says(world: int) -> None:
    """Ranks meet whenever one needs memory: what all have launched gives its memory on in the stream."""
    make_room = inflight.Inflight.make_room

    def body(rank: int, _: int, seed: int, places: LocalWorld, barrier: threading.Barrier) -> int:
        dtypes, precision, options = options_of(seed)
        with Communicator(places.rank(rank), timeout_s=20, device="cuda") as comm:
            params = params_of(dtypes)
            opt = ShardedAdamW(params, process_group=comm, **precision, **options)
            expect_sizes(opt, precision)

            def meet_and_make_room() -> None:
                barrier.wait(20)
                make_room(inflight_now)

            inflight_now = opt._engine.grads.launcher.inflight  # type: ignore[union-attr]
            inflight_now.make_room = meet_and_make_room  # type: ignore[method-assign]
            late = expect_windows(seed, opt, params, lambda: barrier.wait(20))[1]
            opt.close()
            return late

    late = 0
    with posing(delays=3):
        for seed in range(40, 48):
            late += sum(run_threads(body, world, seed, LocalWorld(world), threading.Barrier(world)))
    assert late > 0


@_POISON
def test_reserved_memory_is_what_the_formula_says() -> None:
    """Large parameters and buckets of one size: what a pool reserves is what it needs for what is there at once."""
    numel, count, mib = 5 << 18, 6, 1 << 20  # buckets of 5 MiB, of which a slab of 8 MiB holds one

    def body(comm: Communicator, limit: int) -> None:
        params = [Parameter(torch.zeros(numel)) for _ in range(count)]
        opt = ShardedAdamW(params, process_group=comm, bucket_cap_mb=5, max_inflight_buckets=limit)
        for _ in range(2):
            sum((p.sum() for p in params), torch.zeros(())).backward()
            opt.step()
            opt.zero_grad()
        live = min(limit, count)
        expected = memory.slab_bytes([count * 5 * mib] + [5 * mib] * live)
        assert comm.pool.stats().reserved_bytes == expected == (30 + 8 * live) * mib
        found = opt.memory_summary()
        assert found["pool"] == 8 * live * mib and found["buckets_peak"] == 5 * live * mib
        assert f"(params 30.00 MiB, grads 15.00 MiB, states 30.00 MiB, buckets {5 * live}.00 MiB" in opt.describe()
        opt.close()

    with slow_reductions():
        for limit in (1, 3):
            run_local(2, body, limit)


def on_registered(rank: int, world: int, seed: int) -> int:
    dtypes, precision, options = options_of(seed)
    with pair(True) as (comm, _):
        params = params_of(dtypes)
        opt = ShardedAdamW(params, process_group=comm, **precision, **options)
        expect_sizes(opt, precision)
        sizes = [bucket.nbytes for bucket in parts_of(opt).buckets]
        expected = memory.slot_bytes(sizes, options["max_inflight_buckets"])
        assert comm.pool.stats().high_water_bytes == comm.pool.stats().live_bytes == expected
        assert 0 <= expected - opt.memory_summary()["slots"] < 512 * options["max_inflight_buckets"]
        late = expect_windows(seed, opt, params, lambda: comm.exchange(b""))[1]
        assert comm.pool.stats().high_water_bytes == expected
        opt.close()
        return late


@_POISON
@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_registered_memory_is_what_the_formula_says(world: int, rank_pool: Any) -> None:
    """Slots all the time; beside them what comes too early, and late gradients."""
    assert sum(sum(rank_pool(world).run(on_registered, seed)) for seed in range(50, 56)) > 0
