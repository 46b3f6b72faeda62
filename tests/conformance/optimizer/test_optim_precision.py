"""Every precision of ShardedAdamW: the same bits at any world size and bucket size, and near torch's own results."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
    TINY,
    Run,
    assert_as_local,
    assert_as_torch,
    dyadic,
    loss_of,
    make_params,
    on_ranks,
    outcome_of_torch,
    run_local,
    share,
)

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def test_a_bfloat16_second_moment_is_rounded_stochastically() -> None:
    """Else the test above would say nothing of random bits."""
    param = Parameter(torch.zeros(4096))
    opt = ShardedAdamW([param], state_dtype=BF16)
    grad = torch.linspace(0.5, 1.5, 4096)
    param.grad = grad.clone()
    opt.step()
    state = opt.state_dict()["state"][0]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == BF16
    exact = (1 - 0.999) * grad.double().square()
    assert_bitwise_equal(state["exp_avg"], (0.1 * grad.double()).float().to(BF16), "m is rounded to nearest")
    away = (state["exp_avg_sq"] != exact.to(BF16)).float().mean()
    assert 0.1 < away < 0.5, away
    assert abs((state["exp_avg_sq"].double() / exact - 1).mean()) < 2e-4, "unbiased"


def four_dtypes() -> list[Parameter]:
    return [p for i, dtype in enumerate((F32, BF16, F16, F64)) for p in make_params(dtype, seed=i)]


@pytest.mark.parametrize(
    "options",
    [{}, {"master_weights": "none", "state_dtype": BF16}, {"reduce_dtype": F32, "amsgrad": True}],
    ids=["defaults", "none", "amsgrad"],
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_dtypes_in_one_group(world: int, options: dict[str, Any]) -> None:
    """float64 parameters stay float64 throughout, whatever the options say of the others."""

    def body(comm: Communicator | None) -> tuple[list[Tensor], list[set[torch.dtype]]]:
        params = four_dtypes()[::-2]  # interleaved
        rank, world = (comm.rank, comm.size) if comm else (0, 1)
        opt = ShardedAdamW(params, lr=0.01, process_group=comm, **{**TINY, **options})
        for seed in range(3):
            loss_of(params, share(dyadic(params, seed), rank, world)).backward()
            opt.step()
            opt.zero_grad()
        saved = opt.state_dict()["state"]
        dtypes = [{saved[i][name].dtype for name in ("exp_avg", "exp_avg_sq")} for i in range(len(params))]
        values = [p.detach().clone() for p in params]
        opt.close()
        return values, dtypes

    expected, dtypes = body(None)
    states = options.get("state_dtype", F32)
    assert dtypes == [{F64} if p.dtype == F64 else {states} for p in expected]
    for values, ranks_dtypes in run_local(world, body):
        assert_bitwise_equal(values, expected)
        assert ranks_dtypes == dtypes


def clipped(run: Run) -> None:
    for step in range(5):
        run.backward(step)
        run.clip(0.7)
        run.step()
        run.see(run.opt.full_grad(run.params[0]))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=str)
def test_float64_models_train_in_float64(options: dict[str, Any]) -> None:
    """Norm, clip coefficient and full_grad included: 1e-13 is far below float32."""
    mine = assert_as_local(clipped, dtype=F64, worlds=[2, 4], lr=0.01, **options)
    assert_as_torch(mine, outcome_of_torch(clipped, dtype=F64, lr=0.01, **options), rtol=1e-13, atol=1e-15)
    assert all(p.dtype == F64 for p in mine.params)
    assert all(isinstance(norm, Tensor) and norm.dtype == F64 for norm in mine.seen[::2])
    assert all(state[name].dtype == F64 for state in mine.states for name in state if name != "step")


@pytest.mark.parametrize("world", [2, 3])
def test_stock_clipping_of_float64_gradients(world: int) -> None:
    def body(comm: Communicator | None) -> tuple[Tensor, list[Tensor]]:
        params = [Parameter(torch.linspace(-1, 1, 300, dtype=F64)), Parameter(torch.ones(7, dtype=F64))]
        opt: Any = ShardedAdamW(params, process_group=comm, **TINY) if comm else torch.optim.AdamW(params)
        sum((p.square() * p).sum() for p in params).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        return norm.clone(), [p.detach().clone() for p in params]

    norm, expected = body(None)
    for theirs, params in run_local(world, body):
        assert theirs.dtype == F64
        torch.testing.assert_close(theirs, norm, rtol=1e-14, atol=0)
        torch.testing.assert_close(params, expected, rtol=1e-13, atol=1e-15)


BYTES = [  # dtype, options, bytes per element of gradient shard and of states
    (F32, {}, 4, 8),
    (F32, {"state_dtype": BF16, "amsgrad": True}, 4, 6),
    (BF16, {}, 4, 12),
    (BF16, {"master_weights": "bf16_remainder"}, 4, 10),
    (BF16, {"master_weights": "bf16_remainder", "state_dtype": BF16, "accum_dtype": BF16}, 2, 6),
    (BF16, {"master_weights": "none", "state_dtype": BF16}, 4, 4),
    (F16, {}, 4, 12),
    (F64, {"state_dtype": None, "amsgrad": True}, 8, 24),
]


@pytest.mark.parametrize(("dtype", "options", "grad_bytes", "state_bytes"), BYTES, ids=str)
def test_memory_is_what_the_dtypes_take(
    dtype: torch.dtype, options: dict[str, Any], grad_bytes: int, state_bytes: int
) -> None:
    """A `BYTES` row is a row of the table in docs/numerics.md."""

    def body(comm: Communicator | None) -> dict[str, int]:
        params = [Parameter(torch.zeros(1024, dtype=dtype))]
        opt = ShardedAdamW(params, process_group=comm, **options)
        params[0].sum().backward()
        memory = opt.memory_summary()
        opt.zero_grad()
        opt.close()
        return memory

    size = dtype.itemsize
    expected = {"params": 1024 * size, "grads": 1024 * size, "states": 1024 * state_bytes, "pool": 0}
    memory = body(None)
    assert {name: memory[name] for name in expected} == expected
    for memory in run_local(2, body):
        expected = {"params": 1024 * size, "grads": 512 * grad_bytes, "states": 512 * state_bytes}
        assert {name: memory[name] for name in expected} == expected


def accumulated(comm: Communicator, dtype: torch.dtype, accum_dtype: torch.dtype | None) -> Tensor | None:
    """Two windows of gradients 1 and 1/256, whose sum needs nine bits."""
    param = Parameter(torch.zeros(70, dtype=dtype))
    opt = ShardedAdamW([param], process_group=comm, accum_dtype=accum_dtype, reduce_dtype=F32)
    param.sum().backward()
    opt.grad_sync()
    (param / 256).sum().backward()
    return opt.full_grad(param)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_accum_dtype_is_what_windows_add_up_in(dtype: torch.dtype) -> None:
    exact = torch.full((70,), 1 + 1 / 256)
    for whole in run_local(2, functools.partial(accumulated, dtype=dtype, accum_dtype=None)):
        assert_bitwise_equal(whole, exact)
    for whole in run_local(2, functools.partial(accumulated, dtype=dtype, accum_dtype=BF16)):
        assert_bitwise_equal(whole, torch.ones(70))


@pytest.mark.parametrize("world", [None, 2])
def test_amsgrad_cannot_be_switched_while_training(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm)
        loss_of(params, dyadic(params, 0)).backward()
        before = [p.detach().clone() for p in params]
        opt.param_groups[0]["amsgrad"] = True
        with pytest.raises(ValueError, match="amsgrad was False when the optimizer was made and is True"):
            opt.step()
        assert_bitwise_equal([p.detach() for p in params], before)
        assert all(opt.state[p]["step"] == 0 for p in params)
        opt.param_groups[0]["amsgrad"] = False
        opt.step()

    on_ranks(world, body)


def test_flags_of_groups_that_differ_are_refused() -> None:
    for flag, value in (("amsgrad", True), ("decoupled_weight_decay", False)):
        params = make_params()
        groups = [{"params": params[:3], flag: value}, {"params": params[3:]}]
        with pytest.raises(ValueError, match=f"{flag} must be the same in all parameter groups"):
            ShardedAdamW(groups)


def test_a_remainder_in_a_mixed_model_is_for_its_bfloat16_parameters() -> None:
    params = [Parameter(torch.ones(3, dtype=dtype)) for dtype in (F32, BF16, F64)]
    opt = ShardedAdamW(params, master_weights="bf16_remainder")
    assert [sorted(set(opt.state[p]) & {"remainder", "master_param"}) for p in params] == [[], ["remainder"], []]
    with pytest.raises(ValueError, match="bf16_remainder.*torch.bfloat16 and torch.float16"):
        ShardedAdamW([params[1], Parameter(torch.ones(3, dtype=F16))], master_weights="bf16_remainder")
