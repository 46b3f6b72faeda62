"""The life of communicators: what outlives them, pairs, parts, forks, the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ClosedError
from tests.support import simulated_nccl
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import SOON_S, Error, error_of, expect_prefix, gather
from tests.support.nccl_failure_cases import die, expect_gone, flights, fresh_ranks, nccl_comm, read_flight, script
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[3]


# ------------------------------------------------------------------------------------------------------- ends of a life


def outlives(rank: int, size: int) -> None:
    library = script()
    with posing():
        comm = Communicator(backend="nccl", device="cuda", name="gone")
        full, handle = gather(comm)
        native_handle = handle._native
        comm.close()
        comm.close()
        for call in (lambda: gather(comm), lambda: comm.exchange(b""), comm.register_pool, lambda: comm.split(0)):  # noqa: F821
            kind, text, _ = error_of(call)
            assert kind == "ClosedError" or call == comm.register_pool, (kind, text)
            if text:
                expect_prefix(text, rank, size, "gone")
        assert handle.query() and handle.synchronize().wait().nbytes == full.nbytes
        comm.abort("too late")  # does nothing
        del comm, handle
        assert native_handle.query()
        expect_gathered_on(full, size)
    expect_gone(library)


def expect_gathered_on(full: torch.Tensor, size: int) -> None:
    assert full.view(size, -1)[:, 0].tolist() == [float(rank) for rank in range(size)]


@pytest.mark.parametrize("world", [1, slow_case(2), 3])
def test_handles_and_results_outlive_their_communicator(world, rank_pool):
    rank_pool(world).run(outlives, timeout_s=25)


def dropped_in_flight(rank: int, size: int) -> None:
    library = script()
    with posing():
        comm = Communicator(backend="nccl", device="cuda")
        comm.exchange(b"")
        if rank == 0:
            time.sleep(0.3)
        full, handle = gather(comm, 50_000)
        native_handle = handle._native
        del comm, handle
        native_handle.synchronize(5.0)
        expect_gathered_on(full, size)
    expect_gone(library)


def test_dropping_a_communicator_with_an_operation_in_flight(rank_pool):
    rank_pool(2).run(dropped_in_flight, timeout_s=25)


def closes_in_flight(rank: int, size: int) -> tuple[Error, float]:
    with nccl_comm("early") as (comm, _):
        comm.exchange(b"")
        if rank == 1:
            time.sleep(0.6)
            return error_of(lambda: gather(comm)[1].synchronize()), 0.0
        full, handle = gather(comm)
        begin = time.monotonic()
        comm.close(0.2)
        took_s = time.monotonic() - begin
        return error_of(handle.synchronize), took_s


def test_closing_with_an_operation_in_flight(rank_pool):
    (mine, took_s), (theirs, _) = rank_pool(2).run(closes_in_flight, timeout_s=25)
    assert mine[0] == "ClosedError" and "closed while operations were in flight" in mine[1] and took_s < SOON_S
    assert theirs[0] == "PeerError" and theirs[2] == 0 and "rank 0 closed while operations were in flight" in theirs[1]


def raises_inside(rank: int, size: int) -> str:
    library = script()
    text = ""
    with posing():
        try:
            with Communicator(backend="nccl", device="cuda") as comm:
                handle = gather(comm)[1] if rank == 1 else None
                comm.exchange(b"")  # an abort before the other's call would be told there
                if handle is None:
                    raise KeyError("oops")
                text = error_of(handle.synchronize)[1]
        except KeyError:
            pass
    expect_gone(library)
    return text


def test_an_exception_in_the_block_aborts(rank_pool):
    assert "aborted by rank 0: KeyError: 'oops'" in rank_pool(2).run(raises_inside, timeout_s=25)[1]


def process(code: str) -> None:
    """Runs in a process with the fake, which ends soon after."""
    env = {**os.environ, "BW_NCCL_LIB": str(simulated_nccl.build())}
    setup = "import torch, os\nfrom tests.support import simulated_nccl, simulated_cuda\nscript = simulated_nccl.install()\n"
    setup += "from bucketwheel.native.modules import native\nnative().set_posing(True)\nfrom bucketwheel.comm.communicator import Communicator\n"
    setup += "from bucketwheel.kernels.ops import all_gather\nfrom bucketwheel.errors import DeviceError\n"
    code = f"{setup}{code}\nimport time\nprint(time.monotonic())"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100, env=env, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - float(done.stdout) < 20


@pytest.mark.parametrize("hangs", [slow_case(False), True])
@pytest.mark.parametrize("way", ["Communicator(backend='nccl', device='cuda')", "Communicator.pair()[0]"])
def test_the_end_of_a_process_that_does_not_close(way, hangs):
    hang = "script.fake_nccl_hang(1)" if hangs else ""
    process(f"comm = {way}\n{hang}\nhandle = all_gather(torch.empty(3), torch.empty(3), comm)\n")


def test_a_forked_child_cannot_disturb_the_parent():
    code = """
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
    process(code)


def many(rank: int, size: int) -> None:
    library = script()

    def cycle() -> None:
        with Communicator(backend="nccl", device="cuda", registered=True) as comm:
            lease = comm.pool.acquire("key", 4096)
            comm.register_pool()
            gather(comm)[1].synchronize()
            lease.release()

    def counts() -> tuple[int, int]:
        threads = len(os.listdir("/proc/self/task"))
        return threads, len(os.listdir("/proc/self/fd"))

    with posing():
        for _ in range(5):
            cycle()
        expect_gone(library)
        time.sleep(0.3)
        before = counts()
        for _ in range(60):
            cycle()
        expect_gone(library)
        until = time.monotonic() + 3
        while (counts() > before or library.fake_nccl_live_bytes()) and time.monotonic() < until:
            time.sleep(0.02)
        after = counts()
        assert after[0] <= before[0] + 2 and after[1] <= before[1] + 2, (before, after)
        assert library.fake_nccl_live_bytes() == 0


@pytest.mark.parametrize("world", [slow_case(1), 2])
def test_many_communicators_leave_nothing(world, rank_pool):
    rank_pool(world).run(many, timeout_s=100)


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


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_of_a_pair_goes_on_without_the_other(world, rank_pool):
    rank_pool(world).run(pair_lives, timeout_s=40)


def pair_fails(rank: int, size: int) -> list[Error]:
    library = script()
    with posing():
        gathers, reduces = Communicator.pair(name="twins", timeout_s=20)
        library.fake_nccl_hang(1)
        handle = gather(gathers)[1]
        gathers.exchange(b"")
        if rank == 0:
            library.fake_nccl_fail(b"ncclAllGather", 1, 5)
            error_of(lambda: gather(reduces))
        errors = [error_of(call) for call in (handle.synchronize, lambda: gather(gathers), lambda: gather(reduces))]
        gathers.close()
        reduces.close()
    expect_gone(library)
    return errors


@pytest.mark.parametrize("world", [1, 2])
def test_a_failure_of_one_is_one_of_both(world, rank_pool):
    for errors in rank_pool(world).run(pair_fails, timeout_s=40):
        assert errors[0] == errors[1] == errors[2] and errors[0][0] == "CommError"
        assert "ncclAllGather: 5" in errors[0][1] and "comm 'twins/" in errors[0][1]


def pair_splits(rank: int, size: int) -> None:
    library = script()
    with posing():
        both = Communicator.pair(name="twins", timeout_s=20)
        parts = [comm.split(0, key=-rank) for comm in both]
        for part in parts:
            assert (part.rank, part.size) == (size - 1 - rank, size)
            check_usable(part)
        for comm in (*parts, *both):
            comm.close()
    expect_gone(library)


def test_both_of_a_pair_can_be_split(rank_pool):
    rank_pool(2).run(pair_splits, timeout_s=40)


# --------------------------------------------------------------------------------------------------------------- parts


def splits(comm: Communicator) -> None:
    odd = comm.split(comm.rank % 2, key=-comm.rank, name="odd")
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert (odd.size, odd.rank, odd.name) == (len(members), members[::-1].index(comm.rank), "odd")
    check_usable(odd)
    some = comm.split(0 if comm.rank else -1)
    assert (some is None) == (comm.rank == 0)
    if some is not None:
        assert some.size == comm.size - 1
        check_usable(some)
        nested = some.split(0)
        some.close()
        check_usable(nested)  # nothing but the making is the parent's
        nested.close()
    odd.close()
    check_usable(comm)
    whole = comm.split(3)
    comm.close()
    with pytest.raises(ClosedError):
        comm.split(0)
    check_usable(whole)
    whole.close()


def test_split(run):
    run(splits)


# -------------------------------------------------------------------------------------------------------------- flight


def flies(rank: int, size: int, why: str) -> None:
    with nccl_comm("box/1", timeout_s=1.5 if why == "timeout" else 20) as (comm, library):
        gather(comm)[1].synchronize()
        if rank == 0:
            library.fake_nccl_hang(1)
        handles = [gather(comm)[1], gather(comm)[1]]
        if why == "kill":
            comm.exchange(b"")
            time.sleep(0.1)
            if rank == size - 1:
                die()
        assert error_of(handles[1].synchronize)[0] == ("CommTimeout" if why == "timeout" else "PeerError")


@pytest.mark.parametrize("why", ["timeout", "kill"])
def test_every_living_rank_writes_its_last_operations(why, tmp_path):
    dead = [2] if why == "kill" else []
    with fresh_ranks(3, BW_TRACE_DIR=str(tmp_path)) as pool:
        pool.run(flies, why, expect_dead=dead)
    for rank in {0, 1, 2} - set(dead):
        record = read_flight(tmp_path, "box/1", rank)
        assert (record["comm"], record["rank"], record["world"], record["backend"]) == ("box/1", rank, 3, "nccl")
        assert ("timeout in all_gather" if why == "timeout" else "rank 2") in record["reason"]
        assert [op["state"] for op in record["operations"]] == ["done", "failed", "failed"]
        assert record["operations"][1]["started_s"] is not None
    assert not flights(tmp_path, "box/1", 2) or not dead


def test_a_rank_with_nothing_in_flight_writes_too(tmp_path):
    with fresh_ranks(2, BW_TRACE_DIR=str(tmp_path)) as pool:
        pool.run(idle_witness)
    assert "aborted by rank 1: over" in read_flight(tmp_path, "idle", 0)["reason"]


def idle_witness(rank: int, size: int) -> None:
    with nccl_comm("idle") as (comm, _):
        gather(comm)[1].synchronize()
        if rank == 1:
            comm.abort("over")
        time.sleep(0.6)
