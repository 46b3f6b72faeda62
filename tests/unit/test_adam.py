"""The Adam kernel's numbers: exact bits, error bounds, independence of threads, partition and alignment.

Parameters are never compared alone: a step moves them by about lr, so a tolerance that hides lr hides everything.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from bucketwheel.kernels import ops
from tests.support.reference import Adam, adam_exact, adam_float64, bits, fma32

CHUNK = 8192  # AdamTable::kChunkNumel
pytestmark = pytest.mark.usefixtures("restore_threads")


def step(p, g, m, v, args: Adam, **more) -> None:
    ops.adam_step(
        [p],
        [g],
        [m],
        [v],
        args.step,
        **args.arguments(),
        **more,
    )


def wide_inputs(numel: int = 4099, seed: int = 0) -> list[np.ndarray]:
    """p, g, m, v with magnitudes from denormal to huge, both signs, exact zeros, v = 0 and equal g and m."""
    rng = np.random.default_rng(seed)

    def log_uniform(low: float, high: float) -> np.ndarray:
        return (rng.choice([-1.0, 1.0], numel) * 10.0 ** rng.uniform(low, high, numel)).astype(np.float32)

    p, g, m, v = log_uniform(-3, 2), log_uniform(-30, 4), log_uniform(-30, 4), abs(log_uniform(-36, 8))
    g[::17] = 0.0
    g[1::17] = np.float32(3e-45) * rng.integers(1, 1000, g[1::17].size)  # denormal
    m[2::17] = g[2::17]
    m[3::17] = 0.0
    v[4::17] = 0.0
    v[5::17] = 1e30
    p[6::17] = 0.0
    v[7::17] = np.float32(1e-42)
    return [p, g, m, v]


def run(arrays: list[np.ndarray], args: Adam) -> list[torch.Tensor]:
    p, g, m, v = (torch.from_numpy(x.copy()) for x in arrays)
    step(p, g, m, v, args)
    return [p, m, v]


GRID = [
    Adam(step=t, lr=lr, eps=eps, weight_decay=wd, decoupled=d)
    for t, lr, eps, wd, d in itertools.product(
        (1, 2, 10, 1000, 10**6), (1e-8, 1e-3, 1.0), (0.0, 1e-16, 1e-8), (0.0, 0.1), (True, False)
    )
]
GRID += [Adam(step=3, grad_scale=0.37, maximize=m, decoupled=d) for m in (False, True) for d in (False, True)]
GRID += [Adam(step=5, beta1=0.0, beta2=0.5), Adam(step=2, beta1=0.99, beta2=0.0), Adam(step=2**40, beta2=1 - 1e-9)]


def test_every_operation_is_where_the_formula_says() -> None:
    arrays = wide_inputs()
    for args in GRID:
        got = run(arrays, args)
        with np.errstate(all="ignore"):
            expected = [torch.from_numpy(x) for x in adam_exact(*arrays, args)]
        for name, a, b in zip("pmv", got, expected, strict=True):
            assert torch.equal(bits(a), bits(b)), f"{name} differs for {args}"


@pytest.mark.slow
def test_a_quotient_by_a_known_divisor_is_the_ieee_one() -> None:
    """`quotient` in adam_math.h, where it could fail: x / d within 3 / 2^25 ulp of a midpoint between floats.

    With a, b of 24 bits, 2^23 <= b, and the midpoint (2q + 1) / 2: a * 2^(k+1) = (2q + 1) * b + r with |r| <= 3. For
    every divisor all such a are found by inverting b modulo a power of two.
    """
    cases = 0
    for twos in (0, 1):
        odd = np.arange(2 ** (23 - twos) | 1, 2 ** (24 - twos), 2, dtype=np.int64)
        inverse = odd.copy()
        for _ in range(5):
            inverse = inverse * (2 - odd * inverse) & (2**30 - 1)
        for k, r in itertools.product((23, 24), (-3, -2, -1, 1, 2, 3)):
            if r % 2**twos:
                continue
            modulus = 2 ** (k + 1 - twos)
            least = -(r >> twos) * inverse % modulus
            for middle in (least + i * modulus for i in range(max(1, 2**25 // modulus))):
                a, rest = np.divmod(middle * (odd << twos) + r, 2 ** (k + 1))
                fits = (
                    (rest == 0) & (middle % 2 == 1) & (middle >= 2**24) & (middle < 2**25) & (a >= 2**23) & (a < 2**24)
                )
                x, d = a[fits].astype(np.float32), (odd[fits] << twos).astype(np.float32)
                inv = np.float32(1) / d
                guess = x * inv
                assert np.array_equal(fma32(fma32(-guess, d, x), inv, guess), x / d)
                cases += x.size
    assert cases > 2**23


def test_a_thousand_steps_stay_close_to_float64_and_as_close_as_torch() -> None:
    torch.manual_seed(3)
    numel, steps = 2048, 1000
    args = Adam(lr=1e-3, weight_decay=0.01)
    start = torch.randn(numel) * 0.02
    ours = [start.clone(), torch.zeros(numel), torch.zeros(numel)]
    loop = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([loop], lr=1e-3, weight_decay=0.01, foreach=False, fused=False)
    exact = [start.double().numpy(), np.zeros(numel), np.zeros(numel)]
    path = np.zeros(numel)
    for t in range(1, steps + 1):
        g = torch.randn(numel) * (1 + (t % 7)) * 0.01 + 0.003
        step(ours[0], g, ours[1], ours[2], Adam(**{**vars(args), "step": t}))
        loop.grad = g
        optimizer.step()
        before = exact[0]
        *exact, _ = adam_float64(before, g.numpy(), exact[1], exact[2], Adam(**{**vars(args), "step": t}))
        path += np.abs(exact[0] - before)
    error = np.abs(ours[0].double().numpy() - exact[0])
    assert (path > 0.05).all()
    assert np.max(error / path) <= 2e-5
    torch_error = np.abs(loop.detach().double().numpy() - exact[0])
    assert np.mean(error) <= 1.1 * np.mean(torch_error)


def test_denormals_are_kept_whatever_mode_the_thread_is_in() -> None:
    arrays = [x for x in wide_inputs(seed=9)]
    arrays[1] = (arrays[1] * np.float32(1e-20)).astype(np.float32)
    expected = run(arrays, Adam(step=2, eps=1e-30))
    assert torch.set_flush_denormal(True)
    try:
        got = run(arrays, Adam(step=2, eps=1e-30))
        assert (torch.tensor([1e-40]) * 1.0 == 0).item(), "flushing is still on for the caller"
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_numbers_that_are_tensors_are_read_at_each_step() -> None:
    """Those that a step was made with before may have changed since."""
    decay = torch.tensor(0.5)
    for _ in range(2):
        p, g, m, v = torch.ones(4), *(torch.zeros(4) for _ in range(3))
        ops.adam_step([p], [g], [m], [v], 1, lr=1.0, weight_decay=decay)
        assert torch.equal(p, torch.full((4,), 1.0 - decay.item()))
        decay.mul_(0.5)
