"""One flow of stock code on gradients, run sharded and unsharded: everything is dyadic and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
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
