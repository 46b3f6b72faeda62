"""One flow of stock code on gradients, run sharded and unsharded: everything is dyadic and compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import dyadic, loss_of, run_local, share

SHAPES = [(5, 7), (3,), (), (33, 12), (1, 1), (257,), (4, 3, 2, 2)]  # torch refuses the inf norm of an empty tensor


def make_params() -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


class Run:
    """One rank of a training: its optimizer, its backward, and what a flow has to say about it."""

    def __init__(self, comm: Communicator | None, **options: Any) -> None:
        self.comm = comm
        self.rank, self.world = (comm.rank, comm.size) if comm else (0, 1)
        self.params = make_params()
        self.opt = ShardedAdamW(
            self.params, lr=0.01, weight_decay=0.1, process_group=comm, bucket_cap_mb=1e-3, **options
        )
        self.seen: list[Any] = []
        self.step = 0

    def loss(self, used: Callable[[int], bool] = lambda i: True) -> Tensor:
        return loss_of(self.params, share(dyadic(self.params, self.step), self.rank, self.world), used)

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def result(self) -> Any:
        return self.seen, [p.detach().clone() for p in self.params], self.opt.state_dict()["state"][0]["step"]


Flow = Callable[[Run], None]


def run_flow(comm: Communicator | None, flow: Flow, steps: int = 3, **options: Any) -> Any:
    run = Run(comm, **options)
    for run.step in range(steps):
        flow(run)
        run.opt.zero_grad()
    return run.result()


def expect_equal_to_unsharded(flow: Flow, worlds: tuple[int, ...] = (1, 2, 4), **options: Any) -> Any:
    expected = run_flow(None, flow)
    for world in worlds:
        for rank, result in enumerate(run_local(world, lambda comm: run_flow(comm, flow, **options))):
            assert_bitwise_equal(result, expected, f"rank {rank} of {world}: ")
    return expected


def scaler_step(run: Run, scaler: torch.amp.GradScaler, how: str) -> None:
    loss = run.loss()
    if run.step == 2:
        # One element of one parameter, on the last rank; its part of the shards lies on the first, because it is flat
        # memory order that is sharded.
        loss = loss + (run.params[0][0, 0] * math.inf if run.rank == run.world - 1 else 0.0)
    before = [p.detach().clone() for p in run.params]
    scaler.scale(loss).backward()
    if how != "step":
        scaler.unscale_(run.opt)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(run.opt)
    if how == "clip":
        run.seen.append(clip_grad_norm_(run.params, 0.25))
    if how == "own clip":
        run.seen.append(run.opt.clip_grad_norm_(0.25))
    scaler.step(run.opt)
    scaler.update()
    is_skipped = scaler.is_enabled() and run.step == 2
    run.seen.append(scaler.get_scale())
    for p, old in zip(run.params, before, strict=True):
        assert torch.equal(p, old) == is_skipped
