"""Ranks of HSDP for tests: rows that shard, columns that replicate; and a script that they leave equal bits of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal, run_threads
from tests.support.cores import one_core
from tests.support.optim_twins import Run, joined_states, make_params, run_local

SHAPES = [(2, 2), (2, 1), (1, 2), (2, 3), (3, 2)]  # ranks that shard, times replicas
Groups = dict[str, Communicator]  # what makes an optimizer one of these ranks


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


def windows(run: Run) -> None:
    """Everything that a window can be: accumulated, clipped, late, closed early, replaced, with unused parameters."""
    run.backward(0)
    run.clip(0.5)
    run.step()
    with run.opt.no_sync():
        run.backward(1)
    run.backward(2)
    run.opt.grad_sync()
    run.backward(3)
    run.see_grads()
    run.clip(0.05, float("inf"))
    run.clip(0.3, 3.0)
    run.step()
    run.backward(4, used={0, 3, 6})
    run.backward(5, used={1, 3})  # late
    run.see(torch.nn.utils.clip_grad_norm_([p for p in run.params if p.grad is not None], 0.25))
    run.step()
    run.backward(6)
    run.opt.zero_grad()
    run.backward(7)  # replaces
    run.opt.step()
    run.opt.zero_grad()
    run.backward(8, used={2, 8}, on={run.world - 1})  # the last rank alone
    run.step()


def play(script: Callable[[Run], None], rank: int, world: int, options: dict[str, Any], groups: Groups) -> Any:
    """(parameters, what was seen, this rank's states) after a script."""
    params = make_params(options.pop("dtype", torch.float32), seed=rank)
    opt = ShardedAdamW(params, lr=0.02, weight_decay=0.1, **options, **groups)
    run = Run(opt, params, rank, world)
    script(run)
    opt.param_sync()
    saved = opt.state_dict()
    opt.close()
    for comm in groups.values():
        comm.pool.check()
        comm.pool.expect_no_leases()
    return [p.detach().clone() for p in params], run.seen, saved


def run_with_replicas(shards: int, replicas: int, script: Callable[[Run], None], **options: Any) -> list[Any]:
    def body(rank: int, shard: Communicator, replicate: Communicator) -> Any:
        groups = {"process_group": shard, "replicate_group": replicate}
        return play(script, rank, shards * replicas, dict(options), groups)

    return with_replicas(shards, replicas, body)


def on_flat(world: int, script: Callable[[Run], None], **options: Any) -> list[Any]:
    return run_local(world, lambda comm: play(script, comm.rank, world, dict(options), {"process_group": comm}))


def assert_equal_ranks(got: list[Any], expected: list[Any], shards: int, dtype: torch.dtype = torch.float32) -> None:
    states = joined_states([saved for *_, saved in expected], make_params(dtype))
    for rank, (params, seen, _) in enumerate(got):
        assert_bitwise_equal(params, expected[0][0], f"parameters of rank {rank}")
        assert_bitwise_equal(seen, expected[0][1], f"what rank {rank} saw")
    for first in range(0, len(got), shards):
        row = joined_states([saved for *_, saved in got[first : first + shards]], make_params(dtype))
        assert_bitwise_equal(row, states, f"states of the row of rank {first}")


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
