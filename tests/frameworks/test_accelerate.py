"""Hugging Face Accelerate: its loop with our optimizer is its loop with AdamW under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.frameworks import training
from tests.frameworks.training import Training, expect_as_torch, make_data, make_net, make_optimizer, make_schedule
from tests.support.bits import assert_bitwise_equal
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout_s(300)  # the first test waits for all imports


def make_accelerator(rank: int, precision: str = "no") -> Any:
    training.join(rank)
    from accelerate import Accelerator

    training.forget_accelerate()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    assert accelerator.num_processes == 2
    return accelerator


def train(
    rank: int, world: int, kind: str, precision: str = "no", folder: str = "", resume: str = "", clip: str = "norm"
) -> Training:
    """Two epochs; saves after the first, or resumes there."""
    accelerator = make_accelerator(rank, precision)
    net = make_net()
    optimizer = make_optimizer(kind, net.parameters())
    model, optimizer, loader, schedule = accelerator.prepare(
        net, optimizer, DataLoader(make_data(), batch_size=4), make_schedule(optimizer)
    )
    left = Training(wrapper=type(model).__name__)
    if resume:
        accelerator.load_state(resume)
    for epoch in range(1 if resume else 0, 2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = training.loss_of(model, batch)
                left.see(loss)
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip == "norm":
                    left.see(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                elif accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if folder and epoch == 0:
            accelerator.save_state(folder)
    return left.end(net)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_is_that_of_ddp(ranks: RankPool, precision: str) -> None:
    expect_as_torch(ranks, train, precision)


def test_clipping_values_is_that_of_ddp(ranks: RankPool) -> None:
    expect_as_torch(ranks, train, "no", "", "", "value")


def train_without_the_wrapper(rank: int, world: int, precision: str) -> Training:
    return training.train_by_recipe("Accelerate", make_accelerator(rank, precision), "clip_grad_norm_", 1.0)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_training_without_the_wrapper_is_the_same(ranks: RankPool, precision: str) -> None:
    ours = ranks.run(train_without_the_wrapper, precision)
    for left, wrapped in zip(ours, ranks.run(train, "ours", precision), strict=True):
        training.assert_agrees(left, wrapped)


def test_a_saved_training_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(train, "ours, full", "no", str(tmp_path / "state"))
    rest = ranks.run(train, "ours, full", "no", "", str(tmp_path / "state"))
    assert_bitwise_equal([left.params for left in rest], [left.params for left in whole])
