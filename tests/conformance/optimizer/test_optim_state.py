"""state_dict and load_state_dict beside the suite's scripts: torch's and ours, other ranks' and other masters'; the end."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, dyadic, loss_of, make_params, on_ranks, run_local, share

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Saved = dict[str, Any]


def make(params: list[Parameter], comm: Communicator | None, **options: Any) -> ShardedAdamW:
    groups = [{"params": params[:4], "weight_decay": 0.0}, {"params": params[4:], "lr": 0.03}]
    return ShardedAdamW(groups, lr=0.01, weight_decay=0.1, process_group=comm, **{**TINY, **options})


def steps(opt: Any, params: list[Parameter], seeds: range, comm: Communicator | None = None) -> None:
    rank, world = (comm.rank, comm.size) if comm else (0, 1)
    for seed in seeds:
        loss_of(params, share(dyadic(params, seed), rank, world), lambda i, s=seed: (i + s) % 4 > 0).backward()
        opt.step()
        opt.zero_grad()


def values(params: list[Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def copies(params: list[Parameter]) -> list[Parameter]:
    fresh = make_params(params[0].dtype, seed=3)
    for p, value in zip(fresh, params, strict=True):
        p.data.copy_(value.data)
    return fresh


@pytest.mark.parametrize("dtype, amsgrad", [(F32, False), (F32, True), (F64, True)], ids=str)
@pytest.mark.parametrize("world", [None, 1])
def test_torch_goes_on_from_our_dict(world: int | None, dtype: torch.dtype, amsgrad: bool) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params(dtype)
        opt = make(params, comm, amsgrad=amsgrad)
        assert sorted(opt.state_dict()["state"]) == list(range(len(params))), "complete before the first step"
        steps(opt, params, range(3), comm)
        theirs = copies(params)
        stock = torch.optim.AdamW([{"params": theirs[:4]}, {"params": theirs[4:]}])
        stock.load_state_dict(opt.state_dict())
        assert stock.param_groups[0]["amsgrad"] == amsgrad
        steps(opt, params, range(3, 6), comm)
        steps(stock, theirs, range(3, 6))
        tolerance = {"rtol": 2e-6, "atol": 1e-7} if dtype == F32 else {"rtol": 1e-13, "atol": 1e-15}
        torch.testing.assert_close(values(theirs), values(params), **tolerance)

    on_ranks(world, body)


@pytest.mark.parametrize("world", [2, 3])
def test_the_dict_of_another_rank_or_world_is_refused(world: int) -> None:
    kept: dict[int, Saved] = {}

    def save(comm: Communicator) -> None:
        params = make_params()
        opt = make(params, comm)
        steps(opt, params, range(2), comm)
        kept[comm.rank] = opt.state_dict()

    def load(comm: Communicator, size: int) -> None:
        opt = make(make_params(), comm)
        before = opt.state_dict()["state"]
        with pytest.raises(ValueError, match=rf"is rank \d's part of {world}, for .* this is rank \d of {comm.size}"):
            opt.load_state_dict(kept[(comm.rank + 1) % world] if size == world else kept[comm.rank % world])
        assert_bitwise_equal(opt.state_dict()["state"], before)

    run_local(world, save)
    run_local(world, load, world)
    run_local(world + 1, load, world + 1)


def test_torch_is_told_that_it_has_loaded_a_part() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        saved = make(params, comm).state_dict()
        theirs = copies(params)
        stock = torch.optim.AdamW([{"params": theirs[:4]}, {"params": theirs[4:]}])
        stock.load_state_dict(saved)
        with pytest.raises(RuntimeError, match=f"AdamW.step: its state is rank {comm.rank}'s part of 2"):
            stock.step()

    run_local(2, body)


MODES = ["fp32", "bf16_remainder"]


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("world", [None, 2])
def test_either_kind_of_master_goes_on_from_the_other(world: int | None, first: str, second: str) -> None:
    """Reference: the first one goes on itself."""

    def body(comm: Communicator | None) -> None:
        params = make_params(BF16)
        opt = make(params, comm, master_weights=first, amsgrad=True)
        steps(opt, params, range(3), comm)
        saved, middle = opt.state_dict(), copies(params)
        steps(opt, params, range(3, 6), comm)
        expected = opt.state_dict()
        opt.close()
        other = make(middle, comm, master_weights=second, amsgrad=True)
        other.load_state_dict(saved)
        assert_bitwise_equal(other.state_dict()["state"], saved["state"], "saved as it was loaded")
        steps(other, middle, range(3, 6), comm)
        assert_bitwise_equal(other.state_dict()["state"], expected["state"])

    on_ranks(world, body)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("world", [None, 2])
def test_without_masters_one_is_ignored_and_none_is_saved(world: int | None, dtype: torch.dtype) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params(dtype)
        opt = make(params, comm)
        steps(opt, params, range(2), comm)
        saved, plain = opt.state_dict(), copies(params)
        opt.close()
        none = make(plain, comm, master_weights="none")
        none.load_state_dict(saved)
        mine, before = none.state_dict()["state"], values(plain)
        assert all("master_param" not in entry for entry in mine.values())
        assert_bitwise_equal(mine[3]["exp_avg"], saved["state"][3]["exp_avg"])
        for group in none.param_groups:
            group["lr"] = 0.0
        steps(none, plain, range(2, 3), comm)
        assert_bitwise_equal(values(plain), before, "a step of length 0 from the parameters")

    on_ranks(world, body)


# ---- the end of an optimizer


@pytest.mark.parametrize("world", [None, 1])
def test_it_cannot_be_copied_or_pickled(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        opt = make(make_params(), comm)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                copied(opt)

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 1, 2])
@pytest.mark.parametrize("pending", [False, True])
def test_a_deleted_optimizer_leaves_usable_parameters_and_nothing_else(world: int | None, pending: bool) -> None:
    def body(comm: Communicator | None) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
        params = list(model.parameters())
        opt: Any = ShardedAdamW(params, process_group=comm, overlap_param_sync=True, **TINY)
        opt.prefetch_params(model)
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()
        if pending:
            model(torch.ones(2, 8)).sum().backward()
        opt.param_sync()
        before = values(params)
        alive = [weakref.ref(opt), weakref.ref(opt._engine)]
        if comm:
            grads = opt._engine.grads
            alive += map(weakref.ref, (grads, opt._engine._gathers))
            del grads
        del opt
        until = time.monotonic() + 10
        gc.collect()  # which does nothing while another rank collects
        while any(ref() is not None for ref in alive) and time.monotonic() < until:
            gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive)
        for p in params:
            assert not p._post_accumulate_grad_hooks
        for module in model.modules():
            assert not module._forward_pre_hooks and not module._state_dict_pre_hooks
        assert_bitwise_equal(values(params), before)
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        assert all(type(p.grad) is Tensor for p in params)
        torch.optim.AdamW(params).step()
        model.zero_grad()
        again = ShardedAdamW(params, process_group=comm, **TINY)
        model(torch.ones(2, 8)).sum().backward()
        again.step()

    on_ranks(world, body)
