"""Slots: buffers that take turns in one piece of memory, each at the place that a plan has for it.

>>> plan = plan_slots("turns", [4096, 8192, 4096], [(0, 2), (1, 3), (2, 3)])
>>> plan.total_bytes, plan.placement.offsets["turns/0"] == plan.placement.offsets["turns/2"]
(12288, True)

For what is done in the same order in every step. Who keeps to that order finds the bytes of its slot free. While they are in
use by another slot nobody can enter: who comes in another order takes memory on the *side*.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.native import core, env
from bucketwheel.pool.placement import Interval, aligned
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.pool import Lease, Pool

_numbers = itertools.count()  # of leases of slots: what one has in flight may outlive it


def plan_slots(name: str, sizes: Sequence[int], intervals: Sequence[Interval]) -> Plan:
    """For buffers of ``sizes`` bytes that are in use in the half-open ``intervals`` of steps. A pure function."""
    keys = [f"{name}/{number}" for number in range(len(sizes))]
    return Plan.of(name, dict(zip(keys, sizes, strict=True)), {k: [i] for k, i in zip(keys, intervals, strict=True)})


class Slot:
    """One turn of one buffer: what is there in the place of a `Lease` of its own."""

    def __init__(self, slots: Slots, begin: int, nbytes: int) -> None:
        self._slots = slots
        self.begin, self.end, self.nbytes = begin, begin + nbytes, nbytes
        self.is_live = False  # from `take` to `release`, or until the slots forget it

    def shares_bytes(self, other: object) -> bool:
        """Whether ``other`` is a slot of the same memory, of which some bytes are in this one too."""
        if not isinstance(other, Slot) or other._slots is not self._slots:
            return False
        return other.begin < self.end and self.begin < other.end

    @property
    def is_free(self) -> bool:
        return not any(one.shares_bytes(self) for one in self._slots.live)

    def try_enter(self) -> bool:
        """Takes the bytes into use, behind their last users, for which the current stream waits. False if they are in use."""
        slots = self._slots
        if not self.is_free:
            return False
        if (after := self.last_use()) is not None:
            event = _event(after)
            event.synchronize() if slots.device < 0 else core.current_stream(slots.device).wait(event)
        self.take()
        if slots.poisons and not core.is_capturing(slots.device):
            slots.memory.narrow(0, self.begin, self.nbytes).fill_(0xFF)  # NaN, as in pools
        return True

    def last_use(self) -> Any:
        """What who enters has to wait for: a handle or native event, or None."""
        for before, after, _ in reversed(self._slots.ends):
            if before.shares_bytes(self):
                # Of a capture that goes on there is nothing to ask: all ends are of it.
                return after if core.is_capturing(self._slots.device) or not _event(after).query() else None
        return None

    def take(self) -> None:
        """`try_enter` of a free one, for who has waited for `last_use`, or will."""
        slots = self._slots
        slots.ends = [one for one in slots.ends if one[0].begin < self.begin or one[0].end > self.end]
        slots.live.append(self)
        self.is_live = True

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor of one dimension over the first bytes."""
        (numel,) = shape
        return self._slots.memory.narrow(0, self.begin, numel * dtype.itemsize).view(dtype)

    def release(self, after: Any = None) -> None:
        """Whoever enters next waits for ``after``, a handle; None: for what the current stream holds now (CUDA)."""
        if not self.is_live:
            return  # forgotten
        slots, self.is_live = self._slots, False
        slots.live.remove(self)
        _, last, seq = slots.ends[-1] if slots.ends else (None, None, -1)
        if after is None and slots.device >= 0:
            stream = core.current_stream(slots.device)
            if last is not None:  # who enters waits for the last end alone
                stream.wait(_event(last))
            after = stream.record()
        if after is not None:
            at, seq = len(slots.ends), getattr(after, "seq", seq)
            while at and slots.ends[at - 1][2] > seq:
                at -= 1
            slots.ends.insert(at, (self, after, seq))


def _event(after: Any) -> Any:
    return getattr(after, "event", after)


class Slots:
    """The memory of a plan, and who uses what of it. Not thread-safe.

    What ends a turn (``after`` of `Slot.release`) ends behind what has ended turns before, as operations of one communicator do;
    those are told apart by their ``seq``, whatever the order of the releases.

    ``shares_with``: by buffer, the last one before it that has some of its bytes; -1: none.
    """

    def __init__(self, plan: Plan, memory: Tensor, device: int, lease: Lease | None = None) -> None:
        self.plan = plan
        self.memory = memory  # bytes, of ``lease`` or torch's own
        self.lease = lease
        self.device = device
        self.live: list[Slot] = []
        # The ends of turns some of whose bytes nobody has entered since, in their order: the slot, a handle or native event,
        # and the ``seq`` of the last operation that this is behind.
        self.ends: list[tuple[Slot, Any, int]] = []
        self.poisons = lease is not None and env.flag("BW_POOL_POISON")
        self.sizes = [aligned(size, plan.align) for size in plan.sizes.values()]
        self.offsets = [plan.placement.offsets[key] for key in plan.sizes]
        each = [self.slot(number) for number in range(len(self.sizes))]
        self.shares_with = [
            next((before for before in reversed(range(number)) if slot.shares_bytes(each[before])), -1)
            for number, slot in enumerate(each)
        ]

    @classmethod
    def leased(cls, plan: Plan, pool: Pool) -> Slots:
        pool.reserve(plan.total_bytes)
        lease = pool.acquire(f"slots/{next(_numbers)}", plan.total_bytes)
        return cls(plan, lease.tensor(torch.uint8, (plan.total_bytes,)), pool.device, lease)

    def slot(self, number: int) -> Slot:
        """For a turn of this buffer."""
        return Slot(self, self.offsets[number], self.sizes[number])

    def forget(self) -> None:
        """Ends all turns. What comes next is in another CUDA graph, or in none: what has used the memory is behind the current
        stream, or will never run."""
        for slot in self.live:
            slot.is_live = False
        self.live.clear()
        self.ends.clear()

    def release(self) -> None:
        """Gives the memory back to its pool, behind the last end. Whoever wrote since is in the current stream. What is in use
        now, by operations that own its tensors, keeps all of it until they have ended."""
        if self.lease is not None and not self.live:
            self.lease.release(after=self.ends[-1][1] if self.ends else None)
        self.lease, self.memory = None, torch.empty(0, dtype=torch.uint8, device="cpu")
        self.forget()
