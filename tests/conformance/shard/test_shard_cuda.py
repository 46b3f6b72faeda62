"""Sharded models on CUDA, simulated: the bits of the CPU, over local ranks and the fake NCCL; steps that neither wait nor allocate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.conformance.optimizer.test_optim_cuda import in_world
from tests.support.shard_models import Block, Gpt, lm_loss
from tests.support.shard_twins import whole_params
from tests.support.simulated_cuda import Calls
from tests.support.simulated_nccl import simulated

OPTIONS: list[dict[str, Any]] = [
    {},
    {"prefetch": 0},
    {"prefetch": 2, "reshard": False},
    {"param_dtype": torch.bfloat16},
]


def trained(rank: int, comm: Communicator | None, made: Gpt, count: int = 4, **options: Any) -> list[Tensor]:
    model: Any = bw.shard(copy.deepcopy(made), (Block,), group=comm, **options)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    out: list[Tensor] = []
    for step in range(count):
        calls = Calls()
        loss = lm_loss(model, step + 100 * rank)
        loss.backward()
        out += [loss.detach(), opt.clip_grad_norm_(0.3).clone()]
        opt.step()
        opt.zero_grad()
        if step >= 4:
            calls.expect_free_running(may_get_ahead=True)
    out += whole_params(model)
    opt.close()
    return out


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_bits_of_the_cpu(world: int, options: dict[str, Any]) -> None:
    made = Gpt()
    body = lambda rank, comm: trained(rank, comm, made, **options)  # noqa: E731
    for got, expected in zip(in_world(world, True, body), in_world(world, False, body), strict=True):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


def _on_nccl(rank: int, world: int, made: Gpt) -> list[Tensor]:
    with simulated():
        return trained(rank, None, made, 7)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_over_nccl_steps_wait_for_nothing(rank_pool: Any, world: int) -> None:
    made = Gpt()
    expected = in_world(world, False, lambda rank, comm: trained(rank, comm, made, 7))
    for got, twin in zip(rank_pool(world).run(_on_nccl, made), expected, strict=True):
        for a, b in zip(got, twin, strict=True):
            assert torch.equal(a, b)
