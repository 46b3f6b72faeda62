"""Rows: what the fused Adam kernel works on, with the step count of every parameter.

A row is a contiguous piece of one parameter with its gradient and states; a parameter may have several rows, or none on
this rank. Step counts, use and gradient factors are kept per parameter and spread over the rows at each step (D16).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.native import core

__all__ = ["AdamRows", "expect_uniform_flags", "native_flags", "native_group"]


def expect_uniform_flags(param_groups: Sequence[dict[str, Any]]) -> None:
    """ValueError for flags that the kernel takes once for all groups and that differ between them."""
    for key in ("maximize", "amsgrad", "capturable", "differentiable", "decoupled_weight_decay"):
        given = [group.get(key, key == "decoupled_weight_decay") for group in param_groups]
        if len(set(map(bool, given))) > 1:
            raise ValueError(f"{key} must be the same in all parameter groups, got {given}")


def native_group(group: dict[str, Any], lr: float) -> core.AdamGroup:
    """A parameter group with the learning rate ``lr``, as the kernel takes it."""
    beta1, beta2 = map(float, group["betas"])
    return core.AdamGroup(lr, beta1, beta2, float(group["eps"]), float(group["weight_decay"]))


def native_flags(param_groups: Sequence[dict[str, Any]], amsgrad: bool) -> dict[str, bool]:
    """The flags that all groups share, as the kernel takes them. ValueError if ``amsgrad``, as which the rows were made,
    is another one now."""
    expect_uniform_flags(param_groups)
    if bool(param_groups[0]["amsgrad"]) != amsgrad:
        raise ValueError(
            f"amsgrad was {amsgrad} when the optimizer was made and is {param_groups[0]['amsgrad']} in its groups now; "
            "make a new optimizer to change it"
        )
    return {
        "decoupled": bool(param_groups[0].get("decoupled_weight_decay", True)),
        "maximize": bool(param_groups[0]["maximize"]),
    }


class AdamRows:
    """The native `AdamTable` and the per-parameter scalars around it. ``steps``: int64, one a parameter, counted up
    here.

    ``stochastic``: bfloat16 second moments are rounded stochastically; ``stochastic_param``: so are bfloat16 parameters
    that have neither master nor remainder. ``seed``: of the random bits. ``amsgrad``: what the groups must say.
    ``table``: another native table (`rows_cuda`).
    """

    def __init__(
        self,
        steps: Tensor,
        *,
        stochastic: bool = True,
        stochastic_param: bool = False,
        seed: int = 0,
        amsgrad: bool = False,
        table: Any = None,
    ) -> None:
        self.table: Any = core.AdamTable() if table is None else table
        self.steps = steps
        self._amsgrad = amsgrad
        self._param_of_row: list[int] = []
        self._index: Tensor | None = None
        self._scalars: tuple[Tensor, Tensor, Tensor] | None = None
        self._groups: list[Any] = []
        self._flags: dict[str, bool] = {}
        self._rounding: dict[str, Any] = {"stochastic": stochastic, "stochastic_param": stochastic_param, "seed": seed}

    def add(
        self,
        param: int,
        group: int,
        p: Tensor,
        g: Tensor | None,
        m: Tensor,
        v: Tensor,
        master: Tensor | None = None,
        *,
        max_exp_avg_sq: Tensor | None = None,
        remainder: Tensor | None = None,
        param_begin: int = 0,
    ) -> int:
        """Adds a row and returns its number. Rows of parameters without elements are legal.

        ``param_begin``: the place of the row's first element in its parameter, in memory order (stochastic rounding
        depends on it, so that a result does not depend on how the parameter is cut).
        """
        self._param_of_row.append(param)
        self._index = None
        row: int = self.table.add(
            p,
            g,
            m,
            v,
            master,
            group,
            max_exp_avg_sq=max_exp_avg_sq,
            remainder=remainder,
            param=param,
            param_begin=param_begin,
        )
        return row

    def begin_step(
        self,
        param_groups: Sequence[dict[str, Any]],
        used: Sequence[bool],
        factors: Sequence[float] | Tensor,
        average: float = 1.0,
    ) -> None:
        """Counts a step for the parameters ``used`` and fixes the scalars of this step.

        ``factors``, one a parameter, are folded into the gradients with ``average``.
        """
        flags = native_flags(param_groups, self._amsgrad)
        groups = [native_group(group, float(group["lr"])) for group in param_groups]  # may raise: before steps count
        core.use_torch_threads(torch.get_num_threads())
        if self._index is None:
            self._index = torch.tensor(self._param_of_row, dtype=torch.int64)
        is_used = torch.tensor(list(used), dtype=torch.uint8)
        self.steps += is_used
        self._scalars = (
            self.steps[self._index],
            is_used[self._index],
            (torch.as_tensor(factors, dtype=torch.float64) * average)[self._index],
        )
        self._groups = groups
        self._flags = flags

    def step(self, first_row: int = 0, last_row: int = -1) -> None:
        """Updates the rows [first_row, last_row) (to the end by default) with the scalars of `begin_step`."""
        assert self._scalars is not None
        steps, used, factors = self._scalars
        flags, rounding = self._flags, self._rounding
        self.table.step(  # by position: names take longer than a small step
            self._groups,
            steps,
            used,
            factors,
            first_row,
            last_row,
            flags["decoupled"],
            flags["maximize"],
            rounding["stochastic"],
            rounding["stochastic_param"],
            rounding["seed"],
        )
