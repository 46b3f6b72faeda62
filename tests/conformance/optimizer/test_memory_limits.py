"""No more buckets are alive than `max_inflight_buckets` says, where gradients come in order."""

from __future__ import annotations

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
from tests.support.slow_reductions import slow_reductions

pytestmark = pytest.mark.dist


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


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_buckets_are_alive_than_asked_for(world: int, limit: int) -> None:
    """Gradients in order, reductions as fast as they are: counted at every hook, before and after ours."""

    def body(comm: Communicator) -> int:
        params = [Parameter(torch.zeros(numel)) for numel in (100, 700, 128, 128, 300, 128)]
        most = 0

        def count(_: object) -> None:
            nonlocal most
            live = comm.pool.stats().live_leases - at_rest
            assert live <= limit and live == len(opt._engine.grads.launcher.reductions.live)  # type: ignore[union-attr]
            most = max(most, live)

        for p in params:
            p.register_hook(count)
        opt = ShardedAdamW(params, process_group=comm, bucket_cap_mb=128 * 4 / 2**20, max_inflight_buckets=limit)
        for p in params:
            p.register_post_accumulate_grad_hook(count)
        at_rest = comm.pool.stats().live_leases
        for _ in range(5):
            for p in reversed(params):
                p.sum().backward()
            opt.step()
            opt.zero_grad()
            assert comm.pool.stats().live_leases == at_rest
        opt.close()
        return most

    with mock.patch.multiple(launch, _MOST_PATIENCE_S=20.0, _CLOSING_PATIENCE_S=20.0):
        assert all(1 <= most <= limit for most in run_local(world, body))


def test_a_parameter_in_many_buckets_keeps_to_the_limit() -> None:
    """Each of its buckets is launched before the next one takes memory."""

    def body(comm: Communicator, limit: int) -> int:
        param = Parameter(torch.zeros(1024))
        opt = ShardedAdamW([param], process_group=comm, bucket_cap_mb=128 * 4 / 2**20, max_inflight_buckets=limit)
        param.sum().backward()
        opt.step()
        found = opt.memory_summary()["buckets_peak"] // (128 * 4)
        opt.close()
        return found

    with slow_reductions():
        for limit in (1, 2, 4):
            assert run_local(2, body, limit) == [limit, limit]


def test_a_rank_without_gradients_keeps_to_the_limit() -> None:
    """Rank 1 runs no backward and launches everything at the window's end, when all ranks do."""

    def body(comm: Communicator) -> int:
        params = [Parameter(torch.zeros(128)) for _ in range(8)]
        opt = ShardedAdamW(params, process_group=comm, bucket_cap_mb=128 * 4 / 2**20, max_inflight_buckets=2)
        if comm.rank == 0:
            torch.stack([p.sum() for p in params]).sum().backward()
        opt.step()
        found = opt.memory_summary()["buckets_peak"] // (128 * 4)
        opt.close()
        return found

    with slow_reductions(), mock.patch.object(launch, "_MOST_PATIENCE_S", 0.0):
        assert run_local(2, body) == [8, 2]
