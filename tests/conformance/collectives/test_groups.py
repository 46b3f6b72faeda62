"""Groups that are not the whole world, and several optimizers in one script (a GAN)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, make_params

pytestmark = pytest.mark.dist

# --- sub-groups -------------------------------------------------------------------------------------------------------


def steps_of(group: Any, rank: int, world: int, steps: int, seed: int) -> list[Tensor]:
    params = make_params(seed=seed)
    opt = ShardedAdamW(params, lr=0.05, process_group=group, **TINY)
    run = Run(opt, params, rank, world)
    for step in range(steps):
        run.backward(100 * seed + step)
        run.clip(0.5)
        run.step()
    opt.close()
    return [p.detach().clone() for p in params] + run.seen


def local_twin(steps: int, seed: int) -> list[Tensor]:
    """One process with the mean of the gradients."""
    return steps_of(None, 0, 1, steps, seed)


def split_off(rank: int, world: int) -> list[Tensor]:
    """Groups {3, 1} and {0, 2}, in this order; they make different numbers of steps."""
    with Communicator(name="all") as whole:
        part = whole.split(color=rank % 2, key=-rank)
        with part:
            assert part.size == 2 and part.rank == (1 if rank < 2 else 0)
            return steps_of(part, part.rank, 2, 3 + rank % 2, seed=rank % 2)


def in_torch_groups(rank: int, world: int) -> list[Tensor] | str:
    """{0, 2} and {3}; rank 1 is in none, and group {3} has nobody to talk to."""
    groups = [dist.new_group([0, 2]), dist.new_group([3])]
    group = groups[rank // 3]
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in process_group") as raised:
            steps_of(group, 0, 1, 1, 0)
        return str(raised.value)
    return steps_of(group, rank // 2 if rank < 3 else 0, 2 if rank < 3 else 1, 2 + rank // 3, rank // 3)


def test_parts_of_a_communicator_train_by_themselves(rank_pool: Callable[[int], Any]) -> None:
    for rank, got in enumerate(rank_pool(4).run(split_off)):
        assert_bitwise_equal(got, local_twin(3 + rank % 2, rank % 2), f"rank {rank}")


def test_process_groups_train_by_themselves(rank_pool: Callable[[int], Any]) -> None:
    got = rank_pool(4).run(in_torch_groups)
    for rank in (0, 2, 3):
        assert_bitwise_equal(got[rank], local_twin(2 + rank // 3, rank // 3), f"rank {rank}")
    assert "dist.new_group" in got[1]


# --- a GAN ------------------------------------------------------------------------------------------------------------


class Gan:
    """Two models, an optimizer for each, and the usual loop: the critic steps more often than the generator."""

    def __init__(self, make_optimizer: Callable[[list[nn.Parameter]], Any]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        for p in (*self.generator.parameters(), *self.critic.parameters()):
            p.data = torch.randn(p.shape, generator=generator) / 4
        self.g_opt = make_optimizer(list(self.generator.parameters()))
        self.c_opt = make_optimizer(list(self.critic.parameters()))
        self.norms: list[Tensor] = []

    def critic_loss(self, rank: int, step: int) -> Tensor:
        real, noise = _batch(rank, step, 6), _batch(rank, 1000 + step, 4)
        fake = self.generator(noise).detach()
        return nn.functional.softplus(self.critic(fake)).mean() + nn.functional.softplus(-self.critic(real)).mean()

    def generator_loss(self, rank: int, step: int) -> Tensor:
        return nn.functional.softplus(-self.critic(self.generator(_batch(rank, 2000 + step, 4)))).mean()

    def train(self, backward: Callable[[Callable[[int, int], Tensor], int], None]) -> list[Tensor]:
        for step in range(6):
            backward(self.critic_loss, step)
            self.norms.append(self.c_opt.clip_grad_norm_(0.05).clone())
            self.c_opt.step()
            self.c_opt.zero_grad()
            if step % 2:
                backward(self.generator_loss, step)  # reaches the critic's parameters too
                self.norms.append(self.g_opt.clip_grad_norm_(0.02).clone())
                self.g_opt.step()
                self.g_opt.zero_grad()
                self.c_opt.zero_grad()  # void: its reductions are on their way
        for opt in (self.g_opt, self.c_opt):
            opt.param_sync()
        models = (self.generator, self.critic)
        return [p.detach().clone() for model in models for p in model.parameters()] + self.norms


def _batch(rank: int, step: int, features: int) -> Tensor:
    return torch.randn(8, features, generator=torch.Generator().manual_seed(31 * step + rank))


def gan_twin(world: int, averages: bool) -> list[Tensor]:
    """One process that adds the ranks' gradients in their order, which is how they are added in transit."""
    gan = Gan(lambda params: ShardedAdamW(params, lr=0.01))

    def backward(loss: Callable[[int, int], Tensor], step: int) -> None:
        for rank in range(world):
            loss(rank, step).backward()
        for p in (*gan.generator.parameters(), *gan.critic.parameters()):
            if p.grad is not None and averages:
                p.grad /= world

    return gan.train(backward)


def gan_in_processes(rank: int, world: int, options: dict[str, Any]) -> list[Tensor]:
    gan = Gan(lambda params: ShardedAdamW(params, lr=0.01, **options))  # by the default process group, twice
    if options.get("overlap_param_sync"):
        gan.g_opt.prefetch_params(gan.generator)
        gan.c_opt.prefetch_params(gan.critic)
    out = gan.train(lambda loss, step: loss(rank, step).backward())
    gan.g_opt.close()
    gan.c_opt.close()
    return out


@pytest.mark.parametrize(
    "options",
    [TINY, {"bucket_cap_mb": 1e-3, "overlap_param_sync": True}, {**TINY, "gradient_average": False}],
    ids=str,
)
def test_a_gan_has_the_bits_of_one_process(rank_pool: Callable[[int], Any], options: dict[str, Any]) -> None:
    expected = gan_twin(2, options.get("gradient_average", True))
    for rank, got in enumerate(rank_pool(2).run(gan_in_processes, options)):
        assert_bitwise_equal(got, expected, f"rank {rank}")
