"""Bucket: one contiguous [world x shard] buffer of gradients, and the place its reduced shard goes to.

It gets memory when the first gradient of a window arrives and gives it back to the reduce-scatter that reads it, so
only a few buckets have memory at any time: a slot by plan, or a lease. *Late* memory is a second one, for gradients that come
after the bucket was launched; it is reduced when the window closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bucketwheel.device import join, stream_of
from bucketwheel.grads.graph_capture import CapturedSide
from bucketwheel.layout.flat_params import ParamInfo, expect_same_memory_kind
from bucketwheel.native import core
from bucketwheel.pool.pool import Lease, Pool
from bucketwheel.pool.slots import Slot

Memory = Lease | Slot | CapturedSide
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
    shard, which the reduce-scatter feeds.
    """

    def __init__(self, index: int, numel: int, dtype: torch.dtype, parts: Sequence[Part], accumulator: Any) -> None:
        self.is_on_cpu = isinstance(accumulator, core.ShardAccumulator)
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
