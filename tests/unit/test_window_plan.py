"""The plan of a window against one that is played, gradient by gradient."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketwheel.grads.bucket import GradBucket, Part
from bucketwheel.grads.window_plan import intervals_in_order, plan_window
from bucketwheel.pool.placement import aligned


def buckets_of(sizes: Sequence[int], params_of: Sequence[Collection[int]]) -> list[GradBucket]:
    """Of ``sizes`` bytes."""
    return [
        GradBucket(number, size, torch.uint8, [Part(param, 0, 0, 0) for param in params], None, 0)
        for number, (size, params) in enumerate(zip(sizes, params_of, strict=True))
    ]


def most_at_once(sizes: Sequence[int], params_of: Sequence[Collection[int]], limit: int, overlap: bool) -> int:
    """Bytes, where gradients come from the last parameter to the first and each launch keeps its memory as long as it may."""
    count = 1 + max((param for params in params_of for param in params), default=-1)
    alive: list[int] = []
    launched: list[int] = []
    most = 0
    for param in reversed(range(count)):
        arrived = range(param, count)
        for bucket, params in enumerate(params_of):
            if param in params and bucket not in alive:
                for done in launched[: max(len(launched) - limit + 1, 0)]:
                    if done in alive:
                        alive.remove(done)
                alive.append(bucket)
                most = max(most, sum(aligned(sizes[b], 512) for b in alive))
            if overlap and len(launched) == bucket and all(one in arrived for one in params):
                launched.append(bucket)
    return most


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[set[int]]]:
    """Sizes of buckets, and the parameters in each: of up to three dtypes, which take turns, in order of their completion."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    spaces = [[param for param in range(24) if param % rng.randint(1, 3) == 0] for _ in range(rng.randint(1, 3))]
    buckets = []
    taken: set[int] = set()
    for space in spaces:
        params = [param for param in reversed(space) if param not in taken]
        taken |= set(params)
        at = 0
        while at < len(params):
            end = at + rng.randint(1, 4)
            buckets.append(
                set(params[max(at - rng.randint(0, 1), 0) : end])
            )  # perhaps shares one with the bucket before
            at = end
    buckets.sort(key=min, reverse=True)
    return [rng.randint(1, 9000) for _ in buckets], buckets


@settings(max_examples=150, deadline=None)
@given(windows(), st.integers(1, 5), st.booleans())
def test_the_load_is_what_a_window_in_order_has_at_once(
    window: tuple[list[int], list[set[int]]], limit: int, overlap: bool
) -> None:
    sizes, params_of = window
    plan = plan_window(buckets_of(sizes, params_of), limit=limit, overlap=overlap)
    assert plan.load_bytes == most_at_once(sizes, params_of, limit, overlap)
    assert plan.load_bytes <= plan.total_bytes


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_of_one_dtype_as_many_as_the_limit_have_memory(limit: int) -> None:
    intervals = intervals_in_order([[b] for b in reversed(range(6))], limit=limit, overlap=True)
    assert intervals == [(b, min(b + limit, 6)) for b in range(6)]
    sizes = [512 * (1 + b % 3) for b in range(6)]
    largest = [max(sizes[first::limit], default=0) for first in range(limit)]
    plan = plan_window(buckets_of(sizes, [[b] for b in reversed(range(6))]), limit=limit, overlap=True)
    assert plan.total_bytes == plan.load_bytes <= sum(largest), "never above slots of a fixed size each"
