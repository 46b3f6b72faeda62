"""One pool of rank processes per world size, shared by all tests of a run."""

import contextlib

import pytest

from bucketwheel._build import native
from bucketwheel.testing import RankPool


@pytest.fixture(scope="session")
def rank_pool():
    """``rank_pool(world_size)`` returns that `RankPool`; its ranks have a gloo process group."""
    native()  # built here if need be: in ranks the time limits of the tests would end the build, each time
    with contextlib.ExitStack() as stack:
        pools: dict[int, RankPool] = {}

        def pool_of(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size))
            return pools[world_size]

        yield pool_of
