"""Lightning's Trainer: its loop with our optimizer is its loop with AdamW under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from bucketwheel.grads import agreement
from tests.frameworks import training
from tests.frameworks.training import Training, expect_as_torch
from tests.support.bits import assert_bitwise_equal
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout_s(300)  # the first test waits for all imports


def make_module(kind: str, left: Training) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import grad_norm

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = training.make_net()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = training.loss_of(self.net, batch)
            left.see(loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = training.make_optimizer(kind, self.parameters())
            return [optimizer], [{"scheduler": training.make_schedule(optimizer), "interval": "step"}]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            left.wrapper = type(self.trainer.strategy.model).__name__
            for norm in grad_norm(self, 2).values():
                left.see(norm)

    return Module()


def train(
    rank: int,
    world: int,
    kind: str,
    folder: str,
    strategy: str = "ddp",
    precision: str = "32-true",
    clip: str = "norm",
    resume: str = "",
) -> Training:
    """Two epochs; Lightning saves after each. ``resume``: the checkpoint to go on from."""
    training.join(rank)
    import lightning.pytorch as pl

    left = Training()
    module = make_module(kind, left)
    names = {"lightning": __import__("lightning.pytorch")}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=training.recipe("Lightning", **names)["Unwrapped"]() if strategy == "unwrapped" else strategy,
        precision=precision,
        max_epochs=2,
        gradient_clip_val=1.0 if clip == "norm" else 0.1,
        gradient_clip_algorithm=clip,
        accumulate_grad_batches=2,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, filename=f"{kind}-{{epoch}}")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert trainer.world_size == 2
    with pytest.MonkeyPatch.context() as patch:
        late: list[int] = []
        patch.setattr(agreement, "warn_of_late_round", lambda: late.append(1))
        trainer.fit(module, DataLoader(training.make_data(), batch_size=4), ckpt_path=resume or None)
    left.extra = len(late)
    return left.end(module)


HOW = {"norm": ("ddp",), "bf16, value": ("ddp", "bf16-mixed", "value")}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_training_is_that_of_ddp(ranks: RankPool, tmp_path: Path, how: tuple[str, ...]) -> None:
    expect_as_torch(ranks, train, str(tmp_path), *how)


def test_training_without_the_wrapper_is_that_of_ddp(ranks: RankPool, tmp_path: Path) -> None:
    left = expect_as_torch(ranks, train, str(tmp_path), "ddp", ours=(str(tmp_path), "unwrapped"))
    assert left.wrapper == "Module" and left.extra == 0, "one round of reductions for all micro-batches (issue 44)"


def test_a_saved_training_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(train, "ours, full", str(tmp_path))
    saved = str(tmp_path / "ours, full-epoch=0.ckpt")
    rest = ranks.run(train, "ours, full", str(tmp_path / "rest"), "ddp", "32-true", "norm", saved)
    for left, all_of_it in zip(rest, whole, strict=True):
        assert_bitwise_equal(left.params, all_of_it.params)
        assert_bitwise_equal(left.seen, all_of_it.seen[len(left.seen) :])
