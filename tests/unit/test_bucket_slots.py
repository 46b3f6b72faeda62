"""BucketSlots, alone: which bucket may enter when, who waits for whom, what is copied. The handles are false ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bucketwheel.grads.bucket import BucketSlot, BucketSlots
from bucketwheel.native import core
from bucketwheel.pool.pool import Lease, Pool
from tests.support.simulated_cuda import Calls, Graph, posing

SIZES = [16, 40, 64, 24, 8]  # bytes of the buckets


class FalseHandle:
    """Of a reduce-scatter that ends when it is waited for, or is over."""

    event: Any = None
    is_captured = False

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


def launched(slots: BucketSlots, bucket: int, memory: Lease | BucketSlot | None = None, **handle: Any) -> FalseHandle:
    """Launches ``bucket`` from ``memory``; None: from its slot."""
    memory = slots.enter(bucket) if memory is None else memory
    slot, _ = slots.bring_in(bucket, memory, memory.tensor(torch.float32, (1,)), late=False)
    made: Any = FalseHandle(**handle)
    slot.release(after=made)
    return made


def test_each_is_as_large_as_the_largest_bucket_that_uses_it(pool: Pool) -> None:
    slots = BucketSlots(pool, SIZES, 2)
    assert pool.stats().live_leases == 2
    assert pool.stats().live_bytes == 64 + 40
    assert slots.enter(2).tensor(torch.uint8, (64,)).data_ptr() == slots.enter(0).tensor(torch.uint8, (1,)).data_ptr()
    assert slots.enter(1).tensor(torch.uint8, (40,)).data_ptr() != slots.enter(0).tensor(torch.uint8, (1,)).data_ptr()
    slots.release()
    pool.expect_no_leases()
    few = BucketSlots(pool, SIZES[:1], 3)
    assert pool.stats().live_leases == 1, "no more than there are buckets"
    few.release()


def test_a_bucket_is_too_early_until_the_one_before_it_has_gone(pool: Pool) -> None:
    slots = BucketSlots(pool, SIZES, 2)
    for window in range(2):
        for bucket in range(len(SIZES)):
            can_enter = [slots.try_enter(b) is not None for b in range(bucket, len(SIZES))]
            assert can_enter == [True, True, False, False, False][: len(can_enter)], (window, bucket)
            launched(slots, bucket)


def test_who_enters_waits_once_for_the_last_reader(pool: Pool) -> None:
    slots = BucketSlots(pool, SIZES, 2)
    assert slots.try_enter(0) is slots.try_enter(0)
    readers = [launched(slots, 0), launched(slots, 1, is_over=True)]
    assert slots.try_enter(2) is not None
    assert [reader.waits for reader in readers] == [1, 0]
    assert slots.try_enter(3) is not None
    slots.enter(2)
    slots.enter(3)
    assert [reader.waits for reader in readers] == [1, 0], "nor for one that is over"


def test_early_memory_is_copied_behind_the_last_reader(pool: Pool) -> None:
    slots = BucketSlots(pool, SIZES, 2)
    lease = pool.acquire("grads/2", 64)
    early = lease.tensor(torch.float32, (16,)).copy_(torch.arange(16.0))
    reader = launched(slots, 0)
    launched(slots, 1)
    slot, flat = slots.bring_in(2, lease, early, late=False)
    assert reader.waits == 1 and not lease.is_live
    assert flat.tolist() == list(range(16))
    assert flat.data_ptr() == slot.tensor(torch.float32, (16,)).data_ptr() != early.data_ptr()
    assert slots.enter(4) is slot


def test_what_is_in_its_slot_stays_where_it_is(pool: Pool) -> None:
    slots = BucketSlots(pool, SIZES, 2)
    slot = slots.enter(0)
    flat = slot.tensor(torch.float32, (4,))
    assert slots.bring_in(0, slot, flat, late=False)[1] is flat


def test_late_rounds_move_nobody_on(pool: Pool) -> None:
    slots = BucketSlots(pool, SIZES, 2)
    for bucket in range(len(SIZES)):
        launched(slots, bucket)
    for bucket in (1, 3):
        lease = pool.acquire("late", SIZES[bucket])
        slot, flat = slots.bring_in(bucket, lease, lease.tensor(torch.uint8, (SIZES[bucket],)), late=True)
        assert slot is slots.enter(bucket) and not lease.is_live
        slot.release()
    assert [slots.try_enter(b) is not None for b in range(3)] == [True, True, False]


def test_the_end_is_behind_the_last_reader(pool: Pool) -> None:
    slots, reading = BucketSlots(pool, SIZES, 2), core.Stream("reading")
    reading.pause(0.2)
    readers: list[Any] = [FalseHandle(), FalseHandle()]
    for bucket, reader in enumerate(readers):
        reader.event = reading.record()
        slots.enter(bucket).release(after=reader)
    slots.enter(1)  # and whoever enters is behind it
    slots.release()
    pool.expect_no_leases()
    assert pool.stats().waits == 0
    pool.acquire("next", 64)
    assert pool.stats().waits == 1 and readers[0].event.query()
    reading.close()


def test_a_capture_waits_for_what_it_has_captured() -> None:
    """And forgets it at its end: nothing else can."""
    with posing() as library:
        slots = BucketSlots(Pool(device="cuda"), SIZES, 1)
        with Graph(library):
            reader: Any = CudaHandle(core.current_stream(0).record())
            reader.is_captured = True
            slots.enter(0).release(after=reader)
            calls = Calls()
            slots.enter(1).release(after=reader)
            assert calls.since()["stream_wait_event"] == 1
        slots.forget_readers()
        calls = Calls()
        slots.enter(0)
        assert "stream_wait_event" not in calls.since()
        slots.release()


class CudaHandle(FalseHandle):
    def __init__(self, event: Any) -> None:
        super().__init__()
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        core.current_stream(0).wait(self.event)


def test_a_capture_does_not_wait_for_what_is_over() -> None:
    with posing() as library:
        slots, reading = BucketSlots(Pool(device="cuda"), SIZES, 1), core.Stream("reading", 0)
        readers: list[Any] = [CudaHandle(reading.record())]
        slots.enter(0).release(after=readers[0])
        reading.synchronize()
        with Graph(library):
            flat = slots.enter(0).tensor(torch.float32, (4,)).zero_()
        assert flat.numel() == 4
        slots.release()
