"""Bucket: one contiguous [world x shard] buffer of gradients, as the native window gets to know it; and which tensors can be
gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bucketwheel.layout.flat_params import ParamInfo, expect_same_memory_kind


@dataclass(frozen=True)
class Part:
    """Elements [begin, begin + numel) of a bucket hold the elements of ``param`` from ``param_begin`` on."""

    param: int
    begin: int
    param_begin: int
    numel: int


@dataclass(frozen=True)
class GradBucket:
    """``accumulator``: the native `ShardAccumulator` (or `ShardAccumulatorCuda`) over this rank's part of the gradient shard,
    of ``shard_numel`` elements, which the reduce-scatter feeds."""

    index: int
    numel: int
    dtype: torch.dtype
    parts: Sequence[Part]
    accumulator: Any
    shard_numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @functools.cached_property
    def params(self) -> list[int]:
        return [part.param for part in self.parts]

    def to_native(self) -> tuple[int, str, Any, int, list[list[int]]]:
        parts = [[part.param, part.begin, part.param_begin, part.numel] for part in self.parts]
        return self.numel, str(self.dtype).removeprefix("torch."), self.accumulator, self.shard_numel, parts


def expect_gradient_of(info: ParamInfo, grad: Tensor) -> None:
    """RuntimeError naming the parameter if ``grad`` is sparse, of another shape, or of a dtype that a placeholder
    cannot stand for, as where the model was converted."""
    if (grad.dtype, grad.device) != (info.dtype, info.device):
        expect_same_memory_kind(info, info.param.shape)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"sparse gradients are not supported (parameter {info.name!r}); use a dense embedding or torch's SparseAdam"
        )
    if grad.shape != info.param.shape:
        raise RuntimeError(
            f"the gradient of {info.name!r} has shape {tuple(grad.shape)}, the parameter {tuple(info.param.shape)}"
        )
    if grad.dtype != info.dtype and info.param.grad_dtype is not None:
        raise RuntimeError(
            f"parameter {info.name!r} has grad_dtype={info.param.grad_dtype}, so its placeholder of "
            f"{info.dtype} cannot be its p.grad; set p.grad_dtype = None, which lets gradients have any dtype"
        )


def in_memory_order(grad: Tensor, info: ParamInfo) -> Tensor:
    """``grad`` as one dimension, its elements in the order of the parameter's place in flat memory; with memory of its own
    where torch's has none, or a view has other values than its memory."""
    if grad.dim() == 1 and grad.numel() == info.param.numel() and info.param.dim() != 1:
        return grad  # it is
    if (
        (grad.stride() != info.stride and grad.numel() > 1)
        or type(grad) is not Tensor
        or grad.is_neg()
        or grad._is_zerotensor()
    ):
        grad = torch.empty_strided(grad.shape, info.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
    return grad.detach().as_strided((grad.numel(),), (1,))
