"""NCCL with one rank: data, streams, graphs, registered memory, two communicators at once, and what the host does not do.

What more than one rank shows is in test_nccl_ranks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketwheel.comm import nccl as comm_nccl
from bucketwheel.comm import nccl_library
from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.collectives.suite import CASES, ENDS, GRAPHS, Case
from tests.gpu.device import DEVICE, Calls, Tell
from tests.gpu.nccl_ranks import HOLD_S, TIMEOUT_S, overlap_ms, timed, times_ms
from tests.gpu.test_optim import assert_equal, expected_of_one, trained
from tests.support.comm_cases import filled

pytestmark = pytest.mark.filterwarnings("ignore:a gradient came after its", "ignore:Synchronization debug mode is a")
F32 = torch.float32


@pytest.fixture(scope="module")
def kept(_device: None) -> Iterator[list[Communicator]]:
    made: list[Communicator] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def comm(kept: list[Communicator]) -> Communicator:
    """One for all tests, since making one takes NCCL seconds; but another one after a test that has made it fail."""
    if kept:
        try:
            kept[-1].exchange(b"")
            return kept[-1]
        except CommError:
            kept.pop().close(1.0)
    kept.append(Communicator(backend="nccl", device="cuda", timeout_s=TIMEOUT_S, name="one"))
    return kept[-1]


def pair(**options: Any) -> tuple[Communicator, Communicator]:
    return Communicator.pair(device="cuda", timeout_s=TIMEOUT_S, **options)


def test_which_nccl(comm: Communicator, tell: Tell) -> None:
    found = nccl_library.info()
    tell(
        "nccl",
        path=found.path,
        found=found.found,
        version=nccl_library.version_text(found.version),
        features=comm.features,
    )
    assert comm.features["nccl"] == nccl_library.version_text(found.version)
    if not DEVICE.is_simulated:
        assert (
            found.found == "loaded already"
            and nccl_library.version_text(found.version) == nccl_library.version_of_torch()
        )


@pytest.mark.parametrize("case", [*CASES, *GRAPHS], ids=lambda case: case.__name__)
def test_conformance(comm: Communicator, case: Case) -> None:
    case(comm)


@pytest.mark.parametrize("case", ENDS, ids=lambda case: case.__name__)
def test_conformance_of_ends(case: Case) -> None:
    with Communicator(backend="nccl", device="cuda", timeout_s=TIMEOUT_S, name=case.__name__) as comm:
        case(comm)


# ---- registered memory


@pytest.mark.parametrize("policy", [None, "zero"])
def test_registered_memory(policy: str | None, tell: Tell) -> None:
    """Windows are granted or not; the data is right either way, in place and not."""
    found = nccl_library.info()
    if not found.features["zero_cta" if policy else "windows"]:
        pytest.skip(f"NCCL {nccl_library.version_text(found.version)} has no such feature")
    gathers, reduces = pair(registered=True, cta_policy=policy, name=f"registered {policy}")
    with gathers, reduces:
        numel = DEVICE.size(4 << 20, 5_000)
        leases = [one.pool.acquire("full", 4 * numel) for one in (gathers, reduces)]
        outs, ins = ([lease.tensor(F32, (numel,))] for lease in leases)
        granted = [gathers.register_pool(), reduces.register_pool()]
        tell("registered", policy=policy, granted=granted, features=[gathers.features, reduces.features])
        assert [one.features["windows"] for one in (gathers, reduces)] == [count == 1 for count in granted]
        assert gathers.features["copy_engines"] == (policy == "zero" and granted[0] == 1)
        for turn in range(3):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(turn))
            given = values.to(DEVICE.tensors, copy=True)
            all_gather(outs, [given], gathers).wait()
            assert_bitwise_equal(outs[0], values)
            all_gather(outs, outs, gathers).wait()
            ins[0].copy_(values)
            reduce_scatter([given.zero_()], ins, reduces).wait()
            assert_bitwise_equal(given, values)
            assert_bitwise_equal(outs[0], values)
        for lease in leases:
            lease.release()


# ---- two communicators


@pytest.mark.filterwarnings("ignore:.*take turns")
@pytest.mark.parametrize("is_order_kept", [True, False], ids=["at once", "in turn"])
def test_gathers_and_reductions(is_order_kept: bool, tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pair. What lies between the events before and behind each of the two overlaps, or comes one after the other
    where NCCL's launch order is not known. test_nccl_ranks.py shows it of kernels; here both are copies."""
    if not is_order_kept:
        monkeypatch.setattr(comm_nccl, "_is_launch_order_kept", False)
    gathers, reduces = pair(max_ctas=8, name="of a pair")
    with gathers, reduces:
        assert [one.features["overlap"] for one in (gathers, reduces)] == [is_order_kept] * 2
        numel = DEVICE.size(64 << 20, 5_000)
        ones, twos = (torch.full((numel,), float(x), device=DEVICE.tensors) for x in (1, 2))
        gathered, reduced = torch.zeros_like(ones), torch.zeros_like(ones)
        found = []
        for turn in range(4):
            gathered.zero_()
            reduced.zero_()
            DEVICE.hold(HOLD_S)  # until both are issued
            gather = timed(lambda **more: all_gather(gathered, ones, gathers, **more), gathers)
            reduce = timed(lambda **more: reduce_scatter(reduced, twos, reduces, **more), reduces)
            for handle in (*gather, *reduce):
                handle.synchronize()
            assert_bitwise_equal(gathered, ones)
            assert_bitwise_equal(reduced, twos)
            found.append(overlap_ms(gather, reduce))
            tell("of a pair", turn=turn, overlaps=is_order_kept, **times_ms(gather, reduce))
        assert max(found) > 0 if is_order_kept else max(found) <= 0, found


# ---- what the host does


def calls_of_one(issue: Callable[[], Handle]) -> dict[str, int]:
    calls = Calls()
    issue().wait()
    return calls.since()


def test_issuing_neither_waits_nor_allocates(comm: Communicator, tell: Tell) -> None:
    """Of calls and requests, single and coalesced: some CUDA calls each, the same number for one tensor and for eight."""
    fulls: list[Tensor] = [filled(comm, 1000) for _ in range(8)]
    shards = [torch.ones_like(full) for full in fulls]
    gather, reduce = AllGatherRequest(fulls, shards, comm), ReduceScatterRequest(shards, fulls, comm)
    ways: dict[str, Callable[[], Handle]] = {
        "all_gather of 1": lambda: all_gather(fulls[0], shards[0], comm),
        "all_gather of 8": lambda: all_gather(fulls, shards, comm),
        "reduce_scatter of 8": lambda: reduce_scatter(shards, fulls, comm),
        "gather request": gather.start,
        "reduce request": reduce.start,
    }
    DEVICE.hold(0.02)  # everything is in flight at once, so later calls find all the events that they need
    for handle in [issue() for issue in ways.values() for _ in range(30)]:
        handle.wait()
    DEVICE.synchronize()
    for _ in range(8):  # a call frees what operations before it have finished with, their events among it
        gather.start().wait()
    DEVICE.synchronize()
    with DEVICE.free_running():
        for issue in ways.values():
            for _ in range(10):
                issue().wait()
    counts = {name: calls_of_one(issue) for name, issue in ways.items()}
    tell("cuda calls", **counts)
    recorded = {name: made.get("event_record") for name, made in counts.items()}
    assert set(recorded.values()) == {2}, recorded  # the caller's stream before, the communicator's behind


@pytest.mark.parametrize("registered", [False, True])
def test_training_over_nccl_has_the_bits_of_one_process(registered: bool) -> None:
    """Gradients, gathers and norms go through a pair of communicators of one rank."""
    if registered and not nccl_library.info().features["windows"]:
        pytest.skip(f"NCCL {nccl_library.version_text(nccl_library.info().version)} has no such feature")
    gathers, reduces = pair(registered=registered, name="optimizer")
    with gathers, reduces:
        assert_equal(trained(reduces, DEVICE.tensors, F32, "own"), expected_of_one())
        assert reduce_scatter([], [], reduces).seq > 8  # a bucket and more for each of 8 backwards
