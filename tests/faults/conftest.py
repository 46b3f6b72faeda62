"""What tests of several ranks need is built first."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.comm_cases import check_usable
from tests.support.failure_cases import on_process, on_threads
from tests.support.ranks import RankPool


@pytest.fixture(scope="session", autouse=True)
def _built(nccl_env: dict[str, str]) -> None:
    """Time limits of tests are for running."""


@pytest.fixture
def ranks(rank_pool: Callable[[int], RankPool]) -> Callable[..., list[Any]]:
    """``ranks(place, world, case, *args, timeout_s=20.0)``: what ``case(comm, *args)`` returns on every rank."""

    def run(place: str, world: int, case: Callable[..., Any], *args: Any, timeout_s: float = 20.0) -> list[Any]:
        if place in ("local", "cuda"):
            return on_threads(place, world, case, *args, timeout_s=timeout_s)
        pool = rank_pool(world)
        pool.run(on_process, place, 30.0, check_usable)  # what the first one needs may take longer than the limit
        return pool.run(on_process, place, timeout_s, case, *args)

    return run
