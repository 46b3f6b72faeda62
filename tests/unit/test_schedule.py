"""The schedule, alone: every rank the same sequence, every gradient counted exactly as torch would."""

from __future__ import annotations

import random

import pytest

from bucketwheel.schedule import Agreement, Launch, Schedule, Store


class Rank:
    """Carries actions out on numbers: one gradient is one integer per (parameter, bucket)."""

    def __init__(self, buckets_of: list[list[int]], count: int) -> None:
        self.schedule = Schedule(buckets_of, count)
        self.memory: dict[tuple[int, int], int] = {}
        self.late: dict[tuple[int, int], int] = {}
        self.launched: list[tuple[int, bool, dict[tuple[int, int], int]]] = []
        self.params_of = [[p for p, bs in enumerate(buckets_of) if b in bs] for b in range(count)]

    def carry_out(self, actions: list[Store | Launch], value: int = 0) -> None:
        for action in actions:
            if isinstance(action, Store):
                memory = self.late if action.late else self.memory
                key = (action.param, action.bucket)
                memory[key] = (memory.get(key, 0) if action.add else 0) + value
            else:
                self.launch(action)

    def launch(self, action: Launch) -> None:
        memory = self.late if action.late else self.memory
        part = {}
        for p in self.params_of[action.bucket]:
            if not action.late:
                assert (p in action.absent) == ((p, action.bucket) not in memory)
            part[p, action.bucket] = memory.pop((p, action.bucket), 0)
        self.launched.append((action.bucket, action.late, part))


def close(ranks: list[Rank], held: list[list[bool]], totals: dict[tuple[int, int], int]) -> Agreement:
    """What the optimizer does at the end of a window; `totals` are the sums kept by the owners."""
    for rank, h in zip(ranks, held, strict=True):
        for drop in rank.schedule.drops(h):
            rank.late[drop.param, drop.bucket] = 0
    notes = [rank.schedule.notes(h) for rank, h in zip(ranks, held, strict=True)]
    agreements = [rank.schedule.agree(notes) for rank in ranks]
    assert all(a == agreements[0] for a in agreements)
    agreement = agreements[0]
    assert not agreement.conflicts
    lates = []
    for rank in ranks:
        first, late = rank.schedule.close(agreement)
        rank.carry_out(list(first))
        lates.append(late)
    _reduce(ranks, totals)
    for p in agreement.void:
        for key in [key for key in totals if key[0] == p]:
            totals[key] = 0
    for rank, late in zip(ranks, lates, strict=True):
        rank.carry_out(list(late))
    _reduce(ranks, totals)
    for rank in ranks:
        assert not rank.memory and not rank.late
    return agreement


def _reduce(ranks: list[Rank], totals: dict[tuple[int, int], int]) -> None:
    sequences = [[(b, late) for b, late, _ in rank.launched] for rank in ranks]
    assert all(s == sequences[0] for s in sequences), sequences
    for rank in ranks:
        for _, _, part in rank.launched:
            for key, value in part.items():
                totals[key] = totals.get(key, 0) + value
        rank.launched.clear()


def random_layout(rng: random.Random) -> tuple[list[list[int]], int]:
    buckets_of: list[list[int]] = []
    bucket = 0
    for _ in range(rng.randrange(1, 9)):
        spans = list(range(bucket, bucket + rng.choice([1, 1, 1, 2, 3])))
        buckets_of.append(spans)
        bucket = spans[-1] + rng.choice([0, 0, 1])
    if rng.random() < 0.3:
        buckets_of.append([])  # a parameter without elements
    return buckets_of, max((b for bs in buckets_of for b in bs), default=0) + 1


@pytest.mark.parametrize("seed", range(300))
def test_any_arrival_order_gives_one_sequence_and_the_right_sums(seed: int) -> None:
    rng = random.Random(seed)
    buckets_of, count = random_layout(rng)
    world = rng.randrange(1, 5)
    params = len(buckets_of)
    ranks = [Rank(buckets_of, count) for _ in range(world)]
    for _ in range(6):  # windows; gradients are dropped after each, as by zero_grad
        totals: dict[tuple[int, int], int] = {}
        expected = [0] * params
        held = [[False] * params for _ in range(world)]
        kind = rng.choice(["nothing", "zero_grad", "replace some"])
        restart: set[int] = set()
        for half in range(2):
            if half == 1 and kind == "zero_grad":
                for rank in ranks:
                    rank.schedule.discard()
                    rank.late.clear()
                expected = [0] * params
                held = [[False] * params for _ in range(world)]
            if half == 1 and kind == "replace some":  # p.grad = None on every rank
                restart = {p for p in range(params) if all(h[p] for h in held) and rng.random() < 0.5}
                for p in restart:
                    expected[p] = 0
            for r, rank in enumerate(ranks):
                order = [p for p in range(params) if rng.random() < 0.7 or p in restart]
                order += [p for p in order if rng.random() < 0.2]  # twice: shared weights, reentrant checkpointing
                order = order or [0]
                rng.shuffle(order)
                seen: set[int] = set()
                for p in order:
                    value = rng.randrange(1, 100)
                    expected[p] += value
                    replaces = rank.schedule.has_stored(p) and (not held[r][p] or (p in restart and p not in seen))
                    rank.carry_out(rank.schedule.gradient(p, replaces=replaces, launch=rng.random() < 0.9), value)
                    seen.add(p)
                    held[r][p] = True
        if rng.random() < 0.3:  # p.grad = None on every rank, after backward
            p = rng.randrange(params)
            expected[p] = 0
            for h in held:
                h[p] = False
        agreement = close(ranks, held, totals)
        for p, buckets in enumerate(buckets_of):
            assert agreement.held[p] == any(h[p] for h in held)
            for b in buckets:
                assert totals.get((p, b), 0) == expected[p]


def test_buckets_go_in_order_as_they_fill() -> None:
    schedule = Schedule([[0], [0, 1], [1]], 2)
    assert schedule.gradient(2) == [Store(2, 1, late=False, add=False)]
    assert schedule.gradient(1) == [Store(1, 0, False, False), Store(1, 1, False, False)]
    assert schedule.gradient(0) == [Store(0, 0, False, False), Launch(0), Launch(1)]
    assert schedule.gradient(0) == [Store(0, 0, late=True, add=True)]


def test_an_unused_parameter_stops_holding_buckets_up() -> None:
    schedule = Schedule([[0], [0], [1]], 2)
    held = [True, False, True]
    launched_during_backward = []
    for _ in range(6):
        actions = schedule.gradient(2) + schedule.gradient(0)
        launched_during_backward.append(sum(isinstance(a, Launch) for a in actions))
        schedule.close(schedule.agree([schedule.notes(held)]))
    assert launched_during_backward == [0, 0, 0, 0, 0, 2]


def test_a_returning_parameter_goes_through_the_late_round_once() -> None:
    ranks = [Rank([[0], [0]], 1)]
    for _ in range(8):
        ranks[0].carry_out(ranks[0].schedule.gradient(0), 1)
        close(ranks, [[True, False]], {})
    late = []
    for _ in range(2):
        ranks[0].carry_out(ranks[0].schedule.gradient(0), 1)
        ranks[0].carry_out(ranks[0].schedule.gradient(1), 1)
        late.append(close(ranks, [[True, True]], totals := {}).late)
        assert totals == {(0, 0): 1, (1, 0): 1}
    assert late == [[0], []]


def test_nothing_new_closes_nothing() -> None:
    schedule = Schedule([[0]], 1)
    agreement = schedule.agree([schedule.notes([False])])
    assert not agreement.is_dirty and agreement.held == [False]
    assert schedule.close(agreement) == ([], [])


def test_a_gradient_that_was_taken_away_is_void() -> None:
    ranks = [Rank([[0], [0]], 1) for _ in range(2)]
    for rank in ranks:
        for p in (0, 1):
            rank.carry_out(rank.schedule.gradient(p), 5)
    totals: dict[tuple[int, int], int] = {}
    agreement = close(ranks, [[False, True]] * 2, totals)  # p0.grad = None on both
    assert agreement.held == [False, True] and agreement.void == [0]
    assert totals == {(0, 0): 0, (1, 0): 10}


def test_replacing_on_one_rank_only_is_a_conflict() -> None:
    schedules = [Schedule([[0]], 1) for _ in range(2)]
    for schedule in schedules:
        schedule.gradient(0)
    schedules[1].gradient(0, replaces=True)
    agreement = schedules[0].agree([s.notes([True]) for s in schedules])
    assert agreement.conflicts == [0]


def test_older_gradients_count_on_all_ranks_or_on_none() -> None:
    schedules = [Schedule([[0], [0]], 1) for _ in range(2)]
    held = [True, True]
    assert schedules[0].agree([s.notes(held, [True, True]) for s in schedules]).conflicts == []
    notes = [schedules[0].notes(held, [True, True]), schedules[1].notes([True, False], [True, False])]
    assert [s.agree(notes).conflicts for s in schedules] == [[1], [1]]


def test_factors_are_those_of_the_ranks_with_a_part_in_the_gradient() -> None:
    schedules = [Schedule([[0], [0], [0]], 1) for _ in range(3)]
    nan = float("nan")
    same = [s.notes([True] * 3, [True] * 3, [0.5, 1.0, nan]) for s in schedules]
    agreement = schedules[0].agree(same)
    assert agreement.factors[:2] == [0.5, 1.0] and not agreement.scaled_apart
    schedules[1].gradient(0)
    older = [False, True, False]
    apart = [
        schedules[0].notes([False, True, False], older, [1.0, 0.25, 1.0]),  # takes no part in the window
        schedules[1].notes([True, True, False], older, [0.5, 2.0, 1.0]),
        schedules[2].notes([False, True, False], older),
    ]
    for s in schedules:
        assert s.agree(apart).factors == [0.5, 2.0, 1.0] and not s.agree(apart).scaled_apart
    schedules[2].gradient(0)
    apart[2] = schedules[2].notes([True, True, False], older, [0.5, 1.0, 1.0])
    assert schedules[0].agree(apart).scaled_apart == [1]
