"""How the ranks of the shm backend get connected: who is where goes through a `Rendezvous`, the rest over Unix sockets."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import zlib
from typing import Any

from bucketwheel._version import __version__
from bucketwheel.comm import patience
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.native import core

_CREDENTIALS = struct.Struct("iii")  # SO_PEERCRED: pid, uid, gid
_HELLO = struct.Struct("<i16sI")  # rank, nonce of the rank that is called, version
_VERSION = zlib.crc32(__version__.encode())
_LOOK_S = 0.05
_PAUSE_S = 0.01


class CannotShare(Exception):
    """The ranks have no memory in common; the text says of which ranks that is known, and why. On every rank alike."""

    what = "cannot share memory"  # the ranks, for a message


class NotOneHost(CannotShare):
    """The ranks do not all share a host: on some there is no socket of another."""


class NoSharedMemory(CannotShare):
    """There is none on some rank's system."""


class NotConnected(CannotShare):
    """The ranks share a host, for every socket that was called is there, and something else went wrong."""

    what = "are on one host but could not connect"


def connect(rendezvous: Rendezvous, name: str, timeout_s: float) -> Any:
    """The native communicator of the ranks, all or none: `CannotShare`, or `CommError` on every rank."""
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []

        def prepare() -> None:
            core.expect_shared_memory(rendezvous.size)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"\0bucketwheel-{secrets.token_hex(16)}")
            listener.listen()
            listeners.append(listener)

        failures, _ = rendezvous.outcome(rendezvous.attempt(prepare))
        if failures:
            raise NoSharedMemory(failures)
        return _Links(rendezvous, listeners[0]).connect(name, timeout_s)


class _Links:
    """Names in the abstract namespace are random and end with their socket. Each end checks the other's credentials, so
    that the process at the other end is the one that the rendezvous speaks of.
    """

    def __init__(self, rendezvous: Rendezvous, listener: socket.socket) -> None:
        self.rendezvous = rendezvous
        self.listener = listener
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.nonce = secrets.token_bytes(16)
        self.peers: list[dict[str, Any]] = []
        self.sockets: dict[int, socket.socket] = {}
        self.until = rendezvous.deadline  # of the calls and the making
        self.id = rendezvous.id  # asked for before sockets are handed over
        self.has_found_all = True  # whom it has called

    def connect(self, name: str, timeout_s: float) -> Any:
        rendezvous = self.rendezvous
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_sockets)
            address = self.listener.getsockname().decode()
            me = {"address": address, "nonce": self.nonce.hex(), "pid": os.getpid(), "uid": os.getuid()}
            self.peers = rendezvous.exchange(me)
            self.until = time.monotonic() + rendezvous.left_s
            # Whoever is none of us is hung up on meanwhile: the queue of calls is short, and anybody may fill it.
            acceptor = stack.enter_context(_Acceptor(self, self.listener))
            self._expect_connected(rendezvous.attempt(self._call_lower_ranks))
            self._expect_connected(acceptor.failure())
            self.sockets.update(acceptor.accepted)
            return rendezvous.make(lambda: self._make(name, timeout_s))

    def _close_sockets(self) -> None:
        for call in self.sockets.values():
            call.close()

    def _make(self, name: str, timeout_s: float) -> Any:
        pids = [peer["pid"] for peer in self.peers]
        left_s = max(self.until - time.monotonic(), patience.PATIENCE.step_s)
        fds = [self.sockets[r].detach() if r != self.rank else -1 for r in range(self.size)]
        self.sockets.clear()
        return core.make_shm_comm(self.rank, fds, pids, name, timeout_s, id=self.id, left_s=left_s)

    def _expect_connected(self, failure: str) -> None:
        failures, have_found_all = self.rendezvous.outcome(failure, self.has_found_all)
        if failures:
            raise (NotConnected if all(have_found_all) else NotOneHost)(failures)

    def _call_lower_ranks(self) -> None:
        for rank in range(self.rank):
            peer = self.peers[rank]
            call = self.sockets[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            call.settimeout(max(self.until - time.monotonic(), 0.001))
            while (error := call.connect_ex(peer["address"])) == errno.EAGAIN and time.monotonic() < self.until:
                time.sleep(_PAUSE_S)  # too many call
            if error:
                self.has_found_all = error != errno.ECONNREFUSED  # nobody listens there
                raise OSError(error, f"cannot connect to rank {rank}: {os.strerror(error)}")
            if not _is_peer(call, peer):
                raise ConnectionRefusedError(
                    f"the socket of rank {rank} belongs to another process than pid {peer['pid']}"
                )
            call.send(_HELLO.pack(self.rank, bytes.fromhex(peer["nonce"]), _VERSION))


class _Acceptor:
    """Takes the calls of the higher ranks, in a thread of its own, while `with` lasts."""

    def __init__(self, links: _Links, listener: socket.socket) -> None:
        self.accepted: dict[int, socket.socket] = {}
        self._links = links
        self._listener = listener
        self._failure = ""
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="bw-accept", daemon=True)

    def __enter__(self) -> _Acceptor:  # noqa: PYI034 (typing.Self is newer than Python 3.10)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_stopped = True
        self._thread.join()
        if kind is not None:
            for call in self.accepted.values():
                call.close()

    def failure(self) -> str:
        """Waits for the end; what went wrong, empty if nothing did."""
        self._thread.join()
        return self._failure

    def _run(self) -> None:
        self._failure = self._links.rendezvous.attempt(self._accept)

    def _accept(self) -> None:
        missing = self._links.size - 1 - self._links.rank
        with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as unknown:
            self._listener.setblocking(False)
            waiting.register(self._listener, selectors.EVENT_READ, math.inf)
            while len(self.accepted) < missing and not self._is_stopped:
                now = time.monotonic()
                if now >= self._links.until:
                    raise TimeoutError(f"{missing - len(self.accepted)} of the higher ranks have not connected")
                for key, _ in waiting.select(_LOOK_S):
                    if key.fileobj is self._listener:
                        self._take_call(waiting, unknown)
                    else:
                        self._hear(waiting, key.fileobj)  # type: ignore[arg-type]
                for key in [key for key in waiting.get_map().values() if key.data < now]:
                    self._hang_up(waiting, key.fileobj)  # type: ignore[arg-type]

    def _take_call(self, waiting: selectors.BaseSelector, unknown: contextlib.ExitStack) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # who called has gone
            call, _ = self._listener.accept()
            pid, uid = _credentials(call)
            if uid != os.getuid():
                call.close()  # who cannot be one of us is not listened to
                return
            call.setblocking(False)
            # A rank may be held up before its hello as anywhere else, and nobody but it can have its pid.
            until = math.inf if self._awaits(pid) else time.monotonic() + patience.PATIENCE.step_s
            waiting.register(call, selectors.EVENT_READ, until)
            unknown.callback(self._close_unknown, call)

    def _awaits(self, pid: int) -> bool:
        """Whether a rank that has yet to call is this process."""
        higher = range(self._links.rank + 1, self._links.size)
        return any(rank not in self.accepted and self._links.peers[rank]["pid"] == pid for rank in higher)

    def _hear(self, waiting: selectors.BaseSelector, call: socket.socket) -> None:
        rank = self._caller(call)
        if rank is None:
            self._hang_up(waiting, call)
        else:
            waiting.unregister(call)
            self.accepted[rank] = call

    def _caller(self, call: socket.socket) -> int | None:
        """Its rank, if it knows our secret. ConnectionRefusedError when it does, but is not who the rendezvous spoke of."""
        try:
            hello = call.recv(_HELLO.size + 1)
        except OSError:
            return None
        if len(hello) != _HELLO.size:
            return None
        rank, nonce, version = _HELLO.unpack(hello)
        is_ours = secrets.compare_digest(nonce, self._links.nonce)
        if not is_ours or rank in self.accepted or not self._links.rank < rank < self._links.size:
            return None
        if not _is_peer(call, self._links.peers[rank]):
            pid, uid = _credentials(call)
            peer = self._links.peers[rank]
            raise ConnectionRefusedError(
                f"pid {pid} of user {uid} connected as rank {rank}, which is pid {peer['pid']} of user {peer['uid']}"
            )
        if version != _VERSION:
            raise ConnectionRefusedError(f"rank {rank} does not run bucketwheel {__version__} as this rank does")
        return rank

    def _hang_up(self, waiting: selectors.BaseSelector, call: socket.socket) -> None:
        waiting.unregister(call)
        call.close()

    def _close_unknown(self, call: socket.socket) -> None:
        if call not in self.accepted.values():
            call.close()


def _credentials(call: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _is_peer(call: socket.socket, peer: dict[str, Any]) -> bool:
    pid, uid = _credentials(call)
    return pid == peer["pid"] and uid == peer["uid"] == os.getuid()
