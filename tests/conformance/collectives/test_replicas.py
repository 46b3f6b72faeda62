"""HSDP beside the optimizer's conformance suite: what is refused, how failures spread, what waits for whom."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketwheel.comm import nccl
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.replicas import Replicas
from bucketwheel.errors import CommError, PeerError
from bucketwheel.kernels.ops import all_gather
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import run_threads
from tests.conformance.optimizer.test_optim_cuda import model_of
from tests.conformance.optimizer.test_optim_nccl import expect_free_running_steps
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, dyadic, loss_of, make_params, run_local
from tests.support.replica_ranks import torch_groups, with_replicas
from tests.support.simulated_cuda import Calls, posing
from tests.support.simulated_nccl import simulated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_sums_are_not_rounded_on_their_way(dtype: torch.dtype) -> None:
    """Those of bfloat16 need more digits than it has; a third has no end, so float32 would show in float64."""

    def train(rank: int, **groups: Communicator) -> list[Tensor]:
        params = make_params(dtype, seed=rank)
        opt = ShardedAdamW(params, lr=0.02, **groups, **TINY)
        for step in range(3):
            grads = dyadic([p.double() for p in params], step)
            if dtype == torch.float64:
                grads = [g / 3 if rank == 0 else torch.zeros_like(g) for g in grads]
            else:
                grads = [g + (300 + rank) / 16 * (g > 0) for g in grads]
            loss_of(params, [g.to(dtype) for g in grads]).backward()
            opt.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()
        opt.close()
        return [p.detach().clone() for p in params]

    expected = run_local(4, lambda comm: train(comm.rank, process_group=comm))[0]
    for got in with_replicas(2, 2, lambda rank, row, column: train(rank, process_group=row, replicate_group=column)):
        assert_bitwise_equal(got, expected)


def test_buckets_leave_during_backward() -> None:
    """All three operations of a bucket are issued from the hooks, in bucket order, on every rank."""

    def issued(comm: Communicator) -> int:
        """How many operations before this one, which counts too."""
        return all_gather(torch.empty(comm.size), torch.empty(1), comm).synchronize()._native.seq

    def body(rank: int, shard: Communicator, replicate: Communicator) -> tuple[list[int], list[int], int]:
        params = make_params(seed=rank)
        opt = ShardedAdamW(params, process_group=shard, replicate_group=replicate, **TINY)
        run = Run(opt, params, rank, 4)
        run.backward(0)
        run.step()
        launched: list[int] = []
        opt._engine.grads._native.observe(lambda bucket, *_: launched.append(bucket))
        before = [issued(comm) for comm in (shard, replicate)]
        run.backward(1)
        during = list(launched)
        operations = [issued(comm) - then - 1 for comm, then in zip((shard, replicate), before, strict=True)]
        opt.grad_sync()
        return during, operations, len(launched) - len(during)

    for during, operations, after in with_replicas(2, 2, body):
        assert len(during) >= 10 and during == list(range(len(during)))
        assert operations == [len(during), 2 * len(during)]
        assert after <= 2, "only buckets of padding and parameters without elements are left"


# --- what is refused --------------------------------------------------------------------------------------------------


def wired(rows: list[list[int]], columns: list[list[int]], body: Callable[..., Any]) -> list[Any]:
    """``body(shard, replicate)`` with these ranks as groups, in their order."""
    row_worlds, column_worlds = [LocalWorld(len(g)) for g in rows], [LocalWorld(len(g)) for g in columns]

    def of(rank: int, groups: list[list[int]], worlds: list[LocalWorld]) -> Communicator:
        at = next(i for i, group in enumerate(groups) if rank in group)
        return Communicator(worlds[at].rank(groups[at].index(rank)), timeout_s=10)

    world = sum(map(len, rows))
    return run_threads(
        lambda rank, _: body(of(rank, rows, row_worlds), of(rank, columns, column_worlds)), world, timeout_s=30
    )


UNEQUAL_GROUPS = {
    "columns are rows": ([[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "other places": ([[0, 1], [2, 3]], [[0, 3], [1, 2]]),
    "other order of a column": ([[0, 1], [2, 3]], [[0, 2], [3, 1]]),
    "unequal rows": ([[0, 1, 2], [3, 4]], [[0, 3], [1, 4], [2]]),
    "twisted columns": ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 5], [4, 6], [3, 7]]),
    "a column more": ([[0, 1], [2, 3]], [[0, 2], [1], [3]]),
}


@pytest.mark.parametrize("case", UNEQUAL_GROUPS)
def test_groups_that_do_not_fit_are_refused_on_every_rank(case: str) -> None:
    def body(shard: Communicator, replicate: Communicator) -> str:
        param = torch.nn.Parameter(torch.ones(3))
        try:
            with pytest.raises(ValueError, match="do not fit") as raised:
                ShardedAdamW([param], process_group=shard, replicate_group=replicate)
            return str(raised.value)
        finally:
            shard.close()
            replicate.close()

    for message in wired(*UNEQUAL_GROUPS[case], body):
        assert "rank r * S + s" in message


def test_a_replicate_group_on_some_ranks_is_refused_on_every_rank() -> None:
    """Those that share no group with the odd rank learn of it when others go."""

    def body(rank: int, shard: Communicator, replicate: Communicator) -> str:
        groups = {"process_group": shard} if rank == 1 else {"process_group": shard, "replicate_group": replicate}
        with pytest.raises((ValueError, RuntimeError, PeerError)) as raised:
            ShardedAdamW([torch.nn.Parameter(torch.ones(3))], **groups)
        return str(raised.value)

    began = time.monotonic()
    messages = with_replicas(2, 2, body, timeout_s=60)
    assert time.monotonic() - began < 15
    assert "this rank does not" in messages[1]
    assert "process_group of rank 0 has 1 ranks with a replicate_group" in messages[0]


def test_registered_memory_is_refused() -> None:
    class Registered:
        is_registered, name = True, "x"

    with pytest.raises(ValueError, match="registered=True"):
        Replicas(Registered(), Registered())  # type: ignore[arg-type]


def test_a_replicate_group_alone_is_refused() -> None:
    with Communicator(LocalWorld(1).rank(0)) as comm:
        with pytest.raises(ValueError, match="needs a process_group"):
            ShardedAdamW([torch.nn.Parameter(torch.ones(3))], replicate_group=comm)


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_failure_reaches_ranks_that_wait_in_their_other_group(device: str | None) -> None:
    """Rank 3 fails in its shard group and is gone; nobody waits in that, and each waits for the next."""
    everyone = threading.Barrier(4, timeout=15)

    def body(rank: int, shard: Communicator, replicate: Communicator) -> tuple[str, str]:
        replicas = Replicas(shard, replicate)
        everyone.wait()
        if rank == 3:
            shard.abort("on fire")
        waited_for = {0: replicas.shard, 1: replicas._replicate, 2: replicas._replicate, 3: None}[rank]
        begin = time.monotonic()
        if waited_for is not None:
            with pytest.raises(PeerError, match="on fire"):
                waited_for.exchange(b"")
            assert time.monotonic() - begin < 5
        everyone.wait()
        time.sleep(0.4)  # the watchdog looks
        errors = []
        for comm in (shard, replicate):
            with pytest.raises(CommError, match="on fire") as caught:
                comm.exchange(b"")
            errors.append(type(caught.value).__name__)
        return tuple(errors)

    with posing() if device else contextlib.nullcontext():
        kinds = with_replicas(2, 2, body, device=device)
    assert kinds == [("PeerError", "PeerError")] * 3 + [("CommError", "CommError")]


def test_a_communicator_that_is_closed_fails_nobody() -> None:
    def body(rank: int, shard: Communicator, replicate: Communicator) -> Replicas:
        replicas = Replicas(shard, replicate)
        time.sleep(0.1 * rank)
        shard.close()
        time.sleep(0.4)  # the watchdog looks
        replicate.exchange(b"")
        return replicas

    with_replicas(2, 2, body)


def test_groups_of_a_closed_optimizer_fail_alone() -> None:
    """Though it is still there."""

    def body(rank: int, shard: Communicator, replicate: Communicator) -> ShardedAdamW:
        opt = ShardedAdamW(make_params(), process_group=shard, replicate_group=replicate)
        opt.close()
        replicate.exchange(b"")
        shard.exchange(b"")
        shard.abort("on fire")
        time.sleep(0.4)  # the watchdog looks
        assert replicate.exchange(b"") == [b""] * 2
        return opt

    with_replicas(2, 2, body)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_an_overflow_told_to_one_rank_is_one_of_all() -> None:
    """``found_inf`` comes in on one rank alone: what another optimizer's gradients were."""

    def body(rank: int, shard: Communicator, replicate: Communicator) -> float:
        params = make_params(seed=rank)
        opt = ShardedAdamW(params, process_group=shard, replicate_group=replicate)
        Run(opt, params, rank, 4).backward(0)
        found = torch.tensor(float(rank == 3))
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in params], found, torch.tensor(0.5))
        opt.close()
        return found.item()

    with posing():
        assert with_replicas(2, 2, body, device="cuda") == [1.0] * 4


def test_a_rank_on_one_device_is_not_held_up_by_peers_that_come_late() -> None:
    """Issuing behind an operation that peers have yet to issue would wait for them; they wait for this rank first."""

    def body(rank: int, shard: Communicator, replicate: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=shard, replicate_group=replicate, max_inflight_buckets=1, **TINY)
        run = Run(opt, params, rank, 4)
        for step in range(3):
            if rank != 3:
                run.backward(step)
            shard.exchange(b"")  # as a loss that all ranks average between backward and step
            replicate.exchange(b"")
            if rank == 3:
                run.backward(step)
            run.step()
        opt.close()

    with posing():
        with_replicas(2, 2, body, device="cuda", timeout_s=30)
    with_replicas(2, 2, body, timeout_s=30)


# --- over NCCL -------------------------------------------------------------------------------------------------------


def free_running_over_nccl(rank: int, world: int, takes_turns: bool) -> None:
    """By torch's process groups."""
    with simulated() as script, pytest.MonkeyPatch.context() as patch:
        before = script.fake_nccl_live_comms()
        if takes_turns:
            patch.setattr(nccl, "_is_launch_order_kept", False)
            patch.setattr(warnings, "warn", lambda *_, **__: None)
        model = model_of()
        groups = torch_groups(rank, world, 2)
        opt = ShardedAdamW(model.parameters(), lr=1e-2, bucket_cap_mb=0.004, max_inflight_buckets=1, **groups)
        assert opt._engine.reducer._takes_turns == takes_turns
        expect_free_running_steps(model, opt, rank)
        opt.close()
        assert script.fake_nccl_live_comms() == before, "close() ends all four communicators"


@pytest.mark.dist
@pytest.mark.parametrize("takes_turns", [False, True])
def test_over_nccl_backward_and_step_wait_for_nothing(rank_pool: Callable[[int], Any], takes_turns: bool) -> None:
    rank_pool(4).run(free_running_over_nccl, takes_turns)


def waits_over_nccl(rank: int, world: int, takes_turns: bool) -> tuple[int, int]:
    """How many buckets the first backward launches, and how many waits of streams it enqueues. No memory is used again."""
    with simulated(), pytest.MonkeyPatch.context() as patch:
        reducers = Replicas._reducers
        patch.setattr(Replicas, "_reducers", lambda self: (*reducers(self)[:3], takes_turns))
        params, groups = make_params(), torch_groups(rank, world, 2)
        opt = ShardedAdamW(params, max_inflight_buckets=1000, **groups, **TINY)
        launched: list[int] = []
        opt._engine.grads._native.observe(lambda bucket, *_: launched.append(bucket))
        calls = Calls()
        Run(opt, params, rank, world).backward(0)
        waits = calls.since()["stream_wait_event"]
        opt.close()
        return len(launched), waits


@pytest.mark.dist
def test_where_launches_have_no_order_each_bucket_waits_for_the_last_one(rank_pool: Callable[[int], Any]) -> None:
    """docs/developers/ordering.md: kernels of two groups could start in different orders on two ranks, and wait for each other."""
    free, in_turn = (rank_pool(4).run(waits_over_nccl, takes_turns) for takes_turns in (False, True))
    for (buckets, waits), (same, more) in zip(free, in_turn, strict=True):
        assert buckets == same > 10 and more == waits + buckets - 1
