"""Ranks that die or are interrupted in the middle of a training: what the others see.

Times are compared between processes: `time.monotonic` is one clock for the whole machine.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError, PeerError
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.cores import BUSY
from tests.support.optim_twins import dyadic, loss_of, make_params, share
from tests.support.ranks import run_ranks

SEEN_WITHIN_S = 2.0 * BUSY


class _Act(torch.autograd.Function):
    """Does something in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.act()
        return grad, None


def loss_with(params: list[Parameter], grads: list[Tensor], act: Callable[[], None]) -> Tensor:
    """A loss whose backward calls ``act`` after the last two parameters have their gradients and before the rest."""
    early = _Act.apply(loss_of(params[:-2], grads[:-2]), act)
    late = loss_of(params[-2:], grads[-2:])  # autograd runs what was made last first
    return early + late


def make_run(comm: Communicator | None, **options: Any) -> tuple[list[Parameter], ShardedAdamW]:
    params = make_params()
    return params, ShardedAdamW(params, lr=0.01, process_group=comm, bucket_cap_mb=1e-3, **options)


def train_step(params: list[Parameter], opt: ShardedAdamW, step: int, rank: int, world: int) -> None:
    loss_of(params, share(dyadic(params, step), rank, world)).backward()
    opt.clip_grad_norm_(0.5)
    opt.step()
    opt.zero_grad()


# --- death ------------------------------------------------------------------------------------------------------------


def die(directory: str) -> None:
    Path(directory, "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_a_rank_dies(rank: int, world: int, where: str, directory: str) -> tuple[int, float, str]:
    """The rank that the survivor's error names, when it came, and its message."""
    comm = Communicator(timeout_s=60)
    params, opt = make_run(comm, overlap_param_sync=where == "step")
    for step in range(3):
        train_step(params, opt, step, rank, world)
    try:
        if rank == world - 1:
            if where == "backward":
                loss_with(params, dyadic(params, 3), lambda: die(directory)).backward()
            loss_of(params, dyadic(params, 3)).backward()
            # The window is closed, the update begins: the others wait for this rank's parameters.
            engine: Any = opt._engine
            engine._assembly = replace(engine._assembly, steps=SimpleNamespace(run=lambda *_: die(directory)))
            opt.clip_grad_norm_(0.5)
            opt.step()
        while True:
            train_step(params, opt, step, rank, world)
    except PeerError as error:
        seen = time.monotonic()
        for call in (opt.step, opt.grad_sync, lambda: opt.clip_grad_norm_(1.0)):
            began = time.monotonic()
            with pytest.raises(PeerError):
                call()
            assert time.monotonic() - began < BUSY
        opt.zero_grad()
        values = None
        if where == "step":  # what the gathers were to bring is nowhere
            with pytest.raises(PeerError):
                [p.detach() for p in params]
        else:
            values = [p.detach().clone() for p in params]
        with pytest.raises(PeerError):
            opt.close()
        opt.close()
        after = [p.detach() for p in params]  # in memory of their own
        assert_bitwise_equal(after, after if values is None else values)
        comm.close()
        loss_of(params, dyadic(params, 0)).backward()  # no hook is left
        assert all(type(p.grad) is Tensor for p in params)
        return error.rank, seen, str(error)


@pytest.mark.parametrize(("where", "world"), [("backward", 3), ("step", 2)])
def test_a_killed_rank_is_named_on_every_other(where: str, world: int, tmp_path: Path) -> None:
    """In the middle of a training, which raises from then on, and leaves the parameters that are there."""
    results = run_ranks(train_until_a_rank_dies, world, where, str(tmp_path), timeout_s=60, expect_dead=[world - 1])
    assert results[-1] is None
    died = float((tmp_path / "died").read_text())
    for rank, (named, seen, message) in enumerate(results[:-1]):
        assert named == world - 1 and f"[bucketwheel rank {rank}/{world}" in message
        assert 0 <= seen - died < SEEN_WITHIN_S, f"rank {rank}: {message}"


# --- interrupts ---------------------------------------------------------------------------------------------


def wait_until_interrupted(rank: int, world: int) -> None:
    comm = Communicator(timeout_s=60)
    params, opt = make_run(comm)
    train_step(params, opt, 0, rank, world)
    if rank == 0:
        loss_of(params, dyadic(params, 1)).backward()
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            opt.step()
        assert time.monotonic() - began < 2.0 * BUSY
    else:
        time.sleep(5.0)
        with pytest.raises(CommError, match="KeyboardInterrupt"):
            train_step(params, opt, 1, rank, world)


def test_ctrl_c_ends_a_wait(rank_pool: Any) -> None:
    rank_pool(2).run(wait_until_interrupted, timeout_s=40)
