"""Step bucket: a bucket with all that a step of the optimizer needs of it: gradients, parameters, and the kernel's rows.

The buckets of all spaces are cut at once, since they have one order for all dtypes. Nothing here communicates but
`register_memory`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.equal_lines import expect_equal_lines
from bucketwheel.device import CPU, torch_device
from bucketwheel.grads.bucket import GradBucket, Part
from bucketwheel.grads.reduced import ShardPiece
from bucketwheel.grads.window import GradWindow
from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.layout.flat_params import FlatParams
from bucketwheel.layout.packing import rank_buckets
from bucketwheel.layout.shard_store import ShardStore
from bucketwheel.native import core
from bucketwheel.pool.plan import expect_equal_plans


@dataclass(frozen=True)
class StepBucket:
    grads: GradBucket
    by_rows: bool  # `packing.Bucket.by_rows`


@dataclass(frozen=True)
class Cut:
    """The buckets in the order in which they fill if gradients come from the last parameter to the first."""

    buckets: list[StepBucket]
    steps: core.StepBuckets  # their rows and gathers
    pieces: dict[int, list[ShardPiece]]  # of each parameter, by its index, what this rank owns
    row_sums: Tensor | None  # CUDA: where the accumulators write sums of squares, as `ReducedGrads` has them


def cut_buckets(
    spaces: Sequence[ShardStore], comm: Communicator, rows: AdamRows, arrivals: Sequence[int] | None = None
) -> Cut:
    """The buckets of all ``spaces`` (none: no buckets). ``arrivals``: as `rank_buckets` takes it. Adds the segments of this rank to ``rows``, bucket by bucket."""
    rank, device = comm.rank, comm.device
    plans = rank_buckets([space.packing for space in spaces], [space.indices for space in spaces], rank, arrivals)
    counts = [0 if device == CPU else core.ShardAccumulatorCuda.max_spans(len(plan.segments)) for plan in plans]
    row_sums = None if device == CPU else torch.zeros(sum(counts), dtype=torch.float64, device=torch_device(device))
    begins = list(itertools.accumulate(counts, initial=0))
    cut = Cut([], core.StepBuckets(), {index: [] for space in spaces for index in space.indices}, row_sums)
    for number, plan in enumerate(plans):
        space, bucket, segments = spaces[plan.space], plan.bucket, plan.segments
        params = space.indices
        parts = [Part(params[f.param], f.bucket_begin, f.param_begin, f.numel) for f in plan.parts]
        shard = space.grad.narrow(0, bucket.shard_begin, bucket.shard_numel)
        ranges = [(s.shard_begin - bucket.shard_begin, s.shard_begin - bucket.shard_begin + s.numel) for s in segments]
        accumulator: core.ShardAccumulator | core.ShardAccumulatorCuda
        if row_sums is None:
            accumulator, places = core.ShardAccumulator(shard, ranges), list(range(len(ranges)))
        else:
            sums = row_sums.narrow(0, begins[number], counts[number])
            accumulator = on_cuda = core.ShardAccumulatorCuda(shard, ranges, sums)
            places = [begins[number] + on_cuda.span_of(i) for i in range(len(ranges))]
        first_row = int(rows.table.rows)
        for place, s in zip(places, segments, strict=True):
            piece, group = space.grad.narrow(0, s.shard_begin, s.numel), space.whole.infos[s.param].group
            rows.add(params[s.param], group, space.whole.own(s), piece, space.states_in(s), param_begin=s.param_begin)
            cut.pieces[params[s.param]].append(ShardPiece(piece, accumulator, place))
        numel = space.packing.world * bucket.shard_numel
        grads = GradBucket(number, numel, space.wire_dtype, parts, accumulator, bucket.shard_numel)
        cut.buckets.append(StepBucket(grads, bucket.by_rows))
        gather = None
        if (full := space.whole.gathers(bucket.begin, numel)) is not None:
            own = full.narrow(0, rank * bucket.shard_numel, bucket.shard_numel)
            gather = core.make_request(comm.gathers._native, [full], [own])
        cut.steps.add(grads.params, first_row, first_row + len(segments), gather)
    return cut


def register_memory(comm: Communicator, spaces: Sequence[ShardStore], grads: GradWindow) -> None:
    """Registers the memory of buckets and of parameters where that is to be. Collective."""
    if not comm.is_registered:
        return
    expect_equal_plans([grads.plan], comm)
    wholes = [space.whole for space in spaces]
    places = {f"flat memory {i}": each.lease.place for i, each in enumerate(wholes) if isinstance(each, FlatParams)}
    # NCCL adds a rank's own offset to the begin of its peers' windows, so it would read something else.
    expect_equal_lines(
        comm,
        [f"{what} at {at}" for what, at in {**places, "the buckets": grads.place}.items()],
        ". Registered memory must be at the same places (slab, offset) on all: make the same acquires of the communicators' "
        "pools, in one order, before the optimizer is made, and close() the one before it",
    )
    comm.register_pool()
    if comm.gathers is not comm:
        comm.gathers.register_pool()
