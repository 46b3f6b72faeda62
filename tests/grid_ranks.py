"""Ranks of a grid for tests: rows that shard, columns that replicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bucketwheel.comm import Communicator
from bucketwheel.place import LocalWorld
from bucketwheel.testing import run_threads

GRIDS = [(2, 2), (2, 1), (1, 2), (2, 3), (3, 2)]  # ranks that shard, times replicas


def in_grid(
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

    return run_threads(rank_main, shards * replicas, timeout_s=timeout_s)
