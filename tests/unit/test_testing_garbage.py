"""What ranks of `RankPool` look through for garbage, and what they find."""

import gc
import weakref

import pytest

from bucketwheel.testing import RankPool

started = pytest.param(False, id="started", marks=pytest.mark.slow)


def collectable(rank, world_size):
    return len(gc.get_objects())  # without those that are frozen


@pytest.mark.parametrize("forked", [True, started])
def test_a_rank_looks_for_garbage_in_what_its_calls_have_made_only(forked):
    everything = len(gc.get_objects()) + gc.get_freeze_count()
    with RankPool(1, backend=None, forked=forked) as pool:
        for _ in range(3):
            [left] = pool.run(collectable)
    assert left < 0.1 * everything, (left, everything)


kept = {}


class Node:
    pass


def keep_a_cycle(rank, world_size):
    import tabnanny  # noqa: F401 (which no rank has imported before)

    cycle = kept["cycle"] = Node()
    cycle.itself = cycle
    kept["ref"] = weakref.ref(cycle)


def drop_the_cycle(rank, world_size):
    del kept["cycle"]
    gc.collect()
    return kept["ref"]() is None


def test_what_a_call_has_kept_is_garbage_once_another_drops_it():
    with RankPool(1, backend=None) as pool:
        pool.run(keep_a_cycle)
        assert pool.run(drop_the_cycle) == [True]
