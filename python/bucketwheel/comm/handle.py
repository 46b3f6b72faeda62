"""`Handle`: the completion of one collective."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from bucketwheel.comm.arguments import seconds_of
from bucketwheel.device import native_stream
from bucketwheel.native import core


class Handle:
    """The completion of one collective. `all_gather`, `reduce_scatter`, requests and methods of `Communicator` return handles.

    The operation keeps the tensors that it reads and writes alive until it is over. You may drop the handle, the tensors or
    both; without the handle you do not learn of an error. Do not give these tensors other memory before the operation is over
    (``.data = ...``, ``set_``, ``resize_``, ``torch.utils.swap_tensors``).

    Each call that asks for the outcome of the operation raises its error: `PeerError`, `CommTimeout`, `MismatchError` or
    another `CommError`. As a context manager the handle waits at the end of the block, unless an exception leaves the block."""

    __slots__ = ("_communicator", "_native")

    def __init__(self, native_handle: Any, communicator: Any) -> None:
        self._native = native_handle
        self._communicator = communicator  # a communicator that is dropped ends the operations in flight

    def wait(self, stream: Any = None, *, timeout: float | timedelta | None = None) -> Handle:
        """Makes ``stream`` wait for the operation, and returns the handle. Local.

        - On the CPU the call blocks the host, as `synchronize` does.
        - On CUDA the call does not block the host. On the local backend the call blocks the host until every rank has issued
          the operation.
        - With ``timeout`` the call blocks the host on every device, as torch's ``Work.wait(timeout)``.

        On CUDA an operation may fail after the call (an abort, a lost peer). The stream then goes on, the outputs are
        undefined, and the next call of the handle raises. If the device finished the operation before the failure, its outputs
        are valid.

        Args:
            stream: A native stream or a `torch.cuda.Stream`. None means torch's current stream on CUDA, and the calling thread
                on the CPU.
            timeout: Seconds, or a timedelta, for which the host waits at most.

        Raises:
            CommTimeout: The operation is not over after ``timeout``. The operation continues.
            CommError: The operation has failed."""
        if timeout is not None:
            self.synchronize(timeout)
        self._native.wait(None if stream is None else native_stream(stream))
        return self

    def synchronize(self, timeout: float | timedelta | None = None) -> Handle:
        """Blocks the host until the operation is over, and returns the handle. Local.

        Args:
            timeout: Seconds, or a timedelta. None means that only the communicator's ``timeout_s`` limits the wait.

        Raises:
            CommTimeout: The operation is not over after ``timeout``. The operation continues, and you may wait for it again.
            CommError: The operation has failed."""
        self._native.synchronize(None if timeout is None else seconds_of(timeout))
        return self

    def query(self) -> bool:
        """Returns True if the operation is over. Local; never blocks."""
        return self._native.query()

    @property
    def is_captured(self) -> bool:
        """True if the operation is part of a CUDA graph. It runs in each replay and is never over outside of a replay."""
        return self._native.is_captured

    def elapsed_time(self, later: Handle) -> float:
        """Returns the milliseconds from the end of this operation to the end of the operation of ``later``. Local.

        Both operations must be over and must have been started with ``timing=True``.

        Raises:
            TypeError: ``later`` is not a handle.
            ValueError: An operation is not over, was started without ``timing=True``, or ran on another device."""
        if not isinstance(later, Handle):
            raise TypeError(f"later is {later!r}, expected a handle")
        return 1e3 * self._native.elapsed_s(later._native)

    @property
    def event(self) -> Any:
        """The event that completes when the operation is over, also if it has failed. `Lease.release` accepts it."""
        return self._native.event

    @property
    def seq(self) -> int:
        """Number of the operation in its communicator, from 1."""
        return self._native.seq

    @property
    def nbytes(self) -> int:
        """Bytes of the larger tensors of the operation: the outputs of an all-gather, the inputs of a reduce-scatter."""
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
    """Waits for all handles, as `Handle.wait` does for one. Local.

    If operations have failed, `wait_all` still waits for all handles, and then raises the error of the first one that failed.
    So no operation writes to its outputs after the call; on CUDA this holds for work in ``stream``.

    Args:
        handles: The handles, of any communicators.
        stream: As in `Handle.wait`.

    Raises:
        TypeError: An element is not a handle.
        CommError: An operation has failed."""
    handles = list(handles) if isinstance(handles, Iterable) else [handles]
    for index, handle in enumerate(handles):
        if not hasattr(handle, "wait"):
            raise TypeError(f"handles[{index}] is {handle!r}, expected a handle")
    core.wait_all(handles, stream)
