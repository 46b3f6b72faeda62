"""Time limits of ranks that do not share a host: who is late, and how far each rank has come."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import reduce_scatter
from tests.support.failure_cases import SOON_S, Error, error_of, expect_prefix, gather
from tests.support.nccl_failure_cases import Facts, apart, facts_of, hosts_apart, script
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist


def one_never_comes(rank: int, size: int, where: str) -> tuple[Error, Facts, float]:
    with apart("loads"):  # what the first one needs: that may take longer than the limit
        pass
    with apart("lonely", timeout_s=1.0) as (comm, _):
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


@pytest.mark.parametrize("where", ["round", "operation"])
@pytest.mark.parametrize("world", [slow_case(2), 3])
def test_a_rank_that_never_comes(world, where, rank_pool):
    """All are told which ranks have not come, and how far all are."""
    results = rank_pool(world).run(one_never_comes, where, timeout_s=30)
    last = world - 1
    for rank, (error, facts, took_s) in enumerate(results):
        # Less than a second for the answers, beside the time limit.
        assert error[0] == "CommTimeout" and 0.8 < took_s < 1 + SOON_S, (rank, error, took_s)
        expect_prefix(error[1], rank, world, "lonely")
        done, seq = ("posted", 1) if where == "round" else ("issued", 2)
        assert "timeout in " in error[1] and error[1].endswith(f". Not arrived: rank {last} (last {done} 1)"), error[1]
        assert facts["last_seqs"] == (seq,) * last + (1,)


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
