"""gloo process groups, and messages over them whose waits end when a connection breaks.

When the connection of a pair of ranks breaks, gloo ends the waits for what has not begun to travel, but not those for a
message that is half read, or waits for room in the socket to be written: nothing but their own time limit ends them.
So every message is followed by an empty one, which gloo reads at once or not at all, and that is waited for first. For
what is sent there is no such way: it is waited for only once the receiver is known to have it.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm.rendezvous import Meeting
from bucketwheel.errors import CommError, CommTimeout

__all__ = ["NO_TIMEOUT", "Message", "connect", "give_up", "receive", "send"]

# gloo gives a group up for good when a time limit of its own passes.
NO_TIMEOUT = timedelta(days=365)
_UNUSED_TAG = 8


def connect(meeting: Meeting, name: str) -> Any:
    """A gloo process group of the ranks that meet, nobody else's; ``name`` is this one's among theirs. `CommTimeout` naming
    the ranks that have not come by the meeting's deadline, or when neither gloo nor the Store answers a little later."""
    return meeting.ask(lambda _: _connect(meeting, name), late="neither gloo nor the Store has answered")


def _connect(meeting: Meeting, name: str) -> Any:
    store = dist.PrefixStore(name, meeting.store)
    before = _sockets()
    try:
        store.set(f"came/{meeting.rank}", "")
        group = dist.ProcessGroupGloo(store, meeting.rank, meeting.size, timedelta(seconds=meeting.left_s))
    except RuntimeError as error:
        missing: list[int] = []
        with contextlib.suppress(RuntimeError):  # of a Store that is gone
            missing = [rank for rank in range(meeting.size) if not store.check([f"came/{rank}"])]
        if missing:
            raise CommTimeout(
                f"the communicator was not made within {meeting.timeout_s} s: ranks {missing} have not come"
            ) from error
        raise CommError(f"the ranks could not connect by gloo: {error}") from error
    group._set_default_timeout(NO_TIMEOUT)  # of collectives; what is sent and received is told at each wait
    after = _sockets()
    _closed_in_child.intersection_update(after)  # not those of groups that are gone
    _closed_in_child.update(after - before)
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


# [Note: fork over gloo] A forked child, such as a worker of a DataLoader, has its parent's connections too, so they would
# not break when the parent dies, and the other ranks would wait for it as long as the child lives. gloo does not tell
# which descriptors are its own: those of sockets that were not there before. One that another thread has opened
# meanwhile is lost to children as well.
_closed_in_child: set[tuple[int, str]] = set()  # descriptor, socket


def _sockets() -> set[tuple[int, str]]:
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing
            if (target := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket:"):
                found.add((fd, target))
    return found


def _close_in_child() -> None:
    """The numbers stay taken: gloo's objects would close them again, whoever has them then."""
    if own := _closed_in_child & _sockets():
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd, _ in own:
            os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)
    _closed_in_child.clear()


os.register_at_fork(after_in_child=_close_in_child)
