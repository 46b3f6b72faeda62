"""Members: the parameters that an optimizer trains, by index, and those of its groups that are frozen so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.optim.local_engine import LocalEngine
from bucketwheel.optim.param_groups import collect_params, group_texts
from bucketwheel.optim.sharded_engine import ShardedEngine

__all__ = ["Members"]


class Members:
    """``param_groups`` are the optimizer's own; groups may be added to them."""

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self._param_groups = param_groups
        self.infos: list[ParamInfo] = collect_params(param_groups)
        self.index_of: dict[Tensor, int] = {info.param: info.index for info in self.infos}
        everything = [p for group in param_groups for p in group["params"]]
        self.frozen: list[Tensor] = [p for p in everything if p not in self.index_of]
        self.loaded: dict[Tensor, dict[str, Any]] = {}  # states that came while their parameters were frozen
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
