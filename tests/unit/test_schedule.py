"""What the binding of the schedule adds: refusals, and what C++ does not ask. All else: tests/native/test_schedule.cpp."""

from __future__ import annotations

import pytest

from bucketwheel.native import core

Schedule = core.Schedule


def test_an_unused_parameter_stops_holding_buckets_up() -> None:
    schedule = Schedule([[0], [0], [1]], 2)
    held = bytes([True, False, True])
    launched_during_backward = []
    for _ in range(6):
        launched_during_backward.append(sum(len(schedule.gradient(param)[1]) for param in (2, 0)))
        schedule.close(schedule.agree([schedule.notes(held)]))
    assert launched_during_backward == [0, 0, 0, 0, 0, 2]


def test_what_is_left_goes_before_ranks_agree() -> None:
    """All of it on a rank with gradients; on one without only when it has heard of theirs."""
    busy, idle = (Schedule([[0], [1]], 2) for _ in range(2))
    busy.gradient(1)
    assert [(one.bucket, one.absent) for one in busy.flush()] == [(0, [0]), (1, [])] and idle.flush() == []
    agreement = busy.agree([busy.notes(bytes([False, True])), idle.notes(bytes(2))])
    assert agreement.is_dirty and not agreement.is_complete
    assert busy.close(agreement) == ([], [])
    first, late = idle.close(agreement)
    assert [(one.bucket, one.absent) for one in first] == [(0, [0]), (1, [1])] and late == []


def test_grad_sync_of_some_launches_what_is_complete() -> None:
    schedule = Schedule([[0], [0], [1]], 2)
    schedule.gradient(1, launch=False)
    schedule.gradient(2, launch=False)
    assert schedule.complete([2]) == []
    assert [one.bucket for one in schedule.complete([0, 1])] == [0, 1]
    assert schedule.flush() == []


def test_notes_of_another_layout_are_refused() -> None:
    schedule = Schedule([[0], [0]], 1)
    notes = schedule.notes(bytes(2))
    for wrong in (b"", notes[:-1], notes + b"1234"):
        with pytest.raises(RuntimeError, match="2 parameters in 1 buckets; do all ranks run the same version"):
            schedule.agree([notes, wrong])


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
