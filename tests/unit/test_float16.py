"""The codecs: bfloat16, float16 and the split master, through the kernels and over every float."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bucketwheel.kernels import ops
from bucketwheel.native import core
from tests.support.reference_rows import bits_of, join, split, tensor_of, to_bf16_stochastic


def some_floats() -> np.ndarray:
    """Every upper half with the lower halves where rounding changes its mind, and a sample of all floats."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    parts = [upper | np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    parts.append(np.random.default_rng(0).integers(0, 2**32, 2**21, dtype=np.uint32))
    return np.concatenate(parts).view(np.float32)


def rewritten(high: np.ndarray, low: np.ndarray, zero: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The halves after a step that changes nothing: decoded and encoded."""
    p, remainder = tensor_of(high, torch.bfloat16), tensor_of(low, torch.int16)
    ops.adam_step([p], [zero], [zero.clone()], [zero.clone()], 1, lr=0.0, remainders=[remainder])
    return bits_of(p), bits_of(remainder)


def test_a_split_master_is_decoded_and_encoded_without_loss() -> None:
    x = some_floats()
    high, low = split(x)
    nan = np.isnan(x)
    assert np.array_equal(join(high, low).view(np.uint32)[~nan], x.view(np.uint32)[~nan])
    new_high, new_low = rewritten(high, low, torch.zeros(high.size))
    assert np.array_equal(new_high, high)
    assert np.array_equal(new_low, low)
    assert (new_high[nan] == 0x7FC0).all()
    # A NaN that would carry into -0 if it were split as it is.
    p, remainder = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int16)
    nan_grad = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    ops.adam_step([p], [nan_grad], [torch.zeros(1)], [torch.zeros(1)], 1, lr=1.0, remainders=[remainder])
    assert torch.isnan(p).all()
    assert remainder == 0


def test_stochastic_rounding_of_special_values() -> None:
    """Infinities and exact values stay, NaNs become 0x7fc0, the largest floats become infinite now and then."""
    largest = np.float32(torch.finfo(torch.float32).max)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.5, 1e-40, largest], np.float32)
    x = np.tile(special, 1024)
    random = np.arange(x.size, dtype=np.uint32) * 7919 % 65536
    # The kernel's own numbers are compared in test_adam_matrix.py; this is the reference they are compared with.
    got = to_bf16_stochastic(x, random).reshape(-1, special.size)
    assert (got[:, :2] == [0x7F80, 0xFF80]).all()
    assert (got[:, 2] == 0x7FC0).all()
    assert (got[:, 3:7] == [0x0000, 0x8000, 0x3F80, 0xBFC0]).all()
    assert set(got[:, 8].tolist()) == {0x7F80}


@pytest.mark.slow
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("part", range(4))
def test_every_float(part: int) -> None:
    """All 2^32, in four parts: cast to 16 bits as torch does it, and as a split master there and back."""
    block, first = 1 << 18, part * 2**30 - 2**31  # blocks that stay in the cache
    zeros = torch.zeros(block)
    for begin in range(first, first + 2**30, block):
        bit = torch.arange(begin, begin + block, dtype=torch.int32)
        x = bit.view(torch.float32)
        nan = x.isnan()
        for dtype, bits_of_nan in ((torch.float16, 0x7E00), (torch.bfloat16, 0x7FC0)):
            to = torch.empty(block, dtype=dtype)
            core.copy_all([to], [x])
            expected = torch.where(nan, bits_of_nan, x.to(dtype).view(torch.int16))
            assert torch.equal(to.view(torch.int16), expected), hex(begin)
        high, low = split(x.numpy())
        again = rewritten(high, low, zeros)
        assert np.array_equal(again[0], high) and np.array_equal(again[1], low), hex(begin)
        exact = join(*again).view(np.int32)
        assert ((exact == bit.numpy()) | nan.numpy()).all(), hex(begin)
