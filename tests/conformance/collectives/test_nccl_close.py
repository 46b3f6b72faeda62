"""Communicators of the nccl backend that close in order, while others of their ranks or pair go on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bucketwheel.comm.communicator import Communicator
from bucketwheel.testing import RankPool
from tests.support import simulated_nccl
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
