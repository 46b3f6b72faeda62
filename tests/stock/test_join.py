"""Ranks with fewer inputs: the loop of docs/several_hosts.md does what torch's Join does for DDP; Join is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.ranks import RankPool


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batches_of(rank: int) -> Iterator[Tensor]:
    """2 on the last rank, 5 on the first."""
    generator = torch.Generator().manual_seed(rank)
    return iter([torch.randn(4, 6, generator=generator) for _ in range(2 if rank else 5)])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    return loss


def joined_by_ddp(rank: int) -> list[Tensor]:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with model.join():
        for batch in batches_of(rank):
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def train_without_inputs(rank: int, world: int) -> None:
    model = make_model()
    batches = batches_of(rank)
    with ShardedAdamW(model.parameters(), lr=0.01) as optimizer:
        for _ in range(5):
            if (batch := next(batches, None)) is not None:
                loss_of(model, batch).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    # Join gives all ranks the parameters of those that were the last to have inputs.
    for mine, theirs in zip(model.parameters(), joined_by_ddp(rank), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_rank_without_inputs_goes_on_as_ddp_does_for_it(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(train_without_inputs)


def train_joined(rank: int, world: int, what: str) -> tuple[str, float]:
    model = make_model()
    wrapped = DistributedDataParallel(model)
    with ShardedAdamW(model.parameters(), lr=0.01) as optimizer:
        before = time.monotonic()
        with wrapped.join(enable=False):
            for batch in batches_of(1):
                loss_of(wrapped, batch).backward()
                optimizer.step()
        try:
            joined: Any = {"wrapper": [wrapped], "optimizer": [optimizer], "both": [wrapped, optimizer]}[what]
            with Join(joined):
                for batch in batches_of(rank):
                    loss_of(wrapped, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except TypeError as error:
            return str(error), time.monotonic() - before
        finally:
            optimizer.zero_grad()
            dist.barrier()
    return "", 0.0


@pytest.mark.parametrize("what", ["wrapper", "optimizer", "both"])
def test_join_is_refused_on_all_ranks_at_once(rank_pool: Callable[[int], RankPool], what: str) -> None:
    for text, took_s in rank_pool(2).run(train_joined, what):
        assert took_s < 10
        assert "torch's Join" in text and "must go on calling the optimizer, without a backward" in text
