"""How much memory reduce-scatters in flight hold on CUDA, simulated, and that backward waits for no peer to get it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.grads import launch
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import run_threads
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist

NUMEL, BUCKETS = 1024, 8


@pytest.fixture(autouse=True)
def simulated() -> Iterator[Any]:
    with posing(delays=7) as library:
        yield library


def on_ranks(world: int, body: Callable[[Communicator], Any]) -> list[Any]:
    places = LocalWorld(world)

    def rank_main(rank: int, _: int) -> Any:
        with Communicator(places.rank(rank), timeout_s=5, device="cuda") as comm:
            return body(comm)

    return run_threads(rank_main, world)


def one_bucket_each(comm: Communicator, limit: int) -> tuple[list[torch.nn.Parameter], ShardedAdamW]:
    params = [torch.nn.Parameter(torch.full((NUMEL,), float(i + 1))) for i in range(BUCKETS)]
    bucket_mb = NUMEL * 4 / 2**20
    return params, ShardedAdamW(params, process_group=comm, bucket_cap_mb=bucket_mb, max_inflight_buckets=limit)


def run_backward(params: list[torch.nn.Parameter]) -> None:
    torch.stack([(p * p).sum() for p in params]).sum().backward()


@pytest.mark.parametrize("limit", [1, 3])
def test_as_many_buckets_as_asked_for_have_memory(limit: int) -> None:
    """G20 of the optimizer's test rows. With one rank everything is in a stream at once: memory is given on behind it, and nothing waits."""

    def body(comm: Communicator) -> None:
        params, opt = one_bucket_each(comm, limit)
        at_rest = comm.pool.stats().live_leases
        held: list[int] = []
        for p in params:
            p.register_post_accumulate_grad_hook(lambda _: held.append(comm.pool.stats().live_leases - at_rest))
        for _ in range(3):
            held.clear()
            run_backward(params)
            assert held == [min(i + 1, limit) for i in range(BUCKETS)]
            opt.step()
            opt.zero_grad()
            assert comm.pool.stats().live_leases == at_rest
        opt.close()

    on_ranks(1, body)


def test_backward_does_not_wait_for_a_peer_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 runs backward only after rank 0 has. Rank 0 holds a window's buckets, in the same memory in every window."""
    monkeypatch.setattr(launch, "_MOST_PATIENCE_S", 1000.0)  # whoever waited would not come back in time
    turns = [threading.Event() for _ in range(4)]

    def body(comm: Communicator) -> tuple[list[int], list[torch.Tensor]]:
        params, opt = one_bucket_each(comm, 1)
        at_rest = comm.pool.stats().live_leases
        high_water_bytes = []
        for turn in turns:
            if comm.rank == 1:
                assert turn.wait(20)
            run_backward(params)
            if comm.rank == 0:
                assert comm.pool.stats().live_leases - at_rest == BUCKETS
                turn.set()
            opt.step()
            opt.zero_grad()
            assert comm.pool.stats().live_leases == at_rest
            high_water_bytes.append(comm.pool.stats().high_water_bytes)
        opt.close()
        return high_water_bytes, [p.detach().clone() for p in params]

    (ahead, params), (behind, others) = on_ranks(2, body)
    assert len(set(ahead)) == len(set(behind)) == 1
    assert ahead[0] >= behind[0] + (BUCKETS - 2) * NUMEL * 4
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q) and not torch.equal(p, torch.ones(NUMEL))


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
    inflight_now = launch.Reductions(0, 2, is_blind=True)
    held, most = [0], []
    for window in range(8):
        most.append(0)
        for _ in range(6):
            inflight_now.make_room()
            inflight_now.add(Blind(), Memory(held))  # type: ignore[arg-type]
            most[-1] = max(most[-1], held[0])
        inflight_now.wait()
        inflight_now.end_window(is_complete=window != 1)
        assert held == [0]
    assert most == [2, 2, 6, 6, 6, 6, 2, 2]
