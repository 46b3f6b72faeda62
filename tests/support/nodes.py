"""Nodes of autograd graphs that go wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Stop(Exception):  # noqa: N818 (no error)
    pass


def stop(_: Tensor) -> None:
    raise Stop


class Node(torch.autograd.Function):
    """Its backward calls a function, and gives its gradient, gives none or fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str, act: Callable[[], None] | None) -> Tensor:
        ctx.how, ctx.act = how, act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        if ctx.act is not None:
            with torch.enable_grad():
                ctx.act()
        if ctx.how == "fails":
            raise Stop
        return (None if ctx.how == "none" else grad), None, None
