"""What Adam's op and table refuse. Nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bucketwheel.kernels import ops
from bucketwheel.native import core

NUMELS = (6, 4, 5)


def good() -> dict[str, list[Any]]:
    generator = torch.Generator().manual_seed(0)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    return {name: [torch.rand(n, generator=generator) for n in NUMELS] for name in names}


def made(change: Callable[[Any], Any]) -> list[Any]:
    """A list that rows need not have."""
    return [None, change(torch.zeros(4)), None]


# What becomes of the second tensor of each list, the error and what it says.
BAD: list[tuple[dict[str, Callable[[torch.Tensor], Any]], type[Exception], str]] = [
    ({"params": lambda x: x.int()}, TypeError, r"params\[1\] is int32, expected float32, bfloat16, float16 or float64"),
    ({"params": lambda x: x.to(torch.complex64)}, TypeError, r"params\[1\]: unsupported dtype"),
    ({"params": lambda x: x.double()}, TypeError, r"exp_avgs\[1\] is float32, expected float64"),
    ({"params": lambda x: torch.zeros(8)[::2]}, ValueError, r"params\[1\] has gaps or overlaps itself"),
    ({"params": lambda x: torch.zeros(1).expand(4)}, ValueError, r"params\[1\] has gaps or overlaps itself"),
    ({"grads": lambda x: x.double()}, TypeError, r"grads\[1\] is float64, expected float32, bfloat16 or float16"),
    ({"grads": lambda x: torch.zeros(8)[::2]}, ValueError, r"grads\[1\] has strides \[2\], params\[1\] has \[1\]"),
    ({"grads": lambda x: None}, TypeError, r"grads\[1\]: expected a torch.Tensor, got NoneType"),
    ({"grads": lambda x: x.to("meta")}, TypeError, r"grads\[1\] has no strided memory"),
    ({"exp_avgs": lambda x: x.to_sparse()}, TypeError, r"exp_avgs\[1\] has no strided memory"),
    ({"exp_avgs": lambda x: x.half()}, TypeError, r"exp_avgs\[1\] is float16, expected float32 or bfloat16"),
    ({"exp_avgs": lambda x: x[:3]}, ValueError, r"exp_avgs\[1\] has shape \[3\], params\[1\] has \[4\]"),
    ({"exp_avg_sqs": lambda x: x.bfloat16()}, TypeError, r"exp_avg_sqs\[1\] is bfloat16, expected float32"),
    ({"max_exp_avg_sqs": lambda x: x.bfloat16()}, TypeError, r"max_exp_avg_sqs\[1\] is bfloat16, expected float32"),
    ({"max_exp_avg_sqs": lambda x: x[:3]}, ValueError, r"max_exp_avg_sqs\[1\] has shape \[3\], params\[1\] has \[4\]"),
    ({"master_params": lambda x: x}, TypeError, r"params\[1\] is float32 and takes no master_params"),
    ({"remainders": lambda x: x.short()}, TypeError, r"params\[1\] is float32 and takes no remainders"),
    (
        {"params": lambda x: x.bfloat16(), "remainders": lambda x: x.int()},
        TypeError,
        r"remainders\[1\] is int32, expected int16",
    ),
    (
        {"params": lambda x: x.bfloat16(), "master_params": lambda x: x.double()},
        TypeError,
        r"master_params\[1\] is float64, expected float32",
    ),
    (
        {"params": lambda x: x.bfloat16(), "master_params": lambda x: x, "remainders": lambda x: x.short()},
        ValueError,
        r"params\[1\] has both master_params and remainders",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[b[2].replace("\\", "")[:40] for b in BAD])
def test_a_bad_tensor_is_named_and_nothing_changes(change, error, message) -> None:
    lists = good()
    for name, function in change.items():
        if name in lists:
            lists[name][1] = function(lists[name][1])
        else:
            lists[name] = made(function)
    count = [torch.tensor(3.0) for _ in NUMELS]
    with pytest.raises(error, match=message):
        ops.adam_step(**lists, steps=count, lr=1e-3)
    for name, tensors in good().items():
        for index in (0, 2):  # the good ones beside it
            assert torch.equal(lists[name][index], tensors[index]) and lists[name][index]._version == 0
    assert [float(c) for c in count] == [3.0] * 3


def test_tensors_that_share_memory_are_refused() -> None:
    whole = torch.zeros(12)
    half = torch.zeros(4).bfloat16()
    for changes, message in (
        ({"exp_avgs": whole[:4], "exp_avg_sqs": whole[:4]}, r"exp_avgs\[1\] and exp_avg_sqs\[1\] share memory"),
        ({"params": whole[:4], "grads": whole[3:7]}, r"params\[1\] and grads\[1\] share memory"),
        ({"params": half, "remainders": half.view(torch.int16)}, r"params\[1\] and remainders\[1\] share memory"),
    ):
        lists = good()
        for name, tensor in changes.items():
            lists.setdefault(name, [None] * 3)[1] = tensor
        with pytest.raises(ValueError, match=message):
            ops.adam_step(**lists, steps=1, lr=1e-3)


ARGUMENTS = [
    ({"grads": [torch.ones(6)]}, ValueError, "grads has 1 tensors, params has 3"),
    ({"master_params": [None]}, ValueError, "master_params has 1 tensors, params has 3"),
    ({"steps": [1, 2]}, ValueError, "steps has 2 tensors, params has 3"),
    ({"steps": 0}, ValueError, r"steps\[0\] is 0: steps count from 1"),
    ({"steps": [1, torch.zeros(2), 1]}, ValueError, r"steps\[1\] has shape \[2\]"),
    ({"steps": [1, torch.zeros(1, dtype=torch.int32), 1]}, TypeError, r"steps\[1\] is int32"),
    ({"steps": [1, 1, torch.tensor(-2.0)]}, ValueError, r"steps\[2\] is negative"),
    ({"lr": "x"}, TypeError, r"lr is 'x', expected a number"),
    ({"betas": (0.9, 0.99, 0.999)}, ValueError, r"betas is \(0.9, 0.99, 0.999\), expected two numbers"),
    ({"betas": ("a", 0.9)}, TypeError, r"betas\[0\] is 'a', expected a number"),
    ({"weight_decay": [1]}, TypeError, r"weight_decay is \[1\], expected a number"),
    ({"seed": -1}, ValueError, r"seed is -1, expected an int from 0 to 2\*\*64 - 1"),
    ({"param_ids": [1, 2]}, ValueError, "param_ids has 2 entries, params has 3"),
    ({"param_ids": [0, 0, -1]}, ValueError, r"param_ids is \[0, 0, -1\], expected ints from 0 to 2\*\*30 - 1"),
    ({"param_ids": [0, 0, 2**30]}, ValueError, "row 2 is of parameter 1073741824"),
    ({"decoupled": "no"}, TypeError, r"decoupled is 'no', expected a bool"),
    ({"state_rounding": "up"}, ValueError, "state_rounding is 'up', expected 'stochastic' or 'nearest'"),
    ({"on_external_update": "error"}, ValueError, "on_external_update is 'error', expected 'ignore' or 'resync'"),
]


@pytest.mark.parametrize(("change", "error", "message"), ARGUMENTS, ids=[a[2][:30] for a in ARGUMENTS])
def test_a_bad_argument_is_named_and_nothing_changes(change, error, message) -> None:
    lists = good()
    with pytest.raises(error, match=message) as caught:
        ops.adam_step(**{**lists, "steps": 1, "lr": 1e-3, **change})
    assert len(str(caught.value)) < 120, "no tensor is printed"
    assert all(torch.equal(x, y) for x, y in zip(lists["params"], good()["params"], strict=True))


def test_a_table_refuses_what_does_not_fit_it() -> None:
    table = core.AdamTable()
    rows = [list(row) for row in zip(*good().values(), strict=True)]
    for group, (p, g, m, v) in enumerate(rows[:2]):
        table.add(p, g, m, v, None, group)
    with pytest.raises(TypeError, match=r"exp_avgs\[2\] is float16, expected float32 or bfloat16"):
        table.add(rows[2][0], rows[2][1], rows[2][2].half(), rows[2][3], None, 0)
    with pytest.raises(ValueError, match="of parameter 0 from element -1"):
        table.add(*rows[2], None, 0, param_begin=-1)
    groups = [core.AdamGroup(1e-3, 0.9, 0.999, 1e-8, 0.1)] * 2
    ones = torch.ones(2, dtype=torch.int64)
    for message, arguments, given, first, last in (
        ("steps has 1 entries for 2 rows", core.AdamArguments(ones[:1]), groups, 0, -1),
        ("used has 1 entries for 2 rows", core.AdamArguments(ones, used=ones[:1].byte()), groups, 0, -1),
        ("gscale has 3 entries for 2 rows", core.AdamArguments(ones, factors=torch.ones(3).double()), groups, 0, -1),
        ("noop has 2 elements", core.AdamArguments(ones, noop=torch.zeros(2)), groups, 0, -1),
        ("row 1 is of group 1 of 1", core.AdamArguments(ones), groups[:1], 0, -1),
        ("row 0 takes step 0", core.AdamArguments(0 * ones), groups, 0, -1),
        (r"rows \[1, 3\) of 2", core.AdamArguments(ones), groups, 1, 3),
        (r"rows \[2, 1\) of 2", core.AdamArguments(ones), groups, 2, 1),
    ):
        with pytest.raises(ValueError, match=message):
            table.step(given, arguments, first, last)
    with pytest.raises(TypeError, match="steps is float32, expected int64"):
        table.step(groups, core.AdamArguments(torch.ones(2)))
    assert all(
        torch.equal(x, y)
        for row, old in zip(rows, zip(*good().values(), strict=True), strict=True)
        for x, y in zip(row, old, strict=True)
    )
