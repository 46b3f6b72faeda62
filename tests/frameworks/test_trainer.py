"""Trainer of Hugging Face transformers: a tiny Llama trains as with AdamW under DDP, and resumes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import bucketwheel as bw
from bucketwheel.grads import agreement
from tests.frameworks import training
from tests.frameworks.training import Training, expect_as_torch
from tests.support.bits import assert_bitwise_equal
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout_s(300)  # the first test waits for all imports


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def make_texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 32, (8,), generator=generator) for _ in range(64)]
    return [{"input_ids": one, "labels": one} for one in ids]


def train(
    rank: int, world: int, kind: str, folder: str, given: bool = False, resumes: bool = False, **options: Any
) -> Training:
    """Six steps of two micro-batches; a checkpoint after the third, from which ``resumes`` goes on.

    ``given``: the optimizer is made by us, not by Trainer.
    """
    training.join(rank)
    import transformers

    training.forget_accelerate()
    model = make_llama()
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/{kind}",
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    assert arguments.world_size == 2
    how: dict[str, Any] = {}
    if given:
        how = {"optimizers": (training.make_optimizer(kind, model.parameters()), None)}
    elif kind in ("ours", "ours, one round"):
        how = {"optimizer_cls_and_kwargs": (bw.ShardedAdamW, {"lr": 1e-2})}
    recipe = training.recipe("Trainer of transformers", transformers=transformers)
    made: Any = recipe["ShardedTrainer"] if "one round" in kind else transformers.Trainer
    if kind == "ours, full":
        made = functools.partial(recipe["make_trainer"], lr=1e-2)
    trainer = made(model=model, args=arguments, train_dataset=make_texts(), **how)
    late: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "warn_of_late_round", lambda: late.append(1))
        trainer.train(resume_from_checkpoint=f"{folder}/{kind}/checkpoint-3" if resumes else None)
    left = Training(wrapper=type(trainer.model_wrapped).__name__)
    for line in trainer.state.log_history:
        if "grad_norm" in line:
            for name in ("loss", "grad_norm", "learning_rate"):
                left.see(line[name])
    left.extra = [group["weight_decay"] for group in trainer.optimizer.param_groups], len(late)
    return left.end(model)


def train_bf16(rank: int, world: int, kind: str, folder: str) -> Training:
    return train(rank, world, kind, folder, True, bf16=True, ddp_find_unused_parameters=True)


def train_with_checkpointing(rank: int, world: int, kind: str, folder: str) -> Training:
    return train(
        rank, world, kind, folder, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    )


@pytest.mark.parametrize("how", [train_bf16, train_with_checkpointing], ids=lambda how: how.__name__)
def test_training_is_that_of_ddp(ranks: RankPool, tmp_path: Path, how: Any) -> None:
    expect_as_torch(ranks, how, str(tmp_path), atol=1e-4 if how is train_bf16 else 1e-6)


def test_a_saved_training_goes_on_as_if_it_had_not_stopped(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(train, "ours, full", str(tmp_path))
    assert whole[0].extra[0] == [0.1, 0.0]  # weight decay, in the groups that Trainer makes
    rest = ranks.run(train, "ours, full", str(tmp_path), False, True)
    assert_bitwise_equal([left.params for left in rest], [left.params for left in whole])
    assert_bitwise_equal([left.seen for left in rest], [left.seen for left in whole])


def test_the_recipe_reduces_all_micro_batches_in_one_round(ranks: RankPool, tmp_path: Path) -> None:
    """Issue 44: the warning of late gradients names `optimizer.no_sync`, which a Trainer's user does not call."""
    usual, by_recipe = (ranks.run(train, kind, str(tmp_path))[0] for kind in ("ours", "ours, one round"))
    assert (usual.extra[1], by_recipe.extra[1]) == (6, 0)
    training.assert_agrees(by_recipe, usual)
