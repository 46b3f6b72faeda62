"""The kernels of `ops` on CUDA tensors. Everything is enqueued in torch's current stream; nothing waits for the device."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.device import CPU, index_of, torch_device, upload
from bucketwheel.native import core

__all__ = ["adam_step_cuda", "device_of", "sums_of_squares_cuda"]


def device_of(tensors: Sequence[Any]) -> int:
    """The native device of the first tensor of a list; the CPU's for an empty list, and for what is no tensor."""
    return index_of(tensors[0]) if len(tensors) and isinstance(tensors[0], Tensor) else CPU


def sums_of_squares_cuda(device: int, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of squares of each tensor (float64, [n]) and of all (float64, [1])."""
    options: Any = {"dtype": torch.float64, "device": torch_device(device)}
    sums, total = torch.empty(len(tensors), **options), torch.zeros(1, **options)
    core.sumsq_cuda(device, tensors, sums, total)
    return sums, total


def adam_step_cuda(
    device: int,
    lists: Sequence[Sequence[Tensor | None] | None],
    steps: int | Sequence[int | Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float | Tensor,
    noop: Tensor | None,
    param_ids: Sequence[int] | None,
    **flags: Any,
) -> None:
    """`ops.adam_step` on one device. ``lists``: parameters, gradients, m, v, and the optional ones in its order."""
    params = lists[0]
    assert params is not None
    count = _StepCounts(steps, len(params), device)
    if noop is not None and index_of(noop) == CPU:
        if noop.item() != 0:
            return
        noop = None
    on_device: Tensor | None = None
    if noop is not None:
        if count.on_host:
            raise ValueError("steps on the cpu cannot follow a noop that is on the device: put them on the device too")
        on_device = (noop != 0).to(torch.float32).reshape(1)
    factors = None
    average = 1.0
    if isinstance(grad_scale, Tensor):
        factors = (
            grad_scale.detach().to(torch_device(device), torch.float64).reshape(1).expand(len(params)).contiguous()
        )
    else:
        average = grad_scale
    lr_on_device = isinstance(lr, Tensor) and index_of(lr) == device
    group = core.AdamGroup(0.0 if lr_on_device else float(lr), betas[0], betas[1], eps, weight_decay)
    arguments = core.AdamCudaArguments(
        count.taken,
        factors=factors,
        noop=on_device,
        lr=[lr.detach().to(torch.float32).reshape(1)] if isinstance(lr, Tensor) and lr_on_device else None,
        average=average,
        **flags,
    )
    core.adam_step_cuda(device, *lists, param_ids, group, arguments)  # type: ignore[arg-type, call-arg]
    count.advance(on_device)


class _StepCounts:
    """The steps of one call: ``taken``, int64 on the device, holds the steps taken so far; the kernel counts it up."""

    def __init__(self, steps: int | Sequence[int | Tensor], count: int, device: int) -> None:
        self.on_host: list[Tensor] = []
        self._on_device: list[Tensor] = []
        options: Any = {"dtype": torch.int64, "device": torch_device(device)}
        if isinstance(steps, int):
            if steps < 1:
                raise ValueError(f"steps is {steps}: steps count from 1")
            self.taken = torch.full((count,), steps - 1, **options)
            return
        if len(steps) != count:
            raise ValueError(f"steps has {len(steps)} tensors, params has {count}")
        known = array.array("q", [0] * count)
        places = []
        for index, step in enumerate(steps):
            if isinstance(step, Tensor):
                if step.numel() != 1 or step.dtype not in (torch.float32, torch.int64):
                    raise ValueError(
                        f"steps[{index}] is {step.dtype} of shape {tuple(step.shape)}, expected one float32 or int64"
                    )
                if index_of(step) == device:
                    self._on_device.append(step)
                    places.append(index)
                    continue
                self.on_host.append(step)
            known[index] = int(step) if isinstance(step, Tensor) else step - 1
            if known[index] < 0:
                raise ValueError(f"steps[{index}] is {step}: steps count from 1")
        if len(places) == count and count:
            self.taken = torch.stack([step.detach().reshape(()) for step in self._on_device]).to(torch.int64)
            return
        self.taken = torch.empty(count, **options)
        upload(self.taken, known.tobytes())
        for place, step in zip(places, self._on_device, strict=True):
            self.taken[place].copy_(step.detach().reshape(()))

    def advance(self, noop: Tensor | None) -> None:
        """Counts the caller's tensors up, each once, unless ``noop`` is not zero when this runs."""
        with torch.no_grad():
            for step in {id(step): step for step in self.on_host}.values():
                step += 1
            unique = list({id(step): step for step in self._on_device}.values())
            if unique and noop is None:
                torch._foreach_add_(unique, 1)
            elif unique and noop is not None:
                by_dtype: dict[torch.dtype, Tensor] = {}
                for step in unique:
                    by_dtype.setdefault(step.dtype, (1 - noop).to(step.dtype).reshape(()))
                    step.add_(by_dtype[step.dtype])
