"""Communicators of the nccl backend that close in order, while others of their ranks or pair go on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bucketwheel.comm.communicator import Communicator
from bucketwheel.testing import RankPool
from tests.support import simulated_nccl
from tests.support.failure_cases import error_of, expect_prefix
from tests.support.nccl_failure_cases import expect_gone, script
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist


def one_closes_first(rank: int, size: int) -> bytes:
    library = script()
    with posing():
        comm = Communicator(backend="nccl", device="cuda", name="closes first")
        comm.post(bytes([rank]))
        if rank == 0:
            payloads = comm.collect()
            comm.close()
        time.sleep(0.3)  # the watchdog looks at it meanwhile
        if rank != 0:
            payloads = comm.collect()
            comm.close()
        assert not list(Path(os.environ["BW_TRACE_DIR"]).iterdir()), "nothing has failed"
    expect_gone(library)
    return b"".join(payloads)


def test_a_rank_that_closes_in_order_is_no_failure(tmp_path):
    env = {"BW_NCCL_LIB": str(simulated_nccl.build()), "BW_TRACE_DIR": str(tmp_path)}
    with RankPool(2, env=env, forked=True) as pool:
        assert pool.run(one_closes_first, timeout_s=25) == [bytes([0, 1])] * 2


def half_of_a_pair(rank: int, size: int) -> None:
    script()
    with posing():
        gathers, reduces = Communicator.pair(name="half")
        reduces.close()
        for call in (lambda: reduces.exchange(b""), lambda: reduces.post(b""), reduces.collect):
            kind, text, _ = error_of(call)
            assert kind == "ClosedError"
            expect_prefix(text, rank, size, "half/rs")
        assert gathers.exchange(bytes([rank])) == [bytes([r]) for r in range(size)]
        gathers.close()


def test_a_closed_half_of_a_pair(rank_pool):
    rank_pool(2).run(half_of_a_pair, timeout_s=25)
