"""NCCL with one rank: which one it is, registered memory, and what the host does not do. All else: test_nccl_ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from bucketwheel.comm import nccl_library
from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from tests.gpu.device import DEVICE, Calls, Tell
from tests.gpu.nccl_ranks import TIMEOUT_S
from tests.support.bits import assert_bitwise_equal
from tests.support.comm_cases import filled

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a")
F32 = torch.float32


@pytest.fixture(scope="module")
def comm(_device: None) -> Iterator[Communicator]:
    """One for all tests, since making one takes NCCL seconds."""
    with Communicator(backend="nccl", device="cuda", timeout_s=TIMEOUT_S, name="one") as made:
        yield made


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


# ---- registered memory


@pytest.mark.parametrize("policy", [None, "zero"])
def test_registered_memory(policy: str | None, tell: Tell) -> None:
    """Windows are granted or not; the data is right either way, in place and not."""
    found = nccl_library.info()
    if not found.features["zero_cta" if policy else "windows"]:
        pytest.skip(f"NCCL {nccl_library.version_text(found.version)} has no such feature")
    gathers, reduces = Communicator.pair(device="cuda", timeout_s=TIMEOUT_S, registered=True, cta_policy=policy)
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
