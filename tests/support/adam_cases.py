"""Rows of every kind for the tests of Adam, and how they are stepped: by the op, and through a table."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from bucketwheel.kernels import ops
from bucketwheel.native import core
from tests.support.reference import Adam, bits
from tests.support.reference_rows import Rounding, Row, split, tensor_of

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# Where the weight is kept, and the parameter's dtype.
WEIGHTS = [
    ("param", F32),
    ("param", BF16),
    ("param", F16),
    ("master", BF16),
    ("master", F16),
    ("remainder", BF16),
]
# (weight, p, g, state)
KINDS = [(w, p, g, s) for (w, p), g, s in itertools.product(WEIGHTS, (F32, BF16, F16), (F32, BF16))]
KINDS.append(("param", F64, F64, F64))


def ids(kind: tuple[Any, ...]) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in kind)


def make(kind: tuple[str, torch.dtype, torch.dtype, torch.dtype], numel: int, amsgrad: bool, seed: int = 0) -> Row:
    """Magnitudes over many decades, zeros, a few infinities and NaNs."""
    weight, p_dtype, g_dtype, s_dtype = kind
    rng = np.random.default_rng(seed)

    def wide(low: float, high: float) -> torch.Tensor:
        x = rng.choice([-1.0, 1.0], numel) * 10.0 ** rng.uniform(low, high, numel)
        x[rng.integers(0, max(1, numel), numel // 17)] = 0.0
        return torch.from_numpy(x)

    def spoil(x: torch.Tensor) -> torch.Tensor:
        for place, value in ((97, math.nan), (161, math.inf), (225, -math.inf)):
            x[place : place + 1] = value
        return x

    master = wide(-3, 2).float()
    row = Row(wide(-3, 2).to(p_dtype), spoil(wide(-20 if g_dtype == F32 else -6, 3)).to(g_dtype), wide(-9, 1).to(s_dtype),
              wide(-18, 3).abs().to(s_dtype))  # fmt: skip
    row.v[401:402] = math.inf  # with finite m: the weight only decays
    row.vmax = wide(-18, 3).abs().to(s_dtype) if amsgrad else None
    if row.vmax is not None:
        row.vmax[300:301] = math.nan
    if weight == "master":
        step = 2**13 if p_dtype == F16 else 2**16
        as_bits = master.view(torch.int32)
        as_bits[::3] = as_bits[::3] // step * step + step // 2  # halfway between two parameters
        spoil(master[20:])
        row.master = master
        rounded = slice(0, numel // 2)  # nobody has written to these
        row.p[rounded] = master[rounded].to(p_dtype)
        if p_dtype == BF16:
            row.p[: numel // 4] = tensor_of(split(master[: numel // 4].numpy())[0], BF16)
        row.p[3:4] = -0.0
        row.p[100:101] = math.nan
    elif weight == "remainder":
        high, low = split(master.numpy())
        row.p, row.remainder = tensor_of(high, BF16), tensor_of(low, torch.int16)
    return row


DEFAULT = Rounding()


def run_op(rows: list[Row], args: Adam, rounding: Rounding = DEFAULT, **more: Any) -> None:
    columns = list(zip(*(row.tensors() for row in rows), strict=True))
    optional = [None if all(x is None for x in column) else list(column) for column in columns[4:]]
    ops.adam_step(
        *map(list, columns[:4]),
        args.step,
        **args.arguments(),
        max_exp_avg_sqs=optional[0],
        master_params=optional[1],
        remainders=optional[2],
        state_rounding="stochastic" if rounding.stochastic else "nearest",
        seed=rounding.seed,
        on_external_update="resync" if rounding.resync else "ignore",
        **{"param_ids": [rounding.param] * len(rows), **more},
    )


def table_of(rows: list[tuple[Row, int, int]]) -> Any:
    """Of (row, param, param_begin)."""
    table = core.AdamTable()
    for row, param, begin in rows:
        table.add(
            row.p, row.g, row.m, row.v, row.master, 0, max_exp_avg_sq=row.vmax, remainder=row.remainder, param=param,
            param_begin=begin,
        )  # fmt: skip
    return table


def run_table(rows: list[tuple[Row, int, int]], args: Adam, rounding: Rounding) -> None:
    table_of(rows).step(
        [core.AdamGroup(args.lr, args.beta1, args.beta2, args.eps, args.weight_decay)],
        core.AdamArguments(
            torch.full((len(rows),), args.step),
            args.grad_scale,
            core.AdamOptions(
                args.decoupled,
                args.maximize,
                rounding.stochastic,
                rounding.seed,
                resync=rounding.resync,
            ),
        ),
    )


def assert_same(got: Row, expected: Row, what: object = "") -> None:
    for name, a, b in zip(
        ("p", "g", "m", "v", "vmax", "master", "remainder"), got.tensors(), expected.tensors(), strict=True
    ):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            same = torch.equal(a, b) if name == "remainder" else torch.equal(bits(a), bits(b))
            assert same, f"{name} differs: {what}"
