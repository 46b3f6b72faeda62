"""Piece: the memory of a `TensorShard`, and what torch's asynchronous saves copy it into.

`torch.distributed.checkpoint.async_save` copies what it saves first, with a `StateDictStager`, into memory that is new each
time: the kernel hands out and clears its pages one by one, which takes longer than the copy. A `Piece` is copied into
memory of the staging before, where nobody refers to that any more.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from bucketwheel.checkpoint.boxes import Box
from bucketwheel.torch_internals import calling_stager

__all__ = ["Buffers", "Piece"]

_MIN_BYTES = 1 << 16  # what is smaller has few pages


class Piece:
    """All that a `TensorShard` has beside its shape, in one object, which says how stagers copy it: they look at each member
    of a tensor, at each element of a tuple and at each number."""

    def __init__(self, tensor: Tensor, ranges: tuple[tuple[int, int], ...], part: tuple[int, int], name: str) -> None:
        self.tensor = tensor
        self.ranges = ranges
        self.part = part
        self.name = name
        self.boxes: tuple[Box, ...] | None = None  # once somebody has asked for them
        self._stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None  # in which it is written

    def __deepcopy__(self, memo: dict[Any, Any]) -> Piece:
        stager, non_blocking = calling_stager() or (None, False)
        if stager is not None and self._stream is not None:  # without this edge a stager's own stream reads too early
            torch.cuda.current_stream(self.tensor.device).wait_stream(self._stream)
        if stager is None:
            copied = self.tensor.clone()
        elif stager.pin_memory or stager.share_memory or self.tensor.nbytes < _MIN_BYTES:
            copied = stager.deepcopy_with_tensor_offload(self.tensor, memo, non_blocking=non_blocking)
        else:
            copied = _buffers.copy(self.tensor, memo)
        other = Piece(copied, self.ranges, self.part, self.name)
        other.boxes = self.boxes
        return other


class _Buffer:
    def __init__(self, size_bytes: int) -> None:
        self.memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.staging = 0  # the last that took it
        self._view: Any = None  # weak: of whom the tensor over the memory keeps alive

    @property
    def is_free(self) -> bool:
        return self._view is None or self._view() is None

    def lend(self, dtype: torch.dtype) -> Tensor:
        """All of it, 1-D. The buffer is free when no tensor has the memory any more."""
        view = memoryview(self.memory)
        self._view = weakref.ref(view)
        return torch.frombuffer(view, dtype=dtype)


class Buffers:
    """Memory for stagings: that of the last one is kept for the next, older memory until nobody refers to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[_Buffer] = []
        self._free: dict[int, list[_Buffer]] = {}  # by their bytes; found when a staging begins
        self._staging = 0

    @property
    def nbytes(self) -> int:
        return sum(len(buffer.memory) for buffer in self._all)

    def copy(self, tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
        """On the CPU. ``memo``: the dict of the staging, one for all that it copies."""
        with self._lock:
            if id(self) not in memo:
                memo[id(self)] = self
                self._begin()
            same = self._free.get(tensor.nbytes)
            buffer = same.pop() if same else _Buffer(tensor.nbytes)
            if buffer.staging == 0:
                self._all.append(buffer)
            buffer.staging = self._staging
            there = buffer.lend(tensor.dtype)
        return there.copy_(tensor)

    def _begin(self) -> None:
        self._all = [b for b in self._all if b.staging == self._staging or not b.is_free]
        self._staging += 1
        self._free = {}
        for buffer in self._all:
            if buffer.is_free:
                self._free.setdefault(len(buffer.memory), []).append(buffer)


_buffers = Buffers()
