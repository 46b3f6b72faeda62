"""Ranks that call each other over Unix sockets to share memory: what holds them up, and what they hear if it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from bucketwheel.comm import patience, shm
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError, CommTimeout
from bucketwheel.testing import RankPool
from tests.support.comm_cases import check_usable
from tests.support.held import held, still_held

pytestmark = pytest.mark.dist


def made(backend: str) -> tuple[str, list[str]]:
    """The backend of a new communicator, and what was warned of; the error instead where there is one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            comm = Communicator(backend=backend, timeout_s=60)
        except CommError as error:
            return str(error), []
    with comm:
        check_usable(comm)
        return comm.backend, [str(one.message) for one in caught]


def held_up(rank: int, size: int, backend: str) -> tuple[str, list[str]]:
    """The last rank is, between its calls and its hellos, for longer than a stranger is heard."""
    is_peer = shm._is_peer

    def is_peer_later(call: socket.socket, peer: dict[str, Any]) -> bool:
        time.sleep(patience.PATIENCE.step_s + 0.4)
        return is_peer(call, peer)

    with mock.patch.object(shm, "_is_peer", is_peer_later if rank == size - 1 else is_peer):
        return made(backend)


@pytest.mark.parametrize("backend", ["auto", "shm"])
def test_a_rank_may_be_held_up_before_its_hello(backend):
    with RankPool(3, forked=True) as pool:
        assert pool.run(held_up, backend) == [("shm", [])] * 3


def test_a_silent_caller_is_heard_as_long_as_a_rank_of_its_pid_is_awaited():
    """Then no longer than any other."""
    own, other = {"pid": os.getpid(), "uid": os.getuid()}, {"pid": os.getpid() + 1, "uid": os.getuid()}
    rendezvous = mock.Mock(attempt=lambda step: step())
    links = mock.Mock(
        rank=0, size=3, nonce=bytes(16), peers=[own, own, other], rendezvous=rendezvous, until=time.monotonic() + 30
    )
    limit_s = 0.2
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(patience, "PATIENCE", replace(patience.PATIENCE, step_s=limit_s)))
        listener, rank, stranger = (
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(3)
        )
        listener.bind("")
        listener.listen()
        acceptor = stack.enter_context(shm._Acceptor(links, listener))
        rank.connect(listener.getsockname())
        rank.settimeout(4 * limit_s)
        with pytest.raises(TimeoutError):
            rank.recv(1)
        rank.send(shm._HELLO.pack(1, links.nonce, shm._VERSION))
        until = time.monotonic() + 20
        while 1 not in acceptor.accepted and time.monotonic() < until:
            time.sleep(0.01)
        stranger.connect(listener.getsockname())
        stranger.settimeout(20)
        assert stranger.recv(1) == b"" and list(acceptor.accepted) == [1]
        acceptor.accepted[1].close()


def found(rank: int, size: int, backend: str, finds: bool) -> tuple[str, list[str]]:
    """The last rank takes the others' sockets for somebody else's, or there is nobody where it calls."""
    with contextlib.ExitStack() as stack:
        if rank == size - 1 and finds:
            stack.enter_context(mock.patch.object(shm, "_is_peer", return_value=False))
        elif rank == size - 1:
            connect = mock.Mock(return_value=errno.ECONNREFUSED)
            stack.enter_context(mock.patch.object(socket.socket, "connect_ex", connect))
        return made(backend)


@pytest.mark.parametrize("finds", [True, False], ids=["found", "apart"])
def test_auto_tells_why_ranks_of_one_host_are_not_connected(finds):
    """Of ranks on several hosts there is nothing to tell."""
    reason = "rank 2: ConnectionRefusedError: "
    with RankPool(3, forked=True) as pool:
        for backend, told in pool.run(found, "auto", finds):
            assert (backend, len(told)) == ("c10d", finds)
            assert not finds or ("found each other on one host" in told[0] and reason in told[0])
        for refused, _ in pool.run(found, "shm", finds):
            assert ("found each other on one host" if finds else "cannot share memory") in refused and reason in refused


def one_comes_late(rank: int, size: int) -> None:
    """Behind the time limit of the others, who await rank 0 a little longer than each other."""
    if rank == 0:
        time.sleep(3.7)
    with Communicator(backend="shm", timeout_s=3.0) as comm:
        check_usable(comm)


def test_ranks_that_have_met_late_have_time_for_their_calls():
    with RankPool(3, forked=True) as pool:
        pool.run(one_comes_late, timeout_s=60)


def makes_late(rank: int, size: int) -> None:
    """The rounds behind the calls have taken all the time, and rank 0 is held up before it sends the control segment."""
    make = shm._Links._make

    def late(links: Any, *options: Any) -> Any:
        links.until = time.monotonic()
        time.sleep(0.4 if rank == 0 else 0.0)
        return make(links, *options)

    with mock.patch.object(shm._Links, "_make", late), Communicator(backend="shm", timeout_s=20) as comm:
        check_usable(comm)


def test_ranks_that_are_connected_late_have_time_for_the_making():
    with RankPool(3, forked=True) as pool:
        pool.run(makes_late, timeout_s=60)


def interrupted_at_the_store(rank: int, size: int) -> tuple[str, str]:
    """Rank 0, by Ctrl-C, when it asks for what the communicator is known by."""
    before = held()
    error = ""
    asked = mock.PropertyMock(side_effect=KeyboardInterrupt) if rank == 0 else Rendezvous.id
    with mock.patch.object(Rendezvous, "id", asked):
        try:
            Communicator(backend="shm", timeout_s=3)
        except (KeyboardInterrupt, CommTimeout) as caught:
            error = str(caught)
    return error, still_held(before)


def test_an_interrupted_making_leaves_no_sockets():
    """The others hear who is missing by their time limit."""
    with RankPool(3, forked=True) as pool:
        (_, left), *others = pool.run(interrupted_at_the_store, timeout_s=60)
    assert left == ""
    for error, left_there in others:
        assert error == "the communicator was not made within 3 s: ranks [0] have not come"
        assert left_there == ""
