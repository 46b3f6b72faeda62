"""ShardedAdamW on CUDA: torch's AdamW in tolerance, the CPU's bits, nothing that waits or allocates, memory and its end."""

from __future__ import annotations

import copy
import itertools
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

_seeding = threading.Lock()  # torch's random state is that of all threads


def optimizer_of(params: Any, comm: Communicator | None, **options: Any) -> bw.ShardedAdamW:
    if comm is not None:
        options |= {"process_group": comm, "bucket_cap_mb": 0.02}
    return bw.ShardedAdamW(params, lr=1e-2, weight_decay=0.1, **options)


# ---- the bits of the CPU


def trained(
    comm: Communicator | None, device: torch.device, dtype: torch.dtype, clip: str, **options: Any
) -> list[Tensor]:
    """What four steps with given gradients leave: norms, parameters and states, on the CPU."""
    rank = comm.rank if comm is not None else 0
    model = GivenGrads(dtype, device, seed=rank)
    opt = optimizer_of(model.parameters(), comm, **options)
    if options.get("overlap_param_sync"):
        opt.prefetch_params(model)
    out = []
    for step in range(4):
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


@pytest.mark.parametrize(("world", "clip"), [*itertools.product(range(5), ("none", "own")), (0, "inf")])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_training_has_the_bits_of_the_cpu(world: int, dtype: torch.dtype, clip: str) -> None:
    """World 0: without a communicator."""
    expected = on_cpu_ranks(world, lambda rank, comm: trained(comm, CPU, dtype, clip))
    for _ in range(DEVICE.size(3, 1)):
        got = in_world(world, lambda rank, comm: trained(comm, DEVICE.tensors, dtype, clip))
        for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_equal(ours, theirs, f"rank {rank}")


@pytest.mark.parametrize(
    "options", [{"overlap_grad_sync": False}, {"overlap_param_sync": True}, {"gradient_average": False}]
)
def test_options_have_the_bits_of_the_cpu(options: dict[str, Any]) -> None:
    expected = on_cpu_ranks(3, lambda rank, comm: trained(comm, CPU, BF16, "own", **options))
    got = in_world(3, lambda rank, comm: trained(comm, DEVICE.tensors, BF16, "own", **options))
    for rank in range(3):
        assert_equal(got[rank], expected[rank], f"rank {rank}")


# ---- torch's AdamW on the same device


def perceptron(device: torch.device) -> torch.nn.Sequential:
    with _seeding:
        torch.manual_seed(7)
        model = torch.nn.Sequential(
            torch.nn.Linear(37, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 5)
        )
    return model.to(device)


def batch(rank: int, step: int, device: torch.device) -> Tensor:
    return torch.randn(16, 37, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)


def losses(model: torch.nn.Module, ranks: range, step: int, dtype: torch.dtype) -> Tensor:
    """The mean over the ranks, as gradient averaging has it."""
    each = [model(batch(rank, step, DEVICE.tensors).to(dtype)).square().mean() for rank in ranks]
    return torch.stack(each).mean()


def torchs(world: int, dtype: torch.dtype, steps: int, max_norm: float) -> tuple[list[Tensor], list[float]]:
    """Parameters and norms after training by torch in one process; of bfloat16 with float32 masters."""
    model = perceptron(DEVICE.tensors).to(dtype)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    opt = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    norms = []
    for step in range(steps):
        model.zero_grad()
        losses(model, range(world), step, dtype).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters, max_norm)))
        opt.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return [p.detach().float().cpu() for p in model.parameters()], norms


@pytest.mark.parametrize("world", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("clip", ["own", "stock"])
def test_training_follows_torchs_adamw(world: int, dtype: torch.dtype, clip: str) -> None:
    """World 0: without a communicator."""
    steps, max_norm = 8, 0.2
    expected, expected_norms = torchs(max(world, 1), dtype, steps, max_norm)

    def body(rank: int, comm: Communicator | None) -> tuple[list[Tensor], list[float]]:
        model = perceptron(DEVICE.tensors).to(dtype)
        opt = optimizer_of(model.parameters(), comm)
        norms = []
        for step in range(steps):
            losses(model, range(rank, rank + 1), step, dtype).backward()
            if clip == "own":
                norms.append(float(opt.clip_grad_norm_(max_norm)))
            else:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            opt.step()
            opt.zero_grad()
        params = [p.detach().float().cpu() for p in model.parameters()]
        opt.close()
        return params, norms

    start = [p.detach().to(dtype).float().cpu() for p in perceptron(CPU).parameters()]
    path = torch.cat([(b - a).flatten() for a, b in zip(start, expected, strict=True)]).norm()
    tolerance = 2e-3 if dtype == F32 else 5e-2  # of gradients rounded elsewhere, which Adam's first steps amplify
    for params, norms in in_world(world, body):
        off = torch.cat([(b - a).flatten() for a, b in zip(params, expected, strict=True)]).norm()
        assert off < tolerance * path, f"{float(off / path):.2e} of the way"
        assert norms == pytest.approx(expected_norms, rel=1e-4 if dtype == F32 else 3e-2)
        assert max(norms) > max_norm  # it did clip


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("world", [0, 2])
def test_clipping_is_torchs(world: int, norm_type: float) -> None:
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
        torch.testing.assert_close(opt.clip_grad_norm_(0.7, norm_type=norm_type), expected, rtol=2e-6, atol=0)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(opt.full_grad(p), q.grad, rtol=2e-6, atol=0)
        opt.close()

    in_world(world, body)


# ---- what the training path must not do


def test_one_process_neither_waits_nor_allocates() -> None:
    """Backward, clip and step: by our counters, by torch's sync debug mode and by its count of device allocations."""
    model = GivenGrads(BF16, DEVICE.tensors)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        grads = model.draw_here(step)
        DEVICE.synchronize()
        if step < 3:
            DEVICE.hold(BEHIND_S)
            train_once(model, opt, grads)
        else:
            with DEVICE.free_running():
                train_once(model, opt, grads)
    opt.close()


def train_once(model: GivenGrads, opt: bw.ShardedAdamW, grads: list[Tensor]) -> None:
    model(grads).backward()
    opt.clip_grad_norm_(0.3)
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_neither_wait_nor_allocate(world: int) -> None:
    """Of all ranks together, between barriers: the counters are the process's."""
    barrier = threading.Barrier(world, timeout=20)
    checked = []

    def body(rank: int, comm: Communicator) -> None:
        model = GivenGrads(F32, DEVICE.tensors)
        opt = optimizer_of(model.parameters(), comm)

        def step_together(grads: list[Tensor]) -> None:
            barrier.wait()
            train_once(model, opt, grads)
            barrier.wait()

        for step in range(7):
            grads = model.draw_here(100 * rank + step)
            DEVICE.synchronize()
            barrier.wait()
            if step < 4 or rank > 0:
                if step < 4:
                    DEVICE.hold(BEHIND_S)
                step_together(grads)
            else:
                with DEVICE.free_running():
                    step_together(grads)
                checked.append(step)
            barrier.wait()  # what the others do next is not counted
        opt.close()

    in_world(world, body)
    assert checked == [4, 5, 6]


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


# ---- state


def test_state_moves_between_cpu_and_cuda() -> None:
    """A checkpoint of either loads into the other, and both go on with the same bits."""

    def steps(model: GivenGrads, opt: bw.ShardedAdamW, first: int, last: int) -> None:
        for step in range(first, last):
            train_once(model, opt, model.draw_here(step))

    def fresh(device: torch.device, seed: int) -> tuple[GivenGrads, bw.ShardedAdamW]:
        model = GivenGrads(BF16, device, seed)
        return model, bw.ShardedAdamW(model.parameters(), lr=1e-2)

    with DEVICE.cpu():
        model, opt = fresh(CPU, 0)
        steps(model, opt, 0, 2)
        weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
        steps(model, opt, 2, 4)
    there, resumed = fresh(DEVICE.tensors, 1)
    there.load_state_dict(weights)
    resumed.load_state_dict(saved)
    steps(there, resumed, 2, 4)
    for p, q in zip(there.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.cpu(), q)
    back_weights, back = there.state_dict(), resumed.state_dict()
    ours = opt.state_dict()["state"]
    for i, entry in back["state"].items():
        for name, value in entry.items():
            assert torch.equal(value.cpu(), ours[i][name]), name
    with DEVICE.cpu():
        again, last = fresh(CPU, 2)
        again.load_state_dict(back_weights)
        last.load_state_dict(back)
        steps(again, last, 4, 5)
        steps(model, opt, 4, 5)
        for p, q in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)


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
    in_world(2, lambda rank, comm: trained(comm, DEVICE.tensors, F32, "own"))


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
