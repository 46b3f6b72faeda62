"""Ranks that come late, call something else, raise, leave or abort: what the others are told, and how soon."""

from __future__ import annotations

import re
import sys
import threading
import time
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
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import SOON_S, Error, error_of, expect_prefix, gather
from tests.support.requirements import slow_case

pytestmark = pytest.mark.dist

# ------------------------------------------------------------------------------------------------------ different calls


def different_calls(comm: Communicator, difference: str) -> Error:
    full, shard = torch.zeros(comm.size * 6), torch.zeros(6)
    is_odd = comm.rank == comm.size - 1
    odd: dict[str, Any] = {
        "kind": lambda: reduce_scatter(shard, full, comm),
        "op": lambda: reduce_scatter(shard, full, comm, op="avg" if is_odd else "sum"),
        "factor": lambda: reduce_scatter(shard, full, comm, op=PreMulSum(0.25 if is_odd else 0.5)),
        "root": lambda: comm.broadcast(full, int(is_odd)),
        "all_reduce": lambda: comm.all_reduce(torch.zeros(7 + is_odd)),
        "few": lambda: comm.all_reduce(torch.zeros(comm.size if is_odd else 1)),
        "parts": lambda: reduce_scatter(shard, full, comm) if is_odd else comm.all_reduce(full),
        "dtype": lambda: all_gather(full.bfloat16(), shard.bfloat16(), comm),
        "size": lambda: all_gather(full[: comm.size], shard[:1], comm),
        "count": lambda: all_gather([full, full.clone()], [shard, shard], comm),
    }
    is_alike = not is_odd and difference not in ("op", "factor", "root", "all_reduce", "few", "parts")
    call = (lambda: all_gather(full, shard, comm)) if is_alike else odd[difference]
    error = error_of(lambda: call().wait())
    assert error_of(lambda: gather(comm)) == error, "later calls raise the same error"
    return error


DIFFERENCES = {
    "kind": "reduce_scatter(sum) of 1 tensor",
    "op": "reduce_scatter(avg) of 1 tensor",
    "factor": "reduce_scatter(premul 0.25",
    "root": "broadcast from rank 1 of 1 tensor",
    "all_reduce": "reduce_scatter(sum) of 2 tensors, 48 bytes: float32[6], float32[6]",
    "few": "reduce_scatter(sum) of 2 tensors, 12 bytes: float32[3], float32[0]",
    "parts": "reduce_scatter(sum) of 1 tensor, 72 bytes: float32[18]",
    "dtype": "bfloat16[",
    "size": "float32[3]",
    "count": "2 tensors",
}


@pytest.mark.parametrize(
    ("place", "difference"),
    [
        *(("local", difference) for difference in DIFFERENCES),
        *((place, "kind") for place in ("cuda", "shm", "c10d")),
        *((place, "few") for place in ("shm", "c10d")),
        *(("nccl checked", difference) for difference in ("kind", "op", "factor", "dtype", "size", "count")),
    ],
)
def test_different_calls(place, difference, ranks):
    for rank, (kind, text, _) in enumerate(ranks(place, 3, different_calls, difference)):
        assert kind == "MismatchError", text
        expect_prefix(text, rank, 3, "faulty")
        assert all(f"rank {other}: " in text for other in range(3)), text
        assert DIFFERENCES[difference] in text.split("rank 2: ")[1], text


# ---------------------------------------------------------------------------------------------------------- late ranks

LATE_S = 4.0  # the time limit, which making the communicator has too
HOW_FAR = r" \(.*(last seen in operation|last begun|last issued|last posted) 1\)"


def one_never_comes(comm: Communicator, where: str) -> tuple[Error, float]:
    gather(comm)[1].synchronize()
    comm.exchange(b"")
    if comm.rank == 2:
        time.sleep(LATE_S + 1.0)
        return error_of(lambda: gather(comm)[1].synchronize()), LATE_S
    begin = time.monotonic()
    if where == "round":
        return error_of(lambda: comm.exchange(b"")), time.monotonic() - begin
    _, handle = gather(comm)
    with pytest.raises(CommTimeout, match="still running") as early:
        handle.synchronize(0.05)
    assert (early.value.op, early.value.seq, early.value.last_seqs) == ("all_gather", 2, ())
    assert not handle.query()
    error = error_of(handle.synchronize)
    took_s = time.monotonic() - begin
    for later in (handle.synchronize, lambda: gather(comm), lambda: comm.exchange(b"")):
        with pytest.raises(CommTimeout) as late:
            later()
        assert (late.value.op, late.value.seq, late.value.last_seqs) == ("all_gather", 2, (2, 2, 1))
    return error, took_s


@pytest.mark.parametrize(
    ("place", "where"),
    [
        *((place, "operation") for place in ("local", "shm", "c10d", "nccl apart")),
        ("c10d", "round"),
        *(slow_case(place, "operation") for place in ("cuda", "nccl")),
    ],
)
def test_a_rank_that_never_comes(place, where, ranks):
    """All are told which rank has not come, and how far it is."""
    for rank, ((kind, text, _), took_s) in enumerate(ranks(place, 3, one_never_comes, where, timeout_s=LATE_S)):
        assert kind == "CommTimeout" and "timeout in " in text, text
        assert re.search("Not arrived: rank 2" + ("" if place == "cuda" else HOW_FAR), text), text
        expect_prefix(text, rank, 3, "faulty")
        assert LATE_S - 0.1 < took_s < LATE_S + SOON_S  # which is enough to ask each other


def collects_alone(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.post(b"early")
        with pytest.raises(CommTimeout):
            comm.collect(timeout=0.05)
        assert comm.collect() == [b"early", b"late"]  # the round had stayed open
    else:
        time.sleep(0.4)
        assert comm.exchange(b"late") == [b"early", b"late"]
    check_usable(comm)


@pytest.mark.parametrize("place", ["local", "c10d"])
def test_a_short_wait_for_a_round_leaves_it_open(place, ranks):
    ranks(place, 2, collects_alone)


# --------------------------------------------------------------------------------------------------------------- abort


def one_aborts(comm: Communicator) -> Error:
    full, handle = gather(comm)
    handle.synchronize()
    if comm.rank == 1:
        time.sleep(0.2)
        comm.abort("the data ran out")
        return error_of(lambda: gather(comm))
    begin = time.monotonic()
    error = error_of(lambda: gather(comm)[1].synchronize())
    assert time.monotonic() - begin < SOON_S
    assert handle.query() and full[10] == 1, "a complete result was lost"
    assert error_of(lambda: comm.exchange(b"")) == error
    return error


@pytest.mark.parametrize("place", ["local", "cuda", "shm", "c10d", "nccl", "nccl apart"])
def test_abort_reaches_every_rank_with_its_reason(place, ranks):
    for rank, (kind, text, who) in enumerate(ranks(place, 3, one_aborts)):
        assert (kind, who) == ("CommError" if rank == 1 else "PeerError", 1)
        expect_prefix(text, rank, 3, "faulty")
        assert "aborted by rank 1: the data ran out" in text


def test_abort_from_another_thread_wakes_a_waiter():
    with Communicator(LocalWorld(2).rank(0)) as comm:
        threading.Timer(0.2, comm.abort, ["enough"]).start()
        with pytest.raises(CommError, match="enough"):
            gather(comm)[1].wait()


def test_an_exception_in_the_block_aborts():
    world = LocalWorld(2)

    def body(rank: int, _: int) -> str:
        try:
            with Communicator(world.rank(rank)) as comm:
                if rank == 0:
                    raise KeyError("oops")
                return error_of(lambda: gather(comm)[1].wait())[1]
        except KeyError:
            return ""

    assert "aborted by rank 0: KeyError: 'oops'" in run_threads(body, 2)[1]


def interrupted_while_made(rank: int, size: int, backend: str) -> Error:
    """Rank 0, once it has told the others that its part is made."""
    outcome = Rendezvous.outcome

    def interrupted(rendezvous: Rendezvous, *mine: Any) -> Any:
        found = outcome(rendezvous, *mine)
        if sys._getframe(1).f_code.co_name == "make":
            raise KeyboardInterrupt
        return found

    make = lambda: Communicator(backend=backend, name="short", timeout_s=20)  # noqa: E731
    if rank == 0:
        with mock.patch.object(Rendezvous, "outcome", interrupted), pytest.raises(KeyboardInterrupt):
            make()
        return error_of(lambda: None)
    with make() as comm:
        return error_of(lambda: gather(comm)[1].wait())


@pytest.mark.parametrize("backend", ["shm", "c10d"])
def test_an_interrupt_while_the_communicator_is_made_is_told_to_the_others(backend, rank_pool):
    _, *others = rank_pool(3).run(interrupted_while_made, backend)
    for rank, (kind, text, failed_rank) in enumerate(others, 1):
        assert (kind, failed_rank) == ("PeerError", 0), text
        expect_prefix(text, rank, 3, "short")
        assert "aborted by rank 0: KeyboardInterrupt while the communicator was made" in text
