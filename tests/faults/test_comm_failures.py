"""Ranks that come late, call something else, or abort: what the others are told, and how soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError, CommTimeout
from bucketwheel.kernels.ops import PreMulSum, all_gather, reduce_scatter
from bucketwheel.testing import run_threads
from tests.support.comm_cases import check_usable, run_local
from tests.support.failure_cases import SOON_S, Error, error_of, expect_prefix, gather

pytestmark = pytest.mark.dist


of_processes = pytest.mark.parametrize("backend", ["shm", "c10d"])


def on_backend(
    rank: int, size: int, backend: str, case: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> Any:
    with Communicator(backend=backend, name=case.__name__, timeout_s=timeout_s) as comm:
        return case(comm, *args)


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


@of_processes
def test_different_calls_of_processes(rank_pool, backend):
    for rank, (kind, text, _) in enumerate(rank_pool(3).run(on_backend, backend, different_calls, "kind")):
        assert kind == "MismatchError", text
        expect_prefix(text, rank, 3, "different_calls")
        assert DIFFERENCES["kind"] in text.split("rank 2: ")[1], text


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


def never_comes_on_c10d(rank: int, size: int) -> tuple[str, str, int | None, float]:
    return on_backend(rank, size, "c10d", one_never_comes, timeout_s=0.5)


def test_a_rank_that_never_comes_over_c10d(rank_pool):
    results = rank_pool(3).run(never_comes_on_c10d)
    for rank, (kind, text, _, _) in enumerate(results):
        expect_prefix(text, rank, 3, "one_never_comes", 2 if rank < 2 else None)
        assert kind == "CommTimeout" and "timeout in all_gather of 1 tensor" in text
        assert "Not arrived: rank 2 (last begun 1)" in text, text
    assert all(took_s < 2 * SOON_S for _, _, _, took_s in results)  # they ask each other how far they have come


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


def test_a_peer_that_has_waited_too_long_for_a_round_fails_it_for_all():
    """Not as a short wait of one's own does, whose error is of the same kind."""
    world, is_over = LocalWorld(3), threading.Event()

    def body(rank: int, _: int) -> list[Error]:
        with Communicator(world.rank(rank), timeout_s=0.3 if rank == 1 else 30, name="round") as comm:
            if rank == 0:
                assert is_over.wait(30)
                return []
            errors = [error_of(lambda: comm.exchange(b"")), error_of(lambda: comm.post(b""))]
            if rank == 2:
                is_over.set()
            return errors

    for rank, errors in enumerate(run_threads(body, 3)):
        for kind, text, _ in errors:
            assert kind == "CommTimeout" and "timeout in collect() of round 1. Not arrived: rank 0" in text, (
                rank,
                errors,
            )
            assert ("rank 1 failed first" in text) == (rank != 1), text


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


@pytest.mark.parametrize("kind", ["local", "shm", "c10d"])
def test_abort_reaches_every_rank_with_its_reason(kind, rank_pool):
    results = run_local(3, one_aborts) if kind == "local" else rank_pool(3).run(on_backend, kind, one_aborts)
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


def interrupted_while_made(rank: int, size: int, backend: str) -> Error:
    """Rank 0, once it has told the others that its part is made."""
    failures = Rendezvous.failures

    def interrupted(rendezvous: Rendezvous, mine: str) -> str:
        failures(rendezvous, mine)
        raise KeyboardInterrupt

    make = lambda: Communicator(backend=backend, name="short", timeout_s=20)  # noqa: E731
    if rank == 0:
        with mock.patch.object(Rendezvous, "failures", interrupted), pytest.raises(KeyboardInterrupt):
            make()
        return error_of(lambda: None)
    with make() as comm:
        return error_of(lambda: gather(comm)[1].wait())


@of_processes
def test_whom_a_rank_leaves_behind_when_it_is_interrupted_in_the_making_hears_why(backend, rank_pool):
    _, *others = rank_pool(3).run(interrupted_while_made, backend)
    for rank, (kind, text, failed_rank) in enumerate(others, 1):
        assert (kind, failed_rank) == ("PeerError", 0), text
        expect_prefix(text, rank, 3, "short")
        assert "aborted by rank 0: KeyboardInterrupt while the communicator was made" in text


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
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather
comm = Communicator(name="box")
for _ in range(1030):
    all_gather(torch.empty(3), torch.empty(3), comm).wait()
comm.abort('"why"')
"""
    env = {**os.environ, "BW_TRACE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert (record["comm"], record["rank"], record["world"]) == ("box", 0, 1)
    assert path.name == f"box-{record['id']}-rank0.json" and len(record["id"]) == 16
    assert 'aborted by rank 0: "why"' in record["reason"]
    assert [op["seq"] for op in record["operations"]] == list(range(7, 1031))
    last = record["operations"][-1]
    assert (last["kind"], last["tensors"], last["bytes"], last["state"]) == ("all_gather", 1, 12, "done")
    assert last["issued_s"] <= last["started_s"] <= last["finished_s"]
