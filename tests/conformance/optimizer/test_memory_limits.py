"""No more buckets are alive than `max_inflight_buckets` says, and backward waits for no peer to keep to that."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.grads import launch
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.optim_twins import run_local
from tests.support.simulated_cuda import posing
from tests.support.slow_reductions import slow_reductions

pytestmark = pytest.mark.dist

NUMEL = 128


def buckets_of(comm: Communicator, numels: list[int], limit: int) -> tuple[list[Parameter], ShardedAdamW]:
    params = [Parameter(torch.full((numel,), float(i + 1))) for i, numel in enumerate(numels)]
    bucket_cap_mb = NUMEL * 4 / 2**20
    return params, ShardedAdamW(params, process_group=comm, bucket_cap_mb=bucket_cap_mb, max_inflight_buckets=limit)


def run_backward(params: list[Parameter]) -> None:
    torch.stack([(p * p).sum() for p in params]).sum().backward()


def test_autograd_keeps_the_gradients_of_one_operation() -> None:
    """Of a linear layer one at a time; inside `no_sync` all."""

    def body(comm: Communicator) -> tuple[int, int]:
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
        grads: list[StorageWeakRef] = []
        most = 0

        def alive() -> int:
            return sum(not grad.expired() for grad in grads)

        def note(grad: Tensor) -> None:
            nonlocal most
            grads.append(StorageWeakRef(grad.untyped_storage()))
            most = max(most, alive())

        for p in model.parameters():
            p.register_hook(note)
        opt = ShardedAdamW(model.parameters(), process_group=comm, bucket_cap_mb=1e-3)
        model(torch.randn(2, 16)).sum().backward()
        assert len(grads) == 12 and alive() == 0
        opt.zero_grad()
        outside, most = most, 0
        with opt.no_sync():
            model(torch.randn(2, 16)).sum().backward()
        opt.close()
        return outside, most

    assert run_local(2, body) == [(1, 12)] * 2


@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("numels, of_rank_1", [([1024], True), ([NUMEL] * 8, False)], ids=["one", "many"])
def test_what_needs_many_buckets_keeps_to_the_limit(numels: list[int], of_rank_1: bool, limit: int) -> None:
    """A parameter in eight buckets: each is launched before the next one takes memory. And a rank that runs no backward:
    it launches everything at the window's end, when all ranks do."""

    def body(comm: Communicator) -> int:
        params, opt = buckets_of(comm, numels, limit)
        if comm.rank == 0 or of_rank_1:
            run_backward(params)
        opt.step()
        found = opt.memory_summary()["buckets_peak"] // (NUMEL * 4)
        opt.close()
        return found

    with slow_reductions(), mock.patch.object(launch, "_MOST_PATIENCE_S", 20.0 if of_rank_1 else 0.0):
        assert run_local(2, body) == [limit if of_rank_1 else 8, limit]


def test_backward_does_not_wait_on_cuda_for_a_peer_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 runs backward only after rank 0 has. Rank 0 holds a window's buckets, in the same memory in every window."""
    monkeypatch.setattr(launch, "_MOST_PATIENCE_S", 1000.0)  # whoever waited would not come back in time
    turns = [threading.Event() for _ in range(4)]
    buckets = 8

    def body(comm: Communicator) -> tuple[list[int], list[Tensor]]:
        params, opt = buckets_of(comm, [NUMEL] * buckets, 1)
        at_rest = comm.pool.stats().live_leases
        high_water_bytes = []
        for turn in turns:
            if comm.rank == 1:
                assert turn.wait(20)
            run_backward(params)
            if comm.rank == 0:
                assert comm.pool.stats().live_leases - at_rest == buckets - 1, "all but the one that has the slot"
                turn.set()
            opt.step()
            opt.zero_grad()
            assert comm.pool.stats().live_leases == at_rest
            high_water_bytes.append(comm.pool.stats().high_water_bytes)
        opt.close()
        return high_water_bytes, [p.detach().clone() for p in params]

    with posing(delays=7):
        (ahead, params), (behind, others) = run_local(2, body, device="cuda", timeout_s=30)
    assert len(set(ahead)) == len(set(behind)) == 1
    assert ahead[0] == behind[0] + (buckets - 1) * NUMEL * 4
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q) and not torch.equal(p, torch.ones(NUMEL))


def test_a_peer_that_comes_late_is_waited_for_once_a_window() -> None:
    """A loss all-reduce before backward would look like this: rank 1 runs backward only after rank 0 has."""
    turns = [threading.Event() for _ in range(3)]

    def body(comm: Communicator) -> list[float]:
        params, opt = buckets_of(comm, [NUMEL] * 8, 2)
        reductions: Any = opt._engine.grads.launcher.reductions  # type: ignore[union-attr]
        patience = []
        for turn in turns:
            if comm.rank == 1:
                assert turn.wait(20)
            run_backward(params)
            assert reductions.is_patient == (comm.rank == 1), "rank 0 has more buckets than it may have in flight"
            turn.set()
            opt.step()
            opt.zero_grad()
            patience.append(reductions.patience_s)
        return patience

    early, late = run_local(2, body)
    assert early == [0.025, 0.0125, 0.00625] and set(late) == {0.05}


class Blind:
    """A handle that is in a stream of this rank; nobody knows whether peers have issued it."""

    def is_ordered(self) -> bool:
        return True

    def wait(self) -> None: ...


class Memory:
    def __init__(self, held: list[int]) -> None:
        self.held = held
        held[0] += 1

    def release(self, after: Any) -> None:
        self.held[0] -= 1


def test_between_hosts_memory_stays_while_ranks_run_different_graphs() -> None:
    """Windows of six buckets, of which two may have memory; in the second some rank had not launched everything."""
    with posing():
        reductions = launch.Reductions(0, 2, is_blind=True)
        held, most = [0], []
        for window in range(8):
            most.append(0)
            for _ in range(6):
                reductions.make_room()
                reductions.add(Blind(), Memory(held))  # type: ignore[arg-type]
                most[-1] = max(most[-1], held[0])
            reductions.wait()
            reductions.end_window(is_complete=window != 1)
            assert held == [0]
    assert most == [2, 2, 6, 6, 6, 6, 2, 2]
