"""Time limits of ranks that do not share a host: who is late, and how far each rank has come."""

from __future__ import annotations

import contextlib
import json
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from bucketwheel.comm import peers
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import reduce_scatter
from tests.support.failure_cases import SOON_S, Error, error_of, expect_prefix, gather
from tests.support.nccl_failure_cases import Facts, apart, facts_of, hosts_apart, script
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist


def one_never_comes(rank: int, size: int, where: str, is_silent: bool) -> tuple[Error, Facts, float]:
    silent = mock.patch.object(peers._News, "answer", lambda *_: None)
    with apart("loads"):  # what the first one needs: that may take longer than the limit
        pass
    with apart("lonely", timeout_s=1.0) as (comm, _), silent if rank == size - 1 and is_silent else nullcontext():
        gather(comm)[1].synchronize()
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == size - 1:
            time.sleep(2.5)
            error, took_s = error_of(lambda: gather(comm)), 1.0
        elif where == "round":
            error, took_s = error_of(lambda: comm.exchange(b"")), time.monotonic() - begin
        else:
            error, took_s = error_of(gather(comm)[1].synchronize), time.monotonic() - begin
        facts = facts_of(lambda: gather(comm))
        assert facts_of(lambda: comm.exchange(b"")) == facts
        return error, facts, took_s


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("where", ["round", "operation"])
@pytest.mark.parametrize("world", [slow_case(2), 3])
def test_a_rank_that_never_comes(world, where, is_silent, rank_pool):
    """All are told which ranks have not come, and how far all are, or who does not say so."""
    results = rank_pool(world).run(one_never_comes, where, is_silent, timeout_s=30)
    last = world - 1
    for rank, (error, facts, took_s) in enumerate(results):
        # Less than a second for the answers, beside the time limit.
        assert error[0] == "CommTimeout" and 0.8 < took_s < 1 + SOON_S, (rank, error, took_s)
        expect_prefix(error[1], rank, world, "lonely")
        done, seq = ("posted", 1) if where == "round" else ("issued", 2)
        who = f"Unknown (no answer): rank {last}" if is_silent else f"Not arrived: rank {last} (last {done} 1)"
        assert "timeout in " in error[1] and error[1].endswith(f". {who}"), error[1]
        assert facts["last_seqs"] == (seq,) * last + (None if is_silent else 1,)


def one_of_a_pair(rank: int, size: int) -> Facts:
    with apart("loads"):
        pass
    script()
    with posing(), hosts_apart():
        gathers, reduces = Communicator.pair(timeout_s=1.0, name="two")
        with contextlib.suppress(CommError), gathers, reduces:
            for _ in range(3):
                gather(gathers)[1].synchronize()
            sums = reduce_scatter(torch.zeros(4), torch.zeros(size * 4), reduces)
            sums.synchronize()
            if rank == 0:
                error_of(gather(gathers)[1].synchronize)
            else:
                time.sleep(2.5)
            facts = facts_of(lambda: gather(gathers))
            assert facts_of(lambda: gather(reduces)) == facts
    return facts


def test_the_two_of_a_pair_are_counted_apart(rank_pool):
    for facts in rank_pool(2).run(one_of_a_pair, timeout_s=30):
        assert (facts["kind"], facts["last_seqs"]) == ("CommTimeout", (4, 3)), facts


# ---- step by step, without other ranks


@pytest.mark.parametrize(
    "text", ["short", "\0" * 9000, "\U0001f6b2" * 9000, "x" * 9000], ids=["short", "0", "wide", "x"]
)
@pytest.mark.parametrize("ranks", [2, 5000])
def test_a_report_fits_in_a_message_of_the_ring(text, ranks):
    report = (3, text, 1, 7, 6, text, [*range(ranks - 1), None])
    data = peers._packed(3, report)
    assert len(data) <= peers._MESSAGE_BYTES
    what, (kind, cut, *numbers, last_error, last_seqs) = json.loads(data)
    assert (what, kind, numbers) == (3, 3, [1, 7, 6])
    assert text.startswith(cut) and text.startswith(last_error) and len(cut) >= min(len(text), 1000)
    assert last_seqs == ([0, None] if ranks == 2 and text == "short" else [])
