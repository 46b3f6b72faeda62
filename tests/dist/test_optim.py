"""ShardedAdamW against the local optimizer, bit for bit: dyadic gradients make every order of summation exact."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bucketwheel.comm import Communicator, LocalWorld
from bucketwheel.optim import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal, run_threads
from torch import Tensor
from torch.nn import Parameter

SHAPES = [(5, 7), (3,), (), (64, 33), (0,), (1, 1), (257,), (4, 3, 2, 2), (40, 6)]


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    """Dense parameters of every kind: scalar, empty, channels-last, transposed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    tensors[7] = tensors[7].to(memory_format=torch.channels_last)
    tensors[8] = tensors[8].t()
    return [Parameter(t) for t in tensors]


def dyadic(params: list[Parameter], seed: int) -> list[Tensor]:
    """Small integers / 16, a multiple of 1/16 whose sums over a few ranks are exact in float32 and bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, p.shape, generator=generator).to(p.dtype) / 16 for p in params]


def loss_of(params: list[Parameter], grads: list[Tensor], used: Callable[[int], bool] = lambda i: True) -> Tensor:
    """A loss whose gradient of params[i] is grads[i] exactly."""
    return sum(((p * g).sum() for i, (p, g) in enumerate(zip(params, grads, strict=True)) if used(i)), torch.zeros(()))


def share(grads: list[Tensor], rank: int, world: int) -> list[Tensor]:
    """This rank's gradients: they differ between ranks and average to ``grads`` exactly."""
    return [g + (2 * rank - (world - 1)) / 16 for g in grads]


def run_local(world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """fn(comm, *args) on ``world`` ranks that are threads."""
    local = LocalWorld(world)

    def body(rank: int, _: int) -> Any:
        with Communicator(local.rank(rank), backend="local", timeout_s=timeout_s / 2) as comm:
            return fn(comm, *args)

    return run_threads(body, world, timeout_s=timeout_s)


def backward(opt: ShardedAdamW, params: list[Parameter], grads: list[Tensor], how: str) -> None:
    """The same total gradient in different ways."""
    if how == "once":
        loss_of(params, grads).backward()
        return
    half = [g / 2 for g in grads]
    for micro in range(2):
        sync = opt.no_sync() if how == "no_sync" and micro == 0 else contextlib.nullcontext()
        with sync:
            loss_of(params, half).backward()
        if how == "grad_sync":
            opt.grad_sync()


def train(comm: Communicator | None, how: str, clip: float | None, steps: int = 4, **options: Any) -> list[Tensor]:
    rank, world = (comm.rank, comm.size) if comm else (0, 1)
    params = make_params()
    groups = [{"params": params[:4], "weight_decay": 0.0}, {"params": params[4:], "lr": 0.03}]
    opt = ShardedAdamW(groups, lr=0.01, weight_decay=0.1, process_group=comm, **options)
    for step in range(steps):
        backward(opt, params, share(dyadic(params, step), rank, world), how)
        if clip is not None:
            opt.clip_grad_norm_(clip)
        opt.step()
        opt.zero_grad()
    opt.param_sync()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, 3e-3, 8.0])
def test_bitwise_equal_at_any_world_bucket_overlap_and_accumulation(world: int, bucket_cap_mb: float) -> None:
    expected = train(None, "once", None)
    for how, overlap, late_params in itertools.product(
        ["once", "no_sync", "twice", "grad_sync"], [True, False], [True, False]
    ):
        options = dict(bucket_cap_mb=bucket_cap_mb, overlap_grad_sync=overlap, overlap_param_sync=late_params)
        for rank, params in enumerate(run_local(world, lambda comm: train(comm, how, None, **options))):
            assert_bitwise_equal(params, expected, f"rank {rank} of {world}, {how}, {options}")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("how", ["once", "no_sync", "twice", "grad_sync"])
def test_bitwise_equal_with_clipping(world: int, how: str) -> None:
    expected = train(None, "once", 0.5)
    assert any(not torch.equal(a, b) for a, b in zip(expected, train(None, "once", None), strict=True))
    for params in run_local(world, lambda comm: train(comm, how, 0.5, bucket_cap_mb=2e-3)):
        assert_bitwise_equal(params, expected)


def test_the_local_optimizer_is_torch_adamw() -> None:
    params = make_params()
    reference = [Parameter(p.detach().clone()) for p in params]
    opt = ShardedAdamW(params, lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW(reference, lr=0.01, weight_decay=0.1)
    for step in range(20):
        for ps in (params, reference):
            loss_of(ps, dyadic(ps, step)).backward()
        norm = opt.clip_grad_norm_(0.7)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference, 0.7))
        for o in (opt, theirs):
            o.step()
            o.zero_grad()
    for p, r in zip(params, reference, strict=True):
        torch.testing.assert_close(p, r, rtol=2e-6, atol=1e-7)
        assert p.stride() == r.stride()
