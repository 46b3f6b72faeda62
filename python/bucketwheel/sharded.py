"""Sharded: flat parameters, gradient buckets and state shards of one rank, put together (ZeRO-2).

Every bucket goes the same way: gradients are packed, reduce-scattered into the fp32 gradient shard (with the norm of
what arrives), stepped by the fused kernel on this rank's rows, and all-gathered straight into the parameters.
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

from . import gather
from ._build import native
from .bucket import GradBucket, Part
from .bucket_slots import BucketSlots
from .comm import Communicator
from .device import CPU, torch_device
from .flat import FlatParams, ParamInfo, expect_dense
from .hooks import GradSync
from .plan import Segment, plan_buckets
from .pool import Pool
from .reduced import ReducedGrads, ShardPiece
from .reduced_cuda import ReducedGradsCuda
from .rows import AdamRows
from .rows_cuda import AdamRowsCuda

__all__ = ["ShardedEngine", "ShardedOptions"]

_UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class ShardedOptions:
    gradient_average: bool
    broadcast_params: bool
    reduce_dtype: torch.dtype | None
    bucket_cap_bytes: int
    overlap_grad_sync: bool
    overlap_param_sync: bool
    max_inflight_buckets: int


_engine_of_comm: weakref.WeakKeyDictionary[Communicator, weakref.ref[ShardedEngine]] = weakref.WeakKeyDictionary()
_engine_of_param: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _is_taken(by: weakref.ref[ShardedEngine] | None) -> bool:
    return by is not None and by() is not None


def _take(comm: Communicator, infos: Sequence[ParamInfo], engine: ShardedEngine) -> None:
    """ValueError if a live optimizer has the communicator or a parameter.

    Nothing would order the collectives of two optimizers, and each would move the parameters to its own memory.
    """
    if _is_taken(_engine_of_comm.get(comm)):
        raise ValueError(
            f"communicator {comm.name!r} belongs to another optimizer; give each its own, or close() that one"
        )
    for info in infos:
        if _is_taken(_engine_of_param.get(info.param)):
            raise ValueError(f"parameter {info.name!r} is trained by another ShardedAdamW; close() that one first")
    _engine_of_comm[comm] = weakref.ref(engine)
    for info in infos:
        _engine_of_param[info.param] = weakref.ref(engine)


def _give_back(comm: Communicator, infos: Sequence[ParamInfo]) -> None:
    _engine_of_comm.pop(comm, None)
    for info in infos:
        _engine_of_param.pop(info.param, None)


@dataclass
class _Space:
    """The parameters of one dtype: flat memory, and this rank's shards beside it (each [shard_numel], fp32)."""

    flat: FlatParams
    wire_dtype: torch.dtype
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    first_param: list[int]  # global index of every packed parameter


class ShardedEngine:
    """One rank's share of the optimizer. Every method that communicates is called by all ranks in the same order."""

    def __init__(
        self, comm: Communicator, infos: Sequence[ParamInfo], groups: Sequence[str], options: ShardedOptions
    ) -> None:
        self.comm = comm
        self.world = comm.size
        self.infos = list(infos)
        self.options = options
        self.device = comm.device
        self.steps = torch.zeros(len(self.infos), dtype=torch.int64, device=torch_device(comm.device))
        self.states: list[dict[str, Tensor]] = []
        _take(comm, self.infos, self)
        gather.expect_equal_layout(comm, self.infos, groups, options)
        expect_dense(self.infos)
        self._state_pool = Pool(device=torch_device(comm.device))
        self._spaces = [self._make_space(dtype) for dtype in dict.fromkeys(info.dtype for info in self.infos)]
        gather.expect_equal_packings(comm, [space.flat.packing for space in self._spaces])
        if options.broadcast_params:
            for space in self._spaces:
                gather.broadcast_flat(comm, space.flat.flat)
            torch.autograd.graph.increment_version([info.param for info in self.infos])  # D14
        for space in self._spaces:
            if space.master is not None:
                self._read_master(space, space.first_param)
        average = 1.0 / comm.size if options.gradient_average else 1.0
        self._rows: AdamRows | AdamRowsCuda
        if self.device == CPU:
            self._rows = AdamRows(self.steps)
            self.reduced = ReducedGrads(comm, average)
        else:
            self._rows = AdamRowsCuda(self.steps, self.device)
            self.reduced = ReducedGradsCuda(comm, average, len(self.infos), self._span_count())
        self._span_begin = 0  # of the next accumulator, in ReducedGradsCuda.row_sums
        self._buckets: list[_StepBucket] = []
        self._make_buckets()
        slots = self._make_slots() if comm.is_registered else None
        self.grads = GradSync(
            comm,
            self.infos,
            [bucket.grads for bucket in self._buckets],
            self.reduced,
            slots=slots,
            overlap=options.overlap_grad_sync,
            max_inflight=options.max_inflight_buckets,
        )
        parts = [list(bucket.grads.parts) for bucket in self._buckets]
        self._gathers = gather.Gathers(comm, self.infos, parts, overlaps=options.overlap_param_sync)
        self._versions = [info.param._version for info in self.infos]

    # --- construction ------------------------------------------------------------------------------------------------

    def _make_space(self, dtype: torch.dtype) -> _Space:
        infos = [info for info in self.infos if info.dtype == dtype]
        wire = self.options.reduce_dtype or dtype
        flat = FlatParams(
            infos,
            world=self.world,
            bucket_numel=max(1, self.options.bucket_cap_bytes // wire.itemsize),
            pool=self.comm.gathers.pool,
        )
        numel = flat.packing.shard_numel

        def shard(name: str) -> Tensor:
            return self._state_pool.acquire(f"{name}/{dtype}", numel * 4).tensor(torch.float32, (numel,)).zero_()

        master = None if dtype == torch.float32 else shard("master_param")
        return _Space(
            flat,
            wire,
            shard("grad"),
            shard("exp_avg"),
            shard("exp_avg_sq"),
            master,
            [info.index for info in flat.infos],
        )

    def _make_buckets(self) -> None:
        """Buckets of all spaces, in the order in which they would fill if gradients arrived from the last parameter on."""
        packings = [space.flat.packing for space in self._spaces]
        plans = plan_buckets(packings, [space.first_param for space in self._spaces], self.comm.rank)
        pieces: dict[int, list[ShardPiece]] = {info.index: [] for info in self.infos}
        for number, plan in enumerate(plans):
            space, bucket, segments = self._spaces[plan.space], plan.bucket, plan.segments
            params = space.first_param
            parts = [Part(params[f.param], f.bucket_begin, f.param_begin, f.numel) for f in plan.fragments]
            shard = space.grad.narrow(0, bucket.shard_begin, bucket.shard_numel)
            ranges = [(s.shard_begin - bucket.shard_begin, s.numel) for s in segments]
            accumulator, places = self._accumulate_into(shard, [(begin, begin + numel) for begin, numel in ranges])
            first_row = self._add_rows(space, segments)
            for place, s in zip(places, segments, strict=True):
                piece = space.grad.narrow(0, s.shard_begin, s.numel)
                pieces[space.first_param[s.param]].append(ShardPiece(piece, accumulator, place))
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
            per_bucket = Counter(s.bucket for s in space.flat.packing.segments(self.comm.rank))
            for bucket in space.flat.packing.buckets:
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

    def _add_rows(self, space: _Space, segments: Sequence[Segment]) -> int:
        first = self._rows.table.rows
        for s in segments:
            index = space.first_param[s.param]
            self._rows.add(
                index,
                self.infos[index].group,
                space.flat.flat.narrow(0, s.flat_begin, s.numel),
                space.grad.narrow(0, s.shard_begin, s.numel),
                space.exp_avg.narrow(0, s.shard_begin, s.numel),
                space.exp_avg_sq.narrow(0, s.shard_begin, s.numel),
                None if space.master is None else space.master.narrow(0, s.shard_begin, s.numel),
                param_begin=s.param_begin,
            )
        return int(first)

    def _add_params(self, pieces: dict[int, list[ShardPiece]]) -> None:
        packed_at = {index: (space, packed) for space in self._spaces for packed, index in enumerate(space.first_param)}
        for info in self.infos:
            space, packed = packed_at[info.index]
            packing = space.flat.packing
            self.reduced.add_param(info, packing, packed, pieces[info.index])
            segments = packing.owned(packed, self.comm.rank)
            begin = segments[0].shard_begin if segments else 0
            numel = sum(s.numel for s in segments)  # contiguous in shard space
            state = {
                "exp_avg": space.exp_avg.narrow(0, begin, numel),
                "exp_avg_sq": space.exp_avg_sq.narrow(0, begin, numel),
            }
            if space.master is not None:
                state["master_param"] = space.master.narrow(0, begin, numel)
            self.states.append(state)

    def _read_master(self, space: _Space, indices: Sequence[int]) -> None:
        """Takes this rank's part of the parameters ``indices`` into the fp32 master shard.

        A master that rounds to the parameter as it is stays: it knows more digits of the same value.
        """
        assert space.master is not None
        for packed, index in enumerate(space.first_param):
            for s in space.flat.packing.owned(packed, self.comm.rank) if index in indices else ():
                own = space.flat.flat.narrow(0, s.flat_begin, s.numel)
                master = space.master.narrow(0, s.shard_begin, s.numel)
                master.copy_(torch.where(master.to(own.dtype) == own, master, own.to(master.dtype)))

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
            if space.master is not None:
                edited = [
                    i for i in space.first_param if i in moved or self.infos[i].param._version != self._versions[i]
                ]
                self._read_master(space, edited)

    def follow_loaded_state(self) -> None:
        """The model may be loaded after the optimizer, so masters are compared with the parameters at the next step."""
        self._versions = [_UNKNOWN_VERSION] * len(self.infos)

    def param_sync(self) -> None:
        self._gathers.wait_all()

    def prefetch_params(self, model: torch.nn.Module) -> Callable[[], None]:
        return self._gathers.attach(model)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def close_window(self) -> None:
        self.grads.close("grad_sync")

    def total_norm(self, indices: Sequence[int] | None, ord: float) -> Tensor:
        self.grads.close("norm")
        return self.reduced.total_norm_tensor(self._held(indices), ord)

    def clip(self, indices: Sequence[int] | None, max_norm: float, ord: float) -> Tensor:
        self.grads.close("norm")
        return self.reduced.clip(self._held(indices), max_norm, ord)

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
        for space in self._spaces:
            if index in space.first_param:
                segments = space.flat.packing.owned(space.first_param.index(index), self.comm.rank)
                return [(s.param_begin, s.param_begin + s.numel) for s in segments]
        return []

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: parameters, gradient shards, states, and what the communication pool has reserved beside them."""
        params = sum(space.flat.lease.nbytes for space in self._spaces)
        states = sum(
            t.numel() * 4
            for space in self._spaces
            for t in (space.exp_avg, space.exp_avg_sq, space.master)
            if t is not None
        )
        # Two of one pair have one pool, unless each registers its own.
        pools = {pool._native: pool for pool in (self.grads.pool, self.comm.pool, self.comm.gathers.pool)}.values()
        return {
            "params": params,
            "grads": sum(space.grad.numel() * 4 for space in self._spaces),
            "states": states,
            "pool": sum(pool.stats().reserved_bytes for pool in pools) - params,
        }

    def describe(self) -> list[str]:
        lines = []
        for bucket in self._buckets:
            names = [self.infos[i].name for i in bucket.grads.parts]
            size = bucket.grads.numel * bucket.grads.dtype.itemsize / 2**20
            lines.append(
                f"bucket {bucket.grads.index}: {size:.2f} MiB {bucket.grads.dtype}, {len(names)} parameters: {names}"
            )
        return lines

    def close(self) -> None:
        try:
            self.grads.close("close")
            self.param_sync()
        finally:  # a communicator that has failed must not keep the parameters
            self.grads.remove()
            self._gathers.detach()
            for space in self._spaces:
                space.flat.release()
            _give_back(self.comm, self.infos)


@dataclass(frozen=True)
class _StepBucket:
    grads: GradBucket
    full: Tensor  # the bucket's parameters
    own: Tensor  # this rank's part of them
    first_row: int
    last_row: int
