"""What blocks inside NCCL or the driver, or fails there, holds up nobody else, and ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from bucketwheel.comm import nccl
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CaptureError, CommError, CommTimeout
from bucketwheel.kernels.ops import all_gather
from tests.support import simulated_nccl
from tests.support.cores import BUSY
from tests.support.counted_cuda import plan_cuda_fault
from tests.support.ranks import RankPool
from tests.support.simulated_cuda import Graph, posing
from tests.support.simulated_nccl import simulated

pytestmark = pytest.mark.dist


def gather(comm: Communicator, numel: int = 4):
    return all_gather(torch.empty(comm.size * numel), torch.full((numel,), float(comm.rank)), comm)


def await_(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def other_goes_on(rank: int, world: int) -> None:
    with simulated() as script, Communicator(backend="nccl", device="cuda", timeout_s=20, name="other") as other:
        failed = Communicator(backend="nccl", device="cuda", timeout_s=20, name="failed")
        script.fake_nccl_hang(1)
        handle = gather(failed)
        failed.exchange(b"")  # all have issued it
        script.fake_nccl_hang_call(b"ncclCommAbort")
        failed.abort("enough")
        with pytest.raises(CommError, match="enough"):
            handle.synchronize(10)
        await_(lambda: script.fake_nccl_hanging_calls() == 1)
        for _ in range(3):
            gather(other).synchronize(15)
        script.fake_nccl_release()
        failed.close(5)


def test_an_abort_that_hangs_holds_up_no_other_communicator(rank_pool):
    rank_pool(2).run(other_goes_on)


@contextlib.contextmanager
def stuck_inside(limits_s: dict[str, float]) -> Iterator[tuple[Any, list[Communicator]]]:
    """The first communicator is inside NCCL, in another thread, until the script lets it go."""
    with simulated() as script:
        comms = [
            Communicator(backend="nccl", device="cuda", timeout_s=limit_s, name=name)
            for name, limit_s in limits_s.items()
        ]
        script.fake_nccl_hang_call(b"ncclAllGather")
        thread = threading.Thread(target=lambda: gather(comms[0]).synchronize(20))
        thread.start()
        await_(script.fake_nccl_hanging_calls)
        yield script, comms
        script.fake_nccl_release()
        thread.join(10)
        for comm in reversed(comms):
            comm.close(5)


def stuck_elsewhere(rank: int, world: int) -> None:
    with stuck_inside({"stuck": 20, "other": 4.0, "idle": 20}) as (_, (_, other, idle)):
        begin = time.monotonic()
        with pytest.raises(CommTimeout, match="another communicator of cuda:0 is inside NCCL") as caught:
            gather(other)
        error = caught.value
        assert error.last_seqs == (0,) * world
        is_told = "failed first" in str(error)  # by the other rank, before this one had anything in flight
        assert is_told or (error.op, error.seq) == ("all_gather", 1)
        assert 3.6 < time.monotonic() - begin < 4 + 3 * BUSY
        begin = time.monotonic()
        idle.close(30)
        assert time.monotonic() - begin < 5 * BUSY


def test_a_thread_stuck_inside_nccl_holds_others_up_until_their_time_limits(rank_pool):
    rank_pool(2).run(stuck_elsewhere)


def interrupted(rank: int, world: int) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with stuck_inside({"stuck": 20, "other": 20}) as (script, (_, other)):
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            gather(other)
        assert time.monotonic() - begin < 5 + BUSY
        script.fake_nccl_release()
        gather(other).synchronize(15)


def test_an_interrupt_ends_the_wait_for_a_thread_that_is_stuck(rank_pool):
    rank_pool(1).run(interrupted)


def waits_for_peers(rank: int, world: int, function: str) -> None:
    """The last rank is late inside NCCL; meanwhile the others need it to issue operations of another communicator."""
    with (
        simulated() as script,
        Communicator(backend="nccl", device="cuda", timeout_s=20, name="other") as other,
        Communicator(backend="nccl", device="cuda", timeout_s=20, name="waits", registered=True) as waits,
    ):
        lease = waits.pool.acquire("", 4096)
        ended: list[object] = []
        call = {"ncclCommSplit": lambda: waits.split(0), "ncclCommWindowRegister": waits.register_pool}[function]
        is_late = rank == world - 1
        if is_late:
            script.fake_nccl_hang_call(function.encode())
        before = script.fake_nccl_calls(function.encode())
        thread = threading.Thread(target=lambda: ended.append(call()))
        thread.start()
        await_(lambda: script.fake_nccl_calls(function.encode()) > before)
        await_(lambda: script.fake_nccl_hanging_calls() or not is_late)
        for _ in range(3):
            gather(other).synchronize(15)
        assert not ended
        other.exchange(b"")
        if is_late:  # on the others it would end their waiting for this one
            script.fake_nccl_release()
        thread.join(10)
        assert len(ended) == 1
        if isinstance(ended[0], Communicator):
            gather(ended[0]).synchronize(15)
            ended[0].close(5)
        lease.release()


@pytest.mark.parametrize("function", ["ncclCommSplit", "ncclCommWindowRegister"])
def test_a_call_that_waits_for_peers_holds_up_no_other_communicator(rank_pool, function):
    rank_pool(2).run(waits_for_peers, function)


def registers(rank: int, world: int) -> CommTimeout:
    """First at once, then never on the last rank."""
    with Communicator(name="aside") as aside, simulated() as script:
        comm = Communicator(backend="nccl", device="cuda", timeout_s=6, name="windows", registered=True)
        assert comm.features["windows"] is False, "nothing is registered yet"
        gather(comm).synchronize(10)
        leases = [comm.pool.acquire("", 4096)]
        assert comm.register_pool() == 1 and comm.features["windows"]
        leases.append(comm.pool.acquire("", 1 << 30))
        comm.exchange(b"")
        if rank == world - 1:
            script.fake_nccl_hang_call(b"ncclCommWindowRegister")
        begin = time.monotonic()
        with pytest.raises(CommTimeout) as caught:
            comm.register_pool()
        assert time.monotonic() - begin < 20
        aside.exchange(b"")  # the other, too: going on before its deadline the call would be in time for it
        script.fake_nccl_release()
        with pytest.raises(CommTimeout):
            gather(comm)
        for lease in leases:
            lease.release()
        comm.close(2)
        return caught.value


def test_registering_has_a_time_limit(rank_pool):
    for error in rank_pool(2).run(registers):
        assert "comm 'windows'" in str(error) and "register_pool did not finish in time" in str(error)
        assert (error.op, error.seq, error.last_seqs) == ("", 1, (1, 1)), "the error came through a pipe"


def splits(rank: int, world: int) -> None:
    with simulated() as script:
        comm = Communicator(backend="nccl", device="cuda", timeout_s=6, name="whole")
        comm.stream.pause(0.1)
        before = gather(comm)
        part = comm.split(rank % 2)
        assert before.query(), "NCCL splits a communicator that has nothing else to do"
        assert part is not None
        part.close(5)
        script.fake_nccl_hang(1)
        gather(comm)
        begin = time.monotonic()
        with pytest.raises(CommError):  # of this rank's wait, or of one that had begun before
            comm.split(0)
        assert time.monotonic() - begin < 15
        comm.close(2)


def test_a_split_waits_for_what_is_running(rank_pool):
    rank_pool(2).run(splits)


def device_fails(rank: int, world: int) -> None:
    """The device fails while one rank closes; the others hear of it, and everything ends."""
    with simulated() as script:
        comm = Communicator(backend="nccl", device="cuda", timeout_s=20, name="ends")
        live = int(script.fake_nccl_live_comms())
        comm.stream.pause(0.2 if rank == 0 else 1.5)  # rank 0 waits for the other while it closes
        handle = gather(comm)
        torch.distributed.barrier()  # a failure before the other's call would be told there
        if rank == 0:
            plan_cuda_fault("event_query", 1, 700)
            comm.close(10)
            with pytest.raises(CommError, match="event_query"):
                handle.synchronize(1)
        else:
            time.sleep(1.0)
            with pytest.raises(CommError, match="rank 0"):
                gather(comm).synchronize(10)
            comm.close(5)
        await_(lambda: script.fake_nccl_live_comms() == live - 1)


def test_a_device_that_fails_while_closing(rank_pool):
    rank_pool(2).run(device_fails)


def test_a_pair_that_takes_turns_refuses_captures():
    with RankPool(1, env={"BW_NCCL_LIB": str(simulated_nccl.build())}) as pool:
        pool.run(turns_in_a_graph)


def turns_in_a_graph(rank: int, world: int) -> None:
    simulated_nccl.install()
    with posing() as library, mock.patch.object(nccl, "_is_launch_order_kept", False):
        with pytest.warns(UserWarning, match="take turns"):
            gathers, reduces = Communicator.pair(timeout_s=20)
        with gathers, reduces:
            with Graph(library), pytest.raises(CaptureError, match="take turns"):
                gather(gathers)
            gather(gathers).synchronize(15)
