"""What a capture waits for. All else of captures: conformance/optimizer/test_optim_captured*.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bucketwheel.grads.launch import Reductions

from bucketwheel.grads.graph_capture import CapturedSide
from bucketwheel.native import core
from tests.support.simulated_cuda import Graph, posing


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    with posing() as library:
        yield library


def side() -> CapturedSide:
    return CapturedSide(torch.empty(64, dtype=torch.uint8))


class Ended:
    """In the place of a handle."""

    def __init__(self, *, is_captured: bool) -> None:
        self.is_captured = is_captured
        self.event = core.current_stream(0).record()
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def is_ordered(self) -> bool:
        return True


def test_a_capture_leaves_handles_of_before_alone(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer had not issued them when their window closed, which has waited for them."""
    monkeypatch.setattr(Ended, "is_ordered", lambda self: self.is_captured)
    reductions = Reductions(0, 2)
    before: Any = Ended(is_captured=False)
    reductions.add(before, side())
    reductions.wait()
    assert before.waits == 2, "as one of all, and as the last"
    with Graph(library):
        inside: Any = Ended(is_captured=True)
        reductions.add(inside, side())
        reductions.wait()
    assert (before.waits, inside.waits) == (2, 2)
    reductions.wait()
    assert (before.waits, inside.waits) == (3, 2), "the captured one is over and gone"


def test_what_a_failed_capture_has_in_flight_is_forgotten(library: Any) -> None:
    reductions = Reductions(0, 2)
    with Graph(library):
        inside: Any = Ended(is_captured=True)
        reductions.add(inside, side())
    reductions.forget_captured()
    reductions.wait()
    assert inside.waits == 0
