"""What the collectives compute, on processes (shm) and threads (local), against numpy and bit for bit."""

from __future__ import annotations

import functools
import os
import threading
import time

import pytest
import torch

from bucketwheel.comm import Communicator
from bucketwheel.ops import all_gather, reduce_scatter
from bucketwheel.testing import assert_bitwise_equal
from comm_cases import (
    MEMORIES,
    SIZES,
    check_all_gather,
    check_reduce_scatter,
    check_usable,
    data_of,
    expected_gather,
    expected_reduce,
    memory_of,
    on_shm,
    run_cuda,
    run_local,
)

pytestmark = pytest.mark.dist
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(params=["shm 2", "shm 3", "shm 4", "local 1", "local 4", "local staged 3", "cuda 3"])
def run(request, rank_pool):
    """``run(case, *args)`` runs ``case(comm, *args)`` on all ranks and returns the results."""
    kind, *options, world = request.param.split()
    if kind == "shm":
        return functools.partial(rank_pool(int(world)).run, on_shm)
    if kind == "cuda":
        return functools.partial(run_cuda, int(world))
    return functools.partial(run_local, int(world), stages_inputs=bool(options))


def all_sizes(comm: Communicator, kind: str) -> None:
    for numel in SIZES:
        for dtype in (F32, BF16):
            check_all_gather(comm, [(dtype, numel)], kind)
            check_reduce_scatter(comm, [(dtype, numel)], kind)


@pytest.mark.parametrize("kind", MEMORIES)
def test_every_size_in_every_memory(run, kind):
    run(all_sizes, kind)


def some_sizes(comm: Communicator) -> None:
    for kind in MEMORIES:
        check_all_gather(comm, [(F32, 1), (BF16, 5000)], kind)
        check_reduce_scatter(comm, [(F32, 1), (BF16, 5000)], kind)


@pytest.mark.parametrize("world", range(1, 9))
def test_every_world_size(world):
    run_local(world, some_sizes)


def coalesced(comm: Communicator, kind: str) -> None:
    gathered = [F32, BF16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8]
    specs = [(dtype, numel) for numel in (0, 1, 7, 5000, 70_000) for dtype in gathered]
    check_all_gather(comm, specs, "foreign")
    summed = [(dtype, numel) for numel in (3, 0, 4097, 130_000) for dtype in (F32, BF16)]
    check_all_gather(comm, summed, kind)
    check_reduce_scatter(comm, summed, kind)
    check_reduce_scatter(comm, summed, kind, "avg")
    check_all_gather(comm, [], kind)
    check_reduce_scatter(comm, [], kind)


@pytest.mark.parametrize("kind", ["foreign", "pool", "by_rank"])
def test_coalesced_lists_of_mixed_dtypes(run, kind):
    run(coalesced, kind)


def longer_than_staging(comm: Communicator) -> None:
    specs = [(F32, 900_001), (BF16, 1_200_000), (F32, 17)]
    for kind in ("foreign", "by_rank"):
        check_all_gather(comm, specs, kind)
        check_reduce_scatter(comm, specs, kind)


def test_tensors_larger_than_the_staging_buffers(run):
    run(longer_than_staging)


def five_thousand(comm: Communicator, kind: str) -> None:
    specs = [((F32, BF16)[i % 2], 1 + i % 40) for i in range(5000)]
    check_all_gather(comm, specs, kind)
    check_reduce_scatter(comm, specs, kind)


@pytest.mark.parametrize("kind", ["foreign", "pool"])
def test_five_thousand_tensors_in_one_call(run, kind):
    run(five_thousand, kind)


def many_in_flight(comm: Communicator) -> None:
    """Handles asked for out of order; every third one dropped together with its input."""
    rounds, spec = 60, (F32, 3000)
    with memory_of(comm, "foreign") as memory:
        kept = []
        for index in range(rounds):
            full, shard = memory.pair(*spec)
            if index % 2 == 0:
                shard.copy_(data_of(comm.rank, spec, index, spec[1]))
                handle = all_gather(full, shard, comm)
            else:
                full.copy_(data_of(comm.rank, spec, index, comm.size * spec[1]))
                handle = reduce_scatter(shard, full, comm)
            assert handle.seq == index + 1
            if index % 3 != 0:
                kept.append((index, handle, full, shard))
            del handle, full, shard
        for index, handle, full, shard in reversed(kept):
            handle.wait()
            wanted = expected_gather(comm.size, spec, index) if index % 2 == 0 else None
            if wanted is None:
                wanted = expected_reduce(comm.rank, comm.size, spec, index)
            assert_bitwise_equal(full if index % 2 == 0 else shard, wanted, f"operation {index}")


def test_many_operations_in_flight(run):
    run(many_in_flight)


def handles(comm: Communicator) -> None:
    shard, full = torch.full((1000,), float(comm.rank)), torch.empty(comm.size * 1000)
    first = all_gather(full, shard, comm, timing=True)
    second = all_gather(torch.empty_like(full), shard, comm, after=[first], timing=True)
    assert (first.seq, second.seq, first.nbytes) == (1, 2, 4 * 1000 * comm.size)
    with second:
        pass
    assert first.query() and second.query() and first.event.query()
    assert first.elapsed_time(second) > 0 > second.elapsed_time(first)
    assert first.wait() is first and first.synchronize(0.0) is first
    untimed = all_gather(full, shard, comm).wait()
    with pytest.raises(ValueError, match="timing"):
        first.elapsed_time(untimed)


def test_handles(run):
    run(handles)


def versions(comm: Communicator) -> None:
    weight = torch.randn(comm.size * 4, requires_grad=True)
    square = (weight**2).sum()
    all_gather(weight.detach(), torch.zeros(4), comm).wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()
    out = torch.zeros(4)
    reduce_scatter(out, torch.ones(comm.size * 4), comm).wait()
    assert out._version == 1


def test_outputs_tell_autograd(run):
    run(versions)


def own_streams(comm: Communicator) -> None:
    """Operations on two other streams run in the order of the calls; ``after`` orders them behind another's."""
    from bucketwheel._build import native

    if comm.device >= 0:
        with pytest.raises(ValueError, match="one stream for all ranks"):
            all_gather(torch.zeros(comm.size), torch.zeros(1), comm, stream=native().Stream("one", comm.device))
        return
    streams = [native().Stream("one"), native().Stream("two")]
    buffers = [torch.zeros(comm.size * 100) for _ in range(12)]
    for index, full in enumerate(buffers):
        # Each reads what the one before wrote, without an edge of its own.
        before = buffers[index - 1] if index else torch.ones(comm.size * 100)
        mine = before[comm.rank * 100 : (comm.rank + 1) * 100]
        streams[index % 2].pause(0.001 * (index % 3))
        handle = all_gather(full, mine, comm, stream=(*streams, None)[index % 3])
    handle.wait()
    assert all(bool((full == 1).all()) for full in buffers)


def test_other_streams_keep_the_order(run):
    run(own_streams)


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


def test_agreement_does_not_wait_for_operations(run):
    run(agreement_beside_operations)


def late_rank(comm: Communicator) -> None:
    """Operations do not block the caller, and a rank that comes late finds everything as it was."""
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
    begin = time.monotonic()
    results = [(torch.empty(comm.size * 200_000), torch.full((200_000,), float(comm.rank + i))) for i in range(3)]
    issued = [all_gather(full, shard, comm) for full, shard in results]
    assert time.monotonic() - begin < 0.25
    for i, handle in enumerate(issued):
        handle.wait()
        assert results[i][0].view(comm.size, -1)[:, 0].tolist() == [float(rank + i) for rank in range(comm.size)]


def test_a_late_rank(run):
    run(late_rank)


def stress(comm: Communicator) -> int:
    """Random operations; every rank draws the same sequence and its own memory."""
    same, own = (torch.Generator().manual_seed(seed) for seed in (7, 100 + comm.rank))
    for _ in range(60):
        count, gathers = (int(torch.randint(1, 5, (), generator=same)) for _ in range(2))
        specs = [((F32, BF16)[i % 2], int(torch.randint(0, 60_000, (), generator=same))) for i in range(count)]
        kind = MEMORIES[int(torch.randint(0, len(MEMORIES), (), generator=own))]
        (check_all_gather if gathers < 3 else check_reduce_scatter)(comm, specs, kind)
    return comm.pool.stats().reuses


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


def test_two_threads_of_a_rank(run):
    run(inside_threads)


def test_alone():
    for backend in ("auto", "shm", "local"):
        with Communicator(backend=backend) as comm:
            assert (comm.rank, comm.size, comm.backend) == (0, 1, "shm" if backend == "shm" else "local")
            check_usable(comm)
