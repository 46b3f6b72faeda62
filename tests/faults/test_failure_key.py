"""What ranks of several hosts tell each other through the Store: failures, and how far each has come."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from bucketwheel.comm import peers as peers_module
from bucketwheel.comm.peers import Process, _Followed, make_peers
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError
from bucketwheel.native import core
from bucketwheel.testing import run_threads
from tests.support.cores import BUSY

pytestmark = pytest.mark.dist


class Rank:
    """One without a process, a link or a thread: `look` is what the thread does."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float = 20.0) -> None:
        self.bell = core.Bell()
        self.native = core.StorePeers(
            name="asked",
            rank=rank,
            world=world,
            timeout_s=timeout_s,
            id="0123456789abcdef",
            post=lambda _: None,
            collect=lambda _: [],
            links=[],
            bell=self.bell,
        )
        rendezvous: Any = SimpleNamespace(base=store, prefix="", size=world)
        self.rounds = mock.Mock()
        self.followed = _Followed(self.native, rendezvous, store, self.rounds, {})

    def look(self) -> bool:
        return self.followed.look()

    def fail(self, text: str | bytes) -> None:
        with contextlib.suppress(CommError):
            self.native.fail_round(text, is_timeout=False)


def ranks_of(world: int, **options: Any) -> list[Rank]:
    store = dist.HashStore()
    return [Rank(store, rank, world, **options) for rank in range(world)]


def goes(*_: Any) -> Any:
    raise RuntimeError("the connection was closed")


# ------------------------------------------------------------------------------------------------------------ failures


def test_of_several_failures_the_first_in_the_store_counts():
    first, second, third = ranks_of(3)
    first.fail("first")
    second.fail("second")
    for one in (first, second, third):
        one.look()
    assert third.native.trouble() == "first"


def test_a_failure_whose_words_are_no_utf8_is_told():
    """As NCCL's may be, which quote a path."""
    first, second, third = ranks_of(3)
    first.fail(b"open /data/\xff failed")
    for one in (first, second):
        one.look()
    assert second.native.trouble() == "open /data/\ufffd failed"
    third.native.deliver((1, b"open /data/\xff failed", 1, 0, 2, b"\xff", []))
    assert third.native.trouble() == "open /data/\ufffd failed"


def test_the_failure_of_a_rank_that_leaves_at_once_is_told():
    """It fails and leaves when the thread has just asked whether it had left."""
    one, other = ranks_of(2)
    store = one.followed._store

    def leaves_meanwhile(keys: list[str]) -> bool:
        one.fail("the last word")
        one.native.leave(0.0)
        return bool(store.check(keys))

    one.followed._store = mock.Mock(check=leaves_meanwhile, compare_set=store.compare_set)
    assert one.look()  # there is more to tell
    assert not one.look()
    other.look()
    assert other.native.trouble() == "the last word"
    one.rounds.end.assert_called_once()


def test_without_a_store_whoever_waits_fails_in_the_end():
    one, _ = ranks_of(2)
    one.followed._store = mock.Mock(check=goes)
    one.look()
    assert one.native.trouble() == ""
    time.sleep(5.1)  # kPatience.store
    assert "the Store of the process group is gone" in one.native.trouble()


def test_where_nobody_answers_all_are_unknown():
    one, _ = ranks_of(2)
    assert one.native.late_in_round(1) is None
    time.sleep(3.1)  # kPatience.answer
    assert "Unknown (no answer): rank 1" in one.native.late_in_round(1)


# ------------------------------------------------------------------------------------------------------------ 64 ranks


class Hosts:
    """Ranks that are threads, each with what a process has."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.sockets: dict[int, list[int]] = {rank: [] for rank in range(world)}
        self._rank = threading.local()

    def link(self, fd: int, heartbeat_timeout_s: float) -> Any:
        self.sockets[self._rank.value].append(os.dup(fd))
        return core.Link(fd, heartbeat_timeout_s)

    def make(self, rank: int, _: int = 0) -> Any:
        self._rank.value = rank
        return make_peers(Rendezvous(self.server.clone(), rank, self.world, 60.0, "64"), "many", 60.0, Process())

    def kill(self, rank: int) -> None:
        """What the others see of its end."""
        for fd in self.sockets[rank]:
            with socket.socket(fileno=fd) as end:
                end.shutdown(socket.SHUT_RDWR)
        self.sockets[rank] = []


@pytest.mark.timeout_s(180)
@pytest.mark.slow
def test_a_death_is_told_to_64_ranks_within_two_seconds():
    """With at most 2,000 operations of the Store a second, over all ranks."""
    world, victim = 64, 7
    hosts = Hosts(world)
    talks = []
    talk = _Followed._talk

    def counted(followed: _Followed, store: Any, report: Any) -> None:
        talks.append(time.monotonic())
        if followed._peers.rank != victim:  # whose end the others see, and who tells nobody any more
            talk(followed, store, report)

    fake_core = mock.Mock(wraps=core, Link=hosts.link, StorePeers=core.StorePeers, Bell=core.Bell)
    no_gloo = mock.patch.object(peers_module.gloo, "connect", lambda *_: None)
    with no_gloo, mock.patch.object(peers_module, "core", fake_core), mock.patch.object(_Followed, "_talk", counted):
        ranks = run_threads(hosts.make, world, timeout_s=120)
        talks.clear()
        begin = time.monotonic()
        time.sleep(1.0)
        quiet_s, quiet = time.monotonic() - begin, len(talks)
        begin = time.monotonic()
        hosts.kill(victim)
        waiting = {rank for rank in range(world) if rank != victim}
        while waiting and time.monotonic() - begin < 10:
            waiting = {rank for rank in waiting if ranks[rank].trouble() != f"rank {victim} died"}
            time.sleep(0.01)
        took_s = time.monotonic() - begin
        for one in ranks:
            one.leave(0.0)
    for fds in hosts.sockets.values():
        for fd in fds:
            os.close(fd)
    assert not waiting and took_s < 2.0 * BUSY, (waiting, took_s)
    assert 2 * quiet / quiet_s <= 2000
