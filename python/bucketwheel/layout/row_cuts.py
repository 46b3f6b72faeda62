"""Row cuts: how a run of parameters is cut into buckets so that the boundaries of shards fall on rows.

Pure integers. A row is a slice of a parameter's outermost dimension in memory, ``row`` elements; a vector has rows of one.
The order of the parameters is kept. What is chosen is where buckets end, how large their shards are, and gaps before
parameters:

    | bucket .................................. |
    | s0           | s1           | s2          |      W equal shards
    | vector | gap | matrix ...................... |   the matrix begins so that a row begins at s1; its rows divide a shard

A bucket of row cuts ends where a parameter ends. It may be `GROWTH` times as large as asked for, and 1 % of it may be
padding; more only in a small one whose rows need no larger shards than its elements. Where that does not do (few rows,
fewer rows than ranks, long rows at large worlds) parameters have *element cuts*: they are cut without regard to rows, as
with granularity "element". Of all ways to end buckets the cheapest is taken: few parameters cut inside rows, then few buckets,
near the size asked for (`_cut_together`). A parameter that no bucket can hold has buckets of its own, of whole rows where
they fit (`_cut_alone`).

Cost: sizes are divided, never counted shard by shard, so the world's size does not matter. Buckets end at a `_stops`, of
which there are at most about 130 within the largest bucket, however many parameters lie there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

GROWTH = 4
_PADDING_PERCENT = 1
_PRICE = 16  # how many buckets more are as bad as one parameter cut inside rows: growth by GROWTH is not too much
_TRIES = 8  # of a larger shard, for the same parameters


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def splits_rows(begin: int, numel: int, row: int, shard: int, before: int = 0) -> bool:
    """Whether a multiple of ``shard`` inside [begin, begin + numel), the part of a parameter that ``before`` elements
    precede, is where no row begins."""
    edge, end = (begin // shard + 1) * shard, begin + numel
    return edge < end and ((before + edge - begin) % row != 0 or (edge + shard < end and shard % row != 0))


@dataclass(frozen=True)
class PackedRun:
    """Some parameters, one behind the other: where they begin, and the shards of their buckets, which hold no others; both
    in elements. Without shards: row cuts will not do, and only the number of ``begins`` counts."""

    begins: list[int]
    shards: list[int]


class Grid:
    """The sizes that `pack` is given, and the elements of a bucket as asked for (``usual``), and of the largest one."""

    def __init__(self, world: int, bucket_numel: int, align: int) -> None:
        self.world, self.bucket_numel, self.align = world, bucket_numel, align
        self.usual = world * self.plain_shard(bucket_numel)
        self.most = GROWTH * self.usual

    def plain_shard(self, numel: int) -> int:
        """The shard of element cuts."""
        return _round_up(-(-numel // self.world), self.align)

    def pads_little(self, numel: int, shard: int, plain_shard: int) -> bool:
        """Whether a bucket of such shards may hold ``numel`` elements, of which element cuts make a ``plain_shard``."""
        size = self.world * shard
        of = self.usual if shard == plain_shard else 0
        return size <= self.most and (size - numel) * 100 <= _PADDING_PERCENT * max(size, of)


def cut_anywhere(numels: Sequence[int], grid: Grid) -> PackedRun:
    """Element cuts: parameters one behind the other. A bucket takes those that begin within the size asked for; a parameter
    that is longer goes on in the next."""
    begins, shards = [0] * len(numels), []
    # Where the bucket begins, the first parameter that is not wholly in one, and its elements that are.
    at = first = covered = 0
    while first < len(numels):
        window, begin = [], at - covered
        for param in range(first, len(numels)):
            window.append((begin, begin + numels[param]))
            begin = _round_up(window[-1][1], grid.align)
            if begin - at >= grid.bucket_numel:
                break
        shard = grid.plain_shard(min(grid.bucket_numel, window[-1][1] - at))
        end = at + grid.world * shard
        covered = 0
        for begin, upto in window[: sum(begin < end for begin, _ in window) or 1]:
            begins[first] = begin
            if upto > end:
                covered = end - begin
                break
            first += 1
        shards += [shard] if shard else []
        at = end
    return PackedRun(begins, shards)


def cut_whole_rows(numels: Sequence[int], rows: Sequence[int], grid: Grid) -> Iterator[PackedRun]:
    """Parameters for which row cuts will not do, cut on rows all the same: matrices in buckets of their own."""
    for is_vector, some in itertools.groupby(zip(numels, rows, strict=True), key=lambda param: param[1] == 1):
        params = list(some)
        if is_vector:
            yield cut_anywhere([numel for numel, _ in params], grid)
        else:
            yield from (PackedRun([0], _whole_rows(numel, row, grid)) for numel, row in params)


def cut_by_rows(numels: Sequence[int], rows: Sequence[int], grid: Grid) -> Iterator[PackedRun]:
    """All parameters, of ``numels`` elements and with ``rows`` of so many, in runs."""
    first = 0
    while first < len(numels):
        last = next((i for i in range(first, len(numels)) if numels[i] > grid.most), len(numels))
        if first == last:
            last += 1
            yield PackedRun([0], _cut_alone(numels[first], rows[first], grid))
        else:
            yield from _cut_together(numels[first:last], rows[first:last], grid)
        first = last


def _cut_alone(numel: int, row: int, grid: Grid) -> list[int]:
    """The shards of the buckets of a parameter larger than a bucket may be; none if row cuts will not do."""
    shards = _whole_rows(numel, row, grid)
    fits = max(shards) * grid.world <= grid.most
    return shards if fits and (sum(shards) * grid.world - numel) * 100 <= _PADDING_PERCENT * numel else []


def _whole_rows(numel: int, row: int, grid: Grid) -> list[int]:
    """Shards of whole rows: of one bucket if that may be so large, else of buckets that are about equal."""
    unit = lcm(row, grid.align)
    units = -(-numel // (grid.world * unit))  # of a rank
    total = units * unit * grid.world
    count = min(units, 1 if total <= grid.most else (2 * total + grid.usual) // (2 * grid.usual))
    return [((i + 1) * units // count - i * units // count) * unit for i in range(count)]


def _cut_together(numels: Sequence[int], rows: Sequence[int], grid: Grid) -> list[PackedRun]:
    """The buckets of parameters of which each fits into one.

    A bucket of T elements costs usual^2 + T^2, which is least for a sum of elements where T is usual, and `_PRICE` x usual^2
    for each parameter that it cuts inside rows. From the last stop to the first: the cheapest way from there to the end.
    """
    # Where parameters begin that are packed one behind the other, and where the next one would.
    offsets = [0, *itertools.accumulate(_round_up(numel, grid.align) for numel in numels)]
    stops = _stops(numels, max(1, grid.usual // 16))
    costs = [0] * len(stops)
    chosen = [(0, PackedRun([], []))] * len(stops)  # (the stop at which the bucket ends, the bucket)
    for i in reversed(range(len(stops) - 1)):
        first = stops[i]
        options = []  # (the least that it can cost, where the bucket ends, its elements), the cheapest first
        for j in range(i + 1, len(stops)):
            size = offsets[stops[j] - 1] + numels[stops[j] - 1] - offsets[first]
            if size > grid.most:
                break
            options.append((grid.usual**2 + size**2 + costs[j], -j, size))
        best: int | None = None
        for cost, j, size in sorted(options):
            if best is not None and cost >= best:
                break
            part = slice(first, stops[-j])
            run = _on_rows(numels[part], rows[part], size, grid)
            if run is None:
                run, shard = PackedRun(offsets[part], []), grid.plain_shard(size)
                split = sum(
                    1 < rows[k] <= numels[k] and splits_rows(offsets[k] - offsets[first], numels[k], rows[k], shard)
                    for k in range(first, stops[-j])
                )
                cost += _PRICE * grid.usual**2 * split
            if best is None or cost < best:
                best, costs[i], chosen[i] = cost, cost, (-j, run)
    found, at = [], 0
    while at < len(stops) - 1:
        at, run = chosen[at]
        found.append(run)
    return found


def _stops(numels: Sequence[int], small: int) -> list[int]:
    """Before which parameters a bucket may begin: not between ``small`` ones, whose runs are cut where they are as large."""
    found, held = [0], 0
    for i, numel in enumerate(numels):
        if i > found[-1] and (numel >= small or held >= small):
            found.append(i)
            held = 0
        held += numel
    return [*found, len(numels)]


def _on_rows(numels: Sequence[int], rows: Sequence[int], size: int, grid: Grid) -> PackedRun | None:
    """The bucket of these parameters with row cuts; None where these will not do. ``size``: their elements, packed."""
    multiple, numel, plain_shard = grid.align, sum(numels), grid.plain_shard(size)
    shard = plain_shard
    for _ in range(_TRIES if numel else 0):
        if not grid.pads_little(numel, shard, plain_shard):
            break
        begins, end, needed = _place(numels, rows, shard, grid.align)
        if needed:
            multiple = lcm(multiple, needed)
            shard = _round_up(shard, multiple)
        elif end > grid.world * shard:
            shard += _round_up(-(-end // grid.world) - shard, multiple)
        else:
            return PackedRun(begins, [shard])
    return None


def _place(numels: Sequence[int], rows: Sequence[int], shard: int, align: int) -> tuple[list[int], int, int]:
    """(begins, end, 0) of parameters that lie so that every multiple of ``shard`` is where a row begins; or what the shard
    has to be a multiple of, for one that spans a whole shard."""
    begins, end = [], 0
    for numel, row in zip(numels, rows, strict=True):
        begin = _round_up(end, align)
        edge = (begin // shard + 1) * shard
        if row > 1 and begin + numel > edge:
            unit = lcm(row, align)
            begin = edge - (edge - begin) // unit * unit
            if begin + numel > edge + shard and shard % unit:
                return [], 0, unit
        begins.append(begin)
        end = begin + numel
    return begins, end, 0
