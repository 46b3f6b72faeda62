"""The shm backend on systems that lack something, and beside users and processes that are none of its ranks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import random
import re
import resource
import socket
import struct
import threading
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
from bucketwheel.errors import CommError
from bucketwheel.testing import RankPool
from tests.support.comm_cases import check_all_gather, check_reduce_scatter, check_usable
from tests.support.failure_cases import SOON_S, error_of, gather
from tests.support.refused_calls import refuse
from tests.support.requirements import need_root

pytestmark = pytest.mark.dist


# -------------------------------------------------------------------------------------------- systems that lack something


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


@pytest.mark.parametrize("calls", [["pidfd_open"], ["sealing"], ["pidfd_open", "sealing"]], ids=" and ".join)
def test_what_it_can_do_without(calls):
    """Deaths are seen without pidfds too."""
    with RankPool(3, forked=True) as pool:
        for text in pool.run(lacking, calls, expect_dead=[1])[::2]:
            assert "rank 1" in text and "died" in text


def lacking_on_some(rank: int, size: int, call: str, ranks: list[int]) -> tuple[str, list[str]]:
    if rank not in ranks:
        pass
    elif call == "large files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    else:
        refuse(call)
    with pytest.raises(CommError, match="cannot share memory") as refused:
        Communicator(backend="shm", timeout_s=30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = Communicator(timeout_s=30)
    with comm:
        assert comm.backend == "c10d"
        check_usable(comm)
    return str(refused.value), [str(one.message) for one in caught]


NO_MEMFDS = r"CommError: cannot make shared memory \(memfd_create\) of \d+ bytes: Function not implemented"
NO_SOCKETS = r"OSError: \[Errno 97\] Address family not supported by protocol"
TOO_LARGE = r"CommError: cannot make shared memory \(ftruncate\) of \d{7,} bytes: File too large"


@pytest.mark.parametrize(
    ("call", "ranks", "reason"),
    [
        ("memfd_create", [1], NO_MEMFDS),
        ("unix sockets", [1], NO_SOCKETS),
        ("unix sockets", [0, 1, 2], NO_SOCKETS),
        ("large files", [0, 1, 2], TOO_LARGE),
    ],
)
def test_what_it_cannot_do_without(call, ranks, reason):
    """All ranks refuse, with the reason; "auto" takes another backend and says why."""
    with RankPool(3, forked=True) as pool:
        results = pool.run(lacking_on_some, call, ranks)
    for text, told in results:
        for said in (text, *told):
            lines = said.splitlines()[1:]
            assert len(lines) == len(ranks), said
            for line, lacks in zip(lines, ranks, strict=True):
                assert re.fullmatch(rf"  rank {lacks}: {reason}", line), said
        assert len(told) == 1 and "slower" in told[0]


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
    with RankPool(2, forked=True) as pool:
        for theirs, own in pool.run(looked_at):
            assert theirs in ("EACCES", "EACCES EPERM")
            assert "none" in own  # the ways are ways


def call_all(addresses: list[str], called: int, hello_of_a_rank: bytes) -> str:
    """Calls each address with hellos that are none, and with ``hello_of_a_rank``; writes to the file descriptor ``called``, and
    waits for what comes of it: a caller who says nothing is hung up on when every rank has called.
    """
    calls = []
    for address in addresses:
        for hello in (b"", b"x" * 24, bytes(4000), b"xyz", hello_of_a_rank):
            call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            call.settimeout(20)
            try:
                call.connect("\0" + address)
            except ConnectionRefusedError:  # another test's, which is over
                continue
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # hung up on already
                if hello:
                    call.send(hello)
            calls.append(call)
    os.write(called, b".")
    for call in calls:
        with contextlib.suppress(ConnectionResetError):
            if call.recv(100):
                return "somebody answered"
    return "hung up on" if len(calls) >= 8 else f"{len(calls)} calls"


def listening() -> list[str]:
    """Names of the sockets in the abstract namespace on which ranks of this test meet, and not another's that runs beside it:
    all have one parent."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid():
                held |= {os.readlink(fd) for fd in (process / "fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@bucketwheel-" in line]
    return [line[-1][1:] for line in lines if f"socket:[{line[6]}]" in held]


def called_by_others(rank: int, size: int, user: int | None, called: Path) -> str:
    """The last rank calls once something stands in the file ``called``; until then the others listen, and somebody else calls
    them: as that rank, with their secret, if of another user.
    """
    secret = bytes(range(16))
    nonce = secret if user is not None else b"x" * 16
    make_links = shm._Links.__init__

    def make_known_links(links: Any, *words: Any) -> None:
        make_links(links, *words)
        links.nonce = secret

    if rank == size - 1:
        call_lower_ranks = shm._Links._call_lower_ranks

        def call_late(links: Any) -> None:
            until = time.monotonic() + 40
            while not called.stat().st_size and time.monotonic() < until:
                time.sleep(0.01)
            call_lower_ranks(links)

        with (
            mock.patch.object(shm._Links, "_call_lower_ranks", call_late),
            Communicator(backend="shm", timeout_s=60) as comm,
        ):
            check_usable(comm)
        return ""
    said: list[str] = []

    def call() -> None:
        until = time.monotonic() + 30
        while len(listening()) < size - 1 and time.monotonic() < until:
            time.sleep(0.01)
        found = listening()
        with called.open("w") as mark:
            hello = shm._HELLO.pack(size - 1, nonce, shm._VERSION)
            answer = as_user(user, functools.partial(call_all, found, mark.fileno(), hello))
        said.append(f"{len(found) >= size - 1} {answer}")

    caller = threading.Thread(target=call)
    if rank == 0:
        caller.start()
    with (
        mock.patch.object(shm._Links, "__init__", make_known_links),
        Communicator(backend="shm", timeout_s=60) as comm,
    ):
        check_usable(comm)
        if rank == 0:
            caller.join(60)
    return "".join(said)


@pytest.mark.parametrize("user", [None, OTHER_UID])
def test_callers_that_are_no_ranks_are_hung_up_on(user, tmp_path):
    """Of another user, whatever they know, or of ours but without the secret."""
    if user is not None:
        need_root()
    called = tmp_path / "called"
    called.touch()
    with RankPool(3, forked=True) as pool:
        assert pool.run(called_by_others, user, called)[0] == "True hung up on"


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
        with pytest.raises(ConnectionRefusedError, match="rank 1 runs another version of bucketwheel"):
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
