"""Bucket: one contiguous [world x shard] buffer of gradients, and the place its reduced shard goes to.

It gets memory when the first gradient of a window arrives and gives it back to the reduce-scatter that reads it, so
only a few buckets have memory at any time. *Late* memory is a second one, for gradients that come after the bucket was
launched; it is reduced when the window closes. Where the communicator's pool is registered memory, buckets take turns in
`BucketSlots`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import Tensor

from bucketwheel.comm.handle import Handle
from bucketwheel.device import join, stream_of
from bucketwheel.grads.graph_capture import CapturedBlock
from bucketwheel.layout.flat_params import ParamInfo, expect_same_memory_kind
from bucketwheel.native import core
from bucketwheel.pool.pool import Lease, Pool

__all__ = [
    "Acquire",
    "BucketSlot",
    "BucketSlots",
    "GradBucket",
    "Memory",
    "Part",
    "expect_gradient_of",
    "in_memory_order",
]

Memory = Union[Lease, "BucketSlot", CapturedBlock]
Acquire = Callable[["GradBucket", bool], Memory]  # memory for a bucket; whether for its late round


@dataclass(frozen=True)
class Part:
    """Elements [begin, begin + numel) of a bucket hold the elements of ``param`` from ``param_begin`` on."""

    param: int
    begin: int
    param_begin: int
    numel: int


class GradBucket:
    """The gradient memory of one bucket and its shard's accumulator.

    ``accumulator`` is the native `ShardAccumulator` (or `ShardAccumulatorCuda`) over this rank's part of the gradient
    shard; reduce-scatter feeds it through ``sink``.
    """

    def __init__(self, index: int, numel: int, dtype: torch.dtype, parts: Sequence[Part], accumulator: Any) -> None:
        self.is_on_cpu = isinstance(accumulator, core.ShardAccumulator)
        self.sink = (core.ShardSink if self.is_on_cpu else core.ShardSinkCuda)(accumulator)
        self.index = index
        self.numel = numel
        self.dtype = dtype
        self.parts = {part.param: part for part in parts}
        self.accumulator = accumulator
        # Whether this window adds to what the shard holds. Set anew whenever a window opens.
        self.accumulates = False
        # The memory of the first round and of the late round: from the first gradient to the launch, or until dropped.
        self._memory: list[tuple[Memory, Tensor] | None] = [None, None]
        # CUDA: the stream in which each memory was opened, which waited for its last owner and may have zeroed it. Valid as
        # long as there is that memory.
        self._opened_in: list[torch.cuda.Stream | None] = [None, None]
        # CUDA: the stream in which each parameter's part was written last. Until `take_streams`, at the launch.
        self._written_in: dict[int, torch.cuda.Stream] = {}

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def lease_of(self, pool: Pool, late: bool) -> Lease:
        return pool.acquire(f"{'late' if late else 'grads'}/{self.index}", self.nbytes)

    def _open(self, acquire: Acquire, late: bool) -> Tensor:
        held = self._memory[late]
        if held is None:
            memory = acquire(self, late)
            held = self._memory[late] = (memory, memory.tensor(self.dtype, (self.numel,)))
            if not self.is_on_cpu:
                self._opened_in[late] = stream_of(held[1].device)
            if late:
                held[1].zero_()
        return held[1]

    def _write(self, param: int, memory: Tensor, late: bool) -> None:
        """Notes that the current stream (CUDA) will write ``param``'s part; makes it wait for the opening of the memory and for
        what was written there before."""
        stream = None if self.is_on_cpu else stream_of(memory.device)
        if stream is not None:
            join(memory.device, self._opened_in[late])
            join(memory.device, self._written_in.get(param))
            self._written_in[param] = stream

    def store(self, acquire: Acquire, param: int, flat_grad: Tensor, *, late: bool, add: bool) -> Tensor:
        """Writes the part of ``flat_grad`` (1-D, the parameter's memory order) that lies here, casting to the bucket's dtype.

        Returns the memory of the whole bucket.
        """
        part = self.parts[param]
        memory = self._open(acquire, late)
        to = memory.narrow(0, part.begin, part.numel)
        self._write(param, to, late)
        source = flat_grad if part.numel == flat_grad.numel() else flat_grad.narrow(0, part.param_begin, part.numel)
        if add:
            to.add_(source)
        else:
            _copy(to, source)
        return memory

    def take_streams(self) -> list[torch.cuda.Stream]:
        """The streams that a launch must wait for: in which each part was written last. Forgets them; none on the CPU."""
        streams = {stream.cuda_stream: stream for stream in self._written_in.values()}
        self._written_in = {}
        return list(streams.values())

    def drop(self, param: int) -> None:
        """Zeroes ``param`` in late memory."""
        held = self._memory[True]
        if held is not None:
            self._write(param, held[1], True)
            part = self.parts[param]
            held[1].narrow(0, part.begin, part.numel).zero_()

    def drop_memory(self, *, late_only: bool = False) -> None:
        """Gives the memory back, unreduced."""
        for late in (True,) if late_only else (False, True):
            held, self._memory[late] = self._memory[late], None
            if held is not None:
                held[0].release()

    def take(self, acquire: Acquire, absent: Sequence[int], *, late: bool) -> tuple[Memory, Tensor]:
        """The buffer to reduce, with zeros where this rank has nothing; the bucket forgets it."""
        if not late and self._memory[late] is None:
            self._open(acquire, late).zero_()
        else:
            flat = self._open(acquire, late)
            for param in () if late else absent:
                part = self.parts[param]
                flat.narrow(0, part.begin, part.numel).zero_()
        held, self._memory[late] = self._memory[late], None
        assert held is not None
        return held


def _copy(to: Tensor, source: Tensor) -> None:
    """``to.copy_(source)``; past the cache where that is worth it, for the peers read it next."""
    is_like = type(source) is Tensor and (source.dtype, source.device) == (to.dtype, to.device)
    if not is_like or to.device.type != "cpu" or to.nbytes < core.PAST_CACHE_BYTES:
        to.copy_(source)
    elif not source.is_contiguous() or source.is_neg() or source._is_zerotensor():  # not in memory as it reads
        to.copy_(source)
    else:
        core.copy_all([to], [source])


def expect_gradient_of(info: ParamInfo, grad: Tensor) -> None:
    """RuntimeError naming the parameter if ``grad`` is sparse, of another shape, or of a dtype that a placeholder
    cannot stand for, as where the model was converted."""
    if (grad.dtype, grad.device) != (info.dtype, info.device):
        expect_same_memory_kind(info, info.param.shape)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"sparse gradients are not supported (parameter {info.name!r}); use a dense embedding or torch's SparseAdam"
        )
    if grad.shape != info.param.shape:
        raise RuntimeError(
            f"the gradient of {info.name!r} has shape {tuple(grad.shape)}, the parameter {tuple(info.param.shape)}"
        )
    if grad.dtype != info.dtype and info.param.grad_dtype is not None:
        raise RuntimeError(
            f"parameter {info.name!r} has grad_dtype={info.param.grad_dtype}, so its placeholder, which is "
            f"{info.dtype}, cannot be its p.grad; set p.grad_dtype = None, which lets gradients have any dtype"
        )


def in_memory_order(grad: Tensor, info: ParamInfo) -> Tensor:
    """``grad`` as one dimension, its elements in the order of the parameter's place in flat memory."""
    if grad.stride() != info.stride and grad.numel() > 1:
        grad = grad.new_empty_strided(grad.shape, info.stride).copy_(grad)
    return grad.detach().as_strided((grad.numel(),), (1,))


# --- bucket slots ----------------------------------------------------------------------------------------------------

# [Note: bucket slots] NCCL reads the input of a reduce-scatter where it lies on the other ranks, so in registered memory
# that must be the same place on all of them. Which bytes of a pool a bucket would get depends on the order in which
# gradients arrive, and ranks may differ in that. They never differ in this: a window launches every bucket once, in
# index order, and its late rounds after all of these. So bucket b is reduced from slot b % count, which all ranks
# leased alike when the optimizer was made. Its gradients are packed there, unless another bucket has still to be
# reduced from that slot: such a bucket is too early. (None is where gradients come roughly in the order of the
# buckets.) What is too early or late is packed into ordinary memory and copied into the slot when it is launched.

_numbers = itertools.count()  # of optimizers: what one has in flight may outlive it


class BucketSlot:
    """A fixed piece of registered memory. A bucket has it in the place of a `Lease` of its own."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        # The reduce-scatter that reads what lies here. Until somebody enters, who waits for it, or a capture forgets it.
        self._reader: Handle | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self._lease.place

    @property
    def nbytes(self) -> int:
        return self._lease.nbytes

    def enter(self) -> BucketSlot:
        """The current stream waits for the reduce-scatter that reads what lies here, so that peers do not read the next bucket's
        gradients instead.

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
        self._next = 0  # the bucket that this window launches next; 0 again when the last one is launched

    @property
    def places(self) -> list[tuple[int, int]]:
        """`Lease.place` of each."""
        return [slot.place for slot in self._slots]

    @property
    def nbytes(self) -> int:
        """Of all slots together."""
        return sum(slot.nbytes for slot in self._slots)

    def enter(self, bucket: int) -> BucketSlot:
        """The bucket's slot, for a bucket that is launched."""
        return self._slots[bucket % len(self._slots)].enter()

    def try_enter(self, bucket: int) -> BucketSlot | None:
        """The bucket's slot, for its first gradients; None if it is too early."""
        return self.enter(bucket) if bucket < self._next + len(self._slots) else None

    def bring_in(self, bucket: int, memory: Memory, flat: Tensor, *, late: bool) -> tuple[BucketSlot, Tensor]:
        """Before a bucket's launch: what is in ``flat``, of ``memory``, in its slot."""
        assert late or bucket == self._next, (bucket, self._next)
        slot = self._slots[bucket % len(self._slots)]
        if not isinstance(memory, BucketSlot):
            flat = slot.enter().tensor(flat.dtype, flat.shape).copy_(flat)
            memory.release()
        if not late:
            self._next = (bucket + 1) % self._bucket_count
        return slot, flat

    def forget_readers(self) -> None:
        """The next window is in another CUDA graph, or in none: what has read the slots is behind the stream that closed the
        last window, or will never run."""
        self._next = 0
        for slot in self._slots:
            slot.release()

    def release(self) -> None:
        """Gives the memory back to the pool; behind what the current stream has."""
        for slot in self._slots:
            slot.end()
        self._slots.clear()
