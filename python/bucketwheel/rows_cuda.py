"""Rows on CUDA: what `rows` is on the CPU. Steps, use and factors are read by the device, so that nothing waits for it (D16).

Under CUDA graphs a step is captured with everything that it reads by address: the step counts, the factors, and learning
rates that are tensors may change between replays; which parameters are used may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._build import native
from .rows import expect_uniform_flags

__all__ = ["AdamRowsCuda"]


class AdamRowsCuda:
    """The native `AdamCudaTable`. ``steps``: int64, one a parameter, on the device, counted up there."""

    def __init__(self, steps: Tensor, device: int, *, stochastic: bool = True, seed: int = 0) -> None:
        self.table = native().AdamCudaTable(device)
        self.steps = steps
        self._rounding: dict[str, Any] = {"stochastic": stochastic, "seed": seed}

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
        """As `AdamRows.add`, for tensors on the device."""
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
        factors: Tensor | None,
        average: float = 1.0,
    ) -> None:
        """Enqueues the counting of a step for the parameters ``used`` and the making of this step's scalars.

        ``factors``: float64, one a parameter, on the device, folded into the gradients with ``average``.
        """
        expect_uniform_flags(param_groups)
        on_device = [_lr_on_device(group["lr"]) for group in param_groups]
        self._lr = on_device  # read when the step runs
        groups = [
            native().AdamGroup(
                0.0 if lr is not None else float(group["lr"]),
                *map(float, group["betas"]),
                float(group["eps"]),
                float(group["weight_decay"]),
            )
            for group, lr in zip(param_groups, on_device, strict=True)
        ]
        arguments = native().AdamCudaArguments(
            self.steps,
            used=bytes(used),
            factors=factors,
            lr=on_device if any(lr is not None for lr in on_device) else None,
            average=average,
            decoupled=bool(param_groups[0].get("decoupled_weight_decay", True)),
            maximize=bool(param_groups[0]["maximize"]),
            **self._rounding,
        )
        self.table.begin(groups, arguments)

    def step(self, first_row: int = 0, last_row: int = -1) -> None:
        """Enqueues the update of the rows [first_row, last_row) (to the end by default) with the scalars of `begin_step`."""
        self.table.step(first_row, last_row)


def _lr_on_device(lr: float | Tensor) -> Tensor | None:
    """A learning rate that the device reads, as float32; None where it is a plain number (or a CPU tensor)."""
    if not isinstance(lr, Tensor) or not lr.is_cuda and not native().is_posing():
        return None
    return lr.detach().to(torch.float32).reshape(1)
