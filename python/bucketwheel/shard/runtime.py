"""Runtime: what happens at the boundaries of units. Native code gathers, waits and lets go (csrc/bindings/residency_py.h); this
knows modules, regimes, and the plan of the memory.

Regime 0 is training: one step is a pass of its record. Others (1: without gradients) have a pass for each forward of the model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.group_comms import close_all
from bucketwheel.device import CPU, torch_device
from bucketwheel.errors import ShardedParamError
from bucketwheel.layout.leased_params import LeasedParams
from bucketwheel.native import core, env
from bucketwheel.pool.plan import Plan
from bucketwheel.residency.absent_param import AbsentParam, memoryless, sharded
from bucketwheel.residency.unit_hooks import HOLDER, SavedByName, hook_unit, nodes_of, tensors_in
from bucketwheel.shard.units import Unit

_ALIGN = 512  # bytes, of the parameters of each dtype in a unit's memory
TRAIN, EVAL = 0, 1
_NOTHING = contextlib.nullcontext()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class _EndOfBackward:
    """Called at the end of a backward, or dropped where it fails."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        self._is_due = True

    def __call__(self) -> None:
        runtime = self._runtime()
        if self._is_due and runtime is not None:
            self._is_due = False
            runtime.end_backward()

    __del__ = __call__


class Runtime:
    """``homes``: by unit, the parameters by dtype. ``cast``: (param_dtype, output_dtype) of floating inputs of units and outputs
    of the model; None: as they are."""

    def __init__(
        self,
        comm: Communicator,
        units: Sequence[Unit],
        homes: Sequence[Sequence[LeasedParams]],
        *,
        natives: Sequence[Any],
        prefetch: int,
        cast: tuple[torch.dtype | None, torch.dtype | None],
    ) -> None:
        self.comm, self.homes = comm, [list(of_unit) for of_unit in homes]
        # The model has this object, not the other way.
        self.units = [dataclasses.replace(unit, modules=(), holders=()) for unit in units]
        self.modules = [[weakref.ref(module) for module in unit.modules] for unit in units]
        self.prefetch = prefetch
        self._cast, self._output_dtype = cast
        self.device = torch_device(comm.device)
        self.sizes = [sum(_aligned(h.packing.numel * h.dtype.itemsize) for h in of) or _ALIGN for of in self.homes]
        weak = weakref.WeakMethod(self._bind), weakref.WeakMethod(self._agree)
        given = []
        for unit, of_unit, size in zip(self.units, self.homes, self.sizes, strict=True):
            infos = [info for home in of_unit for info in home.infos]
            blank = [memoryless(i.param.shape, i.stride, i.dtype, self.device) for i in infos]
            given.append((unit.name, size, [info.param for info in infos], blank))
        self.native = core.Residency(
            comm.gathers._native,
            given,
            [unit.stays for unit in self.units],
            prefetch,
            Parameter,
            AbsentParam,
            lambda *given: weak[0]()(*given),  # type: ignore[misc]
            lambda *given: weak[1]()(*given),  # type: ignore[misc]
        )
        self.blanks = {id(p): blank for _, _, params, blanks in given for p, blank in zip(params, blanks, strict=True)}
        # By which a rank that waits alone tells the others, by unit.
        self._forwards, self._evaluations, self._backwards = (
            [core.PublicCall(natives, f"{call} of unit {unit.name!r}") for unit in self.units]
            for call in ("forward", "forward without gradients", "backward")
        )
        self._holds, self.unshards = (core.PublicCall(natives, call) for call in ("full_params", "unshard"))
        self.plan: Plan | None = None
        self.regimes = ["train", "eval"]
        self._chosen: int | None = None  # the regime, while `regime` says so
        self._root_depth = 0
        self._regime_before = TRAIN  # that before the forward that goes on
        self._is_training = False  # from a forward with gradients until the step
        self._is_plan_due = False
        self._is_awaiting_end = False  # a backward has begun of whose end we are told
        # Forwards that go on: the number of autograd's next node at their begin, and what they save by name with.
        self._going: list[tuple[nn.Module, int, SavedByName | None]] = []
        self._mark: Any = None  # its handle, until the step has compared
        self._marks = [torch.zeros(n, dtype=torch.int64, device=self.device) for n in (comm.size, 1)]
        self._mark_request: Any = None
        self._held = 0  # full_params() that go on
        self._is_debugging = env.flag("BW_DEBUG")  # saves by name in all steps
        self._has_warned = False
        self.by: Any = None  # ShardedBy, and the communicators that end with the model; set by `shard`
        self.owned: list[Communicator] = []
        self.hooks = []
        for number, unit in enumerate(units):
            self.hooks += hook_unit(self, number, unit.modules) + hook_unit(self, HOLDER, unit.holders)

    # --- what native code asks ---------------------------------------------------------------------------------------

    def _bind(self, unit: int, memory: Tensor) -> tuple[list[Tensor], Any]:
        """Views of the unit's parameters in its memory, and the gather that fills them."""
        views: list[Tensor] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        storage, at = memory.untyped_storage(), memory.storage_offset()
        for home in self.homes[unit]:
            new = lambda begin, shape, stride, at=at, home=home: torch.empty(  # noqa: E731
                0, dtype=home.dtype, device=memory.device
            ).set_(storage, at // home.dtype.itemsize + begin, shape, stride)
            for begin, info in zip(home.packing.begins, home.infos, strict=True):
                views.append(new(begin, info.param.shape, info.stride))
            pairs += home.pairs(new(0, (home.packing.numel,), (1,)))
            at += _aligned(home.packing.numel * home.dtype.itemsize)
        full, own = zip(*pairs, strict=True) if pairs else ((), ())
        return views, core.make_request(self.comm.gathers._native, full, own, unit=unit + 1)

    def _agree(self, unit: int, what: str) -> None:
        """RuntimeError on all ranks unless all need the unit now. Collective."""
        if self.comm.size == 1:
            return
        call = f"{what} of unit {self.units[unit].name!r}".replace(":", "_")
        everyone = [other.split(b":", 1) for other in self.comm.exchange(f"{call}:".encode())]
        if any(other[0] != everyone[0][0] for other in everyone):
            self.abandon()
            calls = [str(other[0], "utf-8") for other in everyone]
            raise RuntimeError(
                f"ranks need different units: {', '.join(calls)} (by rank); every rank must run the same units"
            )

    def _unit_of_storage(self, address: int) -> int | None:
        found: int = self.native.unit_at(address)
        return None if found < 0 else found

    def _memory_of(self, unit: int) -> Tensor:
        memory = self.native.memory(unit)
        if memory is None or not self.native.is_here(unit):
            raise ShardedParamError(
                f"a backward needs parameters of unit {self.units[unit].name!r}, which are not gathered: its graph "
                "does not pass through an output of the unit's forward, or was made inside full_params(): run the "
                "backward inside full_params() too"
            )
        return memory

    # --- boundaries --------------------------------------------------------------------------------------------------

    def _label(self, what: str, unit: int) -> contextlib.AbstractContextManager[Any]:
        """For profilers: the gathers that a boundary starts, and waits for."""
        if not profiler._is_profiler_enabled:
            return _NOTHING
        return profiler.record_function(f"bucketwheel.gather {what} of {self.units[unit].name}")

    def _in_backward(self) -> bool:
        if torch._C._current_graph_task_id() == -1:
            if self._is_awaiting_end:  # of a backward that has failed
                self.end_backward()
            return False
        if not self._is_awaiting_end:
            self._is_awaiting_end = True
            torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self))
        return True

    def before_forward(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if unit == HOLDER and self._root_depth:
            return None  # the model's forward has the root
        is_model, unit = unit == 0, max(unit, 0)
        first = torch._C._autograd._get_sequence_nr()
        self._going.append((module, first, None))
        keeps, in_backward = torch.is_grad_enabled(), self._in_backward()
        if not in_backward and self._root_depth == 0 and len(self._going) == 1:
            self._regime_before = self.native.regime
            self.native.regime = (TRAIN if keeps else EVAL) if self._chosen is None else self._chosen
        self._root_depth += is_model
        call = (self._forwards if keeps else self._evaluations)[unit]
        if profiler._is_profiler_enabled or torch.is_inference_mode_enabled():
            # Inference mode would make tensors that training could not use.
            with _no_inference(), self._label("forward", unit), call:
                is_on_the_side = self.native.forward(unit, keeps, in_backward)
        else:
            with call:
                is_on_the_side = self.native.forward(unit, keeps, in_backward)
        if (is_on_the_side or self._is_debugging) and not self._held:
            self._going[-1] = (module, first, SavedByName.push(self._unit_of_storage, self._memory_of))
        if self._cast is None:
            return None
        return _cast_in(args, self._cast), _cast_in(kwargs, self._cast)

    def after_forward(self, unit: int, module: nn.Module, output: Any) -> Any:
        if not self._going or self._going[-1][0] is not module:
            return None  # of a holder inside of the model's forward, or another hook has failed before ours
        is_model, unit = unit == 0, max(unit, 0)
        _, first, saved = self._going.pop()
        if saved is not None:
            saved.pop()
        keeps = torch.is_grad_enabled()
        found: list[Tensor] = []
        tensors_in(output, found)
        # Of outputs that other units have made, and this one hands on, nothing is this one's.
        nodes = [n for t in found if keeps and t.requires_grad for n in nodes_of(t) if n._sequence_nr() >= first]
        in_backward = self._in_backward()
        pins = keeps and not found
        keeps = bool(nodes) or pins  # else no backward comes to it
        self._is_training = self._is_training or keeps
        storages = [tensor.untyped_storage().data_ptr() for tensor in found if type(tensor) is Tensor]
        with _no_inference():
            about = self.native.forward_end(unit, keeps, in_backward, pins, storages)
        if about is None:
            self.abandon()
            raise ShardedParamError(
                f"the forward of unit {self.units[unit].name!r} returns memory of its own parameters, which other "
                "units reuse: return a copy (weight.clone()), or name in units= a module with the code that reads it"
            )
        address, regime, root = about
        # Backward needs the root beside the unit, where the model's forward has called it.
        root = -1 if is_model or not self._root_depth else root
        for node in nodes:
            node.register_prehook(_BeforeBackward(self, unit, address, regime, root))
        if not is_model:
            if not self._going and not in_backward:  # called by itself
                self.native.regime = self._regime_before
        else:
            self._root_depth = max(self._root_depth - 1, 0)
            if self._root_depth == 0 and not in_backward and not keeps:
                self._end_forward()
            if self._output_dtype is not None:
                return _cast_in(output, self._output_dtype)
        return None

    def _end_forward(self) -> None:
        """The model's forward is over, and no backward follows."""
        if self.native.regime != TRAIN or not self._is_training:
            self._is_plan_due = self.native.end_pass() or self._is_plan_due
            self.native.regime = self._regime_before
            if self._is_plan_due and not self._is_training and not self.native.memory_counts()["live"]:
                self._replan()

    def before_backward(self, unit: int, address: int, regime: int, root: int) -> None:
        """``root``: the address of the root in the forward, 0 if any will do, -1 if it has had none."""
        if torch.is_grad_enabled() and not self._held:
            raise ShardedParamError(
                f"backward(create_graph=True) through unit {self.units[unit].name!r} makes a graph that needs the "
                "parameters again: run it inside `with model.full_params():`"
            )
        self._in_backward()
        if self.native.regime != regime:  # an evaluation has come between
            self.native.regime = regime
        with self._label("backward", unit), self._backwards[unit]:
            is_there = self.native.backward(unit, address, root)
        if not is_there:
            raise ShardedParamError(
                f"unit {self.units[unit].name!r} has another address in backward than in forward, because units that "
                "share its memory are in use: the graph of this forward cannot be used; run the forward again"
            )

    def end_backward(self) -> None:
        self._is_awaiting_end = False
        self.native.backward_end()

    # --- the end of a step -------------------------------------------------------------------------------------------

    def before_close(self) -> None:
        """Tells the other ranks what this one has gathered since the last time: [Note: gathers that are agreed on]."""
        if self.comm.size == 1 or self.comm.device != CPU:
            return
        if self._mark_request is None:
            full, own = self._marks
            self._mark_request = core.make_request(self.comm.gathers._native, [full], [own], unit=core.END_OF_WINDOW)
        if self._mark is not None:
            self._mark.wait()
        events = self.native.hash
        self._marks[1].fill_(events - 2**64 if events >= 2**63 else events)
        self._mark = self._mark_request.start()

    def after_check(self) -> None:
        """RuntimeError on all ranks if they have taken units in different orders. Collective."""
        if self.comm.size == 1:
            return
        if self.comm.device != CPU:
            said = self.comm.exchange(self.native.hash.to_bytes(8, "little"))
            is_same = len(set(said)) == 1
        elif self._mark is not None:
            self._mark.wait()
            self._mark = None
            is_same = bool((self._marks[0] == self._marks[0][0]).all())
        else:
            return
        if not is_same:
            self.abandon()
            raise RuntimeError(
                "ranks ran units in different orders in this step, so nothing has been updated: every rank must run "
                "the same units in the same order"
            )

    def before_write(self) -> None:
        """Parameters are about to be written: none is gathered afterwards."""
        if self._held:
            raise RuntimeError("a step or load inside full_params(): leave full_params() first")
        self._is_plan_due = self.native.end_step() or self._is_plan_due
        self._forget_forwards()
        self._is_training, self._root_depth, self.native.regime = False, 0, TRAIN
        self._warn_of_divergence()
        if self._is_plan_due:
            self._replan()
        if (written := self.native.take_written()) is not None:
            says = sharded(written)
            raise ShardedParamError(
                f"parameter {says.name if says else ''!r} was written to while it was gathered, and the write is lost: write "
                "inside `with model.full_params():` (max_norm of nn.Embedding writes in forward: do not use max_norm)"
            )

    def abandon(self) -> None:
        """The step has failed: what was gathered is let go, and nothing is recorded."""
        self.native.forget_events()
        self.before_write()

    def _forget_forwards(self) -> None:
        """Of forwards that never ended (KeyboardInterrupt) the hooks of saved tensors are taken off."""
        for _, _, saved in reversed(self._going):
            if saved is not None:
                saved.pop()
        self._going.clear()

    def _warn_of_divergence(self) -> None:
        if not self._has_warned and (count := self.native.divergences):
            self._has_warned = True
            warnings.warn(
                f"units were needed in another order than in the recorded step ({count} times): each was gathered "
                "late, without overlap. model.plan_report() counts them; model.regime(name) records another order",
                stacklevel=3,
            )

    def _replan(self) -> None:
        """Plans the memory of units anew, by the records of all regimes."""
        self._is_plan_due = False
        sizes: dict[str, int] = {}
        intervals: dict[str, list[tuple[int, int]]] = {}
        numbers = []
        begin = 0
        for regime in range(len(self.regimes)):
            found = self.native.intervals(regime)
            for unit, of_unit in enumerate(found):
                numbers.append(len(sizes) if of_unit else -1)
                if of_unit:
                    key = f"{self.regimes[regime]}/{self.units[unit].name}"
                    sizes[key] = self.sizes[unit]
                    intervals[key] = [(begin + start, begin + stop) for start, stop in of_unit]
            begin += max((stop for of_unit in found for _, stop in of_unit), default=0)
        self.plan = Plan.of("units", sizes, intervals)
        with _no_inference():
            self.comm.gathers.pool.trim()  # of what the first step took on the side
            self.native.set_plan(self.plan.to_native(), numbers)

    # --- by hand -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def regime(self, name: str) -> Iterator[None]:
        if name not in self.regimes:
            self.regimes.append(name)
        before, self._chosen = self._chosen, self.regimes.index(name)
        try:
            yield
        finally:
            self._chosen = before

    @contextlib.contextmanager
    def held(self, units: Sequence[int]) -> Iterator[None]:
        """These are gathered inside. What is written to them there counts. Collective."""
        taken: list[int] = []
        saved = SavedByName.push(self._unit_of_storage, self._memory_of)  # for graphs that are made inside
        try:
            with self._holds:
                for unit in units:
                    self.native.hold(unit)
                    taken.append(unit)
                for unit in taken:
                    self.native.wait(unit)
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1
        finally:
            if saved is not None:
                saved.pop()
            with contextlib.ExitStack() as last:  # all of them, whatever was done to one
                for unit in taken:
                    last.callback(self.native.let_go, unit)
                    last.callback(self.native.expect_written, unit)
                    last.callback(self._take_back, unit)

    def _take_back(self, unit: int) -> None:
        memory = self.native.memory(unit)
        if memory is None:
            return
        at = memory.storage_offset()
        for home in self.homes[unit]:
            nbytes = home.packing.numel * home.dtype.itemsize
            full = memory.narrow(0, at, nbytes).view(home.dtype)
            for begin, info in zip(home.packing.begins, home.infos, strict=True):
                shape = self.blanks[id(info.param)].shape
                place = full.narrow(0, begin, shape.numel()).as_strided(shape, info.stride)
                if (info.param.dtype, info.param.shape) != (home.dtype, shape):
                    raise ShardedParamError(
                        f"parameter {info.name!r} got a tensor of another dtype or shape inside full_params(): write "
                        "values into it instead"
                    )
                if info.param.data_ptr() != place.data_ptr():  # p.data = new
                    place.copy_(info.param.data)
            home.take_back(full)
            at += _aligned(nbytes)

    @property
    def is_held(self) -> bool:
        return self._held > 0

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        close_all(self.owned)


class _BeforeBackward:
    """Before a node of a unit's output. A graph keeps the runtime, so that its backward works without the model."""

    def __init__(self, runtime: Runtime, *about: int) -> None:
        self._runtime, self._about = runtime, about

    def __call__(self, _: Any) -> None:
        self._runtime.before_backward(*self._about)


def _no_inference() -> contextlib.AbstractContextManager[Any]:
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


def _cast_in(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in tuples, lists, dicts and dataclasses, as ``dtype``: in a copy, or in ``value`` if all have it."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if is_named or type(value) in (tuple, list):
        items = [_cast_in(one, dtype) for one in value]
        if all(new is one for new, one in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if is_named else type(value)(items)
    is_dict = isinstance(value, dict)
    if is_dict:
        fields = list(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
    else:
        return value
    changed = {name: new for name, one in fields if (new := _cast_in(one, dtype)) is not one}
    if not changed:
        return value
    if not is_dict:
        return dataclasses.replace(value, **changed)
    cast = copy.copy(value)
    for name, new in changed.items():
        cast[name] = new
    return cast
