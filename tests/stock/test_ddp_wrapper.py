"""A DistributedDataParallel wrapper around a model that the sharded optimizer trains: redundant, and harmless or refused."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ShardedGradError
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal

DDP_OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


class Branches(nn.Module):
    """One branch runs, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.left, self.right = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor, runs_left: bool = True, runs_right: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        branches = [branch(hidden) for branch, runs in ((self.left, runs_left), (self.right, runs_right)) if runs]
        return torch.stack(branches).sum(0)


def train_branches(
    wrap: Callable[[nn.Module], Any], rank: int, diverges: bool, is_first: bool, skips: bool
) -> list[Tensor]:
    """``skips``: the first micro-batch runs in the wrapper's own `no_sync`, as frameworks accumulate."""
    model = Branches()
    wrapped = wrap(model) if is_first else None
    opt = ShardedAdamW(model.parameters(), lr=0.01, process_group=Communicator(timeout_s=40))
    wrapped = wrapped or wrap(model)
    for step in range(4):
        for micro in range(2):
            x = torch.full((4, 3), 0.25 * step - rank + micro)
            is_left = (rank + step + micro) % 3 == 0
            waits = skips and micro == 0 and isinstance(wrapped, DistributedDataParallel)
            with wrapped.no_sync() if waits else nullcontext():
                wrapped(x, is_left or not diverges, not is_left or not diverges).square().sum().backward()
        opt.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
    opt.close()
    return [p.detach().clone() for p in model.parameters()]


def train_under_ddp(rank: int, world: int) -> int:
    """Under DDP everything is what it is without; returns how many warnings there were."""
    found = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for options in DDP_OPTIONS:
            diverges = "find_unused_parameters" in options
            for is_first, skips in ((True, False), (False, False), (True, True)):
                if skips and "static_graph" in options:
                    continue  # torch itself fails where static_graph=True begins with no_sync
                wrap = lambda model: DistributedDataParallel(model, **options)  # noqa: E731,B023
                actual = train_branches(wrap, rank, diverges, is_first, skips)
                plain = train_branches(lambda model: model, rank, diverges, is_first, skips)
                assert_bitwise_equal(actual, plain, f"{options}, {skips=}")
        found = len([w for w in caught if "wrapped in DistributedDataParallel" in str(w.message)])
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, actual)
    assert_bitwise_equal(everyone[0], everyone[1])
    return found


def refuse_ddp_that_replaces_gradients(rank: int, world: int) -> None:
    model = Branches()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = ShardedAdamW(model.parameters(), lr=0.01, process_group=Communicator(timeout_s=40))
    before = [p.detach().clone() for p in model.parameters()]
    wrapped(torch.ones(4, 3)).sum().backward()
    refused = pytest.raises(ShardedGradError, match=r"gradient_as_bucket_view=True\) replaced the gradient")
    with refused:
        opt.step()
    with refused:
        opt.clip_grad_norm_(1.0)
    with refused:
        wrapped(torch.ones(4, 3)).sum().backward()
    assert_bitwise_equal([p.detach() for p in model.parameters()], before)
    opt.zero_grad()
    del wrapped  # without the wrapper training goes on
    gc.collect()
    model(torch.ones(4, 3)).sum().backward()
    opt.step()
    assert not torch.equal(model.first.weight, before[0])
    opt.close()


def train_with_later_hooks(rank: int, world: int) -> None:
    """In the first backward our hooks run behind those, so the reducer has a gradient before them (issue 44)."""

    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        model = Branches()
        opt = ShardedAdamW(model.parameters(), lr=0.01, process_group=Communicator(timeout_s=40))
        wrapped = wrap(model)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: (p.grad.clamp_(-0.5, 0.5), None)[1])
        for step in range(3):
            wrapped(torch.full((4, 3), 0.25 * step - rank)).square().sum().backward()
            opt.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()
        opt.close()
        return [p.detach().clone() for p in model.parameters()]

    assert_bitwise_equal(train(DistributedDataParallel), train(lambda model: model))


def test_a_ddp_wrapper_changes_nothing_and_is_called_redundant_once(rank_pool: Any) -> None:
    assert rank_pool(2).run(train_under_ddp, timeout_s=60) == [1, 1]
    rank_pool(2).run(train_with_later_hooks, timeout_s=60)


def test_ddp_with_gradients_as_bucket_views_is_refused(rank_pool: Any) -> None:
    rank_pool(2).run(refuse_ddp_that_replaces_gradients, timeout_s=60)
