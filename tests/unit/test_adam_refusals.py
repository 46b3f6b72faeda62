"""What Adam's op and table refuse, by kind of row. Nothing has changed then."""

from __future__ import annotations

import pytest
import torch

from bucketwheel.kernels import ops
from tests.support.adam_cases import run_op, table_of
from tests.support.reference import Adam
from tests.support.reference_rows import Row

BAD = [
    ({"p": lambda x: x.int()}, TypeError, r"params\[0\] is int32, expected float32, bfloat16, float16 or float64"),
    ({"m": lambda x: x.half()}, TypeError, r"exp_avgs\[0\] is float16, expected float32 or bfloat16"),
    ({"v": lambda x: x.bfloat16()}, TypeError, r"exp_avg_sqs\[0\] is bfloat16, expected float32"),
    ({"p": lambda x: x.double()}, TypeError, r"exp_avgs\[0\] is float32, expected float64"),
    ({"g": lambda x: x.double()}, TypeError, r"grads\[0\] is float64, expected float32, bfloat16 or float16"),
    ({"vmax": lambda x: torch.zeros(8).bfloat16()}, TypeError, r"max_exp_avg_sqs\[0\] is bfloat16, expected float32"),
    ({"vmax": lambda x: torch.zeros(7)}, ValueError, r"max_exp_avg_sqs\[0\] has shape \[7\], params\[0\] has \[8\]"),
    ({"master": lambda x: torch.zeros(8)}, TypeError, r"params\[0\] is float32 and takes no master_params"),
    ({"remainder": lambda x: torch.zeros(8).short()}, TypeError, r"params\[0\] is float32 and takes no remainders"),
    (
        {"p": lambda x: x.half(), "remainder": lambda x: torch.zeros(8).short()},
        TypeError,
        r"params\[0\] is float16 and takes no remainders",
    ),
    (
        {"p": lambda x: x.bfloat16(), "remainder": lambda x: torch.zeros(8).int()},
        TypeError,
        r"remainders\[0\] is int32, expected int16",
    ),
    (
        {"p": lambda x: x.bfloat16(), "master": lambda x: torch.zeros(8).double()},
        TypeError,
        r"master_params\[0\] is float64, expected float32",
    ),
    (
        {
            "p": lambda x: x.bfloat16(),
            "master": lambda x: torch.zeros(8),
            "remainder": lambda x: torch.zeros(8).short(),
        },
        ValueError,
        r"params\[0\] has both master_params and remainders",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=range(len(BAD)))
def test_what_does_not_fit_is_refused(change, error, message) -> None:
    row = Row(torch.ones(8), torch.ones(8), torch.zeros(8), torch.zeros(8))
    for name, made in change.items():
        setattr(row, name, made(getattr(row, name)))
    before = row.clone()
    with pytest.raises(error, match=message):
        run_op([row], Adam())
    with pytest.raises(error, match=message):
        table_of([(row, 0, 0)])
    for a, b in zip(row.tensors(), before.tensors(), strict=True):
        assert a is None or torch.equal(a, b)


def test_other_bad_arguments_are_refused() -> None:
    row = Row(torch.ones(8).bfloat16(), torch.ones(8), torch.zeros(8), torch.zeros(8))
    shared = torch.zeros(12)
    row.v, row.vmax = shared[:8], shared[4:]
    with pytest.raises(ValueError, match=r"exp_avg_sqs\[0\] and max_exp_avg_sqs\[0\] share memory"):
        run_op([row], Adam())
    row.v, row.vmax = torch.zeros(8), None
    row.remainder = row.p.view(torch.int16)
    with pytest.raises(ValueError, match=r"params\[0\] and remainders\[0\] share memory"):
        run_op([row], Adam())
    row.remainder = None
    for more, message in (
        ({"param_ids": [1, 2]}, "param_ids has 2 entries, params has 1"),
        ({"param_ids": [2**30]}, "1073741824"),
        ({"state_rounding": "up"}, "state_rounding is 'up', expected 'stochastic' or 'nearest'"),
        ({"param_rounding": 1}, "param_rounding is 1, expected 'stochastic' or 'nearest'"),
    ):
        lists = {
            "params": [row.p],
            "grads": [row.g],
            "exp_avgs": [row.m],
            "exp_avg_sqs": [row.v],
            "steps": 1,
            "lr": 1e-3,
        }
        with pytest.raises(ValueError, match=message):
            ops.adam_step(**lists, **more)
    with pytest.raises(ValueError, match="of parameter 0 from element -1"):
        table_of([(row, 0, -1)])
    with pytest.raises(ValueError, match=r"max_exp_avg_sqs has 2 tensors, params has 1"):
        ops.adam_step([row.p], [row.g], [row.m], [row.v], 1, lr=1e-3, max_exp_avg_sqs=[None, None])
    with pytest.raises(TypeError, match=r"grads\[0\] is float32, expected float64"):
        ops.adam_step([row.p.double()], [row.g], [row.m.double()], [row.v.double()], 1, lr=1e-3)


SCALARS = [
    ({"lr": "x"}, TypeError, r"lr is 'x', expected a number"),
    ({"lr": None}, TypeError, r"lr is None, expected a number"),
    ({"betas": None}, ValueError, r"betas is None, expected two numbers"),
    ({"betas": (0.9, 0.99, 0.999)}, ValueError, r"betas is \(0.9, 0.99, 0.999\), expected two numbers"),
    ({"betas": ("a", 0.9)}, TypeError, r"beta1 is 'a', expected a number"),
    ({"eps": "x"}, TypeError, r"eps is 'x', expected a number"),
    ({"weight_decay": [1]}, TypeError, r"weight_decay is \[1\], expected a number"),
    ({"grad_scale": "x"}, TypeError, r"grad_scale is 'x', expected a number"),
    ({"seed": -1}, ValueError, r"seed is -1, expected an int from 0 to 2\*\*64 - 1"),
    ({"seed": 1.5}, ValueError, r"seed is 1.5, expected an int"),
    ({"param_ids": [-1]}, ValueError, r"param_ids is \[-1\], expected ints from 0 to 2\*\*30 - 1"),
    ({"decoupled": "no"}, TypeError, r"decoupled is 'no', expected a bool"),
    ({"maximize": "no"}, TypeError, r"maximize is 'no', expected a bool"),
]


@pytest.mark.parametrize(("change", "error", "message"), SCALARS, ids=[next(iter(c[0])) for c in SCALARS])
def test_a_bad_scalar_is_named_and_nothing_is_printed_but_it(change, error, message) -> None:
    tensors = [[torch.ones(1000)] for _ in range(4)]
    with pytest.raises(error, match=message) as caught:
        ops.adam_step(*tensors, 1, **{"lr": 1e-3, **change})
    assert len(str(caught.value)) < 100
    assert all(torch.equal(x, torch.ones(1000)) for (x,) in tensors)


def test_a_flag_that_is_taken_does_not_hide_what_is_wrong() -> None:
    tensors = [[torch.ones(8)] for _ in range(3)]
    with pytest.raises(ValueError, match=r"exp_avg_sqs\[0\] has shape \[7\]"):
        ops.adam_step(*tensors, [torch.ones(7)], 1, lr=1e-3, maximize=1)
