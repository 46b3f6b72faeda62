"""Launcher, alone: where buckets lie whatever order gradients come in, and that nobody writes what has still to be read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bucketwheel.grads.bucket import GradBucket, Part
from bucketwheel.grads.launch import Launcher
from bucketwheel.grads.window_plan import plan_window
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool
from bucketwheel.pool.slots import Slots

HOLDS = 256  # elements of a part of a bucket: 1 KiB


class Reduction:
    """A reduce-scatter that reads its input when it is over, which is after a number of questions or a wait."""

    event = core.Stream("nothing").record()
    is_captured = False

    def __init__(self, flat: Tensor, questions: int) -> None:
        self._flat, self._expected = flat, flat.clone()
        self._questions = questions

    def _read(self) -> None:
        self._questions = 0
        assert self._flat.equal(self._expected), "somebody has written what was to be read"

    def is_ordered(self) -> bool:
        if self._questions > 1:
            self._questions -= 1
        elif self._questions:
            self._read()
        return not self._questions

    def await_order(self, timeout: float) -> bool:
        return self.is_ordered()

    def wait(self) -> None:
        self._read()


class Rank:
    """In the place of a communicator, its hooks and `GradWindow`: buckets of ``parts[b]`` parameters, which come as given."""

    device = -1
    sees_peers = True

    def __init__(
        self, parts: Sequence[int], limit: int, *, registered: bool = False, questions: Callable[[], int] = int
    ):
        self.pool, self._questions, self.is_registered = Pool("host"), questions, registered
        self.sent: list[tuple[int, list[float]]] = []  # where each bucket was reduced from, and what
        buckets, first = [], sum(parts)
        for index, count in enumerate(parts):
            first -= count
            held = [Part(first + i, i * HOLDS, 0, HOLDS) for i in range(count)]
            accumulator = core.ShardAccumulator(torch.zeros(count * HOLDS), [(0, count * HOLDS)])
            buckets.append(GradBucket(index, count * HOLDS, torch.float32, held, accumulator))
        plan = plan_window([b.nbytes for b in buckets], [b.parts for b in buckets], limit=limit, overlap=True)
        self.plan, self.buckets = plan, buckets
        self._schedule = core.Schedule(
            [[b.index] for param in range(sum(parts)) for b in buckets if param in b.parts], len(parts), False
        )
        self.slots = Slots.leased(plan, self.pool)
        self.launcher = Launcher(self, buckets, self, slots=self.slots, max_inflight=limit)  # type: ignore[arg-type]

    def open(self, bucket: int, memory: Tensor) -> None: ...
    def shut(self, bucket: int) -> None: ...
    def _begin_capture(self) -> None: ...

    def _reduce_scatter_into(self, flat: Tensor, sink: Any) -> Reduction:
        self.sent.append((flat.data_ptr() - self.slots.memory.data_ptr(), flat[::HOLDS].tolist()))
        return Reduction(flat, self._questions())

    def begin_window(self, params: Sequence[int], *, is_captured: bool = False) -> None:
        """Gradients of these, once more of those that are named again."""
        self.launcher.begin_window(torch.device("cpu"), is_captured=is_captured)
        for param in params:
            stores, launches = self._schedule.gradient(param, False, True)
            self.launcher.carry_out(stores, launches, torch.full((HOLDS,), 1.0 + param))

    def window(self, params: Sequence[int]) -> None:
        """`begin_window`; the rest is launched at the end."""
        held = bytes(param in params for param in range(sum(len(b.parts) for b in self.buckets)))
        self.begin_window(params)
        for one in self._schedule.flush():
            self.launcher.launch(one)
        agreed = self._schedule.agree([self._schedule.notes(held)])
        self.launcher.reductions.begin_close()
        for one in [one for launches in self._schedule.close(agreed) for one in launches]:
            self.launcher.launch(one)
        self.launcher.reductions.wait()
        self.launcher.reductions.end_window()
        assert not self.launcher.reductions.live

    def in_order(self) -> list[int]:
        return list(reversed(range(sum(len(b.parts) for b in self.buckets))))


@pytest.mark.parametrize("registered", [False, True])
def test_in_order_nothing_is_on_the_side(registered: bool) -> None:
    """And live bytes at their most are the load, fast and slow reductions alike."""
    for questions in (0, 1, 3):
        rank = Rank([3, 1, 2, 4, 1, 2], 2, registered=registered, questions=lambda asked=questions: asked)
        for _ in range(3):
            rank.window(rank.in_order())
        found = rank.launcher.memory()
        assert found["buckets_peak"] == found["load"] == 6 * 1024, "of the third and the fourth"
        assert found["side_peak"] == found["side"] == found["buckets"] == 0
        assert [place for place, _ in rank.sent] == rank.slots.offsets * 3
        assert rank.launcher.pool.stats().acquires == (0 if registered else 1)


def test_a_capture_that_failed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "is_capturing", lambda device: True)
    monkeypatch.setattr(Reduction, "is_captured", True)
    rank = Rank([1, 1, 2, 1], 2, questions=lambda: 10**9)
    rank.begin_window([2, 1, 3, 4], is_captured=True)  # the third bucket is too early, and launched
    assert rank.launcher.memory()["side"] == 2 * 1024
    rank.launcher.forget_captured()
    assert not rank.launcher.reductions.live


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_every_bucket_is_reduced_as_it_was_packed(seed: int, registered: bool) -> None:
    """In any order, with gradients that are late or missing; in registered memory always from its slot."""
    rng = random.Random(seed)
    parts = [rng.randint(1, 3) for _ in range(rng.randint(1, 7))]
    rank = Rank(parts, rng.randint(1, 4), registered=registered, questions=lambda: rng.randint(0, 3))
    for _ in range(3):
        params = rank.in_order()
        if rng.random() < 0.7:
            rng.shuffle(params)
        params = params[: rng.randint(1, len(params))]
        before = len(rank.sent)
        rank.window([*params, *rng.sample(params, rng.randint(0, min(2, len(params))))])
        for bucket, (place, values) in zip(rank.buckets, rank.sent[before:], strict=False):
            assert [value != 0 for value in values] == [param in params for param in bucket.parts]
            assert all(
                value in (0, 1 + param, 2 + 2 * param) for value, param in zip(values, bucket.parts, strict=True)
            )
            assert place == rank.slots.offsets[bucket.index] or not registered
    rank.slots.release()
    rank.pool.expect_no_leases()
