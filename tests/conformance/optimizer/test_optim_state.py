"""state_dict and load_state_dict: resuming is as if nothing had been, and a dict that does not fit changes nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
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
    WORLDS,
    dyadic,
    joined_states,
    loss_of,
    make_params,
    on_ranks,
    over_worlds,
    run_local,
    share,
)
from tests.support.requirements import slow_case

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


def restart(
    params: list[Parameter], dtype: torch.dtype, comm: Communicator | None, saved: Saved, order: str, **options: Any
) -> tuple[list[Parameter], ShardedAdamW]:
    """A new process: other initial values, then model and optimizer loaded in some order."""
    fresh = make_params(dtype, seed=11)
    model = values(params)

    def load_model() -> None:
        with torch.no_grad():
            for p, value in zip(fresh, model, strict=True):
                p.copy_(value)

    if order == "model, make, optimizer":
        load_model()
    opt = make(fresh, comm, **options)
    if order == "make, model, optimizer":
        load_model()
    opt.load_state_dict(saved)
    if order == "make, optimizer, model":
        load_model()
    return fresh, opt


BF16 = torch.bfloat16
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (BF16, {}),
    "bf16 remainder": (BF16, {"master_weights": "bf16_remainder", "state_dtype": BF16, "amsgrad": True}),
    "bf16 none": (BF16, {"master_weights": "none", "state_dtype": BF16}),
    "fp16": (torch.float16, {"amsgrad": True}),
    "fp64": (torch.float64, {"decoupled_weight_decay": False}),
}


@pytest.mark.parametrize(
    "order", ["model, make, optimizer", slow_case("make, model, optimizer"), "make, optimizer, model"]
)
@pytest.mark.parametrize(("dtype", "options"), PRECISIONS.values(), ids=PRECISIONS.keys())
@over_worlds(3)
def test_resuming_is_as_if_nothing_had_been(
    worlds: list[int], dtype: torch.dtype, options: dict[str, Any], order: str
) -> None:
    def body(comm: Communicator | None) -> tuple[list[Tensor], Saved]:
        params = make_params(dtype)
        opt = make(params, comm, **options)
        steps(opt, params, range(5), comm)
        saved, middle = opt.state_dict(), make_params(dtype)
        for p, q in zip(middle, params, strict=True):
            p.data.copy_(q.data)
        steps(opt, params, range(5, 9), comm)
        end = opt.state_dict()["state"]
        opt.close()
        again, resumed = restart(middle, dtype, comm, copy.deepcopy(saved), order, **options)
        assert_bitwise_equal(resumed.state_dict()["state"], saved["state"], "loaded")
        steps(resumed, again, range(5, 9), comm)
        assert_bitwise_equal(values(again), values(params))
        assert_bitwise_equal(resumed.state_dict()["state"], end)
        return values(params), saved

    expected, whole = body(None)
    for world in worlds:
        results = run_local(world, body)
        for params, _ in results:
            assert_bitwise_equal(params, expected)
        assert_bitwise_equal(
            joined_states([saved for _, saved in results], make_params(dtype)), [whole["state"][i] for i in range(9)]
        )


@pytest.mark.parametrize("world", [None, *WORLDS])
def test_states_are_plain_private_and_complete(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params(torch.bfloat16)
        opt = make(params, comm)
        before = opt.state_dict()  # before the first step
        assert sorted(before["state"]) == list(range(len(params)))
        for i, entry in before["state"].items():
            assert set(entry) - {"ranges"} == {"step", "exp_avg", "exp_avg_sq", "master_param"}
            assert entry["step"].dtype == torch.float32 and entry["step"].shape == () and entry["step"] == 0
            assert all(entry[name].dtype == torch.float32 for name in set(entry) - {"ranges"}), i
            assert set(opt.state[params[i]]) == set(entry) - {"ranges"}
        steps(opt, params, range(3), comm)
        saved = opt.state_dict()
        assert all(not entry["exp_avg"].any() for entry in before["state"].values()), "a saved dict is a copy"
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        read = torch.load(file, weights_only=True)
        untouched = copy.deepcopy(read)
        opt.load_state_dict(read)
        for theirs, mine in ((read, untouched), (opt.state_dict(), saved)):
            assert_bitwise_equal(theirs["state"], mine["state"])
            assert theirs["param_groups"] == mine["param_groups"]
        opt.load_state_dict(before)
        assert opt.state[params[0]]["step"] == 0 and not opt.state[params[0]]["exp_avg"].any()

    on_ranks(world, body)


@pytest.mark.parametrize("stock_options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("world", [None, *WORLDS])
def test_a_dict_of_torch_adamw_loads_and_goes_on(world: int | None, stock_options: dict) -> None:
    reference = make_params()
    theirs = torch.optim.AdamW(
        [{"params": reference[:4], "weight_decay": 0.0}, {"params": reference[4:], "lr": 0.03}],
        lr=0.01,
        weight_decay=0.1,
        **stock_options,
    )
    steps(theirs, reference, range(1))  # parameters that were not used yet have no state
    saved = copy.deepcopy(theirs.state_dict())
    assert len(saved["state"]) < len(reference)
    middle = values(reference)
    steps(theirs, reference, range(1, 6))

    def body(comm: Communicator | None) -> list[Tensor]:
        params = [
            Parameter(torch.empty_strided(p.shape, p.stride()).copy_(m)) for p, m in zip(reference, middle, strict=True)
        ]
        opt = make(params, comm)
        opt.load_state_dict(saved)
        steps(opt, params, range(1, 6), comm)
        return values(params)

    results = run_local(world, body) if world else [body(None)]
    for params in results:
        torch.testing.assert_close(params, values(reference), rtol=2e-6, atol=1e-7)


def test_the_local_dict_loads_into_torch_adamw() -> None:
    for world in (None, 1):

        def body(comm: Communicator | None) -> tuple[list[Tensor], Saved, list[Tensor]]:
            params = make_params()
            opt = make(params, comm)
            steps(opt, params, range(3), comm)
            saved, middle = opt.state_dict(), values(params)
            steps(opt, params, range(3, 6), comm)
            return middle, saved, values(params)

        middle, saved, expected = run_local(1, body)[0] if world else body(None)
        params = make_params()
        for p, value in zip(params, middle, strict=True):
            p.data.copy_(value)
        stock = torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}])
        stock.load_state_dict(saved)
        steps(stock, params, range(3, 6))
        torch.testing.assert_close(values(params), expected, rtol=2e-6, atol=1e-7)


def with_groups_merged(saved: Saved) -> Saved:
    return {**saved, "param_groups": [{**saved["param_groups"][0], "params": list(range(9))}]}


def with_another_split(saved: Saved) -> Saved:
    first, second = copy.deepcopy(saved["param_groups"])
    second["params"].insert(0, first["params"].pop())
    return {**saved, "param_groups": [first, second]}


def with_another_shape(saved: Saved) -> Saved:
    broken = copy.deepcopy(saved)
    broken["state"][8]["exp_avg_sq"] = torch.zeros(7, 7)
    broken["state"][8].pop("ranges", None)
    return broken


def with_a_state_missing(saved: Saved) -> Saved:
    broken = copy.deepcopy(saved)
    del broken["state"][8]["exp_avg"]
    return broken


def with_amsgrad(saved: Saved) -> Saved:
    broken = copy.deepcopy(saved)
    broken["param_groups"][1]["amsgrad"] = True
    return broken


def with_maximize_in_one_group(saved: Saved) -> Saved:
    broken = copy.deepcopy(saved)
    broken["param_groups"][1]["maximize"] = True
    return broken


BROKEN = [
    (with_groups_merged, ValueError, "different number of parameter groups"),
    (with_another_split, ValueError, "doesn't match the size of optimizer's group"),
    (with_another_shape, ValueError, "group 1 parameter 4.*shape"),
    (with_a_state_missing, ValueError, "group 1 parameter 4.*no 'exp_avg'"),
    (with_amsgrad, ValueError, "has amsgrad=True, this optimizer was made with amsgrad=False"),
    (with_maximize_in_one_group, ValueError, "maximize must be the same"),
]


@pytest.mark.parametrize("break_it, error, match", BROKEN, ids=[b[0].__name__ for b in BROKEN])
@pytest.mark.parametrize("world", [None, 2])
def test_a_dict_that_does_not_fit_changes_nothing(
    world: int | None, break_it: Callable[[Saved], Saved], error: type[Exception], match: str
) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = make(params, comm)
        steps(opt, params, range(3), comm)
        other = opt.state_dict()
        steps(opt, params, range(3, 4), comm)
        before = copy.deepcopy(opt.state_dict())
        with pytest.raises(error, match=match):
            opt.load_state_dict(break_it(other))
        after = opt.state_dict()
        assert_bitwise_equal(after["state"], before["state"])
        assert after["param_groups"] == before["param_groups"]
        steps(opt, params, range(4, 5), comm)

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
        with pytest.raises(ValueError, match="another rank's, or was saved at another world size"):
            opt.load_state_dict(kept[(comm.rank + 1) % world] if size == world else kept[comm.rank % world])
        assert_bitwise_equal(opt.state_dict()["state"], before)

    run_local(world, save)
    run_local(world, load, world)
    run_local(world + 1, load, world + 1)


@pytest.mark.parametrize("world", [2, 3])
def test_loading_while_gradients_are_pending_is_refused(world: int) -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = make(params, comm)
        saved = opt.state_dict()
        loss_of(params, dyadic(params, 0)).backward()
        with pytest.raises(RuntimeError, match="gradients are pending"):
            opt.load_state_dict(saved)
        opt.zero_grad()
        opt.load_state_dict(saved)

    run_local(world, body)


def test_hooks_of_state_dicts_run() -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = make(params, comm)
        called = []
        opt.register_state_dict_pre_hook(lambda o: called.append("save"))
        opt.register_state_dict_post_hook(lambda o, saved: {**saved, "mine": 1})
        opt.register_load_state_dict_pre_hook(lambda o, saved: called.append("load") or {**saved, "theirs": 2})
        opt.register_load_state_dict_post_hook(lambda o: called.append("loaded"))
        saved = opt.state_dict()
        assert saved["mine"] == 1
        opt.load_state_dict(saved)
        assert called == ["save", "load", "loaded"] and "theirs" not in saved

    body(None)
    run_local(2, body)


# --- the end of an optimizer
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [None, 1, 2])
def test_it_cannot_be_copied_or_pickled(world: int | None) -> None:
    """S13 of the optimizer's test rows."""

    def body(comm: Communicator | None) -> None:
        opt = make(make_params(), comm)
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(opt)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(opt)

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 1, 2])
@pytest.mark.parametrize("pending", [False, True])
def test_a_deleted_optimizer_leaves_usable_parameters_and_nothing_else(world: int | None, pending: bool) -> None:
    """S13 of the rows; parameters, buckets and the hooks' capsules: test_arrivals.py."""

    def body(comm: Communicator | None) -> weakref.ref | None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
        params = list(model.parameters())
        opt = ShardedAdamW(params, process_group=comm, overlap_param_sync=True, **TINY)
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
            alive += [weakref.ref(opt._engine.grads), weakref.ref(opt._engine._gathers)]
        del opt
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
        return None

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 1, 2])
def test_close_gives_everything_back(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        for round_ in range(3):
            opt = make(params, comm)
            steps(opt, params, range(2), comm)
            loss_of(params, dyadic(params, 7)).backward()
            before = values(params)
            opt.close()
            opt.close()
            assert_bitwise_equal(values(params), before)
            if comm:
                comm.pool.check()
                comm.pool.expect_no_leases()
                assert all(p.grad is None for p in params)
            for use in (opt.step, opt.state_dict, opt.grad_sync, lambda o=opt: o.clip_grad_norm_(1.0)):
                with pytest.raises(RuntimeError, match="closed"):
                    use()
            for p in params:
                p.grad = None
            loss_of(params, dyadic(params, round_)).backward()
            assert all(type(p.grad) is Tensor for p in params)
            torch.optim.SGD(params, lr=0.1).step()
            for p in params:
                p.grad = None

    on_ranks(world, body)
