"""Trained parameters: the parameters of an optimizer's groups, as they are at each step, and the groups' hyperparameters."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.device import CPU, device_index
from bucketwheel.grads.agreement import Facts
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.optim.given_modules import GivenModules
from bucketwheel.optim.param_groups import collect_params, group_texts

if TYPE_CHECKING:
    from bucketwheel.optim.local_engine import LocalEngine
    from bucketwheel.optim.sharded_engine import ShardedEngine

__all__ = ["Hyperparameters", "TrainedParams"]


class TrainedParams:
    """The parameters that an optimizer trains, by index, and those of its groups that are frozen so far.

    ``param_groups`` are the optimizer's own; groups may be added to them.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], given: GivenModules) -> None:
        self._param_groups = param_groups
        self.infos: list[ParamInfo] = collect_params(param_groups, given=given)
        self.index_of: dict[Tensor, int] = {info.param: info.index for info in self.infos}
        everything = [p for group in param_groups for p in group["params"]]
        self.frozen: list[Tensor] = [p for p in everything if p not in self.index_of]
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

    def zero_unfrozen(self, set_to_none: bool) -> None:
        """`zero_grad` of those that are trained by now and not taken in yet."""
        for p in self.frozen:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad = p.grad.detach().zero_()

    @property
    def has_unfrozen(self) -> bool:
        return any(p.requires_grad for p in self.frozen)

    def take_in(self, engine: LocalEngine | ShardedEngine, why: str) -> None:
        """Gives the engine the parameters of all groups that are to be trained and were not so far. Collective."""
        new = collect_params(self._param_groups, self.index_of)
        engine.precision.expect_fits({info.dtype for info in (*self.infos, *new)})
        engine.add(new, group_texts(self._param_groups), why)
        self.infos += new
        self.index_of.update({info.param: info.index for info in new})
        grouped = [p for group in self._param_groups for p in group["params"]]
        self.frozen[:] = [p for p in grouped if p not in self.index_of]


class Hyperparameters:
    """What ranks must have alike of their groups in each step. Digests are made where a value has changed."""

    def __init__(self) -> None:
        self._values: list[float] = []  # of the last step
        self._digest = b""

    def facts(self, param_groups: Sequence[dict[str, Any]]) -> Facts:
        """KeyError naming what a group lacks."""
        values = [value for group in param_groups for value in _numbers_of(group)]
        if values != self._values or not self._digest:
            self._values = values
            self._digest = zlib.crc32(struct.pack(f"{len(values)}d", *values)).to_bytes(4, "little")
        return Facts(self._digest, lambda: _named_values(values))


_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "amsgrad", "decoupled_weight_decay")


def _numbers_of(group: dict[str, Any]) -> tuple[float, ...]:
    """By `_NUMBERS`. A tensor on a device counts as NaN: nothing waits for it."""
    lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    given = (
        lr,
        beta1,
        beta2,
        eps,
        decay,
        group["maximize"],
        group["amsgrad"],
        group.get("decoupled_weight_decay", True),
    )
    return tuple(math.nan if isinstance(x, Tensor) and device_index(x.device) != CPU else float(x) for x in given)


def _named_values(values: Sequence[float]) -> dict[str, str]:
    count = len(_NUMBERS)
    return {f"{_NUMBERS[i % count]} of parameter group {i // count}": str(value) for i, value in enumerate(values)}
