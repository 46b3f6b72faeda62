"""HSDP whose ranks are threads that share one simulated CUDA device: the bits of the CPU."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.errors import Error
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.pool.pool import Lease
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.optimizer.test_optim_cuda import trained
from tests.support.optim_twins import TINY, Run, make_params
from tests.support.replica_ranks import with_replicas
from tests.support.simulated_cuda import posing

CUDA_CASES = [
    (torch.float32, "none", {}),
    (torch.float32, "own", {"overlap_param_sync": True, "max_inflight_buckets": 1}),
    (torch.bfloat16, "stock", {"gradient_average": False}),
    (torch.float32, "inf", {"overlap_grad_sync": False}),
]


def trained_with_replicas(
    rank: int, shard: Communicator, replicate: Communicator, dtype: torch.dtype, clip: str, options: dict[str, Any]
) -> list[Tensor]:
    return trained(rank, shard, dtype, clip, replicate_group=replicate, **options)


@pytest.mark.parametrize(
    ("shape", "dtype", "clip", "options"),
    [*(((2, 2), *case) for case in CUDA_CASES), *((shape, *CUDA_CASES[0]) for shape in ((1, 2), (2, 3)))],
    ids=str,
)
def test_ranks_on_one_device_have_the_bits_of_the_cpu(
    shape: tuple[int, int], dtype: torch.dtype, clip: str, options: dict[str, Any]
) -> None:
    expected = with_replicas(*shape, trained_with_replicas, dtype, clip, options)
    with posing():
        got = with_replicas(*shape, trained_with_replicas, dtype, clip, options, device="cuda")
    for rank, tensors in enumerate(got):
        assert_bitwise_equal(tensors, expected[rank], f"rank {rank}")


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


class RecordedLease:
    """Notes behind what a lease is given back, and does so."""

    def __init__(self, lease: Lease, ends: list[Handle | None]) -> None:
        self.lease = lease
        self.ends = ends

    def release(self, *, after: Handle | None = None) -> None:
        self.ends.append(after)
        self.lease.release(after=after)


def test_what_never_ends_keeps_its_memory_until_what_was_issued_of_it_has() -> None:
    """A window that failed leaves reductions with an operation or two issued; these still write partial sums."""
    all_have_looked = threading.Barrier(4)

    def body(rank: int, shard: Communicator, replicate: Communicator) -> int:
        params = make_params()
        opt = ShardedAdamW(params, process_group=shard, replicate_group=replicate, **TINY)
        run = Run(opt, params, rank, 4)
        if rank != 3:
            run.backward(0)
        replicas: Any = opt._engine.reducer
        last = [reduction.steps[-1] for reduction in replicas._waiting]
        ends: list[Handle | None] = []
        for partial in replicas._partials:
            partial.lease = RecordedLease(partial.lease, ends)
        replicas.release()
        assert set(last) <= set(ends)
        all_have_looked.wait(20)
        replicas.abort("the test is over")
        with contextlib.suppress(Error):
            opt.close()
        return len(last)

    with posing():
        waiting = with_replicas(2, 2, body, device="cuda", timeout_s=30)
    assert waiting[2] > 0 and waiting[3] == 0
