"""gloo process groups that are one communicator's alone: how ranks get one, and how what waits in it is ended."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError
from bucketwheel.torch_internals import set_default_timeout

__all__ = ["NO_TIMEOUT", "Message", "connect", "give_up", "receive", "send"]

# gloo gives a group up for good when a time limit of its own passes.
NO_TIMEOUT = timedelta(days=365)
_UNUSED_TAG = 8


def connect(rendezvous: Rendezvous, name: str) -> Any:
    """A gloo process group of the ranks that meet, nobody else's; ``name`` is this one's among theirs. `CommError`, or
    `CommTimeout` when neither gloo nor the Store answers a little after the deadline."""
    return rendezvous.ask(lambda _: _connect(rendezvous, name), late="neither gloo nor the Store has answered")


def _connect(rendezvous: Rendezvous, name: str) -> Any:
    store, limit = dist.PrefixStore(name, rendezvous.store), timedelta(seconds=rendezvous.left_s)
    try:
        group = dist.ProcessGroupGloo(store, rendezvous.rank, rendezvous.size, limit)
    except RuntimeError as error:
        raise CommError(f"the ranks could not connect by gloo: {error}") from error
    set_default_timeout(group, NO_TIMEOUT)  # of collectives; what is sent and received is told at each wait
    return group


def give_up(group: Any, peer: int) -> None:
    """Whatever waits in the gloo group ends with a RuntimeError, here and then on the other ranks. A time limit that passes
    is the one way to have gloo do that. ``peer``: any other rank."""
    with contextlib.suppress(RuntimeError):
        group.recv([_nothing()], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class Message:
    """On its way, with the empty one that follows it."""

    def __init__(self, work: Any, end: Any) -> None:
        self._work, self._end = work, end

    def wait(self, limit: timedelta) -> bool:
        """RuntimeError when the connection breaks, or gloo gives up because the limit has passed."""
        return all(work is None or work.wait(limit) is not False for work in (self._end, self._work))


def receive(group: Any, memory: torch.Tensor | None, peer: int, tag: int) -> Message:
    """``memory``: the message's; nothing, for one that is empty."""
    return Message(None if memory is None else group.recv([memory], peer, tag), group.recv([_nothing()], peer, tag))


def send(group: Any, memory: torch.Tensor | None, peer: int, tag: int) -> Message:
    """As `receive`."""
    return Message(None if memory is None else group.send([memory], peer, tag), group.send([_nothing()], peer, tag))


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
