"""Launcher: memory for the buckets of a window and the reduce-scatters that read it. Carries out what the schedule
decides (csrc/plan/schedule.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm.replicas import Reducer
from bucketwheel.device import CPU, torch_device
from bucketwheel.grads.bucket import GradBucket, Memory, join
from bucketwheel.grads.bucket_slots import BucketSlots
from bucketwheel.grads.graph_capture import CapturedBlocks, is_capturing
from bucketwheel.grads.inflight import Inflight
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool

__all__ = ["Launcher"]


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
        self._buckets = list(buckets)
        self._arrivals = arrivals
        self._slots = slots
        self.pool = comm.pool if slots is None else Pool(device=torch_device(comm.device))
        self.inflight = Inflight(comm.device, max_inflight, is_blind=not comm.sees_peers)
        self._captured = CapturedBlocks(comm.device, max((bucket.nbytes for bucket in self._buckets), default=0))
        self.prepared_in: torch.cuda.Stream | None = None  # CUDA: where the shards were prepared for the window's sums

    def carry_out(self, stores: Sequence[Any], launches: Sequence[Any], flat: Tensor) -> None:
        """What follows from the gradient ``flat`` (1-D, in memory order)."""
        for action in sorted([*stores, *launches], key=lambda action: action.bucket) if launches else stores:
            # A bucket is launched before a later one of the same parameter needs memory, or its slot.
            if isinstance(action, core.Launch):
                self.launch(action)
                continue
            bucket = self._buckets[action.bucket]
            memory = bucket.store(self._acquire, action.param, flat, late=action.late, add=action.add)
            if not action.late and self._comm.device == CPU:
                self._arrivals.open(bucket.index, memory)

    def _acquire(self, bucket: GradBucket, late: bool) -> Memory:
        """Memory for gradients that arrive."""
        slot = None if self._slots is None or late else self._slots.try_enter(bucket.index)
        return slot if slot is not None else self._lease(bucket, late)

    def _acquire_to_launch(self, bucket: GradBucket, late: bool) -> Memory:
        """Memory for a bucket that is launched without any."""
        return self._slots.enter(bucket.index) if self._slots is not None else self._lease(bucket, late)

    def _lease(self, bucket: GradBucket, late: bool) -> Memory:
        if not is_capturing(self._comm.device):
            return self.inflight.lease(self.pool, bucket, late)
        self.inflight.make_room()
        return self._captured.take()

    def begin_captured(self) -> None:
        """A window begins that is captured: [Note: captured windows]."""
        for bucket in self._buckets:
            bucket.take_streams()  # of late gradients that were dropped, and outside of the graph
        self._forget_uses()

    def end_captured(self) -> None:
        """It has ended, and the current stream is behind all of it."""
        self._captured.end_window()
        self._forget_uses()

    def forget_captured(self) -> None:
        """It has not ended, and never will."""
        for bucket in self._buckets:
            bucket.take_streams()
            bucket.drop_all()
        self.inflight.forget_captured()
        self.end_captured()

    def _forget_uses(self) -> None:
        if self._slots is not None:
            self._slots.forget()
        self._comm.begin_capture()

    def _join_streams(self, bucket: GradBucket) -> None:
        """CUDA: the current stream waits for the others that the reduce-scatter must be behind; autograd may use
        several.

        Those in which gradients were stored, and the one in which the shards were prepared for the sums.
        """
        for stream in (self.prepared_in, *bucket.take_streams()):
            if stream is not None:
                join(stream.device, stream)

    def launch(self, action: Any) -> None:
        bucket = self._buckets[action.bucket]
        self._arrivals.shut(bucket.index)
        self._join_streams(bucket)
        memory, flat = bucket.take(self._acquire_to_launch, action.absent, late=action.late)
        if self._slots is not None:
            memory, flat = self._slots.bring_in(bucket.index, memory, flat, late=action.late)
        bucket.sink.begin(action.late or bucket.accumulates)
        self.inflight.add(self._comm.reduce_scatter_into(flat, bucket.sink), memory)

    def memory(self) -> dict[str, int]:
        """Bytes of buckets: now, at the most so far, in bucket slots, and of captured windows."""
        slots = 0 if self._slots is None else self._slots.nbytes
        live = sum(lease.nbytes for lease in self.inflight.live)
        found = {"buckets": live, "buckets_peak": self.inflight.peak_bytes, "slots": slots}
        return found | {"captured": self._captured.nbytes}

    def release(self) -> None:
        """Gives what buckets hold back, unreduced, and registered memory."""
        for bucket in self._buckets:
            self._arrivals.shut(bucket.index)
            self._join_streams(bucket)
            bucket.drop_all()
        if self._slots is not None:
            self._slots.release()
        self._captured.clear()
