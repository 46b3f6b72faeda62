"""Slow, obvious versions of the kernels, in numpy.

`adam_exact` and `to_bf16` repeat the kernels' operations one by one and must agree bitwise; `adam_float64` computes the
formula in float64 and is the reference for error bounds. What is stored and how it is rounded is in
`reference_rows.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Adam:
    """Hyperparameters and the scalar inputs of one step (``step`` counts from 1)."""

    step: int = 1
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_scale: float = 1.0
    decoupled: bool = True
    maximize: bool = False

    def arguments(self) -> dict[str, Any]:
        """All but the step, as `ops.adam_step` takes them."""
        return {
            "lr": self.lr,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "grad_scale": self.grad_scale,
            "decoupled": self.decoupled,
            "maximize": self.maximize,
        }


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32(a * b + c) with one rounding.

    a * b is exact in float64. The sum is rounded to odd there (Boldo & Melquiond), after which rounding to float32 is
    as if from the exact value.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.broadcast_to(np.asarray(c, np.float64), product.shape)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # Knuth's TwoSum: total + error is exact
    even = (total.view(np.int64) & 1) == 0
    fix = np.isfinite(total) & even & (error != 0)
    return np.where(fix, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float64(a * b + c) with one rounding: in fractions, one by one."""

    def one(x: float, y: float, z: float) -> float:
        if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
            return x * y + z
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        return float(exact) if exact else x * y + z  # the sign of a zero

    shape = np.broadcast(a, b, c).shape
    flat = [np.broadcast_to(x, shape).ravel().tolist() for x in (a, b, c)]
    return np.array([one(*xs) for xs in zip(*flat, strict=True)], np.float64).reshape(shape)


def adam_exact(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, args: Adam, vmax: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """One step in the kernels' order of operations, in float32 or, where p is, in float64: p, m, v, and vmax (amsgrad).

    numpy's operations are IEEE-rounded.
    """
    f, fma = (np.float64, fma64) if p.dtype == np.float64 else (np.float32, fma32)
    bias1, bias2 = 1.0 - power(args.beta1, args.step), 1.0 - power(args.beta2, args.step)
    g = g * f(-args.grad_scale if args.maximize else args.grad_scale)
    if args.decoupled:
        p = p * f(1.0 - args.lr * args.weight_decay)
    else:
        g = fma(p, f(args.weight_decay), g)
    m = fma(f(1.0 - args.beta1), g - m, m)
    v = fma(f(1.0 - args.beta2) * g, g, v * f(args.beta2))
    largest = v if vmax is None else np.where((v > vmax) | np.isnan(v), v, vmax)
    den = np.sqrt(largest) / f(math.sqrt(bias2)) + f(args.eps)
    p = p + (f(-(args.lr / bias1)) * m) / den
    return (p, m, v) if vmax is None else (p, m, v, largest)


def power(base: float, n: int) -> float:
    """base**n by repeated squaring, in the kernels' order: ``**`` differs in the last bit."""
    result = 1.0
    while n:
        if n & 1:
            result *= base
        base *= base
        n >>= 1
    return result


def adam_float64(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, args: Adam
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One step in float64: (p, m, v, update), where update is what is subtracted after the decay."""
    p, g, m, v = (np.asarray(x, np.float64) for x in (p, g, m, v))
    g = g * (-args.grad_scale if args.maximize else args.grad_scale)
    if args.decoupled:
        p = p * (1.0 - args.lr * args.weight_decay)
    else:
        g = g + args.weight_decay * p
    m = args.beta1 * m + (1.0 - args.beta1) * g
    v = args.beta2 * v + (1.0 - args.beta2) * g * g
    den = np.sqrt(v) / math.sqrt(1.0 - args.beta2**args.step) + args.eps
    update = args.lr / (1.0 - args.beta1**args.step) * m / den
    return p - update, m, v, update


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), to nearest, ties to even, by comparing with the two neighbours."""
    bits = x.view(np.uint32).astype(np.uint64)
    below = bits & 0xFFFF0000
    remainder = bits & 0xFFFF
    odd = (below >> 16) & 1
    up = (remainder > 0x8000) | ((remainder == 0x8000) & (odd == 1))
    rounded = ((below >> 16) + up).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def sum_squares(x: torch.Tensor) -> float:
    """The exact sum of the squares, rounded once."""
    return math.fsum((x.detach().double() ** 2).flatten().tolist())


def sum_squares_in_order(x: np.ndarray) -> float:
    """The kernels' order of a sum of squares (csrc/kernels/norm.h), element by element, for one contiguous segment."""
    chunks = []
    for begin in range(0, x.size, 32768):
        lanes = [0.0] * 1024
        for i, value in enumerate(x[begin : begin + 32768].astype(np.float64).tolist()):
            lanes[i % 1024] += value * value
        fours = [(lanes[k] + lanes[k + 1]) + (lanes[k + 2] + lanes[k + 3]) for k in range(0, 1024, 4)]
        chunk = 0.0
        for warp in range(0, 256, 32):
            part = fours[warp : warp + 32]
            while len(part) > 1:
                half = len(part) // 2
                part = [part[k] + part[k + half] for k in range(half)]
            chunk += part[0]
        chunks.append(chunk)
    return fold(chunks)


def fold(values: list[float]) -> float:
    """Groups of 64, each in ascending order, and then the groups in ascending order."""
    total = 0.0
    for begin in range(0, len(values), 64):
        group = 0.0
        for value in values[begin : begin + 64]:
            group += value
        total += group
    return total


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits as integers, every NaN replaced by one: what bitwise comparisons compare."""
    integer = {4: torch.int32, 2: torch.int16, 8: torch.int64}[x.element_size()]
    flat = x.detach().contiguous().view(integer).clone()
    flat[torch.isnan(x.detach())] = -1
    return flat
