"""Pool, Lease and PoolStats: communication memory that is cached and reused.

>>> pool = Pool("host")
>>> with pool.acquire("grads/0", 4096) as lease:
...     grads = lease.tensor(torch.float32, (1024,))
>>> grads = pool.empty((1024,), torch.float32)  # the memory goes back to the pool with the tensor
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
    """Counters of a `Pool`. Numbers of bytes and leases are as of now; the other counters began with the pool.

    A lease *diverges* if the plan should have a place for its key but has none that is free and large enough.

    Attributes:
        reserved_bytes: Bytes of all slabs.
        live_bytes: Bytes of live leases, each rounded up to the alignment.
        high_water_bytes: The largest ``live_bytes``.
        slabs: Number of slabs.
        live_leases: Number of live leases.
        acquires: Number of leases that were acquired.
        reuses: Acquires that got memory which was used before.
        waits: Unfinished uses of memory for which an acquire made its stream or the calling thread wait.
        dropped_leases: Leases of `Pool.acquire` that were dropped without `Lease.release`.
        allocations: Number of slabs that were allocated.
        host_waits: Acquires in which the calling thread waited.
        planned_bytes: Size of the arena of the adopted plans.
        planned_live_bytes: Bytes of live leases that lie in their planned places.
        planned_high_water_bytes: The largest ``planned_live_bytes`` since `Pool.adopt`.
        planned_acquires: Acquires that got their planned place.
        divergences: Leases that diverged.
        side_live_bytes: Bytes of live leases that diverged.
        side_high_water_bytes: The largest ``side_live_bytes`` since `Pool.adopt`.
        steps: Calls of `Pool.step_end`.
        load_bytes: The load of the current regime's plan."""

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
    """A range of pool memory that belongs to one owner, from `Pool.acquire` to `release`. All methods are local.

    As a context manager, a lease releases itself. A lease whose object you drop ends when its last tensor is gone too. The
    memory stays mapped as long as the lease, one of its tensors or the pool exists, but after `release` it may hold another
    owner's values.

    Attributes:
        key: The name of the lease, as given to `Pool.acquire`.
        nbytes: The requested number of bytes.
        is_live: True until `release`.
        data_ptr: Address of the first byte. Raises `UseAfterRelease` after the lease has ended.
        place: The number of the slab, and the offset in it in bytes. Equal on all ranks whose pools had the same calls."""

    # The objects are native ones, for their speed (csrc/bindings/pool_py.h).
    key: str
    nbytes: int
    is_live: bool
    data_ptr: int
    place: tuple[int, int]

    @abc.abstractmethod
    def tensor(self, dtype: torch.dtype, shape: int | Sequence[int], *, offset_bytes: int = 0) -> torch.Tensor:
        """Returns a contiguous tensor over the lease's bytes, not initialised. Local.

        Each call makes a tensor with its own storage and version counter.

        Args:
            dtype: The dtype of the tensor.
            shape: The shape of the tensor.
            offset_bytes: Where the tensor begins in the lease.

        Raises:
            ValueError: The tensor does not fit into the lease.
            UseAfterRelease: The lease has ended."""

    @abc.abstractmethod
    def use(self, stream: Any) -> None:
        """Says that another stream uses the lease. Local; does not block the host.

        ``stream`` waits for the work that is in the acquiring stream now, which made the bytes ready. If the lease ends by a
        `release` without ``after``, or because it is dropped, the next owner waits for these streams too.

        Args:
            stream: A CUDA stream of torch, or a native stream."""

    @abc.abstractmethod
    def release(self, after: Any = None) -> None:
        """Ends the lease. The pool may give its bytes to the next owner at once. Local; does not block the host.

        Args:
            after: The last use of the bytes, for which the next owner waits: a handle, a native event, or a stream (torch's or
                native) with all its work so far. None means that all uses have ended (CPU), or that they are in torch's
                current stream (CUDA).

        Raises:
            ReleasedTwice: The lease has ended already.
            CaptureError: The current stream is being captured in a CUDA graph, or the event was captured. The lease stays
                live.
            TypeError: ``after`` is of another type."""

    @abc.abstractmethod
    def leave_to_owners(self) -> None:
        """Lets the lease end with its last tensor. Nobody needs to release it, and it does not count as dropped. Local."""

    @abc.abstractmethod
    def lend(self) -> torch.Tensor:
        """Returns the lease's bytes as a uint8 tensor, which keeps the memory mapped, but not the lease live. Local."""


class Pool:
    """A caching allocator of communication memory: released memory stays in the pool and is reused. Methods are local, except
    `adopt` with ``comm``.

    Each release has a *fence*, the end of the last use; the next owner of the bytes waits for it. The memory that an `acquire`
    gets depends on the pool's mode:

    - dynamic: the smallest free range that fits.
    - traced (inside `trace`): the same. The pool records its calls.
    - planned (after `adopt`): the place of its key in the plan of the current `regime`. If the plan has no place, or another
      lease has the bytes, the lease gets a free range elsewhere, and the pool counts it. The first such lease after `adopt`
      warns.
    - strict (after ``adopt(strict=True)``): the place of its key, or the call raises `UnknownKey`, `SizeExceedsPlan` or
      `PlanDiverged`.

    A key keeps its address within a regime. Two pools never share memory. The bytes that an `acquire` gets depend only on the
    sizes and the order of calls, so ranks that make the same calls get the same offsets. A pool is thread-safe. A forked child
    cannot use its parent's pool.

    If a CUDA device has no memory left, the unused slabs of all pools and torch's caches are freed, and the pool tries once
    more. If that fails, it raises `PoolError`, which lists how much memory each of them has.

    Args:
        upstream: Where the pool gets its slabs. On the CPU ``"host"`` (private memory) or ``"shm"`` (memory that other
            processes can map). On a CUDA device ``"torch"`` (torch tensors, so that torch's memory accounting sees them) or
            ``"cuda"`` (cudaMalloc). None means ``"host"`` or ``"torch"``.
        align_bytes: Alignment of every lease, a power of two of at most 4096.
        min_slab_bytes: Smallest size of a slab. Smaller leases share one.
        poison: Fill memory with NaN when it is acquired and when it is released, and check that nobody has written beyond the
            end of a lease. Slow. ``BW_POOL_POISON=1`` has the same effect.
        device: The device, as torch names it. None means the CPU, or the current CUDA device if ``upstream`` is ``"torch"`` or
            ``"cuda"``.

    Raises:
        ValueError: An unknown upstream, an upstream of another kind of device, or a bad size."""

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
        """The index of the CUDA device, or -1 for the CPU."""
        return int(self._native.device)

    @classmethod
    def _of(cls, native_pool: Any, *, is_cache: bool = True) -> Pool:
        """The pool around a native one (a communicator's). ``is_cache``: it may be trimmed when memory is short."""
        pool = cls.__new__(cls)
        pool._wrap(native_pool, is_cache=is_cache)
        return pool

    def acquire(self, key: str, nbytes: int, stream: Any = None) -> Lease:
        """Returns a lease of ``nbytes`` bytes, not initialised. Local.

        Args:
            key: Name of the lease, in plans and in messages. Only one lease of a key may be live, but any number of leases
                with the empty key.
            nbytes: Number of bytes; 0 is allowed.
            stream: The stream that waits for the last users of these bytes. None means torch's current stream on CUDA; on the
                CPU the calling thread waits.

        Raises:
            KeyBusy: A lease of this key is live.
            PoolError: The system has no memory left.
            CaptureError: The stream is being captured in a CUDA graph, and the pool would have to grow, wait or poison.
                Nothing has changed. Release a lease that was acquired in a capture only after the last replay that uses it.
            UnknownKey: The pool is strict, and its plan does not have the key.
            SizeExceedsPlan: The pool is strict, and its plan has fewer bytes for the key.
            PlanDiverged: The pool is strict, and the plan expected another key, or a live lease has the bytes.
            TypeError: ``key`` is not a string, or ``nbytes`` is not an int.
            ValueError: ``nbytes`` is negative or out of range."""
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
        """Gets memory from the system, unless a lease of ``nbytes`` already finds a free range. Local.

        Args:
            nbytes: Size of the lease in bytes.
            slab_bytes: Size of the new slab, if it is larger than ``nbytes``. 0 means as much as the lease needs;
                ``min_slab_bytes`` does not apply."""
        self._native.reserve(expect_int(nbytes, "nbytes"), expect_int(slab_bytes, "slab_bytes"))

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a contiguous tensor in the pool, not initialised, as ``torch.empty`` does. Local.

        You do not release anything: the memory goes back to the pool when the last tensor over it is gone, including views and
        the tensors of running operations. On CUDA the memory then counts as used until the work that is at that time in the
        stream of this call is done, as with torch's own tensors. If another stream uses the tensor, keep the tensor until that
        use is done.

        If ranks must lease in one order (``Communicator(registered=True)``), they must also drop in one order. Prefer
        `acquire` and `Lease.release` there.

        Args:
            shape: The shape of the tensor.
            dtype: float32, bfloat16, float16, float64, int64, int32, int16, int8 or uint8.

        Raises:
            ValueError: A negative extent.
            TypeError: A shape or a dtype of the wrong type, or a dtype that is not listed above.
            PoolError: The system has no memory left.
            CaptureError: As in `acquire`."""
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
        """Records the leases of a ``with`` block. Local.

        ``with pool.trace("train") as trace:`` gives a `Trace`, which is complete when the block ends. Leases without a key are
        recorded too, but plans have no place for them.

        Args:
            name: Name of the trace, and of the plan and regime that are made from it.

        Raises:
            PoolError: Another trace is being recorded."""
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
        """Makes a plan for steps like the one in ``trace``. Local; the result depends only on the arguments.

        Args:
            trace: The record of one step.
            slack: For a role (the part of a key before the first ``/``), the number of further acquires of the role before a
                key's bytes go to another key. 0 needs the least memory, but an acquire may wait for the last use. 1 is like a
                double buffer.
            max_bytes: The most bytes that the plan may need.
            effort: As in `place`.

        Raises:
            BudgetTooSmall: The plan needs more than ``max_bytes``.
            ValueError: ``slack`` names a role that the trace does not have, or a negative number."""
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
        """Gives each key its place in the plans. Local; collective over the ranks of ``comm`` if you pass it.

        Each plan belongs to a regime of its name. All plans share one arena, which is as large as the largest plan needs. The
        new plans replace those before. If the call raises, nothing has changed. The calling thread waits for the last uses of
        the earlier arena.

        Args:
            plan: The plan of the regime that is current after the call.
            *more: Plans of other regimes.
            strict: Raise an error if an acquire diverges from the plan.
            comm: A communicator. Its ranks compare their plans and ``strict``.

        Raises:
            PoolBusy: Leases lie in places of the earlier plans (with ``comm``, on any rank).
            CrossRankMismatch: The ranks of ``comm`` have different plans. The message names the first difference.
            PoolError: The system has no memory left."""
        plans = (plan, *more)
        if comm is not None:
            expect_equal_plans(plans, comm, f"strict={bool(strict)}")
            everyone = comm.exchange(bytes([self.stats().planned_live_bytes > 0]))
            if busy := [rank for rank, told in enumerate(everyone) if told != b"\0"]:
                raise PoolBusy(f"adopt: leases of the earlier plans are live on ranks {busy}: end them first")
        self._native.adopt([each.to_native() for each in plans], not not strict)
        self._plans = plans

    @property
    def current_regime(self) -> str:
        """The name of the current plan; empty without plans."""
        return self._native.regime

    @contextlib.contextmanager
    def regime(self, name: str) -> Iterator[None]:
        """Makes the plan of this name current in a ``with`` block, for all threads. Local.

        Args:
            name: Name of an adopted plan.

        Raises:
            ValueError: The pool has no plan of this name."""
        before = self._native.regime
        self._native.regime = name
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # other plans were adopted inside
                self._native.regime = before

    def step_end(self) -> None:
        """Tells a pool with plans that a step is over. Local.

        The next step begins, also if the call raises.

        Raises:
            LeaseLeak: Keys of the plans are live that were not live at the end of the trace. The message names them.
            PlanDiverged: The pool is strict, and the step has acquired some keys of a regime, but not all."""
        self._native.end_step()

    def explain(self) -> str:
        """Returns the text of `Plan.explain` for each adopted plan. Local.

        Raises:
            PoolError: No plan was adopted through this object."""
        if not self._plans:
            raise PoolError("the pool has no plan: call adopt() first")
        return "\n".join(each.explain() for each in self._plans)

    # -----------------------------------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor lies in this pool's memory. Local.

        Args:
            tensor: A contiguous tensor.

        Raises:
            ValueError: The tensor is not contiguous."""
        return self._native.holds(tensor)

    def stats(self) -> PoolStats:
        """Returns the counters of the pool. Local."""
        return PoolStats(*self._native.stats())

    def check(self) -> None:
        """Checks the internal invariants of the pool. Local.

        Raises:
            PoolError: The first invariant that does not hold, such as a write beyond the end of a lease with ``poison=True``.
        """
        self._native.check()

    def expect_no_leases(self) -> None:
        """Checks that no lease is live. Local.

        Raises:
            LeaseLeak: Leases are live. The message names them."""
        self._native.expect_no_leases()

    def trim(self) -> int:
        """Gives slabs without leases back to the system, and returns their number of bytes. Local.

        The calling thread waits for the last uses of these slabs. The arena of the plans stays."""
        return self._native.trim()


def _warn_of_divergence(first: str) -> None:
    """The native pool calls it, from `Pool.acquire`."""
    warnings.warn(
        f"the pool has left its plan: {first}. Such leases take extra memory: stats() counts them, explain() describes "
        "the plan. If your steps have changed for good, trace one and adopt its plan",
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
