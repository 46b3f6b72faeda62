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


def set_grads(model: GivenGrads, seed: int) -> None:
    """In place where there are some, as a replay needs it."""
    for p, g in zip(model.parameters(), model.draw_here(seed), strict=True):
        if p.grad is None:
            p.grad = g
        else:
            p.grad.copy_(g)


def assert_same(got: torch.nn.Module, expected: torch.nn.Module) -> None:
    for index, (p, q) in enumerate(zip(got.parameters(), expected.parameters(), strict=True)):
        assert torch.equal(DEVICE.get(p), DEVICE.get(q)), f"parameter {index}"


def clip_and_step(opt: bw.ShardedAdamW) -> Tensor:
    norm = opt.clip_grad_norm_(1.0)
    opt.step()
    return norm


def train(model: GivenGrads, opt: bw.ShardedAdamW, grads: list[Tensor]) -> Tensor:
    opt.zero_grad()
    model(grads).backward()
    return clip_and_step(opt)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_replays_of_whole_steps_are_eager_steps(dtype: torch.dtype) -> None:
    """Forward, backward, clip and step in one graph. Gradients, the learning rate and the step count are read anew; some
    gradients are clipped, some are not."""
    scales = [1.0, 1e-6, 30.0, 1.0]
    model, eager = (GivenGrads(dtype, DEVICE.tensors) for _ in range(2))
    rates = [rate_tensor(), rate_tensor()]
    opt, eager_opt = (capturable(one, rate) for one, rate in zip((model, eager), rates, strict=True))
    grads = model.draw_here(0)
    DEVICE.warm_up(lambda: train(model, opt, grads), WARM_UP)
    for _ in range(WARM_UP):
        train(eager, eager_opt, grads)
    opt.zero_grad()
    DEVICE.synchronize()
    start = [p.detach().clone() for p in model.parameters()]
    kept: list[Tensor] = []
    replay = DEVICE.capture(lambda: kept.append(train(model, opt, grads)))
    for p, old in zip(model.parameters(), start, strict=True):
        assert torch.equal(p, old), "capturing must not run anything"
    norms = []
    for seed, (value, scale) in enumerate(zip(RATES, scales, strict=True)):
        for rate in rates:
            rate.fill_(value)
        for grad, drawn in zip(grads, model.draw_here(seed), strict=True):
            grad.copy_(drawn * scale)
        replay()
        norms.append(float(train(eager, eager_opt, grads)))
        assert float(kept[0]) == norms[-1]
    assert int(opt.state[next(model.parameters())]["step"]) == WARM_UP + len(RATES)
    assert min(norms) < 1.0 < max(norms)
    assert_same(model, eager)
    opt.close()
    eager_opt.close()


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
            opt.zero_grad(set_to_none=False)
            set_grads(m, seed)
        ops.l2_norm([DEVICE.put(torch.randn(5000)) for _ in range(40)])  # uses the tables that calls share
        replay() if seed != 2 else clip_and_step(opts[0])
        clip_and_step(opts[1])
    assert_same(model, twin)
    for opt in opts:
        opt.close()
