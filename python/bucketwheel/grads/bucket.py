"""Bucket: one contiguous [world x shard] buffer of gradients, and the place its reduced shard goes to.

It gets memory when the first gradient of a window arrives and gives it back to the reduce-scatter that reads it, so
only a few buckets have memory at any time. *Late* memory is a second one, had only when a gradient comes after the
bucket has gone (`schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bucketwheel.grads.bucket_slots import BucketSlot
from bucketwheel.grads.graph_capture import CapturedBlock
from bucketwheel.native import core
from bucketwheel.pool.pool import Lease, Pool

__all__ = ["Acquire", "GradBucket", "Memory", "Part", "join", "stream_of"]

Memory = Lease | BucketSlot | CapturedBlock
Acquire = Callable[["GradBucket", bool], Memory]  # memory for a bucket; whether for its late round


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """torch's current stream of a CUDA device; None elsewhere, where the calling thread is the only one."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def join(device: torch.device, stream: torch.cuda.Stream | None) -> None:
    """CUDA: the current stream waits for ``stream``, if that is another one."""
    current = stream_of(device)
    if current is not None and stream is not None and stream != current:
        current.wait_stream(stream)


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
        is_on_cpu = isinstance(accumulator, core.ShardAccumulator)
        self.sink = (core.ShardSink if is_on_cpu else core.ShardSinkCuda)(accumulator)
        self.index = index
        self.numel = numel
        self.dtype = dtype
        self.parts = {part.param: part for part in parts}
        self.accumulator = accumulator
        self.accumulates = False  # this window adds to what the shard holds
        self._memory: list[tuple[Memory, Tensor] | None] = [None, None]  # first round, late round
        # CUDA: where each memory was opened, which waited for its last owner and may have zeroed it; where each parameter's
        # part was written last.
        self._opened_in: list[torch.cuda.Stream | None] = [None, None]
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
            self._opened_in[late] = stream_of(held[1].device)
            if late:
                held[1].zero_()
        return held[1]

    def _write(self, param: int, memory: Tensor, late: bool) -> None:
        """CUDA: notes that the current stream will write ``param``'s part; behind the opening of the memory, and behind what
        was written there before."""
        stream = stream_of(memory.device)
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
        """The streams in which each parameter's part was written last since the last call; none on the CPU."""
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

    def drop_late(self) -> None:
        """Gives late memory back unused."""
        held, self._memory[True] = self._memory[True], None
        if held is not None:
            held[0].release()

    def drop_all(self) -> None:
        """Gives all memory back unused."""
        self.drop_late()
        held, self._memory[False] = self._memory[False], None
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
