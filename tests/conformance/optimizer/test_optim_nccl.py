"""ShardedAdamW over the nccl backend beside the suite: ranks are processes, the library is the fake one, the device simulated."""

from __future__ import annotations

import pytest
import torch

import bucketwheel as bw
from tests.conformance.optimizer.test_optim_cuda import batch, in_world, model_of, trained
from tests.support.bits import assert_bitwise_equal
from tests.support.simulated_cuda import Calls
from tests.support.simulated_nccl import simulated

pytestmark = pytest.mark.dist


def by_process_group(rank: int, world: int) -> list[torch.Tensor]:
    """What a user writes: parameters on CUDA, the default process group, nothing else."""
    with simulated() as script:
        before = script.fake_nccl_live_comms()
        out = trained(rank, None, torch.float32, "own")
        assert script.fake_nccl_live_comms() == before, "close() ends both communicators"
        return out


@pytest.mark.parametrize("world", [1, 4])
def test_by_the_default_process_group(rank_pool, world):
    expected = in_world(world, False, lambda rank, comm: trained(rank, comm, torch.float32, "own"))
    got = rank_pool(world).run(by_process_group)
    for rank in range(world):
        for a, b in zip(got[rank][: 3 + 5], expected[rank][: 3 + 5], strict=True):  # norms and parameters
            assert_bitwise_equal(a, b, f"rank {rank}")


def expect_free_running_steps(model: torch.nn.Module, opt: bw.ShardedAdamW, rank: int) -> None:
    """Nothing blocks the host or allocates after the first steps."""
    for step in range(6):
        calls = Calls()
        model(batch(rank, step, torch.float32)).square().mean().backward()
        opt.clip_grad_norm_(0.3)
        opt.step()
        opt.zero_grad()
        if step >= 4:
            calls.expect_free_running(may_get_ahead=True)


def free_running(rank: int, world: int) -> None:
    with simulated() as script:
        model = model_of()
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2, bucket_cap_mb=0.004)
        expect_free_running_steps(model, opt, rank)
        assert script.fake_nccl_open_groups() == 0
        opt.close()


@pytest.mark.parametrize("world", [3])
def test_backward_and_step_wait_for_nothing(rank_pool, world):
    rank_pool(world).run(free_running)
