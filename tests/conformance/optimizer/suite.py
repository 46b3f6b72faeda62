"""The conformance suite of the optimizer: what a training loop may do, on every backend, at any world size and precision.

A *script* (`tests.support.optim_twins`) says what a loop does. Ranks that run it must leave the bits of one process
that runs it, and that process what `torch.optim.AdamW` leaves. Where a script runs is a `Setting`. `rows` chooses them
pairwise: each script once for `make test`, so that the settings cover all pairs of their values; then, for
`make test-all`, until each script has met every value too.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import bucketwheel as bw
from tests.conformance.optimizer import divergence, gradients, live, states, updates
from tests.conformance.optimizer.scripts import DISTRIBUTIONS, F32, F64, PRECISIONS, SCRIPTS, SHARDS, Script, Setting
from tests.support import simulated_nccl
from tests.support.bits import assert_bitwise_equal
from tests.support.comm_cases import ON_PROCESSES
from tests.support.optim_twins import (
    Outcome,
    Run,
    TorchTwin,
    assert_as_torch,
    joined_states,
    run_local,
)
from tests.support.replica_ranks import torch_groups, with_replicas
from tests.support.simulated_cuda import posing

MODULES = (gradients, divergence, updates, states, live)  # which have entered their scripts into SCRIPTS

# ---- which settings


Value = tuple[str, Any]  # of a setting: which, and what


def values_of(setting: Setting) -> list[Value]:
    return [(one.name, getattr(setting, one.name)) for one in fields(setting)]


@functools.cache
def rows() -> tuple[list[tuple[str, Setting]], list[tuple[str, Setting]]]:
    """For `make test` one setting of each script, as different as can be; for `make test-all` until each script has met
    each value that it may. The same in every process."""
    rng = random.Random(0)
    met: set[tuple[Value, ...]] = set()
    first, rest = [], []
    for name, one in SCRIPTS.items():
        places = one.settings()
        having: dict[Value, list[Setting]] = {}
        for setting in places:
            for value in values_of(setting):
                having.setdefault(value, []).append(setting)

        def take(some: list[Setting], new: Callable[[Setting], int], having: dict[Value, Any] = having) -> Setting:
            best = max(rng.sample(some, min(len(some), 24)), key=new)
            met.update(itertools.combinations(values_of(best), 2))
            for value in values_of(best):
                having.pop(value, None)
            return best

        first.append((name, take(places, lambda s: len({*itertools.combinations(values_of(s), 2)} - met))))
        while having:
            some = having[min(having, key=str)]
            rest.append((name, take(some, lambda s, having=having: sum(value in having for value in values_of(s)))))
    return first, rest


# ---- one process


def outcome_of(one: Script, optimizer: Callable[..., Any], dtype: torch.dtype, **options: Any) -> Outcome:
    """What one process leaves that runs the script as a reference."""
    params = one.params(dtype)
    make = lambda params: optimizer(one.make(params), **options)  # noqa: E731
    run = Run(make(params), params, is_reference=True, make_optimizer=make)
    one.play(run)
    saved = run.opt.state_dict()["state"]
    states = [saved.get(i, {}) for i in range(len(run.params))]
    return Outcome([p.detach().clone() for p in run.params], states, run.seen, run.clips)


def outcome_of_torch(one: Script, dtype: torch.dtype = F32) -> Outcome:
    options = dict(one.options)
    decoupled = options.pop("decoupled_weight_decay", True)

    def optimizer(params: Any, **given: Any) -> TorchTwin:
        twin = TorchTwin(params, **given)
        for group in twin.param_groups:
            group["decoupled_weight_decay"] = decoupled
        return twin

    found = outcome_of(one, optimizer, dtype, **options)
    fresh = lambda p: {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}  # noqa: E731
    found.states = [{**fresh(p), **state} for p, state in zip(found.params, found.states, strict=True)]
    return found


@functools.cache
def expected_of(name: str, precision: str) -> Outcome:
    dtype, options = PRECISIONS[precision]
    one = SCRIPTS[name]
    if not one.alone:
        return outcome_of_torch(one, F64)  # torch loses digits of norms in float32
    return outcome_of(one, bw.ShardedAdamW, dtype, **{**options, **one.options})


# ---- ranks

Left = tuple[list[Tensor], dict[str, Any], list[Any], bool]  # parameters, state_dict, what was seen, whether it clips


def played(name: str, setting: Setting, rank: int, world: int, groups: Mapping[str, bw.Communicator]) -> Left:
    one, (dtype, options) = SCRIPTS[name], PRECISIONS[setting.precision]
    given = {**options, **DISTRIBUTIONS[setting.distribution], **one.options, **groups}
    params = one.params(dtype)
    make = lambda params: bw.ShardedAdamW(one.make(params), **given)  # noqa: E731
    run = Run(make(params), params, rank, world, make_optimizer=make)
    one.play(run)
    run.opt.param_sync()
    saved = run.opt.state_dict()
    values = [p.detach().clone() for p in run.params]
    run.opt.close()
    for comm in groups.values():
        if isinstance(comm, bw.Communicator):
            comm.pool.check()
            # Memory that is left to its holders ends with the last operation that reads it, which a thread of NCCL's drops.
            until = time.monotonic() + 10
            while comm.pool.stats().live_leases and time.monotonic() < until:
                time.sleep(0.01)
            comm.pool.expect_no_leases()
    assert_bitwise_equal([p.detach() for p in run.params], values, "parameters after close()")
    return values, saved, run.seen, run.clips


def on_comm(comm: bw.Communicator, name: str, setting: Setting) -> Left:
    return played(name, setting, comm.rank, comm.size, {"process_group": comm})


def on_rows(rank: int, shard: bw.Communicator, replicate: bw.Communicator, name: str, setting: Setting) -> Left:
    groups = {"process_group": shard, "replicate_group": replicate}
    return played(name, setting, rank, shard.size * replicate.size, groups)


def on_torchs_rows(rank: int, world: int, name: str, setting: Setting) -> Left:
    groups = torch_groups(rank, world, SHARDS[world])
    try:
        return played(name, setting, rank, world, groups)
    finally:
        for group in groups.values():
            dist.destroy_process_group(group)


def over_nccl(rank: int, world: int, name: str, setting: Setting) -> Left:
    """A pair of communicators, on memory that NCCL knows at even world sizes, but where a rank waits for another's graph."""
    with simulated_nccl.simulated() as script:
        gathers, reduces = bw.Communicator.pair(timeout_s=30)
        with gathers, reduces:
            left = on_comm(reduces, name, setting)
        assert script.fake_nccl_open_groups() == 0
        return left


@contextmanager
def on_device(setting: Setting) -> Iterator[str | None]:
    with posing(delays=setting.world) if "cuda" in setting.backend else nullcontext():
        yield "cuda" if "cuda" in setting.backend else None


def ranks_of(name: str, setting: Setting, rank_pool: Callable[[int], Any]) -> list[Left]:
    world = setting.world
    if setting.backend in ("shm", "c10d"):
        return rank_pool(world).run(ON_PROCESSES[setting.backend], on_comm, name, setting, timeout_s=60)
    if setting.backend == "nccl":
        return rank_pool(world).run(over_nccl, name, setting, timeout_s=60)
    if setting.backend == "replicas over gloo":
        return rank_pool(world).run(on_torchs_rows, name, setting, timeout_s=60)
    with on_device(setting) as device:
        if setting.backend == "one on cuda":
            return [played(name, setting, 0, 1, {})]
        if setting.backend.startswith("replicas"):
            return with_replicas(SHARDS[world], world // SHARDS[world], on_rows, name, setting, device=device)
        return run_local(world, on_comm, name, setting, device=device)


def expect_conformance(name: str, setting: Setting, rank_pool: Callable[[int], Any]) -> None:
    """What every rank leaves is what one process leaves."""
    one, expected = SCRIPTS[name], expected_of(name, setting.precision)
    ranks = ranks_of(name, setting, rank_pool)
    row = SHARDS[setting.world] if "replicas" in setting.backend else setting.world
    for first in range(0, len(ranks), row):
        states = joined_states([saved for _, saved, *_ in ranks[first : first + row]], expected.params)
        for rank, (params, _, seen, clips) in enumerate(ranks[first : first + row], first):
            assert clips <= one.clips, "say so in the script's decorator"
            if not one.alone or (clips and setting.world == 3):
                assert_as_torch(Outcome(params, states, seen, clips), expected)
                assert_bitwise_equal(seen, ranks[0][2], f"what rank {rank} saw")
                continue
            assert_bitwise_equal(params, expected.params, f"parameters of rank {rank}")
            assert_bitwise_equal(states, expected.states, f"states of rank {rank}")
            assert_bitwise_equal(seen, expected.seen, f"what rank {rank} saw")


def expect_torchs(one: Script) -> None:
    """One process leaves what torch does, interrupted or not."""
    precision = one.precisions[0]
    mine = expected_of(one.name, precision)
    if one.torch and precision == "fp32":
        assert_as_torch(mine, outcome_of_torch(one), atol=1e-6)
    if one.torch and "fp64" in one.precisions:  # throughout, norm and clip coefficient included: far below float32
        exact = outcome_of(one, bw.ShardedAdamW, F64, **one.options)
        assert_as_torch(exact, outcome_of_torch(one, F64), rtol=1e-12, atol=1e-14)
    values, saved, seen, _ = played(one.name, Setting("local", 1, precision, one.distributions[0]), 0, 1, {})
    assert_bitwise_equal(values, mine.params)
    assert_bitwise_equal([saved["state"].get(i, {}) for i in range(len(values))], mine.states)
    assert_bitwise_equal(seen, mine.seen)
