"""What ShardedAdamW computes: the rows N of the optimizer's tests, against torch, float64 and exact sums.

N1, N5, N6 and N13 are in test_optim_options.py, test_optim_bf16.py and test_optim_masters.py, too.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.grads.bucket import GradBucket
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
    TINY,
    WORLDS,
    dyadic,
    loss_of,
    make_params,
    on_ranks,
    over_worlds,
    run_local,
    share,
)

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


# --- N2: the update against float64


def resumed_at(opt: ShardedAdamW, m: Tensor, v: Tensor, step: int) -> None:
    saved = opt.state_dict()
    whole = {"step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": v}
    opt.load_state_dict({"state": {0: whole}, "param_groups": saved["param_groups"]})


@pytest.mark.parametrize("step", [1, 2, 10, 10**4, 10**6])
@pytest.mark.parametrize("world", [None, 2, 4])
def test_n2_an_update_is_within_4_ulp_of_float64(world: int | None, step: int) -> None:
    """At step 1, 1 - b2^1 = 0.001 has to keep its digits. The parameter starts at 0, so that it is the update."""
    generator = torch.Generator().manual_seed(step)
    grad, m = torch.randn(5000, generator=generator), torch.randn(5000, generator=generator) * (step > 1)
    v = torch.rand(5000, generator=generator) * (step > 1)
    lr, b1, b2, eps = 1e-3, 0.9, 0.999, 1e-8
    m64 = b1 * m.double() + (1 - b1) * grad.double()
    v64 = b2 * v.double() + (1 - b2) * grad.double().square()
    update = -lr * (m64 / (1 - b1**step)) / ((v64 / (1 - b2**step)).sqrt() + eps)
    # Where m cancels, the rounding of its float32 terms shows in the update.
    unit = -lr / (1 - b1**step) * torch.maximum(m64.abs(), (0.1 * grad).double().abs())
    ulp = (unit / ((v64 / (1 - b2**step)).sqrt() + eps)).abs() * 2**-23

    def body(comm: Communicator | None) -> Tensor:
        param = Parameter(torch.zeros(5000))
        opt = ShardedAdamW([param], lr=lr, betas=(b1, b2), eps=eps, weight_decay=0.0, process_group=comm, **TINY)
        resumed_at(opt, m, v, step - 1)
        (param * grad).sum().backward()
        opt.step()
        return param.detach().clone()

    for param in run_local(world, body) if world else [body(None)]:
        assert ((param.double() - update).abs() / ulp).max() <= 4


# --- N3: options


# --- N4: elements that are no ordinary numbers

# --- N7: dtypes of states


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
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
        loss_of(params, dyadic(params, 0)).backward()
        opt.step()
        opt.zero_grad()
        before = opt.state_dict()
        other = {**before, "state": {i: dict(entry) for i, entry in before["state"].items()}}
        for entry in other["state"].values():
            entry["exp_avg"] = entry["exp_avg"].double()
        for saved in (before, other, stock.state_dict()):
            opt.load_state_dict(saved)
            for entry in (*opt.state_dict()["state"].values(), *opt.state.values()):
                assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == state_dtype
                assert "master_param" not in entry or entry["master_param"].dtype == F32
            if saved is not stock.state_dict():
                loss_of(params, dyadic(params, 1)).backward()
                opt.step()
                opt.zero_grad()

    on_ranks(world, body)


# --- N8 and N9: sizes, tails and padding

SIZES = [0, 1, 3, 31, 32, 33, 127, 128, 129, 4097]


def odd_sizes(dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(5)
    flat = torch.randn(sum(SIZES) + 2, generator=generator).to(dtype)
    cut, at = [], 1  # one element off: nothing is aligned
    for numel in SIZES:
        cut.append(Parameter(flat[at : at + numel]))
        at += numel
    return [*cut, Parameter(flat[at].clone())]


def trained(comm: Communicator | None, dtype: torch.dtype, poison: bool = False, **options: Any) -> dict[str, Any]:
    rank, world = (comm.rank, comm.size) if comm else (0, 1)
    params = odd_sizes(dtype)
    opt = ShardedAdamW(params, lr=0.01, process_group=comm, **{**TINY, **options})
    norms = []
    for seed in range(3):
        if poison:
            poison_padding(opt)
        loss_of(params, share(dyadic(params, seed), rank, world)).backward()
        norms.append(opt.clip_grad_norm_(1e6).clone())
        opt.step()
        opt.zero_grad()
    saved = opt.state_dict()["state"]
    own = [opt.full_grad(p) for p in params]
    assert own == [None] * len(params)
    return {"params": [p.detach().clone() for p in params], "norms": norms, "saved": saved}


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


def take_poisoned(taken: list[int]) -> Any:
    """`GradBucket.take`, with NaN where no parameter is."""
    real = GradBucket.take

    def take(self: GradBucket, acquire: Any, absent: Any, *, late: bool) -> Any:
        memory, flat = real(self, acquire, absent, late=late)
        is_padding = torch.ones(flat.numel(), dtype=torch.bool)
        for part in self.parts.values():
            is_padding[part.begin : part.begin + part.numel] = False
        flat[is_padding] = math.nan
        taken.append(int(is_padding.sum()))
        return memory, flat

    return take


KINDS = [
    (F32, {}),
    (BF16, {"master_weights": "bf16_remainder", "state_dtype": BF16}),
    (F16, {}),
    (F64, {"amsgrad": True}),
]


@pytest.mark.parametrize(("dtype", "options"), KINDS, ids=str)
@over_worlds(3)
def test_n8_n9_padding_shows_nowhere(
    monkeypatch: pytest.MonkeyPatch, worlds: list[int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """N8: sizes around vectors and shards, misaligned; N9: padding is NaN before every collective."""
    expected = trained(None, dtype, **options)
    assert all(torch.isfinite(norm) for norm in expected["norms"])
    taken: list[int] = []
    for poison in (False, True):
        if poison:
            monkeypatch.setattr(GradBucket, "take", take_poisoned(taken))
        for world in worlds:
            for rank in run_local(world, lambda comm, poison=poison: trained(comm, dtype, poison, **options)):
                assert_bitwise_equal(rank["params"], expected["params"], f"world {world}, poison {poison}")
                for norm, wanted in zip(rank["norms"], expected["norms"], strict=True):
                    torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)  # the mean is taken of another sum
                for i, entry in rank["saved"].items():
                    for name in entry.keys() - {"ranges", "step"}:
                        whole = expected["saved"][i][name].reshape(-1)
                        ranges = entry.get("ranges", [(0, whole.numel())])
                        parts = [whole[begin:end] for begin, end in ranges] or [whole[:0]]
                        what = f"{name} of {i}, world {world}, poison {poison}"
                        assert_bitwise_equal(entry[name].reshape(-1), torch.cat(parts), what)
    assert sum(taken) > 0, "there was padding"


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)  # of float64 the largest elements are looked at, too
@pytest.mark.parametrize("world", [1, 2, 3])
def test_n8_padding_is_no_inf_that_a_scaler_finds(
    monkeypatch: pytest.MonkeyPatch, world: int, dtype: torch.dtype
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(GradBucket, "take", take_poisoned(taken))

    def body(comm: Communicator) -> None:
        params = odd_sizes(dtype)
        opt = ShardedAdamW(params, lr=0.01, process_group=comm, **TINY)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for seed in range(2):
            poison_padding(opt)
            before = [p.detach().clone() for p in params]
            scaler.scale(loss_of(params, share(dyadic(params, seed), comm.rank, world))).backward()
            scaler.unscale_(opt)
            found = scaler._found_inf_per_device(opt)
            assert len(found) == 1 and all(float(flag) == 0.0 for flag in found.values())
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            assert scaler.get_scale() == 8.0
            assert not any(torch.equal(p, old) for p, old in zip(params, before, strict=True) if p.numel())

    run_local(world, body)
    assert sum(taken) > 0, "there was padding"


# --- N11: averages


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("average", [True, False])
def test_n11_mean_and_sum_are_exact_at_any_world(world: int, dtype: torch.dtype, average: bool) -> None:
    """Gradients are multiples of the world size: of an odd one, too."""
    whole = [g * 16 for g in dyadic(make_params(dtype), 0)]

    def body(comm: Communicator) -> list[Tensor]:
        params = make_params(dtype)
        opt = ShardedAdamW(params, process_group=comm, gradient_average=average, **TINY)
        loss_of(params, [g * world * (comm.rank + 1) for g in whole]).backward()
        grads = [opt.full_grad(p) for p in params]
        opt.step()
        return grads

    factor = sum(range(1, world + 1)) * (1 if average else world)
    wide = F64 if dtype == F64 else F32
    for grads in run_local(world, body):
        assert_bitwise_equal(grads, [g.to(wide) * factor for g in whole])


# --- N12: the range of float16


@pytest.mark.parametrize("reduce_dtype", [None, F16, F32], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_n12_float16_gradients_do_not_overflow_where_ddp_does_not(world: int, reduce_dtype: torch.dtype | None) -> None:
    """DDP divides by the world size before it adds. Our sums are float32 beyond the buckets."""
    largest = 65504.0

    def body(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        param = Parameter(torch.zeros(300, dtype=F16))
        opt = ShardedAdamW([param], process_group=comm, reduce_dtype=reduce_dtype, **TINY)
        (param * largest).sum().backward()
        assert param.grad.dtype == F16
        whole = opt.full_grad(param)
        norm = opt.local_grad_norm()
        opt.step()
        return whole, norm, param.detach().clone()

    for whole, norm, param in run_local(world, body):
        assert_bitwise_equal(whole, torch.full((300,), largest), "each rank has it, so the mean is it")
        torch.testing.assert_close(norm, torch.tensor(largest * math.sqrt(300)))
        torch.testing.assert_close(param, torch.full((300,), -1e-3, dtype=F16))


# --- N13: sums of bfloat16 gradients in float32
