"""state_dict and load_state_dict: resuming is as if nothing had been, and a dict that does not fit changes nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
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
    loss_of,
    make_params,
    on_ranks,
    run_local,
    share,
)

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
