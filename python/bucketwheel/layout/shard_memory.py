"""Shard memory: where this rank's parameters, states and gradients lie, for what keeps a copy of them.

A *space* is all of one dtype. Its elements have one order, in which every tensor of it lies: the pieces of each, one
behind the other, make the space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bucketwheel.layout.flat_params import ParamInfo


@dataclass(frozen=True)
class ShardSpace:
    """``pieces``: 1-D tensors, of "param" and of each state. ``rows``: the parts of parameters, each with the parameter's index,
    the part's begin in the parameter and in the space, and its number of elements. ``grad``: the gradient shard, 1-D; None:
    gradients come with the step (`StepInputs`)."""

    numel: int
    pieces: dict[str, list[Tensor]]
    rows: list[tuple[int, int, int, int]]
    grad_dtype: torch.dtype
    grad: Tensor | None = None


@dataclass(frozen=True)
class ShardMemory:
    """``steps``: int64, one a parameter. ``written``: tensors to which torch alone writes outside of the kernel: their version
    counters show edits."""

    spaces: list[ShardSpace]
    infos: Sequence[ParamInfo]
    steps: Tensor
    written: list[Tensor]
    amsgrad: bool
    resync: bool


@dataclass(frozen=True)
class StepInputs:
    """What the Adam kernel gets in one step, as `AdamRows.begin_step` takes it. ``grads``: of each parameter, in its memory
    order, None where it has none; None altogether where they are in the spaces."""

    param_groups: Sequence[dict[str, Any]]
    used: Sequence[bool] | bytes
    factors: Tensor | None
    average: float
    grads: Sequence[Tensor | None] | None = None
