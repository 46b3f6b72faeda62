"""Whole states from and to what shards otherwise: ZeroRedundancyOptimizer, and FSDP2 with torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from bucketwheel.optim.module_sync import sync_module
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.optim_twins import TINY, dyadic, loss_of, make_params, share

pytestmark = [pytest.mark.dist, pytest.mark.timeout_s(200)]
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
TOLERANCE = {"rtol": 2e-6, "atol": 1e-7}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def copies(params: list[Any]) -> list[nn.Parameter]:
    fresh = make_params(seed=7)
    for p, value in zip(fresh, params, strict=True):
        p.data.copy_(value.data)
    return fresh


def grouped(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:4], "weight_decay": 0.0}, {"params": params[4:], "lr": 0.03}]


def zero_and_ours(rank: int, world: int) -> None:
    def steps(opt: Any, params: list[Any], seeds: range) -> None:
        for seed in seeds:
            grads = dyadic(params, seed)  # the mean, on every rank, as DDP leaves it
            loss_of(params, share(grads, rank, world) if isinstance(opt, ShardedAdamW) else grads).backward()
            opt.step()
            opt.zero_grad()

    theirs = make_params()
    zero = ZeroRedundancyOptimizer(grouped(theirs), optimizer_class=torch.optim.AdamW, **OPTIONS)
    steps(zero, theirs, range(3))
    zero.consolidate_state_dict(to=0)
    params = copies(theirs)
    with ShardedAdamW(grouped(params), **OPTIONS, **TINY) as opt:
        opt.load_full_state_dict(zero.state_dict() if rank == 0 else None, chunk_bytes=500)
        assert opt.param_groups[0]["weight_decay"] == 0.0
        steps(zero, theirs, range(3, 6))
        steps(opt, params, range(3, 6))
        torch.testing.assert_close(params, theirs, **TOLERANCE)
        again = copies(params)
        zero = ZeroRedundancyOptimizer(grouped(again), optimizer_class=torch.optim.AdamW, lr=9.0)
        zero.load_state_dict(opt.full_state_dict(None))
        steps(zero, again, range(6, 9))
        steps(opt, params, range(6, 9))
        torch.testing.assert_close(again, params, **TOLERANCE)


def test_zero_redundancy_optimizer(rank_pool: Callable[[int], Any]) -> None:
    rank_pool(2).run(zero_and_ours, timeout_s=100)


def new_model(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5, bias=False), nn.Linear(5, 3)).to(dtype)
    model[2].bias.requires_grad_(False)
    return model


def model_steps(model: nn.Module, opt: Any, seeds: range) -> None:
    for seed in seeds:
        x = torch.ones(2, 7, dtype=next(model.parameters()).dtype) * (seed + 1)
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()


def by_fsdp(dtype: torch.dtype, rank: int, **options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    model = new_model(dtype, seed=rank)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **options)


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    """On rank 0."""
    return {name: value.clone() for name, value in get_model_state_dict(model, options=WHOLE).items()}


def fsdp_and_ours(rank: int, world: int) -> None:
    theirs, stock = by_fsdp(torch.float32, rank, **OPTIONS)
    set_model_state_dict(theirs, new_model(torch.float32).state_dict(), options=FROM_FIRST)
    model_steps(theirs, stock, range(3))
    saved, middle = get_optimizer_state_dict(theirs, stock, options=WHOLE), whole_values(theirs)
    model = new_model(torch.float32, seed=rank + 5)
    if rank == 0:
        model.load_state_dict(middle)
    sync_module(model)  # what rank 0 has loaded
    with ShardedAdamW(model.named_parameters(), lr=7.0, **TINY) as opt:
        opt.load_full_state_dict(saved if rank == 0 else None, chunk_bytes=40)
        assert opt.param_groups[0]["lr"] == 0.01
        model_steps(theirs, stock, range(3, 6))
        model_steps(model, opt, range(3, 6))
        ends = whole_values(theirs)
        if rank == 0:
            torch.testing.assert_close(model.state_dict(), ends, **TOLERANCE)
        theirs, stock = by_fsdp(torch.float32, rank, lr=7.0)
        set_model_state_dict(theirs, model.state_dict() if rank == 0 else {}, options=FROM_FIRST)
        set_optimizer_state_dict(theirs, stock, opt.full_state_dict(model=model, chunk_bytes=40), options=FROM_FIRST)
        assert stock.param_groups[0]["lr"] == 0.01
        model_steps(theirs, stock, range(6, 9))
        model_steps(model, opt, range(6, 9))
        ends = whole_values(theirs)
        if rank == 0:
            torch.testing.assert_close(model.state_dict(), ends, **TOLERANCE)


def test_fsdp2(rank_pool: Callable[[int], Any]) -> None:
    rank_pool(2).run(fsdp_and_ours, timeout_s=100)
