"""Packing: where each parameter lies in flat memory, and how that memory is cut into buckets and shards.

Pure integer arithmetic: no torch, no communication, the same result on every rank. The flat space is

    | param | pad | param ............ | pad | param | pad |        parameters, each aligned
    | bucket 0            | bucket 1            | bucket 2 |        one collective each
    | s0 | s1 | .. | sW-1 | s0 | s1 | .. | sW-1 | ...              W equal shards each, rank r owns every sr

A parameter may lie in several buckets, and a bucket may have parts of many parameters. The shards of a rank, joined in the
order of the buckets, are its *shard space*. Both orders agree, so a range of a parameter that a rank owns in one bucket is
contiguous in the shard space too.

The parameters' `granularity` decides where boundaries of buckets and shards fall (`row_cuts`): None, on rows where that needs
little padding; "row", always on rows; "element", anywhere.

Time and memory grow with the numbers of parameters and buckets, never with the world size: `Packing.segments` is for one rank.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from bucketwheel.errors import expect_int
from bucketwheel.layout.row_cuts import Grid, PackedRun, cut_anywhere, cut_by_rows, cut_whole_rows, splits_rows

Granularity = Literal["row", "element"]


@dataclass(frozen=True)
class PackItem:
    """A parameter for `pack`.

    Attributes:
        numel: Number of elements.
        granularity: Where shard boundaries may cut the parameter: ``"element"`` anywhere, ``"row"`` only at multiples of
            ``row``, None at multiples of ``row`` where the padding stays small, else anywhere.
        row: Number of elements in a slice of the outermost dimension in memory; 1 for vectors and scalars."""

    numel: int
    granularity: Granularity | None = "element"
    row: int = 1


@dataclass(frozen=True)
class Bucket:
    """A range of the flat space, ``[begin, begin + world * shard_numel)``, which one collective reduces or gathers.

    Attributes:
        index: The number of the bucket.
        begin: The first element in the flat space.
        shard_numel: Number of elements that each rank owns.
        shard_begin: The first element of the rank's part in its shard space, the same on each rank.
        by_rows: True if no boundary of the bucket or of its shards is inside a row (*row cuts*), else False (*element cuts*).
    """

    index: int
    begin: int
    shard_numel: int
    shard_begin: int
    by_rows: bool


@dataclass(frozen=True)
class Segment:
    """A range of a parameter in one bucket: all that lies there (`Packing.parts`), or the part of one rank (`Packing.owned`).

    Attributes:
        param: The number of the parameter.
        bucket: The bucket.
        param_begin: The first element in the parameter, in memory order.
        bucket_begin: The first element in the bucket.
        numel: Number of elements."""

    param: int
    bucket: Bucket
    param_begin: int
    bucket_begin: int
    numel: int

    @property
    def flat_begin(self) -> int:
        """The first element in the flat space."""
        return self.bucket.begin + self.bucket_begin

    @property
    def shard_begin(self) -> int:
        """The first element in the shard space of the rank that owns the segment."""
        return self.bucket.shard_begin + self.bucket_begin % self.bucket.shard_numel


@dataclass(frozen=True)
class Packing:
    """The result of `pack`: where each parameter lies in flat memory, and how that memory is cut into buckets and shards.

    The flat space has all parameters, with padding. Buckets divide it; each has one equal shard for every rank. The *shard
    space* of a rank has its shards in the order of the buckets. All numbers count elements. All methods are local.

    Attributes:
        items: The parameters, as given to `pack`.
        begins: The first element of each parameter in the flat space, ascending.
        buckets: The buckets, in the order of the flat space. A bucket has ``index``, ``begin`` in the flat space,
            ``shard_numel``, ``shard_begin`` in the shard space, and ``by_rows`` (no boundary is inside a row).
        world: Number of ranks."""

    items: tuple[PackItem, ...]
    begins: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    world: int

    @property
    def numel(self) -> int:
        """Number of elements in the flat space, with padding. A multiple of the number of ranks."""
        return self.buckets[-1].begin + self.world * self.buckets[-1].shard_numel if self.buckets else 0

    @property
    def shard_numel(self) -> int:
        """Number of elements in the shard space of one rank."""
        return self.numel // self.world

    @property
    def padding(self) -> int:
        """Number of elements in the flat space that belong to no parameter."""
        return self.numel - sum(item.numel for item in self.items)

    def parts(self, param: int) -> list[Segment]:
        """Returns the segments of parameter ``param``, one for each bucket, ascending. Empty for a parameter without elements."""
        begin, end = self.begins[param], self.begins[param] + self.items[param].numel
        found: list[Segment] = []
        index = bisect.bisect_right(self.buckets, begin, key=attrgetter("begin")) - 1
        at = begin
        while at < end:
            bucket = self.buckets[index]
            upto = min(end, bucket.begin + self.world * bucket.shard_numel)
            found.append(Segment(param, bucket, at - begin, at - bucket.begin, upto - at))
            at, index = upto, index + 1
        return found

    def has_one_box(self, param: int) -> bool:
        """Returns whether each rank that owns elements of ``param`` owns one range of whole rows."""
        if self.world == 1:
            return True
        parts = self.parts(param)
        if len(parts) > 2 or any(_splits_rows(part, self.items[param]) for part in parts):
            return False
        if len(parts) < 2:
            return True
        head, tail = parts
        first, last = head.bucket_begin // head.bucket.shard_numel, (tail.numel - 1) // tail.bucket.shard_numel
        return first > last  # the first rank here, the last one there

    def owned(self, param: int, rank: int) -> list[Segment]:
        """Returns the segments of ``param`` that ``rank`` owns, ascending, without empty ones."""
        found: list[Segment] = []
        for part in self.parts(param):
            shard_numel = part.bucket.shard_numel
            low = max(part.bucket_begin, rank * shard_numel)
            high = min(part.bucket_begin + part.numel, (rank + 1) * shard_numel)
            if low < high:
                param_begin = part.param_begin + low - part.bucket_begin
                found.append(Segment(param, part.bucket, param_begin, low, high - low))
        return found

    def ranges(self, param: int, rank: int) -> list[tuple[int, int]]:
        """Returns the segments of `owned` as ``(begin, end)`` pairs of the parameter's elements in memory order; ``end`` is
        excluded."""
        return [(s.param_begin, s.param_begin + s.numel) for s in self.owned(param, rank)]

    def segments(self, rank: int) -> list[Segment]:
        """Returns all segments that ``rank`` owns, in the order of its shard space.

        A segment has ``param`` (the number of the parameter), ``param_begin`` (in the parameter, in memory order), ``numel``,
        ``bucket``, ``bucket_begin`` (in the bucket), ``flat_begin`` (in the flat space) and ``shard_begin`` (in the shard
        space)."""
        return [segment for param in range(len(self.items)) for segment in self.owned(param, rank)]


def _splits_rows(part: Segment, item: PackItem) -> bool:
    """Whether a boundary at which ``part`` begins or ends, or one inside, falls inside a row."""
    end = part.param_begin + part.numel
    return (
        part.param_begin % item.row != 0
        or (end < item.numel and end % item.row != 0)
        or splits_rows(part.bucket_begin, part.numel, item.row, part.bucket.shard_numel, part.param_begin)
    )


@dataclass(frozen=True)
class RankBucket:
    """A bucket as one rank knows it: the parts of parameters that lie in it, and the segments that the rank owns."""

    space: int  # which packing it is a bucket of
    bucket: Bucket
    parts: tuple[Segment, ...]
    segments: tuple[Segment, ...]


def rank_buckets(
    packings: Sequence[Packing], params: Sequence[Sequence[int]], rank: int, arrivals: Sequence[int] | None = None
) -> list[RankBucket]:
    """The buckets of all ``packings`` in the order in which they fill if gradients come from the last parameter to the first,
    or if that of parameter i is the ``arrivals[i]``-th.

    ``params``: for each packing, the numbers of its parameters among all, -1 for those that are gone. A bucket that has held
    only these is left out.
    """
    count = sum(number >= 0 for numbers in params for number in numbers)
    arrives = range(count - 1, -1, -1) if arrivals is None else arrivals
    found: list[tuple[int, RankBucket]] = []
    for space, (packing, numbers) in enumerate(zip(packings, params, strict=True)):
        parts: list[list[Segment]] = [[] for _ in packing.buckets]
        for param in range(len(packing.items)):
            for part in packing.parts(param) if numbers[param] >= 0 else ():
                parts[part.bucket.index].append(part)
        segments: list[list[Segment]] = [[] for _ in packing.buckets]
        for segment in packing.segments(rank):
            if numbers[segment.param] >= 0:
                segments[segment.bucket.index].append(segment)
        for bucket, inside, owned in zip(packing.buckets, parts, segments, strict=True):
            if not inside and min(numbers) < 0:
                continue
            last_arrival = max((arrives[numbers[part.param]] for part in inside), default=0)
            found.append((last_arrival, RankBucket(space, bucket, tuple(inside), tuple(owned))))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def pack(items: Sequence[PackItem], *, world: int, bucket_numel: int, align: int = 64) -> Packing:
    """Packs parameters into buckets and shards. Local; pure integer arithmetic with the same result on every rank.

    Every parameter and every shard begins at a multiple of ``align`` elements. The order of the items is kept. Items of
    different granularities share no bucket. A bucket has about ``bucket_numel`` elements. With row cuts it has at most 4 times
    as many, rounded up to a multiple of ``world * align``. A parameter with granularity ``"row"`` that does not fit such a
    bucket gets buckets of its own, of whole rows, with as much padding as they need.

    Args:
        items: The parameters, in the order of the flat space.
        world: Number of ranks that share the buckets.
        bucket_numel: Number of elements in a bucket.
        align: Alignment of parameters and shards, in elements.

    Returns:
        The packing. Time and memory grow with the numbers of parameters and buckets, not with ``world``.

    Raises:
        ValueError: ``world``, ``bucket_numel``, ``align`` or ``row`` is below 1, ``numel`` is negative, or a granularity is
            unknown.
        TypeError: An item that is not a `PackItem`, or a number that is not an int."""
    for name, value in (("world", world), ("bucket_numel", bucket_numel), ("align", align)):
        if expect_int(value, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for i, item in enumerate(items):
        if not isinstance(item, PackItem):
            raise TypeError(f"items[{i}] is {item!r}, expected a PackItem")
        if expect_int(item.numel, f"items[{i}].numel") < 0 or expect_int(item.row, f"items[{i}].row") < 1:
            raise ValueError(f"item {i}: numel must be >= 0 and row >= 1, got {item}")
        if item.granularity not in ("row", "element", None):
            raise ValueError(f"item {i}: granularity must be 'row', 'element' or None, got {item}")
    begins: list[int] = []
    shards: list[int] = []
    at = 0
    for run in _runs(items, Grid(world, bucket_numel, align)):
        begins += [at + begin for begin in run.begins]
        shards += run.shards
        at += world * sum(run.shards)
    shard_begins = [0, *itertools.accumulate(shards)]
    buckets = [Bucket(i, world * shard_begins[i], shard, shard_begins[i], True) for i, shard in enumerate(shards)]
    packing = Packing(tuple(items), tuple(begins), tuple(buckets), world)
    for param, item in enumerate(items):
        for part in packing.parts(param):
            if _splits_rows(part, item):
                buckets[part.bucket.index] = replace(part.bucket, by_rows=False)
    return replace(packing, buckets=tuple(buckets))


def _runs(items: Sequence[PackItem], grid: Grid) -> Iterator[PackedRun]:
    """All items, in runs with shards."""
    for granularity, alike in itertools.groupby(items, key=lambda item: item.granularity):
        numels, rows = zip(*((item.numel, item.row) for item in alike), strict=True)
        if granularity == "element":
            yield cut_anywhere(numels, grid)
            continue
        done = 0
        for has_rows, some in itertools.groupby(cut_by_rows(numels, rows, grid), key=lambda run: bool(run.shards)):
            found = list(some)
            part = slice(done, done + sum(len(run.begins) for run in found))
            if has_rows:
                yield from found
            elif granularity == "row":
                yield from cut_whole_rows(numels[part], rows[part], grid)
            else:
                yield cut_anywhere(numels[part], grid)
            done = part.stop
