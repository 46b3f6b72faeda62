"""The life of NCCL communicators: what outlives them, pairs, forks, the end of the process, CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CaptureError, ClosedError, DeviceError
from bucketwheel.kernels.ops import all_gather
from tests.support import simulated_cuda, simulated_nccl
from tests.support.bits import assert_bitwise_equal
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import (
    error_of,
    expect_gone,
    fresh_ranks,
    gather,
    nccl_comm,
    read_flight,
    script,
)
from tests.support.held import held, still_held
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[3]


# ------------------------------------------------------------------------------------------------------- ends of a life


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


def flies(rank: int, size: int) -> None:
    with nccl_comm("box", timeout_s=4) as (comm, library):
        gather(comm)[1].synchronize()
        if rank == 0:
            library.fake_nccl_hang(1)
        handles = [gather(comm)[1], gather(comm)[1]]
        assert error_of(handles[1].synchronize)[0] == "CommTimeout"


def test_every_rank_writes_its_last_operations(tmp_path):
    """But where one only closes in order."""
    with fresh_ranks(2, BW_TRACE_DIR=str(tmp_path)) as pool:
        assert pool.run(one_closes_first, timeout_s=25) == [bytes([0, 1])] * 2
        pool.run(flies)
    for rank in range(2):
        record = read_flight(tmp_path, "box", rank)
        assert (record["comm"], record["rank"], record["world"], record["backend"]) == ("box", rank, 2, "nccl")
        assert "timeout in all_gather" in record["reason"]
        assert [op["state"] for op in record["operations"]] == ["done", "failed", "failed"]


FORKS = """
import os, torch
from tests.support import simulated_nccl
script = simulated_nccl.install()
from bucketwheel.native.modules import native
native().set_posing(True)
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import DeviceError
from bucketwheel.kernels.ops import all_gather
comm = Communicator(backend="nccl", device="cuda", registered=True)
lease = comm.pool.acquire("key", 4096)
assert comm.register_pool() == 1
all_gather(torch.empty(3), torch.empty(3), comm).wait()
if (child := os.fork()) == 0:
    for call in (lambda: all_gather(torch.empty(3), torch.empty(3), comm), lambda: comm.exchange(b""), lambda: comm.split(0)):
        try:
            call()
        except DeviceError as error:
            assert "parent process" in str(error), error
        else:
            os._exit(1)
    comm.abort("from the child")
    comm.close()
    before = script.fake_nccl_calls(b"ncclCommWindowDeregister")
    del comm
    assert script.fake_nccl_calls(b"ncclCommWindowDeregister") == before
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert script.fake_nccl_live_windows() == 1
all_gather(torch.empty(3), torch.empty(3), comm).synchronize()
lease.release()
"""


def test_a_forked_child_cannot_disturb_the_parent():
    env = {**os.environ, "BW_NCCL_LIB": str(simulated_nccl.build())}
    done = subprocess.run(
        [sys.executable, "-c", FORKS], check=False, capture_output=True, text=True, timeout=100, env=env, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


def many(rank: int, size: int) -> None:
    library = script()

    def cycle() -> None:
        with Communicator(backend="nccl", device="cuda", registered=True) as comm:
            lease = comm.pool.acquire("key", 4096)
            comm.register_pool()
            gather(comm)[1].synchronize()
            lease.release()

    with posing():
        for _ in range(5):
            cycle()
        expect_gone(library)
        before = held()
        for _ in range(20):
            cycle()
        expect_gone(library)
        assert still_held(before) == ""
        assert library.fake_nccl_live_bytes() == 0


def test_many_communicators_leave_nothing(rank_pool):
    rank_pool(2).run(many, timeout_s=100)


# --------------------------------------------------------------------------------------------------------------- pairs


def pair_lives(rank: int, size: int) -> None:
    library = script()
    with posing():
        gathers, reduces = Communicator.pair(name="twins", timeout_s=20)
        check_usable(gathers)
        check_usable(reduces)
        # Each is closed in another order by every rank; the other one goes on.
        gathers.close() if rank == 0 else reduces.exchange(b"")
        reduces.exchange(b"") if rank == 0 else gathers.close()
        with pytest.raises(ClosedError):
            gather(gathers)
        check_usable(reduces)
        reduces.close()
    expect_gone(library)


def test_one_of_a_pair_goes_on_without_the_other(rank_pool):
    rank_pool(3).run(pair_lives, timeout_s=40)


# -------------------------------------------------------------------------------------------------------------- graphs


def captured(rank: int, size: int) -> None:
    with nccl_comm("captured") as (comm, _):
        library = simulated_cuda.load()[1]
        full, shard = torch.zeros(size * 4), torch.full((4,), float(rank))
        before = all_gather(full, shard, comm)
        with simulated_cuda.Graph(library) as graph:
            with pytest.raises(CaptureError, match="issued before its capture"):
                all_gather(full, shard, comm, after=[before])
            handle = all_gather(full, shard, comm)
            handle.wait()
            total = full + 1
        with pytest.raises(CaptureError, match="is part of a CUDA graph"):
            all_gather(full, shard, comm, after=[handle])
        for call in (handle.query, handle.synchronize, lambda: handle.synchronize(1.0)):
            with pytest.raises(CaptureError):
                call()
        for step in range(3):
            shard.fill_(float(rank + step))
            graph.replay()
            wanted = torch.arange(step, size + step, dtype=torch.float32).repeat_interleave(4)
            assert_bitwise_equal(full, wanted)
            assert_bitwise_equal(total, wanted + 1)
        check_usable(comm)
        library.fake_cuda_free_graph(graph._graph)
        with pytest.raises(DeviceError):
            handle.query()


def test_a_captured_operation(rank_pool):
    rank_pool(2).run(captured, timeout_s=25)
