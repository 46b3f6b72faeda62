"""Restore: which copies of shards a new optimizer goes on from, and how they come to the ranks that need them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bucketwheel.checkpoint.neighbours import Neighbours
from bucketwheel.checkpoint.replay import ShardCopy, ShardLayout, write_shard

__all__ = ["Offer", "Plan", "plan_restore", "restore_from"]


class Offer(NamedTuple):
    """A copy that a rank has. ``run``: which snapshots it is of; ``base``: the step since which it has followed by replay;
    it may be had at any step from ``step`` to ``newest``. ``layout``: a digest."""

    run: str
    owner: int
    world: int
    layout: str
    base: int
    step: int
    newest: int


class Plan(NamedTuple):
    step: int
    holders: list[tuple[int, int]]  # of each shard: the rank, and the number of its offer


def plan_restore(layouts: Sequence[str], offers: Sequence[Sequence[Offer]]) -> Plan:
    """The newest step that all shards are to be had at, and from whom. ``layouts``: of the new optimizer's shards, by rank;
    ``offers``: by rank. ValueError that says what is missing. The same on all ranks."""
    found = [(rank, number, offer) for rank, some in enumerate(offers) for number, offer in enumerate(some)]
    plans, refused = [], ["no rank has a snapshot"] if not found else []
    for run in sorted({offer.run for _, _, offer in found}):
        of_run = [place for place in found if place[2].run == run]
        try:
            plans.append(_plan_of_run(layouts, of_run))
        except ValueError as error:
            refused.append(str(error))
    if not plans:
        raise ValueError(f"the snapshots cannot be restored: {'; '.join(refused)}. Load a checkpoint instead")
    return max(plans)


def _plan_of_run(layouts: Sequence[str], found: Sequence[tuple[int, int, Offer]]) -> Plan:
    worlds = {offer.world for _, _, offer in found}
    if worlds != {len(layouts)}:
        raise ValueError(f"they are of a world of {sorted(worlds)} ranks, this one has {len(layouts)}")
    by_owner = [[f for f in found if f[2].owner == owner and f[2].step >= 0] for owner in range(len(layouts))]
    missing = [owner for owner, some in enumerate(by_owner) if not some]
    if missing:
        raise ValueError(f"nobody has the shards of ranks {missing}")
    for owner, some in enumerate(by_owner):
        by_owner[owner] = [f for f in some if f[2].layout == layouts[owner]]
        if not by_owner[owner]:
            raise ValueError(f"the shard of rank {owner} is of other parameters, options or buckets than the optimizer")
    step = min(max(f[2].newest for f in some) for some in by_owner)
    able = [[f for f in some if f[2].step <= step <= f[2].newest] for some in by_owner]
    behind = [owner for owner, some in enumerate(able) if not some]
    if behind:
        raise ValueError(
            f"the shards of ranks {behind} are not to be had at step {step}, which is the newest of another one"
        )
    # A rank's own copy first: it travels nowhere.
    chosen = [next((f for f in some if f[0] == owner), some[0]) for owner, some in enumerate(able)]
    bases = {offer.base for _, _, offer in chosen}
    if len(bases) > 1 and max(bases) >= step:
        raise ValueError(f"a change from outside at step {step} has not reached the copies of all shards")
    return Plan(step, [(rank, number) for rank, number, _ in chosen])


def digest(layout: ShardLayout) -> str:
    return hashlib.sha256(layout.text.encode()).hexdigest()[:16]


def restore_from(optimizer: Any, copies: Sequence[tuple[str, ShardCopy]], timeout_s: float) -> int:
    """Makes ``optimizer`` and its parameters those of the newest step that all shards are to be had at, which is returned.
    ``copies``: what this rank has, each with its run. Collective."""
    engine = optimizer._engine
    reducer = getattr(engine, "reducer", None)
    rank, world = (0, 1) if reducer is None else (reducer.rank, reducer.size)
    memory = engine.shard_memory()
    layout = ShardLayout.of(memory, len(optimizer.param_groups), rank, world)
    mine = [Offer(run, c.layout.rank, c.layout.world, digest(c.layout), c.base, c.step, c.newest) for run, c in copies]
    said = json.dumps([digest(layout), mine]).encode()
    everyone = [json.loads(other) for other in ([said] if reducer is None else reducer.exchange(said))]
    plan = plan_restore([one[0] for one in everyone], [[Offer(*offer) for offer in one[1]] for one in everyone])
    shard = torch.empty(layout.mirror.nbytes, dtype=torch.uint8, device="cpu")
    neighbours = None
    if any(holder != owner for owner, (holder, _) in enumerate(plan.holders)):
        neighbours = Neighbours(reducer, timeout_s)
    for owner, (holder, number) in enumerate(plan.holders):
        if holder == rank:
            copies[number][1].advance(plan.step)
            found = copies[number][1].shard_bytes()
            shard = found if owner == rank else shard
            if owner != rank and neighbours is not None:
                neighbours.send(found, owner)
        elif owner == rank and neighbours is not None:
            neighbours.receive(shard, holder)
    if neighbours is not None:
        neighbours.release()
    engine.announce_write()
    write_shard(memory, layout.mirror.tensors(shard))
    engine.share_params()
    return plan.step
