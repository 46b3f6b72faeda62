"""Staging: what a save reads from live memory while training goes on, within a bound.

A chunk is some rows of a state, a master or a parameter. The thread that writes the file takes chunks in their order, from
where they lie. Before the optimizer writes to a parameter and its states, `before_write` copies those of their chunks into
staging memory that the thread has not come to, beginning with the last, and waits where the memory is used up: the thread
goes on meanwhile. So the file has the values of the call, and nothing is copied that was written in time.

On CUDA chunks are copied into pinned memory in a stream of their own, which waits for what was launched before the call;
the stream of a step waits for copies of what it is about to write.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bucketwheel.checkpoint.live import split_views, value_of
from bucketwheel.device import stream_of
from bucketwheel.errors import CheckpointError


@dataclass
class SaveStats:
    """What an asynchronous save has cost so far. ``waits``: how often a step waited for the file, ``waited_s`` for how long."""

    staged_bytes: int = 0
    peak_staging_bytes: int = 0
    waits: int = 0
    waited_s: float = 0.0


class Watched:
    """A tensor, with its version at the time of the save."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self._tensor = tensor
        self._version = self._version_now()

    def _version_now(self) -> int:
        return 0 if self._tensor.is_inference() else self._tensor._version  # a copy made in inference mode has none

    def expect_unedited(self) -> None:
        """CheckpointError naming it if somebody has written to it since."""
        if self._tensor.numel() and self._version_now() != self._version:
            raise CheckpointError(
                f"{self.name} was modified outside the optimizer while the checkpoint was being saved; call the save's "
                "wait() before you modify it"
            )


class _Progress(enum.Enum):
    LIVE = 0  # nobody has read it
    READ = 1  # somebody reads it; then it is safe
    SAFE = 2  # it is in the file or in staging memory: its live memory may change


@dataclass(slots=True, eq=False)
class _Chunk:
    views: tuple[Tensor, ...]  # until the file has them
    dtype: torch.dtype
    nbytes: int
    watched: Watched
    progress: _Progress = _Progress.LIVE
    staged: Tensor | None = None  # a step's copy, bytes; until the file has them
    copied: torch.cuda.Event | None = None  # CUDA: the copy, the step's or the thread's, is there

    @property
    def is_in_place(self) -> bool:
        """Whether the file can be written from where it lies."""
        return len(self.views) == 1 and self.views[0].is_cpu and self.views[0].is_contiguous()


class LiveTensor:
    """A tensor, or a box of a state or of a parameter: what `DataFile.add` takes. ``index``: of the parameter that is trained
    with it, whose chunks `Staging.before_write` copies."""

    def __init__(
        self, staging: Staging, index: int | None, views: Sequence[Tensor], dtype: torch.dtype, watched: Watched
    ) -> None:
        self.dtype = dtype
        self.shape = views[0].shape
        self._staging = staging
        parts = split_views(views, staging.chunk_bytes // dtype.itemsize)
        self._chunks = [_Chunk(part, dtype, part[0].numel() * dtype.itemsize, watched) for part in parts]
        if index is not None:
            staging._of_param.setdefault(index, []).extend(self._chunks)

    def chunks(self) -> Iterator[Tensor]:
        """Its bytes in row-major order, as contiguous tensors on the CPU. One is used until the next is asked for."""
        for chunk in self._chunks:
            yield from self._staging.read(chunk)


class Staging:
    """Of one save on one rank. ``limit_bytes`` of memory at most, of which the writing thread keeps one chunk."""

    def __init__(self, limit_bytes: int, chunk_bytes: int, device: torch.device) -> None:
        self.chunk_bytes = chunk_bytes
        self.stats = SaveStats()
        self.written_bytes = 0
        self._limit_bytes = limit_bytes - chunk_bytes
        self._held_bytes = 0  # of memory in use, and of what is kept in `_free`
        self._free: list[Tensor] = []  # of chunk_bytes each
        self._own: Tensor | None = None  # the writing thread's
        self._of_param: dict[int, list[_Chunk]] = {}  # chunks that may not be safe yet
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_over = False
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def reserve(self, nbytes: int) -> bool:
        """Whether a copy that lasts as long as the save fits; then it counts."""
        if self._held_bytes + nbytes + self.chunk_bytes > self._limit_bytes:
            return False
        self._hold(nbytes)
        return True

    # --- the thread that writes the file -----------------------------------------------------------------------------

    def read(self, chunk: _Chunk) -> Iterator[Tensor]:
        """Its bytes; the next use of the iterator says that they have been used."""
        with self._changed:
            while chunk.progress is _Progress.READ and self._error is None:
                self._changed.wait()
            self.expect_good()
            is_live = chunk.progress is _Progress.LIVE
            chunk.progress = _Progress.READ if is_live else chunk.progress
        if is_live and chunk.is_in_place:
            yield chunk.views[0]
            chunk.watched.expect_unedited()
        else:
            memory = chunk.staged
            if memory is None:
                with self._changed:
                    if self._own is None:
                        self._own = self._new_memory(self.chunk_bytes)
                        self._hold(0)
                memory = self._own[: chunk.nbytes]
                self._copy(chunk, memory)
            if chunk.copied is not None:
                chunk.copied.synchronize()
            yield memory
        with self._changed:
            chunk.progress = _Progress.SAFE
            if chunk.staged is not None and chunk.nbytes == self.chunk_bytes:
                self._free.append(chunk.staged)
            elif chunk.staged is not None:
                self._held_bytes -= chunk.nbytes
            chunk.staged = None
            chunk.views = ()
            self.written_bytes += chunk.nbytes
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """All is written, or nothing more will be: nobody waits any longer."""
        with self._changed:
            self._error = self._error or error
            self._is_over = True
            self._of_param.clear()
            self._free.clear()
            self._own = None
            self._changed.notify_all()

    def expect_good(self) -> None:
        """Raises what has made the save fail."""
        if self._error is not None:
            raise self._error

    # --- the thread that trains --------------------------------------------------------------------------------------

    def before_write(self, indices: Collection[int] | None) -> None:
        """Returns when the save does not need the live memory of these parameters (None: of any) any more."""
        if self._is_over:
            return
        chosen = list(self._of_param) if indices is None else [i for i in indices if i in self._of_param]
        for index in reversed(chosen):
            for chunk in reversed(self._of_param.get(index, ())):
                self._secure(chunk)
            self._of_param.pop(index, None)

    def _secure(self, chunk: _Chunk) -> None:
        memory, began = None, 0.0
        with self._changed:
            while chunk.progress is not _Progress.SAFE and not self._is_over:
                if chunk.progress is _Progress.LIVE and (memory := self._take(chunk.nbytes)) is not None:
                    chunk.progress, chunk.staged = _Progress.READ, memory
                    break
                if not began:
                    began = time.monotonic()
                    self.stats.waits += 1
                self._changed.wait()
        if began:
            self.stats.waited_s += time.monotonic() - began
        if memory is not None:
            try:
                self._copy(chunk, memory, stream_of(self._device))
            except Exception as error:
                self.end(error)
                if not isinstance(error, CheckpointError):  # of an edit the save fails, and not the step
                    raise
            self.stats.staged_bytes += chunk.nbytes
        if chunk.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(chunk.copied)

    def _copy(self, chunk: _Chunk, memory: Tensor, after: torch.cuda.Stream | None = None) -> None:
        """Makes it safe. ``after``: the stream whose work comes first."""
        with torch.cuda.stream(self._stream):  # None: nothing
            if self._stream is not None and after is not None:
                self._stream.wait_stream(after)
            place = memory.view(chunk.dtype)
            most = place.numel()
            if len(chunk.views) > 1:  # putting masters together takes some ten times their memory for a moment
                most = max(most // 16, 1024)
            for views in split_views(chunk.views, most):
                numel = views[0].numel()
                place[:numel].view(views[0].shape).copy_(value_of(views), non_blocking=True)
                place = place[numel:]
            if self._stream is not None:
                chunk.copied = self._stream.record_event()
        chunk.watched.expect_unedited()
        with self._changed:
            chunk.progress = _Progress.SAFE
            self._changed.notify_all()

    # --- memory; with the lock held ----------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> Tensor | None:
        if nbytes == self.chunk_bytes and self._free:
            return self._free.pop()
        while self._free and self._held_bytes + nbytes > self._limit_bytes:
            self._held_bytes -= self._free.pop().numel()
        if self._held_bytes + nbytes > self._limit_bytes:
            return None
        self._hold(nbytes)
        return self._new_memory(nbytes)

    def _hold(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        own = 0 if self._own is None else self.chunk_bytes
        self.stats.peak_staging_bytes = max(self.stats.peak_staging_bytes, self._held_bytes + own)

    def _new_memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None)
