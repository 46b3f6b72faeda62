"""Gradients in registered memory: reduced from the same places on all ranks, whatever order they arrive in.

Ranks are processes, NCCL is the fake one, which reads the input of a reduce-scatter when all ranks have come to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import Parameter

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.errors import CrossRankMismatch
from bucketwheel.optim import step_buckets
from bucketwheel.pool.plan import Plan
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.optimizer.test_optim_cuda import in_world
from tests.support import simulated_nccl
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
    """Where the inputs of the reduce-scatters lie, from the begin of the slots on."""

    def __init__(self, comm: Communicator, opt: bw.ShardedAdamW) -> None:
        self.offsets: list[int] = []
        self._comm, self._reduce = comm, comm._reduce_scatter_into
        self._begin = opt._engine.grads.launcher.slots.memory.data_ptr()
        comm._reduce_scatter_into = self._watched  # type: ignore[method-assign]

    def _watched(self, full: torch.Tensor, sink: Any) -> Handle:
        assert not self._comm.is_registered or self._comm.pool.holds(full)
        self.offsets.append(full.data_ptr() - self._begin)
        return self._reduce(full, sink)


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
    watched: list[Any] = []
    with pair(True, checks=is_checked(seed, overlap), delays=seed) as (comm, _):
        out = trained(rank, comm, seed, overlap, lambda opt: watched.extend((Inputs(comm, opt), opt._engine.grads)))
    inputs, sync = watched
    lates = len(inputs.offsets) - sync._schedule.window * len(sync.buckets)
    assert set(inputs.offsets) == set(sync.launcher.slots.offsets)
    return out, inputs.offsets, {"on the side": sync.launcher.pool.stats().acquires, "late": lates}


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


def each_in_its_turn(rank: int, world: int, numels: Sequence[int]) -> tuple[list[int], list[int], int]:
    with pair(True, checks=True) as (comm, script):
        params = [Parameter(torch.full((numel,), 1.0)) for numel in numels]
        opt = bw.ShardedAdamW(params, process_group=comm, **SMALL)
        assert script.fake_nccl_live_windows() == 2 and comm.features["windows"] and comm.gathers.features["windows"]
        assert comm.gathers.pool.holds(params[0].detach())
        inputs = Inputs(comm, opt)
        for _ in range(3):
            run_backward(params, range(len(params) - 1, -1, -1), [torch.ones_like(p) for p in params])
            opt.step()
            opt.zero_grad()
        sync = opt._engine.grads
        reserved_bytes = comm.pool.stats().reserved_bytes + comm.gathers.pool.stats().reserved_bytes
        assert opt.memory_summary()["pool"] + opt.memory_summary()["params"] == reserved_bytes
        opt.close()
        return inputs.offsets, sync.launcher.slots.offsets, sync.launcher.pool.stats().acquires


@pytest.mark.parametrize("numels", [(300, 200, 250, 240, 260), (100, 3000), (50,)], ids=str)
def test_gradients_in_the_order_of_buckets_are_packed_where_they_are_reduced(rank_pool, numels):
    """Also those of a parameter in more buckets than may be in flight."""
    for offsets, planned, others in rank_pool(2).run(each_in_its_turn, numels, timeout_s=60):
        assert others == 0, "nothing was copied"
        assert offsets == planned * 3


# ---- who waits


def while_a_peer_is_late(rank: int, world: int, registered: bool, order: Sequence[int]) -> list[torch.Tensor]:
    """Rank 0 has all its gradients when rank 1 begins: what it has launched has been read by nobody."""
    with pair(registered) as (comm, _):
        params = [Parameter(torch.full((1024,), 1.0)) for _ in range(6)]
        opt = bw.ShardedAdamW(params, process_group=comm, bucket_cap_mb=1024 * 4 / 2**20)
        assert len(opt._engine.grads.buckets) == 6
        out = []
        for step in range(2):
            comm.exchange(b"")
            if rank == 1:
                time.sleep(0.2)
            run_backward(params, order if rank == 0 else range(5, -1, -1), dyadic(params, 10 * step + rank))
            opt.grad_sync()
            out += [opt.full_grad(p) for p in params]
            opt.step()
            opt.zero_grad()
        opt.close()
        return out


@pytest.mark.parametrize("order", [(5, 4, 3, 2, 1, 0), (1, 3, 5, 4, 2, 0), (0, 1, 2, 3, 4, 5)], ids=str)
def test_nothing_is_written_where_peers_have_still_to_read(rank_pool, order):
    plain = rank_pool(2).run(while_a_peer_is_late, False, order, timeout_s=60)
    assert_bitwise_equal(rank_pool(2).run(while_a_peer_is_late, True, order, timeout_s=60), plain)


def dropped_while_they_are_reduced(rank: int, world: int) -> None:
    with pair(True) as (comm, _):
        param = Parameter(torch.ones(200))
        opt = bw.ShardedAdamW([param], process_group=comm, max_inflight_buckets=1)
        comm.stream.pause(0.3)
        for value in (1.0, 2.0):  # launched; late
            (param * value).sum().backward()
        opt.zero_grad()
        (param * 3.0).sum().backward()
        opt.grad_sync()
        assert opt.full_grad(param).unique().tolist() == [3.0]
        opt.close()


def test_what_is_void_is_zeroed_behind_its_reduction(rank_pool):
    rank_pool(2).run(dropped_while_they_are_reduced, timeout_s=30)


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
        params = mixed_params()
        opt = bw.ShardedAdamW(params, process_group=comm, **SMALL)
        run_backward(params, range(len(params)), dyadic(params, 0))
        opt.grad_sync()
        for p, g in zip(params, dyadic(params, 0), strict=True):
            assert_bitwise_equal(opt.full_grad(p), g.float())
        opt.close()


def test_an_optimizer_that_is_closed_in_a_conflict_leaves_no_lease(rank_pool):
    rank_pool(2).run(closed_in_a_conflict, timeout_s=30)


def with_other_leases(rank: int, world: int, of_gathers: bool) -> str:
    with pair(True) as (comm, script):
        params = mixed_params()
        lease = (comm.gathers if of_gathers else comm).pool.acquire("mine", 4096 * (1 + rank))
        with pytest.raises(RuntimeError, match="at other places") as caught:
            bw.ShardedAdamW(params, process_group=comm, **SMALL)
        assert script.fake_nccl_live_windows() == 0
        lease.release()
        return str(caught.value)


@pytest.mark.parametrize("of_gathers", [True, False])
def test_ranks_with_other_leases_in_the_pool_are_refused(rank_pool, of_gathers):
    """The slabs are alike, so NCCL could register them, and would reduce one bucket with another."""
    what = "flat memory 0" if of_gathers else "the buckets"
    for text in rank_pool(2).run(with_other_leases, of_gathers, timeout_s=30):
        assert f"{what} at [(0, " in text


def with_another_plan(rank: int, world: int) -> str:
    """Of a rank whose code places buckets otherwise: it is found before anything is registered."""
    plan = step_buckets.plan_window

    def planned(*args: Any, **options: Any) -> Plan:
        found = plan(*args, **options)
        offsets = dict(found.placement.offsets)
        offsets["grads/2"] += 512 * rank
        return dataclasses.replace(found, placement=dataclasses.replace(found.placement, offsets=offsets))

    with pair(True) as (comm, script), mock.patch.object(step_buckets, "plan_window", planned):
        with pytest.raises(CrossRankMismatch) as caught:
            bw.ShardedAdamW(mixed_params(), process_group=comm, **SMALL)
        assert script.fake_nccl_live_windows() == 0
        return str(caught.value)


def test_ranks_with_other_plans_are_refused(rank_pool):
    texts = rank_pool(2).run(with_another_plan, timeout_s=30)
    offsets = [int(re.findall(rf"rank {rank}: key 'grads/2' at (\d+) of", texts[0])[0]) for rank in (0, 1)]
    assert offsets[1] == offsets[0] + 512 and texts[0] == texts[1]


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
