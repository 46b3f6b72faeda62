"""How the ranks of the c10d backend get connected: by a process group of their own, whose sends and receives carry the data.

Not its collectives. gloo's add in the tensors' dtype, in an order of their own (docs/numerics.md), and a handle of its
reduce-scatter never tells by itself that it is over. From 64 MiB on they take two to four times as long as sending every
peer what it needs (README.md); below 4 MiB an all-gather of theirs takes half as long, without our proof of receipt.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import agreement, gloo
from ._build import native
from .errors import CommError
from .meeting import Meeting

__all__ = ["backend_of", "make"]

_TAG = 1
_PAUSE_S = 0.01
_LATE_S = 10.0  # behind the time limit of an operation


def backend_of(group: dist.ProcessGroup | None) -> str:
    """The name of the backend that carries our data for ``group``: its own for the CPU if that was registered with torch
    (``Backend.register_backend``), else gloo, which every torch has and any Store can connect."""
    for entry in str(dist.get_backend_config(group)).split(","):
        device, _, name = entry.rpartition(":")
        if device in ("", "cpu") and name.upper() in dist.Backend._plugins:
            return name
    return "gloo"


def make(meeting: Meeting | None, backend: str, name: str, timeout_s: float) -> Any:
    """The native communicator of the ranks that meet, on all of them or on none: `CommError`, `CommTimeout`."""
    if meeting is None:
        alone = native().LocalWorld(1).join(0, name, timeout_s)
        return native().make_c10d_comm(native().peers_of(alone), _no_wire, _no_wire)

    def connect() -> tuple[_Wire, Any]:
        return _wire_of(meeting, backend), agreement.make_peers(meeting, name, timeout_s)

    wire, peers = meeting.make(connect, lambda made: made[1].leave(0.0))
    agreement.start(_interrupt, peers, wire)
    return native().make_c10d_comm(peers, wire.start, wire.wait)


class _Wire:
    """A process group that is this communicator's alone. Called by the thread of its stream, which is never the main one."""

    def __init__(self, group: Any, limit: timedelta) -> None:
        self._group = group
        self._limit = limit
        self._token = torch.zeros(1, dtype=torch.uint8)  # for an empty message: not every backend sends nothing
        self._is_interrupted = self._is_waiting = False

    def start(self, peer: int, is_sent: bool, memory: memoryview) -> Any:
        self._expect_going_on()
        return self._start(peer, is_sent, torch.frombuffer(memory, dtype=torch.uint8) if memory.nbytes else None)

    def _start(self, peer: int, is_sent: bool, memory: torch.Tensor | None) -> Any:
        call = self._group.send if is_sent else self._group.recv
        return call([self._token if memory is None else memory], peer, _TAG)

    def wait(self, work: Any) -> None:
        self._is_waiting = True
        try:
            self._expect_going_on()
            if work.wait(self._limit) is False:
                raise RuntimeError("given up")
        finally:
            self._is_waiting = False

    def _expect_going_on(self) -> None:
        if self._is_interrupted:
            raise RuntimeError("interrupted")

    def interrupt(self) -> None:
        """What waits ends soon, with a RuntimeError; nothing waits afterwards."""
        self._is_interrupted = True
        self._give_up()
        while self._is_waiting:  # it may have begun to wait meanwhile
            time.sleep(_PAUSE_S)
            self._give_up()

    def _give_up(self) -> None:
        self._group.abort()


class _GlooWire(_Wire):
    def __init__(self, meeting: Meeting) -> None:
        # gloo's own limit gives the group up without a word to the other ranks: ours comes first, and this one is for what
        # gloo has lost.
        limit = timedelta(seconds=meeting.timeout_s + _LATE_S)
        super().__init__(gloo.connect(meeting, "wire"), limit)
        self._peers = [rank for rank in range(meeting.size) if rank != meeting.rank]

    def _start(self, peer: int, is_sent: bool, memory: torch.Tensor | None) -> Any:
        call = gloo.send if is_sent else gloo.receive
        return call(self._group, memory, peer, _TAG)

    def _give_up(self) -> None:
        for peer in self._peers:  # each by itself: gloo gives up one connection at a time
            gloo.give_up(self._group, peer)


def _wire_of(meeting: Meeting, backend: str) -> _Wire:
    if backend == "gloo":
        return _GlooWire(meeting)
    limit = timedelta(seconds=meeting.timeout_s)
    store = dist.PrefixStore("wire", meeting.store)
    plugin = dist.Backend._plugins[backend.upper()]
    try:
        if not plugin.extended_api:
            return _Wire(plugin.creator_fn(store, meeting.rank, meeting.size, limit), limit)
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, meeting.rank, meeting.size
        options.timeout, options.group_id = limit, "bucketwheel"
        options.global_ranks_in_group = list(range(meeting.size))
        return _Wire(plugin.creator_fn(options, None), limit)
    except RuntimeError as error:
        raise CommError(f"backend {backend!r} of torch.distributed could not connect the ranks: {error}") from error


def _interrupt(peers: Any, wire: _Wire) -> None:
    if peers.await_failure():
        wire.interrupt()


def _no_wire(*_: Any) -> None:
    raise AssertionError("one rank sends nothing")
