"""Groups that are added, S10 of the optimizer's test rows: they go on as torch's do, and what was there keeps what it has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import TINY, WORLDS, Run, assert_as_local_and_torch, make_params, run_local

pytestmark = pytest.mark.dist


def first_half(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:4], "lr": 0.01}]


def rest_of(run: Run) -> dict[str, Any]:
    return {"params": run.params[4:], "lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9)}


def added_between_steps(run: Run) -> None:
    for step in range(3):
        run.backward(step, used={0, 1, 2, 3})
        run.step()
    run.opt.add_param_group(rest_of(run))
    for step in range(3):
        run.backward(10 + step)
        run.clip(0.5)
        run.step()


def added_with_gradients(run: Run) -> None:
    """Gradients that there are when the group comes, scaled ones too, are stepped as they would have been."""
    run.backward(0, used={0, 1, 2, 3})
    run.step()
    run.backward(1, used={0, 2, 3})
    run.opt.add_param_group(rest_of(run))
    run.see_grads()
    run.backward(2, used={0, 5, 6})  # adds to them
    run.see_grads()
    run.step()
    run.backward(3)
    run.step()


def added_when_clipped(run: Run) -> None:
    run.backward(1, used={0, 2, 3})
    run.clip(0.25)
    run.opt.add_param_group(rest_of(run))
    run.see_grads()
    run.clip(0.125)
    run.step()
    run.backward(2)
    run.step()


def added_twice(run: Run) -> None:
    run.opt.add_param_group({"params": run.params[4:6]})
    run.backward(0, used={0, 4, 5})
    run.step()
    run.opt.add_param_group({"params": run.params[6:]})
    with run.opt.no_sync():
        run.backward(1)
    run.backward(2)
    run.step()


@pytest.mark.parametrize(
    "script",
    [added_between_steps, added_with_gradients, added_when_clipped, added_twice],
    ids=lambda script: script.__name__,
)
def test_what_comes_later_does_what_torch_does(script: Callable[[Run], None]) -> None:
    assert_as_local_and_torch(script, first_half)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_new_parameters_have_new_states_and_old_ones_keep_theirs(dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> None:
        params = make_params(dtype)
        opt = ShardedAdamW(params[:4], process_group=comm, **TINY)
        run = Run(opt, params, comm.rank, comm.size)
        run.backward(0, used={0, 1, 2, 3})
        run.step()
        before = opt.state_dict()["state"]
        opt.add_param_group({"params": params[4:]})
        after = opt.state_dict()["state"]
        assert_bitwise_equal([after[i] for i in range(4)], [before[i] for i in range(4)])
        for i in range(4, len(params)):
            assert float(after[i]["step"]) == 0.0 and not after[i]["exp_avg"].any()
            assert opt.state[params[i]]["step"] == 0
        run.backward(1)
        run.step()
        assert [int(opt.state[p]["step"]) for p in params] == [2] * 4 + [1] * (len(params) - 4)
        opt.close()
        comm.pool.expect_no_leases()

    run_local(2, body)


@pytest.mark.parametrize("world", WORLDS)
def test_new_parameters_are_those_of_rank_0(world: int) -> None:
    def body(comm: Communicator) -> list[torch.Tensor]:
        params = make_params()
        with contextlib.closing(ShardedAdamW(params[:3], process_group=comm, **TINY)) as opt:
            late = [Parameter(torch.full((5,), float(comm.rank)))]
            opt.add_param_group({"params": late})
            return [p.detach().clone() for p in late]

    for values in run_local(world, body):
        assert_bitwise_equal(values, [torch.zeros(5)])


def test_a_static_graph_is_learnt_anew() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params[:4], process_group=comm, static_graph=True, **TINY)
        run = Run(opt, params, comm.rank, comm.size)
        for step in range(2):
            run.backward(step, used={0, 3})
            run.step()
        opt.add_param_group({"params": params[4:]})
        for step in range(3):
            run.backward(step, used={0, 3, 6})
            run.step()
        assert int(opt.state[params[6]]["step"]) == 3
        opt.close()

    run_local(2, body)


def test_overlapped_gathers_go_on_with_new_parameters() -> None:
    """Hooks of `prefetch_params` know new modules of the model, too."""

    class Grows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
            torch.nn.init.constant_(self.parts[0].weight, 0.5)
            torch.nn.init.constant_(self.parts[0].bias, 0.25)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return x

    def body(comm: Communicator, overlaps: bool) -> list[torch.Tensor]:
        model = Grows()
        opt = ShardedAdamW(model.parameters(), 0.1, process_group=comm, overlap_param_sync=overlaps, **TINY)
        opt.prefetch_params(model)
        for step in range(6):
            if step == 3:
                model.parts.append(torch.nn.Linear(4, 4))
                torch.nn.init.constant_(model.parts[1].weight, 0.25)
                torch.nn.init.constant_(model.parts[1].bias, 0.5)
                opt.add_param_group({"params": model.parts[1].parameters()})
            model(torch.ones(2, 4) * (step + comm.rank)).sum().backward()
            opt.step()
            opt.zero_grad()
        values = [p.detach().clone() for p in model.parameters()]
        opt.close()
        return values

    assert_bitwise_equal(run_local(2, body, True), run_local(2, body, False))
