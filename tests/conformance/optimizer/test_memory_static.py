"""The memory of buckets under ``static_graph=True``: they wait for as many gradients of a parameter as the first window had."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim import memory
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.conformance.optimizer.test_memory import PARAMS, params_of, parts_of, slow_reductions
from tests.support.optim_twins import run_local

pytestmark = pytest.mark.dist

WINDOWS = 4


def windows_of(seed: int, rank: int) -> list[list[int]]:
    """Whose gradients come: some twice or three times and some never, in each window as often, in random order.

    As often on all ranks: whoever waits for a peer that does not come takes more memory ([Note: soft bound]).
    """
    rng, order = random.Random(seed), random.Random(f"{seed} {rank}")
    counts = [rng.choice([0, 1, 1, 1, 2, 3]) for _ in range(PARAMS)]
    arrivals = [param for param, count in enumerate(counts) for _ in range(count)]
    return [order.sample(arrivals, len(arrivals)) for _ in range(WINDOWS)]


def late_of(comm: Communicator, seed: int, options: dict[str, Any]) -> list[int]:
    """In how many buckets this rank had late gradients, by window, all of which took what the formula says."""
    params = params_of([torch.float32, torch.bfloat16])
    opt = ShardedAdamW(params, process_group=comm, static_graph=True, bucket_cap_mb=1e-3, **options)
    parts = parts_of(opt)
    limit, overlap = options["max_inflight_buckets"], options["overlap_grad_sync"]
    at_rest = comm.pool.stats().live_leases
    learnt: dict[str, Any] = {}
    late, most = [], 0
    for arrivals in windows_of(seed, comm.rank):
        formula = memory.BucketMemory(parts.bucket_sizes, limit, overlap=overlap, **learnt)
        for index in arrivals:
            (params[index] * 0.5).sum().backward()
            formula.gradient(index)
            assert comm.pool.stats().live_leases - at_rest == formula.count
        late.append(len(formula.late))
        everyone = [said.split() for said in comm.exchange(" ".join(map(str, formula.late)).encode())]
        opt.step()
        formula.close({int(number) for said in everyone for number in said})
        opt.zero_grad()
        most = max(most, formula.peak_bytes)
        assert opt.memory_summary()["buckets_peak"] == most
        learnt = {"due": Counter(arrivals), "used": set(arrivals)}
    opt.close()
    return late


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_static_graph_takes_what_the_formula_says(world: int) -> None:
    """Gradients that come again are late in the first window and waited for in the others."""
    first = 0
    with slow_reductions():
        for seed in range(6):
            options = {"max_inflight_buckets": 1 + seed % 3, "overlap_grad_sync": seed % 5 != 4}
            for late in run_local(world, late_of, seed, options):
                first += late[0]
                assert late[1:] == [0] * (WINDOWS - 1)
    assert first > 0, "no gradient was late"
