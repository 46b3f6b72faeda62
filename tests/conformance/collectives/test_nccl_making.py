"""Communicators of the nccl backend that cannot be made: the same failure on all ranks, in time, and nothing left."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from bucketwheel.comm import nccl as comm_nccl
from bucketwheel.comm import nccl_library
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError, DeviceError
from bucketwheel.errors import Error as AnyError
from bucketwheel.kernels.ops import all_gather
from bucketwheel.pool.pool import Pool
from tests.support import simulated_nccl
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import (
    SOON_S,
    Error,
    error_of,
    expect_gone,
    expect_prefix,
    fresh_ranks,
    gather,
    nccl_comm,
    script,
)
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist
TIMEOUT_S = 4.0
INTERNAL_ERROR = 3


def make(way: str, timeout_s: float = TIMEOUT_S) -> list[Communicator]:
    if way == "pair":
        return list(Communicator.pair(device="cuda", timeout_s=timeout_s, name="made"))
    return [Communicator(backend="nccl", device="cuda", timeout_s=timeout_s, name="made")]


def made_and_usable(way: str) -> None:
    with posing():
        for comm in (comms := make(way, timeout_s=20)):
            check_usable(comm)
        for comm in comms:
            comm.close()


# --------------------------------------------------------------------------------------------- NCCL fails on one rank


def one_rank_fails(rank: int, size: int, way: str, function: str, hangs: bool) -> tuple[Error, float]:
    library = script()
    with posing():
        if rank == size - 1 and hangs:
            library.fake_nccl_hang_call(function.encode()) if function else library.fake_nccl_hang(1)
        elif rank == size - 1:
            library.fake_nccl_fail(function.encode(), 1, INTERNAL_ERROR)
        begin = time.monotonic()
        error = error_of(lambda: make(way))
        took_s = time.monotonic() - begin
    library.fake_nccl_release()
    expect_gone(library)
    made_and_usable(way)
    return error, took_s


FAILING = [
    ("one", "ncclCommInitRankConfig", False),
    ("one", "ncclCommInitRankConfig", True),
    ("one", "ncclAllGather", True),
    ("one", "", True),  # the first operation, on the device
    ("pair", "ncclCommSplit", False),
    ("pair", "ncclReduceScatter", True),
    slow_case("one", "ncclAllGather", False),
    slow_case("pair", "ncclCommSplit", True),
    slow_case("pair", "ncclReduceScatter", False),
]


@pytest.mark.parametrize(("way", "function", "hangs"), FAILING)
def test_a_rank_on_which_nccl_fails(way, function, hangs, rank_pool):
    results = rank_pool(2).run(one_rank_fails, way, function, hangs, timeout_s=30)
    for error, took_s in results:
        assert error[0] in ("CommError", "CommTimeout"), error
        assert took_s < TIMEOUT_S + SOON_S
    if not hangs:
        assert f"{function}: {INTERNAL_ERROR} internal error" in results[1][0][1]


def split_fails(rank: int, size: int, hangs: bool) -> tuple[Error, Error, float]:
    with nccl_comm("parent", timeout_s=TIMEOUT_S) as (comm, library):
        if rank == 0 and hangs:
            library.fake_nccl_hang_call(b"ncclCommSplit")
        elif rank == 0:
            library.fake_nccl_fail(b"ncclCommSplit", 1, INTERNAL_ERROR)
        begin = time.monotonic()
        error = error_of(lambda: comm.split(int(rank == size - 1)))
        took_s = time.monotonic() - begin
        time.sleep(0.3)
        return error, error_of(lambda: gather(comm)), took_s


@pytest.mark.parametrize("hangs", [False, True])
def test_a_split_that_fails_on_one_rank_fails_the_communicator(hangs, rank_pool):
    for rank, (error, later, took_s) in enumerate(rank_pool(3).run(split_fails, hangs, timeout_s=40)):
        assert took_s < TIMEOUT_S + 2 * SOON_S
        assert error[0] in ("CommError", "CommTimeout"), (rank, error)
        assert later[0] in ("CommError", "CommTimeout"), (rank, later)
        expect_prefix(later[1], rank, 3, "parent")


# -------------------------------------------------------------------------------------- a rank fails before NCCL is asked


def without_pool(rank: int, size: int) -> tuple[str, str, float]:
    library = script()

    def new_pool(**choices: Any) -> Pool:
        if rank == 1:
            raise DeviceError("cuda:9 does not exist: there are 8 CUDA devices")
        return Pool(**choices)

    begin = time.monotonic()
    with posing(), mock.patch.object(comm_nccl, "Pool", new_pool), pytest.raises(AnyError) as caught:
        make("pair", timeout_s=20)
    took_s = time.monotonic() - begin
    expect_gone(library)
    made_and_usable("pair")
    return type(caught.value).__name__, str(caught.value), took_s


def test_a_rank_without_its_device_tells_the_others(rank_pool):
    results = rank_pool(3).run(without_pool, timeout_s=40)
    assert [kind for kind, _, _ in results] == ["CommError", "DeviceError", "CommError"]
    assert all("cuda:9 does not exist" in text and took_s < SOON_S for _, text, took_s in results), results
    assert "rank 1: DeviceError" in results[0][1]


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupted(rank: int, size: int, where: str) -> float:
    library = script()
    with posing():
        parent = Communicator(backend="nccl", device="cuda", timeout_s=20, registered=True)
        lease = parent.pool.acquire("key", 4096)
        calls: dict[str, Callable[[], Any]] = {
            "ncclCommInitRankConfig": lambda: Communicator(backend="nccl", device="cuda", timeout_s=20),
            "ncclCommSplit": lambda: parent.split(0),
            "ncclCommWindowRegister": parent.register_pool,
            "agreement": parent.register_pool,
        }
        parent.exchange(b"")
        if where != "agreement":
            library.fake_nccl_hang_call(where.encode())
        elif rank != 0:
            time.sleep(1.5)
        if rank == 0:
            threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt if rank == 0 else CommError):
            calls[where]()
        took_s = time.monotonic() - begin
        library.fake_nccl_release()
        if where != "ncclCommInitRankConfig":
            assert "KeyboardInterrupt" in error_of(lambda: gather(parent))[1]
        lease.release()
        parent.close(5.0)
    expect_gone(library)
    return took_s


@pytest.mark.parametrize(
    ("world", "where"),
    [(1, "ncclCommInitRankConfig"), (1, "ncclCommWindowRegister"), (2, "agreement"), (2, "ncclCommSplit")],
)
def test_ctrl_c_ends_the_waiting(world, where, rank_pool):
    assert rank_pool(world).run(interrupted, where, timeout_s=50)[0] < 0.5 + SOON_S


# ------------------------------------------------------------------------------------------- ranks that do not agree


def disagree(rank: int, size: int, what: str) -> tuple[str, str, float]:
    script()
    choices: dict[str, Any] = {}
    name = "same"
    real = nccl_library.info()
    fake_info = real
    if rank == 1 and what == "name":
        name = "other"
    elif rank == 1 and what == "options":
        choices = {"max_ctas": 4}
    elif rank == 1 and what == "version":
        fake_info = nccl_library.NcclInfo(real.path, real.found, 22809, real.features)

    def look() -> nccl_library.NcclInfo:
        if rank == 1 and what == "absent":
            raise DeviceError("there is no NCCL here")
        return fake_info

    begin = time.monotonic()
    with posing(), mock.patch.object(nccl_library, "info", look):
        try:
            Communicator(backend="nccl", device="cuda", name=name, timeout_s=20, **choices)
        except (ValueError, AnyError) as error:
            return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", 0.0


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("name", "ValueError", "['same', 'other']"),
        ("options", "ValueError", "max_ctas"),
        ("version", "DeviceError", "['2.30.7', '2.28.9'] (by rank)"),
        ("absent", "DeviceError", "rank 1: DeviceError: there is no NCCL here"),
    ],
)
def test_ranks_that_disagree_are_told_so_on_all_ranks(what, kind, text, rank_pool):
    for found, message, took_s in rank_pool(2).run(disagree, what):
        assert found == kind and text in message, message
        assert took_s < SOON_S


def old_version(rank: int, size: int) -> str:
    simulated_nccl.install()
    with posing():
        for choices in ({}, {"registered": True}):
            with Communicator(backend="nccl", device="cuda", **choices) as comm:
                all_gather(torch.empty(4), torch.empty(4), comm).synchronize()
        with pytest.raises(ValueError) as caught:
            Communicator(backend="nccl", device="cuda", registered=True, cta_policy="zero")
    return str(caught.value)


def test_what_a_version_has_not_is_refused():
    with fresh_ranks(1, backend=None, FAKE_NCCL_VERSION="22703") as pool:
        (text,) = pool.run(old_version)
        assert re.match("cta_policy='zero' needs .*2.28.*2.27.3", text, re.DOTALL), text
