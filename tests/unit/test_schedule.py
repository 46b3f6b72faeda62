"""The schedule, alone: every rank the same sequence, every gradient counted exactly as torch would."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import pytest

from bucketwheel.native import core

Launch, Schedule, Store = core.Launch, core.Schedule, core.Store


def doubles(values: Sequence[float]) -> bytes:
    return array.array("d", values).tobytes()


def after(schedule: Any, param: int, **how: bool) -> list[Any]:
    """What follows from a gradient."""
    stores, launches = schedule.gradient(param, **how)
    return [*stores, *launches]


class Rank:
    """Carries actions out on numbers: one gradient is one integer per (parameter, bucket)."""

    def __init__(self, buckets_of: list[list[int]], count: int) -> None:
        self.schedule = Schedule(buckets_of, count)
        self.memory: dict[tuple[int, int], int] = {}
        self.late: dict[tuple[int, int], int] = {}
        self.launched: list[tuple[int, bool, dict[tuple[int, int], int]]] = []
        self.params_of = [[p for p, bs in enumerate(buckets_of) if b in bs] for b in range(count)]

    def carry_out(self, actions: Sequence[Any], value: int = 0) -> None:
        for action in actions:
            if isinstance(action, Store):
                memory = self.late if action.late else self.memory
                key = (action.param, action.bucket)
                memory[key] = (memory.get(key, 0) if action.add else 0) + value
            else:
                self.launch(action)

    def launch(self, action: Any) -> None:
        memory = self.late if action.late else self.memory
        part = {}
        for p in self.params_of[action.bucket]:
            if not action.late:
                assert (p in action.absent) == ((p, action.bucket) not in memory)
            part[p, action.bucket] = memory.pop((p, action.bucket), 0)
        self.launched.append((action.bucket, action.late, part))


def close(ranks: list[Rank], held: list[list[bool]], totals: dict[tuple[int, int], int]) -> Any:
    """What the optimizer does at the end of a window; `totals` are the sums kept by the owners."""
    for rank, h in zip(ranks, held, strict=True):
        for drop in rank.schedule.drops(bytes(h)):
            rank.late[drop.param, drop.bucket] = 0
    notes = [rank.schedule.notes(bytes(h)) for rank, h in zip(ranks, held, strict=True)]
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


def test_buckets_go_in_order_as_they_fill() -> None:
    schedule = Schedule([[0], [0, 1], [1]], 2)
    assert after(schedule, 2) == [Store(2, 1, late=False, add=False)]
    assert after(schedule, 1) == [Store(1, 0, False, False), Store(1, 1, False, False)]
    assert after(schedule, 0) == [Store(0, 0, False, False), Launch(0), Launch(1)]
    assert after(schedule, 0) == [Store(0, 0, late=True, add=True)]


def test_an_unused_parameter_stops_holding_buckets_up() -> None:
    schedule = Schedule([[0], [0], [1]], 2)
    held = bytes([True, False, True])
    launched_during_backward = []
    for _ in range(6):
        actions = after(schedule, 2) + after(schedule, 0)
        launched_during_backward.append(sum(isinstance(a, Launch) for a in actions))
        schedule.close(schedule.agree([schedule.notes(held)]))
    assert launched_during_backward == [0, 0, 0, 0, 0, 2]


def test_a_returning_parameter_goes_through_the_late_round_once() -> None:
    ranks = [Rank([[0], [0]], 1)]
    for _ in range(8):
        ranks[0].carry_out(after(ranks[0].schedule, 0), 1)
        close(ranks, [[True, False]], {})
    late = []
    for _ in range(2):
        ranks[0].carry_out(after(ranks[0].schedule, 0), 1)
        ranks[0].carry_out(after(ranks[0].schedule, 1), 1)
        late.append(close(ranks, [[True, True]], totals := {}).late)
        assert totals == {(0, 0): 1, (1, 0): 1}
    assert late == [[0], []]


def test_nothing_new_closes_nothing() -> None:
    schedule = Schedule([[0]], 1)
    agreement = schedule.agree([schedule.notes(bytes([False]))])
    assert not agreement.is_dirty and agreement.held == bytes([False])
    assert schedule.close(agreement) == ([], [])


def test_a_gradient_that_was_taken_away_is_void() -> None:
    ranks = [Rank([[0], [0]], 1) for _ in range(2)]
    for rank in ranks:
        for p in (0, 1):
            rank.carry_out(after(rank.schedule, p), 5)
    totals: dict[tuple[int, int], int] = {}
    agreement = close(ranks, [[False, True]] * 2, totals)  # p0.grad = None on both
    assert agreement.held == bytes([False, True]) and agreement.void == [0]
    assert totals == {(0, 0): 0, (1, 0): 10}


def test_replacing_on_one_rank_only_is_a_conflict() -> None:
    schedules = [Schedule([[0]], 1) for _ in range(2)]
    for schedule in schedules:
        schedule.gradient(0)
    schedules[1].gradient(0, replaces=True)
    agreement = schedules[0].agree([s.notes(bytes([True])) for s in schedules])
    assert agreement.conflicts == [0]


def test_older_gradients_count_on_all_ranks_or_on_none() -> None:
    schedules = [Schedule([[0], [0]], 1) for _ in range(2)]
    held = bytes([True, True])
    assert schedules[0].agree([s.notes(held, held) for s in schedules]).conflicts == []
    notes = [schedules[0].notes(held, held), schedules[1].notes(bytes([True, False]), bytes([True, False]))]
    assert [s.agree(notes).conflicts for s in schedules] == [[1], [1]]


def test_factors_are_those_of_the_ranks_with_a_part_in_the_gradient() -> None:
    schedules = [Schedule([[0], [0], [0]], 1) for _ in range(3)]
    nan = float("nan")
    everything = bytes([True] * 3)
    for common in ([0.5, 1.0, nan], [0.25] * 3, [nan] * 3):
        agreement = schedules[0].agree([s.notes(everything, everything, doubles(common)) for s in schedules])
        assert agreement.factors == doubles(common) and not agreement.scaled_apart
    assert schedules[0].agree([s.notes(everything, everything, doubles([1.0] * 3)) for s in schedules]).factors == b""
    schedules[1].gradient(0)
    older = bytes([False, True, False])
    apart = [
        schedules[0].notes(older, older, doubles([1.0, 0.25, 1.0])),  # takes no part in the window
        schedules[1].notes(bytes([True, True, False]), older, doubles([0.5, 2.0, 1.0])),
        schedules[2].notes(older, older),
    ]
    for s in schedules:
        assert s.agree(apart).factors == doubles([0.5, 2.0, 1.0]) and not s.agree(apart).scaled_apart
    schedules[2].gradient(0)
    apart[2] = schedules[2].notes(bytes([True, True, False]), older, doubles([0.5, 1.0, 1.0]))
    assert schedules[0].agree(apart).scaled_apart == [1]


@pytest.mark.parametrize("is_static", [True, False])
def test_a_static_graph_waits_for_as_many_gradients_as_at_first(is_static: bool) -> None:
    """A shared weight gets two in every backward. Without the promise the second is late each time: what is added to
    what must not depend on how many windows there have been."""
    schedule = Schedule([[0], [0]], 1, is_static=is_static)
    late = []
    for _ in range(3):
        for param in (0, 1, 0):
            schedule.gradient(param)
        notes = schedule.notes(bytes([True, True]))
        agreement = schedule.agree([notes])
        schedule.close(agreement)
        late.append(agreement.late)
    assert late == ([[0], [], []] if is_static else [[0]] * 3)


def test_what_is_left_goes_before_ranks_agree() -> None:
    """All of it on a rank with gradients; on one without only when it has heard of theirs."""
    busy, idle = (Schedule([[0], [1]], 2) for _ in range(2))
    busy.gradient(1)
    assert busy.flush() == [Launch(0, [0]), Launch(1)] and idle.flush() == []
    agreement = busy.agree([busy.notes(bytes([False, True])), idle.notes(bytes(2))])
    assert agreement.is_dirty and not agreement.is_complete
    assert busy.close(agreement) == ([], [])
    assert idle.close(agreement) == ([Launch(0, [0]), Launch(1, [1])], [])
    for schedule in (busy, idle):
        schedule.gradient(1)
        schedule.gradient(0)
        assert schedule.flush() == []
    both = bytes([True, True])
    assert busy.agree([schedule.notes(both) for schedule in (busy, idle)]).is_complete


def test_grad_sync_of_some_launches_what_is_complete() -> None:
    schedule = Schedule([[0], [0], [1]], 2)
    schedule.gradient(1, launch=False)
    schedule.gradient(2, launch=False)
    assert schedule.complete([2]) == []
    assert schedule.complete([0, 1]) == [Launch(0, [0]), Launch(1)]
    assert schedule.flush() == []


def test_notes_of_another_layout_are_refused() -> None:
    schedule = Schedule([[0], [0]], 1)
    notes = schedule.notes(bytes(2))
    for wrong in (b"", notes[:-1], notes + b"1234"):
        with pytest.raises(RuntimeError, match="2 parameters in 1 buckets; do all ranks run the same version"):
            schedule.agree([notes, wrong])


def test_bad_arguments_are_named() -> None:
    schedule = Schedule([[0], [0]], 1)
    with pytest.raises(ValueError, match="parameter 2 of 2"):
        schedule.gradient(2)
    with pytest.raises(ValueError, match="3 flags for 2 parameters"):
        schedule.notes(bytes(3))
    with pytest.raises(ValueError, match="8 bytes of factors for 2 parameters"):
        schedule.notes(bytes(2), bytes(2), doubles([1.0]))


def test_a_static_graph_needs_no_notes_of_others() -> None:
    """Rank 0 uses parameter 0 (twice) and 1, rank 1 parameters 1 and 2, in every window."""
    ranks = [Rank([[0], [0], [1]], 2) for _ in range(2)]
    used = [(0, 1, 0), (2, 1)]
    for rank in ranks:
        rank.schedule = Schedule([[0], [0], [1]], 2, is_static=True)
    for window in range(3):
        agreements = []
        for rank, own, at_first in zip(ranks, used, ([0], []), strict=True):
            assert rank.schedule.is_learnt == (window > 0)
            launches = [a for p in own for a in after(rank.schedule, p) if isinstance(a, Launch)]
            assert [a.bucket for a in launches] == (at_first if window == 0 else [0, 1])
        held = [bytes(p in own for p in range(3)) for own in used]
        notes = [rank.schedule.notes(h) for rank, h in zip(ranks, held, strict=True)]
        for rank, h in zip(ranks, held, strict=True):
            assert rank.schedule.find_deviation(h) == -1
            agreements.append(rank.schedule.agree(notes) if window == 0 else rank.schedule.assume(h))
            rank.schedule.close(agreements[-1])
        assert [a.held for a in agreements] == [bytes([True] * 3)] * 2


@pytest.mark.parametrize(
    "gradients, at_once, at_end",
    [((0, 2), [2], 1), ((0, 1, 0), [0], 0), ((1,), [], 0), ((0, 1), [], -1), ((0, 0, 1), [], -1), ((), [], 0)],
)
def test_what_breaks_the_promise_of_a_static_graph_is_found(
    gradients: tuple[int, ...], at_once: list[int], at_end: int
) -> None:
    """The first window has gradients of parameters 0 and 1. More of them are no harm while they come in time."""
    schedule = Schedule([[0], [0], [0]], 1, is_static=True)
    for param in (0, 1):
        schedule.gradient(param)
    schedule.close(schedule.agree([schedule.notes(bytes([True, True, False]))]))
    found = []
    for param in gradients:
        schedule.gradient(param)
        if schedule.is_deviation(param):
            found.append(param)
    assert found == at_once
    assert schedule.find_deviation(bytes(p in gradients for p in range(3))) == at_end
