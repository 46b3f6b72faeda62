"""In flight: the reduce-scatters that are launched, the bucket memory they hold, and how much of that there may be."""

from __future__ import annotations

import time

from bucketwheel.comm.handle import Handle
from bucketwheel.device import CPU
from bucketwheel.grads.bucket import GradBucket, Memory
from bucketwheel.grads.bucket_slots import BucketSlot
from bucketwheel.grads.graph_capture import CapturedBlock, is_capturing
from bucketwheel.pool.pool import Lease, Pool

__all__ = ["Inflight"]

_MEMORY_WINDOWS = 4  # how long ranks are taken to run different graphs after one in which they did

# How long a window's hooks wait for memory before they take more ([Note: soft bound]): at first, and when peers never
# come.
_MOST_PATIENCE_S, _LEAST_PATIENCE_S = 0.05, 0.0005
_CLOSING_PATIENCE_S = 1.0  # for peers that are known to launch the same


class Inflight:
    """The reduce-scatters of one rank, all of one communicator. Not thread-safe."""

    def __init__(self, device: int, limit: int, *, is_blind: bool = False) -> None:
        """``is_blind``: not `Communicator.sees_peers`."""
        self._device = device
        self._is_on_cpu = device == CPU
        self._limit = limit
        self._is_blind = is_blind
        self._uneven_windows = 0  # how many more to hold memory in
        self._running: list[tuple[Handle, Lease | CapturedBlock]] = []
        self._last: Handle | None = None  # the window's, whoever has its memory
        self.patience_s = _MOST_PATIENCE_S
        self.is_patient = True  # this window has not waited in vain
        self._is_closing = False
        self._leases: list[Lease] = []  # those that are live, and perhaps some that were
        self.peak_bytes = 0  # the most that was leased at once

    @property
    def live(self) -> list[Lease]:
        """The memory that buckets have now: of gradients that gather, and of reduce-scatters."""
        self._leases = [lease for lease in self._leases if lease.is_live]
        return self._leases

    def lease(self, pool: Pool, bucket: GradBucket, late: bool) -> Lease:
        """Memory for a bucket, once there is room."""
        self.make_room()
        lease = bucket.lease_of(pool, late)
        self._leases = [*self.live, lease]
        self.peak_bytes = max(self.peak_bytes, sum(one.nbytes for one in self._leases))
        return lease

    def add(self, handle: Handle, memory: Memory) -> None:
        self._last = handle
        if isinstance(memory, BucketSlot):  # the next bucket has no other
            memory.release(after=handle)
        else:
            self._running.append((handle, memory))

    def make_room(self) -> None:
        """[Note: soft bound] Before a bucket takes memory: fewer than ``limit`` reduce-scatters should hold some.

        On the CPU the hook waits for that, but only for a moment. A peer that runs another graph may launch its half of
        them only when it closes its window, and it may wait for this rank before it does (a loss all-reduce before
        ``step``). So after a moment the hook takes more memory instead, and does not wait again in this window. Each
        window that has waited in vain halves the patience of the next. For the same reason a bucket's lease ends when
        its handle has completed and not before: an acquire never waits for it.

        On CUDA nobody waits. What all ranks have issued gives its memory on behind itself, in the stream. What peers
        have yet to issue keeps it: a stream that waits for that memory would wait for a peer that comes, if it runs
        another graph, only when it closes its window, and if the peer in turn waits for this stream first (a loss
        all-reduce before ``step``), both would until the time limit. So a rank that is ahead holds as many buckets as
        it has launched since.

        Between hosts a rank does not see what the others have issued. There the ranks agree on whether all of them had
        launched everything before they closed the window. Once one had not, memory stays where it is until the window
        ends, in the next few windows too. (The first such window is bound as the others are: who knows that graphs
        differ can set ``max_inflight_buckets`` high.)

        Buckets that gather count beside these: gradients that have come must lie somewhere. docs/memory.md has what
        that makes at most.
        """
        if not self._is_on_cpu:
            if not self._uneven_windows:
                self._retire(self._limit - 1)
            return
        self._retire()
        if not self.is_patient and not self._is_closing:
            return
        deadline = time.monotonic() + (_CLOSING_PATIENCE_S if self._is_closing else self.patience_s)
        while len(self._running) >= self._limit and time.monotonic() < deadline:
            self._running[0][0].await_order(max(deadline - time.monotonic(), 0.0))
            self._retire()
        has_room = len(self._running) < self._limit
        if self._is_closing:
            self._is_closing = has_room
        else:
            self.is_patient = has_room

    def begin_close(self) -> None:
        """All ranks launch what is left of the window now, so room is worth waiting for."""
        self._is_closing = True

    def wait(self) -> None:
        """Waits for all of them. CUDA: the current stream waits, and this thread until all ranks have issued them."""
        captured = is_capturing(self._device)
        for handle, _ in self._running:
            if not captured or handle.is_captured:  # an earlier window, before the capture, has waited for the others
                handle.wait()
        if self._last is not None:  # behind those before it, which may have given their memory on
            self._last.wait()
            self._last = None
        self._retire()

    def forget_captured(self) -> None:
        """What has been captured never runs."""
        self._running = [(handle, memory) for handle, memory in self._running if not handle.is_captured]
        self._last = None

    def end_window(self, is_complete: bool = True) -> None:
        """``is_complete``: all ranks had launched everything before they closed it."""
        if self._is_blind:
            self._uneven_windows = max(self._uneven_windows - 1, 0) if is_complete else _MEMORY_WINDOWS
        self.patience_s *= 2.0 if self.is_patient else 0.5
        self.patience_s = min(max(self.patience_s, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)
        self.is_patient = True
        self._is_closing = False

    def _retire(self, keep: int = 0) -> None:
        """Ends the leases of the reduce-scatters that are done, or, on CUDA, in a stream that the next owner can wait
        for.

        The last ``keep`` stay: the next owner of their memory would wait for what has only just begun.
        """
        last = max(len(self._running) - keep, 0)
        left = []
        for handle, lease in self._running[:last]:
            if handle.is_ordered():
                lease.release(after=handle)
            else:
                left.append((handle, lease))
        self._running = left + self._running[last:]
