"""What ShardedAdamW computes beside the suite's scripts: the rows N of the optimizer's tests, against torch and exact sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.grads.bucket import GradBucket
from bucketwheel.layout.masters import split_master
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.optimizer.scripts import SCRIPTS, Setting
from tests.conformance.optimizer.suite import expect_conformance
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
from tests.support.requirements import slow_case

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# How far parameters may be from torch's after 100 steps (rtol, atol). Its fused kernel rounds in our order: the row's
# numbers, of which a tenth is used. foreach adds every product up in another order; measured: 1.8 times the row's.
FROM_TORCH = {"fused": (1e-6, 1e-8), "foreach": (4e-6, 1e-7)}


@pytest.mark.parametrize("world", [None, slow_case(1), 2, 3, slow_case(4)])
def test_n1_100_steps_stay_with_torch(world: int | None) -> None:
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


@pytest.mark.parametrize("world", [None, 2, 3])
def test_n5_a_remainder_is_the_master_bit_for_bit(world: int | None) -> None:
    """The trained weights are the same float32; the parameters are too, but where a rounding is a tie."""

    def body(comm: Communicator | None) -> list[tuple[dict[str, Any], list[Tensor]]]:
        left = []
        for master_weights in ("fp32", "bf16_remainder"):
            params = make_params(BF16)
            opt = ShardedAdamW(params, lr=0.01, process_group=comm, master_weights=master_weights, **TINY)
            run = Run(opt, params, comm.rank if comm else 0, comm.size if comm else 1)
            for step in range(6):
                run.backward(step)
                run.step()
            left.append((opt.state_dict(), [p.detach().clone() for p in params]))
            opt.close()
        return left

    ranks = on_ranks(world, body)
    whole, split = (
        [state["master_param"] for state in joined_states([left[i][0] for left in ranks], make_params())]
        for i in (0, 1)
    )
    assert_bitwise_equal(split, whole)
    for (_, values), (_, highs) in ranks:
        assert_bitwise_equal(values, [m.to(BF16) for m in whole])
        assert_bitwise_equal(highs, [split_master(m.contiguous())[0] for m in whole])


@pytest.mark.parametrize("master_weights", ["auto", "bf16_remainder", "none"])
@pytest.mark.parametrize("world", [1, 3])
def test_n6_updates_below_the_precision_of_a_parameter_accumulate(world: int, master_weights: str) -> None:
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
def test_n7_no_way_of_loading_casts_states(world: int | None, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
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


# ---- N8 and N9: sizes, tails and padding


def poison_padding(opt: ShardedAdamW) -> None:
    """NaN wherever no parameter is: in the flat parameters and in every shard."""
    for space in opt._engine.spaces:
        is_padding = torch.ones(space.packing.numel, dtype=torch.bool)
        is_shard_padding = torch.ones(space.packing.shard_numel, dtype=torch.bool)
        for packed, begin in enumerate(space.packing.begins):
            is_padding[begin : begin + space.packing.items[packed].numel] = False
        for s in space.packing.segments(space.rank):
            is_shard_padding[s.shard_begin : s.shard_begin + s.numel] = False
        assert is_padding.any()
        with torch.no_grad():
            space.flat.flat[is_padding] = math.nan
            for shard in (space.grad, *space.states.values()):
                shard[is_shard_padding] = math.nan if shard.dtype.is_floating_point else -1


POISONED = [
    (name, setting)
    for name in ("misaligned_parameters", "scaled_losses")  # padding is no inf that a scaler finds
    for setting in SCRIPTS[name].settings()
    if (setting.backend, setting.distribution) == ("local", "tiny buckets") and setting.world > 1
]


@pytest.mark.parametrize("name, setting", POISONED, ids=str)
def test_n9_nan_in_the_padding_shows_nowhere(monkeypatch: pytest.MonkeyPatch, name: str, setting: Setting) -> None:
    """Scripts of the suite, with NaN before every backward and in every bucket before it is sent."""
    poisoned = 0
    take, loss = GradBucket.take, Run.loss

    def poisoned_take(self: GradBucket, *args: Any, **options: Any) -> Any:
        nonlocal poisoned
        memory, flat = take(self, *args, **options)
        is_padding = torch.ones(flat.numel(), dtype=torch.bool)
        for part in self.parts.values():
            is_padding[part.begin : part.begin + part.numel] = False
        flat[is_padding] = math.nan
        poisoned += int(is_padding.sum())
        return memory, flat

    def poisoned_loss(self: Run, *args: Any, **options: Any) -> Tensor:
        if self.world > 1:
            poison_padding(self.opt)
        return loss(self, *args, **options)

    monkeypatch.setattr(GradBucket, "take", poisoned_take)
    monkeypatch.setattr(Run, "loss", poisoned_loss)
    expect_conformance(name, setting, lambda world: None)
    assert poisoned > 0


# ---- ranges and roundings


@pytest.mark.parametrize("reduce_dtype", [None, F16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_n12_float16_gradients_do_not_overflow_where_ddp_does_not(world: int, reduce_dtype: torch.dtype | None) -> None:
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
def test_n13_accum_dtype_is_what_windows_add_up_in(dtype: torch.dtype, accum_dtype: torch.dtype | None) -> None:
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


def test_a_bfloat16_second_moment_is_rounded_stochastically() -> None:
    """Else equal bits at every world would say nothing of random ones."""
    param = Parameter(torch.zeros(4096))
    opt = ShardedAdamW([param], state_dtype=BF16)
    param.grad = grad = torch.linspace(0.5, 1.5, 4096)
    opt.step()
    state = opt.state_dict()["state"][0]
    exact = (1 - 0.999) * grad.double().square()
    assert_bitwise_equal(state["exp_avg"], (0.1 * grad.double()).float().to(BF16), "m is rounded to nearest")
    away = (state["exp_avg_sq"] != exact.to(BF16)).float().mean()
    assert 0.1 < away < 0.5, away
    assert abs((state["exp_avg_sq"].double() / exact - 1).mean()) < 2e-4, "unbiased"


def test_stock_clipping_of_float64_gradients() -> None:
    def body(comm: Communicator | None) -> tuple[Tensor, list[Tensor]]:
        params = [Parameter(torch.linspace(-1, 1, 300, dtype=F64)), Parameter(torch.ones(7, dtype=F64))]
        opt: Any = ShardedAdamW(params, process_group=comm, **TINY) if comm else torch.optim.AdamW(params)
        sum((p.square() * p).sum() for p in params).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        return norm.clone(), [p.detach().clone() for p in params]

    norm, expected = body(None)
    for theirs, params in run_local(3, body):
        assert theirs.dtype == F64
        torch.testing.assert_close(theirs, norm, rtol=1e-14, atol=0)
        torch.testing.assert_close(params, expected, rtol=1e-13, atol=1e-15)


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
