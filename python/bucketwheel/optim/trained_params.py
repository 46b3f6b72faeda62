"""Trained parameters: the parameters of an optimizer's groups, as they are at each step, and the groups' hyperparameters."""

from __future__ import annotations

import functools
import math
import operator
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.device import CPU, device_index
from bucketwheel.grads.agreement import Facts
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.native import core
from bucketwheel.optim.param_groups import collect_params

_KEYS = ("lr", "betas", "eps", "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay")


@dataclass(frozen=True)
class Regrouping:
    """The parameters of groups that have changed. ``kept``: those that are trained, in their order so far, with new indices
    and groups; ``new``: whose indices follow. ``text`` says what has changed."""

    kept: list[ParamInfo]
    new: list[ParamInfo]
    text: str


class TrainedParams:
    """The parameters that an optimizer trains, by index, and those of its groups that are frozen, or not taken in, so far."""

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.infos: list[ParamInfo] = []
        self.index_of: dict[Tensor, int] = {}
        self.frozen: list[Tensor] = []
        self._grouped: list[list[Tensor]] = []  # the groups' parameters when they were taken in last
        self.note(collect_params(param_groups), param_groups)
        everything = [p for group in param_groups for p in group["params"]]
        # States that were loaded while their parameters were frozen. An entry goes when its parameter is taken in.
        self.loaded: dict[Tensor, dict[str, Any]] = {}
        self.device = next((p.device for p in [*self.index_of, *everything]), torch.device("cpu"))

    def indices(self, parameters: Iterable[Parameter] | None) -> Sequence[int] | None:
        """Ascending; without those that are frozen, or were until now. None: all. ValueError for another optimizer's."""
        if parameters is None:
            return None
        chosen: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for p in chosen:
            if p not in self.index_of and p.requires_grad and not any(p is known for known in self.frozen):
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is not trained by this optimizer")
        return sorted({self.index_of[p] for p in chosen if p in self.index_of})

    def index_known(self, param: Tensor, what: str) -> int:
        if param not in self.index_of:
            raise ValueError(f"{what}: this optimizer does not train the parameter of shape {tuple(param.shape)}")
        return self.index_of[param]

    def zero_unfrozen(self, set_to_none: bool) -> None:
        """`zero_grad` of those that are trained by now and not taken in yet."""
        for p in self.frozen:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad = p.grad.detach().zero_()

    def waiting(self, params: Iterable[Tensor], shown: Mapping[Tensor, Any]) -> dict[Tensor, dict[str, Any]]:
        """Entries of those of ``params`` that are not trained so far: loaded, or assigned to ``optimizer.state`` (``shown``)."""
        entries = ((p, self.loaded.get(p) or shown.get(p)) for p in params if p not in self.index_of)
        return {p: entry for p, entry in entries if entry}

    # --- groups that change ------------------------------------------------------------------------------------------

    def are_those_of(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the groups have the parameters that they had when these were taken in."""
        if len(param_groups) != len(self._grouped):
            return False
        return all(map(core.are_same_objects, (group["params"] for group in param_groups), self._grouped))

    def regrouping(self, param_groups: Sequence[dict[str, Any]]) -> Regrouping:
        """What has changed. ValueError or TypeError naming what cannot be followed."""
        group_of: dict[Tensor, int] = {}
        for g, group in enumerate(param_groups):
            missing = [key for key in ("params", *_KEYS) if key not in group]
            if missing:
                raise ValueError(f"parameter group {g} has no {missing[0]!r}; call optimizer.add_param_group()")
            if isinstance(group["params"], Iterator):
                kind = type(group["params"]).__name__
                raise TypeError(f"the params of parameter group {g} are a {kind}, empty once read; give a list")
            for p in group["params"]:
                if not isinstance(p, Tensor) or not p.is_leaf:
                    raise TypeError(
                        f"parameter group {g} has a {type(p).__name__} that is not a leaf tensor among its parameters"
                    )
                if p in group_of and p.requires_grad:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} is in groups {group_of[p]} and {g}; put it in one group"
                    )
                group_of[p] = g
        kept = [info for info in self.infos if info.param in group_of]
        now = [replace(info, index=i, group=group_of[info.param]) for i, info in enumerate(kept)]
        new = collect_params(param_groups, {info.param: info.index for info in now})
        changes = {
            "new": new,
            "gone": [info for info in self.infos if info.param not in group_of],
            "moved": [info for info, after in zip(kept, now, strict=True) if info.group != after.group],
        }
        said = [f"{len(infos)} {what}, first {infos[0].name!r}" for what, infos in changes.items() if infos]
        return Regrouping(now, new, ", ".join(said))

    def note(self, infos: Sequence[ParamInfo], param_groups: Sequence[dict[str, Any]]) -> None:
        """These are trained from now on: all that are to be, of these groups."""
        self.infos[:] = infos
        self.index_of.clear()
        self.index_of.update({info.param: info.index for info in infos})
        self._grouped = [list(group["params"]) for group in param_groups]
        self.note_waiting(param_groups)

    def note_waiting(self, param_groups: Sequence[dict[str, Any]]) -> None:
        grouped = (p for group in param_groups for p in group["params"])
        self.frozen[:] = [p for p in grouped if p not in self.index_of]


class Hyperparameters:
    """What ranks must have alike of their groups in each step. Digests are made where a value has changed."""

    def __init__(self) -> None:
        self._values: list[float] = []  # of the last step
        self._digest = 0

    def facts(self, param_groups: Sequence[dict[str, Any]], edits: str = "") -> Facts:
        """ValueError naming what is no number in a group. ``edits``: what was done to ``optimizer.state``."""
        try:
            values: list[Any] = []
            for lr, (beta1, beta2), *rest in map(_given, param_groups):
                values += (lr, beta1, beta2, *rest)
            values = [x if type(x) in _PLAIN else _number(x) for x in values]
            if values != self._values:  # which are no lists or tensors, that others may write to
                self._digest = zlib.crc32(struct.pack(f"{len(values)}d", *values))
                self._values = values
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a value of a parameter group is not a number: {error!r}") from None
        digest = zlib.crc32(edits.encode(), self._digest) if edits else self._digest
        return Facts(digest.to_bytes(4, "little"), functools.partial(_by_name, self._values, edits))


_given = operator.itemgetter(*_KEYS)
_PLAIN = frozenset((float, bool))
_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay")


def _number(given: Any) -> float:
    """A tensor on a device counts as NaN: nothing waits for it."""
    return math.nan if isinstance(given, Tensor) and device_index(given.device) != CPU else float(given)


def _by_name(values: Sequence[float], edits: str) -> dict[str, str]:
    count = len(_NUMBERS)
    named = {
        f"{_NUMBERS[i % count]} of parameter group {i // count}": str(float(value)) for i, value in enumerate(values)
    }
    return {**named, "edits of optimizer.state": edits or "nothing"}
