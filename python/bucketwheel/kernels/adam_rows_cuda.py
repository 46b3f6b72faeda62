"""Rows on CUDA: what `rows` is on the CPU. Steps, use and factors are read by the device, so that nothing waits for it
(D16).

Under CUDA graphs a step is captured with everything that it reads by address: the step counts, the factors, and
learning rates that are tensors on the device may change between replays; which parameters are used may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.device import CPU, index_of
from bucketwheel.errors import CaptureError
from bucketwheel.kernels.adam_rows import AdamRows, native_flags, native_group
from bucketwheel.native import core

__all__ = ["AdamRowsCuda"]


class AdamRowsCuda(AdamRows):
    """The native `AdamCudaTable`. ``steps``: int64, one a parameter, on the device, counted up there."""

    def __init__(self, steps: Tensor, device: int, **rounding: Any) -> None:
        super().__init__(steps, table=core.AdamCudaTable(device), **rounding)
        self._device = device

    def begin_step(  # type: ignore[override]  # factors are on the device
        self,
        param_groups: Sequence[dict[str, Any]],
        used: Sequence[bool],
        factors: Tensor | None,
        average: float = 1.0,
    ) -> None:
        """Enqueues the counting of a step for the parameters ``used`` and the making of this step's scalars.

        ``factors``: float64, one a parameter, on the device, folded into the gradients with ``average``.
        """
        flags = native_flags(param_groups, self._amsgrad)
        on_device = [self._lr_on_device(group["lr"]) for group in param_groups]
        self._lr = on_device  # read when the step runs
        groups = [
            native_group(group, 0.0 if lr is not None else float(group["lr"]))
            for group, lr in zip(param_groups, on_device, strict=True)
        ]
        arguments = core.AdamCudaArguments(
            self.steps,
            used=bytes(used),
            factors=factors,
            lr=on_device if any(lr is not None for lr in on_device) else None,
            average=average,
            **flags,
            **self._rounding,
        )
        self.table.begin(groups, arguments)

    def step(self, first_row: int = 0, last_row: int = -1) -> None:
        """Enqueues the update of the rows [first_row, last_row) (to the end by default) with the scalars of `begin_step`."""
        self.table.step(first_row, last_row)

    def _lr_on_device(self, lr: float | Tensor) -> Tensor | None:
        """A learning rate that the device reads, as float32; None where it is a plain number (or a CPU tensor)."""
        if not isinstance(lr, Tensor):
            return None
        if index_of(lr) != CPU:
            return lr.detach().to(torch.float32).reshape(1)
        if core.is_capturing(self._device):
            raise CaptureError(
                "a learning rate is a tensor on the CPU, which replays of a CUDA graph would not read again: give one on the parameters' "
                "device, lr=torch.tensor(1e-3, device='cuda'), or a float, which stays as it is in the graph"
            )
        return None
