"""Packing: where every parameter lies in flat memory, and how that memory is cut into buckets and shards.

Pure integers: no torch, no communication, the same result on every rank for the same specs. The flat space is

    | param | pad | param ............ | pad | param | pad |        parameters, each aligned
    | bucket 0            | bucket 1            | bucket 2 |        one collective each
    | s0 | s1 | .. | sW-1 | s0 | s1 | .. | sW-1 | ...              W equal shards each, rank r owns every sr

so a parameter may lie in several buckets and a bucket may hold parts of many parameters. A rank's shards, joined in
bucket order, are its *shard space*; any range of a parameter that a rank owns is contiguous there too, because both
orders agree.

Where the boundaries of buckets and shards fall is the parameters' `granularity`: None, on rows where that costs little
(`row_cuts`); 1, anywhere, without regard to parameters; more, at its multiples only, whatever that costs.

Cost: time and memory grow with parameters and buckets, never with the world size (`Packing.segments` is for one rank).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from bucketwheel.errors import expect_int
from bucketwheel.layout.row_cuts import PackedRun, cut_by_rows, round_up, splits_rows

__all__ = ["Bucket", "BucketPlan", "Fragment", "PackItem", "Packing", "Segment", "pack", "plan_buckets"]


@dataclass(frozen=True)
class PackItem:
    """A parameter to pack: ``numel`` elements, which may be cut between ranks only at multiples of ``granularity``; with
    None, in a bucket of row cuts, only at multiples of ``row``."""

    numel: int
    granularity: int | None = 1
    row: int = 1  # elements of a slice of the outermost dimension in memory; 1 for vectors and scalars


@dataclass(frozen=True)
class Bucket:
    """Elements [begin, begin + world * shard_numel) of the flat space: one collective."""

    index: int
    begin: int
    shard_numel: int
    shard_begin: int  # in every rank's shard space
    by_rows: bool  # no boundary of it, or of its shards, falls inside a row; else it has *element cuts*


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
        return self.buckets[-1].begin + self.world * self.buckets[-1].shard_numel if self.buckets else 0

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

    def has_one_box(self, param: int) -> bool:
        """Whether what each rank owns of ``param``, if anything, is one range of whole rows."""
        if self.world == 1:
            return True
        parts = self.fragments(param)
        if len(parts) > 2 or any(_splits_rows(part, self.items[param], self.buckets[part.bucket]) for part in parts):
            return False
        if len(parts) < 2:
            return True
        (head, tail), shards = parts, [self.buckets[part.bucket].shard_numel for part in parts]
        return head.bucket_begin // shards[0] > (tail.numel - 1) // shards[1]  # the first rank here, the last one there

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


def _splits_rows(part: Fragment, item: PackItem, bucket: Bucket) -> bool:
    """Whether a boundary at which ``part`` begins or ends, or one inside, falls inside a row."""
    end = part.param_begin + part.numel
    return (
        part.param_begin % item.row != 0
        or (end < item.numel and end % item.row != 0)
        or splits_rows(part.bucket_begin, part.numel, item.row, bucket.shard_numel, part.param_begin)
    )


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

    Every parameter and every shard begins at a multiple of ``align`` elements. Runs of items with a granularity and without
    share no bucket.

    With one: no shard boundary falls inside a parameter except at a multiple of its granularity; where that cannot be had
    within one bucket, the bucket ends early and padding follows. Without: `row_cuts.cut_by_rows`; a bucket has at most
    `GROWTH` x ``bucket_numel`` elements, rounded up to ``world`` x ``align``.

    ValueError for a number below 1 (numel: below 0).
    """
    for name, value in (("world", world), ("bucket_numel", bucket_numel), ("align", align)):
        if expect_int(value, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for i, item in enumerate(items):
        if not isinstance(item, PackItem):
            raise TypeError(f"items[{i}] is {item!r}, expected a PackItem")
        granularity = 1 if item.granularity is None else item.granularity
        numbers = (("numel", item.numel, 0), ("granularity", granularity, 1), ("row", item.row, 1))
        if any(expect_int(value, f"items[{i}].{name}") < least for name, value, least in numbers):
            raise ValueError(f"item {i}: numel must be >= 0, granularity and row >= 1, got {item}")
    begins: list[int] = []
    shards: list[int] = []
    at = 0
    for run in _runs(items, world, bucket_numel, align):
        begins += [at + begin for begin in run.begins]
        shards += run.shards
        at += world * sum(run.shards)
    shard_begins = [0, *itertools.accumulate(shards)]
    buckets = [Bucket(i, world * shard_begins[i], shard, shard_begins[i], True) for i, shard in enumerate(shards)]
    packing = Packing(tuple(items), tuple(begins), tuple(buckets), world)
    for param, item in enumerate(items):
        for part in packing.fragments(param):
            if buckets[part.bucket].by_rows and _splits_rows(part, item, buckets[part.bucket]):
                buckets[part.bucket] = replace(buckets[part.bucket], by_rows=False)
    return replace(packing, buckets=tuple(buckets))


def _runs(items: Sequence[PackItem], world: int, bucket_numel: int, align: int) -> Iterator[PackedRun]:
    """All items, in runs with shards."""
    done = 0
    for is_free, alike in itertools.groupby(items, key=lambda item: item.granularity is None):
        chosen = list(alike)
        runs: Iterable[PackedRun] = [PackedRun([0] * len(chosen), [])]
        if is_free:
            numels, rows = [item.numel for item in chosen], [item.row for item in chosen]
            runs = cut_by_rows(numels, rows, world=world, bucket_numel=bucket_numel, align=align)
        for has_rows, some in itertools.groupby(runs, key=lambda run: bool(run.shards)):
            found = list(some)
            count = sum(len(run.begins) for run in found)
            yield from found if has_rows else [_cut(items[done : done + count], world, bucket_numel, align)]
            done += count


def _cut(items: Sequence[PackItem], world: int, bucket_numel: int, align: int) -> PackedRun:
    """Element cuts: buckets end without regard to parameters, but for those with a granularity above 1."""
    begins: list[int] = [0] * len(items)
    shards: list[int] = []
    at = 0  # where the next bucket begins
    first = 0  # the first parameter that is not wholly in a bucket
    covered = 0  # its elements that are
    while first < len(items):
        window = _lay_out(items, first, at, covered, bucket_numel, align)
        shard, taken = _shard_of(window, at, world, bucket_numel, align)
        end = at + world * shard
        covered = 0
        for slot in window[:taken]:
            begins[slot.param] = slot.begin
            if slot.end > end:
                first, covered = slot.param, end - slot.begin
                break
            first = slot.param + 1
        if shard:
            shards.append(shard)
        at = end
    return PackedRun(begins, shards)


@dataclass(frozen=True)
class _Slot:
    param: int
    begin: int  # may lie before the bucket, for a parameter that continues
    end: int
    granularity: int


def _lay_out(
    items: Sequence[PackItem], first: int, at: int, covered: int, bucket_numel: int, align: int
) -> list[_Slot]:
    """The parameters from ``first`` on that begin within ``bucket_numel`` of ``at``."""
    window: list[_Slot] = []
    begin = at - covered
    for param in range(first, len(items)):
        window.append(_Slot(param, begin, begin + items[param].numel, items[param].granularity or 1))
        begin = round_up(window[-1].end, align)
        if begin - at >= bucket_numel:
            break
    return window


def _shard_of(window: list[_Slot], at: int, world: int, bucket_numel: int, align: int) -> tuple[int, int]:
    """(shard elements, how many slots of the window may go into the bucket) of the bucket that begins at ``at``."""
    shard = round_up(-(-min(bucket_numel, window[-1].end - at) // world), align)
    strict = next((i for i, slot in enumerate(window) if slot.granularity > 1), None)
    if strict is None:
        return shard, _slots_before(window, at + world * shard)
    candidate = shard
    while candidate >= max(align, shard // 2):
        if _is_legal(window, at, world, candidate):
            return candidate, _slots_before(window, at + world * candidate)
        candidate -= align
    if strict > 0:  # end before the first parameter that resists
        return _shard_of(window[:strict], at, world, window[strict - 1].end - at, align)
    # Alone, from its own boundary: multiples of its granularity are legal cuts, and behind its end is padding.
    slot = window[0]
    step = align * slot.granularity // gcd(align, slot.granularity)
    return round_up(-(-min(bucket_numel, slot.end - at) // world), step), 1


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
