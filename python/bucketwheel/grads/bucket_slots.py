"""Bucket slots: fixed pieces of registered memory in which the buckets of a rank take turns.

NCCL reads the input of a reduce-scatter where it lies on the other ranks, so that has to be the same place on all of
them. Which bytes of a pool a bucket would get depends on the order in which gradients arrive, and that may differ.
What may not: a window launches every bucket once, in index order, and its late rounds after all of these (`schedule`).

[Note: bucket slots] So bucket b is reduced from slot b % count, which all ranks leased alike when the optimizer was made.
Its gradients are packed there unless the bucket is too early: another one has still to go through the slot before it.
Where gradients come roughly in the order of the buckets none is. A bucket that is too early, and everything late,
gathers in ordinary memory, which may lie anywhere, and is copied into the slot when it is launched.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from bucketwheel.comm.handle import Handle
from bucketwheel.grads.graph_capture import CapturedBlock
from bucketwheel.pool.pool import Lease, Pool

__all__ = ["BucketSlot", "BucketSlots"]

_numbers = itertools.count()  # of optimizers: what one has in flight may outlive it


class BucketSlot:
    """What a bucket has in the place of a `Lease` of its own."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._reader: Handle | None = None  # of what lies here; None once that may be overwritten

    @property
    def place(self) -> tuple[int, int]:
        return self._lease.place

    @property
    def nbytes(self) -> int:
        return self._lease.nbytes

    def enter(self) -> BucketSlot:
        """The current stream waits for the reduce-scatter that reads what lies here: peers would get the next bucket's.

        Not for one that is over, which a stream that is captured in a CUDA graph could not wait for.
        """
        if self._reader is not None and (self._reader.is_captured or not self._reader.query()):
            self._reader.wait()
        self._reader = None
        return self

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return self._lease.tensor(dtype, shape)

    def release(self, after: Handle | None = None) -> None:
        """The next bucket may `enter`, and will wait for ``after``."""
        self._reader = after

    def forget(self) -> None:
        """Whoever enters next need not wait."""
        self._reader = None

    def end(self) -> None:
        """Nobody enters again. Whoever wrote here since the last reduce-scatter is in the current stream."""
        self._lease.release(after=self._reader)


class BucketSlots:
    """``count`` slots (or one for each bucket, if that is less) for buckets of ``sizes_bytes``. All ranks make the same."""

    def __init__(self, pool: Pool, sizes_bytes: Sequence[int], count: int) -> None:
        count = min(count, len(sizes_bytes))
        largest = [max(sizes_bytes[first::count]) for first in range(count)]
        number = next(_numbers)
        self._slots = [BucketSlot(pool.acquire(f"slot/{number}/{first}", size)) for first, size in enumerate(largest)]
        self._bucket_count = len(sizes_bytes)
        self._next = 0  # which bucket this window launches next

    @property
    def places(self) -> list[tuple[int, int]]:
        """`Lease.place` of each."""
        return [slot.place for slot in self._slots]

    @property
    def nbytes(self) -> int:
        """Of all slots together."""
        return sum(slot.nbytes for slot in self._slots)

    def _of(self, bucket: int) -> BucketSlot:
        return self._slots[bucket % len(self._slots)]

    def try_enter(self, bucket: int) -> BucketSlot | None:
        """The bucket's slot, for its first gradients; None if it is too early."""
        return self._of(bucket).enter() if bucket < self._next + len(self._slots) else None

    def enter(self, bucket: int) -> BucketSlot:
        """The bucket's slot, for a bucket that is launched with nothing in it."""
        return self._of(bucket).enter()

    def bring_in(
        self, bucket: int, memory: Lease | BucketSlot | CapturedBlock, flat: Tensor, *, late: bool
    ) -> tuple[BucketSlot, Tensor]:
        """Before a bucket's launch: what is in ``flat``, of ``memory``, in its slot."""
        assert late or bucket == self._next, (bucket, self._next)
        slot = self._of(bucket)
        if not isinstance(memory, BucketSlot):
            flat = slot.enter().tensor(flat.dtype, flat.shape).copy_(flat)
            memory.release()
        if not late:
            self._next = (bucket + 1) % self._bucket_count
        return slot, flat

    def forget(self) -> None:
        """The next window is in another CUDA graph, or in none: what has read the slots is behind the stream that closed the
        last one, or has never been."""
        self._next = 0
        for slot in self._slots:
            slot.forget()

    def release(self) -> None:
        """Gives the memory back to the pool; behind what the current stream has."""
        for slot in self._slots:
            slot.end()
        self._slots.clear()
