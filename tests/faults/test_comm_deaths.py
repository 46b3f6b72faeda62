"""Ranks that die, stop or hold the GIL: what the others are told, how soon, and what they are not told."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from bucketwheel.comm import patience
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import reduce_scatter
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import (
    SOON_S,
    die,
    error_of,
    expect_gathered,
    expect_prefix,
    facts_of,
    fresh_ranks,
    gather,
    on_process,
)
from tests.support.requirements import slow_case

pytestmark = pytest.mark.dist


# --------------------------------------------------------------------------------------------------------------- death


def victim_dies(comm: Communicator, victim: int, moment: str) -> float:
    """How long it took a survivor to know."""
    before, handle = gather(comm)
    handle.synchronize()
    comm.exchange(b"")
    begin = time.monotonic()
    numel = 1 << 22 if moment == "in operation" else 1
    full, out = torch.ones(comm.size * numel), torch.empty(numel)
    if comm.rank == victim:
        if moment == "in operation":
            # The others are in the middle of reading from this rank: their staging rounds cannot end without it.
            reduce_scatter(out, full, comm)
        time.sleep(0.01)
        die()
    if moment == "idle":
        time.sleep(0.5)
        begin = time.monotonic()
    calls = {
        "in operation": lambda: [reduce_scatter(out, full, comm).wait() for _ in range(2)],
        "in exchange": lambda: comm.exchange(b"x"),
    }
    error = error_of(calls.get(moment, lambda: gather(comm)[1].synchronize()))
    took_s = time.monotonic() - begin
    assert (error[0], error[2]) == ("PeerError", victim), error
    assert re.search(rf"rank {victim} (\(pid .*)?died", error[1]), error
    expect_prefix(error[1], comm.rank, comm.size, "faulty")
    facts = facts_of(lambda: gather(comm))
    for later in (lambda: gather(comm), lambda: comm.exchange(b"")):
        assert (error_of(later), facts_of(later)) == (error, facts), "later calls raise the same error"
    assert handle.query()
    expect_gathered(comm, before)
    return took_s


@pytest.mark.parametrize(
    ("place", "world", "victim", "moment"),
    [
        *((place, 3, 1, moment) for place in ("shm", "c10d") for moment in ("idle", "waiting", "in operation")),
        *((place, 3, 1, moment) for place in ("nccl", "nccl apart") for moment in ("idle", "waiting")),
        *((place, 3, 1, "in exchange") for place in ("shm", "c10d", "nccl")),
        *(slow_case(place, 2, 0, "waiting") for place in ("shm", "c10d", "nccl", "nccl apart")),
        *(slow_case(place, 4, 3, "waiting") for place in ("shm", "c10d")),
    ],
)
def test_a_killed_rank_is_told_to_every_other_within_two_seconds(place, world, victim, moment):
    with fresh_ranks(world) as pool:
        results = pool.run(on_process, place, 60.0, victim_dies, victim, moment, expect_dead=[victim])
    assert all(took_s < SOON_S for rank, took_s in enumerate(results) if rank != victim), results


def dies_with_a_forked_child(comm: Communicator) -> float:
    """The child of the dead rank lives on; its copies of the sockets must not hide the death."""
    comm.exchange(b"")
    if comm.rank == 0:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        die()
    begin = time.monotonic()
    kind, text, _ = error_of(lambda: gather(comm)[1].wait())
    assert kind == "PeerError", text
    return time.monotonic() - begin


@pytest.mark.parametrize("place", ["shm", "c10d"])
def test_a_forked_child_does_not_hide_the_death_of_its_parent(place):
    with fresh_ranks(2) as pool:
        assert pool.run(on_process, place, 60.0, dies_with_a_forked_child, expect_dead=[0])[1] < SOON_S


def test_a_forked_child_cannot_disturb_the_parent():
    code = """
import os, torch
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import DeviceError
from bucketwheel.kernels.ops import all_gather
comm = Communicator(backend="shm")
all_gather(torch.empty(3), torch.empty(3), comm).wait()
if (child := os.fork()) == 0:
    try:
        all_gather(torch.empty(3), torch.empty(3), comm)
    except DeviceError as error:
        assert "parent process" in str(error)
        comm.abort("from the child")
        comm.close()
        del comm
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
all_gather(torch.empty(3), torch.empty(3), comm).wait()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------------------- silence


def stopped(folder: Path, rank: int, size: int, seconds: float) -> None:
    """The last rank stops, and is woken by rank 0."""
    if rank == size - 1:
        (folder / "last").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0:
        while not (folder / "last").exists() or not (folder / "last").read_text():
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(int((folder / "last").read_text()), signal.SIGCONT)


def one_is_silent(rank: int, size: int, backend: str, folder: Path, how: str, seconds: float, beat_s: float) -> None:
    table = replace(patience.PATIENCE, heartbeat_timeout_s=beat_s)
    with mock.patch.object(patience, "PATIENCE", table), Communicator(backend=backend, timeout_s=60.0) as comm:
        comm.exchange(b"")
        if how == "stopped":
            stopped(folder, rank, size, seconds)
        elif rank == size - 1:
            ctypes.PyDLL(None).sleep(int(seconds))  # with the GIL
        check_usable(comm)


@pytest.mark.parametrize(
    ("backend", "how", "seconds", "beat_s"),
    [
        ("c10d", "stopped", 3, 1.0),
        ("c10d", "holds the GIL", 3, 1.0),
        *(slow_case(backend, "stopped", 10, 30.0) for backend in ("shm", "c10d")),
        *(slow_case(backend, "holds the GIL", 20, 30.0) for backend in ("shm", "c10d")),
    ],
)
@pytest.mark.timeout_s(120)
def test_a_rank_that_is_stopped_or_holds_the_gil_is_not_dead(backend, how, seconds, beat_s, rank_pool, tmp_path):
    rank_pool(3).run(one_is_silent, backend, tmp_path, how, seconds, beat_s, timeout_s=100)
