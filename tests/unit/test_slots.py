"""Slots, alone: where they lie, who may enter when, who waits for whom. The handles are false ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bucketwheel.native import core
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.pool import Pool
from bucketwheel.pool.slots import Slot, Slots, plan_slots
from tests.support.simulated_cuda import Calls, Graph, posing

SIZES = [1024, 2560, 4096, 1536, 512]
TURNS = [(b, min(b + 2, 5)) for b in range(5)]  # each goes on to the second one behind it


@pytest.fixture
def pool() -> Pool:
    return Pool("host", align_bytes=512)


def entered(slots: Slots, number: int) -> Slot:
    slot = slots.slot(number)
    assert slot.try_enter()
    return slot


def planned(sizes: Sequence[int], offsets: Sequence[int]) -> Plan:
    """With these places."""
    plan = plan_slots("turns", sizes, [(number, number + 1) for number in range(len(sizes))])
    total_bytes = max(offset + nbytes for offset, nbytes in zip(offsets, sizes, strict=True))
    given = dict(zip(plan.sizes, offsets, strict=True))
    return replace(plan, placement=replace(plan.placement, offsets=given, total_bytes=total_bytes))


class Reader:
    """The handle of a reduce-scatter in a stream."""

    def __init__(self, event: Any, seq: int = 0) -> None:
        self.event, self.seq = event, seq


def test_each_lies_where_the_plan_says(pool: Pool) -> None:
    plan = plan_slots("turns", SIZES, TURNS)
    assert plan.total_bytes == plan.load_bytes == 2560 + 4096, "two at once"
    slots = Slots.leased(plan, pool)
    assert slots.memory.nbytes == plan.total_bytes and pool.stats().live_leases == 1
    begin = slots.memory.data_ptr()
    for number, (nbytes, offset) in enumerate(zip(SIZES, slots.offsets, strict=True)):
        slot = entered(slots, number)
        flat = slot.tensor(torch.float32, (nbytes // 4,))
        assert (flat.data_ptr(), flat.nbytes, slot.nbytes) == (begin + offset, nbytes, nbytes)
        slot.release()
    slots.release()
    pool.expect_no_leases()


def test_bytes_that_are_in_use_are_nobody_elses(pool: Pool) -> None:
    plan = planned((1024, 1024, 2048), (0, 1024, 512))
    slots = Slots.leased(plan, pool)
    first, second = entered(slots, 0), entered(slots, 1)
    assert slots.slot(2).shares_bytes(first) and slots.slot(2).shares_bytes(second)
    assert not first.shares_bytes(second) and not first.shares_bytes(pool.acquire("other", 8))
    assert not slots.slot(0).shares_bytes(Slots.leased(plan, pool).slot(0)), "of other memory"
    assert not slots.slot(0).try_enter()
    for slot in (first, second):
        assert not slots.slot(2).try_enter()
        slot.release()
    third = entered(slots, 2)
    assert third.is_live and not first.is_live
    first.release()  # has nothing any more
    assert not slots.slot(0).try_enter()


def test_who_enters_waits_for_the_last_use_of_its_bytes() -> None:
    """On the host: until that is over. Not for what uses other bytes, nor for what is over."""
    plan = planned((1024, 1024, 1024), (0, 512, 1536))
    slots, reading = Slots.leased(plan, Pool("host")), core.Stream("reading")
    entered(slots, 0).release(after=Reader(reading.record()))
    reading.pause(0.15)
    last = Reader(reading.record())
    entered(slots, 0).release(after=last)
    reading.pause(0.15)
    elsewhere = Reader(reading.record())
    entered(slots, 2).release(after=elsewhere)
    slot = entered(slots, 1)
    assert last.event.query() and not elsewhere.event.query()
    assert slots.slot(1).last_use() is None, "it is over, and so is all before it"
    assert slots.slot(2).last_use() is elsewhere
    slot.release()
    reading.close()


def test_the_last_operation_counts_and_not_the_last_release() -> None:
    """Operations that share bytes may give them back in another order than they run in."""
    plan = planned((512, 512, 1024), (0, 512, 0))
    slots, reading = Slots.leased(plan, Pool("host")), core.Stream("reading")
    first, second = entered(slots, 0), entered(slots, 1)
    events = [reading.record()]
    reading.pause(0.15)
    events.append(reading.record())
    later, earlier = Reader(events[1], seq=2), Reader(events[0], seq=1)
    second.release(after=later)
    first.release(after=earlier)
    assert slots.slot(2).last_use() is later
    entered(slots, 2).release()
    assert later.event.query()
    reading.close()


def test_buffers_know_who_had_their_bytes_last() -> None:
    slots = Slots.leased(planned((1024, 512, 512, 1024, 100), (0, 1024, 0, 512, 4096)), Pool("host"))
    assert slots.shares_with == [-1, -1, 0, 1, -1]


def test_one_wait_is_for_all_before_it() -> None:
    """Also where the last one was dropped, by the current stream, and the one before was not."""
    with posing():
        slots = Slots.leased(planned((512, 512, 1024), (0, 512, 0)), Pool(device="cuda"))
        reading = core.Stream("reading", 0)
        dropped, read = entered(slots, 0), entered(slots, 1)
        reading.pause(0.2)
        read.release(after=(last := Reader(reading.record())))
        dropped.release()
        calls = Calls()
        entered(slots, 2)
        assert "stream_wait_event" not in calls.since(), "it is in the stream of the drop"
        core.current_stream(0).record().synchronize()
        assert last.event.query()
        reading.close()


def test_a_drop_stays_behind_what_it_waited_for() -> None:
    """An operation that is older than that, and gives its bytes back later, comes before both."""
    with posing():
        slots = Slots.leased(planned((512, 512, 1024, 512), (0, 512, 0, 1024)), Pool(device="cuda"))
        dropped, read, read_last = entered(slots, 0), entered(slots, 1), entered(slots, 3)
        read_last.release(after=Reader(core.current_stream(0).record(), seq=5))
        dropped.release()
        read.release(after=Reader(SimpleNamespace(query=lambda: False), seq=3))
        assert slots.slot(1).last_use() is not None
        assert slots.slot(2).last_use() is None, "the last end is that of the drop, which is over"


def test_the_end_is_behind_the_last_use(pool: Pool) -> None:
    slots, reading = Slots.leased(plan_slots("turns", SIZES, TURNS), pool), core.Stream("reading")
    reading.pause(0.2)
    last = Reader(reading.record())
    entered(slots, 0).release(after=last)
    slots.release()
    pool.expect_no_leases()
    assert pool.stats().waits == 0
    pool.acquire("next", 64)
    assert pool.stats().waits == 1 and last.event.query()
    reading.close()


def test_bytes_that_are_in_use_at_the_end_stay_with_their_tensors(pool: Pool) -> None:
    """As where `close` fails while reduce-scatters read them."""
    slots = Slots.leased(plan_slots("turns", SIZES, TURNS), pool)
    read = entered(slots, 0).tensor(torch.float32, (4,))
    slots.release()
    assert pool.stats().live_leases == 1
    del read
    pool.expect_no_leases()


def test_a_capture_waits_for_what_it_has_captured_and_then_forgets_it() -> None:
    """Nothing else can wait for it."""
    with posing() as library:
        slots = Slots(plan_slots("turns", SIZES, TURNS), torch.empty(6656, dtype=torch.uint8), 0)
        with Graph(library):
            entered(slots, 0).release(after=Reader(core.current_stream(0).record()))
            left = entered(slots, 1)
            calls = Calls()
            entered(slots, 2)
            assert calls.since()["stream_wait_event"] == 1
        slots.forget()
        assert not left.is_live
        calls = Calls()
        entered(slots, 0)
        assert "stream_wait_event" not in calls.since()


def test_released_bytes_are_poisoned(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BW_POOL_POISON", "1")
    slots = Slots.leased(plan_slots("turns", SIZES, TURNS), pool)
    for _ in range(2):
        slot = entered(slots, 1)
        flat = slot.tensor(torch.float32, (640,))
        assert flat.isnan().all()
        flat.zero_()
        slot.release()
