"""Launch: the reduce-scatters of a window's buckets, the memory that these read, and how much of it there may be.

Carries out what the schedule decides (csrc/plan/schedule.h).

[Note: bucket slots] A bucket has a slot, by a plan for gradients that come in the order of the buckets (`window_plan`). Its
slot is not for it while another bucket uses some of these bytes, nor while one has still to be launched from them: such a
bucket is *too early*. What finds no slot, and what is late, has memory on the *side*.

In registered memory a bucket is reduced from its slot and from nowhere else: NCCL reads the input of a reduce-scatter where it
lies on the other ranks, so that must be the same place on all of them. Which bytes of a pool a bucket would get depends
on the order in which gradients arrive, and ranks may differ in that. They never differ in this: a window launches every
bucket once, in index order, and its late rounds after all of these. So what was packed on the side is copied into the slot
when it is launched, and there bytes go on to the next bucket whether peers have read them or not: the stream waits.
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
from bucketwheel.grads.bucket import GradBucket, Memory
from bucketwheel.grads.graph_capture import CapturedSide
from bucketwheel.native import core
from bucketwheel.pool.placement import aligned
from bucketwheel.pool.pool import Pool
from bucketwheel.pool.slots import Slot, Slots

_LEAST_SIDE_SLAB_BYTES = 1 << 20  # small buckets on the side share one
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
      window; each window that has waited in vain halves the patience of the next. Memory goes on when its handle has
      completed and not before, so that taking it never waits.
    - On CUDA nobody waits. The memory of a reduce-scatter that all ranks have issued goes to the next bucket at once, which
      the stream orders behind it. One that a peer has yet to issue keeps its memory: the stream would wait for that peer.
    - On CUDA between hosts (``is_blind``: not `Communicator.sees_peers`) a rank does not see what the others have issued.
      When a window closes they agree on whether all of them had launched every bucket before. If one had not, then in the
      next few windows no memory goes on to another bucket before the window ends. (In the first such window memory goes on,
      and a stream may wait for a peer: if your ranks run different graphs, set ``max_inflight_buckets`` high.)

    Buckets that gather count beside these: gradients that have come must lie somewhere. docs/memory.md has what that makes
    at most.
    """

    def __init__(self, device: int, limit: int, *, is_blind: bool = False, is_registered: bool = False) -> None:
        self._device = device
        self._limit = limit
        self._is_blind = is_blind
        self._is_registered = is_registered  # [Note: bucket slots]
        # What has been launched and may still hold memory. An entry goes when its memory is given on.
        self._running: list[tuple[Handle, Memory]] = []
        # The last one of the window, also if it holds no memory any more. Until the window has waited for it.
        self._last: Handle | None = None
        self._held: list[Memory] = []  # of buckets: what is live, and perhaps some that was
        self.peak_bytes = self.side_peak_bytes = 0  # the most that was live at once, ever; of that on the side
        # CPU: how long a hook waits, whether it does (until one of the window has waited in vain), and whether the window is
        # closing, so that all ranks launch the same. The last two are set anew at the end of a window.
        self.patience_s = _MOST_PATIENCE_S
        self.is_patient = True
        self._is_closing = False
        self._uneven_windows = 0  # between hosts: in how many more windows memory stays where it is

    @property
    def live(self) -> list[Memory]:
        """The memory that buckets have now: of gradients that gather, and of reduce-scatters."""
        self._held = [memory for memory in self._held if memory.is_live]
        return self._held

    @property
    def live_bytes(self) -> tuple[int, int]:
        """As pools count them: of all of `live`, and of those on the side."""
        in_slots = sum(memory.nbytes for memory in self.live if isinstance(memory, Slot))
        on_side = sum(aligned(memory.nbytes, 512) for memory in self.live if not isinstance(memory, Slot))
        return in_slots + on_side, on_side

    def hold(self, memory: Memory) -> Memory:
        """A bucket has it from now on."""
        self._held = [*self.live, memory]
        now, on_side = self.live_bytes
        self.peak_bytes, self.side_peak_bytes = max(self.peak_bytes, now), max(self.side_peak_bytes, on_side)
        return memory

    def add(self, handle: Handle, memory: Memory) -> None:
        self._last = handle
        self._running.append((handle, memory))

    def make_room(self, wanted: Slot | None = None) -> None:
        """[Note: soft bound] ``wanted``: where the bucket is to lie."""
        if self._device < 0:
            self._wait_for_room(wanted)
        elif not self._uneven_windows or self._is_registered:
            self._retire(self._limit - 1, wanted)

    def _wait_for_room(self, wanted: Slot | None) -> None:
        in_way = self._retire(self._limit - 1, wanted)
        if in_way is None or not (self.is_patient or self._is_closing):
            return
        deadline = time.monotonic() + (_CLOSING_PATIENCE_S if self._is_closing else self.patience_s)
        while in_way is not None and time.monotonic() < deadline:
            in_way.await_order(max(deadline - time.monotonic(), 0.0))
            in_way = self._retire(self._limit - 1, wanted)
        if self._is_closing:
            self._is_closing = in_way is None
        else:
            self.is_patient = in_way is None

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

    def _retire(self, keep: int = 0, wanted: Slot | None = None) -> Handle | None:
        """Gives on the memory of the reduce-scatters that are done or, on CUDA, in a stream that the next owner can wait for.
        Returns the first that is not.

        The last ``keep`` stay, for the next owner would wait for what has only just begun; unless they have bytes that are
        ``wanted``.
        """
        last = len(self._running) - keep
        in_way: Handle | None = None
        left = []
        for number, (handle, memory) in enumerate(self._running):
            is_wanted = wanted is not None and wanted.shares_bytes(memory)
            if number >= last and not is_wanted:
                left.append((handle, memory))
            elif handle.is_ordered() or (is_wanted and self._is_registered):
                memory.release(after=handle)
            else:
                left.append((handle, memory))
                in_way = in_way or handle
        self._running = left
        return in_way


class Launcher:
    """The buckets of one rank on their way to the shards. Not thread-safe.

    ``arrivals``: the native hooks, which are told where buckets gather. ``slots``: [Note: bucket slots], in the
    communicator's pool.
    """

    def __init__(
        self, comm: Reducer, buckets: Sequence[GradBucket], arrivals: Any, *, slots: Slots, max_inflight: int
    ) -> None:
        self._comm = comm
        self._device = torch_device(comm.device)
        self._is_on_cpu = comm.device < 0
        self._buckets = list(buckets)
        self._arrivals = arrivals
        self.slots = slots
        self._is_registered = comm.is_registered
        self.pool = Pool(device=self._device) if comm.is_registered else comm.pool  # of memory on the side
        self.reductions = Reductions(
            comm.device, max_inflight, is_blind=not comm.sees_peers, is_registered=comm.is_registered
        )
        self._launched = 0  # how many buckets of the window are, late rounds aside; until the next window
        # Of captured windows; where memory is not registered made by the first. And what one has on the side, until it ends.
        self._captured_slots: Slots | None = slots if comm.is_registered else None
        self._captured_side: list[CapturedSide] = []
        # CUDA: the stream in which the shards were prepared for the sums of the window. Set anew by each window.
        self._prepared_in: torch.cuda.Stream | None = None

    def begin_window(self, device: torch.device, *, is_captured: bool) -> None:
        """A window opens. The current stream has prepared the shards for its sums."""
        self._launched = 0
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
        if late:  # a bucket that has still to be launched would find its bytes in use
            is_early = self._is_registered or self._launched < len(self._buckets)
        else:
            is_early = self._slots_now().shares_with[bucket.index] >= self._launched
        return self._acquire_on_side(bucket, late) if is_early else self._acquire_to_launch(bucket, late)

    def _acquire_to_launch(self, bucket: GradBucket, late: bool) -> Memory:
        """Memory for a bucket that is the next one to be launched, or whose memory is as free as if it were."""
        slot = self._slots_now().slot(bucket.index)
        self.reductions.make_room(slot)
        if slot.try_enter():
            return self.reductions.hold(slot)
        return self._acquire_on_side(bucket, late)

    def _acquire_on_side(self, bucket: GradBucket, late: bool) -> Memory:
        self.reductions.make_room()
        if not core.is_capturing(self._comm.device):
            self.pool.reserve(bucket.nbytes, slab_bytes=max(*self.slots.sizes, _LEAST_SIDE_SLAB_BYTES))
            return self.reductions.hold(bucket.lease_of(self.pool, late))
        self._captured_side.append(CapturedSide(torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)))
        return self.reductions.hold(self._captured_side[-1])

    def _slots_now(self) -> Slots:
        if not core.is_capturing(self._comm.device):
            return self.slots
        if self._captured_slots is None:  # [Note: captured windows]
            nbytes = self.slots.plan.total_bytes
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._captured_slots = Slots(self.slots.plan, memory, self._comm.device)
        return self._captured_slots

    def _bring_in(self, bucket: GradBucket, memory: Memory, flat: Tensor) -> tuple[Memory, Tensor]:
        """What was packed on the side, in the bucket's slot."""
        slot = self.slots.slot(bucket.index)
        self.reductions.make_room(slot)
        is_entered = slot.try_enter()
        assert is_entered, bucket.index
        flat = slot.tensor(flat.dtype, flat.shape).copy_(flat)
        memory.release()
        return self.reductions.hold(slot), flat

    def launch(self, action: Any) -> None:
        """Issues a bucket's reduce-scatter, which adds to the shard or replaces what it holds."""
        bucket = self._buckets[action.bucket]
        self._arrivals.shut(bucket.index)
        self._join_streams(bucket)
        memory, flat = bucket.take(self._acquire_to_launch, action.absent, late=action.late)
        if self._is_registered and not isinstance(memory, Slot):
            memory, flat = self._bring_in(bucket, memory, flat)
        if not action.late:
            self._launched = bucket.index + 1
        bucket.accumulator.start(action.late or bucket.accumulates)
        self.reductions.add(self._comm._reduce_scatter_into(flat, bucket.accumulator), memory)

    def _join_streams(self, bucket: GradBucket) -> None:
        """CUDA: the current stream waits for those in which gradients were stored (autograd may use several), and for the one
        in which the shards were prepared for the sums: the reduce-scatter must be behind them."""
        for stream in () if self._is_on_cpu else (self._prepared_in, *bucket.take_streams()):
            if stream is not None:
                join(stream.device, stream)

    def end_captured(self) -> None:
        """A captured window has ended, and the current stream is behind all of it."""
        for memory in self._captured_side:  # of a window that never ends
            memory.release()
        self._captured_side.clear()
        self._forget_uses()

    def forget_captured(self) -> None:
        """A captured window will never end."""
        self.reductions.forget_captured()
        self.end_captured()
        for bucket in self._buckets:
            bucket.take_streams()
            bucket.drop_memory()

    def _forget_uses(self) -> None:
        if self._captured_slots is not None:
            self._captured_slots.forget()
        self._comm._begin_capture()

    def memory(self) -> dict[str, int]:
        """Bytes of buckets: by plan, now and at the most so far, of that on the side, and of captured windows."""
        now, on_side = self.reductions.live_bytes
        plan, has_captured = self.slots.plan, self._captured_slots not in (None, self.slots)
        return {
            "planned": plan.total_bytes,
            "load": plan.load_bytes,
            "buckets": now,
            "buckets_peak": self.reductions.peak_bytes,
            "side": on_side,
            "side_peak": self.reductions.side_peak_bytes,
            "captured": plan.total_bytes if has_captured else 0,
        }

    def release(self) -> None:
        """Gives what buckets hold back, unreduced, and their slots."""
        for bucket in self._buckets:
            self._arrivals.shut(bucket.index)
            self._join_streams(bucket)
            bucket.drop_memory()
        self.slots.release()
        self._captured_slots = None
