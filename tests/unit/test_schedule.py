"""The schedule by its binding: what is launched when. Sums and sequences of many ranks: tests/native/test_schedule.cpp."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from bucketwheel.native import core

Schedule = core.Schedule


class Store(NamedTuple):
    param: int
    bucket: int
    late: bool
    add: bool


class Launch(NamedTuple):
    bucket: int
    absent: list[int]
    late: bool = False


def plain(actions: Sequence[Any]) -> list[Store | Launch]:
    """Native actions, for comparisons."""
    return [
        Store(one.param, one.bucket, one.late, one.add)
        if isinstance(one, core.Store)
        else Launch(one.bucket, one.absent, one.late)
        for one in actions
    ]


def doubles(values: Sequence[float]) -> bytes:
    return array.array("d", values).tobytes()


def after(schedule: Any, param: int, **how: bool) -> list[Any]:
    """What follows from a gradient."""
    stores, launches = schedule.gradient(param, **how)
    return plain([*stores, *launches])


def test_buckets_go_in_order_as_they_fill() -> None:
    schedule = Schedule([[0], [0, 1], [1]], 2)
    assert after(schedule, 2) == [Store(2, 1, late=False, add=False)]
    assert after(schedule, 1) == [Store(1, 0, False, False), Store(1, 1, False, False)]
    assert after(schedule, 0) == [Store(0, 0, False, False), Launch(0, []), Launch(1, [])]
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
    assert plain(busy.flush()) == [Launch(0, [0]), Launch(1, [])] and idle.flush() == []
    agreement = busy.agree([busy.notes(bytes([False, True])), idle.notes(bytes(2))])
    assert agreement.is_dirty and not agreement.is_complete
    assert busy.close(agreement) == ([], [])
    first, late = idle.close(agreement)
    assert plain(first) == [Launch(0, [0]), Launch(1, [1])] and late == []
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
    assert plain(schedule.complete([0, 1])) == [Launch(0, [0]), Launch(1, [])]
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
