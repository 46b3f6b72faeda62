"""How the ranks of the c10d backend get connected: by a process group of their own, whose sends and receives carry the data.

Not its collectives. gloo's add in the tensors' dtype, in an order of their own (docs/numerics.md), and a handle of its
reduce-scatter never tells by itself that it is over. From 64 MiB on they take two to four times as long as sending every
peer what it needs (README.md); below 4 MiB an all-gather of theirs takes half as long, without our proof of receipt.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm import background, gloo
from bucketwheel.comm import peers as agreement
from bucketwheel.comm.rendezvous import Meeting
from bucketwheel.errors import CommError
from bucketwheel.native import core

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
        alone = core.LocalWorld(1).join(0, name, timeout_s)
        return core.make_c10d_comm(core.peers_of(alone), _no_wire, _no_wire)

    def connect() -> Any:
        wire = _wire_of(meeting, backend)
        peers = agreement.make_peers(meeting, name, timeout_s)
        try:
            background.start(_end, peers, wire)
            if isinstance(wire, _RegisteredWire):
                background.start(_await_messages, wire)
            return core.make_c10d_comm(peers, wire.start, wire.wait)
        except BaseException:
            peers.leave(0.0)  # else threads wait for it
            raise

    return meeting.make(connect)


class _Wire:
    """A process group that is this communicator's alone. `start` and `wait` are called by the thread of its stream, which is
    never the main one; `end` by another one, once the communicator has failed or is closed. If it has failed, what waits
    then ends soon, with a RuntimeError, and nothing waits afterwards; else nothing waits any more."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group = group
        # Where the transport gives up without a word to the other ranks, our own limit comes first; this one is for what the
        # transport has lost.
        self._limit_s = timeout_s + _LATE_S
        self._has_ended = False

    def _expect_going_on(self) -> None:
        if self._has_ended:
            raise RuntimeError("interrupted")


class _GlooWire(_Wire):
    def __init__(self, meeting: Meeting) -> None:
        super().__init__(gloo.connect(meeting, "wire"), meeting.timeout_s)
        self._peers = [rank for rank in range(meeting.size) if rank != meeting.rank]
        self._is_waiting = False

    def start(self, peer: int, is_sent: bool, memory: memoryview) -> Any:
        self._expect_going_on()
        call = gloo.send if is_sent else gloo.receive
        return call(self._group, torch.frombuffer(memory, dtype=torch.uint8) if memory.nbytes else None, peer, _TAG)

    def wait(self, work: Any) -> None:
        self._is_waiting = True
        try:
            self._expect_going_on()
            if work.wait(timedelta(seconds=self._limit_s)) is False:
                raise RuntimeError("given up")
        finally:
            self._is_waiting = False

    def end(self, has_failed: bool) -> None:
        if not has_failed:
            return
        self._has_ended = True
        self._give_up()
        while self._is_waiting:  # it may have begun to wait meanwhile
            time.sleep(_PAUSE_S)
            self._give_up()

    def _give_up(self) -> None:
        for peer in self._peers:  # each by itself: gloo gives up one connection at a time
            gloo.give_up(self._group, peer)


class _Message:
    """A message of a `_RegisteredWire`: what the transport works on, and where what has come is to go."""

    def __init__(self, work: Any, own: torch.Tensor, memory: memoryview | None) -> None:
        self.work, self.own, self.memory = work, own, memory
        self.is_over = False
        self.error: Exception | None = None


class _RegisteredWire(_Wire):
    """Over a backend that somebody has registered. Nobody can say what ends its waits: ``abort()`` may do nothing. Nor when it
    has let go of the memory of a message that nobody waits for. So a thread does the waiting, which can be left behind, and
    messages are in memory of their own: what is left behind is kept until it is over, or its time is, and whatever it
    writes until then nobody reads."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        self._token = torch.zeros(1, dtype=torch.uint8)  # for an empty message: not every backend sends nothing
        self._changed = threading.Condition()
        self._is_starting = False
        self._under_way: dict[_Message, None] = {}  # in the order of their start
        self._awaited: _Message | None = None  # of those, by the thread of the stream
        self._until = math.inf

    def start(self, peer: int, is_sent: bool, memory: memoryview) -> _Message:
        with self._changed:
            self._expect_going_on()
            self._is_starting = True
        try:
            own = self._token
            if memory.nbytes:
                theirs = torch.frombuffer(memory, dtype=torch.uint8)
                own = theirs.clone() if is_sent else torch.empty_like(theirs)
            work = (self._group.send if is_sent else self._group.recv)([own], peer, _TAG)
            message = _Message(work, own, None if is_sent or not memory.nbytes else memory)
            with self._changed:
                self._under_way[message] = None
            return message
        finally:
            with self._changed:
                self._is_starting = False
                self._changed.notify_all()

    def wait(self, message: _Message) -> None:
        with self._changed:
            self._awaited = message
            self._changed.notify_all()
            self._changed.wait_for(lambda: message.is_over or self._has_ended)
            self._expect_going_on()
        if message.error is not None:
            raise message.error
        if message.memory is not None:
            torch.frombuffer(message.memory, dtype=torch.uint8).copy_(message.own)

    def end(self, has_failed: bool) -> None:
        with self._changed:
            self._has_ended = True
            self._until = time.monotonic() + self._limit_s
            self._changed.notify_all()
        if has_failed:
            with contextlib.suppress(RuntimeError):  # it may say that it cannot
                self._group.abort()

    def await_messages(self) -> None:
        """One after the other, as `wait` asks for them; after the end, all that are left."""
        while (message := self._next()) is not None:
            left_s = min(max(self._until - time.monotonic(), _PAUSE_S), self._limit_s)
            try:
                if message.work.wait(timedelta(seconds=left_s)) is False:
                    raise RuntimeError("given up")
            except Exception as error:  # whatever it is, who waits for the message is told
                message.error = error
            with self._changed:
                message.is_over = True
                self._changed.notify_all()

    def _next(self) -> _Message | None:
        with self._changed:
            self._changed.wait_for(lambda: self._awaited or (self._has_ended and not self._is_starting))
            message = self._awaited or next(iter(self._under_way), None)
            self._awaited = None
            if message is not None:
                self._under_way.pop(message, None)
            return message


def _wire_of(meeting: Meeting, backend: str) -> _GlooWire | _RegisteredWire:
    if backend == "gloo":
        return _GlooWire(meeting)
    late = f"backend {backend!r} of torch.distributed has not connected the ranks"
    return _RegisteredWire(meeting.ask(lambda _: _registered_group(meeting, backend), late=late), meeting.timeout_s)


def _registered_group(meeting: Meeting, backend: str) -> Any:
    limit = timedelta(seconds=meeting.left_s)
    store = dist.PrefixStore("wire", meeting.store)
    plugin = dist.Backend._plugins[backend.upper()]
    try:
        if not plugin.extended_api:
            return plugin.creator_fn(store, meeting.rank, meeting.size, limit)
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, meeting.rank, meeting.size
        options.timeout, options.group_id = limit, "bucketwheel"
        options.global_ranks_in_group = list(range(meeting.size))
        return plugin.creator_fn(options, None)
    except RuntimeError as error:
        raise CommError(f"backend {backend!r} of torch.distributed could not connect the ranks: {error}") from error


def _end(peers: Any, wire: _GlooWire | _RegisteredWire) -> None:
    wire.end(peers.await_failure())


def _await_messages(wire: _RegisteredWire) -> None:
    wire.await_messages()


def _no_wire(*_: Any) -> None:
    raise AssertionError("one rank sends nothing")
