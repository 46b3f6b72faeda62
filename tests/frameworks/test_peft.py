"""LoRA by PEFT: only adapters train, sharded; the base model keeps its bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.frameworks import training
from tests.frameworks.test_trainer import make_llama
from tests.frameworks.training import OPTIONS, Training, expect_as_torch
from tests.support.bits import assert_bitwise_equal
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout_s(300)  # the first test waits for all imports

ADAPTERS = ["default", "second"]


def make_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    return model


def loss_on(model: Callable[..., Any], rank: int, step: int) -> torch.Tensor:
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(2 * step + rank))
    return model(input_ids=ids, labels=ids).loss


def values_of(model: Any, wanted: str) -> list[torch.Tensor]:
    """Copies of the parameters of an adapter, or of the base model (``""``)."""
    return [
        p.detach().clone()
        for name, p in model.named_parameters()
        if (f".{wanted}." in name if wanted else "lora_" not in name)
    ]


def train(rank: int, world: int, kind: str, wrap: bool = True) -> Training:
    training.join(rank)
    model = make_adapters()
    base, second = values_of(model, ""), values_of(model, "second")
    optimizer = training.make_optimizer(kind, model.parameters())
    if kind != "torch":
        assert len(optimizer.state) == 8  # A and B of two projections in two layers
    wrapped = DistributedDataParallel(model) if kind == "torch" or wrap else model
    left = Training(wrapper=type(wrapped).__name__)
    for step in range(6):
        for micro in range(2):
            loss = loss_on(wrapped, rank, 2 * step + micro)
            loss.backward()
            left.see(loss)
        left.see(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            merged = []
            for change in (model.merge_adapter, model.unmerge_adapter):
                change()
                with torch.no_grad():
                    merged.append(loss_on(model, 0, 0))
            torch.testing.assert_close(merged[0], merged[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(values_of(model, ""), base, rtol=1e-6, atol=1e-7)  # merging rounds
    assert_bitwise_equal(values_of(model, "second"), second)
    left.params = values_of(model, "default")
    return left


def test_adapters_train_as_under_ddp(ranks: RankPool) -> None:
    expect_as_torch(ranks, train)


def test_adapters_train_without_the_wrapper(ranks: RankPool) -> None:
    expect_as_torch(ranks, train, ours=(False,))


def switch(rank: int, world: int) -> None:
    """Two adapters in turns against AdamW on averaged gradients: whose turn it is not is neither stepped nor decayed."""
    training.join(rank)
    model = make_adapters()
    twin = copy.deepcopy(model)
    base = values_of(model, "")
    optimizer = training.recipe("PEFT")["optimizer_of_adapters"](model, ADAPTERS, **OPTIONS)
    assert [p.requires_grad for n, p in model.named_parameters() if ".second." in n] == [False] * 8
    stock = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    for step, name in enumerate(["default", "second", "second", "default", "second"]):
        idle = ADAPTERS[name == "default"]
        before = values_of(model, idle)
        for one in (model, twin):
            one.set_adapter(name)
            loss_on(one, rank, step).backward()
        for p in twin.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= world
        for one, opt in ((model, optimizer), (twin, stock)):
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            opt.step()
            opt.zero_grad()
        assert_bitwise_equal(values_of(model, idle), before)
        torch.testing.assert_close(values_of(model, name), values_of(twin, name), rtol=1e-5, atol=1e-6)
    assert_bitwise_equal(values_of(model, ""), base)


def test_adapters_can_be_switched(ranks: RankPool) -> None:
    ranks.run(switch)


def save(rank: int, world: int, folder: str) -> None:
    training.join(rank)
    from peft import PeftModel

    model = make_adapters()
    optimizer = training.make_optimizer("ours", model.parameters())
    loss_on(model, rank, 0).backward()
    optimizer.step()
    model.save_pretrained(f"{folder}/{rank}", selected_adapters=["default"])
    loaded = PeftModel.from_pretrained(make_llama(), f"{folder}/{rank}")
    assert_bitwise_equal(values_of(loaded, "default"), values_of(model, "default"))


def test_adapters_are_saved_as_usual(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(save, str(tmp_path))
