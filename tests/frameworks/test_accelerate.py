"""Hugging Face Accelerate: its loop with our optimizer is its loop with AdamW under DDP."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from bucketwheel.checkpoint import tensor_shard
from bucketwheel.testing import RankPool, assert_bitwise_equal
from tests.frameworks import training
from tests.frameworks.training import Training, expect_as_torch, make_data, make_net, make_optimizer, make_schedule

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


def load_what_rank_0_saved(rank: int, world: int, folder: str) -> tuple[list[str], str]:
    """What the save has warned of, and the error of the load."""
    accelerator = make_accelerator(rank)
    net = make_net()
    accelerator.prepare(make_optimizer("ours", net.parameters()))
    made = training.recipe("Checkpoints", model=make_net(), lr=1e-2, folder=f"{folder} by us")  # what does save all
    assert made["optimizer"]._engine.options.full_state_dict and Path(f"{folder} by us", ".metadata").exists()
    tensor_shard.warn_of_part.cache_clear()  # once in a process
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with pytest.raises(ValueError) as error:
        accelerator.load_state(folder)
    return [str(one.message) for one in told if "pickled" in str(one.message)], str(error.value)


def test_what_rank_0_saves_of_its_part_warns_and_is_refused_by_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Issue 44: the save was silent, and the other parts exist nowhere."""
    for rank, (told, refused) in enumerate(ranks.run(load_what_rank_0_saved, str(tmp_path / "state"))):
        assert "rank 0's part of 2" in refused and "this is rank 1 of 2" in refused
        assert len(told) == (rank == 0), told
        for text in (refused, *told):
            assert "full_state_dict=True" in text and "bw.checkpoint.save" in text
        assert all("rank 0's part of 2" in text for text in told)


def step_with_a_scaler(rank: int, world: int) -> list[Any]:
    """As Accelerate steps under fp16: one element of one rank overflows in step 2."""
    make_accelerator(rank)
    from accelerate.optimizer import AcceleratedOptimizer

    net = make_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = AcceleratedOptimizer(make_optimizer("ours", net.parameters()), scaler=scaler)
    skipped = []
    for step in range(5):
        loss = training.loss_of(net, [tensor[8 * step + 4 * rank :][:4] for tensor in make_data().tensors])
        if step == 2 and rank == 1:
            loss = loss + net[0].weight[0, 0] * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer.optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append((optimizer.step_was_skipped, scaler.get_scale()))
    return [skipped, [p.detach().clone() for p in net.parameters()]]


def test_a_step_skipped_by_the_scaler_is_skipped_on_all_ranks(ranks: RankPool) -> None:
    results = ranks.run(step_with_a_scaler)
    assert results[0][0] == [(False, 8.0), (False, 16.0), (True, 8.0), (False, 8.0), (False, 16.0)]
    assert_bitwise_equal(results[1], results[0])
    assert all(p.isfinite().all() for p in results[0][1])
