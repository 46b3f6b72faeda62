"""Ranks that are threads sharing one device, and a model whose gradients are given: bit for bit the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.testing import run_threads
from tests.gpu.device import DEVICE

__all__ = ["GivenGrads", "in_world", "on_cpu_ranks"]

TIMEOUT_S = 40.0


def in_world(world: int, body: Callable[[int, Any], Any], *, device: str | None = "cuda") -> list[Any]:
    """``body(rank, communicator)`` in ``world`` threads; the results by rank. World 0: ``body(0, None)`` here."""
    if world == 0:
        return [body(0, None)]
    places = LocalWorld(world)

    def rank_main(rank: int, _: int) -> Any:
        # A backward in torch's one thread of the device could wait there for a peer whose backward comes after it.
        with torch.autograd.set_multithreading_enabled(False):
            comm = Communicator(places.rank(rank), timeout_s=TIMEOUT_S / 2, device=device)
            try:
                return body(rank, comm)
            finally:
                comm.close(5.0)

    return run_threads(rank_main, world, timeout_s=TIMEOUT_S)


def on_cpu_ranks(world: int, body: Callable[[int, Any], Any]) -> list[Any]:
    """The same on CPU tensors, for expected values."""
    with DEVICE.cpu():
        return in_world(world, body, device=None)


class GivenGrads(torch.nn.Module):
    """Parameters whose gradient is what `backward` is given, exactly: the loss is the sum of their products."""

    SHAPES = [(64, 37), (64,), (128, 64), (5, 64), (), (3, 0), (1000,)]

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        start = self.draw(dtype, 10_000 + seed)
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(x.to(device, copy=True)) for x in start])

    @classmethod
    def draw(cls, dtype: torch.dtype, seed: int) -> list[Tensor]:
        """Random tensors of the parameters' shapes, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in cls.SHAPES]

    def draw_here(self, seed: int) -> list[Tensor]:
        first = self.weights[0]
        return [x.to(first.device) for x in self.draw(first.dtype, seed)]

    def forward(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.weights, grads, strict=True)]).sum()
