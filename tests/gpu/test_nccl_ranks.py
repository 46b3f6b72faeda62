"""NCCL with two ranks on one GPU: what they compute, training, and how they end when one dies, is late or aborts.

Every rank is a process; nccl_ranks.py says how NCCL is brought to that. The tests that end ranks are last.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from tests.conformance.collectives.suite import CASES, ENDS, GRAPHS, Case
from tests.gpu.device import DEVICE, Tell
from tests.gpu.local_ranks import GivenGrads, on_cpu_ranks
from tests.gpu.nccl_ranks import WORLD, new_pool, on_communicator, on_rank, on_the_last, route, timed, times_ms, unfit
from tests.gpu.test_optim import trained
from tests.support.bits import assert_bitwise_equal
from tests.support.comm_cases import check_all_gather, check_usable, filled
from tests.support.optim_twins import dyadic
from tests.support.ranks import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:a gradient came after its")  # `trained` makes late rounds
CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16
SOON_S = 2.0
RUN_S = 15.0  # of one case; a stuck one costs its part this and new ranks
TIMEOUT_S = 4.0  # making a communicator must fit too


@pytest.fixture(scope="module")
def ranks(_device: None) -> Iterator[RankPool]:
    if reason := unfit():
        pytest.skip(reason)
    with new_pool() as pool:
        yield pool


def run(ranks: RankPool, case: Callable[..., Any], *args: Any, on: Callable[..., Any] = on_rank) -> list[Any]:
    return ranks.run(on, case, *args, timeout_s=RUN_S)


@pytest.mark.parametrize("case", [*CASES, *GRAPHS], ids=lambda case: case.__name__)
def test_conformance(ranks: RankPool, case: Case) -> None:
    run(ranks, case, on=on_communicator)


@pytest.mark.parametrize("case", ENDS, ids=lambda case: case.__name__)
def test_conformance_of_ends(ranks: RankPool, case: Case) -> None:
    run(ranks, case, on=on_the_last)


# ---- two communicators


def at_once() -> list[dict[str, Any]]:
    """Rank 0's gather waits on the device for rank 1, which issues it when the reduce-scatter of both is over: only two
    operations that are under way at once come to that. (Apart from this one, ranks issue in one order, so that they
    never need it.)"""
    gathers, reduces = Communicator.pair(device="cuda", timeout_s=RUN_S / 2, name="at once")
    with gathers, reduces:
        assert [one.features["overlap"] for one in (gathers, reduces)] == [True] * 2
        numel, rank = DEVICE.size(1 << 20, 5_000), gathers.rank
        gathered, shard = filled(gathers, WORLD * numel), filled(gathers, numel, rank + 1.0)
        reduced, full = filled(reduces, numel), filled(reduces, WORLD * numel, rank + 1.0)
        gather = lambda **more: all_gather(gathered, shard, gathers, **more)  # noqa: E731
        reduce = lambda **more: reduce_scatter(reduced, full, reduces, **more)  # noqa: E731
        # Nothing that CUDA prepares at its first use may come while a kernel waits.
        timed(gather, gathers)[1].synchronize()
        timed(reduce, reduces)[1].synchronize()
        found = []
        for _ in range(3):
            gathered.fill_(0.0)
            reduced.fill_(0.0)
            DEVICE.synchronize()
            first = timed(gather, gathers) if rank == 0 else None
            second = timed(reduce, reduces)
            second[1].synchronize()
            assert first is None or not first[1].query()
            gathers.exchange(b"reduced")
            first = first or timed(gather, gathers)
            first[1].synchronize()
            assert_bitwise_equal(gathered, torch.tensor([1.0, 2.0]).repeat_interleave(numel))
            assert_bitwise_equal(reduced, torch.full((numel,), 3.0))
            found.append(times_ms(first, second))
    return found


def test_a_gather_and_a_reduction_are_under_way_at_once(ranks: RankPool, tell: Tell) -> None:
    found, _ = run(ranks, at_once)
    for turn, times in enumerate(found):
        tell("at once", turn=turn, **times)
        assert times["overlap_ms"] > 0, found


# ---- training


def trained_over_nccl(dtype: torch.dtype, clip: str, options: dict[str, Any], registered: bool) -> list[Tensor]:
    gathers, reduces = Communicator.pair(device="cuda", timeout_s=RUN_S / 2, registered=registered)
    with gathers, reduces:
        return trained(reduces, DEVICE.tensors, dtype, clip, **options)


@pytest.mark.parametrize(("clip", "registered"), [("own", False), ("inf", False), ("own", True)])
def test_training_has_the_bits_of_the_cpu(ranks: RankPool, clip: str, registered: bool) -> None:
    """Random gradients in float32. Those of bfloat16 are rounded once more on their way than over the other backends."""
    options = {"overlap_param_sync": clip == "own"}
    expected = on_cpu_ranks(WORLD, lambda rank, comm: trained(comm, CPU, F32, clip, **options))
    for rank, got in enumerate(run(ranks, trained_over_nccl, F32, clip, options, registered)):
        assert_bitwise_equal(got, expected[rank], f"rank {rank}")


# ---- CUDA graphs


def trained_in_graphs(captures: bool) -> list[Tensor]:
    """Whole steps, perhaps captured after two eager ones and replayed, with eager steps between."""
    model = GivenGrads(BF16, DEVICE.tensors)
    start = [p.detach().cpu() for p in model.parameters()]
    grads = [torch.zeros_like(p) for p in model.parameters()]
    rate = torch.tensor(1e-2, device=DEVICE.tensors)
    opt = bw.ShardedAdamW(
        model.parameters(), lr=rate, weight_decay=0.1, bucket_cap_mb=0.02, capturable=True, static_graph=True
    )
    kept: list[Tensor] = []

    def iteration() -> Tensor:
        opt.zero_grad()
        model(grads).backward()
        norm = opt.clip_grad_norm_(0.3)
        opt.step()
        return norm

    out, replay = [], None
    for step in range(8):
        for into, g in zip(grads, dyadic(start, 2 * step + dist.get_rank()), strict=True):
            into.copy_(g)
        rate.fill_(1e-2 / (step + 1))
        if step == 2 and captures:
            DEVICE.synchronize()
            replay = DEVICE.capture(lambda: kept.append(iteration()))
        if replay is not None and step != 5:
            replay()
            out.append(kept[0].cpu().clone())
        else:
            DEVICE.warm_up(lambda: out.append(iteration().cpu().clone()), 1)  # in a side stream, as torch asks
    out += [p.detach().cpu().clone() for p in model.parameters()]
    del replay  # the graph goes before the communicators whose operations it has
    opt.close()
    return out


def test_replays_of_whole_steps_are_eager_steps(ranks: RankPool) -> None:
    expected = run(ranks, trained_in_graphs, False)
    for rank, got in enumerate(run(ranks, trained_in_graphs, True)):
        assert_bitwise_equal(got, expected[rank], f"rank {rank}")


# ---- registered memory


def registered() -> list[Any]:
    """How many slabs NCCL made windows of, and whether that is what the communicators say."""
    gathers, reduces = Communicator.pair(device="cuda", timeout_s=RUN_S / 2, registered=True)
    with gathers, reduces:
        numel = 5_000
        leases = [one.pool.acquire("full", 4 * WORLD * numel) for one in (gathers, reduces)]
        gathered, full = (lease.tensor(F32, (WORLD * numel,)) for lease in leases)
        granted = [gathers.register_pool(), reduces.register_pool()]
        shard = torch.full((numel,), gathers.rank + 1.0, device=DEVICE.tensors)
        all_gather(gathered, shard, gathers).wait()
        assert_bitwise_equal(gathered, torch.tensor([1.0, 2.0]).repeat_interleave(numel))
        full.fill_(gathers.rank + 1.0)
        reduce_scatter(shard, full, reduces).wait()
        assert_bitwise_equal(shard, torch.full((numel,), 3.0))
        assert [one.features["windows"] for one in (gathers, reduces)] == [count == 1 for count in granted]
        for lease in leases:
            lease.release()
    return granted


def test_registered_memory(ranks: RankPool, tell: Tell) -> None:
    """All ranks have windows or none has. Between two hosts that is NCCL's choice: 2.28.9 makes them there too."""
    granted = run(ranks, registered)
    tell("registered", granted=granted)
    assert granted in ([[1, 1]] * WORLD, [[0, 0]] * WORLD)
    assert granted[0] == [1, 1] or route() == "hosts"


# ---- failures


def outcome_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Kind and message of the error that ``call()`` raises, and after how long."""
    begin = time.monotonic()
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", time.monotonic() - begin


def alone(comm: Communicator) -> Handle:
    """An operation that the other rank does not take part in: on the device it waits for ever."""
    numel = 1 << 16
    return all_gather(filled(comm, WORLD * numel), filled(comm, numel), comm)


def expect_that_the_device_goes_on(comm: Communicator) -> None:
    """The kernel that waited has ended, and torch works."""
    assert comm.stream.synchronize(5.0), "the operation is still running on the device"
    DEVICE.synchronize()
    assert float(torch.ones(1000, device=DEVICE.tensors).sum()) == 1000.0


def fails(how: str) -> tuple[str, str, float]:
    """Rank 0 waits on the device for rank 1, which does something else. What each rank is told, and how soon."""
    comm = Communicator(
        backend="nccl", device="cuda", timeout_s=TIMEOUT_S if how == "timeout" else RUN_S, name="doomed"
    )
    check_all_gather(comm, [(F32, 1000)], "foreign")
    comm.exchange(b"begin")
    if comm.rank == 0:
        handle = alone(comm)
        if how == "own abort":
            time.sleep(0.3)
            assert not handle.query()
            comm.abort("enough")
        outcome = outcome_of(handle.synchronize)
        for again in (handle.wait, handle.query, lambda: alone(comm), lambda: comm.exchange(b"")):
            assert outcome_of(again)[:2] == outcome[:2]
    else:
        time.sleep(0.3)
        if how == "abort":
            comm.abort("the data ran out")
        elif how == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = outcome_of(lambda: comm.exchange(b""))
    expect_that_the_device_goes_on(comm)
    comm.close(5.0)
    if how == "timeout":
        with Communicator(backend="nccl", device="cuda", timeout_s=RUN_S / 2, name="next") as other:
            check_usable(other)
    return outcome


FAILURES = [
    ("timeout", ["CommTimeout", "CommTimeout"], ""),
    ("abort", ["PeerError", "CommError"], "aborted by rank 1: the data ran out"),
    ("own abort", ["CommError", "PeerError"], "aborted by rank 0: enough"),
    ("death", ["PeerError"], "rank 1.* died"),  # last: it ends the ranks
]


@pytest.mark.parametrize(("how", "kinds", "says"), FAILURES)
def test_a_failure_is_named_on_both_ranks_and_ends_the_kernel(
    ranks: RankPool, how: str, kinds: list[str], says: str
) -> None:
    outcomes = ranks.run(on_rank, fails, how, timeout_s=RUN_S, expect_dead=[1] if how == "death" else [])
    for rank, kind in enumerate(kinds):
        got, text, took_s = outcomes[rank]
        assert got == kind and re.search(says, text, re.DOTALL), text
        assert text.startswith(f"[bucketwheel rank {rank}/{WORLD} comm 'doomed' seq "), text
        assert took_s < SOON_S + (TIMEOUT_S if how == "timeout" else 0.0)
    if how == "timeout":
        assert outcomes[0][2] > TIMEOUT_S - 0.5 and re.search(r"Not arrived: rank 1\b", outcomes[0][1]), outcomes[0][1]
