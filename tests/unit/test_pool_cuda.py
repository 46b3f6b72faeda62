"""The pool on a CUDA device, simulated: all upstreams, fences between streams, captures, and no memory left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bucketwheel.errors import CaptureError, DeviceError, KeyBusy, LeaseLeak, PoolError, UseAfterRelease
from bucketwheel.native import core
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.pool import Pool
from tests.support.counted_cuda import plan_cuda_fault
from tests.support.simulated_cuda import Calls, Graph, posing

SLAB = 8 << 20


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    with posing(delays=5) as library:
        library.fake_cuda_set_capacity(1 << 40)
        yield library
        library.fake_cuda_set_capacity(1 << 40)


@pytest.fixture(params=["torch", "cuda"])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(request.param)


def test_memory_is_zeroed_aligned_and_reused(pool: Pool) -> None:
    assert pool.device == 0
    lease = pool.acquire("a", 10_000)
    place = lease.place
    assert lease.data_ptr % 512 == 0
    assert torch.equal(lease.tensor(torch.uint8, 10_000), torch.zeros(10_000, dtype=torch.uint8))
    lease.release()
    again = pool.acquire("b", 10_000)
    assert again.place == place
    again.release()
    pool.check()
    pool.expect_no_leases()
    assert pool.stats().reuses == 1


def test_a_dropped_lease_counts_as_used_in_its_stream(pool: Pool) -> None:
    stream = core.Stream("user", 0)
    lease = pool.acquire("dropped", 4096, stream)
    stream.pause(0.05)
    del lease
    calls = Calls()
    pool.acquire("next", 4096).release()
    assert calls.since().get("stream_wait_event", 0) >= 1
    assert pool.stats().dropped_leases == 1


def test_release_without_an_event_fences_the_current_stream(pool: Pool) -> None:
    pool.acquire("a", 4096).release()
    other = core.Stream("other", 0)
    lease = pool.acquire("b", 4096, other)
    calls = Calls()
    lease.release()
    assert calls.since().get("event_record", 0) == 1
    with pytest.raises(UseAfterRelease):
        _ = lease.data_ptr
    # The next owner's stream is made to wait for it, although it is the one that the lease was made for.
    calls = Calls()
    pool.acquire("c", 4096, other).release(after=other)
    assert calls.since().get("stream_wait_event", 0) + calls.since().get("event_query", 0) >= 1


def test_a_lease_ends_behind_what_stays_what_it_is(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles, native events and streams. torch's events are recorded again by whoever has them."""

    class TorchEvent:
        def record(self) -> None:
            raise AssertionError("recorded")

    monkeypatch.setattr(torch.cuda, "Event", TorchEvent)
    stream = core.Stream("last", 0)
    lease = pool.acquire("a", 4096)
    with pytest.raises(TypeError, match=r"got .*TorchEvent: pass the stream in which it was recorded"):
        lease.release(after=TorchEvent())
    for wrong, name in ((7, "builtins.int$"), ("now", "builtins.str$"), (pool, "Pool$")):
        with pytest.raises(TypeError, match=f"a native event, a stream or None, got .*{name}"):
            lease.release(after=wrong)
    assert lease.is_live
    lease.release(after=stream.record())
    pool.acquire("b", 4096).release(after=stream)
    handle = type("Handle", (), {"event": stream.record()})()
    pool.acquire("c", 4096).release(after=handle)
    pool.check()
    pool.expect_no_leases()


def test_acquire_and_release_neither_wait_nor_allocate(pool: Pool) -> None:
    for _ in range(3):
        pool.acquire("warm", 1 << 20).release()
    calls = Calls()
    for _ in range(50):
        pool.acquire("warm", 1 << 20).release()
    calls.expect_free_running()


def test_a_capture_cannot_make_a_pool_grow(pool: Pool, library: Any) -> None:
    """Nothing has changed then; memory that is there and not in use can be had."""
    elsewhere = core.Stream("elsewhere", 0)
    graph, calls, before = Graph(library), Calls(), pool.stats()
    with graph:
        with pytest.raises(CaptureError, match=r"acquire of key 'x' \(4096 bytes\) while .* would have to grow"):
            pool.acquire("x", 4096)
    assert pool.stats() == before
    assert not {"malloc_device", "stream_synchronize"} & set(calls.since())
    pool.acquire("x", 4096, elsewhere).release()
    with graph:
        lease = pool.acquire("x", 4096)
    assert lease.is_live
    lease.release()
    pool.check()
    pool.expect_no_leases()


def test_a_pool_can_grow_for_a_stream_beside_a_capture(library: Any) -> None:
    """torch's memory would belong to the graph; ours does not."""
    beside = core.Stream("beside", 0)
    ours, torchs = Pool("cuda"), Pool("torch")
    with Graph(library):
        lease = ours.acquire("x", 4096, beside)
        with pytest.raises(CaptureError, match="a slab of .* while a CUDA graph is captured in the current stream"):
            torchs.acquire("x", 4096, beside)
    assert torch.equal(lease.tensor(torch.uint8, 4096), torch.zeros(4096, dtype=torch.uint8))
    lease.release(after=beside)
    assert torchs.stats().reserved_bytes == torchs.stats().acquires == 0
    assert ours.trim() == SLAB


def test_a_capture_cannot_wait_for_the_last_users(pool: Pool, library: Any) -> None:
    late = core.Stream("late", 0)
    lease = pool.acquire("first", 4096)
    late.pause(0.2)
    lease.release(after=late)
    before = pool.stats()
    with Graph(library), pytest.raises(CaptureError, match="earlier work on these bytes is not done"):
        pool.acquire("second", 4096)
    assert pool.stats() == before
    pool.check()
    calls = Calls()
    pool.acquire("second", 4096).release()
    assert calls.since()["stream_wait_event"] == 1, "the fence is still there"


def test_a_lease_is_not_released_in_a_capture_but_after_it(pool: Pool, library: Any) -> None:
    """A captured event would never complete for the next owner."""
    current = core.current_stream(0)
    lease, other = pool.acquire("x", 4096), pool.acquire("y", 4096)
    place, done = lease.place, current.record()
    with Graph(library):
        with pytest.raises(CaptureError, match="release of lease 'x' while a CUDA graph is captured"):
            lease.release()
        for after in (current, current.record()):
            with pytest.raises(CaptureError, match="no completion outside the graph"):
                lease.release(after=after)
        other.release(after=done)  # was over before the capture
    assert lease.is_live and not other.is_live
    lease.release()
    again = pool.acquire("x", 4096)
    assert again.place == place
    again.release()
    pool.check()
    pool.expect_no_leases()


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_lease_dropped_in_a_capture_stays(
    pool: Pool, library: Any, capfd: pytest.CaptureFixture[str], is_planned: bool
) -> None:
    """Replays use its bytes, and nobody can know until when."""
    if is_planned:
        pool.adopt(Plan.of("step", {"dropped": 4096, "other": 4096}, {"dropped": [(0, 1)], "other": [(1, 2)]}))
    lease = pool.acquire("dropped", 4096)
    place = lease.place
    with Graph(library):
        del lease
    assert "lease 'dropped' was dropped but stays live: event query" in capfd.readouterr().err
    pool.check()
    with pytest.raises(LeaseLeak, match="1 leases are live: 'dropped'"):
        pool.expect_no_leases()
    with pytest.raises(KeyBusy, match="another lease of the key is live: lease 'dropped' of 4096 bytes"):
        pool.acquire("dropped", 4096)
    other = pool.acquire("other", 4096)
    assert other.place != place
    other.release()


def test_no_memory_left_empties_caches_and_tries_once_more(library: Any) -> None:
    library.fake_cuda_set_capacity(library.fake_cuda_allocated_bytes() + 3 * SLAB)
    hoarder = Pool("cuda")
    hoarder.acquire("big", 2 * SLAB).release()
    assert hoarder.stats().reserved_bytes == 2 * SLAB
    pool = Pool("cuda")
    lease = pool.acquire("big", 2 * SLAB)  # fits only when the hoarder's slab is given back
    assert hoarder.stats().reserved_bytes == 0
    with pytest.raises(PoolError) as caught:
        pool.acquire("more", 2 * SLAB)
    text = str(caught.value)
    for part in ("cuda:0", "out of memory", f"this upstream holds {2 * SLAB}", "pools gave back", "smaller buckets"):
        assert part in text
    pool.check()
    lease.release()
    pool.acquire("fits", 2 * SLAB).release()


def test_other_failures_of_an_allocation_are_named() -> None:
    pool = Pool("cuda")
    plan_cuda_fault("malloc_device", error=719)
    with pytest.raises(DeviceError, match="malloc_device failed: unspecified launch failure"):
        pool.acquire("x", 100)
    pool.acquire("x", 100).release()
    pool.check()


def test_memory_goes_back_to_the_device(library: Any) -> None:
    before = library.fake_cuda_allocated_bytes()
    pool = Pool("cuda")
    tensor = pool.acquire("x", 100).tensor(torch.uint8, 100)
    assert library.fake_cuda_allocated_bytes() == before + SLAB
    del pool
    tensor.fill_(1)  # its slab stays
    del tensor
    assert library.fake_cuda_allocated_bytes() == before


def test_upstreams_belong_to_devices() -> None:
    core.set_posing(False)
    for upstream in ("torch", "cuda"):
        with pytest.raises(ValueError, match="'torch' and 'cuda' for cuda devices"):
            Pool(upstream, device="cpu")
    core.set_posing(True)
    with pytest.raises(ValueError, match="'host' and 'shm' are for the cpu"):
        Pool("host", device="cuda")
