"""Memory: how many bytes a rank's optimizer takes, from sizes alone. docs/memory.md explains each term.

Pure: integers in, integers out. `BucketMemory` plays a window as the schedule would run it where every reduce-scatter
takes so long that the bound on those in flight is reached, so what is measured is at most that, and equal to it where
communication is slow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ALIGN_BYTES", "SLAB_BYTES", "BucketMemory", "BucketSize", "arrivals_in_order", "lease_bytes", "slab_bytes"]

ALIGN_BYTES = 512  # of a lease
SLAB_BYTES = 8 << 20  # the least that a pool gets from the system
_PAGE_BYTES = 4096


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def lease_bytes(nbytes: int) -> int:
    """What a lease of ``nbytes`` takes of its pool."""
    return _round_up(max(nbytes, 1), ALIGN_BYTES)


def slab_bytes(leases: Iterable[int]) -> int:
    """What a pool reserves for leases of these bytes that are live together and taken in this order.

    Each goes where the least is left over; a new slab is for what fits nowhere.
    """
    reserved = 0
    free: list[int] = []
    for size in map(lease_bytes, leases):
        fitting = [left for left in free if left >= size]
        if fitting:
            free.remove(min(fitting))
            free.append(min(fitting) - size)
        else:
            slab = _round_up(max(size, SLAB_BYTES), _PAGE_BYTES)
            reserved += slab
            free.append(slab - size)
    return reserved


@dataclass(frozen=True)
class BucketSize:
    """A bucket's bytes, and the parameters that have elements in it."""

    nbytes: int
    params: Collection[int]


def arrivals_in_order(buckets: Sequence[BucketSize]) -> list[int]:
    """All parameters from the last to the first: the order of gradients that buckets are laid out for."""
    return sorted({param for bucket in buckets for param in bucket.params}, reverse=True)


class BucketMemory:
    """The memory of a rank's buckets in one window. ``peak_bytes`` is the most that buckets had at once so far,
    ``peak_leased_bytes`` what that took of the pool, ``peak_count`` the most buckets, and ``peak_gathering`` the most
    that waited for gradients or, with late ones, for the window's end: peak_count < limit + peak_gathering.

    ``limit``: ``max_inflight_buckets``. ``overlap``: buckets are reduced when they are full, not at the window's end.
    ``slots``: how many bucket slots there are in registered memory, which does not count here; 0: none.
    ``due``: with ``static_graph=True``, how many gradients of each parameter this rank's first window had; buckets wait
    for as many (None: for one of each). ``used``: the parameters that had gradients lately, so that buckets wait for
    them (None: all).
    """

    def __init__(
        self,
        buckets: Sequence[BucketSize],
        limit: int,
        *,
        overlap: bool = True,
        slots: int = 0,
        due: Mapping[int, int] | None = None,
        used: Collection[int] | None = None,
    ) -> None:
        self.peak_bytes = self.peak_leased_bytes = self.peak_count = self.peak_gathering = 0
        self._buckets = buckets
        self._limit = limit
        self._overlap = overlap
        self._slots = slots
        self._missing: dict[int, int] = {}  # gradients that a parameter is waited for
        self._buckets_of: dict[int, list[int]] = {}
        for number, bucket in enumerate(buckets):
            for param in bucket.params:
                self._buckets_of.setdefault(param, []).append(number)
                if used is None or param in used:
                    self._missing[param] = (due or {}).get(param, 1)
        self._next = 0  # the bucket that is launched next
        self._gathering: dict[int, int] = {}  # bytes, by bucket
        self._late: dict[int, int] = {}
        self._running: list[int] = []

    @property
    def _held(self) -> list[int]:
        return [size for size in (*self._running, *self._gathering.values(), *self._late.values()) if size]

    @property
    def count(self) -> int:
        """How many buckets have memory now."""
        return len(self._held)

    @property
    def late(self) -> set[int]:
        """The buckets that have late memory."""
        return set(self._late)

    def gradient(self, param: int) -> None:
        """A gradient comes."""
        if self._overlap:
            self._missing[param] = self._missing.get(param, 0) - 1
        first = self._next
        for number in self._buckets_of.get(param, []):
            if number < first:
                self._acquire(self._late, number)
            else:
                while self._overlap and self._next < number and self._is_full(self._next):
                    self._launch()
                self._acquire(self._gathering, number)
        while self._overlap and self._next < len(self._buckets) and self._is_full(self._next):
            self._launch()

    def close(self, late: Collection[int] = ()) -> None:
        """The window ends. ``late``: buckets in which other ranks had late gradients."""
        while self._next < len(self._buckets):
            self._launch()
        self._running.clear()
        for number in sorted({*late, *self._late}):
            if not self._slots:
                self._acquire(self._late, number)
                self._running.append(self._late.pop(number))
            else:
                self._late.pop(number, None)
        self._running.clear()

    def _is_full(self, number: int) -> bool:
        return all(self._missing.get(param, 0) <= 0 for param in self._buckets[number].params)

    def _launch(self) -> None:
        number = self._next
        if not self._slots:
            self._acquire(self._gathering, number)
            self._running.append(self._gathering.pop(number))
        else:
            self._gathering.pop(number, None)
        self._next += 1

    def _acquire(self, memory: dict[int, int], number: int) -> None:
        if number in memory:
            return
        is_late = memory is self._late
        if self._slots and not is_late and number < self._next + self._slots:
            memory[number] = 0  # in its slot
            return
        del self._running[: max(len(self._running) - (self._limit - 1), 0)]
        memory[number] = self._buckets[number].nbytes
        held = self._held
        self.peak_bytes = max(self.peak_bytes, sum(held))
        self.peak_leased_bytes = max(self.peak_leased_bytes, sum(map(lease_bytes, held)))
        self.peak_count = max(self.peak_count, len(held))
        self.peak_gathering = max(self.peak_gathering, len(held) - len(self._running))


@dataclass(frozen=True)
class SpaceSize:
    """The parameters of one dtype: elements of the flat space and how many are padding, and bytes an element."""

    numel: int
    padding: int
    param_bytes: int
    grad_bytes: int  # in the gradient shard
    kept_bytes: Mapping[str, int]  # of each state, by name


def expected_memory(spaces: Sequence[SpaceSize], ranks: int) -> dict[str, int]:
    """What is there all the time, of ``ranks`` that shard: the same names as in `ShardedAdamW.memory_summary`."""
    found = {
        "params": sum(space.numel * space.param_bytes for space in spaces),
        "params_padding": sum(space.padding * space.param_bytes for space in spaces),
        "grads": sum(space.numel // ranks * space.grad_bytes for space in spaces),
        "states": sum(space.numel // ranks * sum(space.kept_bytes.values()) for space in spaces),
    }
    for space in spaces:
        for name, nbytes in space.kept_bytes.items():
            found[name] = found.get(name, 0) + space.numel // ranks * nbytes
    return found


def partial_sum_bytes(shards: Iterable[tuple[int, int]], replicas: int, limit: int) -> int:
    """Of ``limit`` buffers for partial sums. ``shards``: of each bucket, the elements of a shard and the bytes of a sum."""
    largest = max((_round_up(numel, replicas) * nbytes for numel, nbytes in shards), default=0)
    return limit * lease_bytes(largest) if largest else 0


def slot_bytes(buckets: Sequence[int], limit: int) -> int:
    """Of the bucket slots in registered memory, for buckets of these bytes."""
    count = min(limit, len(buckets))
    return sum(lease_bytes(max(buckets[first::count])) for first in range(count))


def wire_bytes(buckets: int, params: int, partial_sums: int, ranks: int, replicas: int) -> int:
    """What a rank sends in a step with one window: its part of all reduce-scatters and all-gathers, of these bytes.

    ``partial_sums``: bytes of a rank's shards of all buckets, as they go through the replicas.
    """
    among_ranks = (buckets + params) // ranks * (ranks - 1)
    return among_ranks + 2 * partial_sums * (replicas - 1) // replicas
