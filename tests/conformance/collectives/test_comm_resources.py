"""What communicators use: no growth over operations and communicators, memory of peers given back, bounded waits."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from tests.support.comm_cases import MEMORIES, check_all_gather, check_reduce_scatter, check_usable, on_c10d, on_shm
from tests.support.held import held
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dist


def usage() -> dict[str, int]:
    """Threads, file descriptors, mappings and memory (KiB, private and shared) of this process."""
    threads_and_files = held()
    ctypes.CDLL(None).malloc_trim(0)  # what threads that have ended left to the next ones is no growth
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    # Without file pages: how many processes share a library is not our affair.
    own = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    return {**threads_and_files, "kib": own, "maps": maps}


def expect_no_growth(before: dict[str, int], after: dict[str, int], kib: int) -> None:
    assert after["threads"] <= before["threads"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["maps"] <= before["maps"] + 8
    assert after["kib"] <= before["kib"] + kib, (before, after)


def five_hundred(comm: Communicator) -> None:
    lease = comm.pool.acquire("full", comm.size << 18)
    pooled = lease.tensor(torch.float32, (comm.size << 16,)).zero_()
    own = pooled[comm.rank << 16 : (comm.rank + 1) << 16]
    foreign, shard = torch.zeros(comm.size << 16), torch.zeros(1 << 16)

    def once() -> None:
        all_gather(pooled, own, comm)
        reduce_scatter(shard, pooled, comm)
        all_gather([foreign, torch.empty(comm.size * 1000)], [shard, torch.zeros(1000)], comm)
        reduce_scatter(shard, foreign, comm).wait()

    for _ in range(20):
        once()
    before = usage()
    for _ in range(125):
        once()
    expect_no_growth(before, usage(), 2048)
    lease.release()
    comm.pool.check()
    comm.pool.expect_no_leases()


@pytest.mark.parametrize("on", [on_shm, on_c10d])
def test_five_hundred_operations_do_not_grow(rank_pool, on):
    rank_pool(2).run(on, five_hundred)


def twenty_communicators(rank: int, size: int, backend: str) -> None:
    def once() -> None:
        with Communicator(backend=backend) as comm:
            check_all_gather(comm, [(torch.float32, 100_000)], "by_rank")
            check_reduce_scatter(comm, [(torch.bfloat16, 100_000)], "foreign")

    for _ in range(8):  # the heaps of threads that come and go
        once()
    before = usage()
    for _ in range(20):
        once()
    # The process group's own sockets may still close in the background, and a thread that was joined is listed until the
    # kernel has put it away.
    deadline = time.monotonic() + 5
    while (
        any((after := usage())[what] > before[what] for what in ("descriptors", "threads"))
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    expect_no_growth(before, after, 4096)


@pytest.mark.parametrize("backend", ["shm", "c10d"])
def test_twenty_communicators_do_not_grow(rank_pool, backend):
    rank_pool(2).run(twenty_communicators, backend)


def peers_memory(comm: Communicator) -> tuple[int, int]:
    """Mappings of memfds while a peer has a large slab, and after it has given the slab back."""

    def memfds() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:bucketwheel (")

    lease = comm.pool.acquire("big", 64 << 20)
    full = lease.tensor(torch.float32, (16 << 20,))
    shard = full[: (16 << 20) // comm.size]
    full.fill_(comm.rank)
    out = torch.empty(comm.size * 4)
    all_gather(out, shard[:4], comm).wait()
    assert out.view(comm.size, 4)[:, 0].tolist() == list(range(comm.size))
    many = memfds()
    lease.release()
    del full, shard, lease
    assert comm.pool.trim() >= 64 << 20
    deadline = time.monotonic() + 10
    while (few := memfds()) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    check_usable(comm)
    return many, few


def test_peers_give_back_memory_that_was_trimmed(rank_pool):
    for many, few in rank_pool(3).run(on_shm, peers_memory):
        assert many == 3 and few == 0


def waits_asleep(comm: Communicator) -> float:
    """Seconds of processor time that a rank spends while it waits a second for another."""
    check_usable(comm)
    if comm.rank == 0:
        time.sleep(1.0)
    begin = time.process_time()
    check_all_gather(comm, [(torch.float32, 10)], "foreign")
    return time.process_time() - begin


def test_waiting_burns_no_core(rank_pool):
    assert rank_pool(2).run(on_shm, waits_asleep)[1] < 0.25


def fuzzed(comm: Communicator) -> None:
    for kind in MEMORIES:
        for numel in (1, 5000, 300_000):
            check_all_gather(comm, [(torch.float32, numel), (torch.bfloat16, 3)], kind)
            check_reduce_scatter(comm, [(torch.float32, numel), (torch.bfloat16, 3)], kind)
    handles = [all_gather(torch.empty(comm.size * 100), torch.ones(100), comm) for _ in range(50)]
    for handle in handles[::-7]:
        handle.wait()


@pytest.mark.parametrize(
    "env", [{"BW_HOST_STREAM_FUZZ": "3"}, {"BW_HOST_STREAM": "inline"}, {"BW_POOL_POISON": "1"}], ids=str
)
def test_fuzzed_inline_and_poisoned(env):
    with RankPool(3, env=env) as pool:
        pool.run(on_shm, fuzzed, timeout_s=90)


def names(rank: int, size: int) -> str:
    with pytest.raises(ValueError, match="different names"):
        Communicator(backend="shm", name=f"mine {rank}")
    with Communicator() as comm:
        assert comm.backend == "shm"
        return comm.name


def test_names_are_agreed(rank_pool):
    assert len(set(rank_pool(2).run(names))) == 1
