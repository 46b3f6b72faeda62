"""`Handle`: the completion of one collective."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from bucketwheel.comm.arguments import seconds_of
from bucketwheel.device import native_stream
from bucketwheel.native import core


class Handle:
    """The completion of one collective; made by `all_gather`, `reduce_scatter`, requests and the collectives of a
    communicator.

    The operation keeps the tensors that it reads and writes alive until it is over: dropping the handle, the tensors or
    both is legal, and means only that nobody learns how it ended. Giving one of them other memory meanwhile (``.data =
    ...``, ``set_``, ``resize_``, ``torch.utils.swap_tensors``) is not. Errors of the operation (`PeerError`, `CommTimeout`,
    `MismatchError`, ...) are raised by every call that asks for its outcome. Used as a context manager, the handle
    waits at the end of the block.
    """

    __slots__ = ("_communicator", "_native")

    def __init__(self, native_handle: Any, communicator: Any) -> None:
        self._native = native_handle
        self._communicator = communicator  # a communicator that is dropped ends the operations in flight

    def wait(self, stream: Any = None, *, timeout: float | timedelta | None = None) -> Handle:
        """Make ``stream`` wait for the operation, without blocking the caller. None: the calling thread (CPU), so the
        same as `synchronize`; torch's current stream (CUDA).

        On CUDA the operation may fail afterwards (an abort, a lost peer): then it has ended for the stream, outputs are
        undefined, and the next call of the handle raises. One that the device had done before the failure stays good.

        On the local CUDA backend the caller is blocked until every rank has issued the operation, not until it is over.

        With ``timeout`` the host is blocked on every device, as torch's ``Work.wait(timeout)`` does: that long at most,
        until the operation is over. Then `CommTimeout`, as in `synchronize`.
        """
        if timeout is not None:
            self.synchronize(timeout)
        self._native.wait(None if stream is None else native_stream(stream))
        return self

    def synchronize(self, timeout: float | timedelta | None = None) -> Handle:
        """Block until the operation is over. `CommTimeout` after ``timeout`` (seconds), which leaves it running: it may be
        waited for again."""
        self._native.synchronize(None if timeout is None else seconds_of(timeout))
        return self

    def query(self) -> bool:
        """True when the operation is over. Never blocks."""
        return self._native.query()

    @property
    def is_captured(self) -> bool:
        """True for an operation that is part of a CUDA graph: it is over in each replay, and never outside."""
        return self._native.is_captured

    def elapsed_time(self, later: Handle) -> float:
        """Milliseconds from this operation's end to ``later``'s; both made with ``timing=True`` and over."""
        if not isinstance(later, Handle):
            raise TypeError(f"later is {later!r}, expected a handle")
        return 1e3 * self._native.elapsed_s(later._native)

    @property
    def event(self) -> Any:
        """The event that completes when the operation is over, failed or not: what `Lease.release` takes."""
        return self._native.event

    @property
    def seq(self) -> int:
        """Number of the operation in its communicator, counted from 1."""
        return self._native.seq

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffers."""
        return self._native.size_bytes

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # With an exception on its way, waiting for peers that may never come would hide it.
        if kind is None:
            self.wait()

    def __repr__(self) -> str:
        return f"Handle(seq={self.seq}, nbytes={self.nbytes}, {self._communicator!r})"


def wait_all(handles: Iterable[Handle], stream: Any = None) -> None:
    """`Handle.wait` of each. Where several fail, the error of the first; none is left unwaited for, so that nothing
    writes to their outputs any more behind this call, failed or not."""
    handles = list(handles) if isinstance(handles, Iterable) else [handles]
    for index, handle in enumerate(handles):
        if not hasattr(handle, "wait"):
            raise TypeError(f"handles[{index}] is {handle!r}, expected a handle")
    core.wait_all(handles, stream)
