"""ShardedAdamW against the local optimizer, bit for bit: dyadic gradients make every order of summation exact."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import dyadic, loss_of, make_params, run_local, share
from tests.support.requirements import slow_case


def backward(opt: ShardedAdamW, params: list[Parameter], grads: list[Tensor], how: str) -> None:
    """The same total gradient in different ways."""
    if how == "once":
        loss_of(params, grads).backward()
        return
    half = [g / 2 for g in grads]
    for micro in range(2):
        sync = opt.no_sync() if how == "no_sync" and micro == 0 else contextlib.nullcontext()
        with sync:
            loss_of(params, half).backward()
        if how == "grad_sync":
            opt.grad_sync()


def train(comm: Communicator | None, how: str, clip: float | None, steps: int = 4, **options: Any) -> list[Tensor]:
    rank, world = (comm.rank, comm.size) if comm else (0, 1)
    params = make_params()
    groups = [{"params": params[:4], "weight_decay": 0.0}, {"params": params[4:], "lr": 0.03}]
    opt = ShardedAdamW(groups, lr=0.01, weight_decay=0.1, process_group=comm, **options)
    for step in range(steps):
        backward(opt, params, share(dyadic(params, step), rank, world), how)
        if clip is not None:
            opt.clip_grad_norm_(clip)
        opt.step()
        opt.zero_grad()
    opt.param_sync()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("world", [1, slow_case(2), 3, slow_case(4)])
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 3e-3, 8.0])
def test_bitwise_equal_at_any_world_bucket_overlap_and_accumulation(world: int, bucket_cap_mb: float) -> None:
    expected = train(None, "once", None)
    for how, overlap, late_params in itertools.product(
        ["once", "no_sync", "twice", "grad_sync"], [True, False], [True, False]
    ):
        options = dict(bucket_cap_mb=bucket_cap_mb, overlap_grad_sync=overlap, overlap_param_sync=late_params)
        for rank, params in enumerate(run_local(world, functools.partial(train, how=how, clip=None, **options))):
            assert_bitwise_equal(params, expected, f"rank {rank} of {world}, {how}, {options}")
