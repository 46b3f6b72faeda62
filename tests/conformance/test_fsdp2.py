"""Models under FSDP2 with their flat buffers in our pool, beside the same models with torch's: the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.utils._python_dispatch import TorchDispatchMode

import bucketwheel as bw
from bucketwheel.pool import fsdp2
from bucketwheel.pool.plan import Plan
from bucketwheel.torch_internals import fsdp2_groups
from tests.stock.test_docs import run_block
from tests.support.bits import assert_bitwise_equal

POLICIES = {"fp32": MixedPrecisionPolicy(), "mixed": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
CAN_OVERRIDE = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
if CAN_OVERRIDE:  # the last bias of a block keeps its dtype

    def override(p: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if p.shape == (32,) else None

    POLICIES["override"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_dtype_override_fn=override)
WIDTHS = (64, 48, 131, 40)  # of the blocks: units of unequal size, one not divisible by the world size
UNITS = 1 + len(WIDTHS)
STEPS = 3


@dataclass(frozen=True)
class Case:
    policy: str = "fp32"
    reshard: bool = True
    backwards: int = 1  # a step
    sync_last: bool = False  # only the last backward of a step reduces, and with replicas: over them
    replicas: int = 1
    frozen: torch.dtype | None = None  # a bias of each block is frozen, and of this dtype
    frozen_block: int | None = None
    asynchronous: bool = False  # gathers, whose work FSDP2 keeps until it waits
    order: tuple[int, ...] = (0, 1, 2, 3)  # in which the blocks run


class Block(nn.Module):
    def __init__(self, width: int, frozen: torch.dtype | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, width), nn.Linear(width, 32)
        if frozen is not None:
            self.second.bias = nn.Parameter(self.second.bias.detach().to(frozen), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(x))
        return x + nn.functional.linear(hidden, self.second.weight, self.second.bias.to(x.dtype))


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(16, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(Block(width, case.frozen) for width in WIDTHS)
        self.order = case.order
        if case.frozen_block is not None:
            self.blocks[case.frozen_block].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.end(x)


def make(case: Case = Case()) -> Any:
    torch.manual_seed(0)
    net, world = Net(case), dist.get_world_size()
    shape = (world,) if case.replicas == 1 else (case.replicas, world // case.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for module in (*net.blocks, net):
        policy = POLICIES["mixed" if case.policy == "override" and module is net else case.policy]
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=case.reshard)
    net._set_unshard_async_op(case.asynchronous)
    return net


class Allocations(TorchDispatchMode):
    """Counts the memory that torch gives to FSDP2's hooks, and to the rest of a step."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.empty.memory_format
        return func(*args, **(kwargs or {}))


@dataclass
class Seen:
    """What a training leaves: of each step."""

    losses: list[Tensor] = field(default_factory=list)
    grads: list[list[Tensor]] = field(default_factory=list)  # as they were
    kept: list[list[Tensor]] = field(default_factory=list)  # the same memory, looked at after all steps
    params: list[Tensor] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)  # of torch


def step(net: Any, case: Case, number: int, left: Seen) -> None:
    net.train()
    for micro in range(case.backwards):
        is_last = micro == case.backwards - 1
        if case.sync_last:
            (net.set_requires_gradient_sync if case.replicas == 1 else net.set_requires_all_reduce)(is_last)
        generator = torch.Generator().manual_seed(100 * number + 10 * micro + dist.get_rank())
        loss = net(torch.randn(8, 16, generator=generator)).float().square().mean()
        loss.backward()
        left.losses.append(loss.detach())


def train(net: Any, case: Case, steps: int = STEPS) -> Seen:
    left, optimizer = Seen(), torch.optim.AdamW(net.parameters(), lr=1e-2)
    for number in range(steps):
        with Allocations() as allocations:
            step(net, case, number, left)
        left.allocations.append(allocations.count)
        grads = [p.grad._local_tensor for p in net.parameters() if p.grad is not None]
        left.kept.append(grads)
        left.grads.append([grad.clone() for grad in grads])
        optimizer.step()
        optimizer.zero_grad()
    left.params = [p.detach()._local_tensor.clone() for p in net.parameters()]
    return left


@contextlib.contextmanager
def watched(pool: bw.Pool) -> Iterator[list[tuple[str, int, int]]]:
    """(key, address, bytes) of each buffer that the pool gives."""
    given: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:

        def acquire(self: Any, key: str, nbytes: int) -> Any:
            lease = original(self, key, nbytes)
            given.append((key, lease.data_ptr, nbytes))
            return lease

        original = bw.Pool.acquire
        patch.setattr(bw.Pool, "acquire", acquire)
        yield given


def beside_stock(rank: int, world: int, case: Case, buffers_a_step: int) -> list[tuple[str, int, int]]:
    """Trains with torch's memory and with ours. Returns what the pool has given."""
    stock = train(make(case), case)
    net, pool = make(case), bw.Pool(poison=True)
    pooled = bw.pool_for_fsdp2(net, pool)
    assert pooled.pool is pool and pooled.units == ("", *(f"blocks.{n}" for n in range(4)))
    with watched(pool) as given:
        ours = train(net, case)
    for name in ("losses", "grads", "params"):
        assert_bitwise_equal(getattr(ours, name), getattr(stock, name))
    assert_bitwise_equal(ours.kept, ours.grads)  # nobody has written to them since
    pool.check()
    pool.expect_no_leases()
    assert not any(pool.holds(grad) for grads in ours.kept for grad in grads)
    assert len(given) == STEPS * buffers_a_step
    if world > 1:  # a rank alone gathers nothing
        steps = [given[at : at + buffers_a_step] for at in range(0, len(given), buffers_a_step)]
        assert steps[1] == steps[2]  # the same keys at the same addresses, by the plan of the first step
        stats = pool.stats()
        assert stats.planned_bytes == stats.load_bytes > 0 and stats.reserved_bytes - stats.planned_bytes < 4096
        assert stats.planned_acquires >= (STEPS - 1) * buffers_a_step and stats.divergences == 0
    assert stock.allocations[-1] - ours.allocations[-1] == buffers_a_step  # what torch did not have to give
    return given


CASES = [  # ranks, case, buffers of a step
    *((1, Case(policy, reshard), UNITS) for policy in POLICIES for reshard in (True, False)),
    *((2, Case(policy, reshard), (3 if reshard else 2) * UNITS) for policy in POLICIES for reshard in (True, False)),
    # The output of a reduce-scatter is the gradient, and outlives the step: it has torch's memory.
    (2, Case(backwards=3), 9 * UNITS),
    (2, Case("mixed", backwards=3, sync_last=True), 7 * UNITS),
    (2, Case("mixed", backwards=3, sync_last=True, reshard=False), 4 * UNITS),
    (4, Case("mixed", backwards=2, sync_last=True, replicas=2), 6 * UNITS),  # with partial sums
    (2, Case("mixed", asynchronous=True), 3 * UNITS),
    (2, Case(frozen_block=2), 3 * UNITS - 1),  # nothing is live in the middle of the backward, which ends no step
]


@pytest.mark.parametrize("world, case, buffers", CASES, ids=str)
def test_same_bits_and_fewer_allocations(rank_pool: Any, world: int, case: Case, buffers: int) -> None:
    rank_pool(world).run(beside_stock, case, buffers, timeout_s=90)


def test_a_unit_that_runs_twice(rank_pool: Any) -> None:
    """The second gather begins while the buffer of the first one is held: it has a key of its own. This is also where gloo's
    threads, if they held buffers, would change the addresses from step to step."""
    case = Case(order=(0, 0, 1, 2, 3))
    given = rank_pool(2).run(beside_stock, case, 3 * UNITS + 2, timeout_s=60)[0]
    assert {"gather/1/0", "gather/1/1", "gather/1/2"} <= {key for key, *_ in given}


@pytest.mark.parametrize("case", [Case(frozen=torch.bfloat16), Case("override")], ids=str)
def test_parameters_of_several_dtypes(rank_pool: Any, case: Case) -> None:
    """Their gather is one of bytes."""
    if case.policy == "override" and not CAN_OVERRIDE:
        pytest.skip("param_dtype_override_fn is new in torch 2.15")
    given = rank_pool(2).run(beside_stock, case, 3 * UNITS, timeout_s=60)[0]
    weights, biases = 2 * 32 * WIDTHS[0], WIDTHS[0]
    whole = (weights + biases) * 4 + 32 * 2 if case.frozen else (weights + biases) * 2 + 32 * 4
    assert {nbytes for key, _, nbytes in given if key == "gather/1/0"} == {whole}


def as_documented(rank: int, world: int) -> None:
    net = Net(Case())
    pooled = run_block("docs/pool.md", "FSDP2")["shard"](net, mesh=init_device_mesh("cpu", (world,)))
    train(net, Case(), 2)
    stats = pooled.pool.stats()
    assert stats.planned_acquires == 3 * UNITS - 1 and stats.divergences == 0  # the root keeps its parameters


def test_the_code_of_the_page(rank_pool: Any) -> None:
    rank_pool(2).run(as_documented, timeout_s=60)


# --- the plan ---------------------------------------------------------------------------------------------------------


def diverging(rank: int, world: int) -> None:
    """Evaluations have the addresses of the forward; what the first step did not have lies beside the plan."""
    stock, ours, pool = make(), make(), bw.Pool(poison=True)
    bw.pool_for_fsdp2(ours, pool)

    def evaluate() -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_bitwise_equal(*(net(torch.ones(3, 16)) for net in (ours, stock)))

    def train_both() -> None:
        left, wanted = (train(net, Case(), 2) for net in (ours, stock))
        assert_bitwise_equal(left.grads, wanted.grads)

    with watched(pool) as given:
        evaluate()  # belongs to the first step
        train_both()
        places = {key: address for key, address, _ in given[-3 * UNITS :]}
        assert len(places) == 3 * UNITS and pool.stats().planned_bytes > 0
        given.clear()
        evaluate()
        train_both()
        assert pool.stats().divergences == 0 and {key: address for key, address, _ in given} == places
        ours.order = stock.order = (0, 0, 1, 2, 3)
        with pytest.warns(UserWarning, match="the pool has left its plan: acquire of key 'gather/") as told:
            train_both()
        assert pool.stats().divergences > 1 and len([one for one in told if "left its plan" in str(one.message)]) == 1
        ours.order = stock.order = (0, 1, 2, 3)
        before = pool.stats().divergences
        given.clear()
        train_both()
        assert pool.stats().divergences == before and {key: address for key, address, _ in given} == places
    pool.check()
    pool.expect_no_leases()


def no_plan(rank: int, world: int) -> None:
    """Where it is not wanted, where the pool has another one, and where somebody else has a lease."""
    for plan, planned in ((False, None), (True, Plan.of("theirs", {"a": 8}, {"a": [(0, 1)]}))):
        net, pool = make(), bw.Pool()
        if planned is not None:
            pool.adopt(planned)
        bw.pool_for_fsdp2(net, pool, plan=plan)
        train(net, Case(), 2)
        assert pool.stats().planned_acquires == 0 and pool.current_regime == ("theirs" if planned else "")
    net, pool = make(), bw.Pool()
    lease = pool.acquire("theirs", 8)
    bw.pool_for_fsdp2(net, pool)
    train(net, Case(), 2)
    assert pool.current_regime == ""
    lease.release()
    train(net, Case(), 2)
    assert pool.current_regime == "fsdp2"


def inference_only(rank: int, world: int) -> None:
    """What reduces nothing is no step: it is forgotten, and the plan is that of the first step that does."""
    events = []
    for evaluations in (0, 20):
        net, pool = make(), bw.Pool()
        pooled = bw.pool_for_fsdp2(net, pool)
        for _ in range(evaluations):
            with torch.no_grad():
                net(torch.ones(3, 16))
        assert pool.current_regime == ""
        train(net, Case(), 2)
        assert pool.current_regime == "fsdp2" and pool.stats().divergences == 0
        events.append([(event.kind, event.key) for event in pooled._planner._trace.events])
    assert events[0] == events[1]


@pytest.mark.parametrize("case", [diverging, no_plan, inference_only])
def test_the_plan(rank_pool: Any, case: Any) -> None:
    rank_pool(2).run(case, timeout_s=60)


# --- errors, and the way back -----------------------------------------------------------------------------------------


def comms_of(net: Any) -> list[Any]:
    return [
        comm
        for module in net.modules()
        if isinstance(module, FSDPModule)
        for group in fsdp2_groups(module)
        for comm in (group._all_gather_comm, group._reduce_scatter_comm)
    ]


def refused(net: Any, kind: type[Exception], match: str, pool: Any = None) -> None:
    """And nothing is installed."""
    before = comms_of(net) if isinstance(net, Net) else []
    with pytest.raises(kind, match=match):
        bw.pool_for_fsdp2(net, pool)
    assert not before or comms_of(net) == before


def refusals(rank: int, world: int) -> None:
    refused(nn.Linear(2, 2), ValueError, r"\(Linear\) has no FSDP2 module with parameters: call fully_shard")
    refused(make(), ValueError, r"pool is on device 3 \(-1: the CPU\), the model on cpu", SimpleNamespace(device=3))
    for changed in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        net = make()
        getattr(net.blocks[2], changed)(theirs := fsdp2._Gather(bw.Pool(), None, "", None))
        refused(net, ValueError, f"module 'blocks.2' has its buffers from {type(theirs).__name__} already: do not call")
    net = make()
    net.blocks[1].set_allocate_memory_from_process_group_for_comm(True)
    refused(net, ValueError, "module 'blocks.1' has its buffers from ProcessGroupAllocAllGather already")
    net.blocks[1].set_allocate_memory_from_process_group_for_comm(False)
    with bw.pool_for_fsdp2(net):
        refused(net, ValueError, "or close the earlier pool")
        with pytest.raises(AssertionError, match="custom"):  # torch's own check
            net.set_allocate_memory_from_process_group_for_comm(True)


def several_groups(rank: int, world: int) -> None:
    """Experts over another mesh than the rest of their block."""
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))
    info = _fsdp_common.FSDPMeshInfo(mesh["own"], shard_mesh_dim=0)
    net = Net(Case())
    fully_shard(net.blocks[0], mesh=mesh["all"])
    experts = net.blocks[1].second

    def place(p: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), info) if p is experts.weight else None

    fully_shard(net.blocks[1], mesh=mesh["all"], shard_placement_fn=place)
    refused(
        net, bw.SeveralParamGroups, r"module 'blocks.1' has 2 parameter groups .* call fully_shard on its submodules"
    )


def closed(rank: int, world: int) -> None:
    net, stock = make(), make()
    before = comms_of(net)
    pooled = bw.pool_for_fsdp2(net)
    assert not set(map(id, comms_of(net))) & set(map(id, before))
    train(net, Case(), 1)
    acquires = pooled.pool.stats().acquires
    assert acquires == 3 * UNITS
    net.blocks[0].set_custom_all_gather(theirs := before[0])
    pooled.close()
    pooled.close()
    assert [id(comm) for comm in comms_of(net)] == [*map(id, before[:2]), id(theirs), *map(id, before[3:])]
    left = train(net, Case(), 1)
    assert pooled.pool.stats().acquires == acquires
    train(stock, Case(), 1)
    assert_bitwise_equal(left.losses + left.params, (again := train(stock, Case(), 1)).losses + again.params)


SEVERAL = pytest.param(
    several_groups,
    marks=pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="torch has one group a module"),
)


@pytest.mark.parametrize("case", [refusals, SEVERAL, closed])
def test_one_pool(rank_pool: Any, case: Any) -> None:
    rank_pool(2).run(case, timeout_s=60)
