"""What ranks take is what docs/memory.md says: flat memory, shards and states to the byte, buckets within their bound."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.optim.sharded_engine import ShardedEngine
from bucketwheel.testing import run_threads
from tests.conformance.optimizer.test_bucket_slots import pair
from tests.support.optim_twins import SHAPES, make_params, run_local
from tests.support.replica_ranks import with_replicas
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

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


def leased(nbytes: int) -> int:
    """What a lease of ``nbytes`` takes of its pool."""
    return -(-max(nbytes, 1) // 512) * 512


def params_of(dtypes: Sequence[torch.dtype]) -> list[Parameter]:
    params = make_params() + make_params()[:5]
    return [Parameter(p.detach().to(dtypes[i % len(dtypes)])) for i, p in enumerate(params)]


PARAMS = len(SHAPES) + 5


def engine_of(opt: ShardedAdamW) -> ShardedEngine:
    engine = opt._engine
    assert isinstance(engine, ShardedEngine)
    return engine


def expect_sizes(opt: ShardedAdamW, options: dict[str, Any]) -> None:
    """What is there all the time: by the formula, by the summary, and by the tensors themselves."""
    engine = engine_of(opt)
    half = {"bf16_remainder": {"remainder": 2}, "none": {}}.get(options.get("master_weights", ""), {"master_param": 4})
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(options.get("amsgrad"))
    expected: Counter[str] = Counter()
    for space in engine.spaces:
        is_double, is_half = space.dtype == F64, space.dtype in (BF16, F16)
        moment = 8 if is_double else 2 if "state_dtype" in options else 4
        kept = {name: moment for name in names} | (half if is_half else {})
        grad = 8 if is_double else 2 if "accum_dtype" in options else 4
        numel, owned = space.packing.numel, space.packing.numel // engine.comm.size
        expected.update(params=numel * space.dtype.itemsize, grads=owned * grad)
        expected.update(params_padding=space.packing.padding * space.dtype.itemsize)
        expected.update(states=owned * sum(kept.values()), **{name: owned * nbytes for name, nbytes in kept.items()})
    found = opt.memory_summary()
    assert {name: found[name] for name in expected} == expected
    assert {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param", "remainder"} & set(found) <= set(expected)
    tensors: dict[str, list[Tensor]] = {}
    for space in engine.spaces:
        tensors.setdefault("params", []).append(space.whole.flat)
        tensors.setdefault("grads", []).append(space.grad)
        for name, shard in space.states.items():
            tensors.setdefault("states", []).append(shard)
            tensors.setdefault(name, []).append(shard)
    assert {name: sum(t.nbytes for t in listed) for name, listed in tensors.items()} == {
        name: nbytes for name, nbytes in expected.items() if name != "params_padding"
    }
    used = sum(p.nbytes for p in opt.param_groups[0]["params"])
    assert found["params"] - found["params_padding"] == used
    segments = sum(len(space.packing.segments(engine.comm.rank)) for space in engine.spaces)
    on_device = 8 * len(engine.infos) + 16 * segments + 8 * len(engine._assembly.buckets)
    assert found["bookkeeping"] == 20 * len(engine.infos) + (on_device if engine.comm.device >= 0 else 0)


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


def expect_windows(opt: ShardedAdamW, params: Sequence[Tensor], meet: Callable[[], object] = lambda: None) -> int:
    """Four windows, two with gradients in the order of the buckets and two with some that are late.

    Buckets take what the plan says, its load at their most, and what is late on the side; the pools' counters say the same.
    ``meet``: called after each gradient, so that no rank is far ahead: it would take more memory ([Note: soft bound]). Returns
    the most bytes at once.
    """
    grads = engine_of(opt).grads
    plan, pool = grads.plan, grads.side_pool
    at_rest, most = pool.stats(), 0
    for window in range(4):
        in_order = list(reversed(range(PARAMS)))
        for index in in_order if window % 2 == 0 else [*in_order, *in_order[:3]]:
            (params[index] * 0.5).sum().backward()
            found = opt.memory_summary()
            assert pool.stats().live_bytes - at_rest.live_bytes == found["side"] <= found["buckets"]
            most = max(most, found["buckets"])
            meet()
        opt.step()
        opt.zero_grad()
        found = opt.memory_summary()
        assert pool.stats().live_bytes == at_rest.live_bytes and found["buckets"] == found["side"] == 0
        if window == 0:
            assert found["buckets_peak"] == found["load"] == plan.load_bytes >= most and found["side_peak"] == 0
            assert pool.stats().high_water_bytes == at_rest.high_water_bytes
    assert pool.stats().high_water_bytes - at_rest.live_bytes == found["side_peak"]
    return found["buckets_peak"]


def on_comm(comm: Communicator, seed: int, **given: Any) -> int:
    """All of it for an optimizer; the most bytes of buckets."""
    dtypes, precision, options = options_of(seed)
    params = params_of(dtypes)
    opt = ShardedAdamW(params, process_group=comm, **precision, **options, **given)
    expect_sizes(opt, precision)
    peak = expect_windows(opt, params, lambda: comm.exchange(b""))
    opt.close()
    return peak


def each_alone(world: int, seeds: Sequence[int]) -> list[int]:
    """A communicator for each optimizer: the pool's high water is then its own."""
    return [sum(run_local(world, on_comm, seed)) for seed in seeds]


@_POISON
@pytest.mark.parametrize("world", [1, 3])
def test_ranks_take_what_the_formula_says(world: int) -> None:
    assert all(each_alone(world, range(5, 13)))


def run_with_replicas(rank: int, shard: Communicator, replicate: Communicator, seed: int) -> int:
    dtypes, precision, options = options_of(seed)
    params = params_of(dtypes)
    before = replicate.pool.stats()
    groups = {"process_group": shard, "replicate_group": replicate}
    opt = ShardedAdamW(params, **groups, **precision, **options)
    expect_sizes(opt, precision)
    engine = engine_of(opt)
    expect_windows(opt, params, lambda: engine.reducer.exchange(b""))
    buckets = [bucket.grads for bucket in engine._assembly.buckets]
    shards = [(b.numel // shard.size, 8 if b.dtype == F64 else 4) for b in buckets]
    sums = [leased(-(-numel // replicate.size) * replicate.size * nbytes) for numel, nbytes in shards]
    limit = options["max_inflight_buckets"]
    load = max(sum(sums[first : first + limit]) for first in range(len(sums)))
    found = opt.memory_summary()["partial_sums"]
    assert replicate.pool.stats().high_water_bytes - before.live_bytes == found >= load > 0
    assert found <= sum(max(sums[first::limit]) for first in range(min(limit, len(sums))))
    opt.close()
    return rank


@_POISON
@pytest.mark.parametrize("grid", [(2, 2), (1, 3)], ids=str)
def test_replicas_take_what_the_formula_says(grid: tuple[int, int]) -> None:
    """Partial sums have memory of their own; the rest is as in one group."""
    for seed in range(30, 34):
        with_replicas(*grid, run_with_replicas, seed)


@_POISON
@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_simulated_cuda_takes_what_the_formula_says(world: int) -> None:
    """Ranks meet at each launch: what all have launched before gives its memory on in the stream."""

    def body(rank: int, _: int, seed: int, places: LocalWorld, barrier: threading.Barrier) -> None:
        dtypes, precision, options = options_of(seed)
        with Communicator(places.rank(rank), timeout_s=20, device="cuda") as comm:
            params = params_of(dtypes)
            opt = ShardedAdamW(params, process_group=comm, **precision, **options)
            expect_sizes(opt, precision)
            engine_of(opt).grads._native.observe(lambda *_: barrier.wait(20))
            expect_windows(opt, params, lambda: barrier.wait(20))
            opt.close()

    with posing(delays=3):
        for seed in (41, 42, 43, 45, 46):  # more than one bucket in flight
            run_threads(body, world, seed, LocalWorld(world), threading.Barrier(world))


@_POISON
def test_what_comes_in_another_order_is_reserved_on_the_side() -> None:
    """From the first parameter to the last: before the first bucket is full, all have opened."""

    def body(comm: Communicator) -> None:
        params = [Parameter(torch.zeros(1 << 18)) for _ in range(9)]
        opt = ShardedAdamW(params, process_group=comm, bucket_cap_mb=1, max_inflight_buckets=2)
        for _ in range(2):
            for param in params:
                param.sum().backward()
            opt.step()
            opt.zero_grad()
        found, mib = opt.memory_summary(), 1 << 20
        assert (found["planned"], found["load"], found["side_peak"], found["side"]) == (2 * mib, 2 * mib, 7 * mib, 0)
        assert found["buckets_peak"] == 9 * mib
        assert comm.pool.stats().reserved_bytes == (9 + 2 + 7) * mib
        opt.close()

    run_local(2, body)


def on_registered(rank: int, world: int, seed: int) -> int:
    dtypes, precision, options = options_of(seed)
    with pair(True) as (comm, _):
        params = params_of(dtypes)
        opt = ShardedAdamW(params, process_group=comm, **precision, **options)
        expect_sizes(opt, precision)
        expected = opt.memory_summary()["planned"]
        assert comm.pool.stats().high_water_bytes == comm.pool.stats().live_bytes == expected
        late = expect_windows(opt, params, lambda: comm.exchange(b""))
        assert comm.pool.stats().high_water_bytes == expected
        opt.close()
        return late


@_POISON
@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_registered_memory_is_what_the_formula_says(world: int, rank_pool: Any) -> None:
    """Slots all the time; beside them what comes too early, and late gradients."""
    assert sum(sum(rank_pool(world).run(on_registered, seed)) for seed in range(50, 54)) > 0
