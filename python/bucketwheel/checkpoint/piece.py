"""Piece: the memory of a `TensorShard`, and how torch's asynchronous saves come to have it.

`torch.distributed.checkpoint.async_save` begins with a copy of the state dict, by a `StateDictStager`. Training waits for it,
so two things make it cheap:

- `state_dict` has just copied the pieces, and until somebody asks for the memory of one it is *unseen*. The stager's `Piece`
  shares it then. The first of the two that is asked for its tensor, while the other lives, makes a copy.
- Copies go into the memory of the save before, if nobody refers to that any more: pages of new memory take longer than the
  copy.
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

__all__ = ["Buffers", "Piece", "copy_unseen"]

_MIN_BYTES = 1 << 16  # what is smaller has few pages


class Piece:
    """All that a `TensorShard` has beside its shape. In one object, since stagers walk through all members of a tensor, down to
    each number of a tuple; of this one they call ``__deepcopy__``.

    ``is_unseen``: nobody has the tensor or a view of it.
    """

    def __init__(
        self,
        tensor: Tensor,
        ranges: tuple[tuple[int, int], ...],
        part: tuple[int, int],
        name: str,
        is_unseen: bool = False,
    ) -> None:
        self._tensor = tensor
        self.ranges = ranges
        self.part = part
        self.name = name
        self.boxes: tuple[Box, ...] | None = None  # once somebody has asked for them
        self._is_unseen = is_unseen  # until somebody asks for the tensor
        self._twin: Any = None  # weak: the other piece that shares the tensor, until either is asked for it
        self._stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None  # in which it is written

    @property
    def tensor(self) -> Tensor:
        """For whoever may write to it: no other piece has it from now on."""
        with _lock:
            twin = self._living_twin()
            if twin is not None:
                self._tensor = self._tensor.clone()
                twin._twin = None
            self._is_unseen, self._twin = False, None
            return self._tensor

    @property
    def is_pinned(self) -> bool:
        return self._tensor.is_pinned()

    def _living_twin(self) -> Piece | None:
        return None if self._twin is None else self._twin()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Piece:
        stager, non_blocking = calling_stager() or (None, False)
        if stager is not None and self._stream is not None:  # without this edge a stager's own stream reads too early
            torch.cuda.current_stream(self._tensor.device).wait_stream(self._stream)
        with _lock:
            if stager is None:
                copied = self._tensor.clone()
            elif stager.pin_memory or stager.share_memory:
                copied = stager.deepcopy_with_tensor_offload(self._tensor, memo, non_blocking=non_blocking)
            else:
                _buffers.are_wanted = True
                is_free = self._is_unseen and self._tensor.is_cpu and self._living_twin() is None
                copied = self._tensor if is_free else _buffers.copy(self._tensor, memo)
            other = Piece(copied, self.ranges, self.part, self.name)
            other.boxes = self.boxes
            if copied is self._tensor:
                self._twin, other._twin = weakref.ref(other), weakref.ref(self)
        return other


def copy_unseen(tensor: Tensor, buffers: Buffers, memo: dict[Any, Any]) -> Tensor:
    """A copy for a piece that is unseen. ``buffers``: of the optimizer; ``memo``: one for all of a state dict."""
    return buffers.copy(tensor, memo) if _buffers.are_wanted and tensor.is_cpu else tensor.clone()


class _Buffer:
    def __init__(self, size_bytes: int) -> None:
        self.memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.staging = 0  # the last that used it
        self._view: Any = None  # weak: what the tensor over the memory keeps alive

    @property
    def is_free(self) -> bool:
        return self._view() is None

    def lend(self, dtype: torch.dtype) -> Tensor:
        """All of it, 1-D. The buffer is free when no tensor has the memory any more."""
        view = memoryview(self.memory)
        self._view = weakref.ref(view)
        return torch.frombuffer(view, dtype=dtype)


class Buffers:
    """Memory for stagings, or for an optimizer's state dicts that are staged: that of the last one is kept for the next, older
    memory until nobody refers to it."""

    def __init__(self) -> None:
        self.are_wanted = False  # once a stager has copied a piece: others have no use for memory that is kept
        self._all: list[_Buffer] = []
        self._free: dict[int, list[_Buffer]] = {}  # by their bytes; found when a staging begins
        self._staging = 0

    @property
    def nbytes(self) -> int:
        return sum(len(buffer.memory) for buffer in self._all)

    def copy(self, tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
        """On the CPU. ``memo``: the dict of the staging, one for all that it copies."""
        if tensor.nbytes < _MIN_BYTES:
            return tensor.to("cpu", copy=True)
        with _lock:
            if id(self) not in memo:
                memo[id(self)] = self
                self._begin()
            if same := self._free.get(tensor.nbytes):
                buffer = same.pop()
            else:
                buffer = _Buffer(tensor.nbytes)
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


_buffers = Buffers()  # of what stagers copy
_lock = threading.RLock()  # a save's thread reads what the caller's thread may write to
