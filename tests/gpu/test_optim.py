"""ShardedAdamW on CUDA: the CPU's bits, torch's clipping, nothing that waits or allocates, memory and its end."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import PoolError
from bucketwheel.pool.pool import Pool
from tests.gpu.device import DEVICE
from tests.gpu.local_ranks import GivenGrads, in_world, on_cpu_ranks
from tests.support.counted_cuda import plan_cuda_fault

F32, BF16 = torch.float32, torch.bfloat16
# Of the device in warm-up steps: everything is in flight at once, so later steps find all the events and blocks they
# may need.
BEHIND_S = 0.03
# `trained` makes late rounds on purpose; torch warns of what `Device.free_running` asks it for.
pytestmark = pytest.mark.filterwarnings("ignore:a gradient came after its", "ignore:Synchronization debug mode is a")
CPU = torch.device("cpu")


def optimizer_of(params: Any, comm: Communicator | None, **options: Any) -> bw.ShardedAdamW:
    if comm is not None:
        options |= {"process_group": comm, "bucket_cap_mb": 0.02}
    return bw.ShardedAdamW(params, lr=1e-2, weight_decay=0.1, **options)


# ---- the bits of the CPU


def trained(
    comm: Communicator | None, device: torch.device, dtype: torch.dtype, clip: str, steps: int = 4, **options: Any
) -> list[Tensor]:
    """What some steps with given gradients leave: norms, parameters and states, on the CPU."""
    rank = comm.rank if comm is not None else 0
    model = GivenGrads(dtype, device, seed=rank)
    opt = optimizer_of(model.parameters(), comm, **options)
    if options.get("overlap_param_sync"):
        opt.prefetch_params(model)
    out = []
    for step in range(steps):
        for micro in range(2):
            model(model.draw_here(1000 * rank + 2 * step + micro)).backward()
            if step == 1 and micro == 0:
                opt.grad_sync()  # a second window adds to the shards
        if clip == "own":
            out.append(opt.clip_grad_norm_(0.3).cpu())
        elif clip == "inf":
            out.append(opt.clip_grad_norm_(0.05, norm_type=float("inf")).cpu())
        opt.step()
        opt.zero_grad()
    opt.param_sync()
    out += [p.detach().cpu().clone() for p in model.parameters()]
    saved = opt.state_dict()["state"]
    parts = [saved[i][name] for i in sorted(saved) for name in sorted(saved[i])]
    out += [getattr(part, "piece", part).cpu() for part in parts]
    opt.close()
    return out


def assert_equal(got: list[Tensor], expected: list[Tensor], what: object = "") -> None:
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"{what}: {index} of {len(expected)}"


BITS: list[tuple[int, torch.dtype, str, dict[str, Any]]] = [
    *((world, dtype, clip, {}) for world in range(5) for dtype in (F32, BF16) for clip in ("none", "own")),
    *((0, dtype, "inf", {}) for dtype in (F32, BF16)),
    (3, BF16, "own", {"overlap_grad_sync": False}),
    (3, BF16, "own", {"overlap_param_sync": True}),
    (3, BF16, "own", {"gradient_average": False}),
]


@pytest.mark.parametrize(("world", "dtype", "clip", "options"), BITS)
def test_training_has_the_bits_of_the_cpu(world: int, dtype: torch.dtype, clip: str, options: dict[str, Any]) -> None:
    """World 0: without a communicator."""
    expected = on_cpu_ranks(world, lambda rank, comm: trained(comm, CPU, dtype, clip, **options))
    for _ in range(DEVICE.size(3, 1)):
        got = in_world(world, lambda rank, comm: trained(comm, DEVICE.tensors, dtype, clip, **options))
        for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_equal(ours, theirs, f"rank {rank}")


@pytest.mark.parametrize(("clip", "norm_type"), [("own", 1.0), ("own", 2.0), ("own", float("inf")), ("torch's", 2.0)])
@pytest.mark.parametrize("world", [0, 2])
def test_clipping_is_torchs(world: int, clip: str, norm_type: float) -> None:
    """World 0: without a communicator. Gradients are summed, and torch gets the sums."""
    twin = GivenGrads(F32, DEVICE.tensors)
    for rank in range(max(world, 1)):
        twin(twin.draw_here(rank)).backward()
    theirs = [p for p in twin.parameters() if p.numel()]
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.7, norm_type=norm_type)

    def body(rank: int, comm: Communicator | None) -> None:
        model = GivenGrads(F32, DEVICE.tensors)
        opt = optimizer_of(model.parameters(), comm, gradient_average=False)
        model(model.draw_here(rank)).backward()
        if clip == "own":
            norm = opt.clip_grad_norm_(0.7, norm_type=norm_type)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7, norm_type=norm_type)
        torch.testing.assert_close(norm, expected, rtol=2e-6, atol=0)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(opt.full_grad(p), q.grad, rtol=2e-6, atol=0)
        opt.close()

    in_world(world, body)


# ---- what the training path must not do


def train_once(model: GivenGrads, opt: bw.ShardedAdamW, grads: list[Tensor]) -> None:
    model(grads).backward()
    opt.clip_grad_norm_(0.3)
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("world", [0, 2, 4])
def test_training_neither_waits_nor_allocates(world: int) -> None:
    """Backward, clip and step: by our counters, by torch's sync debug mode and by its count of device allocations. Of all
    ranks together, between barriers: the counters are the process's. World 0: without a communicator."""
    barrier = threading.Barrier(max(world, 1), timeout=20)
    checked = []

    def body(rank: int, comm: Communicator | None) -> None:
        model = GivenGrads(F32 if world else BF16, DEVICE.tensors)
        opt = optimizer_of(model.parameters(), comm)
        for step in range(7):
            grads = model.draw_here(100 * rank + step)
            DEVICE.synchronize()
            barrier.wait()
            with DEVICE.free_running() if step >= 4 and rank == 0 else nullcontext():
                if step < 4:
                    DEVICE.hold(BEHIND_S)
                barrier.wait()
                train_once(model, opt, grads)
                barrier.wait()
            checked.append(step)
            barrier.wait()  # what the others do next is not counted
        opt.close()

    in_world(world, body)
    assert len(checked) == 7 * max(world, 1)


@pytest.mark.parametrize("world", [0, 1])
def test_unscaling_and_stock_clipping_neither_wait_nor_allocate(world: int) -> None:
    """World 0: without a communicator. The scaler's own step reads one flag."""

    def body(rank: int, comm: Communicator | None) -> None:
        model = GivenGrads(F32, DEVICE.tensors)
        opt = optimizer_of(model.parameters(), comm)
        scaler = torch.amp.GradScaler(DEVICE.tensors.type, init_scale=16.0)
        for step in range(6):
            grads = model.draw_here(step)
            DEVICE.synchronize()
            if step < 3:
                DEVICE.hold(BEHIND_S)
            with DEVICE.free_running() if step >= 3 else nullcontext():
                scaler.scale(model(grads)).backward()
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        opt.close()

    in_world(world, body)


# ---- memory


def test_torchs_accounting_sees_the_pool() -> None:
    DEVICE.need_gpu("torch's accounting")
    size_bytes = 96 << 20

    def grown(upstream: str) -> int:
        before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
        pool = Pool(upstream)
        with pool.acquire("x", size_bytes):
            now = torch.cuda.memory_stats()["allocated_bytes.all.current"]
        assert pool.trim() >= size_bytes
        return int(now - before)

    assert grown("torch") >= size_bytes
    assert grown("cuda") == 0


@pytest.mark.parametrize("upstream", ["cuda", "torch"])
def test_more_than_the_device_has(upstream: str) -> None:
    """The error says who holds how much, caches have been given back, and everything works on."""
    if upstream == "torch":
        DEVICE.need_gpu("torch's out of memory")
    idle = Pool(upstream)
    idle.acquire("x", 64 << 20).release()
    assert idle.stats().reserved_bytes >= 64 << 20
    pool = Pool(upstream)
    with pytest.raises(PoolError, match=r"out of memory.*pools gave back [1-9]\d* bytes"):
        pool.acquire("too much", 2 * DEVICE.total_bytes())
    assert idle.stats().reserved_bytes == 0
    pool.check()
    pool.expect_no_leases()
    with pool.acquire("less", 1 << 20) as lease:
        assert torch.all(lease.tensor(F32, 1000).fill_(2.0) == 2.0)
    assert_equal(trained(None, DEVICE.tensors, F32, "own"), expected_of_one())


def expected_of_one() -> list[Tensor]:
    with DEVICE.cpu():
        return trained(None, CPU, F32, "own")


def test_training_goes_on_after_a_launch_that_failed() -> None:
    """The step raises, and a new optimizer for the same parameters is right.

    Not the same one: its launch failed after the work that counts the step, so its state on the device is unknown.
    """
    model, twin = GivenGrads(F32, DEVICE.tensors), GivenGrads(F32, DEVICE.tensors)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    model(model.draw_here(1)).backward()
    plan_cuda_fault("launch_adam", error=719)
    with pytest.raises(bw.Error, match="launch_adam"):
        opt.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    opt.zero_grad()
    opt.close()
    opt, other = (bw.ShardedAdamW(m.parameters(), lr=1e-2) for m in (model, twin))
    for step in range(2):
        for m, o in ((model, opt), (twin, other)):
            train_once(m, o, m.draw_here(step))
    for p, q, old in zip(model.parameters(), twin.parameters(), before, strict=True):
        assert torch.equal(p, q)
        assert not p.numel() or not torch.equal(p, old)
    opt.close()
    other.close()
