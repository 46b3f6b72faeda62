"""Sharded: flat parameters, gradient buckets and state shards of one rank, put together (ZeRO-2).

Every bucket goes the same way: gradients are packed, reduce-scattered into the gradient shard (with the norm of what
arrives), stepped by the fused kernel on this rank's rows, and all-gathered straight into the parameters.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import gather, inspection
from ._build import native
from .bucket import GradBucket, Part
from .bucket_slots import BucketSlots
from .comm import Communicator
from .device import CPU, index_of, torch_device
from .flat import ParamInfo, expect_dense
from .grid import Grid, grid_of
from .hooks import GradSync
from .plan import plan_buckets
from .pool import Pool
from .precision import Precision
from .reduced import ReducedGrads, ShardPiece
from .reduced_cuda import ReducedGradsCuda
from .rows import AdamRows
from .rows_cuda import AdamRowsCuda
from .space import Space

__all__ = ["ShardedEngine", "ShardedOptions"]

_UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class ShardedOptions:
    gradient_average: bool
    broadcast_params: bool
    precision: Precision
    bucket_cap_bytes: int
    overlap_grad_sync: bool
    overlap_param_sync: bool
    max_inflight_buckets: int
    static_graph: bool


_engine_of_comm: weakref.WeakKeyDictionary[Communicator, weakref.ref[ShardedEngine]] = weakref.WeakKeyDictionary()
_engine_of_param: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _is_taken(by: weakref.ref[ShardedEngine] | None) -> bool:
    return by is not None and by() is not None


def _take(comms: Sequence[Communicator], infos: Sequence[ParamInfo], engine: ShardedEngine) -> None:
    """ValueError if a live optimizer has one of the communicators or a parameter.

    Nothing would order the collectives of two optimizers, and each would move the parameters to its own memory.
    """
    for comm in comms:
        if _is_taken(_engine_of_comm.get(comm)):
            raise ValueError(
                f"communicator {comm.name!r} belongs to another optimizer; give each its own, or close() that one"
            )
    for info in infos:
        if _is_taken(_engine_of_param.get(info.param)):
            raise ValueError(f"parameter {info.name!r} is trained by another ShardedAdamW; close() that one first")
    for comm in comms:
        _engine_of_comm[comm] = weakref.ref(engine)
    for info in infos:
        _engine_of_param[info.param] = weakref.ref(engine)


def _give_back(comms: Sequence[Communicator], infos: Sequence[ParamInfo]) -> None:
    for comm in comms:
        _engine_of_comm.pop(comm, None)
    for info in infos:
        _engine_of_param.pop(info.param, None)


class ShardedEngine:
    """One rank's share of the optimizer. Every method that communicates is called by all ranks in the same order.

    States are sharded over ``comm``; with ``replicate`` so many times over: the ranks of both are those of ``grid``.
    """

    def __init__(
        self,
        comm: Communicator,
        infos: Sequence[ParamInfo],
        groups: Sequence[str],
        options: ShardedOptions,
        replicate: Communicator | None = None,
    ) -> None:
        self.comm = comm
        self._comms = [comm] if replicate is None else [comm, replicate]
        self.grid = comm if replicate is None else grid_of(comm, replicate)
        self.world = comm.size
        self.infos = list(infos)
        self.options = options
        self.device = comm.device
        self.steps = torch.zeros(len(self.infos), dtype=torch.int64, device=torch_device(comm.device))
        self.states: list[dict[str, Tensor]] = []
        _take(self._comms, self.infos, self)
        gather.expect_equal_layout(self.grid, self.infos, groups, options)
        expect_dense(self.infos)
        self._state_pool = Pool(device=torch_device(comm.device))
        self._spaces = [self._make_space(dtype) for dtype in dict.fromkeys(info.dtype for info in self.infos)]
        gather.expect_equal_packings(self.grid, [space.packing for space in self._spaces])
        if options.broadcast_params:
            for space in self._spaces:
                gather.broadcast_flat(self.grid, space.flat.flat)
            torch.autograd.graph.increment_version([info.param for info in self.infos])  # D14
        for space in self._spaces:
            if space.has_master:
                space.read_master(space.indices)
        average = 1.0 / self.grid.size if options.gradient_average else 1.0
        self._rows: AdamRows | AdamRowsCuda
        if self.device == CPU:
            self._rows = AdamRows(self.steps, amsgrad=options.precision.amsgrad)
            self.reduced = ReducedGrads(comm, average, replicate)
        else:
            self._rows = AdamRowsCuda(self.steps, self.device, amsgrad=options.precision.amsgrad)
            self.reduced = ReducedGradsCuda(comm, average, len(self.infos), self._span_count(), replicate)
        self._span_begin = 0  # of the next accumulator, in ReducedGradsCuda.row_sums
        self._buckets: list[_StepBucket] = []
        self._make_buckets()
        slots = self._make_slots() if comm.is_registered else None
        if isinstance(self.grid, Grid):
            self.grid.prepare(
                ((bucket.own.numel(), bucket.grads.dtype) for bucket in self._buckets), options.max_inflight_buckets
            )
        self.grads = GradSync(
            self.grid,
            self.infos,
            [bucket.grads for bucket in self._buckets],
            self.reduced,
            slots=slots,
            overlap=options.overlap_grad_sync,
            max_inflight=options.max_inflight_buckets,
            is_static=options.static_graph,
        )
        parts = [list(bucket.grads.parts) for bucket in self._buckets]
        self._gathers = gather.Gathers(comm, self.infos, parts, overlaps=options.overlap_param_sync)
        self._versions = [info.param._version for info in self.infos]
        inspection.warn_of_padding(self._spaces)

    # --- construction ------------------------------------------------------------------------------------------------

    def _make_space(self, dtype: torch.dtype) -> Space:
        return Space(
            [info for info in self.infos if info.dtype == dtype],
            rank=self.comm.rank,
            world=self.world,
            precision=self.options.precision,
            bucket_cap_bytes=self.options.bucket_cap_bytes,
            param_pool=self.comm.gathers.pool,
            state_pool=self._state_pool,
        )

    def _make_buckets(self) -> None:
        """Buckets of all spaces, in the order in which they would fill if gradients arrived from the last parameter on."""
        packings = [space.packing for space in self._spaces]
        plans = plan_buckets(packings, [space.indices for space in self._spaces], self.comm.rank)
        pieces: dict[int, list[ShardPiece]] = {info.index: [] for info in self.infos}
        for number, plan in enumerate(plans):
            space, bucket, segments = self._spaces[plan.space], plan.bucket, plan.segments
            params = space.indices
            parts = [Part(params[f.param], f.bucket_begin, f.param_begin, f.numel) for f in plan.fragments]
            shard = space.grad.narrow(0, bucket.shard_begin, bucket.shard_numel)
            ranges = [(s.shard_begin - bucket.shard_begin, s.numel) for s in segments]
            accumulator, places = self._accumulate_into(shard, [(begin, begin + numel) for begin, numel in ranges])
            first_row = int(self._rows.table.rows)
            for s in segments:
                space.add_row(self._rows, s)
            for place, s in zip(places, segments, strict=True):
                piece = space.grad.narrow(0, s.shard_begin, s.numel)
                pieces[space.indices[s.param]].append(ShardPiece(piece, accumulator, place))
            numel = self.world * bucket.shard_numel
            full = space.flat.flat.narrow(0, bucket.begin, numel)
            grads = GradBucket(number, numel, space.wire_dtype, parts, accumulator)
            own = full.narrow(0, self.comm.rank * bucket.shard_numel, bucket.shard_numel)
            self._buckets.append(_StepBucket(grads, full, own, first_row, first_row + len(segments)))
        self._add_params(pieces)

    def _make_slots(self) -> BucketSlots:
        """Leases what gradients are reduced from, and registers it and the parameters' memory."""
        sizes_bytes = [bucket.grads.nbytes for bucket in self._buckets]
        slots = BucketSlots(self.comm.pool, sizes_bytes, self.options.max_inflight_buckets)
        gather.expect_equal_places(self.comm, [*(space.flat.lease.place for space in self._spaces), *slots.places])
        self.comm.register_pool()
        if self.comm.gathers is not self.comm:
            self.comm.gathers.register_pool()
        return slots

    def _span_count(self) -> int:
        """How many sums of squares all accumulators together write, at most."""
        count = 0
        for space in self._spaces:
            per_bucket = Counter(s.bucket for s in space.packing.segments(self.comm.rank))
            for bucket in space.packing.buckets:
                count += native().ShardAccumulatorCuda.max_spans(per_bucket[bucket.index])
        return count

    def _accumulate_into(self, shard: Tensor, ranges: Sequence[tuple[int, int]]) -> tuple[Any, list[int]]:
        """The native accumulator of one bucket's shard, and the place of each range's sum of squares: `ShardPiece.row`."""
        if not isinstance(self.reduced, ReducedGradsCuda):
            return native().ShardAccumulator(shard, ranges), list(range(len(ranges)))
        begin = self._span_begin
        count = native().ShardAccumulatorCuda.max_spans(len(ranges))
        self._span_begin += count
        accumulator = native().ShardAccumulatorCuda(shard, ranges, self.reduced.row_sums.narrow(0, begin, count))
        return accumulator, [begin + accumulator.span_of(i) for i in range(len(ranges))]

    def _space_of(self, index: int) -> Space:
        return next(space for space in self._spaces if index in space)

    def _add_params(self, pieces: dict[int, list[ShardPiece]]) -> None:
        for info in self.infos:
            space = self._space_of(info.index)
            self.reduced.add_param(info, space.packing, space.packed_at(info.index), pieces[info.index])
            self.states.append(space.state_of(info.index))

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.grads.close("step")
        self.param_sync()
        self._follow_edits()
        used = self.grads.held
        order = self._gathers.order()  # what the next forward needs first goes first
        try:
            with torch.no_grad():
                self._rows.begin_step(param_groups, used, self.reduced.pending_factors(), self.reduced.average)  # type: ignore[arg-type]
                for bucket in (self._buckets[number] for number in order):
                    if any(used[index] for index in bucket.grads.parts):
                        self._rows.step(bucket.first_row, bucket.last_row)
                        self._gathers.start(bucket.grads.index, bucket.full, bucket.own)
            torch.autograd.graph.increment_version([info.param for info in self.infos if used[info.index]])  # D14
            self._versions = [info.param._version for info in self.infos]
        finally:  # what has been started must be waited for, whatever happened then
            self._gathers.leave_running()

    def _follow_edits(self) -> None:
        """Binds moved parameters again (D13); reads masters again where a parameter was written to since our last write."""
        moved = {index for space in self._spaces for index in space.flat.rebind_moved()}
        for space in self._spaces:
            if space.has_master:
                edited = {i for i in space.indices if self.infos[i].param._version != self._versions[i]}
                space.read_master(moved | edited)

    def follow_loaded_state(self) -> None:
        """The model may be loaded after the optimizer, so masters are compared with the parameters at the next step."""
        self._versions = [_UNKNOWN_VERSION] * len(self.infos)

    def param_sync(self, indices: Sequence[int] | None = None) -> None:
        if indices is None:
            self._gathers.wait_all()
        else:
            self._gathers.wait_for(set(indices))

    def prefetch_params(self, model: torch.nn.Module) -> Callable[[], None]:
        return self._gathers.attach(model)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def close_window(self) -> None:
        self.grads.close("grad_sync")

    def start_window(self, indices: Sequence[int]) -> None:
        self.grads.start(indices)

    def total_norm(self, indices: Sequence[int] | None, ord: float) -> Tensor:
        self.grads.close("norm")
        return self.reduced.total_norm_tensor(self._held(indices), ord)

    def clip(self, indices: Sequence[int] | None, max_norm: float, ord: float) -> Tensor:
        self.grads.close("norm")
        return self.reduced.clip(self._held(indices), max_norm, ord)

    def clip_with(self, indices: Sequence[int] | None, coefficient: Tensor) -> None:
        self.grads.close("clip_grads_with_norm_")
        is_on_device = self.device != CPU and index_of(coefficient) == self.device
        self.reduced.scale(self._held(indices), coefficient if is_on_device else float(coefficient))

    def _held(self, indices: Sequence[int] | None) -> list[int]:
        """Those of ``indices`` (None: of all parameters) that have a gradient on some rank."""
        chosen = range(len(self.infos)) if indices is None else indices
        return [i for i in chosen if self.grads.held[i]]

    def no_sync(self) -> AbstractContextManager[None]:
        return self.grads.no_sync()

    def zero_grad(self, set_to_none: bool) -> None:
        if set_to_none:
            self.grads.zero_grad()
        else:
            for info in self.infos:
                if info.param.grad is not None:
                    info.param.grad.zero_()

    def full_grad(self, index: int) -> Tensor | None:
        return self.grads.full(index)

    # --- inspection --------------------------------------------------------------------------------------------------

    def owned_ranges(self, index: int) -> list[tuple[int, int]]:
        """This rank's part of a parameter: [begin, end) in its memory order, ascending."""
        return [(s.param_begin, s.param_begin + s.numel) for s in self._space_of(index).owned(index)]

    def values_of(self, index: int) -> Tensor:
        """The elements of `owned_ranges`, as the states of the parameter hold theirs; perhaps its own memory."""
        return self._space_of(index).values_of(index)

    def _parts(self) -> inspection.ShardedParts:
        grads = [bucket.grads for bucket in self._buckets]
        return inspection.ShardedParts(
            self.comm, self.grid, self.options, self.infos, self._spaces, grads, self.grads, self.reduced, self.steps
        )

    def memory(self) -> dict[str, int]:
        return inspection.memory_of(self._parts())

    def describe(self) -> str:
        return inspection.describe(self._parts())

    def close(self) -> None:
        try:
            self.grads.close("close")
            self.param_sync()
        finally:  # a communicator that has failed must not keep the parameters
            self.grads.remove()
            self._gathers.detach()
            for space in self._spaces:
                space.flat.release()
            if isinstance(self.grid, Grid):
                self.grid.release()
            _give_back(self._comms, self.infos)


@dataclass(frozen=True)
class _StepBucket:
    grads: GradBucket
    full: Tensor  # the bucket's parameters
    own: Tensor  # this rank's part of them
    first_row: int
    last_row: int
