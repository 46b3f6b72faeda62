"""Communicators beside the conformance suite: long lists, many ranks, agreement, late ranks, parts, threads, stress."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ClosedError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from tests.conformance.collectives import data as conformance_data
from tests.support.comm_cases import (
    MEMORIES,
    check_all_gather,
    check_broadcast,
    check_reduce_scatter,
    check_usable,
    in_few_places,
    memory_of,
    on_c10d,
    on_shm,
)
from tests.support.ranks import RankPool
from tests.support.requirements import slow_case

pytestmark = pytest.mark.dist
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def many_processes(comm: Communicator) -> None:
    """More ranks than processors: those that wait sleep."""
    for kind in ("foreign", "pool", "in_place_pool", "by_rank"):
        specs = [(F32, 1), (BF16, 5000), (torch.int32, 70_000), (F64, 0), (F16, 4097)]
        check_all_gather(comm, specs, kind)
        check_reduce_scatter(comm, specs, kind)
    check_all_gather(comm, [(dtype, 4097) for dtype in conformance_data.ANY], "foreign")
    check_broadcast(comm, [(F32, 100_000)], "foreign", comm.size - 1)
    for number in range(20):
        assert comm.exchange(bytes([comm.rank, number])) == [bytes([rank, number]) for rank in range(comm.size)]


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("on", "world"), [*((on_shm, world) for world in (5, 8, 11, 16)), *((on_c10d, world) for world in (5, 16))]
)
def test_more_processes(on, world):
    with RankPool(world) as pool:
        pool.run(on, many_processes, timeout_s=120)


def counted(begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements ``begin`` to ``end`` of 0, 1, ... 60, 0, 1, ...: the sums of four are exact in bfloat16 too."""
    return torch.arange(61).to(dtype).repeat((end - begin) // 61 + 2)[begin % 61 :][: end - begin]


def one_gib(comm: Communicator, kind: str, dtype: torch.dtype) -> None:
    """The largest buffers that are promised."""
    numel = (1 << 30) // dtype.itemsize // comm.size + 1
    mine = counted(comm.rank * numel, (comm.rank + 1) * numel, dtype)
    with memory_of(comm, kind) as memory:
        full, shard = memory.pair(dtype, numel)
        full.zero_()
        shard.copy_(mine)
        all_gather(full, shard, comm).wait()
        assert torch.equal(full, counted(0, comm.size * numel, dtype))
        full.add_(comm.rank)
        reduce_scatter(shard, full, comm).wait()
        assert torch.equal(shard, mine.mul_(comm.size).add_(sum(range(comm.size))))


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("on", "world", "kind", "dtype"),
    [
        (on_shm, 2, "in_place_pool", BF16),
        (on_shm, 4, "foreign", F16),
        (on_shm, 4, "pool", torch.uint8),
        (on_c10d, 2, "foreign", F32),
    ],
)
def test_one_gib(on, world, kind, dtype):
    with RankPool(world) as pool:
        pool.run(on, one_gib, kind, dtype, timeout_s=200)


def longer_than_staging(comm: Communicator) -> None:
    """And than what goes past the cache: of several dtypes, at places that are no multiple of a line."""
    specs = [(F32, 900_001), (BF16, 1_200_000), (F32, 17), (F64, 9_001)]
    for kind in ("foreign", "by_rank", "offset"):
        check_all_gather(comm, specs, kind)
        check_reduce_scatter(comm, specs, kind)
        check_broadcast(comm, [(F64, 2_500_001), (BF16, 3)], kind, comm.size - 1)


@pytest.mark.parametrize("run", ["local 3", "shm 2", "c10d 3"], indirect=True)
def test_tensors_larger_than_the_staging_buffers(run):
    run(longer_than_staging)


def five_thousand(comm: Communicator, kind: str) -> None:
    specs = [((F32, BF16)[i % 2], 1 + i % 40) for i in range(5000)]
    check_all_gather(comm, specs, kind)
    check_reduce_scatter(comm, specs, kind)


@pytest.mark.parametrize("run", ["shm 2", slow_case("staged 3"), slow_case("cuda 2")], indirect=True)
def test_five_thousand_tensors_in_one_call(run):
    run(five_thousand, "foreign")


def agreement(comm: Communicator) -> None:
    for number in range(50):
        payload = bytes([comm.rank]) * (number * (comm.rank + 1))
        comm.post(payload)
        with pytest.raises(ValueError, match="not collected"):
            comm.post(b"")
        assert comm.collect() == [bytes([r]) * (number * (r + 1)) for r in range(comm.size)]
    with pytest.raises(ValueError, match="nothing is posted"):
        comm.collect()
    with pytest.raises(ValueError, match=f"{comm.max_payload_bytes + 1} bytes"):
        comm.post(bytes(comm.max_payload_bytes + 1))
    big = os.urandom(1) * comm.max_payload_bytes
    assert comm.exchange(big)[comm.rank] == big


@in_few_places
def test_agreement_between_hosts(run):
    run(agreement)


def agreement_beside_operations(comm: Communicator) -> None:
    """A round completes while an operation of the stream waits for a rank that has not issued it yet."""
    full, shard = torch.empty(comm.size), torch.ones(1)
    if comm.rank != 0:
        handle = all_gather(full, shard, comm)
    assert len(comm.exchange(b"x")) == comm.size
    if comm.rank == 0:
        handle = all_gather(full, shard, comm)
    handle.wait()


@in_few_places
def test_agreement_does_not_wait_for_operations(run):
    run(agreement_beside_operations)


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


def stress(comm: Communicator) -> int:
    """Random operations; every rank draws the same sequence and its own memory."""
    same, own = (torch.Generator().manual_seed(seed) for seed in (7, 100 + comm.rank))
    for _ in range(60):
        count, gathers = (int(torch.randint(1, 5, (), generator=same)) for _ in range(2))
        specs = [((F32, BF16)[i % 2], int(torch.randint(0, 60_000, (), generator=same))) for i in range(count)]
        kind = MEMORIES[int(torch.randint(0, len(MEMORIES), (), generator=own))]
        if gathers < 3:
            check_all_gather(comm, specs, kind)
        elif gathers == 3:
            check_reduce_scatter(comm, specs, kind)
        else:
            check_broadcast(comm, specs, kind, count % comm.size)
    return comm.pool.stats().reuses


@in_few_places
def test_stress(run):
    assert min(run(stress)) > 10


def inside_threads(comm: Communicator) -> None:
    """Two threads share a communicator: operations of one, rounds of agreement of the other."""
    failures: list[BaseException] = []

    def agree() -> None:
        try:
            for number in range(100):
                assert comm.exchange(bytes([number, comm.rank]))[-1] == bytes([number, comm.size - 1])
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    thread = threading.Thread(target=agree)
    thread.start()
    for _ in range(20):
        check_reduce_scatter(comm, [(F32, 20_000)], "by_rank")
    thread.join(30)
    assert not thread.is_alive()
    for error in failures:
        raise error


@in_few_places
def test_two_threads_of_a_rank(run):
    run(inside_threads)


def without_a_limit(rank: int, size: int, backend: str) -> None:
    for timeout_s in (float("inf"), 1e10):
        with Communicator(backend=backend, timeout_s=timeout_s) as comm:
            check_usable(comm)
            comm.exchange(b"")
    with pytest.raises(ValueError, match="timeout_s must be positive, got nan"):
        Communicator(backend=backend, timeout_s=float("nan"))


@pytest.mark.parametrize("backend", ["shm", "c10d"])
def test_time_limits_beyond_what_clocks_take(backend, rank_pool):
    rank_pool(2).run(without_a_limit, backend, timeout_s=40)


def test_alone():
    for asked, backend in (("auto", "local"), ("local", "local"), ("shm", "shm"), ("c10d", "c10d")):
        with Communicator(backend=asked) as comm:
            assert (comm.rank, comm.size, comm.backend) == (0, 1, backend)
            check_usable(comm)
