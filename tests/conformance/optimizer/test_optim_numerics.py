"""What ShardedAdamW computes beside the suite's scripts: against torch and exact sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import (
    TINY,
    WORLDS,
    Run,
    dyadic,
    joined_states,
    loss_of,
    make_params,
    on_ranks,
    run_local,
    share,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# How far parameters may be from torch's after 100 steps (rtol, atol). Its fused kernel rounds in our order: the row's
# numbers, of which a tenth is used. foreach adds every product up in another order; measured: 1.8 times the row's.
FROM_TORCH = {"fused": (1e-6, 1e-8), "foreach": (4e-6, 1e-7)}


@pytest.mark.parametrize("world", [None, 3])
def test_100_steps_stay_with_torch(world: int | None) -> None:
    """Sums and means are exact at every world, so only the step itself can deviate."""
    size = world or 1

    def gradients(params: list[Parameter], step: int, rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return [torch.randn(p.shape, generator=generator).mul(1024).round().div(1024) * size for p in params]

    def body(comm: Communicator | None) -> tuple[list[Tensor], dict[str, Any]]:
        params = make_params()
        opt = ShardedAdamW(params, lr=0.01, weight_decay=0.1, process_group=comm, **TINY)
        for step in range(100):
            loss_of(params, gradients(params, step, comm.rank if comm else 0)).backward()
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in params], opt.state_dict()

    ranks = on_ranks(world, body)
    states = joined_states([saved for _, saved in ranks], make_params())
    for stock, (rtol, atol) in FROM_TORCH.items():
        reference = make_params()
        theirs = torch.optim.AdamW(reference, lr=0.01, weight_decay=0.1, **{stock: True})
        for step in range(100):
            everyone = [gradients(reference, step, rank) for rank in range(size)]
            for p, *grads in zip(reference, *everyone, strict=True):
                p.grad = torch.zeros_like(p).copy_(torch.stack(grads).sum(0) / size)
            theirs.step()
        for params, _ in ranks:
            for p, q in zip(params, reference, strict=True):
                torch.testing.assert_close(p, q.detach(), rtol=rtol, atol=atol, msg=lambda m, s=stock: f"{s}: {m}")
        for state, q in zip(states, reference, strict=True):
            expected = theirs.state[q]
            assert float(state["step"]) == float(expected["step"]) == 100
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[name], expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("master_weights", ["auto", "bf16_remainder", "none"])
@pytest.mark.parametrize("world", [1, 3])
def test_updates_below_the_precision_of_a_parameter_accumulate(world: int, master_weights: str) -> None:
    """Without a master they are lost, as docs/numerics.md says."""

    def body(comm: Communicator) -> Tensor:
        param = Parameter(torch.ones(300, dtype=BF16))
        options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0, "master_weights": master_weights, **TINY}
        opt = ShardedAdamW([param], process_group=comm, **options)
        for step in range(60):
            param.sum().backward()
            opt.step()
            opt.zero_grad()
            if step == 10:
                assert (param == 1.0).all(), "one update is far below the distance of bfloat16 numbers"
        return param.detach().clone()

    for param in run_local(world, body):
        end = 1.0 if master_weights == "none" else 1 - 60e-4
        torch.testing.assert_close(param.float(), torch.full((300,), end), atol=4e-3 * (end < 1), rtol=0)


@pytest.mark.parametrize("dtype, state_dtype", [(F32, BF16), (BF16, F32), (F16, BF16)], ids=str)
@pytest.mark.parametrize("world", [None, 2])
def test_no_way_of_loading_casts_states(world: int | None, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Optimizer.load_state_dict casts them to the parameter's dtype."""
    theirs = make_params(dtype)
    stock = torch.optim.AdamW(theirs, foreach=False)
    loss_of(theirs, dyadic(theirs, 0)).backward()
    stock.step()

    def body(comm: Communicator | None) -> None:
        params = make_params(dtype)
        opt = ShardedAdamW(params, process_group=comm, state_dtype=state_dtype, **TINY)
        run = Run(opt, params)
        run.backward(0)
        run.step()
        mine = opt.state_dict()
        doubles = {i: {**entry, "exp_avg": entry["exp_avg"].double()} for i, entry in mine["state"].items()}
        for saved in (mine, {**mine, "state": doubles}, stock.state_dict()):
            opt.load_state_dict(saved)
            for entry in (*opt.state_dict()["state"].values(), *opt.state.values()):
                assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == state_dtype
                assert "master_param" not in entry or entry["master_param"].dtype == F32
            run.backward(1)
            run.step()

    on_ranks(world, body)


# ---- ranges and roundings


@pytest.mark.parametrize("reduce_dtype", [None, F16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_float16_gradients_do_not_overflow_where_ddp_does_not(world: int, reduce_dtype: torch.dtype | None) -> None:
    """DDP divides by the world size before it adds. Our sums are float32 beyond the buckets."""
    largest = 65504.0

    def body(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        param = Parameter(torch.zeros(300, dtype=F16))
        opt = ShardedAdamW([param], process_group=comm, reduce_dtype=reduce_dtype, **TINY)
        (param * largest).sum().backward()
        whole, norm = opt.full_grad(param), opt.local_grad_norm()
        opt.step()
        assert whole is not None
        return whole, norm, param.detach().clone()

    for whole, norm, param in run_local(world, body):
        assert_bitwise_equal(whole, torch.full((300,), largest), "each rank has it, so the mean is it")
        torch.testing.assert_close(norm, torch.tensor(largest * math.sqrt(300)))
        torch.testing.assert_close(param, torch.full((300,), -1e-3, dtype=F16))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("accum_dtype", [None, BF16], ids=str)
def test_accum_dtype_is_what_windows_add_up_in(dtype: torch.dtype, accum_dtype: torch.dtype | None) -> None:
    """Two windows of gradients 1 and 1/256, whose sum needs nine bits."""

    def body(comm: Communicator) -> Tensor | None:
        param = Parameter(torch.zeros(70, dtype=dtype))
        opt = ShardedAdamW([param], process_group=comm, accum_dtype=accum_dtype, reduce_dtype=F32)
        param.sum().backward()
        opt.grad_sync()
        (param / 256).sum().backward()
        return opt.full_grad(param)

    for whole in run_local(2, body):
        assert_bitwise_equal(whole, torch.full((70,), 1.0 if accum_dtype else 1 + 1 / 256))


# ---- who sees what is written


@pytest.mark.parametrize("overlap_param_sync", [False, True])
@pytest.mark.parametrize("world", [None, 2])
def test_a_step_between_forward_and_backward_is_seen_by_autograd(world: int | None, overlap_param_sync: bool) -> None:
    """And so is rank 0's value, which the others take."""

    def body(comm: Communicator | None) -> None:
        params = make_params()
        made_before = params[6].square().sum()
        opt = ShardedAdamW(params, process_group=comm, overlap_param_sync=overlap_param_sync, **TINY)
        if comm:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                made_before.backward()
        used, unused = params[0], params[3]
        used.sum().backward()
        stale, fine = used.square().sum(), unused.square().sum()
        opt.step()
        fine.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    on_ranks(world, body)


def test_without_broadcast_every_rank_trains_its_shards_of_its_own_values() -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], dict[str, Any]]:
        params = make_params(BF16, seed=0 if comm.rank == 0 else 1)
        before = [p.detach().clone() for p in params]
        opt = ShardedAdamW(params, process_group=comm, broadcast_params=False, **TINY)
        assert_bitwise_equal([p.detach() for p in params], before)
        loss_of(params, share(dyadic(params, 0), comm.rank, comm.size)).backward()
        opt.step()
        assert any(not torch.equal(p, b) for p, b in zip(params, before, strict=True))
        return [p.detach().clone() for p in params], opt.state_dict()

    ranks = run_local(3, body)
    for params, _ in ranks:
        assert_bitwise_equal(params, ranks[0][0])
    joined_states([saved for _, saved in ranks], make_params())
