"""The waits of placements in checked streams: nothing is unordered, and without any one of them something is.

The pool and communicators: tests/native/test_races.cpp; training: tests/conformance/optimizer/test_optim_streams.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from bucketwheel.native import core
from bucketwheel.pool.placement import Interval, Lifetime, Users, Wait, place
from tests.support.simulated_cuda import load, posing
from tests.support.simulated_streams import checked

BASE = 1 << 30  # of an arena that nobody touches: the check hears of addresses only

Problem = tuple[dict[str, int], dict[str, list[Interval]], dict[str, list[Users]]]


def some_problem(rng: random.Random) -> Problem:
    """Keys of one or two intervals, each used in the stream that acquires it and perhaps in others."""
    sizes, intervals, streams = {}, {}, {}
    for number in range(12):
        cuts = sorted(rng.sample(range(30), rng.choice((2, 4))))
        key = f"key {number}"
        sizes[key] = rng.randint(1, 5)
        intervals[key] = [(cuts[i], cuts[i + 1]) for i in range(0, len(cuts), 2)]
        streams[key] = [
            (own, (*others,)) for own, *others in (rng.sample("abc", rng.choice((1, 2))) for _ in cuts[::2])
        ]
    return sizes, intervals, streams


def races_of(problem: Problem, offsets: dict[str, int], waits: Iterable[Wait], seed: int) -> list[str]:
    sizes, intervals, users = problem
    _, library = load()
    lives = [Lifetime(key, number) for key in offsets for number in range(len(intervals[key]))]
    events = sorted(
        (intervals[life.key][life.number][1 - is_start], is_start, at)
        for at, life in enumerate(lives)
        for is_start in (0, 1)
    )

    def access(stream: core.Stream, life: Lifetime, writes: bool) -> None:
        begin, what = BASE + offsets[life.key], repr(life).encode()
        library.fake_cuda_access(stream.cuda_stream, begin, sizes[life.key], writes, what)

    ends: dict[Lifetime, list[core.Event]] = {}
    with posing(), checked(seed) as races:
        streams = {name: core.Stream(name, 0) for name in "abc"}
        for _, is_start, at in events:
            life = lives[at]
            own, others = users[life.key][life.number]
            names = (own, *others)
            if not is_start:
                for name in names:  # used to the end
                    access(streams[name], life, False)
                ends[life] = [streams[name].record() for name in names]
                continue
            for wait in waits:
                for event in ends[wait.released] if wait.acquired == life else ():
                    streams[own].wait(event)
            access(streams[own], life, True)
            for name in others:
                streams[name].wait(streams[own].record())
    return races


@pytest.mark.parametrize("seed", range(20))
def test_the_waits_of_a_placement_are_enough_and_each_is_needed(seed: int) -> None:
    problem = some_problem(random.Random(seed))
    sizes, intervals, streams = problem
    found = place(sizes, intervals, streams=streams, align=1)
    assert len(found.waits) > 2
    assert races_of(problem, found.offsets, found.waits, seed) == []
    for wait in found.waits:
        races = races_of(problem, found.offsets, [other for other in found.waits if other != wait], seed)
        assert races, f"{wait} is not needed"
