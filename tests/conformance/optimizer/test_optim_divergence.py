"""Ranks that do not do the same: other branches, other orders, other numbers of backwards; and what they must not do."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import RankFailed, assert_bitwise_equal
from tests.support.optim_twins import (
    TINY,
    WORLDS,
    dyadic,
    loss_of,
    make_params,
    run_local,
)

Loss = Callable[[nn.Module, int, int], Tensor | None]  # (model, rank, step): None is no backward


def train_as_float64(make_model: Callable[[], nn.Module], loss: Loss, world: int, steps: int = 8, **options) -> None:
    """Sharded ranks against AdamW in float64 on the mean of their gradients; bitwise the same parameters on all ranks."""
    torch.manual_seed(0)
    reference = make_model().double()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(steps):
        for rank in range(world):
            value = loss(reference, rank, step)
            if value is not None:
                (value / world).backward()
        theirs.step()
        theirs.zero_grad()

    torch.manual_seed(0)
    initial = make_model().state_dict()

    def body(comm: Communicator) -> list[Tensor]:
        model = make_model()
        model.load_state_dict(initial)
        opt = ShardedAdamW(model.parameters(), lr=0.02, weight_decay=0.1, process_group=comm, **options)
        opt.prefetch_params(model)
        for step in range(steps):
            value = loss(model, comm.rank, step)
            if value is not None:
                value.backward()
            opt.step()
            opt.zero_grad()
        opt.param_sync()
        return [p.detach().clone() for p in model.parameters()]

    ranks = run_local(world, body)
    for params in ranks[1:]:
        assert_bitwise_equal(params, ranks[0])
    for (name, p), q in zip(reference.named_parameters(), ranks[0], strict=True):
        torch.testing.assert_close(q.double(), p, rtol=1e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


def inputs(rank: int, step: int, like: Tensor) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(97 * step + rank)).to(like.dtype)


class Branches(nn.Module):
    """A trunk, branches that a rank applies in any order or not at all, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.head = nn.Linear(8, 3)
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        x = torch.tanh(self.trunk(x))
        for i in order:
            x = x + torch.tanh(self.branches[i](x))
        return self.head(x).square().mean()


def run_branches(order_of: Callable[[int, int], list[int]]) -> Loss:
    return lambda model, rank, step: model(inputs(rank, step, model.head.weight), order_of(rank, step))


@pytest.mark.parametrize(
    "options", [TINY, {"bucket_cap_mb": 4e-4, "overlap_param_sync": True}, {"overlap_grad_sync": False}]
)
@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_another_branch_and_another_order(world: int, options: dict) -> None:
    """G6 and G7 of the optimizer's test rows; the sequences themselves: test_optim_sequence.py."""

    train_as_float64(Branches, run_branches(lambda rank, step: [rank, (rank + step) % 5]), world, **options)


@pytest.mark.parametrize("seed", range(4))
def test_random_orders_and_ranks_without_backward(seed: int) -> None:
    """G8 of the optimizer's test rows."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor | None:
        rng = random.Random(f"{seed} {rank} {step}")
        order = rng.sample(range(5), rng.randrange(6))
        return None if rng.random() < 0.25 else run_branches(lambda *_: order)(model, rank, step)

    train_as_float64(Branches, loss, 2 + seed % 3, steps=12, bucket_cap_mb=random.Random(seed).choice([1e-4, 5e-4]))


class Reuse(nn.Module):
    """Modules used twice, a tied weight, a Siamese pass; ``mode``: how blocks are checkpointed."""

    def __init__(self, mode: bool | None) -> None:
        super().__init__()
        self.mode = mode
        self.embed = nn.Linear(8, 8, bias=False)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.other = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.embed.weight

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        return module(x) if self.mode is None else checkpoint(module, x, use_reentrant=self.mode)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.embed(x)
        x = x + self.run(self.block, x)
        if rank % 2:
            x = x + self.run(self.other, x)
        x = x + self.run(self.block, x)
        x = torch.tanh(self.tied(x) + nn.functional.linear(x, self.other.weight))
        twin = self.run(self.block, x.flip(0))
        return (x - twin).square().mean()


@pytest.mark.parametrize("mode", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_checkpointing_shared_and_reused_modules(world: int, mode: bool | None) -> None:
    """G9 of the optimizer's test rows."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(inputs(rank, step, model.embed.weight), rank)

    train_as_float64(lambda: Reuse(mode), loss, world, **TINY)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_two_optimizers_over_disjoint_parameters(world: int) -> None:
    """G11 of the optimizer's test rows. As for a GAN: the critic's backward reaches the generator too. All ranks have the same inputs."""

    initial = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def play(make_optimizers: Callable[..., list]) -> list[Tensor]:
        generator, critic = copy.deepcopy(initial)
        g_opt, c_opt = make_optimizers(generator.parameters(), critic.parameters())
        for step in range(4):
            x = inputs(0, step, generator[0].weight)
            critic(generator(x)).mean().backward()
            g_opt.zero_grad()
            c_opt.step()
            c_opt.zero_grad()
            (-critic(generator(x)).mean()).backward()
            g_opt.step()
            g_opt.zero_grad()
            c_opt.zero_grad()
        return [p.detach().clone() for model in (generator, critic) for p in model.parameters()]

    expected = play(lambda *models: [torch.optim.AdamW(params, lr=0.01) for params in models])
    critics = LocalWorld(world)  # an optimizer orders the collectives of its own communicator only

    def body(comm: Communicator) -> list[Tensor]:
        with Communicator(critics.rank(comm.rank), timeout_s=20) as other:
            return play(
                lambda *models: [
                    ShardedAdamW(params, lr=0.01, process_group=c, **TINY)
                    for params, c in zip(models, (comm, other), strict=True)
                ]
            )

    for params in run_local(world, body):
        torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-7)


def test_a_peer_that_comes_late_is_waited_for_once_a_window() -> None:
    """A loss all-reduce before backward would look like this: rank 1 runs backward only after rank 0 has."""
    turns = [threading.Event() for _ in range(3)]

    def body(comm: Communicator) -> tuple[list[float], list[Tensor]]:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        sync = opt._engine.grads
        patience = []
        for seed, turn in enumerate(turns):
            if comm.rank == 1:
                assert turn.wait(20)
            loss_of(params, dyadic(params, seed)).backward()
            assert sync.launcher.reductions.is_patient == (comm.rank == 1), (
                "rank 0 has more buckets than it may have in flight"
            )
            turn.set()
            opt.step()
            opt.zero_grad()
            patience.append(sync.launcher.reductions.patience_s)
        return patience, [p.detach().clone() for p in params]

    (early, params), (late, others) = run_local(2, body)
    assert early == [0.025, 0.0125, 0.00625] and set(late) == {0.05}
    assert_bitwise_equal(params, others)


# --- what ranks must not do differently
# ----------------------------------------------------------------------------------


def test_a_local_error_does_not_hang_the_others() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm)
        if comm.rank == 1:
            raise KeyError("a bug in the training script")
        opt.step()

    with pytest.raises(RankFailed) as failed:
        run_local(3, body, timeout_s=20)
    assert "KeyError" in failed.value.failures[1]
    for rank in (0, 2):
        assert "KeyError" in failed.value.failures[rank] and "Error: [bucketwheel rank" in failed.value.failures[rank]
