"""ShardedAdamW of ranks that do not share a host: what they agree on goes through the Store and gloo.

The bits are those of ranks that share one, and the death of a rank ends the training of all others, soon.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import PeerError
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.optimizer.test_optim_cuda import trained
from tests.faults.test_failures import loss_with, train_step
from tests.support.failure_cases import (
    SOON_S,
    die,
    expect_gone,
    expect_no_threads,
    fresh_ranks,
    hosts_apart,
    threads_of_agreement,
)
from tests.support.optim_twins import SHAPES, TINY, Run, dyadic, loss_of, make_params
from tests.support.requirements import slow_case
from tests.support.simulated_nccl import simulated

pytestmark = pytest.mark.dist

Training = Callable[[int, int, Communicator], Any]


def alike(rank: int, world: int, comm: Communicator) -> Any:
    return trained(rank, comm, torch.float32, "own")


def in_bfloat16(rank: int, world: int, comm: Communicator) -> Any:
    return trained(rank, comm, torch.bfloat16, "stock", overlap_param_sync=True)


def by_process_group(rank: int, world: int, comm: Communicator) -> Any:
    return trained(rank, None, torch.float32, "own")  # by two communicators more


def diverging(rank: int, world: int, comm: Communicator) -> Any:
    """In each step one rank uses a parameter that no other does, and some of its gradients come late."""
    params = make_params()
    run = Run(bw.ShardedAdamW(params, lr=1e-2, process_group=comm, **TINY), params, rank, world)
    for step in range(4):
        run.backward(step, used=range(step, len(SHAPES)))
        run.backward(10 + step, used={0, 3, len(SHAPES) - 1}, on=[step % world])
        run.clip(0.5)
        run.see_grads()
        run.step()
    run.opt.param_sync()
    states = run.opt.state_dict()
    run.opt.close()
    return [p.detach() for p in params], run.seen, states["state"]


def train(rank: int, world: int, training: Training, is_apart: bool) -> Any:
    with simulated() as script, hosts_apart() if is_apart else contextlib.nullcontext():
        gathers, reduces = Communicator.pair(timeout_s=30)
        with gathers, reduces:
            assert bool(threads_of_agreement()) == is_apart
            out = training(rank, world, reduces)
        expect_gone(script)
    expect_no_threads()
    return out


@pytest.mark.parametrize("world", [slow_case(2), 3])
@pytest.mark.parametrize("training", [alike, in_bfloat16, by_process_group, diverging])
def test_the_bits_of_ranks_that_share_a_host(rank_pool, world, training):
    expected = rank_pool(world).run(train, training, False)
    for rank, got in enumerate(rank_pool(world).run(train, training, True)):
        assert_bitwise_equal(got, expected[rank], f"rank {rank}")


def train_until_one_dies(rank: int, world: int, victim: int, moment: str, folder: str) -> tuple[int, float, str]:
    """Whom the survivor's error names, when it came, and its message."""

    def end() -> None:
        Path(folder, "died").write_text(str(time.monotonic()))
        die()

    params = make_params()
    with simulated() as script, hosts_apart():
        gathers, reduces = Communicator.pair(timeout_s=30, name="doomed")
        with gathers, reduces:
            opt = bw.ShardedAdamW(params, lr=0.01, process_group=reduces, bucket_cap_mb=1e-3)
            for step in range(3):
                train_step(params, opt, step, rank, world)
            if rank == victim and moment == "backward":
                loss_with(params, dyadic(params, 3), end).backward()
            elif rank == victim:  # the window is closed: the others wait for this rank's parameters
                loss_of(params, dyadic(params, 3)).backward()
                opt._engine._assembly.rows.step = lambda *_: end()  # type: ignore[method-assign,union-attr]
                opt.clip_grad_norm_(0.5)
                opt.step()
            with pytest.raises(PeerError) as caught:
                while True:
                    train_step(params, opt, 3, rank, world)
            seen = time.monotonic()
            with pytest.raises(PeerError):
                opt.close()
        expect_gone(script)
    expect_no_threads()
    return caught.value.rank, seen, str(caught.value)


@pytest.mark.parametrize("moment", ["backward", "step"])
@pytest.mark.parametrize(("world", "victim"), [slow_case(2, 0), slow_case(2, 1), slow_case(3, 0), (3, 1)])
def test_a_killed_rank_is_named_on_every_other(world, victim, moment, tmp_path):
    with fresh_ranks(world) as pool:
        results = pool.run(train_until_one_dies, victim, moment, str(tmp_path), expect_dead=[victim])
    died = float((tmp_path / "died").read_text())
    for rank, result in enumerate(results):
        if rank != victim:
            named, seen, message = result
            assert named == victim and f"rank {victim} died" in message
            assert message.startswith(f"[bucketwheel rank {rank}/{world} comm 'doomed")
            assert seen - died < SOON_S
