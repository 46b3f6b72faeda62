"""Sharded: flat parameters, gradient buckets and state shards of one rank, put together (ZeRO-2).

Every bucket goes the same way: gradients are packed, reduce-scattered into the gradient shard (with the norm of what
arrives), stepped by the fused kernel on this rank's rows, and all-gathered straight into the parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.replicas import reducer_of
from bucketwheel.device import CPU, index_of, torch_device
from bucketwheel.gathers import gathers
from bucketwheel.grads.answers import GradSync
from bucketwheel.grads.graph_capture import expect_unedited, is_capturing
from bucketwheel.grads.reduced import ReducedGrads
from bucketwheel.grads.reduced_cuda import ReducedGradsCuda
from bucketwheel.grads.unfrozen import Newcomers
from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.kernels.adam_rows_cuda import AdamRowsCuda
from bucketwheel.layout.flat_params import ParamInfo, expect_dense
from bucketwheel.layout.precision import Precision
from bucketwheel.layout.shards import Space
from bucketwheel.native import env
from bucketwheel.optim import report
from bucketwheel.optim.owners import give_back, take
from bucketwheel.optim.param_groups import group_texts
from bucketwheel.optim.step_buckets import cut_buckets, lease_slots
from bucketwheel.pool.pool import Pool

__all__ = ["ShardedEngine", "ShardedOptions"]

_UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class ShardedOptions:
    gradient_average: bool
    broadcast_params: bool
    precision: Precision
    overlap_grad_sync: bool
    overlap_param_sync: bool
    max_inflight_buckets: int
    static_graph: bool
    capturable: bool
    on_external_update: str


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
        bucket_cap_bytes: int,
        replicate: Communicator | None = None,
    ) -> None:
        self.comm = comm
        self._comms = [comm] if replicate is None else [comm, replicate]
        self.grid = reducer_of(comm, replicate)
        self.world = comm.size
        self.infos = list(infos)
        self.options = options
        self.precision = options.precision
        self._bucket_cap_bytes = bucket_cap_bytes
        self._is_debugging = env.flag("BW_DEBUG")
        self._newcomers = Newcomers(_weakly(self))
        self.device = comm.device
        self.steps = torch.zeros(0, dtype=torch.int64, device=torch_device(comm.device))
        self._state_pool = Pool(device=torch_device(comm.device))
        self._spaces: list[Space] = []
        self._gathers = gathers.Gathers(comm, overlaps=options.overlap_param_sync)
        take(self._comms, self.infos, self)
        try:
            gathers.expect_equal_layout(self.grid, self.infos, groups, self._options_text())
            expect_dense(self.infos)
            self._take_in(self.infos)
            self._assemble()
        except BaseException:  # whose traceback keeps this object alive
            self.grid.release()
            give_back(self._comms, self.infos)
            raise

    # --- construction ------------------------------------------------------------------------------------------------

    def watch(self, frozen: Sequence[Tensor]) -> None:
        """Parameters that may be trained later: `add`."""
        self._newcomers.watch(frozen)

    def _options_text(self) -> str:
        return f"{self.options}, bucket_cap_bytes={self._bucket_cap_bytes}, BW_DEBUG={int(self._is_debugging)}"

    def _take_in(self, infos: Sequence[ParamInfo]) -> None:
        """Moves parameters into flat memory, with states that are new."""
        dtypes = dict.fromkeys(info.dtype for info in infos)
        spaces = [self._make_space([info for info in infos if info.dtype == dtype]) for dtype in dtypes]
        gathers.expect_equal_packings(self.grid, [space.packing for space in spaces])
        if self.options.broadcast_params:
            for space in spaces:
                gathers.broadcast_flat(self.grid, space.flat.flat)
            torch.autograd.graph.increment_version([info.param for info in infos])  # D14
        for space in spaces:
            space.read_master(space.indices)
        self._spaces += spaces
        self.steps = torch.cat([self.steps, self.steps.new_zeros(len(infos))])

    def _assemble(self) -> None:
        """Makes what works on the flat memory: rows, buckets, hooks and gathers, of all parameters that there are."""
        replicate = self.grid.replicate
        average = 1.0 / self.grid.size if self.options.gradient_average else 1.0
        amsgrad = self.options.precision.amsgrad
        self._rows: AdamRows | AdamRowsCuda
        self.reduced: ReducedGrads
        if self.device == CPU:
            self._rows = AdamRows(self.steps, amsgrad=amsgrad)
        else:
            self._rows = AdamRowsCuda(self.steps, self.device, amsgrad=amsgrad)
        cut = cut_buckets(self._spaces, self.comm.rank, self.device, self._rows)
        self._buckets = cut.buckets
        if cut.row_sums is None:
            self.reduced = ReducedGrads(self.comm, average, replicate)
        else:
            self.reduced = ReducedGradsCuda(self.comm, average, len(self.infos), cut.row_sums, replicate)
        self.states: list[dict[str, Tensor]] = []
        for info in self.infos:
            space = self._space_of(info.index)
            self.reduced.add_param(info, space.packing, space.packed_at(info.index), cut.pieces[info.index])
            self.states.append(space.state_of(info.index))
        slots = None
        if self.comm.is_registered:
            slots = lease_slots(self.comm, self._spaces, self._buckets, self.options.max_inflight_buckets)
        kinds = ((bucket.own.numel(), bucket.grads.dtype) for bucket in self._buckets)
        self.grid.prepare_sums(kinds, self.options.max_inflight_buckets)
        self.grads = GradSync(
            self.grid,
            self.infos,
            [bucket.grads for bucket in self._buckets],
            self.reduced,
            slots=slots,
            overlap=self.options.overlap_grad_sync,
            max_inflight=self.options.max_inflight_buckets,
            is_static=self.options.static_graph,
            is_capturable=self.options.capturable,
        )
        self._gathers.bind(self.infos, [list(bucket.grads.parts) for bucket in self._buckets])
        self._versions = [info.param._version for info in self.infos]
        report.warn_of_padding(self._spaces)

    def add(self, infos: Sequence[ParamInfo], groups: Sequence[str], why: str) -> None:
        """More parameters, whose indices go on where the others end. Gradients, states and factors stay. Collective.

        RuntimeError on all ranks, and nothing has changed, if they are not the same there.
        """
        self.grads.captures.expect_none(why)
        self.grads.expect_outside_no_sync(why)
        self.grads.close(why)
        self.param_sync()
        gathers.expect_equal_layout(self.grid, infos, groups, self._options_text())
        expect_dense(infos)
        take([], infos, self)
        self._newcomers.give_back([info.param for info in infos])
        held, reduced, versions = self.grads.held, self.reduced, self._versions
        self.grads.remove()
        self.infos += infos
        self._take_in(infos)
        self._assemble()
        self._versions[: len(versions)] = versions
        self.reduced.carry_over(reduced)
        self.grads.carry_over(held)

    def _make_space(self, infos: Sequence[ParamInfo]) -> Space:
        return Space(
            infos,
            rank=self.comm.rank,
            world=self.world,
            precision=self.options.precision,
            bucket_cap_bytes=self._bucket_cap_bytes,
            param_pool=self.comm.gathers.pool,
            state_pool=self._state_pool,
        )

    def _space_of(self, index: int) -> Space:
        return next(space for space in self._spaces if index in space)

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.param_sync()
        try:
            moved = self._find_moved()
            is_comparing = self._is_debugging and not is_capturing(self.device)  # which reads what is on the device
            groups = group_texts(param_groups) if is_comparing else None
        except (RuntimeError, TypeError) as error:
            self.grads.refuse(str(error))
        self.grads.close("step")
        if groups is not None:
            gathers.expect_equal_layout(self.grid, self.infos, groups, self._options_text())
        self._follow_edits(moved)
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

    def _edited(self) -> set[int]:
        """Parameters that were written to since our last write."""
        return {
            index
            for index, (info, ours) in enumerate(zip(self.infos, self._versions, strict=True))
            if info.param._version != ours
        }

    def _find_moved(self) -> list[list[int]]:
        """Parameters of each space whose memory was replaced. RuntimeError if one cannot come back: D13."""
        moved = [space.flat.moved() for space in self._spaces]
        for space, ours in zip(self._spaces, moved, strict=True):
            if ours:
                space.flat.expect_bindable(ours)
        return moved

    def _follow_edits(self, moved: Sequence[Sequence[int]]) -> None:
        """Binds ``moved`` parameters again; reads masters again where a parameter was written to since our last write.

        Or RuntimeError on all ranks where that is asked for, and nothing is read.
        """
        ignores = self.options.on_external_update == "ignore"  # but what follows a loaded state is no edit
        edited = {i for i in self._edited() if not ignores or self._versions[i] == _UNKNOWN_VERSION}
        if is_capturing(self.device):
            expect_unedited(self.infos, self._spaces, edited, self.grid.exchange)
        if self.options.on_external_update == "error":
            known = (index for index in edited if self._versions[index] != _UNKNOWN_VERSION)
            self._expect_no_edit(min([*known, *itertools.chain(*moved)], default=-1))
        for space, ours in zip(self._spaces, moved, strict=True):
            if ours:
                space.flat.rebind(ours)
                edited |= set() if ignores else set(ours)
        for space in self._spaces if edited else ():
            space.read_master(edited)

    def _expect_no_edit(self, edited: int) -> None:
        """RuntimeError on all ranks if ``edited`` is the index of a parameter on one of them. Collective."""
        everyone = [int(other) for other in self.grid.exchange(str(edited).encode())]
        for rank, index in enumerate(everyone):
            if index >= 0:
                raise RuntimeError(
                    f"parameter {self.infos[index].name!r} was modified on rank {rank} since the optimizer's last step "
                    "(on_external_update='error'); call optimizer.reload_master_params() on all ranks if that was meant"
                )

    def reload_masters(self) -> None:
        everything = set(range(len(self.infos)))
        self.param_sync()
        for space, ours in zip(self._spaces, self._find_moved(), strict=True):
            space.flat.rebind(ours)
            space.read_master(everything, whole=True)
        self._versions = [info.param._version for info in self.infos]

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
        self.reduced.settle()

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

    def _parts(self) -> report.ShardedParts:
        grads = [bucket.grads for bucket in self._buckets]
        return report.ShardedParts(
            self.comm,
            self.grid,
            self.options,
            self.infos,
            self._spaces,
            grads,
            self.grads,
            self.reduced,
            self.steps,
            self._bucket_cap_bytes,
        )

    def memory(self) -> dict[str, int]:
        return report.memory_of(self._parts())

    def describe(self) -> str:
        return report.describe(self._parts())

    def abort(self, reason: str) -> None:
        self.grid.abort(reason)

    def close(self) -> None:
        try:
            self.grads.close("close")
            self.param_sync()
        finally:  # a communicator that has failed must not keep the parameters
            self.grads.remove()
            self._newcomers.remove()
            self._gathers.detach()
            for space in self._spaces:
                space.flat.release()
            self.grid.release()
            give_back(self._comms, self.infos)


def _weakly(engine: ShardedEngine) -> Callable[[str], NoReturn]:
    """`GradSync.refuse` of the engine, which this does not keep alive."""
    ref = weakref.ref(engine)

    def refuse(text: str) -> NoReturn:
        alive = ref()
        if alive is not None:
            alive.grads.refuse(text)
        raise RuntimeError(text)

    return refuse
