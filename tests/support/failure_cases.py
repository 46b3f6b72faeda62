"""What tests of failures make, issue and compare: communicators of every backend, ranks that die, the error of a call.

The nccl backend runs over the fake NCCL, on a simulated CUDA device.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bucketwheel.comm import shm
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import all_gather
from bucketwheel.testing import run_threads
from tests.support import simulated_cuda, simulated_nccl
from tests.support.cores import BUSY
from tests.support.ranks import RankPool
from tests.support.simulated_cuda import posing

SOON_S = 2.0 * BUSY  # until the death or the failure of a rank is known to the others
GONE_S = 5.0 * BUSY  # until what is given up in the background has ended

Error = tuple[str, str, int | None]  # kind, message and rank
Facts = dict[str, Any]

# ---- calls and their errors


def gather(comm: Communicator, numel: int = 10) -> tuple[torch.Tensor, Handle]:
    full = torch.empty(comm.size * numel)
    return full, all_gather(full, torch.full((numel,), float(comm.rank)), comm)


def expect_gathered(comm: Communicator, full: torch.Tensor) -> None:
    assert full.view(comm.size, -1).tolist() == [
        [float(rank)] * (full.numel() // comm.size) for rank in range(comm.size)
    ]


def error_of(call: Callable[[], Any]) -> Error:
    """Of what ``call()`` raises."""
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error), error.rank
    return "nothing", "", None


def facts_of(call: Callable[[], Any]) -> Facts:
    """The attributes of what ``call()`` raises, and its kind."""
    try:
        call()
    except CommError as error:
        return {"kind": type(error).__name__, **vars(error)}
    return {}


def expect_prefix(text: str, rank: int, size: int, name: str, seq: int | None = None) -> None:
    number = r"\d+" if seq is None else str(seq)
    assert re.match(rf"\[bucketwheel rank {rank}/{size} comm '{re.escape(name)}' seq {number}\] ", text), text


def threads_of_agreement() -> list[str]:
    """Python's, of communicators between hosts."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bw_")]


def expect_no_threads() -> None:
    until = time.monotonic() + GONE_S
    while threads_of_agreement() and time.monotonic() < until:
        time.sleep(0.01)
    assert threads_of_agreement() == []


# ---- NCCL


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


def read_flight(folder: Path | str, comm: str, rank: int) -> dict[str, Any]:
    """What the rank wrote when it failed, in a while."""
    until = time.monotonic() + GONE_S
    while not (paths := list(Path(folder).glob(f"{comm}-*-rank{rank}.json"))) and time.monotonic() < until:
        time.sleep(0.01)
    (path,) = paths
    record: dict[str, Any] = json.loads(path.read_text())
    return record


# ---- ranks


def fresh_ranks(world: int, *, backend: str | None = "gloo", **env: str) -> RankPool:
    """Ranks of one test alone: they may die, and are told things by the environment."""
    simulated_cuda.build()
    return RankPool(world, backend=backend, env={"BW_NCCL_LIB": str(simulated_nccl.build()), **env})


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Where ranks may be: "local" and "cuda" are threads of this process, the others processes: of one host, over the network
# (c10d), over NCCL on one host (with BW_COMM_CHECK, "nccl checked") and on several ("nccl apart").


def on_threads(place: str, world: int, case: Callable[..., Any], *args: Any, timeout_s: float = 20.0) -> list[Any]:
    """``case(comm, *args)`` on every rank of a communicator named "faulty"."""
    ranks = LocalWorld(world)
    device = "cuda" if place == "cuda" else None

    def body(rank: int, _: int) -> Any:
        with Communicator(ranks.rank(rank), timeout_s=timeout_s, name="faulty", device=device) as comm:
            return case(comm, *args)

    with posing(delays=11) if device else contextlib.nullcontext():
        return run_threads(body, world)


def on_process(rank: int, world: int, place: str, timeout_s: float, case: Callable[..., Any], *args: Any) -> Any:
    """For `RankPool.run`: the same on a rank that is a process."""
    if not place.startswith("nccl"):
        with Communicator(backend=place, timeout_s=timeout_s, name="faulty") as comm:
            return case(comm, *args)
    make = apart if place == "nccl apart" else nccl_comm
    with mock.patch.dict(os.environ, BW_COMM_CHECK=str(int("checked" in place))):
        with make("faulty", timeout_s=timeout_s) as (comm, _):
            return case(comm, *args)
