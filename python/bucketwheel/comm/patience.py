"""Patience: how long ranks wait for each other beside the time limit of a communicator (seconds).

What native code waits for alone is in csrc/comm/peers/patience.h.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """One table for all communicators of a process."""

    step_s: float = 1.0
    """For a step of the making, where less is left of the time limit; and for a caller on a socket to say who it is."""
    store_s: float = 1.5
    """For the Store to answer, behind a time limit."""
    report_s: float = 10.0
    """How long a rank waits for others before a line on stderr names those that are missing; then twice as long, and so on."""
    peer_s: float = 0.8
    """As the native one: of an operation, before a peer that has gone is a failure."""
    heartbeat_timeout_s: float = 30.0
    """Silence of another host after which it is lost."""
    exit_s: float = 2.0
    """For what is in flight, and then for threads, when the process ends."""


PATIENCE = Patience()
