"""place: where the buffers of a memory plan lie in one arena, and which of them wait for each other.

>>> found = place({"weights/0": 4096, "weights/1": 4096, "grads": 1024},
...               {"weights/0": [(0, 2), (5, 6)], "weights/1": [(2, 5)], "grads": [(4, 6)]})
>>> found.total_bytes, found.load_bytes, found.offsets["weights/0"] == found.offsets["weights/1"]
(5120, 5120, True)

A *key* names a buffer that has one offset, whenever it is live; it is live in half-open intervals of steps of a schedule. The
*load* is the most bytes that are live in one step, so no placement is smaller.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from bucketwheel.errors import expect_int
from bucketwheel.native import core

_MOST_BYTES, _MOST_STEPS, _MOST_EFFORT = 2**60, 2**63 - 1, 2**40  # all sums fit into 64 bits

Key = Any  # hashable; a dict of texts is no Mapping[Hashable, ...]
Interval = tuple[int, int]
Users = tuple[Hashable, tuple[Hashable, ...]]  # the stream that acquires, the others that use the bytes


class PlanKey(NamedTuple):
    """What a policy may go by."""

    role: str  # "weight", "grad", ...
    unit: int  # of the model, in the order of the forward pass
    position: int  # of the bucket in its unit
    dtype: str


class Lifetime(NamedTuple):
    """One interval of a key; ``number`` counts those of the key."""

    key: Key
    number: int


class Wait(NamedTuple):
    """``acquired`` takes bytes that ``released`` has had, in a stream that does not know of its end otherwise."""

    acquired: Lifetime
    released: Lifetime


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
    waits: tuple[Wait, ...]


def place(
    sizes: Mapping[Key, int],
    intervals: Mapping[Key, Sequence[Interval]],
    *,
    keys: Mapping[Key, PlanKey] | None = None,
    streams: Mapping[Key, Sequence[Users]] | None = None,
    align: int = 512,
    effort: int = 20_000,
) -> Placement:
    """The smallest arena that a bounded search finds. A pure function: every rank gets the same, whatever the order of the dicts.

    Args:
        sizes: bytes by key.
        intervals: by key, the half-open (start, stop) in steps in which it is live. Those of a key do not meet.
        keys: for policies of this signature; not used here.
        streams: by key and interval, in which stream it is acquired and which others use it. None: each interval in one of
            its own, so that every reuse of bytes is a wait.
        align: of every offset, in bytes. ``total_bytes`` and ``load_bytes`` count sizes rounded up to it.
        effort: about how many times each search may put a key somewhere.

    Raises:
        ValueError: a negative size, an empty interval, intervals of a key that meet, other keys in one dict than in another,
            an ``align`` below 1, ``streams`` of another number than the intervals, 2**60 bytes and more.
        TypeError: a size or step that is not an int.
    """
    asked = in_canonical_order(sizes, intervals, align)
    found = core.place(list(asked.values()), min(expect_int(effort, "effort"), _MOST_EFFORT))
    offsets = dict(zip(asked, found.offsets, strict=True))
    return placement_at(offsets, asked, found, sizes, intervals, streams)


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


def placement_at(
    offsets: dict[Key, int],
    asked: Asked,
    found: core.Placement,
    sizes: Mapping[Key, int],
    intervals: Mapping[Key, Sequence[Interval]],
    streams: Mapping[Key, Sequence[Users]] | None,
) -> Placement:
    """The placement with these ``offsets``, in the order of ``asked``, and its waits. ``found``: the bounds."""
    total = max((offsets[key] + size for key, (size, _) in asked.items()), default=0)
    waits = waits_of(offsets, sizes, {key: intervals[key] for key in asked}, streams)
    return Placement(offsets, total, found.load_bytes, found.bound_bytes, total == found.bound_bytes, waits)


# --- waits ------------------------------------------------------------------------------------------------------------

_Clock = dict[Hashable, int]  # by stream: how far its work is known to be done, as a place in the list of events


def waits_of(
    offsets: Mapping[Key, int],
    sizes: Mapping[Key, int],
    intervals: Mapping[Key, Sequence[Interval]],
    streams: Mapping[Key, Sequence[Users]] | None = None,
) -> tuple[Wait, ...]:
    """The fewest waits with which every use of a byte is ordered behind those before it.

    A stream does its work in the order of the steps, and of ``intervals`` within a step. It is behind what it has waited for,
    and so behind all that this was behind. Who uses a lifetime beside the stream that acquires it waits for that stream first.
    """
    lives = [Lifetime(key, number) for key in intervals if sizes[key] for number in range(len(intervals[key]))]
    users: dict[Lifetime, tuple[Hashable, ...]]  # the stream that acquires first
    if streams is None:
        users = {life: (life,) for life in lives}
    else:
        for key in intervals:
            if key not in streams or len(streams[key]) != len(intervals[key]):
                raise ValueError(f"streams[{key!r}] is {streams.get(key)}, for {len(intervals[key])} intervals")
        given = ((life, *streams[life.key][life.number]) for life in lives)
        users = {life: tuple(dict.fromkeys((producer, *rest))) for life, producer, rest in given}
    events = sorted(
        ((intervals[life.key][life.number][1 - is_start], is_start, at), life)
        for at, life in enumerate(users)
        for is_start in (False, True)
    )
    ahead = Counter(stream for each in users.values() for stream in each)  # lifetimes that have, or will have, bytes
    clocks: dict[Hashable, _Clock] = defaultdict(dict)
    ended: dict[Lifetime, tuple[int, _Clock]] = {}  # its place, and what is known behind all its users
    owners = _Owners()
    waits: list[Wait] = []
    for at, ((_, is_start, _), life) in enumerate(events):
        if not is_start:
            known = dict.fromkeys(users[life], at)
            for stream in users[life]:
                _learn(known, {other: place for other, place in clocks[stream].items() if ahead[other]})
            ended[life] = at, known
            continue
        own, *others = users[life]
        clock = clocks[own]
        before = owners.take(offsets[life.key], offsets[life.key] + sizes[life.key], life)
        for one in sorted(before, key=lambda one: -ended[one][0]):  # what ended later nobody knows who ended before
            end, known = ended[one]
            if any(stream != own and clock.get(stream, -1) < end for stream in users[one]):
                waits.append(Wait(life, one))
                _learn(clock, known)
        for other in others:
            _learn(clocks[other], {**clock, own: at})
        for one in before:
            if not owners.ranges[one]:  # nobody takes bytes from it any more: what is known of its streams is of no use
                del ended[one]
                ahead.subtract(users[one])
                for stream in users[one]:
                    if not ahead[stream]:
                        del clocks[stream]
    return tuple(waits)


def _learn(clock: _Clock, other: _Clock) -> None:
    for stream, at in other.items():
        clock[stream] = max(clock.get(stream, -1), at)


class _Owners:
    """Who had which bytes last."""

    def __init__(self) -> None:
        self._begins: list[int] = [0]
        self._owners: list[Any] = [None]
        self.ranges: Counter[Any] = Counter([None])  # of each owner

    def take(self, begin: int, end: int, owner: Any) -> list[Any]:
        """Gives [begin, end), which is not empty, to ``owner``. Returns who had any of it."""
        first, last = self._cut(begin), self._cut(end)
        before = self._owners[first:last]
        self._begins[first:last], self._owners[first:last] = [begin], [owner]
        self.ranges.subtract(before)
        self.ranges[owner] += 1
        return [one for one in dict.fromkeys(before) if one is not None]

    def _cut(self, at: int) -> int:
        """The index of the range that begins at ``at``."""
        index = bisect_right(self._begins, at) - 1
        if self._begins[index] != at:
            index += 1
            self._begins.insert(index, at)
            self._owners.insert(index, self._owners[index - 1])
            self.ranges[self._owners[index]] += 1
        return index
