"""What ranks that do not share a host tell each other through the Store: failures, and how far each has come."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from bucketwheel.comm import peers as agreement
from bucketwheel.errors import CommError
from bucketwheel.native import core

pytestmark = pytest.mark.dist

NATIVE_PATIENCE_S = 3.0


def peers_of(world: int, rank: int = 0) -> Any:
    return core.StorePeers("asked", rank, world, 20.0, lambda _: None, lambda _: [])


def goes(*_: Any) -> Any:
    raise RuntimeError("the connection was closed")


@contextlib.contextmanager
def carrying(peers: list[Any], stores: list[Any], world: int, ring: Any = None) -> Iterator[None]:
    """The threads of some ranks; in the end the ranks leave."""
    threads = [
        threading.Thread(target=agreement._carry_failures, args=(*own, ring or mock.Mock(), world), daemon=True)
        for own in zip(peers, stores, strict=True)
    ]
    for thread in threads:
        thread.start()
    yield
    for one in peers:
        one.leave(0.0)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def await_trouble(peers: Any) -> str:
    until = time.monotonic() + 5
    while not peers.trouble() and time.monotonic() < until:
        time.sleep(0.01)
    return peers.trouble()


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("has_store", [True, False])
def test_a_failure_whose_words_are_no_utf8_is_told(has_store):
    """As NCCL's may be, which quote a path."""
    told = threading.Event()
    ring = mock.Mock(**{"pass_on.side_effect": lambda _: told.set()})
    store = dist.HashStore()
    first, second = peers_of(2), peers_of(2, 1)
    with carrying([first], [store if has_store else mock.Mock(check=goes, compare_set=goes)], 2, ring):
        with pytest.raises(CommError, match="open /data/\ufffd failed"):
            first.fail("error", b"open /data/\xff failed")
        assert told.wait(5) and "open /data/\ufffd failed" in ring.pass_on.call_args.args[0]
    if has_store:
        with carrying([second], [store], 2):
            assert await_trouble(second) == "open /data/\ufffd failed"


def test_the_trouble_that_is_no_utf8():
    peers = peers_of(2)
    peers.deliver((1, b"open /data/\xff failed", 1, 0, 2, b"\xff", []))
    assert peers.trouble() == "open /data/\ufffd failed"


def test_of_several_failures_the_first_in_the_store_counts():
    store, ring = dist.HashStore(), mock.Mock()
    first, second, third = (peers_of(3, rank) for rank in range(3))
    agreement._News(first, store, 3).tell((1, "first", 0, 0, 0, "", []))
    with contextlib.suppress(CommError):
        second.fail("error", "second")
    with carrying([second, third], [store, store], 3, ring):
        assert await_trouble(third) == "first"
        time.sleep(0.2)
    assert not ring.pass_on.called and store.num_keys() == 1


def test_a_failure_is_told_behind_questions_that_its_rank_has_not_read():
    _, peers, _, news = ranks_of(2)
    assert peers[0].late_in_round(1) is None
    news[0].look()
    news[1].tell((1, "second", 1, 0, 0, "", []))
    news[0].look()
    assert news[0].failure == news[1].failure == (1, [1, "second", 1, 0, 0, "", []])


def test_whatever_stops_the_thread_the_rank_leaves_at_once():
    """And what it failed with goes against the ring at least."""

    def breaks(*_: Any) -> Any:
        raise ValueError("nobody has thought of this")

    peers, ring = peers_of(2), mock.Mock()
    with contextlib.suppress(CommError):
        peers.fail("error", "the last word")
    peers.finish()  # as the other thread
    peers.leave(0.0)
    with pytest.raises(ValueError, match="thought"):
        agreement._carry_failures(peers, mock.Mock(compare_set=breaks), ring, 2)
    assert "the last word" in ring.pass_on.call_args.args[0] and ring.news_is_out.set.called
    begin = time.monotonic()
    peers.leave(5.0)
    assert time.monotonic() - begin < 1


# ----------------------------------------------------------------------------------------------------------- questions


class CountedStore:
    """One Store for all ranks of this process, and what this one does with it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


class Rank:
    """The native peers of one that has posted some rounds."""

    def __init__(self, world: int, rank: int) -> None:
        self.native, self.posted = peers_of(world, rank), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def progress(self) -> list[int]:
        return [0, 0, self.posted]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock():
    with mock.patch.object(agreement, "time", Clock()) as clock:
        yield clock


def ranks_of(world: int) -> tuple[Any, list[Any], list[CountedStore], list[Any]]:
    """What the threads of all ranks do, step by step: the Store, the native peers, the counts, and the news of each."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    peers = [Rank(world, rank) for rank in range(world)]
    stores = [CountedStore(store) for _ in range(world)]
    return store, peers, stores, [agreement._News(*own, world) for own in zip(peers, stores, strict=True)]


def test_ranks_tell_how_far_they_are_once_somebody_asks(clock):
    store, peers, stores, news = ranks_of(3)
    for one in news:
        one.look()
    assert store.num_keys() == 0 and all(own.calls == {"check": 1} for own in stores)
    peers[1].posted = 1
    assert peers[0].late_in_round(1) is None, "nobody has answered"
    news[0].look()
    news[1].look()
    news[0].look()
    assert peers[0].late_in_round(1) is None, "one has not answered, and there is time"
    news[2].look()
    news[0].look()
    assert peers[0].late_in_round(1) == ". Not arrived: rank 0 (last posted 0), rank 2 (last posted 0)"
    for own, one in zip(stores, news, strict=True):
        own.calls.clear()
        one.look()
    assert all(own.calls == {"check": 1} for own in stores), "as if nobody had ever asked"


def test_ranks_that_do_not_answer_are_unknown(clock):
    _, peers, _, news = ranks_of(6)
    assert peers[0].late_in_round(1) is None
    peers[2].posted = 1
    for rank in (0, 2, 3):
        news[rank].look()
    clock.now += agreement._times_s(6)[1]
    news[0].look()
    late = "Not arrived: rank 0 (last posted 0), rank 3 (last posted 0). Unknown (no answer): rank 1, rank 4, rank 5"
    assert peers[0].late_in_round(1) == f". {late}"


def test_who_asks_again_is_answered_anew(clock):
    """By ranks that answered before, and have come further or have gone silent since."""
    _, peers, _, news = ranks_of(3)
    assert peers[0].late_in_round(1) is None
    for rank in (0, 1, 2, 0):
        news[rank].look()
    assert peers[0].late_in_round(1) == "".join(
        (". Not arrived: rank 0 (last posted 0), ", "rank 1 (last posted 0), rank 2 (last posted 0)")
    )
    peers[1].posted = 1
    clock.now += 10
    time.sleep(2.1)  # until the answers are too old for the native side
    assert peers[0].late_in_round(1) is None
    for rank in (0, 1, 0):
        news[rank].look()
    assert peers[0].late_in_round(1) is None
    clock.now += 10
    news[0].look()
    assert peers[0].late_in_round(1) == ". Not arrived: rank 0 (last posted 0). Unknown (no answer): rank 2"


@pytest.mark.parametrize("is_young", [True, False])
def test_who_asks_just_after_another_has_asked_waits_for_the_same_answers(is_young, clock):
    store, peers, stores, news = ranks_of(3)
    assert peers[0].late_in_round(0) is None
    for rank in (0, 1, 2):
        news[rank].look()
    clock.now += agreement._times_s(3)[1] * (0.9 if is_young else 1.1)
    assert peers[1].late_in_round(0) is None
    news[1].look()
    assert store.check(["news/1"]) == (not is_young)
    for rank in (0, 2, 1):
        news[rank].look()
    assert [one.late_in_round(0) for one in peers[:2]] == [", which all ranks have posted"] * 2


def cost_of_a_question(world: int, is_silent: bool, clock: Clock) -> tuple[int, int]:
    """The most operations of the Store of one rank that asks, and those of the late one that answers: all others pass
    their time limit at once, and look until they know."""
    store, peers, stores, news = ranks_of(world)
    *early, late = range(world)
    for rank in early:
        peers[rank].posted = 1
        assert peers[rank].late_in_round(1) is None
    for step in range(100):
        for rank in early:
            news[rank].look()
        if step == 1 and not is_silent:
            news[late].look()
        if all(one.pause_s == agreement._times_s(world)[0] for one in news):
            break
        clock.now += news[0].pause_s
    for rank in early:  # which the native side takes for one that has not posted
        own, other = (f"rank {who} (last posted 0)" for who in (rank, late))
        who = f"{own}. Unknown (no answer): rank {late}" if is_silent else f"{own}, {other}"
        assert peers[rank].late_in_round(1) == f". Not arrived: {who}"
    assert not store.check(["news/1"]), "there was one question"
    return max(stores[rank].calls.total() for rank in early), stores[late].calls.total()


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_question_costs_a_rank_the_same_in_every_world(is_silent, clock):
    """Where all ranks but one ask at once, and one Store serves them all."""
    costs = {world: cost_of_a_question(world, is_silent, clock) for world in (3, 64, 256)}
    if is_silent:
        # check for news and for answers, of which there are fewer where the pauses are longer.
        assert costs[64][0] <= costs[3][0] <= 45 and costs[256][0] <= costs[3][0]
        assert {late for _, late in costs.values()} == {0}
    else:
        # compare_set, append, add, and the answers by get; a look: check for news and for answers, three times.
        assert {asking for asking, _ in costs.values()} == {10}
        # check and get, append and add, and the last one says so by set; check.
        assert {late for _, late in costs.values()} == {6}


@pytest.mark.parametrize("world", [2, 64, 256, 1024, 1600, 4096, 100_000])
def test_ranks_have_the_time_to_answer(world):
    """The late one looks for news once in a period; and the native side waits for longer than all that."""
    period_s, answers_s = agreement._times_s(world)
    assert period_s + 0.5 < answers_s < NATIVE_PATIENCE_S - 0.5
    peers = peers_of(2)
    news = agreement._News(peers, dist.HashStore(), world)
    assert news.pause_s == period_s
    assert peers.late_in_round(0) is None
    news.look()
    assert answers_s / news.pause_s < 17, "looks of one rank that waits for answers"


def test_without_a_thread_that_answers_nothing_waits_for_ever():
    peers = peers_of(2)
    begin = time.monotonic()
    while (late := peers.late_in_round(1)) is None:
        assert time.monotonic() - begin < NATIVE_PATIENCE_S + 0.5
        time.sleep(0.01)
    assert time.monotonic() - begin >= NATIVE_PATIENCE_S
    assert late == ". Not arrived: rank 0 (last posted 0). Unknown (no answer): rank 1"


def test_without_a_store_the_answer_is_that_nobody_answers():
    rank = peers_of(3)
    assert rank.late_in_round(1) is None
    with carrying([rank], [mock.Mock(compare_set=goes, check=goes)], 3):
        begin = time.monotonic()
        while (late := rank.late_in_round(0)) is None:
            time.sleep(0.01)
        assert late == ". Unknown (no answer): rank 1, rank 2" and time.monotonic() - begin < 0.9


def test_who_waits_for_answers_hears_of_a_failure_first():
    rank, store = peers_of(3), dist.HashStore()
    assert rank.late_in_round(0) is None
    agreement._News(peers_of(3, 2), store, 3).tell((3, "rank 2 failed", 2, 0, 0, "", []))
    with carrying([rank], [store], 3):
        while not rank.trouble():
            assert rank.late_in_round(0) is None
            time.sleep(0.001)
        begin = time.monotonic()
        time.sleep(0.1)
        assert rank.late_in_round(0) is None
        while rank.late_in_round(0) is None:
            time.sleep(0.01)
        assert rank.trouble() == "rank 2 failed" and time.monotonic() - begin < 0.9


def test_many_ranks_that_ask_at_once_are_answered_in_time():
    """With their threads, over one Store that is a server."""
    world = 48
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    peers = [Rank(world, rank) for rank in range(world)]
    stores = [CountedStore(dist.PrefixStore("many", server)) for _ in range(world)]
    with carrying(peers, stores, world):
        asking, begin = dict(enumerate(peers[:-1])), time.monotonic()
        while asking:
            for rank, one in list(asking.items()):
                if (late := one.late_in_round(0)) is not None:
                    assert late == ", which all ranks have posted"
                    del asking[rank]
            time.sleep(0.001)
        assert time.monotonic() - begin < NATIVE_PATIENCE_S
    assert not server.check(["many/news/1"]) and max(store.calls.total() for store in stores) < 100
