"""Agreement between ranks that do not share a host: payloads by a gloo process group, failures through the torch Store.

Ranks of one host have shared memory for both (`comm_shm`).
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._build import native
from .errors import CommTimeout, Error
from .meeting import Meeting

__all__ = ["make_peers"]

# gloo gives a group up for good when a time limit of its own passes; ours are kept in `_await`.
_NO_TIMEOUT = timedelta(days=365)
_HEAD = struct.Struct("<q")  # the length of a payload
_INLINE_BYTES = 248  # of a payload, that travel with its length
_SLOT_BYTES = _HEAD.size + _INLINE_BYTES
_GOODBYE_TAG = 7
_IN_ORDER, _AFTER_FAILURE = 1, 2  # what a goodbye says; the Store has the failure, which is what peers are to hear
_NEWS_S = 0.5  # how long a rank whose connection broke waits to hear why


def make_peers(meeting: Meeting, name: str, timeout_s: float) -> Any:
    """The native ``StorePeers`` of the ranks that meet. Collective."""
    return _Agreement(meeting, name, timeout_s).peers


class _Agreement:
    """Held by the native object until that has said goodbye to the peers."""

    def __init__(self, meeting: Meeting, name: str, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = meeting.rank, meeting.size, timeout_s
        self._round = 0
        self._work: Any = None
        self._slots = torch.empty(self._size * _SLOT_BYTES, dtype=torch.uint8)
        self._payload = b""
        place = dist.PrefixStore("gloo", meeting.store)
        self._group = dist.ProcessGroupGloo(place, self._rank, self._size, _NO_TIMEOUT)
        self.peers = native().StorePeers(name, self._rank, self._size, timeout_s, self.post, self.collect)
        following, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        _start(_carry_failures, self.peers, _own_connection(meeting.store), self._size)
        _start(_watch, self.peers, self._group, following)
        _start(_say_goodbye, self.peers, self._group, before)

    def post(self, payload: bytes) -> None:
        if self._work is not None:
            raise ValueError(f"post: round {self._round} is posted but not collected")
        self._round += 1
        self._payload = payload
        slot = bytearray(_SLOT_BYTES)
        slot[: _HEAD.size] = _HEAD.pack(len(payload))
        inline = payload[:_INLINE_BYTES]
        slot[_HEAD.size : _HEAD.size + len(inline)] = inline
        self._work = self._gather(self._slots, torch.frombuffer(slot, dtype=torch.uint8))

    def collect(self, timeout: float | None) -> list[bytes]:
        if self._work is None:
            raise ValueError("collect: nothing is posted")
        begin = time.monotonic()
        self._await(begin, timeout)
        slots = self._slots.numpy().tobytes()
        heads = [slots[at : at + _SLOT_BYTES] for at in range(0, len(slots), _SLOT_BYTES)]
        lengths = [_HEAD.unpack_from(head)[0] for head in heads]
        longest = max(lengths)
        if longest > _INLINE_BYTES:  # on every rank alike
            mine = torch.frombuffer(bytearray(self._payload.ljust(longest, b"\0")), dtype=torch.uint8)
            everyone = torch.empty(self._size * longest, dtype=torch.uint8)
            self._work = self._gather(everyone, mine)
            self._await(begin, None)
            data = everyone.numpy().tobytes()
            payloads = [data[rank * longest : rank * longest + n] for rank, n in enumerate(lengths)]
        else:
            payloads = [head[_HEAD.size : _HEAD.size + n] for head, n in zip(heads, lengths, strict=True)]
        self._work = None
        return payloads

    def _gather(self, out: torch.Tensor, mine: torch.Tensor) -> Any:
        try:
            return self._group._allgather_base(out, mine)  # type: ignore[attr-defined]
        except RuntimeError as error:
            self._lost(error)

    def _await(self, begin: float, timeout: float | None) -> None:
        """Until the work is over. `CommTimeout` after ``timeout``, which leaves it running; else after the own limit."""
        pauses = _pauses()
        while not self._work.is_completed():
            waited = time.monotonic() - begin
            if timeout is not None and waited >= timeout:
                raise CommTimeout(f"round {self._round} of agreement was not over after {timeout} s")
            if waited >= self._timeout_s:
                self.peers.fail("timeout", f"timeout in collect() of round {self._round}")
            pause = next(pauses)
            if waited >= _NEWS_S:  # a rank may have posted and gone, its payload still on the way
                self.peers.expect_peers(f"collect() of round {self._round}")
            time.sleep(pause)
        try:
            self._work.wait()
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: RuntimeError) -> Any:
        """A connection broke: somebody died, and whoever watches him will say who it was."""
        until = time.monotonic() + _NEWS_S
        while time.monotonic() < until:
            self.peers.expect_peers(f"collect() of round {self._round}")
            time.sleep(_LONG_PAUSE_S)
        self.peers.fail("error", f"agreement between the hosts failed: {error}")


_LONG_PAUSE_S = 0.001


def _pauses() -> Iterator[float]:
    for _ in range(50):
        yield 0.0
    pause = 20e-6
    while True:
        yield pause
        pause = min(2 * pause, _LONG_PAUSE_S)


def _own_connection(store: dist.Store) -> dist.Store:
    """Where the store can have several: so that nobody's long wait holds up the news."""
    return store.clone() if hasattr(store, "clone") else store


def _start(run: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=run, args=args, name=f"bw{run.__name__}", daemon=True).start()


def _carry_failures(peers: Any, store: dist.Store, size: int) -> None:
    """Tells the others what this rank failed with, and this rank what another one did; the first failure counts."""
    period_s = min(max(0.1, size * 5e-4), 1.0)  # thousands of ranks ask one Store
    try:
        while True:
            report = peers.take_report(period_s)
            if report is not None:
                store.compare_set("failure", "", json.dumps(report))
            if peers.has_left:
                break
            if store.check(["failure"]):
                peers.deliver(*json.loads(store.get("failure")))
                break
    except RuntimeError:
        pass  # the Store went with the process that has it, which is somebody's neighbour
    peers.await_leave()
    peers.finish()


def _watch(peers: Any, group: Any, rank: int) -> None:
    """Waits for the goodbye of ``rank``. Its death breaks the connection instead."""
    goodbye = torch.zeros(1, dtype=torch.uint8)
    try:
        group.recv([goodbye], rank, _GOODBYE_TAG).wait()
    except RuntimeError:
        if not peers.has_left:
            with contextlib.suppress(Error):
                peers.fail("peer", f"rank {rank} died", rank)
        return
    if goodbye.item() == _IN_ORDER:
        peers.lose(rank)


def _say_goodbye(peers: Any, group: Any, rank: int) -> None:
    peers.await_leave()
    goodbye = torch.tensor([_AFTER_FAILURE if peers.has_failed else _IN_ORDER], dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):  # that one has gone before
        group.send([goodbye], rank, _GOODBYE_TAG).wait()
    peers.finish()
