"""Agreement between ranks that do not share a host: payloads by a gloo process group, failures through the torch Store.

Ranks of one host have shared memory for both (`comm_shm`).

The Store may go before the communicator: with the process that has it, which may be a rank, dead or gone in an orderly
way, or none of the ranks. That is no failure by itself, for nobody can tell these apart by it. So failures travel by a
second way, against the ring of gloo connections on which every rank watches the next one: whoever sees his next one die
tells the one before, and so on. A rank that has left in order ends the chain; who needs it hears that it has left. Of
several failures only the one that is first in the Store goes that way, while there is a Store to tell.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm.background import start
from bucketwheel.comm.gloo import NO_TIMEOUT, connect, give_up, receive, send
from bucketwheel.comm.rendezvous import Meeting
from bucketwheel.errors import CommTimeout, Error
from bucketwheel.native import core

__all__ = ["make_peers"]

_HEAD = struct.Struct("<q")  # the length of a payload
_INLINE_BYTES = 248  # of a payload, that travel with its length
_SLOT_BYTES = _HEAD.size + _INLINE_BYTES
_RING_TAG = 7
# What a message of the ring is: a goodbye, after which nothing comes (after a failure peers are to hear of that), or a
# failure, with its report.
_IN_ORDER, _AFTER_FAILURE, _FAILURE = 1, 2, 3
_MESSAGE_BYTES = 8192
_TEXT_CHARS, _LAST_ERROR_CHARS = 1000, 250  # of a report that would be longer
# Kind, text, rank, sequence number, NCCL's code and words, the last operation of each rank.
_Report = tuple[int, str, int, int, int, str, list[int | None]]
_NO_REPORT: _Report = (0, "", -1, 0, 0, "", [])
_NEWS_S = 0.5  # how long a rank whose connection broke waits to hear why
# How long a message of the ring may be on its way: gloo loses one that is sent in the moment in which the other process
# ends, without an error. Who gives up has left, or something has failed. Its connections close then, as with its end.
_SENT_S = 3.0
_PAUSE_S = 0.01


def _times_s(size: int) -> tuple[float, float]:
    """How often a rank looks for news, for thousands of them ask one Store; and how long all together are given to say
    how far they have come, which is less than the native kAnswerPatience."""
    period_s = min(max(0.1, size * 5e-4), 1.0)
    return period_s, 0.65 + 1.5 * period_s


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
        self._group = connect(meeting, "gloo")
        store = meeting.ask(lambda _: _own_connection(meeting.store))
        ring = _Ring(self._group, self._rank, self._size)
        self.peers = core.StorePeers(name, self._rank, self._size, timeout_s, self.post, self.collect, meeting.id)
        try:
            start(_carry_failures, self.peers, store, ring, self._size, hurry=ring.stop_receiving)
            start(_watch, self.peers, ring, hurry=ring.stop_receiving)
            start(_say_goodbye, self.peers, ring, self.let_go, hurry=ring.stop_receiving)
        except BaseException:
            self.peers.leave(0.0)  # else those that run wait for it, or for a goodbye
            give_up(self._group, ring.following)
            raise

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

    def let_go(self) -> None:
        """Once this rank has left. A rank that cannot be reached any more, and says nothing of that, would hold up what
        still runs in the group, and so the end of the group, for ever."""
        until = time.monotonic() + (_NEWS_S if self.peers.has_failed else _SENT_S)
        while time.monotonic() < until and (self.peers.has_failed or self._is_running()):
            time.sleep(_PAUSE_S)
        if self.peers.has_failed or self._is_running():
            for peer in range(self._size):
                if peer != self._rank:
                    give_up(self._group, peer)
        while self._is_running() and time.monotonic() < until + _SENT_S:
            time.sleep(_PAUSE_S)
        if self._is_running():  # a message is half read: the group is never freed, for whoever did so would wait
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _is_running(self) -> bool:
        work = self._work
        return work is not None and not work.is_completed()

    def _gather(self, out: torch.Tensor, mine: torch.Tensor) -> Any:
        try:
            return self._group._allgather_base(out, mine)
        except RuntimeError as error:
            self._lost(error)

    def _await(self, begin: float, timeout: float | None) -> None:
        """Until the work is over. `CommTimeout` after ``timeout``, which leaves it running; else after the own limit."""
        pauses = _pauses()
        while not self._work.is_completed():
            waited = time.monotonic() - begin
            if timeout is not None and waited >= timeout:
                reason = f"round {self._round} of agreement was not over after {timeout} s"
                raise CommTimeout(self.peers.prefix + reason, reason=reason)
            if waited >= _NEWS_S:  # a rank may have posted and gone, its payload still on the way
                self.peers.expect_peers(f"collect() of round {self._round}")
            if waited >= self._timeout_s and (late := self.peers.late_in_round(self._round)) is not None:
                self.peers.fail("timeout", f"timeout in collect() of round {self._round}{late}")
            time.sleep(next(pauses))
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


class _Ring:
    """Messages from the rank that follows, and to the one before. Thread-safe but for `receive`."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self.following, self._before = (rank + 1) % size, (rank - 1) % size
        self._sending = threading.Lock()
        self._is_told = self._is_over = self._is_leaving = False
        self.news_is_out = threading.Event()  # what this rank failed with has been told, one way or another

    def receive(self) -> tuple[int, _Report]:
        message = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
        receive(self._group, message, self.following, _RING_TAG).wait(NO_TIMEOUT)
        what, report = json.loads(message.numpy().tobytes().rstrip(b"\0"))
        return what, report

    def pass_on(self, report: _Report, begin: Callable[[], None] = lambda: None) -> None:
        """Once: a ring has no end. No goodbye goes between ``begin()``, after which this rank may leave, and the news."""
        with self._sending:
            begin()
            if not (self._is_told or self._is_over):
                self._is_told = True
                self._send(_FAILURE, report)

    def end(self, what: int) -> None:
        self._is_leaving = True
        with self._sending:
            self._is_over = True
            self._send(what, _NO_REPORT)

    def stop_receiving(self) -> None:
        """Once this rank leaves."""
        if self._is_leaving:
            give_up(self._group, self.following)

    def _send(self, what: int, report: _Report) -> None:
        data = _packed(what, report).ljust(_MESSAGE_BYTES, b"\0")
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # that one has gone before
            send(self._group, message, self._before, _RING_TAG).wait(timedelta(seconds=_SENT_S))


def _packed(what: int, report: _Report) -> bytes:
    """As JSON. The longest reports are cut: how far each of thousands of ranks has come does not fit."""
    data = json.dumps([what, report], ensure_ascii=False).encode()
    if len(data) > _MESSAGE_BYTES:
        kind, text, rank, seq, nccl_code, last_error, _ = report
        cut: _Report = (kind, text[:_TEXT_CHARS], rank, seq, nccl_code, last_error[:_LAST_ERROR_CHARS], [])
        data = json.dumps([what, cut], ensure_ascii=False).encode()
    return data


def _next_report(peers: Any, timeout_s: float) -> tuple[bool, _Report | None]:
    """Whether this rank has left, and what it failed with: in this order, for it may fail and leave in between."""
    has_left = peers.has_left
    return has_left, peers.take_report(timeout_s)


class _News:
    """What ranks tell each other through the Store, one after the other: that one has failed, or asks how far all have
    come. To look for more is to look for one key.

    Every rank that reads a question answers it, whoever does last says so, and whoever wants to know looks for that:
    a few operations of the Store for each rank, however many there are."""

    def __init__(self, peers: Any, store: Any, size: int) -> None:
        self._peers, self._store, self._size = peers, store, size
        self._period_s, self._answers_s = _times_s(size)
        self._next = 0
        self._question, self._read_at = -1, -math.inf  # the last question
        self._awaited, self._until = -1, math.inf  # the one whose answers this rank waits for
        self.failure: tuple[int, _Report] | None = None  # the first one, and who told it

    @property
    def pause_s(self) -> float:
        return self._period_s if self._until == math.inf else self._period_s / 2

    def tell(self, report: _Report) -> None:
        while self.failure is None:
            self._put(report)

    def look(self) -> None:
        if self._peers.take_question():
            self._ask()
        while self.failure is None and self._store.check([self._key]):
            self._read(self._store.get(self._key))
        if self.failure is None and self._until < math.inf:
            self._collect()

    def _ask(self) -> None:
        """Anew, unless this rank has just read of another question: ranks ask when a time limit passes on all of them."""
        if time.monotonic() - self._read_at >= self._answers_s:
            self._put(None)
        self._awaited, self._until = self._question, time.monotonic() + self._answers_s

    def answer(self, question: int) -> None:
        mine = json.dumps([self._peers.rank, self._peers.progress()])
        self._store.append(f"answers/{question}", mine + ",")
        if self._store.add(f"answered/{question}", 1) == self._size:
            self._store.set(f"all answered/{question}", "")

    def _collect(self) -> None:
        """Once all have answered, or the time is over."""
        if time.monotonic() < self._until and not self._store.check([f"all answered/{self._awaited}"]):
            return
        self._until = math.inf
        answers = dict(json.loads(b"[%b]" % self._store.get(f"answers/{self._awaited}").rstrip(b",")))
        self._peers.answer([answers.get(rank) for rank in range(self._size)])

    @property
    def _key(self) -> str:
        return f"news/{self._next}"

    def _put(self, report: _Report | None) -> None:
        """As the next, unless another rank was first; reads what is. Nothing: a question."""
        self._read(self._store.compare_set(self._key, "", json.dumps([self._peers.rank, report])))

    def _read(self, news: bytes) -> None:
        number, self._next = self._next, self._next + 1
        rank, report = json.loads(news)
        if report is None:
            self._question, self._read_at = number, time.monotonic()
            self.answer(number)
        else:
            self.failure = rank, report


def _carry_failures(peers: Any, store: dist.Store, ring: _Ring, size: int) -> None:
    """Tells the others what this rank failed with, and this rank what another one did; the first failure counts."""
    news = _News(peers, store, size)
    has_left, report = False, None
    try:
        while news.failure is None and not has_left:
            has_left, report = _next_report(peers, news.pause_s)
            if report is not None:
                news.tell(report)
            elif not has_left:
                news.look()
        if news.failure is not None:
            rank, first = news.failure
            if rank == peers.rank:
                ring.pass_on(first)  # the Store may be gone before the others look
            else:
                peers.deliver(first)
    except RuntimeError:  # the Store is gone
        peers.ask_nobody()
        while report is None and not has_left:
            has_left, report = _next_report(peers, _NEWS_S)
    finally:
        if report is not None and news.failure is None:
            ring.pass_on(report)
        peers.ask_nobody()
        ring.news_is_out.set()
        peers.await_leave()
        peers.finish()


def _watch(peers: Any, ring: _Ring) -> None:
    """Waits for what the rank that follows says. Its death breaks the connection instead; after a failure, so may its
    leaving."""
    is_told = False
    try:
        what, report = ring.receive()
        while what == _FAILURE:
            is_told = True
            ring.pass_on(report, functools.partial(peers.deliver, report))
            what, report = ring.receive()
    except RuntimeError:
        if not (is_told or peers.has_left):
            with contextlib.suppress(Error):
                peers.fail("peer", f"rank {ring.following} died", ring.following)
        return
    if what == _IN_ORDER:
        peers.lose(ring.following)


def _say_goodbye(peers: Any, ring: _Ring, let_go: Callable[[], None]) -> None:
    peers.await_leave()
    has_failed = peers.has_failed
    if has_failed:
        ring.news_is_out.wait(_NEWS_S)
    ring.end(_AFTER_FAILURE if has_failed else _IN_ORDER)
    peers.finish()
    let_go()
