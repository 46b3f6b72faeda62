"""Restore: which copies of shards a new optimizer takes, and how they come to the ranks that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bucketwheel.checkpoint.live import ShardedOptimizer, exchange
from bucketwheel.checkpoint.neighbours import Neighbours
from bucketwheel.checkpoint.replay import ShardCopy, ShardLayout


class Offer(NamedTuple):
    """A copy that a rank has. ``run``: of which snapshots; ``layout``: the digest of its `ShardLayout`, which says
    whose shard it is; ``base``, ``step``, ``newest``: as of `ShardCopy`."""

    run: str
    layout: str
    base: int
    step: int
    newest: int


_Sources = tuple[int, list[tuple[int, int]]]  # the step; of each shard: the rank, and the number of its offer


def find_sources(layouts: Sequence[str], offers: Sequence[Sequence[Offer]]) -> _Sources:
    """The newest step of which there are copies of all shards, and who has them. ``layouts``: of the new optimizer's
    shards, by rank; ``offers``: by rank. ValueError that says what is missing. The same on all ranks."""
    found = [(rank, number, offer) for rank, some in enumerate(offers) for number, offer in enumerate(some)]
    found_all, refused = [], []
    for run in sorted({offer.run for _, _, offer in found}):
        try:
            found_all.append(_sources_of_run(layouts, [place for place in found if place[2].run == run]))
        except ValueError as error:
            refused.append(str(error))
    if not found_all:
        why = "; ".join(refused) or "no rank has a snapshot"
        raise ValueError(f"the snapshots cannot be restored: {why}. Load a checkpoint instead")
    return max(found_all)


def _sources_of_run(layouts: Sequence[str], found: Sequence[tuple[int, int, Offer]]) -> _Sources:
    alike = [[f for f in found if f[2].layout == layout and f[2].step >= 0] for layout in layouts]
    missing = [owner for owner, some in enumerate(alike) if not some]
    if missing:
        raise ValueError(
            f"no rank has a copy of the shards of ranks {missing} with this optimizer's world size, parameters, "
            "options and buckets"
        )
    step = min(max(f[2].newest for f in some) for some in alike)
    able = [[f for f in some if f[2].step <= step <= f[2].newest] for some in alike]
    # A rank's own copy first: it need not be sent.
    chosen = [next((f for f in some if f[0] == owner), some[0]) for owner, some in enumerate(able) if some]
    bases = {offer.base for _, _, offer in chosen}
    if not all(able) or (len(bases) > 1 and max(bases) >= step):
        raise ValueError(f"at step {step} some copies of shards lack a change made outside of step()")
    return step, [(rank, number) for rank, number, _ in chosen]


def restore_from(optimizer: ShardedOptimizer, copies: Sequence[tuple[str, ShardCopy]]) -> int:
    """Carries out `find_sources` and returns its step. ``copies``: of this rank, each with its run. Collective."""
    engine = optimizer._engine
    rank, world = engine.ranks
    memory = engine.shard_memory()
    layout = ShardLayout.of(memory, len(optimizer.param_groups), rank, world)
    mine = [Offer(run, copy.layout.digest, copy.base, copy.step, copy.newest) for run, copy in copies]
    said = exchange(engine, [layout.digest, mine])
    step, holders = find_sources([one[0] for one in said], [[Offer(*offer) for offer in one[1]] for one in said])
    link = Neighbours(engine)
    for owner, (holder, number) in enumerate(holders):
        if holder == rank:
            copies[number][1].advance(step)
            link.send(copies[number][1].shard, owner)
    shard = torch.empty(layout.mirror.nbytes, dtype=torch.uint8, device="cpu")
    link.receive(shard, holders[rank][0])
    link.finish()
    link.release()
    engine.announce_write()
    with torch.no_grad():
        for piece, place in layout.pairs(memory, shard):
            piece.copy_(place)
    engine.share_params()
    return step
