"""Factors of gradients on the device: reset all at once, and one beside others that stay."""

from __future__ import annotations

from typing import Any

import torch
from dist.test_optim_cuda import batch, in_world, model_of
from torch.utils._python_dispatch import TorchDispatchMode

import bucketwheel as bw
from bucketwheel.comm import Communicator
from bucketwheel.place import LocalWorld
from tests.simulated_cuda import posing


class FillsOf(TorchDispatchMode):
    """Counts what torch writes into the memory of a tensor, by operation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._storage = tensor.untyped_storage().data_ptr()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("_") and args[0].untyped_storage().data_ptr() == self._storage:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_factors_of_many_parameters_are_reset_at_once() -> None:
    with posing(), Communicator(LocalWorld(1).rank(0), device="cuda") as comm:
        params = [torch.nn.Parameter(torch.ones(5)) for _ in range(40)]
        opt = bw.ShardedAdamW(params, process_group=comm)
        for step in range(3):
            with FillsOf(opt._engine.reduced._on_device) as fills:
                torch.stack([(p * p).sum() for p in params]).sum().backward()
                opt.clip_grad_norm_(0.1)
                opt.step()
                opt.zero_grad()
            assert fills.found == ([] if step == 0 else ["fill_"])
        opt.close()


def test_a_factor_is_reset_beside_others_that_stay() -> None:
    """All gradients are clipped by norm, then one by value, which takes its factor: the CPU's bits."""

    def clipped(rank: int, comm: Communicator) -> list[torch.Tensor]:
        model = model_of()
        params = list(model.parameters())
        opt = bw.ShardedAdamW(params, lr=1e-2, process_group=comm)
        for step in range(2):
            model(batch(rank, step, torch.float32)).square().mean().backward()
            opt.clip_grad_norm_(0.3)
            torch.nn.utils.clip_grad_value_(params[:1], 1e-3)
            opt.step()
            opt.zero_grad()
        out = [p.detach().clone() for p in params]
        opt.close()
        return out

    expected = in_world(2, False, clipped)
    for ours, theirs in zip(in_world(2, True, clipped), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
