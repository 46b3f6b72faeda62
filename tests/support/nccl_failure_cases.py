"""NCCL communicators whose ranks, calls and operations fail: what the tests of these make, issue and compare. And how
ranks die."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bucketwheel.comm import shm
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError
from bucketwheel.testing import RankPool
from tests.support import simulated_nccl
from tests.support.failure_cases import SOON_S, error_of, expect_prefix, gather
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

GONE_S = 5.0  # until what is given up in the background has ended

Facts = dict[str, Any]


def script() -> ctypes.CDLL:
    """Of this rank, with nothing of an earlier test in it."""
    library = simulated_nccl.install()
    library.fake_nccl_release()
    library.fake_nccl_async_error(0)
    library.fake_nccl_null_windows(0)
    library.fake_nccl_reset()
    return library


@contextlib.contextmanager
def nccl_comm(name: str, *, timeout_s: float = 30.0, **choices: Any) -> Iterator[tuple[Communicator, ctypes.CDLL]]:
    """A communicator of all ranks, and the script of this one. Nothing of NCCL is left afterwards."""
    library = script()
    with posing():
        comm = Communicator(backend="nccl", device="cuda", name=name, timeout_s=timeout_s, **choices)
        try:
            yield comm, library
        finally:
            library.fake_nccl_release()
            comm.close(5.0)
        expect_gone(library)


@contextlib.contextmanager
def hosts_apart() -> Iterator[None]:
    """Ranks find out that they do not share a host."""

    def not_one_host(*_: Any) -> Any:
        raise shm.NotOneHost("\n  rank 1: on another host")

    with mock.patch.object(shm, "connect", not_one_host):
        yield


@contextlib.contextmanager
def apart(name: str, **choices: Any) -> Iterator[tuple[Communicator, ctypes.CDLL]]:
    """`nccl_comm` of ranks that do not share a host."""
    with hosts_apart(), nccl_comm(name, **choices) as (comm, library):
        yield comm, library


def expect_gone(library: ctypes.CDLL) -> None:
    until = time.monotonic() + GONE_S
    while library.fake_nccl_live_comms() + library.fake_nccl_live_windows() and time.monotonic() < until:
        library.fake_nccl_release()  # an initialisation in the background may wait for ranks that never come
        time.sleep(0.002)
    assert (library.fake_nccl_live_comms(), library.fake_nccl_live_windows()) == (0, 0)
    assert library.fake_nccl_open_groups() == 0
    library.fake_nccl_reset()


def expect_gathered(comm: Communicator, full: torch.Tensor) -> None:
    assert full.view(comm.size, -1).tolist() == [
        [float(rank)] * (full.numel() // comm.size) for rank in range(comm.size)
    ]


def facts_of(call: Callable[[], Any]) -> Facts:
    """The attributes of what ``call()`` raises, and its kind."""
    try:
        call()
    except CommError as error:
        return {"kind": type(error).__name__, **vars(error)}
    return {}


def flights(folder: Path | str, comm: str, rank: int) -> list[Path]:
    return list(Path(folder).glob(f"{comm.replace('/', '_')}-*-rank{rank}.json"))


def read_flight(folder: Path | str, comm: str, rank: int) -> dict[str, Any]:
    """What the rank wrote when it failed, in a while."""
    until = time.monotonic() + GONE_S
    while not (paths := flights(folder, comm, rank)) and time.monotonic() < until:
        time.sleep(0.01)
    (path,) = paths
    record: dict[str, Any] = json.loads(path.read_text())
    return record


# ---- death


def fresh_ranks(world: int, *, backend: str | None = "gloo", **env: str) -> RankPool:
    """Ranks of one test alone, over the fake NCCL: they may die, and are told things by the environment."""
    return RankPool(world, backend=backend, env={"BW_NCCL_LIB": str(simulated_nccl.build()), **env}, forked=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


deaths = pytest.mark.parametrize(
    ("world", "victim", "moment"),
    [
        *(slow_case(2, 0, moment) for moment in ("in flight", "idle", "in exchange")),
        *((3, 1, moment) for moment in ("in flight", "idle", "in exchange")),
    ],
)


def victim_dies(rank: int, size: int, comm_of: Callable[..., Any], victim: int, moment: str, died: str) -> float:
    """How long it took a survivor to know."""
    with comm_of("doomed") as (comm, _):
        full, before = gather(comm)
        before.synchronize()
        comm.exchange(b"")
        begin = time.monotonic()
        handle = gather(comm)[1] if moment == "in flight" and rank != victim else None
        if rank == victim:
            time.sleep(0.1)
            die()
        if moment == "idle":
            time.sleep(0.5)
            begin = time.monotonic()

        def needs_all() -> None:
            if moment == "in exchange":
                comm.exchange(b"")
            else:
                (handle or gather(comm)[1]).synchronize()

        error = error_of(needs_all)
        took_s = time.monotonic() - begin
        assert (error[0], error[2]) == ("PeerError", victim), error
        expect_prefix(error[1], rank, size, "doomed")
        assert re.search(died, error[1]), error[1]
        for later in (lambda: gather(comm), lambda: comm.exchange(b"")):
            assert error_of(later) == error
            assert facts_of(later) == facts_of(needs_all if handle is None else handle.synchronize)
        assert before.query()
        expect_gathered(comm, full)
    return took_s


def expect_death_told(comm_of: Callable[..., Any], world: int, victim: int, moment: str, died: str) -> None:
    """Soon, to every other rank of a communicator ``comm_of(name)``, in words that match ``died``."""
    with fresh_ranks(world) as pool:
        results = pool.run(victim_dies, comm_of, victim, moment, died, expect_dead=[victim], timeout_s=30)
    assert all(took_s < SOON_S for rank, took_s in enumerate(results) if rank != victim), results
