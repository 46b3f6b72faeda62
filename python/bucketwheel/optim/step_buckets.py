"""Step bucket: a bucket with all that a step of the optimizer needs of it: gradients, parameters, and the kernel's rows.

The buckets of all spaces are cut at once, since they have one order for all dtypes. Nothing here communicates but
`lease_slots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.device import CPU, torch_device
from bucketwheel.grads.bucket import GradBucket, Part
from bucketwheel.grads.reduced import ShardPiece
from bucketwheel.grads.window_plan import plan_window
from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.layout.packing import RankBucket, rank_buckets
from bucketwheel.layout.shards import Space
from bucketwheel.native import core
from bucketwheel.optim.rank_checks import expect_equal_places
from bucketwheel.pool.plan import expect_equal_plans
from bucketwheel.pool.slots import Slots

__all__ = ["Cut", "StepBucket", "cut_buckets", "lease_slots"]


@dataclass(frozen=True)
class StepBucket:
    grads: GradBucket
    full: Tensor  # the bucket's parameters
    own: Tensor  # this rank's part of them
    first_row: int
    last_row: int
    by_rows: bool  # `packing.Bucket.by_rows`


@dataclass(frozen=True)
class Cut:
    """The buckets in the order in which they fill if gradients come from the last parameter to the first."""

    buckets: list[StepBucket]
    pieces: dict[int, list[ShardPiece]]  # of each parameter, by its index, what this rank owns
    row_sums: Tensor | None  # CUDA: where the accumulators write sums of squares, as `ReducedGrads` has them


def cut_buckets(spaces: Sequence[Space], rank: int, device: int, rows: AdamRows) -> Cut:
    """The buckets of all ``spaces`` (none: no buckets). Adds the segments of ``rank`` to ``rows``, bucket by bucket."""
    plans = rank_buckets([space.packing for space in spaces], [space.indices for space in spaces], rank)
    accumulators = _Accumulators(plans, device)
    cut = Cut([], {index: [] for space in spaces for index in space.indices}, accumulators.row_sums)
    for number, plan in enumerate(plans):
        space, bucket, segments = spaces[plan.space], plan.bucket, plan.segments
        params = space.indices
        parts = [Part(params[f.param], f.bucket_begin, f.param_begin, f.numel) for f in plan.parts]
        shard = space.grad.narrow(0, bucket.shard_begin, bucket.shard_numel)
        ranges = [(s.shard_begin - bucket.shard_begin, s.shard_begin - bucket.shard_begin + s.numel) for s in segments]
        accumulator, places = accumulators.make(shard, ranges)
        first_row = int(rows.table.rows)
        for place, s in zip(places, segments, strict=True):
            piece, group = space.grad.narrow(0, s.shard_begin, s.numel), space.flat.infos[s.param].group
            rows.add(params[s.param], group, space.own(s), piece, space.states_in(s), param_begin=s.param_begin)
            cut.pieces[params[s.param]].append(ShardPiece(piece, accumulator, place))
        numel = space.packing.world * bucket.shard_numel
        grads = GradBucket(number, numel, space.wire_dtype, parts, accumulator)
        full = space.flat.flat.narrow(0, bucket.begin, numel)
        own = full.narrow(0, rank * bucket.shard_numel, bucket.shard_numel)
        cut.buckets.append(StepBucket(grads, full, own, first_row, first_row + len(segments), bucket.by_rows))
    return cut


class _Accumulators:
    """Makes the native accumulators of the shards of all ``plans``, and has the memory of their sums of squares on CUDA."""

    def __init__(self, plans: Sequence[RankBucket], device: int) -> None:
        self._begin = 0  # of the next one's spans in row_sums
        self.row_sums: Tensor | None = None
        if device != CPU:
            spans = sum(core.ShardAccumulatorCuda.max_spans(len(plan.segments)) for plan in plans)
            self.row_sums = torch.zeros(spans, dtype=torch.float64, device=torch_device(device))

    def make(self, shard: Tensor, ranges: Sequence[tuple[int, int]]) -> tuple[Any, list[int]]:
        """The accumulator of one bucket's shard, and the place of each range's sum of squares: `ShardPiece.row`."""
        if self.row_sums is None:
            return core.ShardAccumulator(shard, ranges), list(range(len(ranges)))
        begin = self._begin
        count = core.ShardAccumulatorCuda.max_spans(len(ranges))
        self._begin += count
        accumulator = core.ShardAccumulatorCuda(shard, ranges, self.row_sums.narrow(0, begin, count))
        return accumulator, [begin + accumulator.span_of(i) for i in range(len(ranges))]


def lease_slots(
    comm: Communicator, spaces: Sequence[Space], buckets: Sequence[StepBucket], *, limit: int, overlap: bool
) -> Slots:
    """Leases what gradients are reduced from. Registers it and the parameters' memory where that is to be. Collective."""
    grads = [bucket.grads for bucket in buckets]
    plan = plan_window([one.nbytes for one in grads], [one.parts for one in grads], limit=limit, overlap=overlap)
    slots = Slots.leased(plan, comm.pool)
    if comm.is_registered:
        expect_equal_plans([plan], comm)
        assert slots.lease is not None
        flat = {f"flat memory {i}": space.flat.lease.place for i, space in enumerate(spaces)}
        expect_equal_places(comm, {**flat, "the buckets": slots.lease.place})
        comm.register_pool()
        if comm.gathers is not comm:
            comm.gathers.register_pool()
    return slots
