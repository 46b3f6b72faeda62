"""No more buckets are alive than `max_inflight_buckets` says, and backward waits for no peer to keep to that."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.failure_cases import apart
from tests.support.optim_twins import run_local
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist

NUMEL = 128


def buckets_of(comm: Communicator, numels: list[int], limit: int) -> tuple[list[Parameter], ShardedAdamW]:
    params = [Parameter(torch.full((numel,), float(i + 1))) for i, numel in enumerate(numels)]
    bucket_cap_mb = NUMEL * 4 / 2**20
    return params, ShardedAdamW(params, process_group=comm, bucket_cap_mb=bucket_cap_mb, max_inflight_buckets=limit)


def native_of(opt: ShardedAdamW) -> Any:
    return opt._engine.grads._native  # type: ignore[union-attr]


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
        # Reductions are slower than the hooks, so that no room comes by itself.
        native_of(opt).observe(lambda *_: comm.stream.pause(0.004))
        if comm.rank == 0 or of_rank_1:
            run_backward(params)
        opt.step()
        found = opt.memory_summary()["buckets_peak"] // (NUMEL * 4)
        opt.close()
        return found

    assert run_local(2, body) == [limit if of_rank_1 else 8, limit]


def test_backward_does_not_wait_on_cuda_for_a_peer_that_has_not_begun() -> None:
    """Rank 1 runs backward only after rank 0 has. Rank 0 holds a window's buckets, in the same memory in every window."""
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
    """A loss all-reduce before backward would look like this: rank 1 runs backward only after rank 0 has. Rank 0 waits for
    room at the third of its 60 buckets, for 50 ms, and at no other one."""
    turns = [threading.Event() for _ in range(3)]

    def body(comm: Communicator) -> list[float]:
        params, opt = buckets_of(comm, [NUMEL] * 60, 2)
        seconds = []
        for turn in turns:
            if comm.rank == 1:
                assert turn.wait(20)
            begin = time.monotonic()
            run_backward(params)
            seconds.append(time.monotonic() - begin)
            turn.set()
            opt.step()
            opt.zero_grad()
        assert opt.memory_summary()["buckets_peak"] == (60 if comm.rank == 0 else 2) * NUMEL * 4
        opt.close()
        return seconds

    for seconds in run_local(2, body)[0]:
        assert 0.05 <= seconds < 2.5


def across_hosts(rank: int, world: int) -> list[int]:
    """The most buckets that had memory in each of eight windows of six. In the second, rank 1 uses only some parameters."""
    with apart("limits") as (comm, _):
        params, opt = buckets_of(comm, [NUMEL] * 6, 2)
        most = [0]
        native_of(opt).observe(lambda *_: most.append(max(most.pop(), opt.memory_summary()["buckets"] // (NUMEL * 4))))
        for window in range(8):
            used = params[3:] if (window, rank) == (1, 1) else params
            run_backward(used)
            opt.step()
            opt.zero_grad()
            most.append(0)
        opt.close()
        return most[:-1]


def test_between_hosts_memory_stays_while_ranks_run_different_graphs(rank_pool: Any) -> None:
    """In the windows after one that some rank has closed before it had launched every bucket."""
    for most in rank_pool(2).run(across_hosts):
        assert most == [2, 2, 6, 6, 6, 6, 2, 2]
