"""Slow, obvious versions of what Adam's rows hold: every dtype, split masters, stochastic rounding and its random bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.support.reference import Adam, adam_exact, from_bf16, to_bf16

PHILOX_ROUNDS = 7


def philox(key: tuple[int, int], counter: tuple[int, int, int, int], rounds: int = PHILOX_ROUNDS) -> tuple[int, ...]:
    """Philox4x32 of Salmon et al., in Python's integers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(seed: int, param: int, begin: int, numel: int, step: int) -> np.ndarray:
    """16 random bits for the elements [begin, begin + numel) of a parameter."""
    out = []
    for block in range(begin // 8, (begin + numel + 7) // 8):
        counter = (block & 0xFFFFFFFF, block >> 32, step & 0xFFFFFFFF, 4 * param)
        for word in philox((seed & 0xFFFFFFFF, seed >> 32), counter):
            out += [word & 0xFFFF, word >> 16]
    return np.array(out[begin % 8 : begin % 8 + numel], np.uint32)


def to_bf16_stochastic(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits: away from zero where the random number and the 16 bits cut off make 2^16 or more."""
    bits = x.view(np.uint32)
    up = (bits & 0xFFFF) + random >= 0x10000
    rounded = ((bits >> 16) + up).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def to_fp16(x: np.ndarray) -> np.ndarray:
    """float32 to float16 bits, to nearest even, by numpy."""
    with np.errstate(over="ignore"):
        return np.where(np.isnan(x), np.uint16(0x7E00), x.astype(np.float16).view(np.uint16))


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 to its bfloat16, halves away from zero, and the lower 16 bits."""
    bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
    low = bits & 0xFFFF
    return ((bits >> 16) + (low >= 0x8000)).astype(np.uint16), low.astype(np.uint16)


def join(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The inverse: the higher half was one less where the lower half says that it was rounded up."""
    upper = high.astype(np.uint32) - (low >= 0x8000)
    joined = ((upper << 16) | low).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(joined), from_bf16(high), joined)


def is_rounding_of(param: torch.Tensor, master: np.ndarray) -> np.ndarray:
    """Where a 16-bit parameter is its master to nearest even, or, in bfloat16, halves away from zero."""
    if param.dtype == torch.float16:
        return bits_of(param) == to_fp16(master)
    return (bits_of(param) == to_bf16(master)) | (bits_of(param) == split(master)[0])


def array_of(x: torch.Tensor) -> np.ndarray:
    """The values as float32 (of 16 bits), or as they are."""
    if x.dtype == torch.bfloat16:
        return from_bf16(bits_of(x))
    return x.detach().float().numpy().copy() if x.dtype == torch.float16 else x.detach().numpy().copy()


def bits_of(x: torch.Tensor) -> np.ndarray:
    """The bits of a tensor of 16-bit elements."""
    return x.detach().contiguous().view(torch.int16).numpy().view(np.uint16).copy()


def tensor_of(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).view(dtype)


@dataclass
class Row:
    """The tensors of one parameter, contiguous; `None` for what it does not have."""

    p: torch.Tensor
    g: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    vmax: torch.Tensor | None = None
    master: torch.Tensor | None = None
    remainder: torch.Tensor | None = None

    def clone(self) -> Row:
        return Row(*(x if x is None else x.clone() for x in self.tensors()))

    def tensors(self) -> list[torch.Tensor | None]:
        return [self.p, self.g, self.m, self.v, self.vmax, self.master, self.remainder]

    def slice(self, begin: int, end: int) -> Row:
        return Row(*(x if x is None else x[begin:end] for x in self.tensors()))


@dataclass(frozen=True)
class Rounding:
    stochastic: bool = True
    seed: int = 0
    param: int = 0
    begin: int = 0  # the first element's place in its parameter
    resync: bool = False  # masters follow their parameters


def step_row(row: Row, args: Adam, rounding: Rounding) -> Row:
    """The row after one step."""
    if row.master is not None:
        weight = array_of(row.master)
        if rounding.resync:
            weight = np.where(is_rounding_of(row.p, weight), weight, array_of(row.p))
    elif row.remainder is not None:
        weight = join(bits_of(row.p), bits_of(row.remainder))
    else:
        weight = array_of(row.p)
    vmax = None if row.vmax is None else array_of(row.vmax)
    new = adam_exact(weight, array_of(row.g), array_of(row.m), array_of(row.v), args, vmax)
    weight = new[0]

    def stored(x: np.ndarray, dtype: torch.dtype, *, is_random: bool = False) -> torch.Tensor:
        if dtype == torch.float16:
            return tensor_of(to_fp16(x), dtype)
        if dtype != torch.bfloat16:
            return torch.from_numpy(x)
        if not is_random:
            return tensor_of(to_bf16(x), dtype)
        random = random_bits(rounding.seed, rounding.param, rounding.begin, x.size, args.step)
        return tensor_of(to_bf16_stochastic(x, random), dtype)

    out = row.clone()
    out.m = stored(new[1], row.m.dtype)
    out.v = stored(new[2], row.v.dtype, is_random=rounding.stochastic)
    out.vmax = None if row.vmax is None else stored(new[3], row.vmax.dtype)
    if row.remainder is not None:
        high, low = split(weight)
        out.p, out.remainder = tensor_of(high, torch.bfloat16), tensor_of(low, torch.int16)
    else:
        out.p = stored(weight, row.p.dtype)
        out.master = None if row.master is None else torch.from_numpy(weight)
    return out
