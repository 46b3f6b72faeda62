"""How the ranks of the shm backend get connected: who is where goes through a `Meeting`, the rest over Unix sockets."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from typing import Any

from ._build import native
from .errors import CommError
from .meeting import Meeting

__all__ = ["NotOneHost", "connect"]

_CREDENTIALS = struct.Struct("iii")  # SO_PEERCRED: pid, uid, gid
_HELLO = struct.Struct("<i16s")  # rank, nonce of the rank that is called
_HELLO_TIMEOUT_S = 1.0


class NotOneHost(Exception):
    """The ranks do not all share a host; the text says who could not reach whom. On every rank alike."""


def connect(meeting: Meeting, name: str, timeout_s: float) -> Any:
    """The native communicator of the ranks, all or none: `NotOneHost`, or `CommError` on every rank."""
    return _Links(meeting).connect(name, timeout_s)


class _Links:
    """Names in the abstract namespace are random and end with their socket. Each end checks the other's credentials, so
    that the process at the other end is the one that the meeting speaks of.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.rank, self.size = meeting.rank, meeting.size
        self.nonce = secrets.token_bytes(16)
        self.peers: list[dict[str, Any]] = []
        self.sockets: dict[int, socket.socket] = {}

    def connect(self, name: str, timeout_s: float) -> Any:
        meeting = self.meeting
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_sockets)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            address = f"\0bucketwheel-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(self.size)
            me = {"address": address, "nonce": self.nonce.hex(), "pid": os.getpid(), "uid": os.getuid()}
            self.peers = meeting.exchange(me)
            # Connecting needs no accept() on the other side: a listening socket queues it.
            self._expect_reached(meeting.attempt(self._call_lower_ranks))
            self._expect_reached(meeting.attempt(lambda: self._accept_higher_ranks(listener)))
            made: list[Any] = []
            failures = ""
            try:
                failures = meeting.failures(meeting.attempt(lambda: made.append(self._make(name, timeout_s))))
                if failures:
                    raise CommError(f"the communicator could not be made on all ranks{failures}")
            except BaseException:
                for comm in made:
                    comm.close(0.0)
                raise
            return made[0]

    def _close_sockets(self) -> None:
        for call in self.sockets.values():
            call.close()

    def _make(self, name: str, timeout_s: float) -> Any:
        fds = [self.sockets[r].detach() if r != self.rank else -1 for r in range(self.size)]
        self.sockets.clear()
        return native().make_shm_comm(self.rank, fds, [peer["pid"] for peer in self.peers], name, timeout_s)

    def _expect_reached(self, failure: str) -> None:
        failures = self.meeting.failures(failure)
        if failures:
            raise NotOneHost(failures)

    def _call_lower_ranks(self) -> None:
        for rank in range(self.rank):
            peer = self.peers[rank]
            call = self.sockets[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            call.settimeout(max(self.meeting.deadline - time.monotonic(), 0.001))
            call.connect(peer["address"])
            if not _is_peer(call, peer):
                raise ConnectionRefusedError(
                    f"the socket of rank {rank} belongs to another process than pid {peer['pid']}"
                )
            call.send(_HELLO.pack(self.rank, bytes.fromhex(peer["nonce"])))

    def _accept_higher_ranks(self, listener: socket.socket) -> None:
        while len(self.sockets) < self.size - 1:
            listener.settimeout(max(self.meeting.deadline - time.monotonic(), 0.001))
            call, _ = listener.accept()
            call.settimeout(_HELLO_TIMEOUT_S)  # a peer sends its hello before anybody accepts
            rank = self._caller(call)
            if rank is None:
                call.close()  # some other process of this host
            else:
                self.sockets[rank] = call

    def _caller(self, call: socket.socket) -> int | None:
        try:
            hello = call.recv(_HELLO.size)
        except OSError:
            return None
        if len(hello) != _HELLO.size:
            return None
        rank, nonce = _HELLO.unpack(hello)
        is_expected = self.rank < rank < self.size and rank not in self.sockets and nonce == self.nonce
        return rank if is_expected and _is_peer(call, self.peers[rank]) else None


def _is_peer(call: socket.socket, peer: dict[str, Any]) -> bool:
    pid, uid, _ = _CREDENTIALS.unpack(call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid == peer["pid"] and uid == peer["uid"] == os.getuid()
