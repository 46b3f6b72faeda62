"""Launch: the reduce-scatters of a window's buckets, the memory that these read, and how much of it there may be.

Carries out what the schedule decides (csrc/plan/schedule.h).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm.handle import Handle
from bucketwheel.comm.replicas import Reducer
from bucketwheel.device import join, stream_of, torch_device
from bucketwheel.grads.bucket import BucketSlot, BucketSlots, GradBucket, Memory
from bucketwheel.grads.graph_capture import CapturedBlock, CapturedBlocks
from bucketwheel.native import core
from bucketwheel.pool.pool import Lease, Pool

__all__ = ["Launcher", "Reductions"]

_MEMORY_WINDOWS = 4  # how long ranks are taken to run different graphs after a window in which they did

# How long the hooks of a window wait for memory before they take more ([Note: soft bound]): at first, and if peers never
# come in time.
_MOST_PATIENCE_S, _LEAST_PATIENCE_S = 0.05, 0.0005
_CLOSING_PATIENCE_S = 1.0  # for peers that are known to launch the same


class Reductions:
    """The reduce-scatters of one rank that are launched, and the memory that buckets have. Not thread-safe.

    [Note: soft bound] Before a bucket takes memory, fewer than ``limit`` reduce-scatters should hold some. A peer that runs
    another graph may launch its part of them only when it closes its window, and before that it may wait for this rank (a
    loss all-reduce before ``step``). So nobody waits without a limit, and a rank that is ahead takes more memory instead:

    - On the CPU a hook waits for a moment. If that is in vain it takes more memory, and does not wait again in this
      window; each window that has waited in vain halves the patience of the next. A bucket's lease ends when its handle
      has completed and not before, so that an acquire never waits for it.
    - On CUDA nobody waits. The memory of a reduce-scatter that all ranks have issued goes to the next bucket at once, which
      the stream orders behind it. One that a peer has yet to issue keeps its memory: the stream would wait for that peer.
    - On CUDA between hosts (``is_blind``: not `Communicator.sees_peers`) a rank does not see what the others have issued.
      When a window closes they agree on whether all of them had launched every bucket before. If one had not, then in the
      next few windows no memory goes on to another bucket before the window ends. (In the first such window memory goes on,
      and a stream may wait for a peer: if your ranks run different graphs, set ``max_inflight_buckets`` high.)

    Buckets that gather count beside these: gradients that have come must lie somewhere. docs/memory.md has what that makes
    at most.
    """

    def __init__(self, device: int, limit: int, *, is_blind: bool = False) -> None:
        self._device = device
        self._limit = limit
        self._is_blind = is_blind
        # What has been launched and may still hold memory. An entry goes when its memory is given on.
        self._running: list[tuple[Handle, Lease | CapturedBlock]] = []
        # The last one of the window, also if it holds no memory any more. Until the window has waited for it.
        self._last: Handle | None = None
        self._leases: list[Lease] = []  # those that are live, and perhaps some that were
        self.peak_bytes = 0  # the most that was leased at once, ever
        # CPU: how long a hook waits, whether it does (until one of the window has waited in vain), and whether the window is
        # closing, so that all ranks launch the same. The last two are set anew at the end of a window.
        self.patience_s = _MOST_PATIENCE_S
        self.is_patient = True
        self._is_closing = False
        self._uneven_windows = 0  # between hosts: in how many more windows memory stays where it is

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
        """[Note: soft bound]"""
        if self._device < 0:
            self._wait_for_room()
        elif not self._uneven_windows:
            self._retire(keep=self._limit - 1)

    def _wait_for_room(self) -> None:
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
        is_captured = core.is_capturing(self._device)
        for handle, _ in self._running:
            if not is_captured or handle.is_captured:  # in a capture the others were waited for before it began
                handle.wait()
        if self._last is not None:  # it ends after all before it, also those that `_running` has no more
            self._last.wait()
            self._last = None
        self._retire()

    def forget_captured(self) -> None:
        """What has been captured never runs."""
        self._running = [(handle, memory) for handle, memory in self._running if not handle.is_captured]
        self._last = None

    def end_window(self, *, is_complete: bool = True) -> None:
        """``is_complete``: all ranks had launched everything before they closed it."""
        if self._is_blind:
            self._uneven_windows = max(self._uneven_windows - 1, 0) if is_complete else _MEMORY_WINDOWS
        self.patience_s *= 2.0 if self.is_patient else 0.5
        self.patience_s = min(max(self.patience_s, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)
        self.is_patient = True
        self._is_closing = False

    def _retire(self, keep: int = 0) -> None:
        """Ends the leases of the reduce-scatters that are done, or, on CUDA, in a stream that the next owner can wait for.

        The last ``keep`` stay: the next owner of their memory would wait for what has only just begun.
        """
        last = max(len(self._running) - keep, 0)
        left = []
        for handle, memory in self._running[:last]:
            if handle.is_ordered():
                memory.release(after=handle)
            else:
                left.append((handle, memory))
        self._running = left + self._running[last:]


class Launcher:
    """The buckets of one rank on their way to the shards. Not thread-safe.

    ``arrivals``: the native hooks, which are told where buckets gather. ``slots``: where the communicator's pool is
    registered memory, [Note: bucket slots].
    """

    def __init__(
        self,
        comm: Reducer,
        buckets: Sequence[GradBucket],
        arrivals: Any,
        *,
        slots: BucketSlots | None,
        max_inflight: int,
    ) -> None:
        self._comm = comm
        self._is_on_cpu = comm.device < 0
        self._buckets = list(buckets)
        self._arrivals = arrivals
        self._slots = slots
        self.pool = comm.pool if slots is None else Pool(device=torch_device(comm.device))
        self.reductions = Reductions(comm.device, max_inflight, is_blind=not comm.sees_peers)
        self._captured = CapturedBlocks(comm.device, max((bucket.nbytes for bucket in self._buckets), default=0))
        # CUDA: the stream in which the shards were prepared for the sums of the window. Set anew by each window.
        self._prepared_in: torch.cuda.Stream | None = None

    def begin_window(self, device: torch.device, *, is_captured: bool) -> None:
        """A window opens. The current stream has prepared the shards for its sums."""
        if not self._is_on_cpu:
            self._prepared_in = stream_of(device)
        if is_captured:  # [Note: captured windows]
            for bucket in self._buckets:
                bucket.take_streams()  # of late gradients that were dropped, and outside of the graph
            self._forget_uses()

    def carry_out(self, stores: Sequence[Any], launches: Sequence[Any], flat: Tensor) -> None:
        """What follows from the gradient ``flat`` (1-D, in memory order)."""
        for action in sorted([*stores, *launches], key=lambda action: action.bucket) if launches else stores:
            # A bucket is launched before a later one of the same parameter needs memory, or its slot.
            if isinstance(action, core.Launch):
                self.launch(action)
                continue
            bucket = self._buckets[action.bucket]
            memory = bucket.store(self._acquire, action.param, flat, late=action.late, add=action.add)
            if not action.late and self._is_on_cpu:
                self._arrivals.open(bucket.index, memory)

    def _acquire(self, bucket: GradBucket, late: bool) -> Memory:
        """Memory for gradients that arrive."""
        slot = None if self._slots is None or late else self._slots.try_enter(bucket.index)
        return slot if slot is not None else self._lease(bucket, late)

    def _acquire_to_launch(self, bucket: GradBucket, late: bool) -> Memory:
        """Memory for a bucket that is launched without any."""
        return self._slots.enter(bucket.index) if self._slots is not None else self._lease(bucket, late)

    def _lease(self, bucket: GradBucket, late: bool) -> Memory:
        if not core.is_capturing(self._comm.device):
            return self.reductions.lease(self.pool, bucket, late)
        self.reductions.make_room()
        return self._captured.take()

    def launch(self, action: Any) -> None:
        """Issues a bucket's reduce-scatter, which adds to the shard or replaces what it holds."""
        bucket = self._buckets[action.bucket]
        self._arrivals.shut(bucket.index)
        self._join_streams(bucket)
        memory, flat = bucket.take(self._acquire_to_launch, action.absent, late=action.late)
        if self._slots is not None:
            memory, flat = self._slots.bring_in(bucket.index, memory, flat, late=action.late)
        bucket.sink.begin(action.late or bucket.accumulates)
        self.reductions.add(self._comm._reduce_scatter_into(flat, bucket.sink), memory)

    def _join_streams(self, bucket: GradBucket) -> None:
        """CUDA: the current stream waits for those in which gradients were stored (autograd may use several), and for the one
        in which the shards were prepared for the sums: the reduce-scatter must be behind them."""
        for stream in () if self._is_on_cpu else (self._prepared_in, *bucket.take_streams()):
            if stream is not None:
                join(stream.device, stream)

    def end_captured(self) -> None:
        """A captured window has ended, and the current stream is behind all of it."""
        self._captured.end_window()
        self._forget_uses()

    def forget_captured(self) -> None:
        """A captured window will never end."""
        for bucket in self._buckets:
            bucket.take_streams()
            bucket.drop_memory()
        self.reductions.forget_captured()
        self.end_captured()

    def _forget_uses(self) -> None:
        if self._slots is not None:
            self._slots.forget_readers()
        self._comm._begin_capture()

    def memory(self) -> dict[str, int]:
        """Bytes of buckets: now, at the most so far, in bucket slots, and of captured windows."""
        return {
            "buckets": sum(lease.nbytes for lease in self.reductions.live),
            "buckets_peak": self.reductions.peak_bytes,
            "slots": 0 if self._slots is None else self._slots.nbytes,
            "captured": self._captured.nbytes,
        }

    def release(self) -> None:
        """Gives what buckets hold back, unreduced, and registered memory."""
        for bucket in self._buckets:
            self._arrivals.shut(bucket.index)
            self._join_streams(bucket)
            bucket.drop_memory()
        if self._slots is not None:
            self._slots.release()
        self._captured.clear()
