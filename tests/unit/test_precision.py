"""What is kept for which dtype, as docs/numerics.md has it in a table, and what is refused."""

from __future__ import annotations

import pytest
import torch

from bucketwheel.layout.precision import PARAM_DTYPES, Precision, norm_dtype_of

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def test_defaults_of_every_dtype() -> None:
    default = Precision()
    default.expect_fits(PARAM_DTYPES)
    assert [default.wire_of(dtype) for dtype in (F32, BF16, F16, F64)] == [F32, BF16, F32, F64]
    assert [default.accum_of(dtype) for dtype in (F32, BF16, F16, F64)] == [F32, F32, F32, F64]
    moments = {"exp_avg": F32, "exp_avg_sq": F32}
    assert default.kept_of(F32) == moments
    assert default.kept_of(BF16) == default.kept_of(F16) == {**moments, "master_param": F32}
    assert default.kept_of(F64) == {"exp_avg": F64, "exp_avg_sq": F64}


def test_float64_takes_no_option_but_amsgrad() -> None:
    asked = Precision("bf16_remainder", BF16, BF16, BF16, amsgrad=True)
    asked.expect_fits({BF16, F64})
    assert asked.wire_of(F64) == asked.accum_of(F64) == F64
    assert asked.kept_of(F64) == dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), F64)
    assert asked.kept_of(BF16) == {
        **dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), BF16),
        "remainder": torch.int16,
    }
    Precision(state_dtype=F64, reduce_dtype=F64, accum_dtype=F64).expect_fits({F64})


@pytest.mark.parametrize("name", ["state_dtype", "reduce_dtype", "accum_dtype"])
def test_what_an_option_cannot_be(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name}=torch.float64 is for float64 parameters only, but the parameters are "
    ):
        Precision(**{name: F64}).expect_fits({F32, F64})
    for bad in (torch.int32, torch.complex64, torch.float8_e4m3fn, "float32"):
        with pytest.raises(ValueError, match=f"{name} is .*None or one of torch.float32"):
            Precision(**{name: bad}).expect_fits({F32})
    if name != "reduce_dtype":  # its range is too small for sums, and for second moments
        with pytest.raises(ValueError, match=f"{name} is torch.float16"):
            Precision(**{name: F16}).expect_fits({F16})


@pytest.mark.parametrize("dtypes", [{F32}, {F16}, {BF16, F16}, {F32, F64}])
def test_remainders_are_for_bfloat16(dtypes: set[torch.dtype]) -> None:
    with pytest.raises(ValueError, match="'bf16_remainder' is for bfloat16 parameters"):
        Precision("bf16_remainder").expect_fits(dtypes)
    Precision("bf16_remainder").expect_fits(set())
    Precision("bf16_remainder").expect_fits({BF16, F32, F64})


def test_the_norm_is_as_precise_as_the_most_precise_gradient() -> None:
    assert norm_dtype_of([F32, BF16]) == norm_dtype_of([]) == norm_dtype_of([F16]) == F32
    assert norm_dtype_of([F32, F64]) == F64
