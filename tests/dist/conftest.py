"""One pool of rank processes per world size, shared by all tests of a run."""

import pytest
from bucketwheel.testing import RankPool


@pytest.fixture(scope="session")
def rank_pool():
    """``rank_pool(world_size)`` returns that `RankPool`; its ranks have a gloo process group."""
    pools: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool_of
    for pool in pools.values():
        pool.close()
