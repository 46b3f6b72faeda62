"""What the collectives compute, on every backend, against numpy and bit for bit."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
import torch

from bucketwheel.comm import Communicator
from bucketwheel.errors import CommError
from bucketwheel.gather import broadcast_flat
from bucketwheel.handle import wait_all
from bucketwheel.ops import PreMulSum, all_gather, reduce_scatter
from bucketwheel.testing import assert_bitwise_equal
from comm_cases import (
    EVERYWHERE,
    MEMORIES,
    SIZES,
    check_all_gather,
    check_broadcast,
    check_reduce_scatter,
    check_usable,
    data_of,
    expected_gather,
    expected_reduce,
    in_few_places,
    memory_of,
    run_local,
)

pytestmark = pytest.mark.dist
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SUMMED = (F32, BF16, F16, F64)


def all_sizes(comm: Communicator, kind: str) -> None:
    for numel in SIZES:
        for dtype in (F32, BF16):
            check_all_gather(comm, [(dtype, numel)], kind)
            check_reduce_scatter(comm, [(dtype, numel)], kind)


@in_few_places
@pytest.mark.parametrize("kind", MEMORIES)
def test_every_size_in_every_memory(run, kind):
    run(all_sizes, kind)


def some_sizes(comm: Communicator) -> None:
    for kind in MEMORIES:
        check_all_gather(comm, [(F32, 1), (BF16, 5000)], kind)
        check_reduce_scatter(comm, [(F32, 1), (BF16, 5000)], kind)


def test_every_memory(run):
    run(some_sizes)


@pytest.mark.parametrize("world", range(5, 9))
def test_more_ranks(world):
    run_local(world, some_sizes)


def sums(comm: Communicator) -> None:
    """16-bit dtypes are summed in float32 and rounded once, whatever is done to the sum."""
    for op in ("sum", "avg", PreMulSum(1 / 3), PreMulSum(-3)):
        for kind in ("foreign", "pool", "offset", "in_place"):
            check_reduce_scatter(comm, [(dtype, numel) for numel in (1, 0, 4099) for dtype in SUMMED], kind, op)


def test_sums_of_every_dtype(run):
    run(sums)


def coalesced(comm: Communicator, kind: str) -> None:
    gathered = [F32, BF16, F16, F64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8]
    specs = [(dtype, numel) for numel in (0, 1, 7, 5000, 70_000) for dtype in gathered]
    check_all_gather(comm, specs, "foreign")
    summed = [(dtype, numel) for numel in (3, 0, 4097, 130_000) for dtype in SUMMED]
    check_all_gather(comm, summed, kind)
    check_reduce_scatter(comm, summed, kind)
    check_reduce_scatter(comm, summed, kind, "avg")


@pytest.mark.parametrize("kind", ["foreign", "pool", "by_rank"])
def test_coalesced_lists_of_mixed_dtypes(run, kind):
    run(coalesced, kind)


def empty_lists(comm: Communicator) -> None:
    """Operations like others: all ranks meet in them."""
    gathered = all_gather([], [], comm)
    reduced = reduce_scatter([], [], comm, op="avg")
    wait_all([gathered, reduced])
    wait_all([])
    assert (gathered.seq, reduced.seq, gathered.nbytes, reduced.nbytes) == (1, 2, 0, 0)
    check_all_gather(comm, [(F32, 0), (BF16, 0)], "foreign")
    check_reduce_scatter(comm, [(F32, 0), (F16, 0)], "foreign")
    check_usable(comm)


def test_empty_lists(run):
    run(empty_lists)


def broadcasts(comm: Communicator, kind: str) -> None:
    dtypes = (F32, BF16, F16, F64, torch.int64, torch.uint8)
    specs = [(dtypes[i % len(dtypes)], numel) for i, numel in enumerate([1, 0, 17, 4097, 100_003, 0, 2])]
    for root in range(comm.size):
        check_broadcast(comm, specs, kind, root)


@pytest.mark.parametrize("kind", ["foreign", "pool", "offset", "by_rank"])
def test_broadcast_from_every_rank(run, kind):
    run(broadcasts, kind)


def flat_buffer(comm: Communicator) -> None:
    """One operation, however long the buffer is."""
    spec = (BF16, 6_000_001)
    flat = data_of(comm.rank, spec, 0, spec[1]).clone()
    broadcast_flat(comm, flat)
    assert_bitwise_equal(flat, data_of(0, spec, 0, spec[1]))
    assert all_gather(torch.empty(comm.size), torch.ones(1), comm).wait().seq == 2


def test_broadcast_of_a_flat_buffer(run):
    run(flat_buffer)


def longer_than_staging(comm: Communicator) -> None:
    specs = [(F32, 900_001), (BF16, 1_200_000), (F32, 17)]
    for kind in ("foreign", "by_rank"):
        check_all_gather(comm, specs, kind)
        check_reduce_scatter(comm, specs, kind)
        check_broadcast(comm, [(F64, 2_500_001), (BF16, 3)], kind, comm.size - 1)


@in_few_places
def test_tensors_larger_than_the_staging_buffers(run):
    run(longer_than_staging)


def five_thousand(comm: Communicator, kind: str) -> None:
    specs = [((F32, BF16)[i % 2], 1 + i % 40) for i in range(5000)]
    check_all_gather(comm, specs, kind)
    check_reduce_scatter(comm, specs, kind)


@pytest.mark.parametrize("run", ["shm 2", "shm 4", "local 2", "staged 3", "cuda 2"], indirect=True)
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
    assert first.synchronize() and first.query() and second.synchronize().query() and first.event.query()
    assert first.elapsed_time(second) > 0 > second.elapsed_time(first)
    assert first.wait() is first and first.synchronize(0.0) is first
    untimed = all_gather(full, shard, comm).wait()
    with pytest.raises(ValueError, match="timing"):
        first.elapsed_time(untimed)


def test_handles(run):
    run(handles)


def outlived(comm: Communicator) -> None:
    """A handle answers when its communicator is closed, however the operation ended."""
    full = torch.empty(comm.size * 10)
    good = all_gather(full, torch.full((10,), float(comm.rank)), comm, timing=True)
    later = all_gather(torch.empty_like(full), torch.ones(10), comm, timing=True)
    comm.close()
    assert good.query() and later.synchronize(1.0).query() and good.is_ordered() and good.event.query()
    wait_all([later, good])
    assert full.view(comm.size, 10)[:, 0].tolist() == [float(rank) for rank in range(comm.size)]
    assert (good.seq, later.seq) == (1, 2) and good.elapsed_time(later) >= 0
    assert f"rank {comm.rank}/{comm.size}" in repr(good)


def test_handles_outlive_their_communicator(run):
    run(outlived)


def failed_handles(comm: Communicator) -> None:
    """The first error is raised behind all; handles of operations that were over before stay good."""
    good = all_gather(torch.empty(comm.size), torch.ones(1), comm).wait()
    failed = []
    if comm.rank == 0:
        failed = [all_gather(torch.empty(comm.size), torch.ones(1), comm) for _ in range(2)]
    with contextlib.suppress(CommError):  # the abort may come first
        comm.exchange(b"issued")
    if comm.rank != 0:
        comm.abort("enough")
        return
    with pytest.raises(CommError, match="aborted by rank .: enough"):
        wait_all([good, *failed, good])
    for handle in failed:
        with pytest.raises(CommError, match="aborted by rank .: enough"):
            handle.wait()


@pytest.mark.parametrize("run", [place for place in EVERYWHERE if not place.endswith("1")], indirect=True)
def test_waiting_for_all_of_which_some_fail(run):
    run(failed_handles)


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

    if comm.backend == "local" and comm.device >= 0:
        with pytest.raises(ValueError, match="one stream for all ranks"):
            all_gather(torch.zeros(comm.size), torch.zeros(1), comm, stream=native().Stream("one", comm.device))
        return
    streams = [native().Stream(name, comm.device) for name in ("one", "two")]
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


@in_few_places
def test_a_late_rank(run):
    run(late_rank)


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


def posts_while_collecting(comm: Communicator) -> None:
    """A thread that posts waits for one that collects, which looks for Ctrl-C meanwhile."""
    comm.post(b"first")
    if comm.rank == comm.size - 1:
        time.sleep(0.5)
    thread = threading.Thread(target=comm.collect)
    thread.start()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            comm.post(b"second")
            break
        except ValueError:  # the thread has not begun
            time.sleep(0.01)
    thread.join(30)
    assert comm.collect() == [b"second"] * comm.size


@in_few_places
def test_a_thread_that_posts_while_another_collects(run):
    run(posts_while_collecting)


def test_alone():
    for backend in ("auto", "shm", "local"):
        with Communicator(backend=backend) as comm:
            assert (comm.rank, comm.size, comm.backend) == (0, 1, "shm" if backend == "shm" else "local")
            check_usable(comm)
