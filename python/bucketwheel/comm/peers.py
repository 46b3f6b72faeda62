"""Peers of several hosts: agreement by a gloo process group, and failures through the torch Store.

[Note: ranks of several hosts], csrc/comm/peers/link.h, is the whole mechanism. Here are its three parts that need torch or
Python: the Links are made (`_linked`), the failure keys are read and written by one thread per process (`Process`), and
payloads travel (`_Rounds`).

How far a rank has come goes the same way: at most once a second the thread writes the numbers of the rank's last operations
and the name of its last public call to a key of the rank's, if they have changed. A rank whose wait lasts, or times out,
reads the keys of all ranks at once, to name those that are late ([Note: who is missing], csrc/comm/public_call.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm import gloo, patience
from bucketwheel.comm.background import start
from bucketwheel.comm.rendezvous import Rendezvous, has_keys
from bucketwheel.device import buffer_of
from bucketwheel.errors import CommTimeout
from bucketwheel.native import core
from bucketwheel.torch_internals import all_gather, another_connection

# Operations of the Store for the failure keys, over all ranks of a communicator, are at most 2,000 a second: each rank
# makes two in a period, one that looks for a failure and at most one that writes how far it is.
_PERIOD_S = 0.1
_PERIOD_OF_RANK_S = 1e-3
_PROGRESS_S = 1.0  # between two writes of how far a rank is

_HEAD = struct.Struct("<q")  # the length of a payload
_INLINE_BYTES = 248  # of a payload, that travel with its length
_SLOT_BYTES = _HEAD.size + _INLINE_BYTES
_SECRET_BYTES = 16
_SIOCGIFADDR = 0x8915
_LONG_PAUSE_S = 0.001


def make_peers(rendezvous: Rendezvous, name: str, timeout_s: float, process: Process | None = None) -> Any:
    """The native ``StorePeers`` of the ranks that meet. Collective; an error is this rank's alone, and the caller's to tell."""
    process = process or _this_process(os.getpid())
    links = _linked(rendezvous, process)
    rounds = _Rounds(rendezvous, timeout_s)
    rounds.peers = peers = core.StorePeers(
        name=name,
        rank=rendezvous.rank,
        world=rendezvous.size,
        timeout_s=timeout_s,
        id=rendezvous.id,
        post=rounds.post,
        collect=rounds.collect,
        links=list(links.items()),
        bell=process.bell,
    )
    try:
        rendezvous.ask(lambda _: process.follow(peers, rendezvous, rounds, links))
    except BaseException:
        peers.leave(0.0)
        raise
    return peers


# ---- failures


class Process:
    """What all communicators of a process share: its Links to other processes, and the thread that reads and writes the
    failure keys, while there are any."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.bell = core.Bell()
        # By the other process's id, while a communicator uses them.
        self.links: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._followed: list[_Followed] = []  # from the making of a communicator until this rank has left it
        self._is_running = False  # the thread, which ends when it follows nothing

    def follow(self, peers: Any, rendezvous: Rendezvous, rounds: _Rounds, links: dict[int, Any]) -> None:
        with self._lock:
            clones = [one.clone for one in self._followed if one.base is rendezvous.base]
        clone = clones[0] if clones else another_connection(rendezvous.base)
        followed = _Followed(peers, rendezvous, clone, rounds, links)
        with self._lock:
            self._followed.append(followed)
            try:
                if not self._is_running:
                    start(self._run)
                self._is_running = True
            except BaseException:
                self._followed.remove(followed)
                raise

    def _run(self) -> None:
        while True:
            with self._lock:
                following = list(self._followed)
                self._is_running = bool(following)
            if not following:
                return
            ended = [one for one in following if not one.look()]
            with self._lock:
                self._followed = [one for one in self._followed if one not in ended]
            period_s = max(_PERIOD_S, _PERIOD_OF_RANK_S * sum(one.size for one in following))
            following = ended = []  # whoever has left is freed before the wait
            self.bell.wait(period_s)


class _Followed:
    """A communicator, for the thread."""

    def __init__(
        self, peers: Any, rendezvous: Rendezvous, clone: dist.Store, rounds: _Rounds, links: dict[int, Any]
    ) -> None:
        self.base, self.clone, self.size = rendezvous.base, clone, rendezvous.size
        self._peers, self._rounds = peers, rounds
        self._links = links  # `Process.links` refers to them weakly
        self._store: dist.Store | None = dist.PrefixStore(rendezvous.prefix, clone)  # until it does not answer
        self._is_over = False  # the first failure is known
        self._written = ""  # how far this rank was
        self._write_at = 0.0
        self._interval_s = min(_PROGRESS_S, peers.timeout_s / 4)
        self._write_progress(self._store)

    def look(self) -> bool:
        """Whether there may be more to tell or to hear: until this rank has left."""
        has_left = self._peers.has_left  # asked before what it may fail with in between
        report = self._peers.report
        try:
            if self._store is not None:
                self._talk(self._store, report)
        except RuntimeError:  # the Store is gone
            self._store = None
            self._peers.lose_store()
        if report is not None:
            self._peers.told()
        if has_left:
            self._rounds.end()
        return not has_left

    def _talk(self, store: Any, report: Any) -> None:
        if not self._is_over:
            if report is not None:
                self._deliver(store.compare_set("failure", "", json.dumps(report)))
            elif store.check(["failure"]):
                self._deliver(store.get("failure"))
        if self._peers.asks:
            keys = [f"progress/{rank}" for rank in range(self.size)]
            texts = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
            self._peers.answer([json.loads(text) for text in texts])
        elif time.monotonic() >= self._write_at:
            self._write_progress(store)

    def _deliver(self, text: bytes) -> None:
        self._is_over = True
        self._peers.deliver(json.loads(text))

    def _write_progress(self, store: dist.Store) -> None:
        text = json.dumps(self._peers.progress())
        if text != self._written:
            store.set(f"progress/{self._peers.rank}", text)
            self._written, self._write_at = text, time.monotonic() + self._interval_s


@functools.cache
def _this_process(pid: int) -> Process:
    """A forked child has its own: the parent's thread is not there."""
    return Process()


# ---- links


def _linked(rendezvous: Rendezvous, process: Process) -> dict[int, Any]:
    """The Links to the next rank and the one before, by rank: those that the processes have, else new ones."""
    rank, size = rendezvous.rank, rendezvous.size
    following, before = (rank + 1) % size, (rank - 1) % size
    known = {other: link for other, link in process.links.items() if link.is_open}
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual))
        me = {"process": process.id, "linked": list(known), "secret": secrets.token_hex(_SECRET_BYTES)}
        me.update(port=listener.getsockname()[1], addresses=_own_addresses())
        them = rendezvous.ask(functools.partial(_introduced, rendezvous, me, {following, before}))
        until = time.monotonic() + rendezvous.left_s

        def is_known(other: int) -> bool:
            return them[other]["process"] in known and process.id in them[other]["linked"]

        def link_of(other: int, call: socket.socket) -> Any:
            link = core.Link(call.detach(), patience.PATIENCE.heartbeat_timeout_s)
            process.links[them[other]["process"]] = link
            return link

        links = {other: known[them[other]["process"]] for other in them if is_known(other)}
        # Every rank calls the next one. Two ranks have one Link: rank 0 calls.
        calls = following not in links and (size > 2 or rank == 0)
        is_called = before not in links and (size > 2 or rank == 1)
        if is_called:
            pool = stack.enter_context(ThreadPoolExecutor(1, "bw_link"))
            stack.callback(listener.shutdown, socket.SHUT_RDWR)  # ends the wait for the call
            coming = pool.submit(_answer_call, listener, me, them[before], until)
        if calls:
            links[following] = link_of(following, _call(them[following], me, until))
        if is_called:
            links[before] = link_of(before, coming.result())
        return links


def _introduced(
    rendezvous: Rendezvous, me: dict[str, Any], others: set[int], given_up: threading.Event
) -> dict[int, Any]:
    """What the ``others`` say of themselves, as ``me`` does. No round: a rank that has failed before may be in a later one."""
    rendezvous.store.set(f"link/{rendezvous.rank}", json.dumps(me))
    keys = {other: f"link/{other}" for other in sorted(others)}
    if not has_keys(rendezvous.store, list(keys.values()), rendezvous.left_s, given_up, size=rendezvous.size):
        missing = [other for other, key in keys.items() if not rendezvous.store.check([key])]
        raise CommTimeout(
            f"the communicator was not made within {rendezvous.timeout_s:g} s: ranks {missing} have not arrived"
        )
    return {other: json.loads(rendezvous.store.get(key)) for other, key in keys.items()}


def _call(peer: dict[str, Any], me: dict[str, Any], until: float) -> socket.socket:
    """A connection to the process ``peer``, at the first of its addresses where that answers."""
    tried = []
    for address in peer["addresses"]:
        left_s = max(until - time.monotonic(), 0.01)
        try:
            call = socket.create_connection((address, peer["port"]), left_s / len(peer["addresses"]))
        except OSError as error:
            tried.append(f"{address}: {error}")
            continue
        with contextlib.ExitStack() as stack:
            stack.callback(call.close)
            call.sendall(bytes.fromhex(peer["secret"]))
            if _reads(call, me["secret"], until):
                stack.pop_all()
                return call
            tried.append(f"{address}: another process answers")
    raise ConnectionRefusedError(f"the next rank does not answer at port {peer['port']} of {'; '.join(tried)}")


def _answer_call(listener: socket.socket, me: dict[str, Any], peer: dict[str, Any], until: float) -> socket.socket:
    """The call of the rank before: who does not know this rank's secret is hung up on."""
    while (left_s := until - time.monotonic()) > 0:
        listener.settimeout(left_s)
        call, _ = listener.accept()
        if _reads(call, me["secret"], min(until, time.monotonic() + patience.PATIENCE.step_s)):
            call.sendall(bytes.fromhex(peer["secret"]))
            return call
        call.close()
    raise TimeoutError("the previous rank has not connected")


def _reads(call: socket.socket, secret: str, until: float) -> bool:
    """Whether these bytes are what comes."""
    read = b""
    with contextlib.suppress(OSError):
        while len(read) < _SECRET_BYTES:
            call.settimeout(max(until - time.monotonic(), 0.01))
            if not (more := call.recv(_SECRET_BYTES - len(read))):
                break
            read += more
    return secrets.compare_digest(read, bytes.fromhex(secret))


def _own_addresses() -> list[str]:
    """Where other hosts may reach this one, the likeliest first: at the interface that gloo is to use, at the one that
    reaches the master, or at what the host's name stands for."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    for name in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        with contextlib.suppress(OSError):
            for family, kind, *_, address in socket.getaddrinfo(name or None, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    probe.connect(address)  # sends nothing
                    found.append(probe.getsockname()[0])
    return list(dict.fromkeys([*found, "127.0.0.1"]))


# ---- rounds


class _Rounds:
    """Payloads of all ranks, by all-gathers of a gloo group. Held by the native object until this rank has left."""

    peers: Any  # the native object, from its making on

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = rendezvous.rank, rendezvous.size, timeout_s
        self._number = 0
        self._work: Any = None  # from post() until collect() has the payloads
        self._slots = torch.empty(self._size, _SLOT_BYTES, dtype=torch.uint8, device="cpu")
        self._payload = b""
        self._group = gloo.connect(rendezvous, "rounds")

    def post(self, payload: bytes) -> None:
        if self._work is not None:
            raise ValueError(f"post: round {self._number} is posted but not collected")
        self._number += 1
        self._payload = payload
        slot = bytearray(_SLOT_BYTES)
        slot[: _HEAD.size] = _HEAD.pack(len(payload))
        inline = payload[:_INLINE_BYTES]
        slot[_HEAD.size : _HEAD.size + len(inline)] = inline
        self._work = self._gather(self._slots, slot)

    def collect(self, timeout: float | None) -> list[bytes]:
        if self._work is None:
            raise ValueError("collect: nothing is posted")
        begin = time.monotonic()
        self._await(begin, timeout)
        slots = [bytes(buffer_of(slot)) for slot in self._slots]
        lengths = [_HEAD.unpack_from(slot)[0] for slot in slots]
        longest = max(lengths)
        if longest > _INLINE_BYTES:  # on every rank alike
            everyone = torch.empty(self._size, longest, dtype=torch.uint8, device="cpu")
            self._work = self._gather(everyone, bytearray(self._payload.ljust(longest, b"\0")))
            self._await(begin, None)
            payloads = [bytes(buffer_of(data)[:length]) for data, length in zip(everyone, lengths, strict=True)]
        else:
            payloads = [slot[_HEAD.size : _HEAD.size + length] for slot, length in zip(slots, lengths, strict=True)]
        self._work = None
        return payloads

    def end(self) -> None:
        """Once this rank has left. What still runs in the group would hold up the end of the group for ever, if a rank
        cannot be reached: gloo ends it only where a time limit passes."""
        is_ended = self._work is None or (not self.peers.has_failed and self._ends_within(patience.PATIENCE.peer_s))
        if not is_ended:
            for peer in range(self._size):
                if peer != self._rank:
                    gloo.give_up(self._group, peer)
        if not (is_ended or self._ends_within(patience.PATIENCE.peer_s)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # a message is half read: whoever frees it waits

    def _ends_within(self, limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not self._work.is_completed() and time.monotonic() < until:
            time.sleep(_LONG_PAUSE_S)
        return bool(self._work.is_completed())

    def _gather(self, everyone: torch.Tensor, mine: bytearray) -> Any:
        try:
            return all_gather(self._group, everyone.view(-1), torch.frombuffer(mine, dtype=torch.uint8))
        except RuntimeError as error:
            self._lost(error)

    def _await(self, begin: float, timeout: float | None) -> None:
        """Until the work is over. `CommTimeout` after ``timeout``, which leaves it running; else after the own limit."""
        pauses, told = _pauses(), ""
        what = self.peers.in_call(f"collect() of round {self._number}")
        while not self._work.is_completed():
            waited = time.monotonic() - begin
            if timeout is not None and waited >= timeout:
                reason = f"agreement round {self._number} did not finish within {timeout} s"
                raise CommTimeout(self.peers.prefix + reason, reason=reason)
            if waited >= patience.PATIENCE.peer_s:  # a rank may have posted and gone, its payload still on the way
                self.peers.expect_peers(what + told)
            if waited >= patience.PATIENCE.report_s:
                told = self.peers.late_in_round(self._number, waited) or told
            if waited >= self._timeout_s and (late := self.peers.late_in_round(self._number)) is not None:
                self.peers.fail_round(f"timeout in {what}{late}", is_timeout=True)
            time.sleep(next(pauses))
        try:
            self._work.wait()
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: RuntimeError) -> Any:
        """A connection broke: a rank has died, or has failed, and will be told of."""
        until = time.monotonic() + 2 * patience.PATIENCE.peer_s
        while time.monotonic() < until:
            self.peers.expect_peers(f"collect() of round {self._number}")
            time.sleep(_LONG_PAUSE_S)
        self.peers.fail_round(f"agreement between the hosts failed: {error}", is_timeout=False)


def _pauses() -> Iterator[float]:
    for _ in range(50):
        yield 0.0
    pause = 20e-6
    while True:
        yield pause
        pause = min(2 * pause, _LONG_PAUSE_S)
