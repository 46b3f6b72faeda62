"""Shown state: ``optimizer.state``, which shows the kernel's memory, and what others have done to it.

torch reads ``optimizer.state`` in every step. Here an entry shows what the kernel has of a parameter on this rank. What
is written into those tensors counts at once; an entry or a tensor that was exchanged is copied in by the next step.

| others have | what follows |
|---|---|
| deleted or emptied an entry, or replaced the whole dict | the parameter starts anew: step 0, moments of zeros |
| assigned a tensor of the parameter's shape, or of this rank's part | it is copied; this rank takes its part |
| moved the entry of a parameter that has left the groups to a new one of its shape | the new one goes on from it |
| anything else, a weight that is not the parameter's among it | ValueError by name, on all ranks, before anything is done |

What one rank alone has done is an error on all in the next step, also where a local call has followed it before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from bucketwheel.checkpoint.tensor_shard import TensorShard, warn_of_part
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.masters import follow_param, is_rounded, saved_names
from bucketwheel.native import core
from bucketwheel.optim import state_dict as states
from bucketwheel.torch_internals import call_of_torch

if TYPE_CHECKING:
    from bucketwheel.optim.local_engine import LocalEngine
    from bucketwheel.optim.sharded_engine import ShardedEngine
    from bucketwheel.optim.trained_params import Regrouping


Engine: TypeAlias = "LocalEngine | ShardedEngine"


# --- dicts that note that somebody writes to them --------------------------------------------------------------------


class _Edited:
    is_set = False  # from a write to one of the dicts to the next `publish`


class _Entry(dict[str, Any]):
    """Of one parameter."""

    edited = _Edited()  # that of its `ShownState`; this one is of copies, which nobody asks

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _State(defaultdict[Any, Any]):
    edited = _Edited()

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def _noting(write: Callable[..., Any]) -> Callable[..., Any]:
    def noting(self: Any, *args: Any, **named: Any) -> Any:
        self.edited.is_set = True
        return write(self, *args, **named)

    return noting


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    for _kind in (_Entry, _State):
        setattr(_kind, _name, _noting(getattr(dict, _name)))


# What may write to a part, beside operators: the same to all elements, or to each from its own of another tensor.
_WRITES = "zero fill copy mul div add sub pow sqrt square neg lerp addcmul addcdiv clamp clamp_min clamp_max nan_to_num"
_WHOLE_WRITES = frozenset(f"{name}_" for name in (*_WRITES.split(), "masked_fill", "detach"))
_OF_ROWS = ("__getitem__", "__setitem__", "__iter__", "__set__", "index", "gather", "take", "select", "scatter")


class _Part(Tensor):
    """This rank's part of a state, 1-D. An index would mean other elements than it does with torch, on each rank others.

    So a part is read and written as a whole: what else writes is refused, and what returns a view of some elements.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        with torch._C.DisableTorchFunctionSubclass():
            part = given[0] if given and isinstance(given[0], _Part) else None
            name = func.__name__
            if part is None:
                if name == "copy_" and call_of_torch("_copy_state_dict"):
                    _Part.__create_write_items__(given[1])
                return func(*args, **(kwargs or {}))
            if name == "new_empty" and call_of_torch("_offload_tensor"):  # its copy would be no part
                part.__create_write_items__()
            is_write = name.endswith("_") and not name.endswith("__")
            if name.startswith(_OF_ROWS) or (is_write and name not in _WHOLE_WRITES):
                raise part._refusal(f"what {name} takes")
            found = func(*args, **(kwargs or {}))
            some = found if isinstance(found, (list, tuple)) else (found,)
            is_alias: Callable[..., bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
            views = [view for view in some if isinstance(view, Tensor) and is_alias(view, part)]
            if any(view.numel() != part.numel() for view in views):
                raise part._refusal(f"what {name} takes")
            return found.as_subclass(_Part) if views and type(found) is Tensor else found

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"optimizer.state shows {self.numel()} elements, this rank's part, so {what} does not select rows of the "
            "parameter: optimizer.reset_state(parameters, rows) zeroes rows, optimizer.full_state(parameter) has all"
        )

    def __create_write_items__(self, *_: Any) -> NoReturn:
        """`torch.distributed.checkpoint` would save one rank's part as if it were all."""
        raise RuntimeError(
            f"optimizer.state shows {self.numel()} elements, this rank's part, and a checkpoint of it would lose those "
            "of other ranks: save optimizer.state_dict()"
        )

    def _expect_all(self, index: Any) -> None:
        if index is not Ellipsis and not (isinstance(index, slice) and index == slice(None)):
            raise self._refusal(f"[{index!r}]")

    def __getitem__(self, index: Any) -> Any:
        self._expect_all(index)
        return self.detach()

    def __setitem__(self, index: Any, value: Any) -> None:
        self._expect_all(index)
        self.copy_(torch.as_tensor(value, dtype=self.dtype, device=self.device))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.clone())

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        warn_of_part("one rank's part, from optimizer.state")
        return self.clone().__reduce_ex__(protocol)


# --- edits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a tensor belongs that is one rank's part of something: the ranges of all ranks, in what memory order."""

    ranges: Sequence[Sequence[tuple[int, int]]]
    shape: Sequence[int]
    stride: Sequence[int]


_Homes = dict[int, tuple[Tensor, _Place]]  # by the id of a part: itself, and where it belongs


@dataclass(frozen=True)
class _Value:
    """A copy. ``place``: it is a part, whose whole all ranks must join; None: it is this rank's, or (``is_whole``) whole."""

    tensor: Tensor
    place: _Place | None = None
    is_whole: bool = False

    def own(self, engine: Engine, info: ParamInfo) -> Tensor:
        """What this rank owns of it: 1-D. Collective where it is a part."""
        whole = self.tensor
        if self.place is not None:
            whole = engine.join(whole, self.place.ranges).as_strided(self.place.shape, self.place.stride)
        return states.cut(whole, info, engine.owned_ranges(info.index)) if self.place or self.is_whole else whole


@dataclass
class StateEdits:
    """What others have done, by parameter. ``said`` is the same on ranks that have done the same."""

    resets: list[Tensor] = field(default_factory=list)
    values: dict[Tensor, dict[str, _Value | int]] = field(default_factory=dict)
    left: dict[Tensor, tuple[dict[str, Any], _Homes]] = field(default_factory=dict)  # entries of parameters that leave
    new: set[Tensor] = field(default_factory=set)
    said: list[str] = field(default_factory=list)

    def carry_out(self, engine: Engine) -> None:
        """On the parameters that ``engine`` has by now. Collective if parameters are new."""
        infos: dict[Tensor, ParamInfo] = {info.param: info for info in engine.infos}
        for param in self.resets:
            states.reset(engine, infos[param])
        for param, values in self.values.items():
            info = infos[param]
            own = {name: value if isinstance(value, int) else value.own(engine, info) for name, value in values.items()}
            states.assign(engine, info, own)
            if param in self.new:  # it may be another value than the master's
                follow_param(engine.values_of(info.index), engine.states[info.index])


class ShownState:
    """The optimizer makes ``dict`` its ``state``. Others may put another mapping there, which is looked at too."""

    def __init__(self) -> None:
        self.edited = _Edited()
        self.dict: Any = _State(dict)
        self.dict.edited = self.edited
        self.said: set[str] = set()  # what was done since the last step and has been followed
        self._values: dict[Tensor, dict[str, Any]] = {}  # what is shown of each parameter, by the last `publish`
        # Of parameters that have left the groups: where the parts in their entries belong. While the entry stays.
        self._left: dict[Tensor, _Homes] = {}
        self._last: tuple[list[Any], list[Any]] = ([], [])  # keys and entries of the mapping, by the last `publish`

    def publish(self, state: Any, engine: Engine, edits: StateEdits | None = None) -> None:
        """Makes ``state`` show what ``engine`` has. ``edits``: those that have been carried out."""
        for param, (entry, home) in (edits.left if edits else {}).items():
            state[param], self._left[param] = entry, home
        self._left = {param: home for param, home in self._left.items() if state.get(param)}
        self._values, used = {}, set[int]()
        for info in engine.infos:
            like = (info.param.shape, info.stride)
            shown = {
                name: tensor.as_subclass(_Part) if engine.world > 1 else tensor.as_strided(*like)
                for name, tensor in engine.states[info.index].items()
            }
            values = {"step": engine.steps[info.index], **shown}
            entry = state.get(info.param)  # the same dict again: others may have it
            if type(entry) is not _Entry or entry.edited is not self.edited or id(entry) in used:
                entry = state[info.param] = _Entry()
                entry.edited = self.edited
            used.add(id(entry))
            dict.clear(entry)
            dict.update(entry, values)
            self._values[info.param] = values
            self._left.pop(info.param, None)
        self._last = (list(state), list(state.values()))
        self.edited.is_set = False

    def text(self, edits: StateEdits | None) -> str:
        """What was done since the last step, with ``edits``; the same on ranks that have done the same."""
        return "; ".join(sorted({*self.said, *edits.said})) if edits else "; ".join(sorted(self.said))

    def find(self, state: Any, engine: Engine, groups: Regrouping | None = None) -> StateEdits:
        """What others have done to the entries of the engine's parameters; where ``groups`` have changed, of those that stay and
        of new ones. ValueError or TypeError naming what cannot be followed."""
        edits = StateEdits()
        if groups is None and not self.edited.is_set:
            if all(map(core.are_same_objects, (list(state), list(state.values())), self._last)):
                return edits
        stays = {info.param for info in (engine.infos if groups is None else groups.kept)}
        for info in engine.infos:
            entry, shown = _entry_of(state, info), self._values[info.param]
            if info.param in stays:
                self._look(edits, engine, info, entry, shown)
            elif entry:
                saved = states.own_entry(engine, info)
                home = self._home(engine, info, saved) if engine.world > 1 else {}
                changed = {name: value for name, value in entry.items() if shown.get(name) is not value}
                edits.left[info.param] = ({**saved, **changed}, home)
        for info in groups.new if groups else ():
            if entry := _entry_of(state, info):
                self._look_at_new(edits, engine, info, entry)
        return edits

    def _look(self, edits: StateEdits, engine: Engine, info: ParamInfo, entry: Any, shown: dict[str, Any]) -> None:
        if not entry:
            edits.resets.append(info.param)
            edits.said.append(f"{info.name!r} starts anew")
            return
        _expect_complete(info, entry, shown)
        changed = {name: value for name, value in entry.items() if shown.get(name) is not value}
        if changed:
            own = engine.states[info.index]["exp_avg"].shape
            values = {name: _value_of(info, name, value, shown, own) for name, value in changed.items()}
            edits.values[info.param] = {
                name: _Value(value.own(engine, info)) if isinstance(value, _Value) else value
                for name, value in values.items()
            }
            _expect_weight(engine, info, edits.values[info.param].get("master_param"))
            edits.said += [f"{name} of {info.name!r}" for name in changed]

    def _look_at_new(self, edits: StateEdits, engine: Engine, info: ParamInfo, entry: Any) -> None:
        names = {"step": None, **engine.precision.kept_of(info.dtype)}
        _expect_complete(info, entry, names)
        homes: _Homes = {}
        for home in self._left.values():
            homes |= home
        for old in engine.infos if engine.world > 1 else ():
            homes |= self._home(engine, old, self._values[old.param])
        values: dict[str, _Value | int] = {}
        for name, value in entry.items():
            tensor, place = homes.get(id(value), (value, None))
            if name == "remainder":
                continue
            if place is None:
                values[name] = _value_of(info, name, value, names, info.param.shape)
            elif tuple(place.shape) != tuple(info.param.shape):
                raise ValueError(_misfit(info, name, tuple(place.shape)))
            else:
                values[name] = _Value(tensor.clone(), place)
        edits.values[info.param] = values
        edits.new.add(info.param)
        kinds = (
            f"{name} in parts" if isinstance(v, _Value) and v.place else name for name, v in sorted(values.items())
        )
        edits.said += [f"{kind} of the new {info.name!r}" for kind in kinds]

    def _home(self, engine: Engine, info: ParamInfo, entry: Mapping[str, Any]) -> _Homes:
        place = _Place(engine.ranges_of(info.index), info.param.shape, info.stride)
        names = entry.keys() - {"step"}
        return {id(entry[name]): (entry[name], place) for name in names}


def _entry_of(state: Any, info: ParamInfo) -> Any:
    entry = state.get(info.param)
    if entry is not None and not isinstance(entry, Mapping):
        raise TypeError(f"optimizer.state of {info.name!r} must be a dict of states, got {type(entry).__name__}")
    return entry


def _expect_weight(engine: Engine, info: ParamInfo, master: _Value | int | None) -> None:
    """ValueError for a master that the step would drop, because the parameter is not what it rounds to."""
    if isinstance(master, _Value) and engine.follows_params:
        param = states.cut(info.param.detach(), info, engine.owned_ranges(info.index))
        if not is_rounded(param, master.tensor.to(torch.float32)).all():
            raise ValueError(
                f"optimizer.state of {info.name!r}: master_param does not round to the parameter, and the step reads "
                "the weight from the parameter; write to the parameter"
            )


def _expect_complete(info: ParamInfo, entry: Mapping[str, Any], names: Iterable[str]) -> None:
    """ValueError if there is no step, or a moment is missing. Masters may be: they are the weights."""
    for name in names:
        if name not in entry and name not in ("master_param", "remainder"):
            raise ValueError(f"optimizer.state of {info.name!r} has no {name!r}; it has {sorted(entry)}")


def _value_of(info: ParamInfo, name: str, value: Any, names: Iterable[str], own: Sequence[int]) -> _Value | int:
    """A copy of what was assigned, if it can be a state of the parameter, of whose states ``names`` are known and this rank's
    part has the shape ``own``."""
    if name == "step":
        is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not is_number:
            raise TypeError(f"optimizer.state of {info.name!r}: step must be a number, got {value!r}")
        return int(value)
    names = saved_names(names)
    if name not in names:
        raise ValueError(
            f"optimizer.state of {info.name!r} has {name!r}, but its states are {sorted(names)}. Keep values of your "
            "own in a dict of your own, by parameter"
        )
    if not isinstance(value, Tensor):
        raise TypeError(f"optimizer.state of {info.name!r}: {name} must be a tensor, got {type(value).__name__}")
    if isinstance(value, TensorShard):
        raise TypeError(
            f"optimizer.state of {info.name!r}: {name} is a part from state_dict(); pass it to load_state_dict()"
        )
    if value.shape == info.param.shape:
        return _Value(value.detach().clone(), is_whole=True)
    if tuple(value.shape) == tuple(own):
        return _Value(value.detach().clone())
    raise ValueError(_misfit(info, name, tuple(value.shape)))


def _misfit(info: ParamInfo, name: str, shape: Sequence[int]) -> str:
    return (
        f"optimizer.state of {info.name!r}: {name} has shape {tuple(shape)}, the parameter {tuple(info.param.shape)}. "
        "Assign the parameter's shape: optimizer.full_state(parameter) has whole states, "
        "optimizer.reset_state(parameters, rows) zeroes them"
    )
