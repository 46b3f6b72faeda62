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

import abc
import contextlib
import functools
import math
import operator
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from bucketwheel.device import CPU, device_index, keep_as_cache, native_stream, reclaim_memory, torch_device
from bucketwheel.errors import CaptureError, PoolBusy, PoolError, expect_int
from bucketwheel.native import core
from bucketwheel.pool.plan import Plan, expect_equal_plans
from bucketwheel.pool.trace import Trace, TraceEvent


@dataclass(frozen=True)
class PoolStats:
    """Counters of a pool since it was made; bytes and leases as of now.

    ``live_bytes``: of leases, rounded up to the alignment. ``reuses``: acquires of memory that was used before.
    ``waits``: fences that were still open at an acquire. ``dropped_leases``: leases of `acquire` that were never
    released. ``allocations``: of slabs. ``host_waits``: acquires in which the calling thread waited.

    With plans: ``planned_*`` is about leases in their places, ``side_*`` about those that have none where the plan
    should have one (``divergences`` counts them), ``load_bytes`` is the load of the regime's plan. `adopt` lets
    the high waters of both begin anew. `step_end` counts ``steps``.
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
    allocations: int
    host_waits: int
    planned_bytes: int
    planned_live_bytes: int
    planned_high_water_bytes: int
    planned_acquires: int
    divergences: int
    side_live_bytes: int
    side_high_water_bytes: int
    steps: int
    load_bytes: int


class Lease(contextlib.AbstractContextManager["Lease"]):
    """One live period of a range of pool memory, from `Pool.acquire` to `release`.

    A lease whose object is dropped ends when its last tensor is gone too. The memory stays mapped as long as the lease,
    one of its tensors or the pool lives, but after `release` it may hold somebody else's values. ``with`` releases it.

    The objects are native ones, for their speed (csrc/bindings/pool_py.h).
    """

    key: str  # the name that it was acquired by
    nbytes: int  # asked for
    is_live: bool  # whether it has not been released
    data_ptr: int  # address of the first byte; `UseAfterRelease` when the lease is over
    place: tuple[int, int]  # (slab, offset in bytes): equal on all ranks whose pools saw the same calls

    @abc.abstractmethod
    def tensor(self, dtype: torch.dtype, shape: int | Sequence[int], *, offset_bytes: int = 0) -> torch.Tensor:
        """A contiguous tensor of ``shape`` over the lease's bytes from ``offset_bytes`` on, not initialised.

        Every call makes a tensor with a storage and a version counter of its own. `ValueError` when it does not fit,
        `UseAfterRelease` when the lease is over.
        """

    @abc.abstractmethod
    def use(self, stream: Any) -> None:
        """Another stream uses the lease: it waits for what the acquiring stream holds now, which made the bytes ready.

        After a `release` without ``after``, or a drop, the next owner waits for these streams too.
        """

    @abc.abstractmethod
    def release(self, after: Any = None) -> None:
        """Ends the lease; its bytes may go to the next owner at once. `ReleasedTwice` when called again.

        ``after`` says when the last use ends; the next owner waits for that. It is a handle, a native event, or a
        stream, native or torch's (all work in it so far); TypeError for anything else. None: all use has ended (CPU),
        or is in torch's current stream (CUDA). `CaptureError` if that stream is being captured in a CUDA graph, or the
        event was; the lease then stays live.
        """

    @abc.abstractmethod
    def leave_to_owners(self) -> None:
        """Nobody will release it: its last tensor's end is its end, and it does not count as dropped."""

    @abc.abstractmethod
    def lend(self) -> torch.Tensor:
        """Its bytes as a uint8 tensor, which keeps the memory mapped and not the lease live."""


class Pool:
    """A caching allocator of communication memory. Freed memory stays in the pool and is reused under fences.

    What an `acquire` gets, by mode:

    - dynamic: the smallest free range that fits.
    - traced (inside `trace`): the same, and what happens is recorded.
    - planned (after `adopt`): the place that the plan of the current `regime` has for the key. Without one, or while
      another lease has its bytes: a free range of the side region, which is counted. The first one since `adopt` warns.
    - strict (after ``adopt(strict=True)``): its place, or `UnknownKey`, `SizeExceedsPlan`, `PlanDiverged`.

    A key keeps its address within a regime. Two pools never share memory.

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
        device: as torch names it. None: the CPU, or the current CUDA device for the upstreams of CUDA devices.

    When a CUDA device has no memory left, the unused slabs of all pools and torch's caches are given back and the
    request is made once more; then `PoolError` says who holds how much.
    """

    __slots__ = ("__weakref__", "_acquire", "_native", "_notes_callers", "_plans")

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
        native = core.Pool(
            upstream,
            expect_int(align_bytes, "align_bytes"),
            expect_int(min_slab_bytes, "min_slab_bytes"),
            not not poison,
            index,
            lambda nbytes: _torch_slab(nbytes, index),
        )
        self._wrap(native, is_cache=True)

    def _wrap(self, native: Any, *, is_cache: bool) -> None:
        self._native = native
        self._acquire = native.acquire
        Lease.register(core.Lease)
        self._plans: tuple[Plan, ...] = ()  # those that were adopted here
        self._notes_callers = native.is_poisoned  # and while a trace is recorded
        if is_cache and native.device != CPU:
            keep_as_cache(self)

    @property
    def device(self) -> int:
        """The index of the CUDA device, or -1."""
        return int(self._native.device)

    @classmethod
    def _of(cls, native_pool: Any, *, is_cache: bool = True) -> Pool:
        """The pool around a native one (a communicator's). ``is_cache``: it may be trimmed when memory is short."""
        pool = cls.__new__(cls)
        pool._wrap(native_pool, is_cache=is_cache)
        return pool

    def acquire(self, key: str, nbytes: int, stream: Any = None) -> Lease:
        """Leases ``nbytes`` bytes (0 is legal), not initialised.

        ``stream`` waits until the last users of these bytes are done; without one the calling thread waits (CPU), or
        torch's current stream (CUDA). ``key`` names the lease in messages; `KeyBusy` if a lease of that key is live
        (the empty key may be live any number of times). `PoolError` when the system has no memory.

        While ``stream`` is captured in a CUDA graph: `CaptureError`, with nothing changed, if the pool would have to
        grow, wait or poison. Release such a lease only after the last replay that uses it.
        """
        try:
            if stream is None and not self._notes_callers:
                return self._acquire(key, nbytes)
            stream = None if stream is None else native_stream(stream)
            return self._acquire(key, nbytes, stream, _caller() if self._notes_callers else "")
        except TypeError:
            if not isinstance(key, str):
                raise TypeError(f"key is {key!r}, expected a string") from None
            expect_int(nbytes, "nbytes", "a number of bytes; Pool.empty takes a shape")
            raise

    def reserve(self, nbytes: int, *, slab_bytes: int = 0) -> None:
        """Gets memory for a lease of ``nbytes`` from the system, unless there is a free range as large: just as much,
        or for one of ``slab_bytes``, where `acquire` gets at least ``min_slab_bytes``."""
        self._native.reserve(expect_int(nbytes, "nbytes"), expect_int(slab_bytes, "slab_bytes"))

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As ``torch.empty``, in the pool: a contiguous tensor, not initialised, of float32, bfloat16, float16,
        float64, int64, int32, int16, int8 or uint8.

        Nothing needs to be released: the memory goes back to the pool when the last tensor over it is gone, views and
        the tensors of running operations included. On CUDA it counts as used until what is then in the stream that was
        current here is done, as with torch's own tensors: a tensor that other streams use must outlive that. Errors and
        captures are as in `acquire`.

        Where ranks must lease in one order (``Communicator(registered=True)``), they must also drop in one order:
        prefer `acquire` and `Lease.release` there.
        """
        extents = _extents(shape)
        if min(extents, default=0) < 0:
            raise ValueError(f"shape is {shape!r}, which has a negative extent")
        _dtype_name(dtype)
        lease = self.acquire("", math.prod(extents) * dtype.itemsize)
        lease.leave_to_owners()
        return lease.tensor(dtype, extents)

    # --- plans -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def trace(self, name: str) -> Iterator[Trace]:
        """Records the leases of the block: ``with pool.trace("train") as trace``. The trace is complete at its end.

        Unnamed leases are recorded too, but no plan has a place for them. `PoolError` inside another trace.
        """
        self._native.begin_trace()
        noted, self._notes_callers = self._notes_callers, True
        trace = Trace(name, align=self._native.align_bytes)
        try:
            yield trace
        finally:
            self._notes_callers = noted
            trace.events += _events(self._native.end_trace())

    def plan(
        self,
        trace: Trace,
        *,
        slack: Mapping[str, int] | None = None,
        max_bytes: int | None = None,
        effort: int = 20_000,
    ) -> Plan:
        """A plan for steps like the ``trace``; a pure function of its arguments.

        Args:
            slack: by role (what stands before the first ``/`` of a key): so many further acquires of the role may be
                made before a key's bytes go to another one. 0: the least memory, and an acquire may wait for the last
                use; 1: as with a double buffer.
            max_bytes: `BudgetTooSmall` if the plan needs more.
            effort: as in `place`.
        """
        found = trace.lifetimes(slack)
        released = {event.lease for event in trace.events if event.kind == "release"}
        acquired = [event for event in trace.events if event.kind == "acquire" and event.key]
        return Plan.of(
            trace.name,
            found.sizes,
            found.intervals,
            keys=found.keys,
            order=[event.key for event in acquired],
            outlives={event.key for event in acquired if event.lease not in released},
            align=trace.align,
            effort=effort,
            max_bytes=max_bytes,
        )

    def adopt(self, plan: Plan, *more: Plan, strict: bool = False, comm: Any = None) -> None:
        """From now on keys lie where these plans put them, one a regime, in an arena as large as the largest needs.

        ``plan`` is the regime at first. ``comm``: all ranks of this communicator call it, and `CrossRankMismatch` names
        the first difference between their plans. `PoolBusy` while leases lie in places of plans before, which these
        replace. An error leaves everything as it was. The calling thread waits for the last uses of the arena before.
        """
        plans = (plan, *more)
        if comm is not None:
            expect_equal_plans(plans, comm, f"strict={bool(strict)}")
            everyone = comm.exchange(bytes([self.stats().planned_live_bytes > 0]))
            if busy := [rank for rank, told in enumerate(everyone) if told != b"\0"]:
                raise PoolBusy(f"adopt: leases are live in places of the plans before, on ranks {busy}: end them first")
        self._native.adopt([each.to_native() for each in plans], not not strict)
        self._plans = plans

    @property
    def current_regime(self) -> str:
        """The name of the plan that acquires go by; empty without plans."""
        return self._native.regime

    @contextlib.contextmanager
    def regime(self, name: str) -> Iterator[None]:
        """Inside, acquires of all threads go by the plan of this name. ValueError if there is none."""
        before = self._native.regime
        self._native.regime = name
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # other plans were adopted inside
                self._native.regime = before

    def step_end(self) -> None:
        """Tells a planned pool that the step is over.

        `LeaseLeak` names keys of the plans that are live and were not at the end of the trace. A strict pool raises
        `PlanDiverged` if the step has not acquired all keys of a regime that it began. The next step begins either way.
        """
        self._native.end_step()

    def explain(self) -> str:
        """`Plan.explain` of the adopted plans. `PoolError` if none was adopted by this object."""
        if not self._plans:
            raise PoolError("the pool has no plan: adopt one before")
        return "\n".join(each.explain() for each in self._plans)

    # -----------------------------------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """True when the contiguous ``tensor`` lies in this pool's memory."""
        return self._native.holds(tensor)

    def stats(self) -> PoolStats:
        """The pool's counters as of now."""
        return PoolStats(*self._native.stats())

    def check(self) -> None:
        """Verifies every invariant of the pool. `PoolError` names the first one that is broken."""
        self._native.check()

    def expect_no_leases(self) -> None:
        """`LeaseLeak` naming the leases that are live."""
        self._native.expect_no_leases()

    def trim(self) -> int:
        """Gives slabs without leases back to the system, after their last use. Returns the number of bytes."""
        return self._native.trim()


def _warn_of_divergence(first: str) -> None:
    """The native pool calls it, from `Pool.acquire`."""
    warnings.warn(
        f"the pool has left its plan: {first}. Such leases take memory beside it: stats() counts them, explain() says what "
        "the plan is made for. If steps have changed for good, trace one and adopt its plan",
        stacklevel=3,
    )


def _caller() -> str:
    """The place in the code that has asked for a lease."""
    frame = sys._getframe(2)
    if frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back  # of Pool.empty
    return _place_of(frame.f_code, frame.f_lineno)


@functools.lru_cache(4096)
def _place_of(code: CodeType, line: int) -> str:
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"


def _events(records: Sequence[tuple[str, int, str, int, int, str, bool]]) -> list[TraceEvent]:
    """Of ``records`` of the native pool. Streams are numbered as they come; the event of a release, whose stream nobody
    knows, counts as one of its own."""
    numbers: dict[object, int] = {0: -1}
    events = []
    for at, (kind, lease, key, nbytes, stream, where, has_event) in enumerate(records):
        number = numbers.setdefault(("event", at) if has_event else stream, len(numbers) - 1)
        events.append(TraceEvent(kind, lease, key, nbytes, number, where))
    return events


def _extents(shape: int | Sequence[int]) -> list[int]:
    try:
        return [operator.index(extent) for extent in ((shape,) if isinstance(shape, int) else shape)]
    except TypeError:
        raise TypeError(f"shape is {shape!r}, expected an int or a sequence of ints") from None


def _offset(offset_bytes: int) -> int:
    offset = expect_int(offset_bytes, "offset_bytes")
    if offset < 0:
        raise ValueError(f"offset_bytes is {offset}")
    return offset


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
