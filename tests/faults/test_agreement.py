"""Agreement between ranks that do not share a host: rounds, time limits, deaths, aborts and leaving."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from bucketwheel.comm import patience
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommTimeout
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import (
    SOON_S,
    Error,
    error_of,
    expect_no_threads,
    expect_prefix,
    gather,
    threads_of_agreement,
)
from tests.support.nccl_failure_cases import (
    apart,
    deaths,
    die,
    expect_death_told,
    expect_gathered,
    fresh_ranks,
    hosts_apart,
    script,
)
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist

STORE_S = 5.0  # kPatience.store of csrc/comm/peers/patience.h


# -------------------------------------------------------------------------------------------------------------- rounds


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
        with pytest.raises(ValueError, match="nothing is posted"):
            comm.collect()
        comm.post(b"once")
        with pytest.raises(ValueError, match="not collected"):
            comm.post(b"twice")
        assert comm.collect() == [b"once"] * size
        for number in range(200):
            assert comm.exchange(payload_of(rank, number, 3)) == [payload_of(other, number, 3) for other in range(size)]
        check_usable(comm)
    expect_no_threads()


@pytest.mark.parametrize("world", [slow_case(2), 3])
def test_rounds(world, rank_pool):
    rank_pool(world).run(rounds, timeout_s=60)


def parts(rank: int, size: int) -> None:
    with apart("whole") as (comm, _):
        part = comm.split(0 if rank < 2 else 1)
        check_usable(part)
        part.close()
        check_usable(comm)
    expect_no_threads()


def test_parts(rank_pool):
    rank_pool(3).run(parts, timeout_s=60)


# --------------------------------------------------------------------------------------------------------- time limits


def collects_alone(rank: int, size: int) -> None:
    with apart("patient") as (comm, _):
        if rank == 0:
            comm.post(b"early")
            begin = time.monotonic()
            with pytest.raises(
                CommTimeout, match=r"^\[bucketwheel rank 0/2 comm .* seq 0\] round . of agreement was not over after"
            ):
                comm.collect(timeout=0.1)
            assert time.monotonic() - begin < 1
            assert comm.collect() == [b"early", b"late"]
        else:
            time.sleep(0.5)
            assert comm.exchange(b"late") == [b"early", b"late"]
        check_usable(comm)


def test_a_short_wait_leaves_the_round_open(rank_pool):
    rank_pool(2).run(collects_alone)


# ---------------------------------------------------------------------------------------------------- death and abort


@deaths
def test_a_killed_rank_is_told_to_every_other_soon(world, victim, moment):
    expect_death_told(apart, world, victim, moment, f"rank {victim} died")


def one_aborts(rank: int, size: int, where: str) -> tuple[Error, float]:
    with apart("aborted") as (comm, _):
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == 1:
            time.sleep(0.2)
            comm.abort("the data ran out")
            error = error_of(lambda: comm.exchange(b""))
        elif where == "round":
            error = error_of(lambda: comm.exchange(b""))
        else:
            error = error_of(gather(comm)[1].synchronize)
        return error, time.monotonic() - begin


@pytest.mark.parametrize("where", ["round", "operation"])
@pytest.mark.parametrize("world", [2, 3])
def test_abort_reaches_every_rank_with_its_reason(world, where, rank_pool):
    for rank, (error, took_s) in enumerate(rank_pool(world).run(one_aborts, where, timeout_s=30)):
        assert (error[0], error[2]) == ("CommError" if rank == 1 else "PeerError", 1) and took_s < SOON_S
        expect_prefix(error[1], rank, world, "aborted")
        assert "aborted by rank 1: the data ran out" in error[1]


# ------------------------------------------------------------------------------------------------------------- leaving


def one_leaves_early(rank: int, size: int) -> None:
    with apart("party") as (comm, _):
        full, handle = gather(comm)
        if rank == 0:
            comm.close()
        else:
            time.sleep(1.2)  # longer than a dead peer would go unnoticed
            handle.synchronize()
            expect_gathered(comm, full)
            gather(comm, 0)[1].synchronize()
    expect_no_threads()


def test_a_rank_that_leaves_early_is_not_dead(rank_pool):
    rank_pool(2).run(one_leaves_early, timeout_s=30)


def one_is_needed(rank: int, size: int) -> Error:
    script()
    # NCCL on rank 0 may wait for the others, who abort, until its process ends.
    with posing(), hosts_apart():
        comm = Communicator(backend="nccl", device="cuda", name="party", timeout_s=20)
        gather(comm)[1].synchronize()
        error = ("", "", None) if rank == 0 else error_of(gather(comm)[1].synchronize)
        comm.close(2.0)
    expect_no_threads()
    return error


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_has_left_and_is_needed(world):
    with fresh_ranks(world) as pool:
        errors = pool.run(one_is_needed, timeout_s=30)[1:]
    for kind, text, dead in errors:
        assert (kind, dead) == ("PeerError", 0) and "rank 0 has closed the communicator" in text


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


def store_dies(rank: int, size: int, port: int, moment: str) -> tuple[Error, float]:
    with store_of_rank_0(rank, size, port), apart("doomed", timeout_s=20.0) as (comm, _):
        comm.exchange(b"")
        if rank == 0:
            time.sleep(0.3)
            die()
        handle = gather(comm)[1] if moment == "in flight" else None
        begin = time.monotonic()
        error = error_of(handle.synchronize if handle else lambda: comm.exchange(b""))
        return error, time.monotonic() - begin


@pytest.mark.parametrize("moment", ["in flight", slow_case("in exchange")])
def test_the_store_dies_with_its_rank(moment):
    """The ranks beside it have seen that themselves, and name it."""
    for rank, (error, took_s) in enumerate(without_store(3, store_dies, moment)[1:], 1):
        assert (error[0], error[2]) == ("PeerError", 0) and "rank 0 died" in error[1], error
        expect_prefix(error[1], rank, 3, "doomed")
        assert took_s < 0.3 + SOON_S


@pytest.mark.slow
def test_the_store_dies_with_a_rank_far_away():
    """Nobody can be told, but nobody waits until the time limit either."""
    for error, took_s in without_store(5, store_dies, "in flight")[1:]:
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


# ---------------------------------------------------------------------------------------------------------- silence


def stopped(folder: Path, rank: int, size: int, seconds: float) -> None:
    """The last rank stops, and is woken by rank 0."""
    (folder / str(os.getpid())).touch()
    if rank == size - 1:
        (folder / "last").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0:
        while not (folder / "last").exists() or not (folder / "last").read_text():
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(int((folder / "last").read_text()), signal.SIGCONT)


def one_is_silent(rank: int, size: int, folder: Path, how: str, seconds: float, heartbeat_s: float) -> None:
    table = replace(patience.PATIENCE, heartbeat_timeout_s=heartbeat_s)
    with mock.patch.object(patience, "PATIENCE", table), Communicator(backend="c10d", timeout_s=60.0) as comm:
        comm.exchange(b"")
        if how == "stopped":
            stopped(folder, rank, size, seconds)
        elif rank == size - 1:
            ctypes.PyDLL(None).sleep(int(seconds))  # with the GIL
        check_usable(comm)


@pytest.mark.parametrize(
    ("how", "seconds", "heartbeat_s"),
    [
        ("stopped", 3, 1.0),
        ("holds the GIL", 3, 1.0),
        slow_case("stopped", 10, 30.0),
        slow_case("holds the GIL", 20, 30.0),
    ],
)
@pytest.mark.timeout_s(120)
def test_a_rank_that_is_stopped_or_holds_the_gil_is_not_dead(how, seconds, heartbeat_s, rank_pool, tmp_path):
    rank_pool(3).run(one_is_silent, tmp_path, how, seconds, heartbeat_s, timeout_s=100)


def one_is_stopped(rank: int, size: int, folder: Path) -> None:
    comm = Communicator(backend="c10d", timeout_s=1.0)
    pid = int(comm.exchange(str(os.getpid()).encode())[-1])
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    kind, text, _ = error_of(lambda: comm.exchange(b"anybody?"))
    assert kind == "CommTimeout" or rank == size - 1, text
    begin = time.monotonic()
    comm.close(0.5)
    assert time.monotonic() - begin < SOON_S
    expect_no_threads()
    (folder / str(rank)).touch()
    while rank == 0 and len(list(folder.iterdir())) < size:
        time.sleep(0.01)
        if len(list(folder.iterdir())) == size - 1:
            os.kill(pid, signal.SIGCONT)


def test_a_rank_that_cannot_be_reached_holds_up_nobody(rank_pool, tmp_path):
    """While it is stopped the others close, and nothing of theirs is left."""
    rank_pool(3).run(one_is_stopped, tmp_path)
