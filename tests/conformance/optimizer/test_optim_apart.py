"""ShardedAdamW of ranks that do not share a host: what they agree on goes through gloo. The bits of ranks that share one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.support.bits import assert_bitwise_equal
from tests.support.failure_cases import expect_gone, expect_no_threads, hosts_apart, threads_of_agreement
from tests.support.optim_twins import SHAPES, TINY, Run, make_params
from tests.support.simulated_nccl import simulated

pytestmark = pytest.mark.dist


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


def train(rank: int, world: int, is_apart: bool) -> Any:
    expect_no_threads()  # that of an earlier test's communicator may go on a moment
    with simulated() as script, hosts_apart() if is_apart else contextlib.nullcontext():
        gathers, reduces = Communicator.pair(timeout_s=30)
        with gathers, reduces:
            assert bool(threads_of_agreement()) == is_apart
            out = diverging(rank, world, reduces)
        expect_gone(script)
    expect_no_threads()
    return out


def test_the_bits_of_ranks_that_share_a_host(rank_pool):
    expected = rank_pool(3).run(train, False)
    for rank, got in enumerate(rank_pool(3).run(train, True)):
        assert_bitwise_equal(got, expected[rank], f"rank {rank}")
