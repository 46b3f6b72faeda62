"""Gradients in registered memory: reduced from the same places on all ranks, whatever order they arrive in.

Ranks are processes, NCCL is the fake one, which reads the input of a reduce-scatter when all ranks have come to it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.conformance.optimizer.test_optim_cuda import in_world
from tests.support import simulated_nccl
from tests.support.bits import assert_bitwise_equal
from tests.support.failure_cases import error_of
from tests.support.optim_twins import dyadic, make_params, share
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist

SMALL = {"lr": 1e-2, "bucket_cap_mb": 1e-3}


@contextlib.contextmanager
def pair(registered: bool, *, checks: bool = False, delays: int = 1) -> Iterator[tuple[Communicator, Any]]:
    """The communicator of reduce-scatters, and NCCL's script. ``checks``: ranks compare the places of all operands."""
    script = simulated_nccl.install()
    script.fake_nccl_reset()
    with posing(delays=delays), mock.patch.dict(os.environ, BW_COMM_CHECK="1" if checks else "0"):
        gathers, reduces = Communicator.pair(timeout_s=30, registered=registered)
        with gathers, reduces:
            yield reduces, script


def mixed_params() -> list[Parameter]:
    """Of two dtypes, so that the buckets of two spaces take turns."""
    return [Parameter(p.detach().to(torch.bfloat16)) if i % 3 == 0 else p for i, p in enumerate(make_params())]


class Inputs:
    """Where the inputs of the reduce-scatters lie, from the begin of the planned memory on; -1: elsewhere."""

    def __init__(self, opt: bw.ShardedAdamW) -> None:
        self.offsets: list[int] = []
        self.lates = 0
        self.sync = opt._engine.grads
        self.sync._native.observe(self._note)

    def _note(self, bucket: int, late: bool, offset: int) -> None:
        self.offsets.append(offset)
        self.lates += late


def run_backward(params: Sequence[Parameter], order: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
    for i in order:
        (params[i] * grads[i]).sum().backward()


# ---- the same places and the same bits


def is_checked(seed: int, overlap: bool) -> bool:
    """Whether ranks compare operands, for which each waits where it launches until all do."""
    return seed % 2 == 0 or not overlap


def orders(seed: int, rank: int, count: int, overlap: bool) -> Iterator[tuple[int, Sequence[int], bool, str]]:
    """Backwards: (step, the parameters that this rank uses, whether in `no_sync`, what is called then).

    The simulated device's current stream is the calling thread, which may wait for what a peer launches. So with
    ``overlap`` a window begins with a gradient of every parameter on every rank; but the last bucket is waited for by
    nobody before the window ends.
    """
    same, own = random.Random(seed), random.Random(f"{seed} {rank}")
    for step in range(5):
        is_fresh = True
        for left in range(same.randrange(3), -1, -1):
            is_kept = same.random() < 0.25
            uses = own.sample(range(count), count if overlap and is_fresh else own.randrange(1, count + 1))
            if overlap and is_fresh and not is_checked(seed, overlap) and (step + rank) % 2:
                uses.remove(0)
            then = same.choice(["", "", "grad_sync", "zero_grad", ""]) if left else "step"
            is_fresh = then == "grad_sync" or (is_fresh and is_kept)
            yield step, uses, is_kept, then


def trained(
    rank: int, comm: Communicator, seed: int, overlap: bool, watch: Callable[[bw.ShardedAdamW], None]
) -> list[torch.Tensor]:
    params = mixed_params()
    opt = bw.ShardedAdamW(
        params, process_group=comm, max_inflight_buckets=1 + seed % 3, overlap_grad_sync=overlap, **SMALL
    )
    watch(opt)
    out = []
    for number, (step, uses, is_kept, then) in enumerate(orders(seed, rank, len(params), overlap)):
        with opt.no_sync() if is_kept else contextlib.nullcontext():
            run_backward(params, uses, share(dyadic(params, number), rank, comm.size))
        if then == "grad_sync":
            opt.grad_sync()
        elif then == "zero_grad":
            opt.zero_grad()
        elif then == "step":
            out.append(opt.clip_grad_norm_(0.5).clone())
            opt.step()
            if step % 3:
                opt.zero_grad()
    opt.param_sync()
    saved = opt.state_dict()["state"]
    out += [p.detach().clone() for p in params] + [saved[i]["exp_avg"].clone() for i in sorted(saved)]
    opt.close()
    comm.pool.expect_no_leases()
    return out


def on_slots(rank: int, world: int, seed: int, overlap: bool) -> tuple[list[torch.Tensor], list[int], dict[str, int]]:
    """What training leaves, where each bucket was reduced, and what there was of the unusual."""
    watched: list[Inputs] = []
    with pair(True, checks=is_checked(seed, overlap), delays=seed) as (comm, _):
        out = trained(rank, comm, seed, overlap, lambda opt: watched.append(Inputs(opt)))
    (inputs,) = watched
    assert set(inputs.offsets) == set(inputs.sync.plan.placement.offsets.values())
    return out, inputs.offsets, {"on the side": inputs.sync.side_pool.stats().acquires, "late": inputs.lates}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world", [2, slow_case(3)])
def test_any_order_has_the_same_bits_and_the_same_places(rank_pool, world, overlap):
    unusual = {"on the side": 0, "late": 0}
    for seed in range(4):
        expected = in_world(world, False, lambda rank, comm, s=seed: trained(rank, comm, s, overlap, lambda opt: None))
        found = rank_pool(world).run(on_slots, seed, overlap, timeout_s=60)
        for rank, (out, offsets, counts) in enumerate(found):
            assert_bitwise_equal(out, expected[rank], f"seed {seed}, rank {rank}")
            assert offsets == found[0][1], f"seed {seed}, rank {rank}"
            for kind in unusual:
                unusual[kind] += counts[kind]
    assert min(unusual.values()) > 10 * world, unusual


# ---- beginning and end


def closed_in_a_conflict(rank: int, world: int) -> None:
    """The window is open, with gradients in the slots, which are given back."""
    with pair(True, checks=True) as (comm, _):
        for _ in range(2):
            params = mixed_params()
            opt = bw.ShardedAdamW(params, process_group=comm, **SMALL)
            run_backward(params, [8, 7], dyadic(params, 0))
            if rank == 0:
                params[8].grad = None
            with pytest.raises(RuntimeError, match="replaced or dropped"):
                opt.step()
            opt.close()
            comm.pool.expect_no_leases()


def test_an_optimizer_that_is_closed_in_a_conflict_leaves_no_lease(rank_pool):
    rank_pool(2).run(closed_in_a_conflict, timeout_s=30)


def with_other_leases(rank: int, world: int, of_gathers: bool) -> str:
    with pair(True) as (comm, script):
        params = mixed_params()
        lease = (comm.gathers if of_gathers else comm).pool.acquire("mine", 4096 * (1 + rank))
        with pytest.raises(RuntimeError, match="must be at the same places") as caught:
            bw.ShardedAdamW(params, process_group=comm, **SMALL)
        assert script.fake_nccl_live_windows() == 0
        lease.release()
        return str(caught.value)


@pytest.mark.parametrize("of_gathers", [True, False])
def test_ranks_with_other_leases_in_the_pool_are_refused(rank_pool, of_gathers):
    """The slabs are alike, so NCCL could register them, and would reduce one bucket with another."""
    what = "flat memory 0" if of_gathers else "the buckets"
    for text in rank_pool(2).run(with_other_leases, of_gathers, timeout_s=30):
        assert f"{what} at (0, " in text


def fails_to_register(rank: int, world: int, call: int) -> str:
    with pair(True) as (comm, script):
        params = mixed_params()
        if rank == 1:
            script.fake_nccl_fail(b"ncclCommWindowRegister", call, 3)
        kind, text, _ = error_of(lambda: bw.ShardedAdamW(params, process_group=comm, **SMALL))
        assert kind == "CommError", kind
        gc.collect()
        run_backward(params, range(len(params)), dyadic(params, 0))
        assert_bitwise_equal([p.grad for p in params], dyadic(params, 0), "no hook is left")
        return text


@pytest.mark.parametrize("call", [1, 2])
def test_a_rank_that_cannot_register_fails_all(rank_pool, call):
    for text in rank_pool(2).run(fails_to_register, call, timeout_s=30):
        assert "ncclCommWindowRegister: 3" in text
