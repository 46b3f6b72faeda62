"""Agreement between ranks that do not share a host: rounds, leaving, the Store's process, what is left behind."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from bucketwheel.comm import peers
from bucketwheel.comm.communicator import Communicator
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import (
    SOON_S,
    Error,
    apart,
    die,
    error_of,
    expect_gathered,
    expect_no_threads,
    expect_prefix,
    fresh_ranks,
    gather,
    hosts_apart,
    threads_of_agreement,
)
from tests.support.requirements import slow_case

pytestmark = pytest.mark.dist

STORE_S = 5.0  # kPatience.store of csrc/comm/peers/patience.h


def payload_of(rank: int, number: int, bytes_: int) -> bytes:
    return bytes((rank * 31 + number * 7 + i) % 251 for i in range(min(bytes_, 1000))) * (-(-bytes_ // 1000))


def rounds(rank: int, size: int) -> None:
    with apart("rounds") as (comm, _):
        assert threads_of_agreement() == ["bw_run"]
        for number, length in enumerate([0, 1, 247, 248, 249, 5000, comm.max_payload_bytes - 2000, 0, 3]):
            everyone = [payload_of(other, number, length + 100 * other * (length != 0)) for other in range(size)]
            assert comm.exchange(everyone[rank]) == everyone
        # Only the last rank's is long: all take the second part of the round.
        lengths = [0] * (size - 1) + [100_000]
        assert [len(one) for one in comm.exchange(b"x" * lengths[rank])] == lengths
        with pytest.raises(ValueError, match="at most"):
            comm.post(bytes(comm.max_payload_bytes + 1))
        for number in range(200):
            assert comm.exchange(payload_of(rank, number, 3)) == [payload_of(other, number, 3) for other in range(size)]
        check_usable(comm)
    expect_no_threads()


def test_rounds(rank_pool):
    rank_pool(3).run(rounds, timeout_s=60)


# ------------------------------------------------------------------------------------------------- the Store's process


@contextlib.contextmanager
def store_of_rank_0(rank: int, size: int, port: int) -> Iterator[None]:
    """As with ``env://``: the Store is in the process of rank 0, and goes with it."""
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def without_store(world: int, case: Any, *args: Any, dead: tuple[int, ...] = (0,)) -> list[Any]:
    with fresh_ranks(world, backend=None) as pool:
        return pool.run(case, free_port(), *args, expect_dead=dead, timeout_s=40)


def store_dies(rank: int, size: int, port: int) -> tuple[Error, float]:
    with store_of_rank_0(rank, size, port), apart("doomed", timeout_s=20.0) as (comm, _):
        comm.exchange(b"")
        if rank == 0:
            time.sleep(0.3)
            die()
        begin = time.monotonic()
        error = error_of(gather(comm)[1].synchronize)
        return error, time.monotonic() - begin


def test_the_store_dies_with_its_rank():
    """The ranks beside it have seen that themselves, and name it."""
    for rank, (error, took_s) in enumerate(without_store(3, store_dies)[1:], 1):
        assert (error[0], error[2]) == ("PeerError", 0) and "rank 0 died" in error[1], error
        expect_prefix(error[1], rank, 3, "doomed")
        assert took_s < 0.3 + SOON_S


@pytest.mark.slow
def test_the_store_dies_with_a_rank_far_away():
    """Nobody can be told, but nobody waits until the time limit either."""
    for error, took_s in without_store(5, store_dies)[1:]:
        assert error[0] in ("PeerError", "CommError"), error
        assert took_s < STORE_S + SOON_S


def store_aborts(rank: int, size: int, port: int) -> Error:
    with store_of_rank_0(rank, size, port), apart("aborted", timeout_s=20.0) as (comm, _):
        comm.exchange(b"")
        if rank == 0:
            comm.abort("the data ran out")
            comm.close()
            os._exit(0)
        return error_of(lambda: gather(comm)[1].synchronize())  # it may be known before the call


def test_the_store_goes_right_after_an_abort():
    for error in without_store(3, store_aborts)[1:]:
        assert (error[0], error[2]) == ("PeerError", 0) and "aborted by rank 0: the data ran out" in error[1], error


AWAY_S = 3.0  # close() of the first rank to leave waits for the others up to 2 s, for NCCL's destruction is collective


def store_leaves(rank: int, size: int, port: int, is_needed: bool) -> Error:
    with store_of_rank_0(rank, size, port), apart("party", timeout_s=20.0) as (comm, _):
        full, handle = gather(comm)
        if rank == 0:
            handle.synchronize()
            comm.close()
            os._exit(0)
        time.sleep(AWAY_S)  # longer than a dead peer would go unnoticed
        handle.synchronize()
        expect_gathered(comm, full)
        if is_needed:
            error = error_of(lambda: comm.exchange(b""))  # another may have told it before the call
        else:
            comm.post(b"")
            error = ("nothing", "", None)
    expect_no_threads()
    return error


@pytest.mark.parametrize("is_needed", [slow_case(False), True])
def test_the_store_leaves_in_order(is_needed):
    """Nobody fails by that alone; and who needs the rank that has left is told so, not that it died."""
    for kind, text, gone in without_store(3, store_leaves, is_needed)[1:]:
        assert kind == ("PeerError" if is_needed else "nothing"), text
        if is_needed:
            assert gone == 0 and "rank 0 has closed the communicator" in text


# -------------------------------------------------------------------------------------------------------------- making


def no_thread_is_left(rank: int, size: int) -> None:
    """The system refuses a rank the thread that reads the Store."""
    expect_no_threads()  # that of an earlier test's communicator, which may go on a moment, would serve this one too
    refused = mock.patch.object(peers, "start", side_effect=RuntimeError("can't start new thread"))
    begin = time.monotonic()
    with hosts_apart(), refused if rank == 0 else contextlib.nullcontext():
        kind, text, _ = error_of(lambda: Communicator(backend="c10d", timeout_s=20))
    assert kind == "CommError" and time.monotonic() - begin < 15, text
    assert "\n  rank 0: RuntimeError: can't start new thread" in text and "rank 1" not in text
    expect_no_threads()


def test_agreement_without_its_thread_leaves_none(rank_pool):
    rank_pool(2).run(no_thread_is_left, timeout_s=30)
