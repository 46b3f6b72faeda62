"""place: finds offsets for the buffers of a memory plan in one arena.

>>> found = place({"weights/0": 4096, "weights/1": 4096, "grads": 1024},
...               {"weights/0": [(0, 2), (5, 6)], "weights/1": [(2, 5)], "grads": [(4, 6)]})
>>> found.total_bytes, found.load_bytes, found.offsets["weights/0"] == found.offsets["weights/1"]
(5120, 5120, True)

A *key* names a buffer that has the same offset whenever it is live. It is live in half-open intervals of steps of a schedule.
The *load* is the most bytes that are live in one step, so no placement is smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from bucketwheel.errors import expect_int
from bucketwheel.native import core

_MOST_BYTES, _MOST_STEPS, _MOST_EFFORT = 2**60, 2**63 - 1, 2**40  # all sums fit into 64 bits

Key = Any  # hashable; a dict of texts is no Mapping[Hashable, ...]
Interval = tuple[int, int]


class PlanKey(NamedTuple):
    """The properties of a key that the policies use.

    Attributes:
        role: What the buffer holds, such as ``"weight"`` or ``"grad"``.
        unit: Number of the unit of the model, in the order of the forward pass.
        position: Number of the bucket in its unit.
        dtype: Name of the dtype; empty if unknown."""

    role: str
    unit: int
    position: int
    dtype: str


@dataclass(frozen=True)
class Placement:
    """Offsets of keys in one arena, the result of `place`.

    Attributes:
        offsets: The offset of each key in bytes.
        total_bytes: Size of the arena.
        load_bytes: The most bytes that are live in one step.
        bound_bytes: No placement is smaller. The load, or more if a search has shown that some keys need more.
        proven_optimal: True if ``total_bytes`` equals ``bound_bytes``."""

    offsets: dict[Key, int]
    total_bytes: int
    load_bytes: int
    bound_bytes: int
    proven_optimal: bool


def place(
    sizes: Mapping[Key, int],
    intervals: Mapping[Key, Sequence[Interval]],
    *,
    keys: Mapping[Key, PlanKey] | None = None,
    align: int = 512,
    effort: int = 20_000,
) -> Placement:
    """Finds offsets for keys in one arena, as small as a bounded search finds. Local.

    Two keys that are live in the same step do not overlap. The result depends only on the arguments, not on the order of the
    dicts, so every rank gets the same.

    Args:
        sizes: Bytes of each key.
        intervals: For each key, the half-open intervals ``(start, stop)`` of steps in which it is live. Intervals of one key
            do not overlap.
        keys: Not used. `POLICIES` have the same signature.
        align: Alignment of the offsets in bytes. ``total_bytes`` and ``load_bytes`` count sizes rounded up to it.
        effort: Limit of each search: about how many times it places a key.

    Raises:
        ValueError: A negative size, an empty interval, overlapping intervals of one key, different keys in the two dicts, an
            ``align`` below 1, or ``2**60`` bytes or more.
        TypeError: A size or a step that is not an int."""
    asked = in_canonical_order(sizes, intervals, align)
    found = core.place(list(asked.values()), min(expect_int(effort, "effort"), _MOST_EFFORT))
    offsets = dict(zip(asked, found.offsets, strict=True))
    return placement_at(offsets, asked, found)


def aligned(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align


Asked = dict[Key, tuple[int, list[Interval]]]  # what the native searches take: aligned bytes and ascending intervals


def in_canonical_order(sizes: Mapping[Key, int], intervals: Mapping[Key, Sequence[Interval]], align: int) -> Asked:
    """The keys, as they begin; the same for any order of the dicts. The errors of `place`."""
    if expect_int(align, "align") < 1:
        raise ValueError(f"align is {align}, expected at least 1")
    if sizes.keys() != intervals.keys():
        odd = next(iter(sizes.keys() ^ intervals.keys()))
        raise ValueError(f"key {odd!r} is in {'sizes' if odd in sizes else 'intervals'} only")
    asked: Asked = {}
    for key, size in sizes.items():
        if expect_int(size, f"sizes[{key!r}]") < 0:
            raise ValueError(f"sizes[{key!r}] is {size}")
        live = sorted(intervals[key])
        for start, stop in live:
            if expect_int(start, f"a start of {key!r}") >= expect_int(stop, f"a stop of {key!r}"):
                raise ValueError(f"intervals[{key!r}] has the empty ({start}, {stop})")
            if max(-start, stop) > _MOST_STEPS:
                raise ValueError(f"intervals[{key!r}] has ({start}, {stop}), at most {_MOST_STEPS} steps fit")
        for (_, stop), (start, _) in pairwise(live):
            if start < stop:
                raise ValueError(f"intervals[{key!r}] has two that overlap, before step {stop}: {list(intervals[key])}")
        asked[key] = aligned(size, align), live
    total = sum(size for size, _ in asked.values())
    if total >= _MOST_BYTES:
        raise ValueError(f"the sizes add up to {total}, at most {_MOST_BYTES} fit")
    return dict(sorted(asked.items(), key=lambda one: (one[1][1], sizes[one[0]], repr(one[0]))))


def placement_at(offsets: dict[Key, int], asked: Asked, found: core.Placement) -> Placement:
    """The placement with these ``offsets``, in the order of ``asked``. ``found``: the bounds."""
    total = max((offsets[key] + size for key, (size, _) in asked.items()), default=0)
    return Placement(offsets, total, found.load_bytes, found.bound_bytes, total == found.bound_bytes)
