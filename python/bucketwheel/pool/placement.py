"""place: where the buffers of a memory plan lie in one arena.

>>> found = place({"weights/0": 4096, "weights/1": 4096, "grads": 1024},
...               {"weights/0": [(0, 2), (5, 6)], "weights/1": [(2, 5)], "grads": [(4, 6)]})
>>> found.total_bytes, found.load_bytes, found.offsets["weights/0"] == found.offsets["weights/1"]
(5120, 5120, True)

A *key* names a buffer that has one offset, whenever it is live; it is live in half-open intervals of steps of a schedule. The
*load* is the most bytes that are live in one step, so no placement is smaller.
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
    """What a policy may go by."""

    role: str  # "weight", "grad", ...
    unit: int  # of the model, in the order of the forward pass
    position: int  # of the bucket in its unit
    dtype: str


@dataclass(frozen=True)
class Placement:
    """Offsets by key in an arena of ``total_bytes``.

    No placement is smaller than ``bound_bytes``: the load or, where a search has shown that some of the keys need more,
    what these need.
    """

    offsets: dict[Key, int]
    total_bytes: int
    load_bytes: int
    bound_bytes: int
    proven_optimal: bool  # the total is the bound


def place(
    sizes: Mapping[Key, int],
    intervals: Mapping[Key, Sequence[Interval]],
    *,
    keys: Mapping[Key, PlanKey] | None = None,
    align: int = 512,
    effort: int = 20_000,
) -> Placement:
    """The smallest arena that a bounded search finds. A pure function: every rank gets the same, whatever the order of the dicts.

    Args:
        sizes: bytes by key.
        intervals: by key, the half-open (start, stop) in steps in which it is live. Those of a key do not meet.
        keys: for policies of this signature; not used here.
        align: of every offset, in bytes. ``total_bytes`` and ``load_bytes`` count sizes rounded up to it.
        effort: about how many times each search may put a key somewhere.

    Raises:
        ValueError: a negative size, an empty interval, intervals of a key that meet, other keys in one dict than in another,
            an ``align`` below 1, 2**60 bytes and more.
        TypeError: a size or step that is not an int.
    """
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
                raise ValueError(f"intervals[{key!r}] has two that meet, before step {stop}: {list(intervals[key])}")
        asked[key] = aligned(size, align), live
    total = sum(size for size, _ in asked.values())
    if total >= _MOST_BYTES:
        raise ValueError(f"the sizes add up to {total}, at most {_MOST_BYTES} fit")
    return dict(sorted(asked.items(), key=lambda one: (one[1][1], sizes[one[0]], repr(one[0]))))


def placement_at(offsets: dict[Key, int], asked: Asked, found: core.Placement) -> Placement:
    """The placement with these ``offsets``, in the order of ``asked``. ``found``: the bounds."""
    total = max((offsets[key] + size for key, (size, _) in asked.items()), default=0)
    return Placement(offsets, total, found.load_bytes, found.bound_bytes, total == found.bound_bytes)
