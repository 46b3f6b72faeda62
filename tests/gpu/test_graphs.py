"""CUDA graphs: steps, ops and whole training steps are captured, and replays are eager steps with new rates and counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import bucketwheel as bw
from bucketwheel.device import reclaim_memory
from bucketwheel.kernels import ops
from bucketwheel.pool.pool import Pool
from tests.gpu.device import DEVICE
from tests.gpu.local_ranks import GivenGrads

F32, BF16 = torch.float32, torch.bfloat16
WARM_UP = 3
RATES = [1e-2, 3e-3, 2e-2, 0.0]


def rate_tensor(value: float = 1e-2) -> Tensor:
    return DEVICE.put(torch.tensor(value))


def capturable(model: torch.nn.Module, rate: Tensor) -> bw.ShardedAdamW:
    return bw.ShardedAdamW(model.parameters(), lr=rate, weight_decay=0.1, capturable=True, static_graph=True)


def set_grads(model: GivenGrads, seed: int, scale: float = 1.0, opt: bw.ShardedAdamW | None = None) -> None:
    """In place where there are some, as a replay needs it. ``opt``: of an eager step that follows."""
    if opt is not None:
        opt.zero_grad(set_to_none=False)
    for p, g in zip(model.parameters(), model.draw_here(seed), strict=True):
        if p.grad is None:
            p.grad = g * scale
        else:
            p.grad.copy_(g * scale)


def assert_same(got: torch.nn.Module, expected: torch.nn.Module) -> None:
    for index, (p, q) in enumerate(zip(got.parameters(), expected.parameters(), strict=True)):
        assert torch.equal(DEVICE.get(p), DEVICE.get(q)), f"parameter {index}"


def clip_and_step(opt: bw.ShardedAdamW) -> Tensor:
    norm = opt.clip_grad_norm_(1.0)
    opt.step()
    return norm


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_replays_of_clip_and_step_are_eager_steps(dtype: torch.dtype) -> None:
    """Gradients, the learning rate and the step count are read anew; some are clipped, some are not."""
    scales = [1.0, 1e-6, 30.0, 1.0]
    eager, rate = GivenGrads(dtype, DEVICE.tensors), rate_tensor()
    opt = capturable(eager, rate)
    set_grads(eager, 0)
    for _ in range(WARM_UP):
        clip_and_step(opt)
    norms = []
    for seed, (value, scale) in enumerate(zip(RATES, scales, strict=True)):
        rate.fill_(value)
        set_grads(eager, seed, scale, opt)
        norms.append(float(clip_and_step(opt)))
    opt.close()

    model, rate = GivenGrads(dtype, DEVICE.tensors), rate_tensor()
    opt = capturable(model, rate)
    set_grads(model, 0)
    DEVICE.warm_up(lambda: clip_and_step(opt), WARM_UP)
    DEVICE.synchronize()
    start = [p.detach().clone() for p in model.parameters()]
    kept: list[Tensor] = []
    replay = DEVICE.capture(lambda: kept.append(clip_and_step(opt)))
    for p, old in zip(model.parameters(), start, strict=True):
        assert torch.equal(p, old), "capturing must not run anything"
    for seed, (value, scale) in enumerate(zip(RATES, scales, strict=True)):
        rate.fill_(value)
        set_grads(model, seed, scale)
        replay()
        assert float(kept[0]) == norms[seed]
    assert int(opt.state[next(model.parameters())]["step"]) == WARM_UP + len(RATES)
    assert min(norms) < 1.0 < max(norms)
    assert_same(model, eager)
    opt.close()


def replays_of(call: Callable[[], None], state: list[Tensor], times: int) -> list[Tensor]:
    """What ``times`` replays leave in ``state`` (which a warm-up changes, and is then put back)."""
    before = [x.clone() for x in state]
    DEVICE.warm_up(call)
    for x, old in zip(state, before, strict=True):
        x.copy_(old)
    replay = DEVICE.capture(call)
    for _ in range(times):
        replay()
    return [DEVICE.get(x) for x in state]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_captured_adam_step_counts_its_tensors_up(dtype: torch.dtype) -> None:
    """Lists with step tensors, a rate and a noop on the device; bitwise the CPU's steps."""
    count, times = DEVICE.size(700, 20), 3
    generator = torch.Generator().manual_seed(1)
    lists = [[torch.randn(64 + i % 9, generator=generator).to(dtype) for i in range(count)] for _ in range(4)]
    lists[3] = [v.abs() for v in lists[3]]
    there = [[DEVICE.put(x) for x in one] for one in lists]
    steps = [DEVICE.put(torch.tensor(4.0)) for _ in range(count)]
    rate, noop = rate_tensor(float(torch.tensor(0.01))), DEVICE.put(torch.zeros(1))

    def step() -> None:
        ops.adam_step(*there, steps, lr=rate, weight_decay=0.1, noop=noop)

    changed = [*there[0], *there[2], *there[3], *steps]
    got = replays_of(step, changed, times)
    with DEVICE.cpu():
        for t in range(times):
            ops.adam_step(*lists, 5 + t, lr=float(torch.tensor(0.01)), weight_decay=0.1)
    expected = [*lists[0], *lists[2], *lists[3], *[torch.tensor(4.0 + times)] * count]
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), index
    noop.fill_(math.nan)
    replay = DEVICE.capture(step)
    before = [x.clone() for x in changed]
    replay()
    for x, old in zip(changed, before, strict=True):
        assert torch.equal(x, old)


def test_a_captured_norm_follows_its_tensors() -> None:
    tensors = [DEVICE.put(torch.randn(n)) for n in (1, 40_000, 0, 777)]
    out = torch.zeros(4, dtype=torch.float64, device=DEVICE.tensors)

    def measure() -> None:
        out.copy_(ops.l2_norm(tensors, per_tensor=True))

    replays_of(measure, [out], 1)
    replay = DEVICE.capture(measure)
    for seed in range(3):
        for i, tensor in enumerate(tensors):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(10 * seed + i)))
        replay()
        with DEVICE.cpu():
            expected = ops.l2_norm([DEVICE.get(x) for x in tensors], per_tensor=True)
        assert torch.equal(DEVICE.get(out), expected)


def test_a_captured_step_is_left_out_where_the_norm_is_not_finite() -> None:
    """The flag of `l2_norm` stays on the device and decides in each replay, on the step counts too."""
    params, grads, m, v = ([DEVICE.put(torch.full((n,), x)) for n in (1000, 33)] for x in (1.0, 1.0, 0.0, 0.0))
    steps = [DEVICE.put(torch.tensor(4.0)) for _ in params]

    def step() -> None:
        nonfinite = ops.l2_norm(grads, return_nonfinite=True)[1]
        ops.adam_step(params, grads, m, v, steps, lr=1e-2, noop=nonfinite)

    DEVICE.warm_up(step)
    replay = DEVICE.capture(step)
    changing = [*params, *m, *v, *steps]
    for value in (math.inf, 2.0, math.nan, 3.0):
        grads[1][5].fill_(value)
        before = [x.clone() for x in changing]
        replay()
        for x, old in zip(changing, before, strict=True):
            assert torch.equal(x, old) != math.isfinite(value)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_whole_training_step_is_captured(dtype: torch.dtype) -> None:
    """Forward, backward, clip and step in one graph; it follows eager training."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(37, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 5)
    )
    model = model.to(DEVICE.tensors, dtype)
    torch.manual_seed(0)
    eager = torch.nn.Sequential(
        torch.nn.Linear(37, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 5)
    )
    eager = eager.to(DEVICE.tensors, dtype)
    inputs = torch.zeros(16, 37, dtype=dtype, device=DEVICE.tensors)
    rates = [rate_tensor(), rate_tensor()]
    opts = [capturable(m, rate) for m, rate in zip((model, eager), rates, strict=True)]

    def train(m: torch.nn.Module, opt: bw.ShardedAdamW) -> None:
        # The gradients of the graph are in its own memory: each replay writes them anew.
        opt.zero_grad()
        m(inputs).square().mean().backward()
        opt.clip_grad_norm_(0.1)
        opt.step()

    def feed(seed: int) -> None:
        inputs.copy_(torch.randn(16, 37, generator=torch.Generator().manual_seed(seed)))

    feed(0)
    DEVICE.warm_up(lambda: train(model, opts[0]), WARM_UP)
    for _ in range(WARM_UP):
        train(eager, opts[1])
    opts[0].zero_grad()
    replay = DEVICE.capture(lambda: train(model, opts[0]))
    start = torch.cat([DEVICE.get(p).float().flatten() for p in model.parameters()])
    for seed, value in enumerate(RATES):
        feed(seed)
        for rate in rates:
            rate.fill_(value)
        replay()
        train(eager, opts[1])
    got, expected = (torch.cat([DEVICE.get(p).float().flatten() for p in m.parameters()]) for m in (model, eager))
    path = (expected - start).norm()
    assert path > 0.01
    assert (got - expected).norm() < (1e-3 if dtype == F32 else 3e-2) * path
    for opt in opts:
        opt.close()


def test_what_a_graph_reads_stays() -> None:
    """Eager steps and other calls between replays, and `reclaim_memory`, take nothing that the graph reads by address."""
    model, rate = GivenGrads(F32, DEVICE.tensors), rate_tensor()
    twin, twin_rate = GivenGrads(F32, DEVICE.tensors), rate_tensor()
    opts = [capturable(model, rate), capturable(twin, twin_rate)]
    for m, opt in zip((model, twin), opts, strict=True):
        set_grads(m, 0)
        DEVICE.warm_up(lambda opt=opt: clip_and_step(opt), WARM_UP)
    replay = DEVICE.capture(lambda: clip_and_step(opts[0]))
    Pool("cuda").acquire("idle", 1 << 20).release()
    reclaim_memory(0)
    for seed in range(4):
        for m, opt in zip((model, twin), opts, strict=True):
            set_grads(m, seed, opt=opt)
        ops.l2_norm([DEVICE.put(torch.randn(5000)) for _ in range(40)])  # uses the tables that calls share
        replay() if seed != 2 else clip_and_step(opts[0])
        clip_and_step(opts[1])
    assert_same(model, twin)
    for opt in opts:
        opt.close()
