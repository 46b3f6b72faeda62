"""GradScaler over ShardedAdamW on CUDA, simulated: what it skips, and that it reads no value of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.conformance.optimizer.test_optim_cuda import batch, in_world, model_of
from tests.support.simulated_cuda import HostReads, posing


def test_stock_grad_scaler_unscales_and_skips() -> None:
    """An overflow on one rank is found on all; the scaler reads one flag and nobody steps."""

    def body(rank: int, comm: Communicator) -> list[torch.Tensor]:
        model = model_of()
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=comm, bucket_cap_mb=0.004)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        out = []
        for step in range(4):
            loss = model(batch(rank, step, torch.float32)).square().mean()
            if step == 1 and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            opt.clip_grad_norm_(0.3)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            out += [p.detach().clone() for p in model.parameters()]
            out.append(torch.tensor(scaler.get_scale()))
        opt.close()
        return out

    for got, expected in zip(in_world(2, True, body), in_world(2, False, body), strict=True):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [None, float("nan")])
def test_float64_gradients_whose_squares_overflow_are_no_overflow(bad: float | None) -> None:
    def body(rank: int, comm: Communicator) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(torch.ones(n, dtype=d)) for n, d in ((7, torch.float64), (5, torch.float32))]
        opt = bw.ShardedAdamW(params, lr=0.1, process_group=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        large = torch.full((7,), 1e200, dtype=torch.float64)
        if bad is not None and rank == 1:
            large[2] = bad
        scaler.scale((params[0] * large).sum() + params[1].sum()).backward()
        scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == (4.0 if bad is None else 2.0)
        return [p.detach().clone() for p in params]

    for got, expected in zip(in_world(2, True, body), in_world(2, False, body), strict=True):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


CLIPS: dict[str, Callable[[Any, list[torch.nn.Parameter]], Any]] = {
    "own": lambda opt, params: [opt.clip_grad_norm_(0.3, norm) for norm in (2.0, float("inf"), 1.0, 3.0)],
    "own, a part": lambda opt, params: opt.clip_grad_norm_(0.3, parameters=params[:2]),
    "stock": lambda opt, params: [
        torch.nn.utils.clip_grad_norm_(params, 0.3, n) for n in (2.0, float("inf"), 1.0, 3.0)
    ],
    "stock, one by one": lambda opt, params: torch.nn.utils.clip_grad_norm_(params, 0.3, foreach=False),
    "values": lambda opt, params: torch.nn.utils.clip_grad_value_(params, 1e-3),
}


@pytest.mark.parametrize("world", [None, 1, 2, 3])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_unscale_clip_and_step_read_no_value(world: int | None, clip: Callable[..., Any]) -> None:
    """6.D of the semantics: the one value that is read is the scaler's own, before it steps."""

    def body(rank: int, comm: Communicator | None) -> list[str]:
        model = model_of()
        params = list(model.parameters())
        opt = bw.ShardedAdamW(params, lr=1e-2, process_group=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        with HostReads() as reads:
            for step in range(4):
                loss = model(batch(rank, step, torch.float32)).square().mean()
                scaler.scale(loss * float("inf") if step == 1 and rank == 0 else loss).backward()
                scaler.unscale_(opt)
                clip(opt, params)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        opt.close()
        return reads.callers

    if world is None:
        with posing():
            everyone = [body(0, None)]
    else:
        everyone = in_world(world, True, body)
    for callers in everyone:
        assert len(callers) == 4 and all("grad_scaler.py" in caller for caller in callers), callers
