"""`bw.shard` on CUDA: the CPU's bits, whole parameters' bits whatever is gathered when, nothing that waits, no memory that grows.

In one process, so with one rank or with ranks that are threads: gathers are copies in a stream of their own, or NCCL's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.shard.module import runtime_of
from tests.gpu.device import DEVICE, Calls, Tell
from tests.gpu.local_ranks import GivenGrads, in_world, on_cpu_ranks
from tests.gpu.nccl_ranks import TIMEOUT_S
from tests.support.bits import assert_bitwise_equal
from tests.support.shard_models import Block, Gpt, tokens_of

F32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
BEHIND_S = 0.03  # of the device in warm-up steps: later ones find all the events and blocks that they may need
HOLD_S = 0.002  # before each block
MAX_NORM = 0.3
# `Device.free_running` asks torch for what it warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a")

MOVES: list[dict[str, Any]] = [{"prefetch": n, "reshard": reshard} for n in (0, 1, 2) for reshard in (True, False)]


# ---- the bits of the CPU


class GivenUnits(nn.Module):
    """Units whose gradients are given, and a parameter of the root."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GivenGrads(dtype, device, seed + number) for number in range(4))
        self.scale = nn.Parameter(torch.ones(65, dtype=dtype, device=device))

    def draw_here(self, seed: int) -> list[Any]:
        of_blocks = [block.draw_here(10 * seed + number) for number, block in enumerate(self.blocks)]  # type: ignore[operator]
        return [*of_blocks, of_blocks[0][0].flatten()[:65]]

    def forward(self, grads: list[Any]) -> Tensor:
        found = [block(given) for block, given in zip(self.blocks, grads, strict=False)]
        return torch.stack([*found, (self.scale * grads[-1]).sum()]).sum()


def trained_with_given(comm: Communicator, dtype: torch.dtype, device: torch.device, **options: Any) -> list[Tensor]:
    """What some steps leave: norms, parameters and states, on the CPU."""
    model: Any = bw.shard(GivenUnits(dtype, device, 10 * comm.rank), (GivenGrads,), group=comm, **options)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    out = []
    for step in range(4):
        for micro in range(2):
            with opt.no_sync() if micro == 0 and step != 1 else nullcontext():
                model(model.draw_here(1000 * comm.rank + 2 * step + micro)).backward()
            if micro == 0 and step == 1:
                opt.grad_sync()  # a second window adds to the shards
        out.append(opt.clip_grad_norm_(MAX_NORM).cpu())
        opt.step()
        opt.zero_grad()
    with model.full_params():
        out += [p.detach().cpu().clone() for p in model.parameters()]
    saved = opt.state_dict()["state"]
    parts = [saved[i][name] for i in sorted(saved) for name in ("exp_avg", "exp_avg_sq")]
    out += [getattr(part, "piece", part).cpu() for part in parts]
    opt.close()
    return out


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(F32, {}), (F32, {"param_dtype": BF16}), (BF16, {}), (BF16, {"prefetch": 2, "reshard": False})],
    ids=str,
)
def test_training_has_the_bits_of_the_cpu(dtype: torch.dtype, options: dict[str, Any], world: int) -> None:
    expected = on_cpu_ranks(world, lambda rank, comm: trained_with_given(comm, dtype, CPU, **options))
    for _ in range(DEVICE.size(2, 1)):
        got = in_world(world, lambda rank, comm: trained_with_given(comm, dtype, DEVICE.tensors, **options))
        for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert len(ours) == len(theirs)
            for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(a, b), f"rank {rank}: {index} of {len(theirs)}"


# ---- a GPT


@functools.cache
def gpt() -> Gpt:
    """The values that every model begins with."""
    torch.manual_seed(0)
    return Gpt(DEVICE.size(256, 16), DEVICE.size(8, 4), DEVICE.size(997, 11))


def gpt_here(dtype: torch.dtype = F32) -> Gpt:
    return copy.deepcopy(gpt()).to(DEVICE.tensors, dtype)


def tokens_here(step: int) -> Tensor:
    shape = (DEVICE.size(4, 2), DEVICE.size(64, 5))
    return tokens_of(step, gpt().emb.num_embeddings, shape).to(DEVICE.tensors)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def adamw(params: Any) -> bw.ShardedAdamW:
    return bw.ShardedAdamW(params, lr=1e-3, weight_decay=0.1)


@contextlib.contextmanager
def sharded(group: Any, dtype: torch.dtype = F32, **options: Any) -> Iterator[tuple[Any, bw.ShardedAdamW]]:
    """A sharded GPT and its optimizer, which ends well."""
    model: Any = bw.shard(gpt_here(dtype), (Block,), group=group, **options)
    opt = adamw(model.parameters())
    try:
        yield model, opt
    finally:
        opt.close()
        model.close()


def values_of(model: Any) -> list[Tensor]:
    with model.full_params() if hasattr(model, "full_params") else nullcontext():
        return [DEVICE.get(p).clone() for p in model.parameters()]


def trained(model: Any, opt: Any, steps: int = 6) -> list[Tensor]:
    """Losses, norms and parameters, on the CPU. Nothing waits between the steps."""
    out = []
    for tokens in [tokens_here(step) for step in range(steps)]:
        loss = loss_of(model, tokens)
        loss.backward()
        if isinstance(opt, bw.ShardedAdamW):
            norm = opt.clip_grad_norm_(MAX_NORM)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        out += [loss.detach(), norm.clone()]
        opt.step()
        opt.zero_grad()
    return [DEVICE.get(one) for one in out] + values_of(model)


@functools.cache
def trained_whole() -> list[Tensor]:
    model = gpt_here()
    with adamw(model.parameters()) as opt:
        return trained(model, opt)


@pytest.fixture(scope="module")
def nccl(_device: None) -> Iterator[Communicator]:
    gathers, reduces = Communicator.pair(device="cuda", timeout_s=TIMEOUT_S, name="shard")
    with gathers, reduces:
        yield reduces


@pytest.fixture(params=["local", "nccl"])
def group(request: pytest.FixtureRequest) -> Any:
    """One rank, whose gathers are copies or NCCL's."""
    return bw.LocalWorld(1).rank(0) if request.param == "local" else request.getfixturevalue("nccl")


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert_bitwise_equal(a, b)


def test_a_gpt_has_the_bits_of_whole_parameters(group: Any) -> None:
    """In float32, where every parameter begins at a multiple of 256 bytes either way: cuBLAS chooses by that."""
    with sharded(group) as (model, opt):
        assert_equal(trained(model, opt), trained_whole())


def test_a_gpt_trains_as_with_torchs_fused_adamw(tell: Tell) -> None:
    """The same losses and norms in 2e-6 at the first step. Later Adam divides by the roots of tiny gradients."""
    twin = gpt_here()
    theirs = trained(twin, torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.1, fused=True))
    with sharded(bw.LocalWorld(1).rank(0)) as (model, opt):
        ours = trained(model, opt)
    apart = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    tell("shard beside torch", most_apart=max(apart), first=apart[:2])
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "options"), [(F32, {}), (BF16, {}), (F32, {"param_dtype": BF16})], ids=["f32", "bf16", "mixed"]
)
def test_when_units_are_gathered_changes_no_bit(dtype: torch.dtype, options: dict[str, Any], group: Any) -> None:
    """Also where the device is behind: gathers are issued long before the units have left whose memory they write to. The
    first of all is not held up."""
    expected: list[Tensor] = []
    for moves in [MOVES[0], *MOVES]:
        with sharded(group, dtype, **options, **moves) as (model, opt):
            stream, busy = DEVICE.stream(), []
            if expected:
                for block in model.blocks:
                    block.register_forward_pre_hook(lambda *_: DEVICE.hold(HOLD_S))
                model.register_forward_hook(
                    lambda *_, stream=stream, busy=busy: busy.append(not DEVICE.is_idle(stream))
                )
            with DEVICE.on(stream):
                got = trained(model, opt, 4)
            DEVICE.join(stream)
            counts = model.residency_counts()
            assert not counts["divergences"] and not counts["wasted"] and not counts["live"]
        assert not busy or 2 * sum(busy) > len(busy), f"the device was not behind: {busy}"
        expected = expected or got
        assert_equal(got, expected)


# ---- what planned steps must not do


@contextlib.contextmanager
def free_running() -> Iterator[None]:
    """`Device.free_running`. Streams of the simulated device are never held up, so over NCCL, whose operations keep their events
    while they are in flight, a later step may be further ahead than those before."""
    if not DEVICE.is_simulated:
        with DEVICE.free_running():
            yield
        return
    gc.collect()
    calls = Calls()
    yield
    calls.expect_free_running(may_get_ahead=True)


def train_once(model: Any, opt: bw.ShardedAdamW, tokens: Tensor) -> None:
    loss_of(model, tokens).backward()
    opt.clip_grad_norm_(MAX_NORM)
    opt.step()
    opt.zero_grad()


def evaluate(model: Any, tokens: Tensor) -> None:
    with torch.no_grad():
        loss_of(model, tokens)


@pytest.mark.parametrize("options", [*MOVES, {"param_dtype": BF16}], ids=str)
def test_planned_steps_neither_wait_nor_allocate(options: dict[str, Any], group: Any) -> None:
    """Forward, backward, clip, step and an evaluation: by our counters, by torch's sync debug mode and by its count of device
    allocations. Nothing is gathered beside the plan, and nothing is leased."""
    evaluates = options.get(
        "reshard", True
    )  # units that stay after an evaluation may have the root's place in the next step
    with sharded(group, **options) as (model, opt):
        pool = runtime_of(model).comm.gathers.pool
        before: dict[str, Any] = {}
        acquires = 0
        for step in range(11):
            tokens = tokens_here(step)
            DEVICE.synchronize()
            if step == 8:
                before, acquires = model.residency_counts(), pool.stats().acquires
            with free_running() if step >= 8 else nullcontext():
                if 2 <= step < 8:  # there is a plan
                    DEVICE.hold(BEHIND_S)
                train_once(model, opt, tokens)
                if evaluates:
                    evaluate(model, tokens)
        after = model.residency_counts()
        assert pool.stats().acquires == acquires
        assert after["side_peak"] == after["divergences"] == after["wasted"] == 0
        assert after["peak"] == before["peak"] <= after["planned"]
        assert sum(after["gathers"].values()) > sum(before["gathers"].values())


def test_planned_steps_of_two_ranks_neither_wait_nor_allocate() -> None:
    """Of both together, between barriers: the counters are the process's."""
    gc.collect()
    barrier = threading.Barrier(2, timeout=20)
    checked = []

    def body(rank: int, comm: Communicator) -> None:
        with sharded(comm) as (model, opt):
            for step in range(9):
                tokens = tokens_here(100 * rank + step)
                DEVICE.synchronize()
                barrier.wait()
                with free_running() if step >= 6 and rank == 0 else nullcontext():
                    if 2 <= step < 6:
                        DEVICE.hold(BEHIND_S)
                    barrier.wait()
                    train_once(model, opt, tokens)
                    barrier.wait()
                checked.append(step)
                barrier.wait()  # what the others do next is not counted

    in_world(2, body)
    assert len(checked) == 18


@pytest.mark.parametrize("options", [{}, {"prefetch": 2, "reshard": False}], ids=str)
def test_fifty_steps_do_not_grow(options: dict[str, Any], tell: Tell) -> None:
    """Neither torch's reserved memory nor the pool: its slabs, its leases and its high water."""
    with sharded(bw.LocalWorld(1).rank(0), **options) as (model, opt):
        tokens = [tokens_here(step) for step in range(4)]
        pool = runtime_of(model).comm.gathers.pool

        def reserved() -> tuple[int, ...]:
            DEVICE.synchronize()
            stats = pool.stats()
            ours = stats.allocations, stats.acquires, stats.reserved_bytes, stats.high_water_bytes, stats.host_waits
            return ours if DEVICE.is_simulated else (*ours, torch.cuda.memory_reserved())

        for step in range(5):
            train_once(model, opt, tokens[step % 4])
        before, peak = reserved(), model.residency_counts()["peak"]
        for step in range(50):
            train_once(model, opt, tokens[step % 4])
        tell("fifty steps", before=before, after=reserved(), planned=model.residency_counts()["planned"])
        assert reserved() == before
        assert model.residency_counts()["peak"] == peak
