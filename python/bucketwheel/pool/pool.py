"""Communication memory that is cached and reused: `Pool`, `Lease`, `PoolStats`.

>>> pool = Pool("host")
>>> with pool.acquire("grads/0", 4096) as lease:
...     grads = lease.tensor(torch.float32, (1024,))
>>> grads = pool.empty((1024,), torch.float32)  # its memory goes back with the tensor
>>> del grads
>>> pool.stats().live_leases
0
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bucketwheel.device import CPU, device_index, keep_as_cache, native_stream, reclaim_memory, torch_device
from bucketwheel.errors import CaptureError, PoolError, expect_int
from bucketwheel.native import core

__all__ = ["Lease", "Pool", "PoolStats"]


@dataclass(frozen=True)
class PoolStats:
    """Counters of a pool since it was made; bytes and leases as of now.

    ``live_bytes``: of leases, rounded up to the alignment. ``reuses``: acquires of memory that was used before.
    ``waits``: fences that were still open at an acquire. ``dropped_leases``: leases of `acquire` that were never
    released.
    """

    reserved_bytes: int
    live_bytes: int
    high_water_bytes: int
    slabs: int
    live_leases: int
    acquires: int
    reuses: int
    waits: int
    dropped_leases: int


class Lease:
    """One live period of a range of pool memory, from `Pool.acquire` to `release`.

    A lease whose object is dropped ends when its last tensor is gone too. The memory stays mapped as long as the lease,
    one of its tensors or the pool lives, but after `release` it may hold somebody else's values.
    """

    __slots__ = ("_native",)

    def __init__(self, native_lease: Any) -> None:
        self._native = native_lease

    @property
    def key(self) -> str:
        """The name that it was acquired by."""
        return self._native.key

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._native.nbytes

    @property
    def is_live(self) -> bool:
        """Whether it has not been released."""
        return self._native.is_live

    @property
    def data_ptr(self) -> int:
        """Address of the first byte. `UseAfterRelease` when the lease is over."""
        return self._native.data_ptr

    @property
    def place(self) -> tuple[int, int]:
        """(slab, offset in bytes): equal on all ranks whose pools saw the same calls."""
        return self._native.slab_id, self._native.offset_bytes

    def tensor(self, dtype: torch.dtype, shape: int | Sequence[int], *, offset_bytes: int = 0) -> torch.Tensor:
        """A contiguous tensor of ``shape`` over the lease's bytes from ``offset_bytes`` on, not initialised.

        Every call makes a tensor with a storage and a version counter of its own. `ValueError` when it does not fit,
        `UseAfterRelease` when the lease is over.
        """
        name, extents = _dtype_name(dtype), _extents(shape)
        try:
            return self._native.tensor(name, extents, offset_bytes)
        except TypeError:
            expect_int(offset_bytes, "offset_bytes")
            raise

    def release(self, after: Any = None) -> None:
        """Ends the lease; its bytes may go to the next owner at once. `ReleasedTwice` when called again.

        ``after`` says when the last use ends; the next owner waits for that. It is a handle, a native event, or a stream,
        native or torch's (all work in it so far); TypeError for anything else. None: all use has ended (CPU), or is in
        torch's current stream (CUDA). `CaptureError` if that stream is being captured in a CUDA graph, or the event
        was; the lease then stays live.
        """
        self._native.release(_event_of(after))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        if self._native.is_live:
            self._native.release()

    def __repr__(self) -> str:
        slab, offset = self.place
        state = "live" if self.is_live else "released"
        return f"Lease({self.key!r}, nbytes={self.nbytes}, slab={slab}, offset_bytes={offset}, {state})"


class Pool:
    """A caching allocator of communication memory. Freed memory stays in the pool and is reused under fences.

    Which bytes an `acquire` gets depends on the sizes and the order of calls alone, so ranks that make the same calls
    get the same offsets. Thread-safe. Not usable in a forked child.

    Args:
        upstream: where slabs come from: ``"host"`` (private memory) or ``"shm"`` (memfd segments that other processes
            can map) on the CPU; ``"torch"`` (torch tensors, so that torch's memory accounting sees them) or ``"cuda"``
            (cudaMalloc) on a CUDA device. None: ``"host"`` or ``"torch"``.
        align_bytes: alignment of every lease, a power of two of at most 4096.
        min_slab_bytes: smaller requests share a slab of this size.
        poison: fill memory with NaN when it is acquired and released, and check that nobody wrote beyond a lease's end.
            Slow; ``BW_POOL_POISON=1`` switches it on too.
        device: as torch names it. None: the CPU, or the current CUDA device for upstream ``"torch"`` and ``"cuda"``.

    When a CUDA device has no memory left, the unused slabs of all pools and torch's caches are given back and the
    request is made once more; then `PoolError` says who holds how much.
    """

    __slots__ = ("__weakref__", "_native")

    def __init__(
        self,
        upstream: str | None = None,
        *,
        align_bytes: int = 512,
        min_slab_bytes: int = 8 << 20,
        poison: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        if upstream not in (None, "host", "shm", "torch", "cuda"):
            raise ValueError(f"upstream must be 'host', 'shm', 'torch' or 'cuda', got {upstream!r}")
        if device is None and upstream in ("torch", "cuda"):
            device = "cuda"
        index = device_index(device)
        if upstream is None:
            upstream = "host" if index == CPU else "torch"
        self._native = core.Pool(
            upstream,
            expect_int(align_bytes, "align_bytes"),
            expect_int(min_slab_bytes, "min_slab_bytes"),
            not not poison,
            index,
            lambda nbytes: _torch_slab(nbytes, index),
        )
        if index != CPU:
            keep_as_cache(self)

    @property
    def device(self) -> int:
        """The index of the CUDA device, or -1."""
        return int(self._native.device)

    @classmethod
    def _of(cls, native_pool: Any, *, is_cache: bool = True) -> Pool:
        """The pool around a native one (a communicator's). ``is_cache``: it may be trimmed when memory is short."""
        pool = cls.__new__(cls)
        pool._native = native_pool
        if is_cache and pool.device != CPU:
            keep_as_cache(pool)
        return pool

    def acquire(self, key: str, nbytes: int, stream: Any = None) -> Lease:
        """Leases ``nbytes`` bytes (0 is legal), not initialised.

        ``stream`` waits until the last users of these bytes are done; without one the calling thread waits (CPU), or
        torch's current stream (CUDA). ``key`` names the lease in messages; `KeyBusy` if a lease of that key is live
        (the empty key may be live any number of times). `PoolError` when the system has no memory.

        While ``stream`` is captured in a CUDA graph: `CaptureError`, with nothing changed, if the pool would have to
        grow, wait or poison. Release such a lease only after the last replay that uses it.
        """
        stream = None if stream is None else native_stream(stream)
        try:
            return Lease(self._native.acquire(key, nbytes, stream))
        except TypeError:
            if not isinstance(key, str):
                raise TypeError(f"key is {key!r}, expected a string") from None
            expect_int(nbytes, "nbytes", "a number of bytes; Pool.empty takes a shape")
            raise

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``, in the pool: a contiguous tensor, not initialised, of float32, bfloat16, float16, float64, int64,
        int32, int16, int8 or uint8.

        Nothing needs to be released: the memory goes back to the pool when the last tensor over it is gone, views and the
        tensors of running operations included. On CUDA it counts as used until
        what is then in the stream that was current here is done, as with torch's own tensors: a tensor that other streams
        use must outlive that. Errors and captures are as in `acquire`.

        Where ranks must lease in one order (``Communicator(registered=True)``), they must also drop in one order: prefer
        `acquire` and `Lease.release` there.
        """
        extents = _extents(shape)
        if min(extents, default=0) < 0:
            raise ValueError(f"shape is {shape!r}, which has a negative extent")
        name = _dtype_name(dtype)
        lease = self.acquire("", math.prod(extents) * dtype.itemsize)._native
        lease.leave_to_owners()
        return lease.tensor(name, extents)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True when the contiguous ``tensor`` lies in this pool's memory."""
        return self._native.holds(tensor)

    def stats(self) -> PoolStats:
        """The pool's counters as of now."""
        stats = self._native.stats()
        return PoolStats(**{name: getattr(stats, name) for name in PoolStats.__dataclass_fields__})

    def check(self) -> None:
        """Verifies every invariant of the pool. `PoolError` names the first one that is broken."""
        self._native.check()

    def expect_no_leases(self) -> None:
        """`LeaseLeak` naming the leases that are live."""
        self._native.expect_no_leases()

    def trim(self) -> int:
        """Gives slabs without leases back to the system, after their last use. Returns the number of bytes."""
        return self._native.trim()


def _extents(shape: int | Sequence[int]) -> list[int]:
    try:
        return [operator.index(extent) for extent in ((shape,) if isinstance(shape, int) else shape)]
    except TypeError:
        raise TypeError(f"shape is {shape!r}, expected an int or a sequence of ints") from None


def _dtype_name(dtype: torch.dtype) -> str:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, expected a torch.dtype")
    return str(dtype).removeprefix("torch.")


def _event_of(after: Any) -> Any:
    """The native event that ``after`` (a handle, a native event, a stream) stands for."""
    if after is None:
        return None
    event = getattr(after, "event", after)
    if isinstance(event, core.Event):
        return event
    after = native_stream(after)
    if isinstance(after, core.Stream):
        return after.record()
    # A torch event may be recorded again by somebody else, so it does not stay the same.
    hint = ": pass the stream in which it was recorded" if isinstance(after, torch.cuda.Event) else ""
    raise TypeError(
        f"release: after must be a handle, a native event, a stream or None, got {type(after).__module__}."
        f"{type(after).__qualname__}{hint}"
    )


def _torch_slab(nbytes: int, index: int) -> torch.Tensor:
    """Zeroed bytes on a device, allocated by torch."""
    if core.is_capturing(index):  # the memory and its zeros would belong to the graph
        raise CaptureError(
            f"a slab of {nbytes} bytes while a CUDA graph is captured in the current stream; acquire it before the "
            "capture"
        )
    device = torch_device(index)
    try:
        return _zeros(nbytes, device)
    except torch.OutOfMemoryError:
        reclaimed = reclaim_memory(index)
    try:
        return _zeros(nbytes, device)
    except torch.OutOfMemoryError as error:
        raise PoolError(
            f"a slab of {nbytes} bytes on {device}: out of memory; {reclaimed}: use smaller buckets, or less memory "
            "elsewhere"
        ) from error


def _zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    slab = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if slab.is_cuda:
        # The zeros are written in the current stream, but the first lease may be used in any other one, and a new
        # slab has no fence. This host wait happens only when a pool grows.
        torch.cuda.current_stream(device).synchronize()
    return slab
