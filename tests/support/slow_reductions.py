"""Reduce-scatters that are over when somebody has waited for them and not before: the most memory that there may be is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from bucketwheel.grads import launch


class Slow:
    """A handle of an operation that is over when somebody has waited for it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.is_over = False

    def is_ordered(self) -> bool:
        return self.is_over

    def await_order(self, timeout: float) -> bool:
        self.is_over = self.is_over or self.handle.await_order(timeout)
        return self.is_over

    def wait(self) -> None:
        self.handle.wait()
        self.is_over = True

    @property
    def event(self) -> Any:
        return self.handle.event


@contextlib.contextmanager
def slow_reductions() -> Iterator[None]:
    """``_MOST_PATIENCE_S``: whoever waits in vain for so long would take more memory."""
    add = launch.Reductions.add
    with mock.patch.multiple(launch, _MOST_PATIENCE_S=20.0, _CLOSING_PATIENCE_S=20.0):
        with mock.patch.object(launch.Reductions, "add", lambda self, handle, held: add(self, Slow(handle), held)):
            yield
