"""Sharded engine: flat parameters, gradient buckets and state shards of one rank, put together (ZeRO-2).

Every bucket goes the same way: gradients are packed, reduce-scattered into the gradient shard (with the norm of what
arrives), stepped by the fused kernel on this rank's rows, and all-gathered straight into the parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from bucketwheel.comm.collectives import join
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.group_comms import close_all
from bucketwheel.comm.replicas import reducer_of
from bucketwheel.device import torch_device
from bucketwheel.errors import CaptureError
from bucketwheel.grads.reduced import ReducedGrads
from bucketwheel.grads.unfrozen import UnfrozenGrads
from bucketwheel.grads.window import GradWindow
from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.layout.flat_params import FlatParams, ParamInfo, expect_dense
from bucketwheel.layout.leased_params import LeasedParams, ShardedBy, arrivals_of, home_of, plain_params
from bucketwheel.layout.owners import claim, expect_free, named, owner_of, release
from bucketwheel.layout.shard_memory import ShardMemory, StepInputs
from bucketwheel.layout.shard_store import ShardStore
from bucketwheel.native import core, env
from bucketwheel.optim import report
from bucketwheel.optim.external_edits import Edits, ExternalEdits
from bucketwheel.optim.param_groups import OptimizerOptions, group_texts
from bucketwheel.optim.rank_checks import compare_values, expect_equal_layout
from bucketwheel.optim.shown_state import StateEdits
from bucketwheel.optim.step_buckets import StepBucket, cut_buckets, register_memory
from bucketwheel.optim.take_over import take_over
from bucketwheel.optim.trained_params import Hyperparameters
from bucketwheel.pool.pool import Pool
from bucketwheel.residency.gathers import Gathers


def engine_of(param: Tensor) -> ShardedEngine | None:
    """The live engine that trains it, over several ranks."""
    owner = owner_of(param)
    return owner if isinstance(owner, ShardedEngine) else None


@dataclass(frozen=True)
class Assembly:
    """What works on the flat memory, of all parameters that there are. Made anew when parameters are added."""

    rows: AdamRows
    buckets: list[StepBucket]
    steps: core.StepBuckets
    reduced: ReducedGrads
    grads: GradWindow
    states: list[dict[str, Tensor]]  # of each parameter, this rank's part


class ShardedEngine:
    """One rank's share of the optimizer. Every method that communicates is called by all ranks in the same order.

    States are sharded over ``comm``; with ``replicate`` so many times over. ``reducer`` is all ranks of both. ``frozen``:
    parameters, to warn of. ``owned``: communicators that end with this.
    """

    def __init__(
        self,
        comm: Communicator,
        infos: Sequence[ParamInfo],
        groups: Sequence[str],
        options: OptimizerOptions,
        replicate: Communicator | None = None,
        frozen: Sequence[tuple[str, Tensor]] = (),
        owned: Sequence[Communicator] = (),
    ) -> None:
        self.comm = comm
        self.owned = owned
        self.closed = ""  # why calls are refused; from `close`
        given = [comm] if replicate is None else [comm, replicate]
        self._comms = [(each, f"communicator {each.name!r}") for each in given]
        self.reducer = reducer_of(comm, replicate)
        self._natives = self.reducer._natives
        self.world = comm.size
        self.infos: list[ParamInfo] = []  # changes, as `spaces`, `steps` and `_edits` do, with the groups
        self.options = options
        self.precision = options.precision
        self.bucket_cap_bytes = options.bucket_cap_bytes(comm.device, sum(info.param.nbytes for info in infos))
        self._is_debugging = env.flag("BW_DEBUG")
        self._unfrozen = UnfrozenGrads(weakref.WeakMethod(self.refuse))
        self.device = comm.device
        self.steps = torch.zeros(0, dtype=torch.int64, device=torch_device(comm.device))
        self._state_pool = Pool(device=torch_device(comm.device))
        self.spaces: list[ShardStore] = []
        self._edits = ExternalEdits(options.on_external_update)
        self.follows_params = self._edits.resync
        self._hyperparameters = Hyperparameters()
        self._gathers = Gathers(comm, overlaps=options.overlap_param_sync)
        # Called in each step on what the kernel is about to get, before it runs: gradients do not change until they return.
        # What they return is called when the step has written, before users' hooks, which may write to parameters.
        self.step_observers: list[Callable[[StepInputs], Callable[[], None] | None]] = []
        # Called before the optimizer writes to states, masters or its part of parameters: of these indices; None: of any.
        self.write_observers: list[Callable[[Collection[int] | None], None]] = []
        expect_free(self._comms, {owner_of(info.param) for info in infos})
        try:
            expect_equal_layout(self.reducer, infos, groups, self._options_text())
            compare_values(self.reducer, plain_params(infos), [(n, p) for n, p in frozen if home_of(p) is None])
            expect_dense(plain_params(infos))
            take_over(infos, self.reducer)
            claim([*self._comms, *named(infos)], self)
            self._take_in(infos)
            self._assembly = self._assemble()
        except BaseException:  # whose traceback keeps this object alive
            self.reducer._release()
            release([*self._comms, *named(infos)], self)
            raise

    @property
    def grads(self) -> GradWindow:
        return self._assembly.grads

    @property
    def reduced(self) -> ReducedGrads:
        return self._assembly.reduced

    @property
    def states(self) -> list[dict[str, Tensor]]:
        return self._assembly.states

    # --- construction ------------------------------------------------------------------------------------------------

    def watch(self, frozen: Sequence[Tensor]) -> None:
        """Parameters that may be trained later: `change` takes them in."""
        self._unfrozen.watch(frozen)

    def _options_text(self) -> str:
        return f"{self.options}, bucket_cap_bytes={self.bucket_cap_bytes}, BW_DEBUG={int(self._is_debugging)}"

    def _take_in(self, infos: Sequence[ParamInfo]) -> None:
        """Moves parameters into flat memory, with states that are new."""
        flats = self._flatten(plain_params(infos))
        leased = dict.fromkeys(home for info in infos if (home := home_of(info.param)) is not None)
        by_param: dict[Tensor, ParamInfo] = {info.param: info for info in infos}
        for home in leased:
            home.renumber(by_param)
            if home.sharded_by is not None:
                home.sharded_by.engines.add(self)
        if self.options.broadcast_params:
            for flat in flats:
                self.reducer.broadcast(flat.flat).wait()
            torch.autograd.graph.increment_version([info.param for info in plain_params(infos)])
        wholes: list[FlatParams | LeasedParams] = [*flats, *leased]
        spaces = [self._make_store(whole) for whole in wholes]
        for space in spaces:
            space.read_masters()
        self.infos += infos
        self.spaces += spaces
        self._edits.add(infos)
        self.steps = torch.cat([self.steps, self.steps.new_zeros(len(infos))])

    def _flatten(self, infos: Sequence[ParamInfo]) -> list[FlatParams]:
        """Moves parameters into flat memory, by dtype."""
        found = []
        for dtype in dict.fromkeys(info.dtype for info in infos):
            bucket_numel = max(1, self.bucket_cap_bytes // self.precision.wire_of(dtype).itemsize)
            of_dtype = [info for info in infos if info.dtype == dtype]
            pool = self.comm.gathers.pool
            found.append(FlatParams(of_dtype, world=self.world, bucket_numel=bucket_numel, pool=pool))
        return found

    def _make_store(self, whole: FlatParams | LeasedParams) -> ShardStore:
        return ShardStore(whole, rank=self.comm.rank, precision=self.precision, state_pool=self._state_pool)

    @property
    def _flats(self) -> list[FlatParams]:
        return [space.whole for space in self.spaces if isinstance(space.whole, FlatParams)]

    @property
    def _sharded_by(self) -> list[ShardedBy]:
        """The sharded models of the parameters."""
        wholes = (space.whole for space in self.spaces)
        return list(dict.fromkeys(w.sharded_by for w in wholes if isinstance(w, LeasedParams) and w.sharded_by))

    def _space_of(self, index: int) -> ShardStore:
        return next(space for space in self.spaces if index in space.owned)

    def _new_rows(self) -> AdamRows:
        return AdamRows(self.steps, self.device, amsgrad=self.precision.amsgrad, resync=self._edits.resync)

    def _assemble(self) -> Assembly:
        """Rows, buckets, hooks and gathers, of all parameters that there are."""
        options = self.options
        rows = self._new_rows()
        arrivals = arrivals_of(self.infos)
        cut = cut_buckets(self.spaces, self.comm, rows, arrivals)
        reduced = ReducedGrads(
            self.comm,
            1.0 / self.reducer.size if options.gradient_average else 1.0,
            len(self.infos),
            row_sums=cut.row_sums,
            replicate=self.reducer._replicate,
        )
        states = []
        for info in self.infos:
            space = self._space_of(info.index)
            reduced.add_param(info, space.packing, space.packed_at[info.index], cut.pieces[info.index])
            states.append(space.state_of(info.index))
        grads = GradWindow(
            self.reducer,
            self.infos,
            [bucket.grads for bucket in cut.buckets],
            reduced,
            overlap=options.overlap_grad_sync,
            max_inflight=options.max_inflight_buckets,
            is_static=options.static_graph,
            is_capturable=options.capturable,
            arrivals=arrivals,
        )
        grads.before_close = [by.before_close for by in self._sharded_by]
        register_memory(self.comm, self.spaces, grads)
        self._gathers.bind(self.infos, [bucket.grads.params for bucket in cut.buckets])
        return Assembly(rows, cut.buckets, cut.steps, reduced, grads, states)

    def expect_changeable(self, new: Sequence[ParamInfo], why: str) -> None:
        """RuntimeError or ValueError where `change` cannot be done. Local."""
        self.grads.captures.expect_none(why)
        self.grads.expect_outside_no_sync(why)
        expect_dense(plain_params(new))
        expect_free(named(new))
        for info in new:
            if any(space.whole is home_of(info.param) for space in self.spaces):
                raise ValueError(
                    f"parameter {info.name!r} is sharded with parameters that this optimizer trains already; close() "
                    "it and make a new optimizer for all of them"
                )

    def change(self, kept: Sequence[ParamInfo], new: Sequence[ParamInfo], groups: Sequence[str], why: str) -> None:
        """Trains these from now on: ``kept`` of those so far, and ``new``. Gradients, states and factors of the first stay.
        Collective.

        RuntimeError on all ranks, and nothing has changed, if they are not the same there.
        """
        old = self._assembly
        self.announce_write()  # indices are others afterwards
        old.grads.close(why, is_the_last=True)
        self.param_sync()
        expect_equal_layout(self.reducer, [*kept, *new], groups, self._options_text())
        compare_values(self.reducer, plain_params(new), ())
        claim(named(new), self)
        self._unfrozen.release([info.param for info in new])
        old.grads.remove()
        indices = self._keep(kept)
        if not self.comm.is_registered:  # what is registered stays
            self.comm.pool.trim()  # buckets of other sizes come
        self._take_in(new)
        self._assembly = self._assemble()
        self.reduced.carry_over(old.reduced, indices)
        self.grads.carry_over(bytes(old.grads.held[i] for i in indices), old.grads.is_used)

    def _keep(self, kept: Sequence[ParamInfo]) -> list[int]:
        """Lets all others go. Returns the indices that these had."""
        before = {info.param: info.index for info in self.infos}
        now: dict[Tensor, ParamInfo] = {info.param: info for info in kept}
        indices = [before[info.param] for info in kept]
        release(named([info for info in self.infos if info.param not in now]), self)
        for space in self.spaces:
            space.renumber(now)
            if not space.owned:
                space.whole.release()
        self.spaces = [space for space in self.spaces if space.owned]
        self.infos = list(kept)
        self.steps = self.steps[torch.tensor(indices, dtype=torch.int64, device=self.steps.device)]
        self._edits.keep(indices)
        return indices

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, param_groups: Sequence[dict[str, Any]], of_state: StateEdits | None = None, said: str = "") -> None:
        """``of_state``: what others have done to ``optimizer.state``, which is followed if all ranks have ``said`` the same."""
        self.param_sync()
        grads, reduced = self.grads, self.reduced
        try:
            edits = self._find_edits()
            # Comparing reads what is on the device.
            is_comparing = self._is_debugging and not core.is_capturing(self.device)
            groups = group_texts(param_groups) if is_comparing else None
            facts = self._hyperparameters.facts(param_groups, said)
            if of_state and core.is_capturing(self.device):
                raise CaptureError(
                    "optimizer.state was edited, and replays would repeat the edit: call step() before the capture"
                )
        except (RuntimeError, TypeError, ValueError) as error:
            grads.refuse(str(error))
        grads.close("step", facts)
        if groups is not None:
            expect_equal_layout(self.reducer, self.infos, groups, self._options_text())
        self._end_residency()
        self._follow_edits(edits)
        if of_state:
            of_state.carry_out(self)
        used, rows = grads.held, self._assembly.rows
        order = self._gathers.order()  # what the next forward needs first goes first
        try:
            with torch.no_grad():
                factors = reduced.factors.vector()
                given = StepInputs(param_groups, used, factors, reduced.average)
                observed = [observe(given) for observe in self.step_observers]
                rows.begin_step(param_groups, used, factors, reduced.average)
                if self.write_observers:
                    self.announce_write([index for index, is_used in enumerate(used) if is_used])
                self._assembly.steps.run(rows.table.step, rows.begun, order, used, self._gathers.running)
            torch.autograd.graph.increment_version(list(itertools.compress(grads.params, used)))
            self._edits.note_written()
            grads.is_used = True
        finally:  # what has been started must be waited for, whatever happened then
            self._gathers.leave_running()
        for note_written in filter(None, observed):
            note_written()

    def _end_residency(self) -> None:
        """No sharded parameter is gathered any more. RuntimeError on all ranks where their gathers differed. Collective."""
        for by in self._sharded_by:
            by.after_check()
            by.before_write()

    def _find_edits(self) -> Edits:
        """RuntimeError if a parameter was moved that cannot come back. Where it would come back over what others hold, its
        space has other flat memory afterwards."""
        edits = self._edits.find()
        flats = self._flats if edits.moved else []
        leaving = [flat for flat in flats if flat.expect_bindable(edits.moved, is_registered=self.comm.is_registered)]
        if leaving and not core.is_capturing(self.device):
            self.grads.captures.expect_none("a new memory of parameters (p.data = ...)")
            self.param_sync()
            self.announce_write()
            for flat in leaving:
                flat.leave()
            self._edits.note_bound(but=edits.moved)
            cut = cut_buckets(self.spaces, self.comm, rows := self._new_rows(), arrivals_of(self.infos))
            old = self._assembly
            buckets = [replace(new, grads=one.grads) for new, one in zip(cut.buckets, old.buckets, strict=True)]
            self._assembly = replace(old, rows=rows, buckets=buckets, steps=cut.steps)
        return edits

    def _rebind(self, moved: Collection[int]) -> None:
        for flat in self._flats if moved else ():
            flat.rebind(moved)
        self._edits.note_bound()

    def _follow_edits(self, edits: Edits) -> None:
        """Binds parameters again that were moved, and reads masters again that were loaded where the kernel does not.

        Or RuntimeError on all ranks where that is asked for, and nothing is read.
        """
        if core.is_capturing(self.device):
            self._expect_settled(edits)
        if self.options.on_external_update == "error":
            rank, index = self._first_of_any_rank(edits.refused)
            if index >= 0:
                raise ExternalEdits.refusal(self.infos[index], rank)
        if edits.moved or edits.follows:
            self.announce_write()
        if edits.moved:
            self._rebind(edits.moved)
        for space in self.spaces if edits.follows else ():
            space.read_masters()

    def _expect_settled(self, edits: Edits) -> None:
        """CaptureError on all ranks where every replay would do again what the step has to do for ``edits`` on one of them.
        Collective."""
        rank, index = self._first_of_any_rank(0 if edits.follows else min(edits.moved, default=-1))
        if index >= 0:
            raise CaptureError(
                f"parameter {self.infos[index].name!r} on rank {rank} has new memory since the last step, or a state "
                "was loaded, and every replay would read the parameter again instead of its master weight: call "
                "optimizer.reload_master_params() on all ranks before the capture"
            )

    def _first_of_any_rank(self, index: int) -> tuple[int, int]:
        """The lowest rank that says an index, and that; the index is -1 if none does. Collective."""
        everyone = [int(other) for other in self.reducer.exchange(str(index).encode())]
        return next(((rank, said) for rank, said in enumerate(everyone) if said >= 0), (0, -1))

    def shard_memory(self) -> ShardMemory:
        """Of this rank. Another one after `change`, and where a step has found memory of parameters exchanged."""
        spaces = [space.memory() for space in self.spaces]
        written = [info.param for info in self.infos] + [self.steps]
        written += [tensor for space in self.spaces for tensor in (space.whole.written, *space.states.values())]
        return ShardMemory(spaces, self.infos, self.steps, written, self.precision.amsgrad, self._edits.resync)

    def share_params(self) -> None:
        """Gathers what every rank's part of the parameters is now, which others than a step have written. Collective."""
        self.param_sync()
        try:
            order, everything = range(len(self._assembly.buckets)), b"\1" * len(self.infos)
            self._assembly.steps.run(None, (), order, everything, self._gathers.running)
        finally:
            self._gathers.leave_running()
        self.param_sync()
        torch.autograd.graph.increment_version(list(self.grads.params))
        self._edits.note_written()

    def reload_masters(self) -> None:
        self.param_sync()
        edits = self._find_edits()
        self.announce_write()
        self._rebind(edits.moved)
        for space in self.spaces:
            space.read_masters(whole=True)
        self._edits.note_written()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def announce_write(self, indices: Collection[int] | None = None) -> None:
        for observe in tuple(self.write_observers):
            observe(indices)
        for by in self._sharded_by:
            by.before_write()

    def bind_moved(self) -> None:
        """Binds parameters again that were moved, so that the flat memory has their values. RuntimeError where
        ``on_external_update="error"`` refuses that."""
        edits = self._find_edits()
        if not edits.moved:
            return
        if self.options.on_external_update == "error":
            raise ExternalEdits.refusal(self.infos[min(edits.moved)])
        self.announce_write()
        self._rebind(edits.moved)

    def write_order(self) -> list[int]:
        """The parameters in the order in which a step writes to them, where forward does not ask for another."""
        parts = (bucket.grads.params for bucket in self._assembly.buckets)
        return list(dict.fromkeys(index for of_bucket in parts for index in of_bucket))

    @property
    def are_threads(self) -> bool:
        """Whether the ranks are threads of one process."""
        return self.comm.backend == "local"

    def exchange(self, said: bytes) -> list[bytes]:
        """What all ranks say, by rank. Collective."""
        return self.reducer.exchange(said)

    @property
    def timeout_s(self) -> float:
        return self.comm.timeout_s

    def expect_loaded_model(self) -> None:
        self._edits.expect_loaded_model()

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
        return self.reduced.total_norm(self._held(indices), ord)

    def clip(self, indices: Sequence[int] | None, max_norm: float, ord: float) -> Tensor:
        self.grads.close("norm")
        return self.reduced.clip(self._held(indices), max_norm, ord)

    def clip_with(self, indices: Sequence[int] | None, coefficient: Tensor) -> None:
        self.grads.close("clip_grads_with_norm_")
        self.reduced.factors.scale(self._held(indices), coefficient)
        self.reduced.settle()

    def _held(self, indices: Sequence[int] | None) -> list[int]:
        """Those of ``indices`` (None: of all parameters) that have a gradient on some rank."""
        held = self.grads.held
        return list(itertools.compress(range(len(held)), held)) if indices is None else [i for i in indices if held[i]]

    def first_pending(self) -> ParamInfo | None:
        """The first parameter whose gradient no step has used."""
        return self.grads.first_pending()

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
        return [(s.param_begin, s.param_begin + s.numel) for s in self._space_of(index).owned[index]]

    def values_of(self, index: int) -> Tensor:
        """The elements of `owned_ranges`, as the states of the parameter hold theirs; perhaps its own memory."""
        return self._space_of(index).values_of(index)

    def value_parts(self, index: int) -> list[Tensor]:
        """`values_of`, a view for each of `owned_ranges`."""
        return self._space_of(index).value_parts(index)

    def memory(self) -> dict[str, int]:
        return report.memory_of(self)

    def describe(self) -> str:
        return report.describe(self)

    def ranges_of(self, index: int) -> list[list[tuple[int, int]]]:
        """`owned_ranges` of every rank."""
        return self._space_of(index).ranges_of(index)

    def join(self, part: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        """The whole of what each rank has a ``part`` of. Collective."""
        return join(self.comm, part, ranges)

    @property
    def ranks(self) -> tuple[int, int]:
        """(rank, size): of all ranks, replicas too."""
        return self.reducer.rank, self.reducer.size

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Makes it on all `ranks` what it is on rank ``src``. Collective."""
        self.reducer.broadcast(tensor, src).wait()

    def broadcast_part(self, tensor: Tensor, owner: int) -> None:
        """Makes it, on the ranks among which states are sharded, what it is on their rank ``owner``. Their collective."""
        if self.world > 1:
            self.comm.broadcast(tensor, owner).wait()

    def refuse(self, text: str) -> NoReturn:
        """RuntimeError on all ranks. Collective for those that are not refused."""
        self.grads.refuse(text)

    @property
    def part(self) -> tuple[int, int]:
        """(rank, world): of the ranks among which states are sharded."""
        return self.comm.rank, self.world

    def expect_done_by_all(self, what: str, error: Exception | None) -> None:
        """Raises ``error``, on the other ranks ValueError with its text, if ``what`` has failed on any. Collective."""
        self.grads.expect_done_by_all(what, error)

    def abort(self, reason: str) -> None:
        self.reducer.abort(reason)

    def close(self, why: str, *, is_agreed: bool = True) -> None:
        """``why``: what later calls are told. Collective; or local, if not ``is_agreed``."""
        self.closed = why
        self.announce_write()
        try:
            if is_agreed:
                self.grads.discard()
            self.param_sync()
        finally:  # a communicator that has failed must not keep the parameters
            with ExitStack() as last:
                last.callback(close_all, self.owned, None if is_agreed else 0.0)
                self.grads.remove()
                self._unfrozen.release()
                self._gathers.detach()
                for space in self.spaces:
                    space.whole.release()
                self.reducer._release()
                release([*self._comms, *named(self.infos)], self)
