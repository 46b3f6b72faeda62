"""The shm backend on systems that lack something, with ranks that do not meet, and beside strangers."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import random
import re
import socket
import struct
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bucketwheel.comm import shm
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError, CommTimeout
from tests.support.comm_cases import check_all_gather, check_reduce_scatter, check_usable
from tests.support.failure_cases import SOON_S, error_of, gather
from tests.support.held import held, still_held
from tests.support.ranks import RankPool
from tests.support.refused_calls import refuse
from tests.support.requirements import need_root

pytestmark = pytest.mark.dist


# -------------------------------------------------------------------------------------------- systems that lack something


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


def lacking(rank: int, size: int, calls: list[str]) -> str:
    for call in calls:
        refuse(call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = Communicator(timeout_s=30)
    with comm:
        assert comm.backend == "shm"
        for kind in ("foreign", "pool", "in_place_pool"):
            check_all_gather(comm, [(torch.float32, 500_000), (torch.bfloat16, 3)], kind)
            check_reduce_scatter(comm, [(torch.float32, 500_000)], kind)
        if rank == 1:
            os.kill(os.getpid(), 9)
        begin = time.monotonic()
        kind, text, _ = error_of(lambda: gather(comm)[1].wait())
        assert (kind, time.monotonic() - begin < SOON_S) == ("PeerError", True), text
    return text


def test_what_it_can_do_without():
    """Deaths are seen without pidfds too."""
    with RankPool(3) as pool:
        for text in pool.run(lacking, ["pidfd_open"], expect_dead=[1])[::2]:
            assert "rank 1" in text and "died" in text


def lacking_on_some(rank: int, size: int, call: str, ranks: list[int]) -> tuple[str, list[str]]:
    if rank in ranks:
        refuse(call)
    return made("shm")[0], made("auto")


@pytest.mark.parametrize(
    ("call", "ranks", "reason"),
    [
        (
            "memfd_create",
            [1],
            r"CommError: cannot make shared memory \(memfd_create\) of \d+ bytes: Function not implemented",
        ),
        (
            "sealing",
            [1],
            r"CommError: cannot make shared memory \(fcntl\(F_ADD_SEALS\)\) of \d+ bytes: Invalid argument",
        ),
        ("unix sockets", [0, 1, 2], r"OSError: \[Errno 97\] Address family not supported by protocol"),
    ],
)
def test_what_it_cannot_do_without(call, ranks, reason):
    """All ranks refuse, with the reason; "auto" takes another backend and says why."""
    with RankPool(3) as pool:
        results = pool.run(lacking_on_some, call, ranks)
    for refused, (backend, told) in results:
        assert "cannot share memory" in refused and (backend, len(told)) == ("c10d", 1) and "slower" in told[0]
        for said in (refused, *told):
            lines = said.splitlines()[1:]
            assert len(lines) == len(ranks), said
            for line, lacks in zip(lines, ranks, strict=True):
                assert re.fullmatch(rf"  rank {lacks}: {reason}", line), said


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
    with RankPool(3) as pool:
        (_, left), *others = pool.run(interrupted_at_the_store, timeout_s=60)
    assert left == ""
    for error, left_there in others:
        assert error.startswith("the communicator was not made within 3 s: ranks [0] have not arrived; ")
        assert left_there == ""


# ------------------------------------------------------------------------------------------------------- other users

OTHER_UID = 65_534


def as_user(uid: int | None, body: Callable[[], str]) -> str:
    """What ``body()`` returns in a child of that user (None: of ours), or its traceback."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            said = body()
        except BaseException:  # noqa: BLE001 (the parent's to report)
            said = traceback.format_exc()
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


class Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def refusal_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "none"


def intrude(pid: int, addresses: list[str]) -> str:
    """On every way that Linux has into the memory of a process."""
    ways = [
        lambda: os.listdir(f"/proc/{pid}/fd"),
        lambda: os.listdir(f"/proc/{pid}/map_files"),
        lambda: open(f"/proc/{pid}/mem", "rb"),
        *(functools.partial(open, f"/proc/{pid}/fd/{fd}", "rb") for fd in range(64)),
    ]
    refusals = {refusal_of(way) for way in ways}
    libc = ctypes.CDLL(None, use_errno=True)
    here = ctypes.create_string_buffer(16)
    for address in addresses:
        mine, theirs = Range(ctypes.addressof(here), 16), Range(int(address, 16), 16)
        got = libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        refusals.add(errno.errorcode[ctypes.get_errno()] if got == -1 else "none")
    return " ".join(sorted(refusals))


def memory_of(pid: int) -> list[str]:
    """Where the process has mapped memfds of ours."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split("-")[0] for line in lines if "memfd:bucketwheel" in line]


def looked_at(rank: int, size: int) -> tuple[str, str]:
    with Communicator(backend="shm", timeout_s=30) as comm:
        lease = comm.pool.acquire("secret", 1 << 16)
        lease.tensor(torch.uint8, (1 << 16,)).fill_(7)
        maps = memory_of(os.getpid())
        assert len(maps) >= 2
        theirs = as_user(OTHER_UID, functools.partial(intrude, os.getpid(), maps))
        own = as_user(None, functools.partial(intrude, os.getpid(), maps))
        lease.release()
        check_usable(comm)
    return theirs, own


def test_memory_is_shut_to_other_users():
    need_root()
    with RankPool(2) as pool:
        for theirs, own in pool.run(looked_at):
            assert theirs in ("EACCES", "EACCES EPERM")
            assert "none" in own  # the ways are ways


def test_a_rank_that_is_another_process_is_refused():
    """Credentials come from the kernel; what a process says of itself does not count."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    me = {"pid": os.getpid(), "uid": os.getuid()}
    assert shm._is_peer(here, me)
    assert not shm._is_peer(here, {**me, "pid": os.getpid() + 1})
    assert not shm._is_peer(here, {**me, "uid": os.getuid() + 1})
    assert struct.calcsize("iii") == shm._CREDENTIALS.size
    here.close()
    there.close()


def test_ranks_of_another_version_are_refused():
    links = mock.Mock(rank=0, size=2, nonce=bytes(16), peers=[{}, {"pid": os.getpid(), "uid": os.getuid()}])
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        there.send(shm._HELLO.pack(1, links.nonce, shm._VERSION ^ 1))
        with pytest.raises(ConnectionRefusedError, match="rank 1 does not run bucketwheel"):
            shm._Acceptor(links, here)._caller(here)


def test_fuzzed_hellos():
    """Who calls is taken for a rank only with the secret, as a higher rank that has not called yet; everything else is hung
    up on, and a rank's name with the secret from another process than the meeting's is refused.
    """
    chance = random.Random(6)
    own, other = {"pid": os.getpid(), "uid": os.getuid()}, {"pid": os.getpid() + 1, "uid": os.getuid()}
    links = mock.Mock(rank=1, size=6, nonce=chance.randbytes(16), peers=[own, own, own, own, own, other])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        acceptor = shm._Acceptor(links, listener)
        acceptor.accepted = {3: listener}
    told: Counter[str] = Counter()
    for _ in range(5000):
        rank = chance.choice([-1, 0, 1, 2, 2, 3, 4, 5, 5, 6, 2**31 - 1, -(2**31)])
        hello = bytearray(shm._HELLO.pack(rank, links.nonce, shm._VERSION))
        is_whole = chance.random() < 0.7
        if not is_whole:
            hello[chance.randrange(4, 20)] ^= 1 << chance.randrange(8)
            hello = (hello + chance.randbytes(30))[: chance.choice([0, 1, 3, 23, 24, 24, 24, 25, 50])]
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there:
            if hello:
                there.send(hello)
            else:
                there.close()
            try:
                found = acceptor._caller(here)
            except ConnectionRefusedError as error:
                assert (is_whole, rank) == (True, 5) and f"pid {os.getpid()} of user {os.getuid()}" in str(error)
                told["refused"] += 1
            else:
                assert found == (rank if is_whole and rank in (2, 4) else None)
                told["hung up on" if found is None else "taken"] += 1
    assert min(told.values()) >= 500 and len(told) == 3, told
