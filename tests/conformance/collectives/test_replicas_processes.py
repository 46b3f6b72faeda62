"""HSDP whose ranks are processes: by torch's process groups over shared memory, and over NCCL, the library being the fake one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketwheel.comm import nccl
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.collectives.test_replicas_cuda import CUDA_CASES, trained_with_replicas
from tests.conformance.optimizer.test_optim_cuda import model_of, trained
from tests.conformance.optimizer.test_optim_nccl import expect_free_running_steps
from tests.support.optim_twins import TINY, Run, make_params
from tests.support.replica_ranks import on_flat, torch_groups, windows, with_replicas
from tests.support.simulated_nccl import simulated


def by_process_groups(rank: int, world: int, shards: int) -> list[Tensor]:
    params = make_params(seed=rank)
    opt = ShardedAdamW(params, lr=0.02, weight_decay=0.1, **torch_groups(rank, world, shards), **TINY)
    run = Run(opt, params, rank, world)
    windows(run)
    opt.param_sync()
    opt.close()
    return [p.detach().clone() for p in params] + run.seen


@pytest.mark.dist
@pytest.mark.parametrize("shards", [2, 1, 4])
def test_process_groups_of_one_host(rank_pool: Callable[[int], Any], shards: int) -> None:
    expected = on_flat(4, windows, **TINY)
    for rank, got in enumerate(rank_pool(4).run(by_process_groups, shards)):
        assert_bitwise_equal(got, expected[0][0] + expected[0][1], f"rank {rank}")


def over_nccl(rank: int, world: int, dtype: torch.dtype, clip: str, options: dict[str, Any]) -> list[Tensor]:
    with simulated() as script:
        groups = torch_groups(rank, world, 2)
        shard_gathers, shard = Communicator.pair(groups["process_group"], timeout_s=30)
        column_gathers, column = Communicator.pair(groups["replicate_group"], timeout_s=30)
        with shard_gathers, shard, column_gathers, column:
            out = trained(rank, shard, dtype, clip, replicate_group=column, **options)
        assert script.fake_nccl_open_groups() == 0
        return out


@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "clip", "options"), [CUDA_CASES[0], CUDA_CASES[1], CUDA_CASES[3]], ids=str)
def test_over_nccl(rank_pool: Callable[[int], Any], dtype: torch.dtype, clip: str, options: dict[str, Any]) -> None:
    expected = with_replicas(2, 2, trained_with_replicas, dtype, clip, options)
    for rank, got in enumerate(rank_pool(4).run(over_nccl, dtype, clip, options)):
        assert_bitwise_equal(got, expected[rank], f"rank {rank}")


def free_running_over_nccl(rank: int, world: int, takes_turns: bool) -> None:
    """By torch's process groups."""
    with simulated() as script, pytest.MonkeyPatch.context() as patch:
        before = script.fake_nccl_live_comms()
        if takes_turns:
            patch.setattr(nccl, "_is_launch_order_kept", False)
            patch.setattr(warnings, "warn", lambda *_, **__: None)
        model = model_of()
        groups = torch_groups(rank, world, 2)
        opt = ShardedAdamW(model.parameters(), lr=1e-2, bucket_cap_mb=0.004, max_inflight_buckets=1, **groups)
        assert opt._engine.reducer._takes_turns == takes_turns
        expect_free_running_steps(model, opt, rank)
        opt.close()
        assert script.fake_nccl_live_comms() == before, "close() ends all four communicators"


@pytest.mark.dist
@pytest.mark.parametrize("takes_turns", [False, True])
def test_over_nccl_backward_and_step_wait_for_nothing(rank_pool: Callable[[int], Any], takes_turns: bool) -> None:
    rank_pool(4).run(free_running_over_nccl, takes_turns)
