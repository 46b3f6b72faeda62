"""Sharded models over several backends and with replicas (HSDP); models of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.support.optim_twins import run_local
from tests.support.replica_ranks import torch_groups, with_replicas
from tests.support.shard_models import Block, Gpt, cases, lm_loss
from tests.support.shard_twins import expect_twins, steps, whole_params

MODELS = ["gpt", "gpt2", "bert", "t5", "mamba", "moe"]


@pytest.mark.parametrize("name", MODELS)
def test_schedules_give_the_bits_of_whole_parameters(name: str) -> None:
    case = cases()[name]
    for world in (2, 3, 4):
        for prefetch, reshard in (
            ((1, True), (0, False)) if world != 2 else [(p, r) for p in (0, 1, 2, 8) for r in (True, False)]
        ):
            counts = expect_twins(case.make, case.units, steps(case.loss, 3), world, prefetch=prefetch, reshard=reshard)
            assert counts["divergences"] == 0 and counts["wasted"] == 0


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_with_the_same_data_train_as_one_process_does(name: str, world: int) -> None:
    """Sums of equal gradients over 2 and 4 ranks are exact, and so is their mean."""
    case = cases()[name]
    twin = case.make()
    opt = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2, fused=True)
    losses = []
    for step in range(3):
        loss = case.loss(twin, step)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())

    models = [case.make() for _ in range(world)]

    def body(comm: Communicator) -> None:
        model: Any = bw.shard(models[comm.rank], case.units, group=comm)
        with bw.ShardedAdamW(model.parameters(), lr=1e-2) as ours:
            assert steps(case.loss, 3)(model, ours, 0) == losses
            for p, q in zip(whole_params(model), twin.parameters(), strict=True):
                assert torch.equal(p, q)

    run_local(world, body)


def _train(model: Any, opt: Any, rank: int) -> list[Any]:
    """Three micro-batches a step, clipped."""
    seen = []
    for step in range(3):
        for micro in range(3):
            loss = lm_loss(model, 10 * step + micro + 100 * rank)
            loss.backward()
            opt.grad_sync()
        seen += [loss.item(), float(opt.clip_grad_norm_(0.3))]
        opt.step()
        opt.zero_grad()
    return seen


@pytest.mark.parametrize(("shards", "replicas"), [(2, 2), (1, 2), (3, 2), (2, 1)])
def test_replicas_and_three_micro_batches(shards: int, replicas: int) -> None:
    made = Gpt()

    def body(rank: int, shard: Communicator, replicate: Communicator, models: list[Any], is_sharded: bool) -> Any:
        model, groups = models[rank], {"process_group": shard, "replicate_group": replicate}
        if is_sharded:
            bw.shard(model, (Block,), group=shard, replicate=replicate)
            groups = {}
        with bw.ShardedAdamW(model.parameters(), lr=1e-2, **groups) as opt:  # type: ignore[arg-type]
            return _train(model, opt, rank), whole_params(model)

    found = [
        with_replicas(shards, replicas, body, [copy.deepcopy(made) for _ in range(shards * replicas)], is_sharded)
        for is_sharded in (True, False)
    ]
    for (seen, params), (seen_whole, params_whole) in zip(*found, strict=True):
        assert seen == seen_whole
        assert all(torch.equal(a, b) for a, b in zip(params, params_whole, strict=True))


def _on_processes(rank: int, world: int, shards: int) -> list[Tensor]:
    torch.manual_seed(rank)  # all take rank 0's values
    groups = torch_groups(rank, world, shards) if shards else {}
    model = bw.shard(
        Gpt(), (Block,), group=groups.get("process_group"), replicate=groups.get("replicate_group"), prefetch=2
    )
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    _train(model, opt, rank)
    params = whole_params(model)
    opt.close()
    return params


@pytest.mark.parametrize(("world", "shards"), [(2, 0), (3, 0), (4, 2)])
def test_processes(rank_pool: Any, world: int, shards: int) -> None:
    found = rank_pool(world).run(_on_processes, shards)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_peaks_are_those_of_the_report() -> None:
    """In units of the largest unit B, the root apart: one at prefetch 0, two at 1. At most (in flight + 1) buckets beside."""

    def body(comm: Communicator, prefetch: int) -> tuple[int, int, int]:
        model = bw.shard(Gpt(blocks=8), (Block,), group=comm, prefetch=prefetch)
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2, max_inflight_buckets=2)
        steps(lm_loss, 2)(model, opt, comm.rank)
        planned = model.residency_counts()["planned"]
        largest = max(b.grads.nbytes for b in opt._engine._assembly.buckets)
        steps(lm_loss, 3)(model, opt, comm.rank)
        counts, report = model.residency_counts(), model.plan_report()
        assert (
            counts["live"] == 0
            and f"plan {planned:,} bytes" in report
            and counts["planned"] == counts["load"] == planned
        )
        assert opt.memory_summary()["buckets_peak"] <= 3 * (largest + 512)
        runtime_sizes = model.__dict__["_bucketwheel_runtime"].sizes
        return planned, runtime_sizes[0], max(runtime_sizes[1:])

    for prefetch, most in ((0, 1), (1, 2), (2, 5)):
        planned, root, largest = run_local(2, body, prefetch)[0]
        assert planned <= root + most * largest, prefetch
