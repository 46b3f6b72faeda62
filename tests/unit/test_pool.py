"""The pool as Python sees it. Placement, fences and threads: tests/native/test_free_list.cpp and
test_fences.cpp."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os

import pytest
import torch

from bucketwheel.errors import KeyBusy, LeaseLeak, PoolError, ReleasedTwice, UseAfterRelease
from bucketwheel.layout.flat_params import lasting_lease
from bucketwheel.native import core
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.pool import Pool
from tests.support.forked_code import run_in_child

UPSTREAMS = ["host", "shm"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_the_leases_memory(upstream: str, dtype: torch.dtype) -> None:
    pool = Pool(upstream)
    with pool.acquire("grads/0", 24 * dtype.itemsize) as lease:
        tensor = lease.tensor(dtype, (2, 3, 4))
        assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (2, 3, 4), True)
        assert tensor.data_ptr() == lease.data_ptr
        assert lease.data_ptr % 512 == 0
        tensor.copy_(torch.arange(24).view(2, 3, 4))
        assert torch.equal(lease.tensor(dtype, 24), torch.arange(24, dtype=dtype))
        assert pool.holds(tensor)
        assert not pool.holds(tensor.clone())
        assert Pool(upstream).holds(tensor) is False
    assert not lease.is_live
    pool.check()
    pool.expect_no_leases()


def test_empty_makes_tensors_whose_memory_goes_back_with_them() -> None:
    pool = Pool("host")
    made = [pool.empty(shape, torch.bfloat16) for shape in ((4, 4), 5, (), (0, 3), torch.Size([2]))]
    assert [tuple(tensor.shape) for tensor in made] == [(4, 4), (5,), (), (0, 3), (2,)]
    assert all(tensor.dtype == torch.bfloat16 and pool.holds(tensor) for tensor in made if tensor.numel())
    place = made[0].data_ptr()
    assert pool.stats().live_leases == 5
    del made
    assert pool.stats().live_leases == 0 and pool.empty(16, torch.float32).data_ptr() == place
    with pytest.raises(ValueError, match="negative extent"):
        pool.empty((2, -1), torch.float32)
    with pytest.raises(TypeError, match="unsupported dtype bool"):
        pool.empty(2, torch.bool)
    assert pool.stats().live_leases == pool.stats().dropped_leases == 0


def test_a_tensor_keeps_its_lease() -> None:
    pool = Pool("host")
    tensor = pool.acquire("kept", 4096).tensor(torch.float32, 1024)
    gc.collect()
    tensor.fill_(3)
    with pool.acquire("other", 4096) as other:
        other.tensor(torch.float32, 1024).fill_(4)
    assert torch.all(tensor == 3)
    view = tensor[5:].view(-1, 1)
    del tensor
    assert pool.stats().live_leases == 1
    del view
    assert pool.stats().live_leases == 0
    assert pool.stats().dropped_leases == 1


def test_tensors_outlive_release_and_pool() -> None:
    pool = Pool("host", min_slab_bytes=4096)
    lease = pool.acquire("outlives", 1 << 20)
    tensor = lease.tensor(torch.float32, 1 << 18)
    lease.release()
    pool.trim()
    del pool, lease
    gc.collect()
    tensor.fill_(1)  # a crash if the memory had been unmapped
    assert tensor.sum().item() == 1 << 18


def test_misuse_raises_named_errors() -> None:
    pool = Pool("host")
    lease = pool.acquire("grads/0", 1000)
    with pytest.raises(KeyBusy, match="grads/0"):
        pool.acquire("grads/0", 10)
    with pytest.raises(LeaseLeak, match=r"'grads/0' \(1000 bytes\)"):
        pool.expect_no_leases()
    for dtype, shape, error, says in (
        (torch.float32, 251, ValueError, r"1000 bytes cannot hold a float32 tensor of shape \[251\] \(1004 bytes\)"),
        (torch.float32, (1 << 40, 1 << 40), ValueError, "cannot hold"),
        (torch.float32, (-1,), ValueError, "negative extent -1"),
        (torch.complex64, 1, TypeError, "unsupported dtype complex64: .* int64, int32, int16, int8 and uint8 are supp"),
    ):
        with pytest.raises(error, match=says):
            lease.tensor(dtype, shape)
    with pytest.raises(TypeError, match="after must be a handle, a native event, a stream or None, got builtins.int"):
        lease.release(after=3)
    assert lease.is_live
    lease.release()
    with pytest.raises(ReleasedTwice, match="grads/0"):
        lease.release()
    with pytest.raises(UseAfterRelease, match="grads/0"):
        lease.tensor(torch.float32, 1)
    with pytest.raises(UseAfterRelease):
        _ = lease.data_ptr
    assert "released" in repr(lease)
    with pytest.raises(ValueError, match="nbytes must be at least 0, got -5"):
        pool.acquire("negative", -5)
    with pytest.raises(TypeError, match="stream must be a Stream or None, got str"):
        pool.acquire("stream", 5, stream="default")  # type: ignore[arg-type]
    with pytest.raises(PoolError, match="mmap failed"):
        pool.acquire("more than an address space", 1 << 46)
    with pytest.raises(ValueError, match="'host', 'shm', 'torch' or 'cuda', got 'gpu'"):
        Pool("gpu")
    with pytest.raises(ValueError, match="power of two"):
        Pool("host", align_bytes=100)
    pool.check()
    pool.expect_no_leases()


def test_with_ends_the_lease_once() -> None:
    pool = Pool("host")
    with pytest.raises(RuntimeError, match="inside"), pool.acquire("with", 10) as lease:
        raise RuntimeError("inside")
    assert not lease.is_live
    with pool.acquire("early", 10) as lease:
        lease.release()
    pool.expect_no_leases()


def test_poison_shows_reads_of_what_was_released() -> None:
    pool = Pool("host", poison=True)
    lease = pool.acquire("poisoned", 400)
    tensor = lease.tensor(torch.float32, 100)
    assert torch.isnan(tensor).all()
    tensor.zero_()
    lease.release()
    assert torch.isnan(tensor).all()
    short = pool.acquire("short", 40)
    whole = torch.frombuffer((ctypes.c_uint8 * 64).from_address(short.data_ptr), dtype=torch.uint8)
    whole[40] = 0
    with pytest.raises(PoolError, match="'short' of 40 bytes.*first at offset 40"):
        short.release()
    pool.expect_no_leases()


def test_same_calls_give_the_same_places_whatever_the_timing() -> None:
    def places(pool: Pool, pause_s: float) -> list[tuple[int, int]]:
        stream = core.Stream("timing")
        out, live = [], []
        for i, size in enumerate(itertools.islice(itertools.cycle([100, 70_000, 4096, 9_000_000, 1]), 200)):
            lease = pool.acquire(f"key/{i}", size + 13 * i, stream=stream)
            out.append(lease.place)
            live.append(lease)
            if i % 3:
                stream.pause(pause_s)
                live.pop(i % len(live)).release(after=stream)
        return out

    quick = places(Pool("host"), 0.0)
    slow = places(Pool("shm"), 0.0005)
    assert quick == slow
    assert len(set(quick)) < len(quick)  # memory was reused


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_read_but_not_lease() -> None:
    pool = Pool("host")
    lease = pool.acquire("parents", 400)
    tensor = lease.tensor(torch.float32, 100).fill_(7)

    def body() -> None:
        nonlocal pool, lease, tensor
        with pytest.raises(PoolError, match="belongs to the parent process"):
            pool.acquire("x", 1)
        with pytest.raises(PoolError, match="belongs to the parent process"):
            lease.release()
        with pytest.raises(PoolError, match="belongs to the parent process"):
            pool.adopt(Plan.of("p", {}, {}))
        assert tensor.sum().item() == 700
        del lease, tensor, pool
        gc.collect()
        with Pool("host").acquire("own", 100) as own:
            own.tensor(torch.uint8, 100).zero_()

    run_in_child(body)
    assert tensor.sum().item() == 700
    lease.release()
    pool.check()


@pytest.mark.skipif("BW_POOL_POISON" in os.environ, reason="red zones make leases larger")
def test_reserving_gets_no_more_than_a_lease_needs() -> None:
    pool = Pool("host")

    def reserved(nbytes: int, slab_bytes: int = 0) -> int:
        pool.reserve(nbytes, slab_bytes=slab_bytes)
        return pool.stats().reserved_bytes

    assert [reserved(10_000), reserved(9_000)] == [12_288] * 2, "whole pages, for what is not there yet"
    with pool.acquire("first", 10_000):
        assert [reserved(11_000, 50_000), reserved(40_000)] == [12_288 + 53_248] * 2
    with pytest.raises(ValueError, match="out of range"):
        pool.reserve(1 << 62)
    with pytest.raises(TypeError, match="nbytes"):
        pool.reserve("1")  # type: ignore[arg-type]


@pytest.mark.skipif("BW_POOL_POISON" in os.environ, reason="red zones make leases larger")
def test_large_shards_take_memory_of_their_size() -> None:
    """Small ones share a slab."""
    pool, mib = Pool("host"), 2**20
    leases = [lasting_lease(pool, f"shard {i}", 6 * mib) for i in range(3)]
    assert pool.stats().reserved_bytes == 18 * mib
    leases += [lasting_lease(pool, f"small {i}", mib) for i in range(3)]
    assert pool.stats().reserved_bytes == (18 + 8) * mib
