"""What goes wrong on the nccl backend, over the fake NCCL: what raises what, on which ranks, how soon, and what is left."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError, CommTimeout
from bucketwheel.kernels.ops import PreMulSum, all_gather, reduce_scatter
from bucketwheel.native import core
from bucketwheel.testing import assert_bitwise_equal
from tests.support.comm_cases import check_usable, data_of, expected_reduce
from tests.support.failure_cases import SOON_S, Error, error_of, expect_prefix, gather
from tests.support.nccl_failure_cases import Facts, deaths, expect_death_told, expect_gathered, facts_of, nccl_comm

pytestmark = pytest.mark.dist
SYSTEM_ERROR, REMOTE_ERROR = 2, 6
COLLECTIVES = (b"ncclAllGather", b"ncclReduceScatter", b"ncclBroadcast", b"ncclGroupStart")


def calls_of(script: ctypes.CDLL) -> int:
    return sum(script.fake_nccl_calls(name) for name in COLLECTIVES)


# ------------------------------------------------------------------------------------------ what fails nothing


def bad_arguments(rank: int, size: int) -> None:
    full, shard = torch.zeros(size * 6), torch.zeros(6)
    bad: list[tuple[type[Exception], str, Any, Any]] = [
        (ValueError, rf"outputs\[0\] has shape \[{size * 6}\], .* inputs\[0\], shape \[7\]", full, torch.zeros(7)),
        (TypeError, r"outputs\[0\] .*meta", full.to("meta"), shard),
        (TypeError, r"inputs\[0\] .*meta", full, shard.to("meta")),
        (ValueError, "2 .*1|1 .*2", [full, full], [shard]),
        (TypeError, "bfloat16", full, shard.bfloat16()),
        (ValueError, "contiguous", torch.zeros(size * 6, 2)[:, 0], shard),
        (ValueError, "overlap", full, full[3:9] if size > 1 else full[:0]),
        (TypeError, "", full, 5),
    ]
    with nccl_comm("bad") as (comm, script):
        check_usable(comm)
        before = calls_of(script)
        for kind, text, outputs, inputs in bad:
            if size == 1 and text == "overlap":
                continue
            with pytest.raises(kind, match=text):
                all_gather(outputs, inputs, comm)
        with pytest.raises(TypeError, match="unsupported dtype"):
            reduce_scatter(shard.bool(), full.bool(), comm)
        with pytest.raises(ValueError, match="'max'"):
            reduce_scatter(shard, full, comm, op="max")
        with pytest.raises(ValueError, match=f"broadcast from rank {size} in a world of {size}"):
            comm.broadcast_into(full, size)
        with pytest.raises(ValueError, match="nothing is posted"):
            comm.collect()
        core.set_posing(False)
        with pytest.raises((ValueError, TypeError), match=r"outputs\[0\].*cpu"):
            all_gather(full, shard, comm)
        core.set_posing(True)
        assert calls_of(script) == before
        assert gather(comm)[1].seq == 3, "a call with bad arguments got a number"
        check_usable(comm)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bad_arguments_enqueue_nothing_and_fail_nothing(world, rank_pool):
    rank_pool(world).run(bad_arguments, timeout_s=25)


def nothing_to_move(rank: int, size: int) -> None:
    with nccl_comm("empty") as (comm, script):
        before = calls_of(script)
        empty = torch.empty(0)
        handles = [
            all_gather([], [], comm),
            reduce_scatter([], [], comm, op="avg"),
            all_gather([empty, empty], [empty, empty], comm),
            reduce_scatter(empty, empty, comm, op=PreMulSum(0.5)),
            comm.broadcast_into(empty, 0),
        ]
        for handle in handles:
            assert handle.wait().synchronize().query()
        assert calls_of(script) == before
        # An empty tensor among others is left out.
        full = torch.empty(size)
        all_gather([empty, full, empty], [empty, torch.tensor([float(rank)]), empty], comm).synchronize()
        expect_gathered(comm, full)
        assert calls_of(script) == before + 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nothing_to_move_is_complete_and_calls_nothing(world, rank_pool):
    rank_pool(world).run(nothing_to_move, timeout_s=25)


# ------------------------------------------------------------------------------------------------ a call of NCCL fails


def issue(comm: Communicator, kind: str) -> Any:
    full, shard = torch.zeros(comm.size * 4), torch.zeros(4)
    if kind == "gather":
        return all_gather([full, full.clone(), full.clone()], [shard] * 3, comm)
    if kind == "one":
        return all_gather(full, shard, comm)
    if kind == "broadcast":
        return comm.broadcast_into(full, 0)
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
    ("ncclAllGather", 1, "gather"),
    ("ncclAllGather", 3, "gather"),
    ("ncclGroupStart", 1, "gather"),
    ("ncclGroupEnd", 1, "gather"),
    ("ncclReduceScatter", 2, "reduce"),
    ("ncclBroadcast", 1, "broadcast"),
    ("ncclRedOpCreatePreMulSum", 1, "factor"),
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


def in_progress(rank: int, size: int) -> None:
    with nccl_comm("polled", options={"blocking": 0}) as (comm, script):
        assert script.fake_nccl_last_config(b"blocking") == 0
        for polls in (1, 50):
            script.fake_nccl_in_progress(polls)
            spec = (torch.float32, 1000)
            fulls = [data_of(rank, spec, index, size * 1000) for index in range(2)]
            shards = [torch.empty(1000) for _ in range(2)]
            reduce_scatter(shards, fulls, comm).synchronize()
            for index, shard in enumerate(shards):
                assert_bitwise_equal(shard, expected_reduce(rank, size, spec, index))
        check_usable(comm)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_calls_that_go_on_in_the_background(world, rank_pool):
    rank_pool(world).run(in_progress, timeout_s=25)


def in_progress_for_ever(rank: int, size: int, ends_by: str) -> tuple[Error, float]:
    with nccl_comm("endless", options={"blocking": 0}, timeout_s=1.0 if ends_by == "timeout" else 30.0) as (
        comm,
        script,
    ):
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == 0:
            script.fake_nccl_in_progress(1 << 40)
        elif ends_by == "abort":
            time.sleep(0.2)
            comm.abort("enough")
        error = error_of(lambda: issue(comm, "gather").synchronize())
        return error, time.monotonic() - begin


@pytest.mark.parametrize(("ends_by", "world"), [("timeout", 1), ("abort", 2)])
def test_a_call_that_is_in_progress_for_ever(ends_by, world, rank_pool):
    for error, took_s in rank_pool(world).run(in_progress_for_ever, ends_by, timeout_s=25):
        assert took_s < 2 + SOON_S
        assert error[0] == "CommTimeout" if ends_by == "timeout" else error[0] in ("CommError", "PeerError")
        assert ("in progress" in error[1] or "timeout" in error[1]) if ends_by == "timeout" else "enough" in error[1]


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
@pytest.mark.parametrize("world", [2, 3])
def test_an_error_in_the_background(world, is_idle, rank_pool):
    for rank, (error, facts, took_s) in enumerate(rank_pool(world).run(background_error, is_idle, timeout_s=25)):
        assert error[0] == "CommError" and took_s < SOON_S
        assert (facts["rank"], facts["nccl_code"]) == (1, REMOTE_ERROR)
        assert (facts["op"], facts["seq"]) == (("", 0) if is_idle else ("all_gather", 1))
        expect_prefix(error[1], rank, world, "network")
        assert f"{REMOTE_ERROR} " in error[1] and (rank == 1 or "rank 1" in error[1])


# --------------------------------------------------------------------------------------------------- ranks that are late


LATE_S = 1.5  # the time limit, which making the communicator has too


def never_completes(rank: int, size: int) -> tuple[Error, float]:
    with nccl_comm("stuck", timeout_s=LATE_S) as (comm, script):
        gather(comm)[1].synchronize()
        if rank == 0:
            script.fake_nccl_hang(1)
        begin = time.monotonic()
        _, handle = gather(comm)
        with pytest.raises(CommTimeout, match="still running") as early:
            handle.synchronize(0.05)
        assert (early.value.op, early.value.seq, early.value.last_seqs) == ("all_gather", 2, ())
        assert not handle.query()
        error, took_s = error_of(handle.synchronize), time.monotonic() - begin
        for later in (handle.query, lambda: gather(comm)):
            with pytest.raises(CommTimeout) as late:
                later()
            assert (late.value.op, late.value.seq, late.value.last_seqs) == ("all_gather", 2, (2,) * size)
        return error, took_s


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_operation_that_never_completes(world, rank_pool):
    for rank, (error, took_s) in enumerate(rank_pool(world).run(never_completes, timeout_s=25)):
        assert error[0] == "CommTimeout" and LATE_S - 0.1 < took_s < LATE_S + 1.5
        expect_prefix(error[1], rank, world, "stuck")
        assert "timeout in all_gather of 1 tensor" in error[1] and "which all ranks have issued" in error[1]


def never_issues(rank: int, size: int) -> tuple[Error, Facts, float]:
    with nccl_comm("lonely", timeout_s=LATE_S) as (comm, _):
        gather(comm)[1].synchronize()
        begin = time.monotonic()
        if rank == size - 1:
            time.sleep(LATE_S + 0.7)
            return error_of(lambda: gather(comm)), facts_of(lambda: gather(comm)), LATE_S
        error, took_s = error_of(gather(comm)[1].synchronize), time.monotonic() - begin
        return error, facts_of(lambda: gather(comm)), took_s


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_never_issues(world, rank_pool):
    for rank, (error, facts, took_s) in enumerate(rank_pool(world).run(never_issues, timeout_s=25)):
        assert error[0] == "CommTimeout" and LATE_S - 0.1 < took_s < LATE_S + 1.5
        assert facts["last_seqs"] == (2,) * (world - 1) + (1,) and facts["rank"] == -1
        expect_prefix(error[1], rank, world, "lonely")
        assert f"Not arrived: rank {world - 1} (pid" in error[1] and "last issued 1)" in error[1]


# ----------------------------------------------------------------------------------------------------------- dead ranks


@deaths
def test_a_killed_rank_is_told_to_every_other_soon(world, victim, moment):
    expect_death_told(nccl_comm, world, victim, moment, rf"rank {victim} \(pid .* died")


# --------------------------------------------------------------------------------------------------------------- abort


def one_aborts(rank: int, size: int, moment: str) -> tuple[Error, float]:
    with nccl_comm("aborted") as (comm, script):
        full, done = gather(comm)
        done.synchronize()
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == 1:
            time.sleep(0.1)
            comm.abort("the data ran out")
            error = error_of(lambda: gather(comm))
        elif moment == "in flight":
            error = error_of(gather(comm)[1].synchronize)
        elif moment == "inside":
            script.fake_nccl_hang_call(b"ncclAllGather")
            # NCCL may have been aborted just before it is called, which makes it the handle that fails.
            error = error_of(lambda: gather(comm)[1].synchronize())
        else:
            time.sleep(0.5)
            begin = time.monotonic()
            error = error_of(lambda: gather(comm)[1].synchronize())
        took_s = time.monotonic() - begin
        assert done.query()
        expect_gathered(comm, full)
        again = error_of(lambda: comm.exchange(b""))
        assert again == error, (again, error)
        return error, took_s


@pytest.mark.parametrize("moment", ["in flight", "inside", "idle"])
@pytest.mark.parametrize("world", [2, 3])
def test_abort_reaches_every_rank_with_its_reason(world, moment, rank_pool):
    for rank, (error, took_s) in enumerate(rank_pool(world).run(one_aborts, moment, timeout_s=25)):
        # A rank that is inside NCCL is given a second to come out by itself.
        assert (error[0], error[2]) == ("CommError" if rank == 1 else "PeerError", 1) and took_s < SOON_S
        expect_prefix(error[1], rank, world, "aborted")
        assert "aborted by rank 1: the data ran out" in error[1]


def stuck_inside(rank: int, size: int) -> tuple[Error, float]:
    with nccl_comm("inside", timeout_s=LATE_S) as (comm, script):
        comm.exchange(b"")
        if rank == 0:
            script.fake_nccl_hang_call(b"ncclAllGather")
        begin = time.monotonic()
        return error_of(lambda: gather(comm)[1].synchronize()), time.monotonic() - begin


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_that_stays_inside_nccl_times_out(world, rank_pool):
    for error, took_s in rank_pool(world).run(stuck_inside, timeout_s=25):
        assert error[0] == "CommTimeout" and took_s < LATE_S + 2.5, (error, took_s)
        assert "timeout in all_gather" in error[1]


def aborts_while_it_closes(rank: int, size: int) -> float:
    with nccl_comm("closing") as (comm, script):
        if rank == 0:
            handle = gather(comm)[1]
            threading.Timer(0.2, comm.abort, ["never mind"]).start()
            begin = time.monotonic()
            comm.close()
            took_s = time.monotonic() - begin
            assert "never mind" in error_of(handle.query)[1]
            comm_error = ""
        else:
            time.sleep(0.6)
            begin = time.monotonic()
            comm_error = error_of(lambda: gather(comm))[1]
            took_s = 0.0
            assert "aborted by rank 0: never mind" in comm_error
        return took_s


def test_abort_ends_a_close_that_waits(rank_pool):
    assert rank_pool(2).run(aborts_while_it_closes, timeout_s=25)[0] < SOON_S
