"""Packing: where every parameter lies in flat memory, and how that memory is cut into buckets and shards.

Pure integers: no torch, no communication, the same result on every rank for the same specs. The flat space is

    | param | pad | param ............ | pad | param | pad |        parameters, each aligned
    | bucket 0            | bucket 1            | bucket 2 |        cut without regard to parameters
    | s0 | s1 | .. | sW-1 | s0 | s1 | .. | sW-1 | ...              W equal shards each, rank r owns every sr

so a parameter may lie in several buckets and a bucket may hold parts of many parameters. A rank's shards, joined in
bucket order, are its *shard space*; any range of a parameter that a rank owns is contiguous there too, because both
orders agree.

Cost: time and memory grow with parameters and buckets, never with the world size (`Packing.segments` is for one rank).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

from bucketwheel.errors import expect_int

__all__ = ["Bucket", "BucketPlan", "Fragment", "PackItem", "Packing", "Segment", "pack", "plan_buckets"]


@dataclass(frozen=True)
class PackItem:
    """A parameter to pack: ``numel`` elements that may be cut between ranks only at multiples of ``granularity``."""

    numel: int
    granularity: int = 1


@dataclass(frozen=True)
class Bucket:
    """Elements [begin, begin + world * shard_numel) of the flat space: one collective."""

    index: int
    begin: int
    shard_numel: int
    shard_begin: int  # in every rank's shard space


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that lies in one bucket."""

    param: int
    bucket: int
    param_begin: int
    bucket_begin: int
    numel: int


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that one rank owns in one bucket: the unit the optimizer works on."""

    param: int
    bucket: int
    param_begin: int
    flat_begin: int
    shard_begin: int  # in the rank's shard space
    numel: int


@dataclass(frozen=True)
class Packing:
    items: tuple[PackItem, ...]
    begins: tuple[int, ...]  # of every parameter in the flat space
    buckets: tuple[Bucket, ...]
    world: int
    _bucket_begins: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bucket_begins", tuple(b.begin for b in self.buckets))

    @property
    def numel(self) -> int:
        """Elements of the flat space, padding included: a multiple of the world size."""
        last = self.buckets[-1] if self.buckets else Bucket(0, 0, 0, 0)
        return last.begin + self.world * last.shard_numel

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard space."""
        return self.numel // self.world

    @property
    def padding(self) -> int:
        """Elements of the flat space that belong to no parameter."""
        return self.numel - sum(item.numel for item in self.items)

    def fragments(self, param: int) -> list[Fragment]:
        """The parts of ``param``, by bucket. Empty for a parameter without elements."""
        begin, end = self.begins[param], self.begins[param] + self.items[param].numel
        found: list[Fragment] = []
        index = bisect.bisect_right(self._bucket_begins, begin) - 1
        at = begin
        while at < end:
            bucket = self.buckets[index]
            upto = min(end, bucket.begin + self.world * bucket.shard_numel)
            found.append(Fragment(param, bucket.index, at - begin, at - bucket.begin, upto - at))
            at, index = upto, index + 1
        return found

    def owned(self, param: int, rank: int) -> list[Segment]:
        """The parts of ``param`` that ``rank`` owns, ascending; ranges without elements are left out."""
        found: list[Segment] = []
        for part in self.fragments(param):
            bucket = self.buckets[part.bucket]
            low = max(part.bucket_begin, rank * bucket.shard_numel)
            high = min(part.bucket_begin + part.numel, (rank + 1) * bucket.shard_numel)
            if low < high:
                found.append(
                    Segment(
                        param,
                        bucket.index,
                        part.param_begin + low - part.bucket_begin,
                        bucket.begin + low,
                        bucket.shard_begin + low - rank * bucket.shard_numel,
                        high - low,
                    )
                )
        return found

    def segments(self, rank: int) -> list[Segment]:
        """What ``rank`` owns, in the order of its shard space."""
        order = sorted(range(len(self.items)), key=lambda param: self.begins[param])
        return [segment for param in order for segment in self.owned(param, rank)]


@dataclass(frozen=True)
class BucketPlan:
    """A bucket as one rank knows it: what lies in it, and what of that the rank owns."""

    space: int  # which packing it is a bucket of
    bucket: Bucket
    fragments: tuple[Fragment, ...]
    segments: tuple[Segment, ...]


def plan_buckets(packings: Sequence[Packing], params: Sequence[Sequence[int]], rank: int) -> list[BucketPlan]:
    """The buckets of all ``packings`` in the order in which they fill if gradients come from the last parameter to the first.

    ``params``: for each packing, the numbers of its parameters among all, -1 for those that are gone. What only these have had
    has no bucket.
    """
    count = sum(number >= 0 for numbers in params for number in numbers)
    plans: list[tuple[int, BucketPlan]] = []
    for space, (packing, numbers) in enumerate(zip(packings, params, strict=True)):
        fragments: list[list[Fragment]] = [[] for _ in packing.buckets]
        for param in range(len(packing.items)):
            for fragment in packing.fragments(param) if numbers[param] >= 0 else ():
                fragments[fragment.bucket].append(fragment)
        segments: list[list[Segment]] = [[] for _ in packing.buckets]
        for segment in packing.segments(rank):
            if numbers[segment.param] >= 0:
                segments[segment.bucket].append(segment)
        for bucket in packing.buckets:
            found = fragments[bucket.index]
            if not found and min(numbers) < 0:
                continue
            last_arrival = max((count - 1 - numbers[fragment.param] for fragment in found), default=0)
            plan = BucketPlan(space, bucket, tuple(found), tuple(segments[bucket.index]))
            plans.append((last_arrival, plan))
    return [plan for _, plan in sorted(plans, key=lambda pair: pair[0])]


def pack(items: Sequence[PackItem], *, world: int, bucket_numel: int, align: int = 64) -> Packing:
    """Packs ``items``, in the order given, into buckets of about ``bucket_numel`` elements.

    Every parameter and every shard begins at a multiple of ``align`` elements. No shard boundary falls inside a
    parameter except at a multiple of its granularity; where that cannot be had within one bucket, the bucket ends early
    and padding follows. ValueError for a number below 1 (numel: below 0).
    """
    for name, value in (("world", world), ("bucket_numel", bucket_numel), ("align", align)):
        if expect_int(value, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for i, item in enumerate(items):
        if not isinstance(item, PackItem):
            raise TypeError(f"items[{i}] is {item!r}, expected a PackItem")
        expect_int(item.numel, f"items[{i}].numel")
        expect_int(item.granularity, f"items[{i}].granularity")
        if item.numel < 0 or item.granularity < 1:
            raise ValueError(f"item {i}: numel must be >= 0 and granularity >= 1, got {item}")
    begins: list[int] = [0] * len(items)
    buckets: list[Bucket] = []
    at = shard_at = 0  # where the next bucket begins, flat and in shard space
    first = 0  # the first parameter that is not wholly in a bucket
    covered = 0  # its elements that are
    while first < len(items):
        window = _lay_out(items, first, at, covered, bucket_numel, align)
        shard, taken = _cut(window, at, world, bucket_numel, align)
        end = at + world * shard
        covered = 0
        for slot in window[:taken]:
            begins[slot.param] = slot.begin
            if slot.end > end:
                first, covered = slot.param, end - slot.begin
                break
            first = slot.param + 1
        if shard:
            buckets.append(Bucket(len(buckets), at, shard, shard_at))
        at, shard_at = end, shard_at + shard
    return Packing(tuple(items), tuple(begins), tuple(buckets), world)


@dataclass(frozen=True)
class _Slot:
    param: int
    begin: int  # may lie before the bucket, for a parameter that continues
    end: int
    granularity: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _lay_out(
    items: Sequence[PackItem], first: int, at: int, covered: int, bucket_numel: int, align: int
) -> list[_Slot]:
    """The parameters from ``first`` on that begin within ``bucket_numel`` of ``at``."""
    window: list[_Slot] = []
    begin = at - covered
    for param in range(first, len(items)):
        window.append(_Slot(param, begin, begin + items[param].numel, items[param].granularity))
        begin = _round_up(window[-1].end, align)
        if begin - at >= bucket_numel:
            break
    return window


def _cut(window: list[_Slot], at: int, world: int, bucket_numel: int, align: int) -> tuple[int, int]:
    """(shard elements, how many slots of the window may go into the bucket) of the bucket that begins at ``at``."""
    shard = _round_up(-(-min(bucket_numel, window[-1].end - at) // world), align)
    strict = next((i for i, slot in enumerate(window) if slot.granularity > 1), None)
    if strict is None:
        return shard, _slots_before(window, at + world * shard)
    candidate = shard
    while candidate >= max(align, shard // 2):
        if _is_legal(window, at, world, candidate):
            return candidate, _slots_before(window, at + world * candidate)
        candidate -= align
    if strict > 0:  # end before the first parameter that resists
        return _cut(window[:strict], at, world, window[strict - 1].end - at, align)
    # Alone, from its own boundary: multiples of its granularity are legal cuts, and behind its end is padding.
    slot = window[0]
    step = align * slot.granularity // gcd(align, slot.granularity)
    return _round_up(-(-min(bucket_numel, slot.end - at) // world), step), 1


def _slots_before(window: list[_Slot], end: int) -> int:
    return bisect.bisect_left([slot.begin for slot in window], end) or 1


def _is_legal(window: list[_Slot], at: int, world: int, shard: int) -> bool:
    """Whether no boundary at + k * shard cuts a parameter off its granularity."""
    for slot in window:
        if slot.granularity == 1:
            continue
        k = max(1, -(-(slot.begin + 1 - at) // shard))
        while k <= world and at + k * shard < slot.end:
            if (at + k * shard - slot.begin) % slot.granularity:
                return False
            k += 1
    return True
