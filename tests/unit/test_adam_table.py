"""Rows of the Adam kernel: what is stepped and what is left alone. What is refused: test_adam_refusals.py."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

from bucketwheel.kernels import ops
from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.native import core
from tests.support.reference import bits
from tests.support.simulated_cuda import Calls, posing

CHUNK = 8192  # AdamTable::kChunkNumel
LR = 1e-2


def group(**changes):
    return core.AdamGroup(**{"lr": LR, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, **changes})


def rows_of(sizes: list[int], seed: int = 0) -> list[list[torch.Tensor]]:
    """[p, g, m, v] for each size."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(n, generator=generator) for _ in range(3)] + [torch.rand(n, generator=generator)] for n in sizes
    ]


def table_of(rows: list[list[torch.Tensor]], groups: list[int] | None = None):
    table = core.AdamTable()
    for index, (p, g, m, v) in enumerate(rows):
        assert table.add(p, g, m, v, None, groups[index] if groups else 0) == index
    return table


def step_of(
    table: Any,
    groups: list[Any],
    steps: torch.Tensor,
    used: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    first_row: int = 0,
    last_row: int = -1,
) -> None:
    table.step(groups, core.AdamArguments(steps, used=used, factors=factors), first_row, last_row)


def clone(rows: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[x.clone() for x in row] for row in rows]


def one_by_one(rows: list[list[torch.Tensor]], step: int = 1, grad_scale: float = 1.0) -> list[list[torch.Tensor]]:
    """Each row stepped alone by the op, on copies."""
    out = clone(rows)
    for row in out:
        ops.adam_step(*([x] for x in row), step, lr=LR, weight_decay=0.1, grad_scale=grad_scale)
    return out


def assert_equal(got: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        for name, x, y in zip("pgmv", a, b, strict=True):
            assert torch.equal(bits(x), bits(y)), f"{name} of row {index}"


def numbers(rows: list, value: int = 1) -> torch.Tensor:
    return torch.full((len(rows),), value, dtype=torch.int64)


SIZES = {
    "one": [1],
    "edges": [1, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5],
    "zero first": [0, 0, 5, 3],
    "zero middle": [5, 0, 0, CHUNK, 0, 3],
    "zero last": [CHUNK, 3, 0, 0],
    "zero only": [0, 0],
    "none": [],
    "3,000 tensors": [i % 97 for i in range(3000)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("threads", [1, 2])
def test_a_table_steps_every_row_as_if_alone(sizes: list[int], threads: int) -> None:
    rows = rows_of(sizes)
    expected = one_by_one(rows)
    core.use_torch_threads(threads)
    try:
        table = table_of(rows)
        assert (table.rows, table.numel) == (len(sizes), sum(sizes))
        step_of(table, [group()], numbers(rows))
    finally:
        core.use_torch_threads(1)
    assert_equal(rows, expected)
    assert all(not torch.equal(a[0], b[0]) for a, b in zip(rows, rows_of(sizes), strict=True) if a[0].numel())


def test_each_row_has_its_own_step_use_factor_and_group() -> None:
    rows = rows_of([100, 50, CHUNK + 3, 70, 30, 30, 30])
    before = clone(rows)
    expected = clone(rows)
    # The last four differ from their neighbour in one thing each: group, factor, step.
    steps, factors, groups = [1, 5, 9, 2, 2, 2, 3], [1.0, 0.5, 0.25, 1.0, 1.0, 2.0, 2.0], [0, 1, 0, 1, 0, 0, 0]
    hyper = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.01, "weight_decay": 0.2}]
    for row, step, factor, g in zip(expected, steps, factors, groups, strict=True):
        ops.adam_step(*([x] for x in row), step, grad_scale=factor, **hyper[g])
    used = torch.tensor([1, 1, 0, 1, 1, 1, 1], dtype=torch.uint8)
    expected[2] = before[2]
    rows[2][1].fill_(float("nan"))  # an unused row is not even looked at
    expected[2][1].fill_(float("nan"))
    table = table_of(rows, groups)
    step_of(table, [group(**h) for h in hyper], torch.tensor(steps), used, torch.tensor(factors, dtype=torch.float64))
    assert_equal(rows, expected)


def test_row_ranges_together_are_one_step() -> None:
    rows = rows_of([10, 0, CHUNK * 2 + 1, 33, 0, 5])
    expected = one_by_one(rows, step=3, grad_scale=0.5)
    table = table_of(rows)
    for first, last in itertools.pairwise([0, 2, 2, 3, 5, 6]):
        before = clone(rows)
        step_of(table, [group()], numbers(rows, 3), None, torch.tensor([0.5], dtype=torch.float64), first, last)
        outside = [*range(first), *range(last, len(rows))]
        assert_equal([rows[i] for i in outside], [before[i] for i in outside])
    assert_equal(rows, expected)


@pytest.mark.parametrize("poses", [False, True], ids=["cpu", "simulated cuda"])
def test_what_the_norm_says_of_the_gradients_decides_on_a_step(poses: bool) -> None:
    """The flag of `l2_norm` goes into `adam_step` as it is. Nothing changes where it is set, the step counts neither."""

    def spoiled(value: float) -> list[list[torch.Tensor]]:
        rows = rows_of([100, CHUNK + 1])
        rows[1][1][5] = value
        return rows

    for value, is_finite in ((float("inf"), False), (2.0, True), (float("nan"), False)):
        expected, rows = spoiled(value), spoiled(value)
        counts = [torch.tensor(4.0), torch.tensor(7)]
        if is_finite:
            for row, step in zip(expected, (5, 8), strict=True):
                ops.adam_step(*([x] for x in row), step, lr=LR)
        with posing() if poses else contextlib.nullcontext():
            calls = Calls()
            nonfinite = ops.l2_norm([row[1] for row in rows], return_nonfinite=True)[1]
            assert nonfinite.dtype == torch.bool and nonfinite.shape == ()
            ops.adam_step(*zip(*rows, strict=True), counts, lr=LR, noop=nonfinite)
            assert calls.since().get("launch_adam", 0) == int(poses)
        assert bool(nonfinite) == (not is_finite)
        assert [int(count) for count in counts] == ([5, 8] if is_finite else [4, 7])
        assert_equal(rows, expected)


def test_gradients_can_be_exchanged() -> None:
    rows = rows_of([100, 0, 50])
    fresh = [[p, torch.randn(len(g)), m, v] for p, g, m, v in rows]
    fresh[2][1] = fresh[2][1].bfloat16()
    expected = clone(fresh)
    for row in expected:
        ops.adam_step(*([x] for x in row), 1, lr=LR, weight_decay=0.1)
    table = core.AdamTable()
    for p, _, m, v in rows:
        table.add(p, None, m, v, None, 0)
    with pytest.raises(ValueError, match="row 0 has no gradient"):
        step_of(table, [group()], numbers(rows))
    table.set_grads([row[1] for row in fresh[:2]])
    table.set_grads([fresh[2][1]], 2)
    step_of(table, [group()], numbers(rows))
    assert_equal(fresh, expected)
    # None for a row that is not used; a bad one changes none of them.
    with pytest.raises(ValueError, match=r"grads\[2\] has shape \[49\], params\[2\] has \[50\]"):
        table.set_grads([None, None, torch.zeros(49)])
    before = clone(fresh)
    step_of(table, [group()], numbers(rows, 2))
    assert not torch.equal(fresh[0][0], before[0][0])
    table.clear_grads()
    with pytest.raises(ValueError, match="row 0 has no gradient"):
        step_of(table, [group()], numbers(rows, 2))


def test_a_table_keeps_its_tensors_alive() -> None:
    table = core.AdamTable()
    p = torch.ones(1 << 20)
    table.add(p, torch.ones(1 << 20), torch.zeros(1 << 20), torch.zeros(1 << 20), None, 0)
    others = [torch.full((1 << 20,), 5.0) for _ in range(3)]  # would take over the memory of anything freed
    step_of(table, [group(weight_decay=0.0)], numbers([0]))
    torch.testing.assert_close(p, torch.full_like(p, 1 - LR))
    assert all(torch.equal(x, torch.full_like(x, 5.0)) for x in others)


def test_any_dense_layout_is_stepped_element_by_element() -> None:
    shape = (2, 3, 4, 5)
    torch.manual_seed(0)
    plain = [torch.randn(shape) for _ in range(3)] + [torch.rand(shape)]
    for layout in (
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    ):
        other = [layout(x.clone()) for x in plain]
        assert not other[0].is_contiguous()
        expected = [x.clone() for x in plain]
        ops.adam_step(*([x] for x in other), 1, lr=LR)
        ops.adam_step(*([x] for x in expected), 1, lr=LR)
        for a, b in zip(other, expected, strict=True):
            assert torch.equal(a, b)
        with pytest.raises(ValueError, match=r"grads\[0\] has strides"):
            ops.adam_step([other[0]], [plain[1]], [other[2]], [other[3]], 1, lr=LR)
    row = [torch.randn(4, 1), torch.randn(1, 4).t(), torch.randn(4, 1), torch.rand(4, 1)]  # a stride of one element
    ops.adam_step(*([x] for x in row), 1, lr=LR)


def test_steps_are_counted_as_in_torch_and_versions_move() -> None:
    rows = rows_of([6, 4, 5])
    expected = clone(rows)
    counts = [torch.tensor(4.0), torch.tensor(7), torch.tensor([2.0])]
    ops.adam_step(*zip(*rows, strict=True), counts, lr=LR)
    for row, t in zip(expected, (5, 8, 3), strict=True):
        ops.adam_step(*([x] for x in row), t, lr=LR)
    assert_equal(rows, expected)
    assert [c.item() for c in counts] == [5, 8, 3]
    for p, g, m, v in rows:
        assert (p._version, g._version, m._version, v._version) == (1, 0, 1, 1)
    assert [c._version for c in counts] == [1, 1, 1]
    shared = torch.tensor(0.0)
    ops.adam_step(*zip(*rows, strict=True), [shared] * 3, lr=LR)
    assert shared == 1.0
    # A write between forward and backward is noticed.
    w = rows[0][0].requires_grad_()
    loss = (w * w).sum()
    ops.adam_step([w.detach()], *([x] for x in rows[0][1:]), 1, lr=LR)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    ops.adam_step([], [], [], [], 1, lr=LR)
    ops.adam_step([], [], [], [], [], lr=LR)


def test_rows_take_their_groups_and_factors() -> None:
    ours = [x.bfloat16() for x in rows_of([4000])[0]]
    expected = [x.clone() for x in ours]
    rows = AdamRows(torch.zeros(1, dtype=torch.int64))
    rows.add(0, 0, *ours[:2], {"exp_avg": ours[2], "exp_avg_sq": ours[3]})
    hyper = {"lr": LR, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    flags = {"maximize": True, "decoupled_weight_decay": False}
    flags |= dict.fromkeys(["amsgrad", "capturable", "differentiable"], False)
    rows.begin_step([{**hyper, **flags}], [True], torch.tensor([0.5], dtype=torch.float64))
    rows.step()
    ops.adam_step(*([x] for x in expected), 1, **hyper, maximize=True, decoupled=False, grad_scale=0.5)
    assert_equal([ours], [expected])
