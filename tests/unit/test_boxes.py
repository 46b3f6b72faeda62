"""Boxes: every element of a range comes exactly once, in boxes as large as they can be. No torch."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest

from bucketwheel.checkpoint.boxes import Box, boxes_of


def elements(box: Box) -> list[tuple[tuple[int, ...], int]]:
    """(index in the whole, place in the piece) of each."""
    inside = product(*(range(size) for size in box.sizes))
    return [
        (
            tuple(offset + i for offset, i in zip(box.offsets, at, strict=True)),
            box.begin + sum(i * stride for i, stride in zip(at, box.strides, strict=True)),
        )
        for at in inside
    ]


def random_tensor(draw: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, stride): dense, 0 to 5 dimensions in any memory order."""
    shape = tuple(draw.choice([1, 1, 2, 3, 4, 5]) for _ in range(draw.randint(0, 5)))
    order = draw.sample(range(len(shape)), len(shape))
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= shape[dim]
    return shape, tuple(stride)


@pytest.mark.parametrize("seed", range(20))
def test_boxes_cover_the_ranges_of_any_layout_once(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        shape, stride = random_tensor(draw)
        numel = prod(shape)
        ends = sorted(draw.randint(0, numel) for _ in range(4))
        ranges = [(begin, end) for begin, end in (ends[:2], ends[2:]) if begin < end]
        owned = [place for begin, end in ranges for place in range(begin, end)]
        found = [one for box in boxes_of(shape, stride, ranges) for one in elements(box)]
        assert sorted(place for _, place in found) == list(range(len(owned)))
        for index, place in found:
            assert sum(i * s for i, s in zip(index, stride, strict=True)) == owned[place]
        for one in ranges:
            assert len(boxes_of(shape, stride, [one])) <= max(1, 2 * (len(shape) - 1) + 1)


@pytest.mark.parametrize(
    ("shape", "stride", "ranges", "expected"),
    [
        ((), (), [(0, 1)], [((), ())]),
        ((), (), [], []),
        ((7,), (1,), [(2, 5)], [((2,), (3,))]),
        ((4, 6), (6, 1), [(6, 18)], [((1, 0), (2, 6))]),  # whole rows
        ((4, 6), (1, 4), [(4, 12)], [((0, 1), (4, 2))]),  # the rows of a transposed matrix are its columns
        ((4, 6), (6, 1), [(8, 10)], [((1, 2), (1, 2))]),
        ((4, 6), (6, 1), [(5, 20)], [((0, 5), (1, 1)), ((1, 0), (2, 6)), ((3, 0), (1, 2))]),
        ((2, 3, 2, 2), (12, 1, 6, 3), [(12, 24)], [((1, 0, 0, 0), (1, 3, 2, 2))]),  # channels_last
        ((0, 3), (3, 1), [(0, 0)], [((0, 0), (0, 3))]),
        ((0, 3), (3, 1), [], []),
    ],
)
def test_the_boxes_of_known_ranges(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    ranges: list[tuple[int, int]],
    expected: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    assert [(box.offsets, box.sizes) for box in boxes_of(shape, stride, ranges)] == expected
