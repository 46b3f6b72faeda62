"""The errors of bucketwheel. The native module raises these same classes.

Bad arguments raise ``ValueError`` or ``TypeError`` and change nothing. `expect_int` and `expect_number` check arguments.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = [
    "BudgetTooSmall",
    "BuildError",
    "CaptureError",
    "CheckpointError",
    "ClosedError",
    "CommError",
    "CommTimeout",
    "CrossRankMismatch",
    "DeviceError",
    "Error",
    "KeyBusy",
    "LeaseLeak",
    "MismatchError",
    "PeerError",
    "PlanDiverged",
    "PoolBusy",
    "PoolError",
    "ReleasedTwice",
    "SeveralParamGroups",
    "ShardedGradError",
    "ShardedParamError",
    "SizeExceedsPlan",
    "UnknownKey",
    "UseAfterRelease",
    "expect_int",
    "expect_number",
    "failing_together",
]


def expect_int(value: Any, name: str, meaning: str = "an int") -> int:
    """TypeError naming the argument unless it is an integer, of Python or numpy."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected {meaning}") from None


def expect_number(value: Any, name: str) -> None:
    """TypeError naming the argument unless it is a number; a tensor of one element is."""
    if not hasattr(value, "__float__"):  # float() takes text
        raise TypeError(f"{name} is {value!r}, expected a number")
    if getattr(value, "ndim", 0) and value.shape.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected one number")


@contextlib.contextmanager
def failing_together(agree: Callable[[str, Exception | None], None], what: str) -> Iterator[None]:
    """What fails inside on one rank fails on all. ``agree(what, error)`` raises ``error``, or that of another rank.
    Collective."""
    error = None
    try:
        yield
    except Exception as found:  # noqa: BLE001 (whatever it is, the other ranks hear of it)
        error = found
    agree(what, error)


class Error(RuntimeError):
    """Base class of the errors of bucketwheel. Bad arguments raise ``ValueError`` or ``TypeError`` instead."""


class BuildError(Error):
    """The native module cannot be built or loaded."""


class CheckpointError(Error):
    """A checkpoint is damaged, incomplete or not a checkpoint, or a save failed. The message names the file or the folder."""


class DeviceError(Error):
    """A CUDA call failed, or a stream or event was used after close or in a forked child."""


class CaptureError(DeviceError):
    """A call during CUDA graph capture that a graph cannot contain, or a call outside of it that needs the result of captured
    work."""


class CommError(Error):
    """A communicator failed. Every later call on it raises the same error.

    Attributes:
        op: The operation that failed on this rank: ``"all_gather"``, ``"reduce_scatter"`` or ``"broadcast"``. Empty if it was
            no operation.
        seq: The number of the operation, as in the message. Without an operation, the number of the last one, or 0.
        rank: The rank that failed first, as far as this rank knows. The peer if the error is a `PeerError`; -1 if no single
            rank failed.
        nccl_code: NCCL's result code on that rank, or None.
        last_error: NCCL's text for the code (``ncclGetLastError``), or empty.
        reason: The message without its prefix ``[bucketwheel rank 3/8 comm 'rs' seq 118]``."""

    op: str
    seq: int
    rank: int
    nccl_code: int | None
    last_error: str
    reason: str

    def __init__(self, *message: object, **facts: Any) -> None:
        super().__init__(*message)
        unknown = {"op": "", "seq": 0, "rank": -1, "nccl_code": None, "last_error": "", "reason": ""}
        vars(self).update(unknown | facts)
        self.reason = self.reason or str(self)


class PeerError(CommError):
    """A peer died, left or aborted. ``rank`` is its rank in the communicator."""


class CommTimeout(CommError, TimeoutError):
    """Some peers did not arrive before the time limit. Also a `TimeoutError`.

    Attributes:
        last_seqs: For each rank, the number of the last operation that it started (0 means none), or None if it is not known.
            Empty if no number is known."""

    def __init__(self, *message: object, last_seqs: Iterable[int | None] = (), **facts: Any) -> None:
        super().__init__(*message, **facts)
        self.last_seqs = tuple(last_seqs)


class MismatchError(CommError):
    """Ranks called different operations. The message lists the call of each rank."""


class ClosedError(CommError):
    """The communicator or the optimizer is closed."""


class PoolError(Error):
    """A pool cannot serve a request. The message names the key and the sizes."""


class ReleasedTwice(PoolError):
    """A lease was released a second time."""


class UseAfterRelease(PoolError):
    """The memory of a lease was requested after its release."""


class LeaseLeak(PoolError):
    """Leases are live where none may be. The message names their keys."""


class KeyBusy(PoolError):
    """The key has a live lease."""


class SeveralParamGroups(PoolError):
    """A module has several FSDP2 parameter groups; torch supports custom communication only for modules with one."""


class PoolBusy(PoolError):
    """Leases are live that must end before the call. The message names their keys."""


class UnknownKey(PoolError):
    """The plan of a strict pool does not have the key."""


class SizeExceedsPlan(PoolError):
    """The plan of a strict pool has fewer bytes for the key."""


class PlanDiverged(PoolError):
    """A step differs from the plan of a strict pool. The message has the expected key, the actual key, and those before."""


class BudgetTooSmall(PoolError):
    """A plan needs more bytes than allowed. The message names the keys that are live at once."""


class CrossRankMismatch(PoolError):
    """Ranks have different plans. The message names the first difference."""


class ShardedGradError(Error):
    """Code read the values of a gradient that is sharded over the ranks."""


class ShardedParamError(Error):
    """Code read the values of a sharded parameter that is not gathered."""
