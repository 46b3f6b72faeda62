"""Packing: covered exactly once, aligned, cut only where allowed, the same everywhere, fast at any world size."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from bucketwheel.layout.packing import Packing, PackItem, pack, plan_buckets


def check(packing: Packing, align: int) -> None:
    """Every property a packing must have, from its definition."""
    owner: dict[int, tuple[int, int]] = {}
    for i, (item, begin) in enumerate(zip(packing.items, packing.begins, strict=True)):
        assert begin % align == 0
        for e in range(item.numel):
            assert begin + e not in owner
            owner[begin + e] = (i, e)
    at = shard_at = 0
    for bucket in packing.buckets:
        assert (bucket.begin, bucket.shard_begin) == (at, shard_at)
        assert bucket.shard_numel > 0 and bucket.shard_numel % align == 0
        for k in range(1, packing.world + 1):
            cut = bucket.begin + k * bucket.shard_numel
            if cut in owner and cut - 1 in owner and owner[cut][0] == owner[cut - 1][0]:
                param, element = owner[cut]
                assert element % packing.items[param].granularity == 0
        at += packing.world * bucket.shard_numel
        shard_at += bucket.shard_numel
    assert at == packing.numel and shard_at == packing.shard_numel
    seen: set[int] = set()
    for param in range(len(packing.items)):
        expected = 0
        for part in packing.fragments(param):
            bucket = packing.buckets[part.bucket]
            assert part.param_begin == expected and part.numel > 0
            assert bucket.begin + part.bucket_begin == packing.begins[param] + part.param_begin
            expected += part.numel
        assert expected == packing.items[param].numel
    for rank in range(packing.world):
        last = 0
        for segment in packing.segments(rank):
            bucket = packing.buckets[segment.bucket]
            assert segment.shard_begin >= last  # in order, and no overlap
            last = segment.shard_begin + segment.numel
            inside = segment.flat_begin - bucket.begin - rank * bucket.shard_numel
            assert segment.shard_begin == bucket.shard_begin + inside
            for e in range(segment.numel):
                assert owner[segment.flat_begin + e] == (segment.param, segment.param_begin + e)
                seen.add(segment.flat_begin + e)
    assert seen == set(owner)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_numel", [1, 16, 100, 10_000])
def test_every_element_is_owned_once(world: int, bucket_numel: int) -> None:
    for numels in ([], [0], [1], [0, 1, 0], [5, 0, 300, 7], [1000], [3] * 20):
        check(pack([PackItem(n) for n in numels], world=world, bucket_numel=bucket_numel, align=4), 4)


def test_random_packings_with_granularity() -> None:
    rng = random.Random(1)
    for _ in range(400):
        items = []
        for _ in range(rng.randrange(1, 9)):
            granularity = rng.choice([1, 1, 1, 2, 3, 5, 8, 24])
            items.append(PackItem(granularity * rng.randrange(0, 12), granularity))
        align = rng.choice([1, 2, 8])
        check(pack(items, world=rng.randrange(1, 6), bucket_numel=rng.choice([1, 20, 64, 500]), align=align), align)


def test_granularity_keeps_rows_whole_and_costs_little() -> None:
    rows = pack([PackItem(1000 * 768, 768), PackItem(768), PackItem(50 * 1000, 1000)], world=3, bucket_numel=1 << 17)
    for rank in range(3):
        for segment in rows.segments(rank):
            item = rows.items[segment.param]
            if item.granularity > 1:
                assert segment.param_begin % item.granularity == 0
    assert rows.padding < 0.05 * rows.numel


@pytest.mark.parametrize("bad", [{"world": 0}, {"bucket_numel": 0}, {"align": 0}])
def test_bad_numbers_are_named(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        pack([PackItem(3)], **{"world": 1, "bucket_numel": 8, **bad})
    with pytest.raises(ValueError, match="item 1"):
        pack([PackItem(3), PackItem(4, 0)], world=1, bucket_numel=8)


def llama_7b() -> list[PackItem]:
    layer = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
    return [PackItem(numel) for numel in [32000 * 4096, *layer * 32, 4096, 32000 * 4096]]


def test_what_a_rank_plans_does_not_grow_with_the_world() -> None:
    counts, kept = [], []
    for world in (8, 64, 512, 4096):
        for rank in (0, world // 2, world - 1):
            tracemalloc.start()
            packing = pack(llama_7b(), world=world, bucket_numel=16 << 20)
            plans = plan_buckets([packing], [range(291)], rank)
            kept.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
            counts.append((len(plans), sum(len(plan.segments) for plan in plans)))
            assert sum(s.numel for plan in plans for s in plan.segments) <= packing.shard_numel
    assert max(buckets for buckets, _ in counts) == min(buckets for buckets, _ in counts) == 402
    assert max(segments for _, segments in counts) <= 402 + 291  # a boundary between parameters lies in one shard
    assert max(kept) < 1.2 * min(kept) < 2 << 20


def test_buckets_come_in_the_order_in_which_they_fill() -> None:
    packings = [
        pack([PackItem(n) for n in numels], world=2, bucket_numel=16, align=4) for numels in ([40, 3], [7, 0, 9])
    ]
    numbers = [[4, 1], [3, 2, 0]]  # the two spaces have turns
    plans = plan_buckets(packings, numbers, 1)
    last = [max((4 - numbers[plan.space][f.param] for f in plan.fragments), default=0) for plan in plans]
    assert last == sorted(last)
    assert sorted((plan.space, plan.bucket.index) for plan in plans) == [
        (space, bucket.index) for space, packing in enumerate(packings) for bucket in packing.buckets
    ]
    for space, packing in enumerate(packings):
        mine = sorted((plan for plan in plans if plan.space == space), key=lambda plan: plan.bucket.index)
        assert [s for plan in mine for s in plan.segments] == packing.segments(1)
        assert [f for plan in mine for f in plan.fragments] == [
            f
            for bucket in packing.buckets
            for param in range(len(packing.items))
            for f in packing.fragments(param)
            if f.bucket == bucket.index
        ]
        assert all(s.bucket == plan.bucket.index for plan in mine for s in plan.segments)
