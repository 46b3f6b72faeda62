"""Frozen parameters that are trained later, and trained ones that are frozen for a while: S10 of the optimizer's test rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import Run, assert_as_local_and_torch, make_params, run_local

pytestmark = pytest.mark.dist


def frozen_at_first(params: list[Parameter]) -> list[dict[str, Any]]:
    for p in params[2:5] + params[7:]:
        p.requires_grad_(False)
    return [{"params": params[:6], "lr": 0.01, "weight_decay": 0.1}, {"params": params[6:], "lr": 0.02}]


def trainable(run: Run) -> set[int]:
    return {i for i, p in enumerate(run.params) if p.requires_grad}


def unfrozen(run: Run) -> None:
    """S10: three steps without them, then with."""
    for step in range(3):
        run.backward(step, used=trainable(run))
        run.step()
    for p in run.params:
        p.requires_grad_(True)
    for step in range(3):
        run.backward(10 + step)
        run.see_grads()
        run.clip(0.5)
        run.step()


def unfrozen_one_by_one(run: Run) -> None:
    for index in (4, 8, 2):
        run.params[index].requires_grad_(True)
        with run.opt.no_sync():
            run.backward(index, used=trainable(run))
        run.backward(20 + index, used=trainable(run))
        run.step()
    for p in run.params:
        p.requires_grad_(True)
    run.backward(40)
    run.step()


def frozen_for_a_while(run: Run) -> None:
    """S10: frozen parameters stay bitwise what they are, weight decay or not; their moments go on where they were."""
    run.backward(0)
    run.step()
    chosen = (0, 3, 7)
    before = [run.params[i].detach().clone() for i in chosen]
    for i in chosen:
        run.params[i].requires_grad_(False)
    for step in range(6):
        run.backward(1 + step, used=trainable(run))
        run.step()
    assert_bitwise_equal([run.params[i].detach() for i in chosen], before)
    for i in chosen:
        run.params[i].requires_grad_(True)
    for step in range(2):
        run.backward(10 + step)
        run.step()


def head_after_body(run: Run) -> None:
    """The body is frozen when the head is taken in."""
    run.backward(0, used=trainable(run))
    run.step()
    for i, p in enumerate(run.params):
        p.requires_grad_(i in (2, 3, 4, 7, 8))
    for step in range(2):
        run.backward(1 + step, used=trainable(run))
        run.clip(0.5)
        run.step()
    run.params[0].requires_grad_(True)
    run.backward(4, used=trainable(run))
    run.step()


def zeroed_before_they_are_taken_in(run: Run) -> None:
    for p in run.params:
        p.requires_grad_(True)
    run.backward(0)
    run.opt.zero_grad()
    run.backward(1)
    run.see_grads()
    run.step()


def started_before_they_are_taken_in(run: Run) -> None:
    for p in run.params:
        p.requires_grad_(True)
    with run.opt.no_sync():
        run.backward(0)
    if isinstance(run.opt, ShardedAdamW):
        run.opt.grad_sync(run.params)
        run.opt.param_sync(run.params)
    run.see_grads()
    run.step()


SCRIPTS: list[tuple[Callable[[Run], None], Callable[[list[Parameter]], Any]]] = [
    (unfrozen, frozen_at_first),
    (unfrozen_one_by_one, frozen_at_first),
    (head_after_body, frozen_at_first),
    (zeroed_before_they_are_taken_in, frozen_at_first),
    (started_before_they_are_taken_in, frozen_at_first),
    (frozen_for_a_while, list),
]


@pytest.mark.parametrize(("script", "make"), SCRIPTS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_comes_later_does_what_torch_does(script: Callable[[Run], None], make: Any) -> None:
    assert_as_local_and_torch(script, make)


def test_states_of_frozen_parameters_wait_for_them() -> None:
    def train(opt: ShardedAdamW, params: list[Parameter], seed: int) -> None:
        run = Run(opt, params)
        run.backward(seed)
        run.step()

    whole = make_params()
    opt = ShardedAdamW(whole)
    train(opt, whole, 0)
    saved = opt.state_dict()
    values = [p.detach().clone() for p in whole]
    train(opt, whole, 1)

    def body(comm: Communicator | None) -> None:
        params = make_params()
        for p, value in zip(params, values, strict=True):
            p.data.copy_(value)
        params[3].requires_grad_(False)
        again = ShardedAdamW(params, process_group=comm)
        again.load_state_dict(saved)
        params[3].requires_grad_(True)
        train(again, params, 1)
        assert_bitwise_equal([p.detach() for p in params], [p.detach() for p in whole])
        assert int(again.state[params[3]]["step"]) == 2
        part = {**saved, "state": {i: {**entry, "ranges": [[0, 1]]} for i, entry in saved["state"].items()}}
        params[3].requires_grad_(False)
        fresh = ShardedAdamW([params[3], Parameter(torch.zeros(1))]) if comm is None else None
        if fresh is not None:
            few = {"state": {0: part["state"][3]}, "param_groups": fresh.state_dict()["param_groups"]}
            with pytest.raises(ValueError, match=r"shape \(64, 33\) that is frozen now"):
                fresh.load_state_dict(few)

    body(None)
    run_local(1, body)


def test_frozen_parameters_alone_are_taken_in_later() -> None:
    def script(run: Run) -> None:
        run.opt.step()
        for p in run.params:
            p.requires_grad_(True)
        run.backward(0)
        run.step()

    def make(params: list[Parameter]) -> list[Parameter]:
        for p in params:
            p.requires_grad_(False)
        return params

    assert_as_local_and_torch(script, make)
