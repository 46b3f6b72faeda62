"""How long ranks wait for one that does not come, and what they read then: docs/several_hosts.md, "How long ranks wait for each other"."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommTimeout, PeerError
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.torch_internals import timeout_of
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
LIMIT_S, SOON_S = 2.0, 8.0


def error_of(body: Any) -> tuple[type[BaseException] | None, str, float]:
    begin = time.monotonic()
    try:
        body()
    except (RuntimeError, ValueError) as error:
        return type(error), str(error), time.monotonic() - begin
    return None, "", time.monotonic() - begin


def limits_of_groups(rank: int, world: int) -> list[float]:
    short = dist.new_group(timeout=timedelta(seconds=31))
    with (
        ShardedAdamW(parameters_of(), process_group=short) as one,
        ShardedAdamW(parameters_of(), timeout_s=32) as other,
    ):
        made = [Communicator(), Communicator(short), Communicator(short, timeout_s=33)]
        return [comm._ranks.timeout_s for comm in (*made, *one._engine.owned, *other._engine.owned)]


def parameters_of() -> list[nn.Parameter]:
    return list(nn.Linear(4, 4).parameters())


def test_the_time_limit_is_the_groups_unless_one_is_given(rank_pool: Pools) -> None:
    for limits in rank_pool(2).run(limits_of_groups):
        assert limits == [120, 31, 33, 31, 32]  # that of the ranks' own group first


def test_without_a_group_or_where_it_does_not_tell_it_is_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Communicator()._ranks.timeout_s == 600
    assert timeout_of(object(), torch.device("cpu")) is None  # type: ignore[arg-type]


def test_a_time_limit_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        ShardedAdamW(parameters_of(), timeout_s=0)
    with pytest.raises(ValueError, match=r"process_group is a Communicator with its own time limit: pass Communicator"):
        ShardedAdamW(parameters_of(), process_group=Communicator(), timeout_s=3)


def never_made(rank: int, world: int, option: bool) -> tuple[type[BaseException] | None, str, float]:
    group = dist.new_group(timeout=timedelta(seconds=60 if option else LIMIT_S))
    if rank == 1:
        time.sleep(2 * LIMIT_S + 1)
    timeout_s = LIMIT_S if option else None
    return error_of(lambda: ShardedAdamW(parameters_of(), process_group=group, timeout_s=timeout_s))


@pytest.mark.parametrize(("world", "option"), [(2, False), (3, True)], ids=["group", "option"])
def test_a_rank_that_makes_no_optimizer_is_named_within_the_time_limit(
    rank_pool: Pools, world: int, option: bool
) -> None:
    """And is told, when it comes after all, that the others have gone."""
    for rank, (kind, text, took_s) in enumerate(rank_pool(world).run(never_made, option)):
        assert kind is CommTimeout and took_s < LIMIT_S + SOON_S
        assert ("the other ranks gave up after 2 s, before rank 1 arrived" if rank == 1 else "ranks [1] have") in text


def leaves_its_loop(rank: int, world: int, how: str) -> tuple[type[BaseException] | None, str, float]:
    model = nn.Linear(4, 4)
    optimizer = ShardedAdamW(model.parameters(), timeout_s=LIMIT_S)
    for _ in range(2 if rank == 1 else 3):
        taken = error_of(lambda: (model(torch.ones(2, 4)).sum().backward(), optimizer.step(), optimizer.zero_grad()))
    if rank == 1 and how == "stays":
        time.sleep(2 * LIMIT_S)
    elif rank == 1 and how == "closes":
        return error_of(optimizer.close)
    return taken


@pytest.mark.parametrize("how", ["stays", "closes", "ends"])
def test_a_rank_that_leaves_its_loop_early_is_named(rank_pool: Pools, how: str) -> None:
    results = rank_pool(3).run(leaves_its_loop, how)
    for kind, text, took_s in (results[0], results[2]):
        assert took_s < SOON_S + (LIMIT_S if how == "stays" else 0.0)
        if how == "stays":
            assert kind is CommTimeout and "rank 1 (pid" in text
        elif kind is PeerError:  # also where a rank comes to its step a second after rank 1 has closed
            assert "rank 1 (pid" in text and "has closed the communicator" in text
        else:
            assert how == "closes" and kind is RuntimeError
            assert "step, close, step (by rank)" in text and "without a backward" in text
