"""The plan by which shards are restored: the newest step that all of them can be had at."""

from __future__ import annotations

import pytest

from bucketwheel.checkpoint.restore import Offer, find_sources

LAYOUTS = ["a", "b", "c"]


def offer(owner: int, step: int, newest: int, base: int = 0, run: str = "r") -> Offer:
    return Offer(run, "abcd"[owner], base, step, newest)


def ring(*ranges: tuple[int, int, int, int]) -> list[list[Offer]]:
    """By rank: what it has of its own shard, (step, newest), and of the one of the rank before."""
    return [[offer(r, a, b), offer((r - 1) % 3, c, d)] for r, (a, b, c, d) in enumerate(ranges)]


def test_a_rank_keeps_to_its_own_copy_where_that_will_do() -> None:
    offers = ring((3, 6, 2, 5), (3, 5, 3, 6), (2, 6, 3, 6))
    assert find_sources(LAYOUTS, offers) == (6, [(0, 0), (2, 1), (2, 0)]), "only rank 2 has shard 1 at step 6"
    assert find_sources(LAYOUTS, ring(*[(3, 6, 3, 6)] * 3)) == (6, [(0, 0), (1, 0), (2, 0)])


def test_the_shard_of_a_lost_rank_comes_from_its_neighbour() -> None:
    offers = ring((4, 7, 4, 6), (4, 7, 4, 7), (4, 7, 4, 7))
    assert find_sources(LAYOUTS, [offers[0], [], offers[2]]) == (7, [(0, 0), (2, 1), (2, 0)])
    assert find_sources(LAYOUTS, [offers[0], offers[1], []]) == (6, [(0, 0), (1, 0), (0, 1)]), "all go back with it"


def test_the_newest_complete_run_counts() -> None:
    old, new = ring(*[(3, 6, 3, 6)] * 3), [[offer(0, 8, 9, run="new")], [offer(1, 8, 9, run="new")], []]
    both = [a + b for a, b in zip(old, new, strict=True)]
    assert find_sources(LAYOUTS, both) == (6, [(0, 0), (1, 0), (2, 0)])
    both[0].append(offer(2, 8, 9, run="new"))
    assert find_sources(LAYOUTS, both) == (9, [(0, 2), (1, 2), (0, 3)])


@pytest.mark.parametrize(
    "offers, message",
    [
        ([[], [], []], "no rank has a snapshot"),
        ([[offer(0, 1, 2)], [offer(0, 1, 2)], []], r"no rank has a copy of the shards of ranks \[1, 2\]"),
        (
            [[offer(0, 1, 2), offer(1, -1, -1)], [], [offer(2, 1, 2)]],
            r"no rank has a copy of the shards of ranks \[1\]",
        ),
        (
            [[offer(1 + r, 1, 2)] for r in range(3)],
            r"no rank has a copy of the shards of ranks \[0\] with this optimizer's",
        ),
        ([[offer(0, 1, 2)], [offer(1, 3, 4)], [offer(2, 1, 4)]], "at step 2 some copies of shards lack a change"),
        (
            [[offer(0, 0, 4)], [offer(1, 4, 4, base=4)], [offer(2, 0, 4)]],
            "at step 4 some copies of shards lack a change",
        ),
    ],
)
def test_what_is_missing_is_said(offers: list[list[Offer]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_sources(LAYOUTS, offers)


def test_a_change_from_outside_that_reached_all_is_no_obstacle() -> None:
    assert find_sources(LAYOUTS, [[offer(r, 4, 4, base=4)] for r in range(3)])[0] == 4
    assert find_sources(LAYOUTS, [[offer(0, 4, 6, base=4)], [offer(1, 4, 5, base=3)], [offer(2, 5, 9)]])[0] == 5
