"""Lightning Fabric: a loop of one's own with our optimizer is that loop with AdamW under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from bucketwheel.errors import ClosedError
from tests.frameworks import training
from tests.frameworks.training import Training, expect_as_torch, make_data, make_net, make_optimizer, make_schedule
from tests.support.bits import assert_bitwise_equal
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout_s(300)  # the first test waits for all imports


def make_fabric(rank: int, precision: str) -> Any:
    training.join(rank)
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
    fabric.launch()
    assert fabric.world_size == 2
    return fabric


def train(
    rank: int, world: int, kind: str, precision: str = "32-true", clip: str = "norm", folder: str = "", resume: str = ""
) -> Training:
    """Two epochs; saves after the first, or resumes there."""
    fabric = make_fabric(rank, precision)
    net = make_net()
    plain = make_optimizer(kind, net.parameters())
    schedule = make_schedule(plain)
    model, optimizer = fabric.setup(net, plain)
    loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=4))
    left = Training(wrapper=type(model._forward_module).__name__)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if resume:
        fabric.load(resume, state)
    for epoch in range(1 if resume else 0, 2):
        for index, batch in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = training.loss_of(model, batch)
                fabric.backward(loss)
            left.see(loss)
            if index % 2:
                limit = {"max_norm": 1.0} if clip == "norm" else {"clip_val": 0.1}
                norm = fabric.clip_gradients(model, optimizer, **limit)
                if norm is not None:
                    left.see(norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if folder and epoch == 0:
            fabric.save(folder, state)
    return left.end(net)


@pytest.mark.parametrize("how", [(), ("bf16-mixed",), ("32-true", "value")], ids=["norm", "bf16", "value"])
def test_training_is_that_of_ddp(ranks: RankPool, how: tuple[str, ...]) -> None:
    expect_as_torch(ranks, train, *how)


def train_without_the_wrapper(rank: int, world: int, kind: str, precision: str) -> Training:
    if kind == "torch":
        return train(rank, world, kind, precision)
    return training.train_by_recipe("Fabric", make_fabric(rank, precision), "clip_gradients", 1.0, 2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_without_the_wrapper_is_that_of_ddp(ranks: RankPool, precision: str) -> None:
    expect_as_torch(ranks, train_without_the_wrapper, precision)


def test_a_saved_training_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path) -> None:
    saved = str(tmp_path / "state.ckpt")
    whole = ranks.run(train, "ours, full", "32-true", "norm", saved)
    rest = ranks.run(train, "ours, full", "32-true", "norm", "", saved)
    assert_bitwise_equal([left.params for left in rest], [left.params for left in whole])


def close_through_the_wrapper(rank: int, world: int) -> None:
    fabric = make_fabric(rank, "32-true")
    net = make_net()
    plain = make_optimizer("ours", net.parameters())
    _, wrapped = fabric.setup(net, plain)
    with wrapped.no_sync():
        training.loss_of(net, make_data()[:4]).backward()
    wrapped.grad_sync()
    assert wrapped.full_grad(net[0].weight) is not None and wrapped.describe() == plain.describe()
    wrapped.close()
    for optimizer in (wrapped, plain):
        with pytest.raises(ClosedError, match="the optimizer is closed"):
            optimizer.step()
    plain.close()
    assert not vars(wrapped).keys() & vars(plain).keys()


def test_the_wrapper_of_an_optimizer_has_its_methods_and_its_end(ranks: RankPool) -> None:
    """Fabric's object is of a class of its own and ours: what our methods set they must not set on it."""
    ranks.run(close_through_the_wrapper)
