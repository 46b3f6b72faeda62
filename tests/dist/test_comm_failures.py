"""Ranks that die, leave, come late, call something else, or abort: what the others are told, and how soon."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from comm_cases import check_all_gather, check_usable, run_local
from failure_cases import SOON_S, error_of, expect_prefix, gather
from requirements import slow_case

from bucketwheel.comm import Communicator
from bucketwheel.errors import ClosedError, CommError, CommTimeout
from bucketwheel.ops import PreMulSum, all_gather, reduce_scatter
from bucketwheel.place import LocalWorld
from bucketwheel.testing import RankPool, run_threads

pytestmark = pytest.mark.dist


# --------------------------------------------------------------------------------------------------------------- death


def victim_dies(rank: int, size: int, victim: int, moment: str) -> tuple[list[str], float, bool]:
    """The messages that a survivor gets, how long the first took, and whether its earlier result stayed good."""
    with Communicator(backend="shm", name="doomed", timeout_s=60) as comm:
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
@pytest.mark.parametrize(("size", "victim"), [slow_case(2, 0), (4, 1)])
def test_a_killed_rank_is_told_to_every_other_within_two_seconds(size, victim, moment):
    with RankPool(size, forked=True) as pool:
        results = pool.run(victim_dies, victim, moment, expect_dead=[victim])
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        messages, took_s, is_good = result
        assert took_s < SOON_S
        assert is_good, "a complete result was lost"
        assert f"rank {victim} (pid" in messages[0] and "died" in messages[0]
        assert messages[1] == messages[0], "later calls raise the same error"


def left_behind(rank: int, size: int) -> list[int]:
    with Communicator(backend="shm") as comm:
        check_all_gather(comm, [(torch.float32, 500_000)], "by_rank")
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        error_of(lambda: gather(comm)[1].wait())
    return [os.getpid()]


def traces_in_the_system() -> set[str]:
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "bucketwheel" in line}
    return sockets | {name for name in os.listdir("/dev/shm") if "bucketwheel" in name or "bw" in name}


def expect_gone(traces: set[str]) -> None:
    """In a while: tests that run beside this one leave theirs at their end."""
    until = time.monotonic() + 30
    while (left := traces & traces_in_the_system()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def test_nothing_stays_behind_in_the_system():
    before = traces_in_the_system()
    with RankPool(2, forked=True) as pool:
        pool.run(left_behind, expect_dead=[0])
        expect_gone(traces_in_the_system() - before)
    expect_gone(traces_in_the_system() - before)


# ------------------------------------------------------------------------------------------------------------- leaving


def one_leaves(rank: int, size: int) -> tuple[str, str, int | None] | None:
    comm = Communicator(backend="shm", name="party")
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


def test_a_rank_that_has_left_and_is_needed(rank_pool):
    for error in rank_pool(3).run(one_leaves)[1:]:
        kind, text, rank = error
        assert (kind, rank) == ("PeerError", 0)
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


def drops_in_flight(rank: int, size: int) -> float:
    comm = Communicator(backend="shm")
    if rank == 1:
        time.sleep(0.3)
    full, handle = gather(comm, 100_000)
    del comm, full, handle  # ends the operation in an orderly way: the peer arrives within the grace
    return 1.0


def test_dropping_everything_in_flight(rank_pool):
    assert rank_pool(2).run(drops_in_flight) == [1.0, 1.0]


def test_exit_with_an_operation_in_flight():
    """A process whose peer never comes ends soon, with exit code 0 and no crash, though it drops what it gathers."""
    code = """
import torch
from bucketwheel.comm import Communicator
from bucketwheel.place import LocalWorld
from bucketwheel.ops import all_gather
world = LocalWorld(2)
comm, other = Communicator(world.rank(0)), Communicator(world.rank(1))
all_gather(torch.empty(20), torch.empty(10), comm)
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begin < 30


# ------------------------------------------------------------------------------------------------- mismatch and timeout


def different_calls(comm: Communicator, difference: str) -> tuple[str, str, int | None]:
    full, shard = torch.zeros(comm.size * 6), torch.zeros(6)
    is_odd = comm.rank == comm.size - 1
    if difference == "kind" and is_odd:
        call = lambda: reduce_scatter(shard, full, comm).wait()  # noqa: E731
    elif difference == "op":
        call = lambda: reduce_scatter(shard, full, comm, op="avg" if is_odd else "sum").wait()  # noqa: E731
    elif difference == "factor":
        call = lambda: reduce_scatter(shard, full, comm, op=PreMulSum(0.25 if is_odd else 0.5)).wait()  # noqa: E731
    elif difference == "root":
        call = lambda: comm.broadcast_into(full, 1 if is_odd else 0).wait()  # noqa: E731
    elif difference == "dtype" and is_odd:
        call = lambda: all_gather(full.bfloat16(), shard.bfloat16(), comm).wait()  # noqa: E731
    elif difference == "size" and is_odd:
        call = lambda: all_gather(full[: comm.size], shard[:1], comm).wait()  # noqa: E731
    elif difference == "count" and is_odd:
        call = lambda: all_gather([full, full.clone()], [shard, shard], comm).wait()  # noqa: E731
    else:
        call = lambda: all_gather(full, shard, comm).wait()  # noqa: E731
    error = error_of(call)
    assert error_of(lambda: gather(comm)) == error, "later calls raise the same error"
    return error


DIFFERENCES = {
    "kind": "reduce_scatter(sum) of 1 tensor",
    "op": "reduce_scatter(avg) of 1 tensor",
    "factor": "reduce_scatter(premul 0.25",
    "root": "broadcast from rank 1 of 1 tensor",
    "dtype": "bfloat16[",
    "size": "float32[3]",
    "count": "2 tensors",
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_different_calls(difference):
    for rank, (kind, text, _) in enumerate(run_local(3, different_calls, difference)):
        assert kind == "MismatchError", text
        expect_prefix(text, rank, 3, "different_calls")
        assert all(f"rank {other}: " in text for other in range(3)), text
        assert DIFFERENCES[difference] in text.split("rank 2: ")[1], text


def different_calls_on_shm(rank: int, size: int) -> tuple[str, str, int | None]:
    with Communicator(backend="shm", name="different_calls") as comm:
        return different_calls(comm, "kind")


def test_different_calls_of_processes(rank_pool):
    assert [kind for kind, _, _ in rank_pool(2).run(different_calls_on_shm)] == ["MismatchError"] * 2


def one_never_comes(comm: Communicator) -> tuple[str, str, int | None, float]:
    gather(comm)[1].wait()
    if comm.rank == 2:
        time.sleep(1.5)
        return *error_of(lambda: gather(comm)[1].wait()), 0.0
    begin = time.monotonic()
    _, handle = gather(comm)
    with pytest.raises(CommTimeout, match="still running") as early:
        handle.synchronize(0.05)
    assert (early.value.op, early.value.seq, early.value.last_seqs) == ("all_gather", 2, ())
    assert not handle.query()
    error = error_of(handle.wait)
    took_s = time.monotonic() - begin
    for later in (handle.wait, lambda: gather(comm), lambda: comm.exchange(b"")):
        with pytest.raises(CommTimeout) as late:
            later()
        assert (late.value.op, late.value.seq, late.value.last_seqs) == ("all_gather", 2, (2, 2, 1))
    return *error, took_s


def test_a_rank_that_never_comes():
    world = LocalWorld(3)

    def body(rank: int, _: int):
        with Communicator(world.rank(rank), timeout_s=0.5, name="lonely") as comm:
            return one_never_comes(comm)

    results = run_threads(body, 3)
    for rank in (0, 1):
        kind, text, _, took_s = results[rank]
        assert kind == "CommTimeout" and 0.4 < took_s < SOON_S
        expect_prefix(text, rank, 3, "lonely")
        assert "rank 2" in text and "last seen in operation 1" in text
    assert results[2][0] == "CommTimeout" and "failed first" in results[2][1]


def collects_alone(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.post(b"early")
        with pytest.raises(CommTimeout, match="rank 1"):
            comm.collect(timeout=0.05)
        assert comm.collect() == [b"early", b"late"]  # the round had stayed open
    else:
        time.sleep(0.4)
        assert comm.exchange(b"late") == [b"early", b"late"]
    check_usable(comm)


def test_a_short_wait_for_a_round_leaves_it_open():
    run_local(2, collects_alone)


# --------------------------------------------------------------------------------------------------------------- abort


def one_aborts(comm: Communicator) -> tuple[str, str, int | None]:
    full, handle = gather(comm)
    handle.wait()
    if comm.rank == 1:
        time.sleep(0.2)
        comm.abort("the data ran out")
        return error_of(lambda: gather(comm))
    begin = time.monotonic()
    error = error_of(lambda: gather(comm)[1].wait())
    assert time.monotonic() - begin < SOON_S
    assert handle.query() and full[10] == 1, "a complete result was lost"
    assert error_of(lambda: comm.exchange(b"")) == error
    return error


def one_aborts_on_shm(rank: int, size: int) -> tuple[str, str, int | None]:
    with Communicator(backend="shm", name="one_aborts") as comm:
        return one_aborts(comm)


@pytest.mark.parametrize("kind", ["local", "shm"])
def test_abort_reaches_every_rank_with_its_reason(kind, rank_pool):
    results = run_local(3, one_aborts) if kind == "local" else rank_pool(3).run(one_aborts_on_shm)
    for rank, (name, text, who) in enumerate(results):
        assert (name, who) == ("CommError" if rank == 1 else "PeerError", 1)
        expect_prefix(text, rank, 3, "one_aborts")
        assert "aborted by rank 1: the data ran out" in text


def test_abort_from_another_thread_wakes_a_waiter():
    with Communicator(LocalWorld(2).rank(0)) as comm:
        threading.Timer(0.2, comm.abort, ["enough"]).start()
        with pytest.raises(CommError, match="enough"):
            gather(comm)[1].wait()
        with pytest.raises(CommError, match="enough"):
            comm.exchange(b"")


def test_an_exception_in_the_block_aborts():
    def body(comm: Communicator) -> str:
        if comm.rank == 0:
            raise KeyError("oops")
        return error_of(lambda: gather(comm)[1].wait())[1]

    world = LocalWorld(2)
    texts: list[str] = []

    def rank_body(rank: int, _: int) -> None:
        try:
            with Communicator(world.rank(rank)) as comm:
                texts.append(body(comm))
        except KeyError:
            assert rank == 0

    run_threads(rank_body, 2)
    assert len(texts) == 1 and "aborted by rank 0: KeyError: 'oops'" in texts[0]


# ------------------------------------------------------------------------------------------------------- flight record


def test_the_last_operations_are_written_on_failure(tmp_path):
    code = """
import torch
from bucketwheel.comm import Communicator
from bucketwheel.ops import all_gather
comm = Communicator(name="box")
for _ in range(1030):
    all_gather(torch.empty(3), torch.empty(3), comm).wait()
comm.abort('"why"')
"""
    env = {**os.environ, "BW_TRACE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
    record = json.loads((tmp_path / "box-rank0.json").read_text())
    assert (record["comm"], record["rank"], record["world"]) == ("box", 0, 1)
    assert 'aborted by rank 0: "why"' in record["reason"]
    assert [op["seq"] for op in record["operations"]] == list(range(7, 1031))
    last = record["operations"][-1]
    assert (last["kind"], last["tensors"], last["bytes"], last["state"]) == ("all_gather", 1, 12, "done")
    assert last["issued_s"] <= last["started_s"] <= last["finished_s"]


# ---------------------------------------------------------------------------------------------------------------- fork


def test_a_forked_child_cannot_disturb_the_parent():
    code = """
import os, torch
from bucketwheel.comm import Communicator
from bucketwheel.errors import DeviceError
from bucketwheel.ops import all_gather
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


def dies_with_a_forked_child(rank: int, size: int) -> float | None:
    """The child of the dead rank lives on; its copies of the sockets must not hide the death."""
    with Communicator(backend="shm") as comm:
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


def test_a_forked_child_does_not_hide_the_death_of_its_parent():
    with RankPool(2, forked=True) as pool:
        assert pool.run(dies_with_a_forked_child, expect_dead=[0])[1] < SOON_S
