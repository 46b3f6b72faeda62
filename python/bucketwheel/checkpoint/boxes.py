"""Boxes: what a rank owns of a parameter, as n-dimensional boxes of its shape. Pure integers.

A rank owns ranges of a parameter's memory order. Checkpoints know boxes: where one begins in each dimension, and its
sizes. A range of whole rows is one box; any other is cut into at most 2 (n - 1) + 1: the end of a row, whole rows, the
beginning of a row, and of the partial rows the same again, one dimension less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Elements [offset, offset + size) in each dimension; they lie at ``begin`` of the rank's piece, with ``strides``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(shape: Sequence[int], stride: Sequence[int], ranges: Sequence[tuple[int, int]]) -> tuple[Box, ...]:
    """The boxes of ``ranges`` ([begin, end) in memory order, ascending) of a dense tensor of ``shape`` and ``stride``.

    The piece of a rank has the elements of its ranges one behind the other. A tensor without elements has one box for a
    range [0, 0).
    """
    # The dimensions whose neighbours lie furthest apart first; those of one element anywhere.
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] == 1, -stride[dim]))
    place = [order.index(dim) for dim in range(len(shape))]
    sizes = [shape[dim] for dim in order]
    found: list[Box] = []
    at = 0
    for begin, end in ranges:
        cuts = _cut(sizes, begin, end) if prod(sizes) else [((0,) * len(sizes), tuple(sizes))]
        for offsets, lengths in cuts:
            strides = [prod(lengths[i + 1 :]) for i in range(len(lengths))]
            in_shape = [tuple(of[i] for i in place) for of in (offsets, lengths, strides)]
            found.append(Box(in_shape[0], in_shape[1], at, in_shape[2]))
            at += prod(lengths)
    return tuple(found)


def _cut(sizes: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes of [begin, end), row-major, in order."""
    if begin >= end:
        return
    if not sizes:
        yield (), ()
        return
    row = prod(sizes[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(sizes, last, begin, end)
        return
    yield from _in_row(sizes, first - 1, begin, first * row)
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    yield from _in_row(sizes, last, last * row, end)


def _in_row(sizes: Sequence[int], row: int, begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = row * prod(sizes[1:])
    for offsets, lengths in _cut(sizes[1:], begin - before, end - before):
        yield (row, *offsets), (1, *lengths)
