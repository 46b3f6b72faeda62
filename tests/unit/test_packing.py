"""Packing: covered exactly once, aligned, cut only where allowed, the same everywhere, fast at any world size."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter
from itertools import pairwise
from types import FrameType

import pytest

from bucketwheel.layout.packing import Granularity, Packing, PackItem, pack, rank_buckets
from bucketwheel.layout.row_cuts import Grid, cut_by_rows


def check(packing: Packing, align: int) -> None:
    """Every property a packing must have, from its definition."""
    spans = [(begin, begin + item.numel) for item, begin in zip(packing.items, packing.begins, strict=True)]
    assert all(begin % align == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    at = shard_at = 0
    for bucket in packing.buckets:
        assert (bucket.begin, bucket.shard_begin) == (at, shard_at)
        assert bucket.shard_numel > 0 and bucket.shard_numel % align == 0
        for k in range(1, packing.world + 1):
            cut = bucket.begin + k * bucket.shard_numel
            for item, (begin, end) in zip(packing.items, spans, strict=True):
                if begin < cut < end:
                    assert (cut - begin) % item.row == 0 or not (bucket.by_rows or item.granularity == "row")
        at += packing.world * bucket.shard_numel
        shard_at += bucket.shard_numel
    assert at == packing.numel and shard_at == packing.shard_numel
    ranges: dict[int, list[tuple[int, int, int]]] = {param: [] for param in range(len(packing.items))}
    for param in range(len(packing.items)):
        expected = 0
        for part in packing.parts(param):
            bucket = part.bucket
            assert part.param_begin == expected and part.numel > 0
            assert bucket.begin + part.bucket_begin == packing.begins[param] + part.param_begin
            expected += part.numel
        assert expected == packing.items[param].numel
    for rank in range(packing.world):
        last = 0
        for segment in packing.segments(rank):
            bucket = segment.bucket
            assert segment.shard_begin >= last  # in order, and no overlap
            last = segment.shard_begin + segment.numel
            inside = segment.flat_begin - bucket.begin - rank * bucket.shard_numel
            assert segment.shard_begin == bucket.shard_begin + inside
            assert 0 <= inside <= bucket.shard_numel - segment.numel
            assert segment.flat_begin == packing.begins[segment.param] + segment.param_begin
            ranges[segment.param].append((rank, segment.param_begin, segment.param_begin + segment.numel))
    for param, owned in ranges.items():
        row, numel = packing.items[param].row, packing.items[param].numel
        ends = [0, *sorted(end for _, _, end in owned)]
        assert sorted((begin, end) for _, begin, end in owned) == list(pairwise(ends)) and ends[-1] == numel
        ranks = [rank for rank, _, _ in owned]
        whole = all(begin % row == 0 and (end % row == 0 or end == numel) for _, begin, end in owned)
        assert packing.has_one_box(param) == (packing.world == 1 or (whole and len(set(ranks)) == len(ranks))), param


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_numel", [1, 16, 100, 10_000])
def test_every_element_is_owned_once(world: int, bucket_numel: int) -> None:
    for numels in ([], [0], [1], [0, 1, 0], [5, 0, 300, 7], [1000], [3] * 20):
        check(pack([PackItem(n) for n in numels], world=world, bucket_numel=bucket_numel, align=4), 4)


def test_whole_rows_cost_little() -> None:
    sizes = [(1000 * 768, 768), (768, 1), (50 * 1000, 1000)]
    rows = pack([PackItem(numel, "row", row) for numel, row in sizes], world=3, bucket_numel=1 << 17)
    check(rows, 64)
    assert all(map(rows.has_one_box, (1, 2))) and rows.padding < 0.07 * rows.numel


def test_element_cuts_are_without_regard_to_rows_and_parameters() -> None:
    """The layout of checkpoints that were saved before there were row cuts."""
    items = [PackItem(numel, "element", row=7) for numel in (700, 3, 0, 129, 1000, 64, 5)]
    packing = pack(items, world=3, bucket_numel=500, align=8)
    assert packing.begins == (0, 704, 712, 712, 848, 1848, 1912)
    assert [bucket.shard_numel for bucket in packing.buckets] == [168, 168, 168, 136]
    assert [bucket.by_rows for bucket in packing.buckets] == [True, False, False, False]


# --- row cuts ---------------------------------------------------------------------------------------------------------


def random_rows(rng: random.Random) -> list[PackItem]:
    """Scalars, vectors, matrices with short, long and odd rows, parameters without elements; some have a granularity."""
    items = []
    for _ in range(rng.randrange(1, 11)):
        row = rng.choice([1, 1, 2, 3, 8, 27, 32, 100, 256])
        count = rng.choice([0, 1, 1, 5, 16, 40, 96]) if row > 1 else rng.choice([0, 1, 1, 3, 64, 700])
        granularity: Granularity | None = rng.choice([None] * 12 + ["element", "row"])
        items.append(PackItem(row * count, granularity, row))
    return items


def test_random_row_cuts() -> None:
    rng, seen = random.Random(2), Counter[str]()
    for _ in range(300):
        items, world, align = random_rows(rng), rng.randrange(1, 10), rng.choice([1, 2, 8, 64])
        bucket_numel = rng.choice([1, 64, 500, 4000, 30_000])
        packing = pack(items, world=world, bucket_numel=bucket_numel, align=align)
        check(packing, align)
        assert packing == pack(list(items), world=world, bucket_numel=bucket_numel, align=align)
        asked = world * align * -(-bucket_numel // (world * align))
        held = Counter[int]()
        for param, item in enumerate(items):
            parts = packing.parts(param)
            held.update({part.bucket.index: part.numel for part in parts})
            if len(parts) == 1 and parts[0].bucket.by_rows:
                assert packing.has_one_box(param)
            if item.granularity is None and item.numel > 4 * asked and world > 1:
                assert len(parts) > 1
                seen["parameters in several buckets"] += 1
        if any(item.granularity is not None for item in items):
            continue
        plain = pack([PackItem(item.numel) for item in items], world=world, bucket_numel=bucket_numel, align=align)
        allowed = world * align * len(packing.buckets)  # element cuts end runs of parameters
        for bucket in packing.buckets:
            size = world * bucket.shard_numel
            padding = size - held[bucket.index]
            assert size <= 4 * asked
            assert padding <= size / 100 or size <= asked
            allowed += size // 100
            seen["row cuts" if bucket.by_rows else "element cuts"] += 1
            seen["grown"] += size > 2 * asked
        assert packing.numel <= plain.numel + allowed
    assert min(seen[name] for name in ("row cuts", "element cuts", "grown", "parameters in several buckets")) > 30, seen


def test_a_matrix_begins_where_a_row_begins_at_the_shards_boundary() -> None:
    """A vector before it pushes its rows off the boundary; a gap puts them back."""
    for row in (64 * 30, 1):
        packing = pack([PackItem(100, None), PackItem(101 * 64 * 30, None, row)], world=2, bucket_numel=1 << 18)
        (bucket,) = packing.buckets
        begin = packing.begins[1]
        assert bucket.by_rows and (bucket.shard_numel - begin) % row == 0
        assert begin == (128 if row == 1 else bucket.shard_numel - 50 * row)


@pytest.mark.parametrize(
    "shapes, world, why",
    [
        ([(3, 1 << 16)], 2, "few rows"),
        ([(8, 4096)] * 2, 64, "fewer rows than ranks"),
        ([(100, 4096)], 64, "long rows at a large world"),
    ],
)
def test_what_rows_cannot_have_for_1_percent_is_cut_by_elements(
    shapes: list[tuple[int, int]], world: int, why: str
) -> None:
    numels = [(rows * row, row) for rows, row in shapes]
    cut, plain = (
        pack([PackItem(numel, granularity, row) for numel, row in numels], world=world, bucket_numel=1 << 17)
        for granularity in (None, "element")
    )
    assert (cut.begins, cut.buckets) == (plain.begins, plain.buckets), why
    assert not all(bucket.by_rows for bucket in cut.buckets)
    assert not any(cut.has_one_box(param) for param in range(len(shapes)))
    strict = pack([PackItem(numel, "row", row) for numel, row in numels], world=world, bucket_numel=1 << 17)
    check(strict, 64)
    assert all(bucket.by_rows for bucket in strict.buckets) and all(map(strict.has_one_box, range(len(shapes))))


def test_scalars_are_whole_and_vectors_are_cut_anywhere() -> None:
    items = [PackItem(1, None), *[PackItem(1000, None) for _ in range(6)], PackItem(1, None)]
    packing = pack(items, world=4, bucket_numel=1 << 13)
    assert all(bucket.by_rows for bucket in packing.buckets)
    assert all(packing.has_one_box(param) for param in range(len(items)))
    owners = [sum(bool(packing.owned(param, rank)) for rank in range(4)) for param in range(len(items))]
    assert owners[0] == owners[-1] == 1 and max(owners) == 2


def test_planning_row_cuts_of_many_parameters_takes_little_time() -> None:
    """Experts of a mixture, and adapters so small that thousands share a bucket: steps are counted, not seconds."""
    for numels, row in (([1 << 21] * 1000, 1 << 10), ([1 << 12] * 5000, 1 << 3)):
        counts = []
        for world in (8, 4096):
            calls = 0

            def count(frame: FrameType, event: str, _: object) -> None:
                nonlocal calls
                calls += event == "call"

            sys.setprofile(count)
            try:
                list(cut_by_rows(numels, [row] * len(numels), Grid(world, 1 << 24, 64)))
            finally:
                sys.setprofile(None)
            counts.append(calls)
        assert max(counts) < 500 * len(numels), counts


@pytest.mark.parametrize("bad", [{"world": 0}, {"bucket_numel": 0}, {"align": 0}])
def test_bad_numbers_are_named(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        pack([PackItem(3)], **{"world": 1, "bucket_numel": 8, **bad})
    with pytest.raises(ValueError, match="item 1: granularity"):
        pack([PackItem(3), PackItem(4, 1)], world=1, bucket_numel=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="item 0: .*row"):
        pack([PackItem(3, None, 0)], world=1, bucket_numel=8)


def llama_7b() -> list[PackItem]:
    layer = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
    return [PackItem(numel) for numel in [32000 * 4096, *layer * 32, 4096, 32000 * 4096]]


def test_what_a_rank_plans_does_not_grow_with_the_world() -> None:
    counts, kept = [], []
    for world in (8, 64, 512, 4096):
        for rank in (0, world // 2, world - 1):
            tracemalloc.start()
            packing = pack(llama_7b(), world=world, bucket_numel=16 << 20)
            plans = rank_buckets([packing], [range(291)], rank)
            kept.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
            counts.append((len(plans), sum(len(plan.segments) for plan in plans)))
            assert sum(s.numel for plan in plans for s in plan.segments) <= packing.shard_numel
    assert max(buckets for buckets, _ in counts) == min(buckets for buckets, _ in counts) == 402
    assert max(segments for _, segments in counts) <= 402 + 291  # a boundary between parameters lies in one shard
    assert max(kept) < 1.3 * min(kept) < 2 << 20


def test_row_cuts_have_no_more_buckets_than_element_cuts_at_any_world() -> None:
    rows = [4096] + ([4096] * 6 + [11008] + [1] * 2) * 32 + [1, 4096]
    items = [PackItem(item.numel, None, row) for item, row in zip(llama_7b(), rows, strict=True)]
    for world in (8, 64, 512, 4096):
        packing = pack(items, world=world, bucket_numel=16 << 20)
        assert len(packing.buckets) <= 402 and packing.padding < 0.01 * packing.numel
        assert all(len(packing.segments(rank)) <= 402 + 291 for rank in (0, world // 2, world - 1))
