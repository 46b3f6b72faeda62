"""A small real model, trained by processes over shared memory: beside DDP, and against itself with other schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.requirements import slow_case

VOCABULARY, WIDTH, CONTEXT, BATCH = 31, 24, 12, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.first_norm(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.second_norm(x))


class Model(nn.Module):
    """Registered in another order than it runs.

    The output layer uses the embedding's weight by itself, and a bias of a block is used before the block runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions + self.blocks[1].second_norm.bias
        for block in reversed(self.blocks):
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def batches(rank: int, step: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, VOCABULARY, (count, BATCH, 1), generator=generator)
    return list((start + torch.arange(CONTEXT + 1) * 3) % VOCABULARY)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


@dataclass(frozen=True)
class Job:
    steps: int = 30
    micro_batches: int = 2
    dtype: torch.dtype = torch.float32
    clips_with_torch: bool = False
    prefetches: bool = False
    evaluates: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def make_model(job: Job) -> Model:
    torch.manual_seed(0)
    return Model().to(job.dtype)


def run_steps(
    job: Job,
    rank: int,
    model: nn.Module,
    opt: torch.optim.Optimizer,
    no_sync: Callable[[], contextlib.AbstractContextManager],
    clip: Callable[[], Tensor],
) -> list[float]:
    """The losses and norms of every step."""
    seen: list[float] = []
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 5))
    for step in range(job.steps):
        loss = torch.zeros(())
        for micro, tokens in enumerate(batches(rank, step, job.micro_batches)):
            with no_sync() if micro < job.micro_batches - 1 else contextlib.nullcontext():
                part = loss_of(model, tokens) / job.micro_batches
                part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        seen += [float(loss) / dist.get_world_size(), float(clip())]
        opt.step()
        schedule.step()
        opt.zero_grad()
        if job.evaluates and step % 3 == 0:
            model.eval()
            with torch.no_grad():
                seen.append(float(loss_of(model, batches(99, step, 1)[0])))
            model.train()
            seen.append(float(sum(t.double().abs().sum() for t in model.state_dict().values())))
    return seen


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def train_sharded(rank: int, job: Job) -> tuple[list[float], list[Tensor]]:
    model = make_model(job)
    opt = ShardedAdamW(groups_of(model), lr=0.01, bucket_cap_mb=0.01, **dict(job.options))
    if job.prefetches:
        opt.prefetch_params(model)
    if job.clips_with_torch:
        clip = lambda: clip_grad_norm_(model.parameters(), 0.5)  # noqa: E731
    else:
        clip = lambda: opt.clip_grad_norm_(0.5)  # noqa: E731
    seen = run_steps(job, rank, model, opt, opt.no_sync, clip)
    opt.close()
    return seen, [p.detach().clone() for p in model.parameters()]


def train_ddp(rank: int, job: Job) -> list[float]:
    model = DistributedDataParallel(make_model(job))
    opt = torch.optim.AdamW(groups_of(model), lr=0.01, fused=True)
    return run_steps(job, rank, model, opt, model.no_sync, lambda: clip_grad_norm_(model.parameters(), 0.5))


def compare_with_ddp(rank: int, world: int, clips_with_torch: bool) -> Any:
    job = Job(clips_with_torch=clips_with_torch)
    return train_sharded(rank, job), train_ddp(rank, job)


def expect_equal_on_all_ranks(results: list[Any]) -> None:
    for rank, result in enumerate(results):
        assert_bitwise_equal(result, results[0], f"rank {rank}")


@pytest.mark.parametrize(
    ("world", "clips_with_torch"), [(2, False), slow_case(2, True), (3, True), slow_case(4, False)]
)
def test_training_agrees_with_ddp(rank_pool: Any, world: int, clips_with_torch: bool) -> None:
    results = rank_pool(world).run(compare_with_ddp, clips_with_torch, timeout_s=90)
    expect_equal_on_all_ranks(results)
    (seen, _), peer = results[0]
    for ours, theirs in zip(seen, peer, strict=True):
        assert abs(ours - theirs) <= 1e-5 * abs(theirs)
    assert seen[-2] < 0.7 * seen[0]  # it learns


def train_bf16(rank: int, world: int) -> Any:
    seen, params = train_sharded(rank, Job(dtype=torch.bfloat16))
    exact, _ = train_sharded(rank, Job())
    return seen, params, exact


def test_a_bf16_model_trains(rank_pool: Any) -> None:
    results = rank_pool(2).run(train_bf16, timeout_s=90)
    expect_equal_on_all_ranks(results)
    seen, params, exact = results[0]
    assert all(p.dtype == torch.bfloat16 for p in params)
    torch.testing.assert_close(seen[::2], exact[::2], rtol=0.05, atol=0)
    assert seen[-2] < 0.7 * seen[0]


def train_with_other_schedules(rank: int, world: int) -> None:
    """Whatever only moves work in time leaves the same bits."""
    expected = train_sharded(rank, Job(steps=10, evaluates=True, options=(("overlap_grad_sync", False),)))
    late = ("overlap_param_sync", True)
    for options in ((), (("max_inflight_buckets", 1),), (late,), (late, ("max_inflight_buckets", 1))):
        job = Job(steps=10, evaluates=True, prefetches=late in options, options=options)
        assert_bitwise_equal(train_sharded(rank, job), expected, f"{job}")


@pytest.mark.parametrize("world", [2, 3])
def test_overlap_and_prefetch_change_no_bit(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(train_with_other_schedules, timeout_s=90)
