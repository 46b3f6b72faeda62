"""Berths, alone: which bucket may enter when, who waits for whom, what is copied. The handles are false ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bucketwheel._build import native
from bucketwheel.berths import Berth, Berths
from bucketwheel.pool import Lease, Pool
from tests.simulated_cuda import Graph, posing

SIZES = [16, 40, 64, 24, 8]  # bytes of the buckets


class FalseHandle:
    """Of a reduce-scatter that ends when it is waited for, or is over."""

    event: Any = None

    def __init__(self, is_over: bool = False) -> None:
        self.is_over, self.waits = is_over, 0

    def query(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.waits += 1
        self.is_over = True


@pytest.fixture
def pool() -> Pool:
    return Pool("host", align_bytes=8)


def launched(berths: Berths, bucket: int, memory: Lease | Berth | None = None, **handle: Any) -> FalseHandle:
    """Launches ``bucket`` from ``memory``; None: from its berth."""
    memory = berths.enter(bucket) if memory is None else memory
    berth, _ = berths.bring_in(bucket, memory, memory.tensor(torch.float32, (1,)), late=False)
    made: Any = FalseHandle(**handle)
    berth.release(after=made)
    return made


def test_each_is_as_large_as_the_largest_bucket_that_uses_it(pool: Pool) -> None:
    berths = Berths(pool, SIZES, 2)
    assert pool.stats().live_leases == 2
    assert pool.stats().live_bytes == 64 + 40
    assert berths.enter(2).tensor(torch.uint8, (64,)).data_ptr() == berths.enter(0).tensor(torch.uint8, (1,)).data_ptr()
    assert berths.enter(1).tensor(torch.uint8, (40,)).data_ptr() != berths.enter(0).tensor(torch.uint8, (1,)).data_ptr()
    berths.release()
    pool.expect_no_leases()


@pytest.mark.parametrize(("buckets", "count"), [(0, 0), (1, 1), (2, 2), (5, 3)])
def test_no_more_than_there_are_buckets(pool: Pool, buckets: int, count: int) -> None:
    berths = Berths(pool, SIZES[:buckets], 3)
    assert pool.stats().live_leases == count
    berths.release()
    pool.expect_no_leases()


def test_a_bucket_is_too_early_until_the_one_before_it_has_gone(pool: Pool) -> None:
    berths = Berths(pool, SIZES, 2)
    for window in range(2):
        for bucket in range(len(SIZES)):
            can_enter = [berths.try_enter(b) is not None for b in range(bucket, len(SIZES))]
            assert can_enter == [True, True, False, False, False][: len(can_enter)], (window, bucket)
            launched(berths, bucket)


def test_who_enters_waits_once_for_the_last_reader(pool: Pool) -> None:
    berths = Berths(pool, SIZES, 2)
    assert berths.try_enter(0) is berths.try_enter(0)
    readers = [launched(berths, 0), launched(berths, 1, is_over=True)]
    assert berths.try_enter(2) is not None
    assert [reader.waits for reader in readers] == [1, 0]
    assert berths.try_enter(3) is not None
    berths.enter(2)
    berths.enter(3)
    assert [reader.waits for reader in readers] == [1, 0], "nor for one that is over"


def test_early_memory_is_copied_behind_the_last_reader(pool: Pool) -> None:
    berths = Berths(pool, SIZES, 2)
    lease = pool.acquire("grads/2", 64)
    early = lease.tensor(torch.float32, (16,)).copy_(torch.arange(16.0))
    reader = launched(berths, 0)
    launched(berths, 1)
    berth, flat = berths.bring_in(2, lease, early, late=False)
    assert reader.waits == 1 and not lease.is_live
    assert flat.tolist() == list(range(16))
    assert flat.data_ptr() == berth.tensor(torch.float32, (16,)).data_ptr() != early.data_ptr()
    assert berths.enter(4) is berth


def test_what_is_in_its_berth_stays_where_it_is(pool: Pool) -> None:
    berths = Berths(pool, SIZES, 2)
    berth = berths.enter(0)
    flat = berth.tensor(torch.float32, (4,))
    assert berths.bring_in(0, berth, flat, late=False)[1] is flat


def test_late_rounds_move_nobody_on(pool: Pool) -> None:
    berths = Berths(pool, SIZES, 2)
    for bucket in range(len(SIZES)):
        launched(berths, bucket)
    for bucket in (1, 3):
        lease = pool.acquire("late", SIZES[bucket])
        berth, flat = berths.bring_in(bucket, lease, lease.tensor(torch.uint8, (SIZES[bucket],)), late=True)
        assert berth is berths.enter(bucket) and not lease.is_live
        berth.release()
    assert [berths.try_enter(b) is not None for b in range(3)] == [True, True, False]


def test_the_end_is_behind_the_last_reader(pool: Pool) -> None:
    berths, reading = Berths(pool, SIZES, 2), native().Stream("reading")
    reading.pause(0.2)
    readers: list[Any] = [FalseHandle(), FalseHandle()]
    for bucket, reader in enumerate(readers):
        reader.event = reading.record()
        berths.enter(bucket).release(after=reader)
    berths.enter(1)  # and whoever enters is behind it
    berths.release()
    pool.expect_no_leases()
    assert pool.stats().waits == 0
    pool.acquire("next", 64)
    assert pool.stats().waits == 1 and readers[0].event.query()
    reading.close()


class CudaHandle(FalseHandle):
    def __init__(self, event: Any) -> None:
        super().__init__()
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        native().current_stream(0).wait(self.event)


def test_a_capture_does_not_wait_for_what_is_over() -> None:
    with posing() as library:
        berths, reading = Berths(Pool(device="cuda"), SIZES, 1), native().Stream("reading", 0)
        readers: list[Any] = [CudaHandle(reading.record())]
        berths.enter(0).release(after=readers[0])
        reading.synchronize()
        with Graph(library):
            flat = berths.enter(0).tensor(torch.float32, (4,)).zero_()
        assert flat.numel() == 4
        berths.release()
