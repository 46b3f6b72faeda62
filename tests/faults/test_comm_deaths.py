"""Ranks that die or leave: what the others are told, how soon, and what stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ClosedError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.pool.pool import Lease
from bucketwheel.testing import RankPool
from tests.support.comm_cases import check_all_gather, on_c10d, run_local
from tests.support.failure_cases import SOON_S, error_of, expect_prefix, gather
from tests.support.held import expect_gone, traces_in_the_system
from tests.support.requirements import slow_case

pytestmark = pytest.mark.dist


# --------------------------------------------------------------------------------------------------------------- death


def victim_dies(rank: int, size: int, backend: str, victim: int, moment: str) -> tuple[list[str], float, bool]:
    """The messages that a survivor gets, how long the first took, and whether its earlier result stayed good."""
    with Communicator(backend=backend, name="doomed", timeout_s=60) as comm:
        before, handle = gather(comm)
        handle.wait()
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == victim:
            if moment == "in operation":
                # The others are in the middle of reading from this rank: their staging rounds cannot end without it.
                full, out = torch.ones(size << 22), torch.empty(1 << 22)
                reduce_scatter(out, full, comm)
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "idle":
            time.sleep(0.5)
            begin = time.monotonic()
            calls = [lambda: gather(comm)[1].wait(), lambda: comm.exchange(b"")]
        elif moment == "in operation":
            full, out = torch.ones(size << 22), torch.empty(1 << 22)
            calls = [lambda: [reduce_scatter(out, full, comm).wait() for _ in range(2)], lambda: gather(comm)]
        elif moment == "in exchange":
            calls = [lambda: comm.exchange(b"x"), lambda: gather(comm)]
        else:  # waiting for it
            calls = [lambda: gather(comm)[1].wait(), lambda: gather(comm)]
        messages = []
        took_s = 0.0
        for call in calls:
            kind, text, dead = error_of(call)
            took_s = took_s or time.monotonic() - begin
            assert (kind, dead) == ("PeerError", victim), (kind, text)
            expect_prefix(text, rank, size, "doomed")
            messages.append(text)
        good = before.view(size, -1)[:, 0].tolist() == [float(r) for r in range(size)]
        return messages, took_s, good and handle.query()


@pytest.mark.parametrize("moment", ["idle", "waiting", "in operation", "in exchange"])
@pytest.mark.parametrize(
    ("backend", "size", "victim"),
    [slow_case("shm", 2, 0), ("shm", 4, 1), slow_case("c10d", 2, 0), ("c10d", 3, 1), slow_case("c10d", 4, 3)],
)
def test_a_killed_rank_is_told_to_every_other_within_two_seconds(backend, size, victim, moment):
    with RankPool(size, forked=True) as pool:
        results = pool.run(victim_dies, backend, victim, moment, expect_dead=[victim])
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        messages, took_s, is_good = result
        assert took_s < SOON_S
        assert is_good, "a complete result was lost"
        assert f"rank {victim} {'(pid' if backend == 'shm' else 'died'}" in messages[0] and "died" in messages[0]
        assert messages[1] == messages[0], "later calls raise the same error"


def left_behind(rank: int, size: int) -> list[int]:
    with Communicator(backend="shm") as comm:
        check_all_gather(comm, [(torch.float32, 500_000)], "by_rank")
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        error_of(lambda: gather(comm)[1].wait())
    return [os.getpid()]


def test_nothing_stays_behind_in_the_system():
    before = traces_in_the_system()
    with RankPool(2, forked=True) as pool:
        pool.run(left_behind, expect_dead=[0])
        expect_gone(traces_in_the_system() - before)
    expect_gone(traces_in_the_system() - before)


# ------------------------------------------------------------------------------------------------------------- leaving


def one_leaves(rank: int, size: int, backend: str) -> tuple[str, str, int | None] | None:
    comm = Communicator(backend=backend, name="party")
    full, handle = gather(comm)
    handle.wait()
    if rank == 0:
        comm.close()
        comm.close()
        with pytest.raises(ClosedError, match="closed"):
            gather(comm)
        with pytest.raises(ClosedError, match="closed"):
            comm.exchange(b"")
        assert handle.query() and full[0] == 0
        return None
    begin = time.monotonic()
    error = error_of(lambda: gather(comm)[1].wait())
    assert time.monotonic() - begin < SOON_S
    comm.close()
    return error


of_processes = pytest.mark.parametrize("backend", ["shm", "c10d"])


@of_processes
def test_a_rank_that_has_left_and_is_needed(rank_pool, backend):
    for error in rank_pool(3).run(one_leaves, backend)[1:]:
        kind, text, rank = error
        assert (kind, rank) == ("PeerError", 0), text
        assert "rank 0" in text and "has closed the communicator" in text


def closes_in_flight(comm: Communicator) -> str:
    if comm.rank == 0:
        full, handle = gather(comm)
        comm.close(timeout=0.1)
        return error_of(handle.wait)[0]
    time.sleep(0.5)
    return error_of(lambda: gather(comm)[1].wait())[0]


def test_closing_with_operations_in_flight():
    assert run_local(2, closes_in_flight) == ["ClosedError", "PeerError"]


def test_closing_with_operations_in_flight_over_c10d(rank_pool):
    assert rank_pool(2).run(on_c10d, closes_in_flight) == ["ClosedError", "PeerError"]


def drops_in_flight(rank: int, size: int, backend: str) -> float:
    comm = Communicator(backend=backend)
    if rank == 1:
        time.sleep(0.3)
    full, handle = gather(comm, 100_000)
    del comm, full, handle  # ends the operation in an orderly way: the peer arrives within the grace
    return 1.0


@of_processes
def test_dropping_everything_in_flight(rank_pool, backend):
    assert rank_pool(2).run(drops_in_flight, backend) == [1.0, 1.0]


def test_exit_with_an_operation_in_flight():
    """A process whose peer never comes ends soon, with exit code 0 and no crash, though it drops what it gathers."""
    code = """
import torch
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.kernels.ops import all_gather
world = LocalWorld(2)
comm, other = Communicator(world.rank(0)), Communicator(world.rank(1))
all_gather(torch.empty(20), torch.empty(10), comm)
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begin < 30


# ------------------------------------------------------------------------------------------------- a rank that stands still

STILL = 3
MANY_SLABS = 400  # more than the socket of a rank that does not read takes messages


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
        time.sleep(0.01)


def many_slabs_come_and_go(comm: Communicator) -> Lease:
    """The last one stays."""
    begin = time.monotonic()
    leases = [comm.pool.acquire("", 9 << 20) for _ in range(MANY_SLABS)]
    for lease in leases[:-1]:
        lease.release()
    assert comm.pool.trim() >= (MANY_SLABS - 1) * (9 << 20)
    assert time.monotonic() - begin < 20, "it waited for the rank that stands still"
    time.sleep(1.5)  # in which peers are told
    return leases[-1]


def one_stands_still(rank: int, size: int) -> tuple[str, float, float]:
    comm = Communicator(backend="shm", timeout_s=60)
    pids = [int(pid) for pid in comm.exchange(str(os.getpid()).encode())]
    # It goes on, and hears then of the memory that the others read already.
    lease = comm.pool.acquire("full", 4 * size)
    if rank == 0:
        stop(pids[STILL])
        lease = many_slabs_come_and_go(comm)
        os.kill(pids[STILL], signal.SIGCONT)
    full = lease.tensor(torch.float32, (size,))
    full[rank] = rank
    all_gather(full, full[rank : rank + 1], comm).wait()
    assert full.tolist() == list(range(size))
    comm.exchange(b"")
    # It hides nobody's death.
    if rank == 0:
        stop(pids[STILL])
        many_slabs_come_and_go(comm)
        os.kill(pids[2], signal.SIGKILL)
    if rank == 2:
        time.sleep(60)
    begin = time.monotonic()
    kind, text, dead = error_of(lambda: comm.exchange(b""))
    told_s = time.monotonic() - begin
    assert kind == "PeerError" and (dead == 2 or rank == STILL), text
    begin = time.monotonic()
    comm.close(0.5)
    closed_s = time.monotonic() - begin
    if rank == 0:
        os.kill(pids[STILL], signal.SIGCONT)
    return text, told_s, closed_s


def test_a_rank_that_stands_still_holds_up_nobody():
    with RankPool(4, forked=True) as pool:
        results = pool.run(one_stands_still, expect_dead=[2])
    text, told_s, closed_s = results[0]
    assert "rank 2" in text and "died" in text
    assert told_s < SOON_S
    assert closed_s < SOON_S and results[1][2] < SOON_S


# ---------------------------------------------------------------------------------------------------------------- fork


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


def dies_with_a_forked_child(rank: int, size: int, backend: str) -> float | None:
    """The child of the dead rank lives on; its copies of the sockets must not hide the death."""
    with Communicator(backend=backend, timeout_s=60) as comm:
        comm.exchange(b"")
        if rank == 0:
            if os.fork() == 0:
                time.sleep(8)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        kind, text, _ = error_of(lambda: gather(comm)[1].wait())
        assert kind == "PeerError", text
        return time.monotonic() - begin


@of_processes
def test_a_forked_child_does_not_hide_the_death_of_its_parent(backend):
    with RankPool(2, forked=True) as pool:
        assert pool.run(dies_with_a_forked_child, backend, expect_dead=[0])[1] < SOON_S
