"""Masters and remainders in torch: the same bits as the kernel's codec, and what becomes of them when others write."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bucketwheel.layout.masters import follow_param, is_rounded, join_master, load_master, master_of, split_master
from tests.support.reference_rows import join, split

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Zero, just below and above a tie, the last.
LOW_HALVES = [int(half, 16) for half in "0000 0001 7FFF 8000 8001 FFFF 1234 C0DE".split()]


def every_high_half() -> Tensor:
    """float32 of every upper half with each of LOW_HALVES: every exponent and sign, infinities, NaNs and ties."""
    highs = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    bits = np.concatenate([highs | np.uint32(low) for low in LOW_HALVES])
    return torch.from_numpy(bits.view(np.float32).copy())


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """NaN payloads excepted: torch's own casts to bfloat16 make others than the kernel."""
    kind = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    assert a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a[~a.isnan()].view(kind), b[~b.isnan()].view(kind))


def test_n5_a_split_is_the_kernels_and_joins_to_the_same_master() -> None:
    master = every_high_half()
    high, low = split_master(master)
    expected_high, expected_low = split(master.numpy())
    assert np.array_equal(high.view(torch.int16).numpy().view(np.uint16), np.asarray(expected_high).view(np.uint16))
    assert np.array_equal(low.numpy().view(np.uint16), np.asarray(expected_low).view(np.uint16))
    assert_same_bits(join_master(high, low), master)


def test_a_remainder_that_a_parameter_cannot_have_counts_as_0() -> None:
    """Whatever was left over from another value, the weight rounds to the parameter and is no NaN that was not there."""
    param = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)
    for low in LOW_HALVES:
        remainder = torch.full(param.shape, low, dtype=torch.int32).to(torch.int16)
        joined = join_master(param, remainder)
        assert torch.equal(joined.isnan(), param.isnan())
        finite = param.isfinite()
        assert_same_bits(split_master(joined[finite])[0], param[finite])
        assert joined[param == 0].abs().max() < 2**-133
        with np.errstate(invalid="ignore"):
            kernels = join(param.view(torch.int16).numpy().view(np.uint16), remainder.numpy().view(np.uint16))
        assert_same_bits(joined, torch.from_numpy(kernels))


def test_a_master_follows_a_parameter_that_it_does_not_round_to() -> None:
    for dtype in (BF16, F16):
        master = torch.tensor([1.0001, 1.0001, -2.5, 0.0, math.inf, 3.0])
        param = torch.tensor([1.0, 1.5, -2.5, -0.0, math.inf, math.nan]).to(dtype)
        state = {"master_param": master.clone()}
        follow_param(param, state)
        expected = torch.tensor([1.0001, 1.5, -2.5, -0.0, math.inf, math.nan])
        assert_same_bits(state["master_param"], expected)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_parameter_that_is_its_masters_rounding_was_not_written_to(dtype: torch.dtype) -> None:
    master = every_high_half()
    for param in (master.to(dtype), split_master(master)[0] if dtype == BF16 else master.to(dtype)):
        assert is_rounded(param, master).all()
        param[7] += 1
        assert is_rounded(param, master).logical_not().nonzero().flatten().tolist() == [7]


def test_either_kind_takes_the_masters_of_the_other() -> None:
    """Also in ties, where the two round differently; but for one float32 below, which a remainder cannot help."""
    master = every_high_half()
    master = master[master.isfinite() & (master.to(BF16) != 0)]
    high, low = split_master(master)
    state = {"master_param": torch.zeros_like(master)}
    load_master(high, state, master)
    follow_param(high, state)
    assert_same_bits(state["master_param"], master)

    even = master.to(BF16)
    kept = {"remainder": torch.zeros_like(low)}
    load_master(even, kept, master)
    follow_param(even, kept)
    joined = master_of(even, kept)
    assert joined is not None
    is_lower_of_a_tie = even.view(torch.int16) != high.view(torch.int16)
    assert is_lower_of_a_tie.sum() > 10_000
    is_overflow = even.isinf() & high.isinf()
    assert_same_bits(joined[~is_lower_of_a_tie & ~is_overflow], master[~is_lower_of_a_tie & ~is_overflow])
    below = master[is_lower_of_a_tie].view(torch.int32) - 1
    assert_same_bits(joined[is_lower_of_a_tie], below.view(F32))


@pytest.mark.parametrize("kept", ["none", "master_param", "remainder"])
def test_what_is_not_kept_is_not_made_up(kept: str) -> None:
    param = torch.tensor([1.0, 2.0]).to(BF16)
    state = {"none": {}, "master_param": {kept: param.float()}, "remainder": {kept: torch.zeros(2, dtype=torch.int16)}}
    found = master_of(param, state[kept])
    assert (found is None) == (kept == "none")
    load_master(param, state[kept], param.float() + 2**-10)
    follow_param(param, state[kept])
    again = master_of(param, state[kept])
    assert again is None or torch.equal(again, param.float() + 2**-10)
    if found is not None:
        assert torch.equal(found, param.float())
