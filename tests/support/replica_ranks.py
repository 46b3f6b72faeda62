"""Ranks of HSDP for tests: rows that shard, columns that replicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.testing import run_threads
from tests.support.cores import one_core


def with_replicas(
    shards: int, replicas: int, body: Callable[..., Any], *args: Any, device: str | None = None, timeout_s: float = 60
) -> list[Any]:
    """``body(rank, shard, replicate, *args)`` on threads; rank = replicate.rank * shards + shard.rank."""
    rows = [LocalWorld(shards) for _ in range(replicas)]
    columns = [LocalWorld(replicas) for _ in range(shards)]

    def rank_main(rank: int, _: int) -> Any:
        r, s = divmod(rank, shards)
        options: dict[str, Any] = {"timeout_s": timeout_s / 3, "device": device}
        with Communicator(rows[r].rank(s), name=f"row{r}", **options) as shard:
            with Communicator(columns[s].rank(r), name=f"column{s}", **options) as replicate:
                return body(rank, shard, replicate, *args)

    with one_core():
        return run_threads(rank_main, shards * replicas, timeout_s=timeout_s)


def torch_groups(rank: int, world: int, shards: int, backend: str = "gloo") -> dict[str, Any]:
    """This rank's process groups of HSDP, as a training script makes them."""
    mine: dict[str, Any] = {}
    for name, every in (
        ("process_group", [list(range(first, first + shards)) for first in range(0, world, shards)]),
        ("replicate_group", [list(range(place, world, shards)) for place in range(shards)]),
    ):
        for ranks in every:
            group = dist.new_group(ranks, backend=backend)
            if rank in ranks:
                mine[name] = group
    return mine
