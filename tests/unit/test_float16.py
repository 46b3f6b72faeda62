"""The codecs: bfloat16, float16 and the split master, through the kernels and over every float."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from bucketwheel.kernels import ops
from bucketwheel.native import core
from bucketwheel.native import toolchain as _toolchain
from tests.support.reference import Adam, bits
from tests.support.reference_rows import bits_of, join, split, tensor_of, to_bf16_stochastic

ROOT = Path(__file__).resolve().parents[2]
EVERY = np.arange(2**16, dtype=np.uint32).astype(np.uint16)


def some_floats() -> np.ndarray:
    """Every upper half with the lower halves where rounding changes its mind, and a sample of all floats."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    parts = [upper | np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    parts.append(np.random.default_rng(0).integers(0, 2**32, 2**21, dtype=np.uint32))
    return np.concatenate(parts).view(np.float32)


def rewritten(high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The halves after a step that changes nothing: decoded and encoded."""
    p, remainder = tensor_of(high, torch.bfloat16), tensor_of(low, torch.int16)
    zero = torch.zeros(high.size)
    ops.adam_step([p], [zero], [zero.clone()], [zero.clone()], 1, lr=0.0, remainders=[remainder])
    return bits_of(p), bits_of(remainder)


def test_a_split_master_is_decoded_and_encoded_without_loss() -> None:
    x = some_floats()
    high, low = split(x)
    nan = np.isnan(x)
    assert np.array_equal(join(high, low).view(np.uint32)[~nan], x.view(np.uint32)[~nan])
    new_high, new_low = rewritten(high, low)
    assert np.array_equal(new_high, high)
    assert np.array_equal(new_low, low)
    assert (new_high[nan] == 0x7FC0).all()
    # A NaN that would carry into -0 if it were split as it is.
    p, remainder = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int16)
    nan_grad = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    ops.adam_step([p], [nan_grad], [torch.zeros(1)], [torch.zeros(1)], 1, lr=1.0, remainders=[remainder])
    assert torch.isnan(p).all()
    assert remainder == 0


def test_any_bfloat16_is_a_master_with_a_remainder_of_zeros() -> None:
    high, low = rewritten(EVERY, np.zeros(2**16, np.uint16))
    finite = ~np.isnan(torch.from_numpy(EVERY.view(np.int16)).view(torch.bfloat16).float().numpy())
    assert np.array_equal(high[finite], EVERY[finite])
    assert not low.any()


def test_the_decoded_master_is_what_is_computed_on() -> None:
    """L2 mode with beta1 = 0: m becomes the weight."""
    x = some_floats()
    x = x[np.isfinite(x)]
    high, low = split(x)
    m = torch.zeros(x.size)
    p, remainder = tensor_of(high, torch.bfloat16), tensor_of(low, torch.int16)
    args = Adam(beta1=0.0, weight_decay=1.0)
    ops.adam_step(
        [p], [torch.zeros(x.size)], [m], [torch.zeros(x.size)], 1, lr=0.0, betas=(args.beta1, args.beta2),
        weight_decay=args.weight_decay, decoupled=False, remainders=[remainder],
    )  # fmt: skip
    assert torch.equal(m, torch.from_numpy(x.copy()))


def test_stochastic_rounding_of_special_values() -> None:
    """Infinities and exact values stay, NaNs become 0x7fc0, the largest floats become infinite now and then."""
    largest = np.float32(torch.finfo(torch.float32).max)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.5, 1e-40, largest], np.float32)
    x = np.tile(special, 1024)
    random = np.arange(x.size, dtype=np.uint32) * 7919 % 65536
    v = torch.from_numpy(np.abs(x).copy()).to(torch.bfloat16)
    p = torch.from_numpy(x.copy()).to(torch.bfloat16)
    before, zero = p.clone(), torch.zeros(x.size, dtype=torch.bfloat16)
    ops.adam_step([p], [zero], [zero.clone()], [v], 1, lr=0.0, param_rounding="stochastic")
    assert torch.equal(bits(p), bits(before))
    # The kernel's own numbers are compared in test_adam_matrix.py; this is the reference they are compared with.
    got = to_bf16_stochastic(x, random).reshape(-1, special.size)
    assert (got[:, :2] == [0x7F80, 0xFF80]).all()
    assert (got[:, 2] == 0x7FC0).all()
    assert (got[:, 3:7] == [0x0000, 0x8000, 0x3F80, 0xBFC0]).all()
    assert set(got[:, 8].tolist()) == {0x7F80}


@pytest.mark.slow
@pytest.mark.timeout_s(400)
def test_every_float(tmp_path: Path) -> None:
    """All 2^32: the split master there and back, bfloat16 and float16 to nearest, the ends of stochastic rounding."""
    toolchain, recipe = _toolchain.find_toolchain(), _toolchain.read_recipe(ROOT / "csrc")
    binary = tmp_path / "every_float"
    source = ROOT / "tests" / "native" / "every_float.cpp"
    fast = ["-mf16c"] if platform.machine() == "x86_64" else []
    command = [*toolchain.cxx, *recipe.flags, *fast, f"-I{recipe.csrc}", str(source), "-o", str(binary)]
    subprocess.run(command, check=True, timeout=100)
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == f"{2**32} right"


@pytest.mark.slow
@pytest.mark.timeout_s(400)
def test_every_float_by_the_processor() -> None:
    """All 2^32 through the casts of the kernels in use, against torch's."""
    block = 1 << 24
    to = torch.empty(block, dtype=torch.float16)
    for begin in range(-(2**31), 2**31, block):
        x = torch.arange(begin, begin + block, dtype=torch.int32).view(torch.float32)
        core.copy_all([to], [x])
        expected = torch.where(x.isnan(), 0x7E00, x.half().view(torch.int16))
        assert torch.equal(to.view(torch.int16), expected), hex(begin)
