"""What goes wrong on the nccl backend, over the fake NCCL: what raises what, on which ranks, how soon, and what is left."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import PreMulSum, all_gather, reduce_scatter
from tests.support.cores import BUSY
from tests.support.failure_cases import (
    SOON_S,
    Error,
    Facts,
    error_of,
    expect_prefix,
    facts_of,
    gather,
    hosts_apart,
    nccl_comm,
    script,
)
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist
SYSTEM_ERROR, REMOTE_ERROR = 2, 6


# ------------------------------------------------------------------------------------------------ a call of NCCL fails


def issue(comm: Communicator, kind: str) -> Any:
    full, shard = torch.zeros(comm.size * 4), torch.zeros(4)
    if kind == "gather":
        return all_gather([full, full.clone(), full.clone()], [shard] * 3, comm)
    if kind == "one":
        return all_gather(full, shard, comm)
    if kind == "broadcast":
        return comm.broadcast(full, 0)
    if kind == "factor":
        return reduce_scatter([shard, shard.double()], [full, full.double()], comm, op=PreMulSum(0.25))
    return reduce_scatter([shard, shard.clone()], [full, full.clone()], comm)


OPS = {"reduce": "reduce_scatter", "factor": "reduce_scatter", "broadcast": "broadcast"}


def one_call_fails(rank: int, size: int, function: str, countdown: int, kind: str) -> tuple[Error, Error, Facts, float]:
    """The errors of an operation that was in flight, and of the one that failed on the last rank, with its facts."""
    with nccl_comm("failing") as (comm, script):
        gather(comm)[1].synchronize()
        script.fake_nccl_hang(1)
        _, before = gather(comm)
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == size - 1:
            script.fake_nccl_fail(function.encode(), countdown, SYSTEM_ERROR)
            error = error_of(lambda: issue(comm, kind))
            assert script.fake_nccl_open_groups() == 0
        else:
            error = error_of(lambda: issue(comm, kind).synchronize())
        took_s = time.monotonic() - begin
        earlier = error_of(before.synchronize)
        facts = facts_of(before.synchronize)
        for later in (before.query, before.wait, lambda: gather(comm), lambda: comm.exchange(b"")):
            assert error_of(later) == error
            assert facts_of(later) == facts
        return earlier, error, facts, took_s


FAILING = [
    ("ncclAllGather", 1, "one"),
    ("ncclAllGather", 3, "gather"),
    ("ncclGroupStart", 1, "gather"),
    ("ncclGroupEnd", 1, "gather"),
    ("ncclReduceScatter", 2, "reduce"),
    ("ncclBroadcast", 1, "broadcast"),
    ("ncclRedOpCreatePreMulSum", 2, "factor"),
]


@pytest.mark.parametrize(("function", "countdown", "kind"), FAILING)
def test_a_failed_call_of_nccl_fails_every_rank(function, countdown, kind, rank_pool):
    results = rank_pool(3).run(one_call_fails, function, countdown, kind, timeout_s=25)
    for rank, (earlier, error, facts, took_s) in enumerate(results):
        assert earlier == error
        assert (facts["rank"], facts["nccl_code"]) == (2, SYSTEM_ERROR)
        assert facts["last_error"] == f"the script lets {function} fail" and facts["last_error"] in error[1]
        assert (facts["op"], facts["seq"]) == ((OPS.get(kind, "all_gather"), 3) if rank == 2 else ("all_gather", 2))
        assert error[0] == "CommError" and took_s < SOON_S
        expect_prefix(error[1], rank, 3, "failing", 3 if rank == 2 else None)
        assert f"{function}: {SYSTEM_ERROR} unhandled system error; " in error[1]
        assert rank == 2 or "rank 2" in error[1]


def alone_and_failing(rank: int, size: int) -> None:
    begin = time.monotonic()
    with nccl_comm("alone") as (comm, script):
        script.fake_nccl_fail(b"ncclGroupEnd", 1, SYSTEM_ERROR)
        with pytest.raises(CommError, match=r"rank 0/1 comm 'alone' seq 1\] ncclGroupEnd: 2 "):
            issue(comm, "gather")
        assert "ncclGroupEnd" in error_of(lambda: gather(comm))[1]  # noqa: F821
    del comm
    assert time.monotonic() - begin < SOON_S, "what was never enqueued was waited for"


def test_a_failed_call_in_a_world_of_one(rank_pool):
    rank_pool(1).run(alone_and_failing, timeout_s=25)


def failed_and_freed(rank: int, size: int) -> None:
    """What a failed operation was given is free once the device has done what was enqueued before."""
    with nccl_comm("freed") as (comm, script):
        lease = comm.pool.acquire("key", 4096)
        script.fake_nccl_fail(b"ncclAllGather", 2, SYSTEM_ERROR)
        tensor = lease.tensor(torch.float32, (64,))
        with pytest.raises(CommError, match="ncclAllGather"):
            all_gather([tensor[:32], tensor[32:]], [tensor[:32], tensor[32:]], comm)
        lease.release()


def test_memory_of_a_failed_operation(rank_pool):
    rank_pool(1).run(failed_and_freed, timeout_s=25)


# ------------------------------------------------------------------------------------------------------ what never ends

LATE_S = 4.0  # the time limit, which making the communicator has too


def never_ends(rank: int, size: int, where: str, ends_by: str) -> tuple[Error, Facts, float]:
    """On rank 0: on the device, or inside NCCL. The last rank may abort."""
    limit_s = LATE_S if ends_by == "timeout" else 30.0
    with nccl_comm("stuck", timeout_s=limit_s) as (comm, script):
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == 0 and where == "inside":
            script.fake_nccl_hang_call(b"ncclAllGather")
        elif rank == 0:
            script.fake_nccl_hang(1)
        elif ends_by == "abort":
            time.sleep(0.2)
            comm.abort("enough")
        error = error_of(lambda: issue(comm, "gather").synchronize())
        return error, facts_of(lambda: gather(comm)), time.monotonic() - begin


@pytest.mark.parametrize(
    ("where", "ends_by", "world"),
    [
        *(("device", "timeout", world) for world in (1, 3)),
        *(("inside", "timeout", world) for world in (1, 2)),
        ("inside", "abort", 2),
    ],
)
def test_an_operation_that_never_ends(where, ends_by, world, rank_pool):
    results = rank_pool(world).run(never_ends, where, ends_by, timeout_s=25)
    for rank, ((kind, text, _), facts, took_s) in enumerate(results):
        expect_prefix(text, rank, world, "stuck")
        if ends_by == "abort":
            assert kind in ("CommError", "PeerError") and "enough" in text, text
            assert took_s < 2 + SOON_S  # a rank that is inside NCCL is given a second to come out by itself
            continue
        assert kind == "CommTimeout" and took_s < LATE_S + 2.5 * BUSY, (kind, text, took_s)
        assert "timeout in all_gather" in text, text
        if where == "device":
            assert "which all ranks have issued" in text and facts["last_seqs"] == (1,) * world


def one_of_a_pair(rank: int, size: int) -> Facts:
    script()
    with posing(), hosts_apart():
        gathers, reduces = Communicator.pair(timeout_s=LATE_S, name="two")
        with contextlib.suppress(CommError), gathers, reduces:
            for _ in range(3):
                gather(gathers)[1].synchronize()
            reduce_scatter(torch.zeros(4), torch.zeros(size * 4), reduces).synchronize()
            if rank == 0:
                error_of(gather(gathers)[1].synchronize)
            else:
                time.sleep(LATE_S + 1.0)
            facts = facts_of(lambda: gather(gathers))
            assert facts_of(lambda: gather(reduces)) == facts
    return facts


def test_the_two_of_a_pair_are_counted_apart(rank_pool):
    for facts in rank_pool(2).run(one_of_a_pair, timeout_s=30):
        assert (facts["kind"], facts["last_seqs"]) == ("CommTimeout", (4, 3)), facts


def aborts_while_it_closes(rank: int, size: int) -> None:
    with nccl_comm("closing") as (comm, _):
        if rank == 0:
            handle = gather(comm)[1]
            threading.Timer(0.2, comm.abort, ["never mind"]).start()
            begin = time.monotonic()
            comm.close()
            assert time.monotonic() - begin < SOON_S
            assert "never mind" in error_of(handle.query)[1]
        else:
            time.sleep(0.6)
            assert "aborted by rank 0: never mind" in error_of(lambda: gather(comm))[1]


def test_abort_ends_a_close_that_waits(rank_pool):
    rank_pool(2).run(aborts_while_it_closes, timeout_s=25)


def background_error(rank: int, size: int, is_idle: bool) -> tuple[Error, Facts, float]:
    with nccl_comm("network") as (comm, script):
        handle = None
        if not is_idle:
            script.fake_nccl_hang(1)
            handle = gather(comm)[1]
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == 1:
            script.fake_nccl_async_error(REMOTE_ERROR)
        if handle is None:
            time.sleep(1.5)  # NCCL may know of a dead peer before we do, so its own word has to wait a moment
            handle_error = error_of(lambda: gather(comm))
        else:
            handle_error = error_of(handle.synchronize)
        took_s = time.monotonic() - begin
        assert error_of(lambda: comm.exchange(b"")) == handle_error
        script.fake_nccl_async_error(0)
        return handle_error, facts_of(lambda: comm.exchange(b"")), took_s


@pytest.mark.parametrize("is_idle", [False, True])
def test_an_error_in_the_background(is_idle, rank_pool):
    for rank, (error, facts, took_s) in enumerate(rank_pool(3).run(background_error, is_idle, timeout_s=25)):
        assert error[0] == "CommError" and took_s < SOON_S
        assert (facts["rank"], facts["nccl_code"]) == (1, REMOTE_ERROR)
        assert (facts["op"], facts["seq"]) == (("", 0) if is_idle else ("all_gather", 1))
        expect_prefix(error[1], rank, 3, "network")
        assert f"{REMOTE_ERROR} " in error[1] and (rank == 1 or "rank 1" in error[1])
