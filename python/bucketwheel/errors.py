"""The errors of bucketwheel.

Bad arguments raise ``ValueError`` or ``TypeError`` and leave everything as it was. Everything else derives from
`Error`. The native module raises these same classes.
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
    """Root of every error that is not a bad argument."""


class BuildError(Error):
    """The native module could not be built or loaded."""


class CheckpointError(Error):
    """A checkpoint is damaged, incomplete, or not one: nothing of it was loaded. The message names the file."""


class DeviceError(Error):
    """A stream or event was used where it cannot be (after close, in a forked child), or a CUDA call failed."""


class CaptureError(DeviceError):
    """During a CUDA graph capture: a call that a graph cannot contain. Outside: a question about work in a graph."""


class CommError(Error):
    """A communicator failed; every later call on it raises the same error.

    Attributes, with their defaults where nothing is known:
        op: the operation that failed on this rank: ``"all_gather"``, ``"reduce_scatter"``, ``"broadcast"``, or ``""``.
        seq: its number, the one in the message; without an operation, that of the last one before, or 0.
        rank: the rank that failed first: this one or the one it heard of; of a `PeerError` the peer; -1 if no single
            rank failed.
        nccl_code: what NCCL returned on that rank, or None.
        last_error: NCCL's text for it (ncclGetLastError).
        reason: the message without its prefix "[bucketwheel rank 3/8 comm 'rs' seq 118] ".
    """

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
    """A deadline passed before all peers arrived.

    Attributes, beside those of `CommError`:
        last_seqs: by rank, the number of the last operation that it has issued (0: none), or None where that is not
            known; empty if nobody knows.
    """

    def __init__(self, *message: object, last_seqs: Iterable[int | None] = (), **facts: Any) -> None:
        super().__init__(*message, **facts)
        self.last_seqs = tuple(last_seqs)


class MismatchError(CommError):
    """Ranks called different operations; the message lists the call of each."""


class ClosedError(CommError):
    """The communicator was closed."""


class PoolError(Error):
    """The pool cannot serve a request; the message names the key and the sizes."""


class ReleasedTwice(PoolError):
    """A lease was released again."""


class UseAfterRelease(PoolError):
    """A lease's memory was asked for after its release."""


class LeaseLeak(PoolError):
    """Leases are live where none should be; the message names their keys."""


class KeyBusy(PoolError):
    """The key has a live lease already."""


class SeveralParamGroups(PoolError):
    """An FSDP2 module gathers its parameters in several groups; torch has one place for communications of our own."""


class PoolBusy(PoolError):
    """Leases are live that a call needs to have ended; the message names their keys."""


class UnknownKey(PoolError):
    """A strict pool was asked for a key that its plan does not have."""


class SizeExceedsPlan(PoolError):
    """A strict pool was asked for more bytes than its plan has for the key."""


class PlanDiverged(PoolError):
    """A step left the plan of a strict pool; the message has what the plan expected, what came and what came before."""


class BudgetTooSmall(PoolError):
    """A plan needs more bytes than it may have; the message names the keys that are live at once."""


class CrossRankMismatch(PoolError):
    """Ranks have different plans; the message names the first difference."""


class ShardedGradError(Error):
    """Code asked for the values of a gradient that is sharded over the ranks."""


class ShardedParamError(Error):
    """Code asked for the values of a parameter that is sharded over the ranks, while it is not gathered."""
