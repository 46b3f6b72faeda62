"""The errors of bucketwheel.

Bad arguments raise ``ValueError`` or ``TypeError`` and leave everything as it was. Everything else derives from
`Error`. The native module raises these same classes.
"""

from __future__ import annotations

__all__ = [
    "BuildError",
    "CaptureError",
    "ClosedError",
    "CommError",
    "CommTimeout",
    "DeviceError",
    "Error",
    "KeyBusy",
    "LeaseLeak",
    "MismatchError",
    "PeerError",
    "PoolError",
    "ReleasedTwice",
    "ShardedGradError",
    "UseAfterRelease",
]


class Error(RuntimeError):
    """Root of every error that is not a bad argument."""


class BuildError(Error):
    """The native module could not be built or loaded."""


class DeviceError(Error):
    """A stream or event was used where it cannot be (after close, in a forked child), or a CUDA call failed."""


class CaptureError(DeviceError):
    """What a CUDA graph cannot have was asked for: during a capture, or, of work that was captured, outside the graph."""


class CommError(Error):
    """A communicator failed; every later call on it raises the same error."""


class PeerError(CommError):
    """A peer died, left or aborted. ``rank`` is its rank in the communicator."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class CommTimeout(CommError, TimeoutError):
    """A deadline passed before all peers arrived."""


class MismatchError(CommError):
    """Ranks called different operations; the message lists what each one called."""


class ClosedError(CommError):
    """The communicator was closed."""


class PoolError(Error):
    """The pool cannot do what was asked; the message names the key and the sizes."""


class ReleasedTwice(PoolError):
    """A lease was released again."""


class UseAfterRelease(PoolError):
    """A lease's memory was asked for after its release."""


class LeaseLeak(PoolError):
    """Leases are live where none should be; the message names their keys."""


class KeyBusy(PoolError):
    """The key has a live lease already."""


class ShardedGradError(Error):
    """Code asked for the values of a gradient that is sharded over the ranks."""
