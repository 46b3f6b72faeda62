"""What is trained in every framework, what a training leaves, and the code blocks of docs/frameworks.md."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bucketwheel as bw
from tests.support.bits import assert_bitwise_equal
from tests.support.ranks import RankPool

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
STEPS = 8  # of the optimizer, for 16 micro-batches of 4 on each of two ranks


def join(rank: int) -> None:
    """What torchrun tells a process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")


def recipe(section: str, **names: Any) -> dict[str, Any]:
    """What the code block of a section of the page defines; ``names`` are what it uses beside the page's imports."""
    text = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text.split(f"\n## {section}\n")[1].split("\n## ")[0], re.M | re.S)
    namespace = {"torch": torch, "dist": dist, "bw": bw, "contextlib": contextlib, **names}
    for block in blocks:
        exec(compile(block, f"{PAGE.name}: {section}", "exec"), namespace)
    return namespace


def make_optimizer(kind: str, params: Any) -> Any:
    """``"torch"``, ``"ours"``, or ``"ours, full"`` for checkpoints."""
    params = list(params)
    if kind == "torch":
        return torch.optim.AdamW(params, **OPTIONS)
    optimizer = bw.ShardedAdamW(params, **OPTIONS, full_state_dict=kind == "ours, full")
    assert optimizer._engine.world == 2
    return optimizer


def make_schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=4 * STEPS)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def forget_accelerate() -> None:
    """What Accelerate keeps of the training before this one."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loss_of(model: Callable[[Tensor], Tensor], batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


@dataclass
class Training:
    """What a training leaves on a rank."""

    params: list[Tensor] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)  # losses and norms
    wrapper: str = ""  # the class of what stands around the model
    extra: Any = None

    def see(self, value: Any) -> None:
        self.seen.append(float(value.detach() if isinstance(value, Tensor) else value))

    def end(self, model: nn.Module) -> Training:
        self.params = [p.detach().clone() for p in model.parameters()]
        return self


def train_by_recipe(section: str, framework: Any, clip: str, *settings: Any) -> Training:
    """Two epochs of ``train`` of a section, without a wrapper, with our optimizer.

    ``clip``: the method of ``framework`` whose norms are seen. ``settings``: the last arguments of ``train``.
    """
    net, left = make_net(), Training()
    original = getattr(framework, clip)
    setattr(framework, clip, lambda *args, **limit: left.see(original(*args, **limit)))
    optimizer = make_optimizer("ours", net.parameters())
    schedule, loader = make_schedule(optimizer), DataLoader(make_data(), batch_size=4)

    def seen_loss(model: Any, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        left.see(loss)
        return loss

    for _ in range(2):
        recipe(section)["train"](framework, net, optimizer, schedule, loader, seen_loss, *settings)
    return left.end(net)


def expect_as_torch(
    pool: RankPool, train: Callable[..., Training], *args: Any, ours: tuple[Any, ...] | None = None, atol: float = 1e-6
) -> Training:
    """``train`` with our optimizer leaves what it leaves with torch's, to rounding, and the same bits on all ranks.

    ``train(rank, world, kind, *args)``; ``ours``: other arguments where the optimizer is ours. Returns what ours leaves.
    """
    stock = pool.run(train, "torch", *args, timeout_s=60)
    left = pool.run(train, "ours", *(args if ours is None else ours), timeout_s=60)
    assert_bitwise_equal(left[1].params, left[0].params)
    assert stock[0].wrapper == "DistributedDataParallel"
    for rank in range(2):
        assert_agrees(left[rank], stock[rank], atol)
    return left[0]


def assert_agrees(ours: Training, stock: Training, atol: float = 1e-6) -> None:
    """``atol``: of parameters; where bf16 rounds gradients near 0 Adam makes much of the difference."""
    assert len(ours.seen) == len(stock.seen) >= STEPS
    torch.testing.assert_close(torch.tensor(ours.seen), torch.tensor(stock.seen), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.params, stock.params, rtol=1e-5, atol=atol)
