"""Every learning rate scheduler of torch, and how training with one is resumed: S9 of the optimizer's test rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler, swa_utils

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
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

STEPS = 8
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, [lambda step: 1 / (1 + step), lambda step: 0.5**step]),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.75),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 3, gamma=0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5], gamma=0.5),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.25, total_iters=3),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.25, total_iters=4),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.5),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=6, power=2.0),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=6),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[0.1, 0.05], total_steps=STEPS + 2),  # betas too
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(  # betas too
        opt, 0.01, 0.05, step_size_up=2, cycle_momentum=True, base_momentum=0.7, max_momentum=0.95
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=0.0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)], [3]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.75)], optimizer=opt
    ),
    "SWALR": lambda opt: swa_utils.SWALR(opt, swa_lr=[0.001, 0.002], anneal_epochs=4),
}


def test_there_is_no_other_scheduler() -> None:
    known = {name for name in lr_scheduler.__all__ if isinstance(getattr(lr_scheduler, name), type)}
    assert known - {"LRScheduler"} | {"SWALR"} == set(SCHEDULERS)


def advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step([4.0, 3.0, 3.0, 3.0, 3.0, 2.0, 2.5, 2.5][step])
    else:
        scheduler.step()


def groups_of(params: list[Parameter], tensor_lr: bool = False) -> list[dict[str, Any]]:
    """Two, with rates and weight decay of their own; schedulers write to rates that are tensors."""
    rates = [torch.tensor(lr) if tensor_lr else lr for lr in (0.02, 0.05)]
    return [
        {"params": params[:4], "lr": rates[0], "weight_decay": 0.0},
        {"params": params[4:], "lr": rates[1], "weight_decay": 0.3},
    ]


@pytest.mark.parametrize("tensor_lr", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_s9_every_scheduler_does_what_it_does_to_adamw(name: str, tensor_lr: bool) -> None:
    def scheduled(run: Run) -> None:
        scheduler = SCHEDULERS[name](run.opt)
        for step in range(STEPS):
            run.backward(step)
            run.step()
            advance(scheduler, step)
            run.see([float(group["lr"]) for group in run.opt.param_groups])
            run.see([tuple(map(float, group["betas"])) for group in run.opt.param_groups])
            run.see([group["weight_decay"] for group in run.opt.param_groups])

    make = lambda params: groups_of(params, tensor_lr)  # noqa: E731
    mine = assert_as_local(scheduled, make, worlds=[2])
    assert len({str(seen) for seen in mine.seen}) > 2, "the scheduler has changed nothing"
    assert_as_torch(mine, outcome_of_torch(scheduled, make))


# Those that are made to go on: by ``last_epoch``.
RESUMED: dict[str, Callable[..., Any]] = {
    "LambdaLR": lambda opt, last: lr_scheduler.LambdaLR(
        opt, [lambda step: 1 / (1 + step), lambda step: 0.5**step], last_epoch=last
    ),
    "CosineAnnealingLR": lambda opt, last: lr_scheduler.CosineAnnealingLR(opt, T_max=6, last_epoch=last),
    "OneCycleLR": lambda opt, last: lr_scheduler.OneCycleLR(
        opt, max_lr=[0.1, 0.05], total_steps=STEPS + 2, last_epoch=last
    ),
    "CyclicLR": lambda opt, last: lr_scheduler.CyclicLR(
        opt, 0.01, 0.05, step_size_up=2, base_momentum=0.7, max_momentum=0.95, last_epoch=last
    ),
}


@pytest.mark.parametrize("by", ["state_dict", "initial_lr"])
@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("world", [None, 2])
def test_s9_training_with_a_scheduler_is_resumed(world: int | None, name: str, by: str) -> None:
    """The scheduler by its own state, or made with ``last_epoch``, for which groups must have kept ``initial_lr``."""

    def body(comm: Communicator | None) -> None:
        rank, size = (comm.rank, comm.size) if comm else (0, 1)

        def go_on(params: list[Parameter], opt: ShardedAdamW, scheduler: Any, steps: range) -> list[Any]:
            seen = []
            for step in steps:
                loss_of(params, share(dyadic(params, step), rank, size)).backward()
                opt.step()
                opt.zero_grad()
                scheduler.step()
                seen += [(float(g["lr"]), *map(float, g["betas"]), g["weight_decay"]) for g in opt.param_groups]
            return seen

        def values(params: list[Parameter]) -> list[Tensor]:
            return [p.detach().clone() for p in params]

        params = make_params()
        opt = ShardedAdamW(groups_of(params), process_group=comm)
        scheduler = SCHEDULERS[name](opt)
        go_on(params, opt, scheduler, range(STEPS // 2))
        saved = copy.deepcopy((opt.state_dict(), scheduler.state_dict()))
        middle = values(params)
        expected = go_on(params, opt, scheduler, range(STEPS // 2, STEPS)), values(params)
        opt.close()

        again = [Parameter(p) for p in middle]
        other = ShardedAdamW(groups_of(again), lr=1.0, process_group=comm)
        if by == "state_dict":
            scheduler = SCHEDULERS[name](other)
            scheduler.load_state_dict(saved[1])
            other.load_state_dict(saved[0])
        else:
            other.load_state_dict(saved[0])
            assert [group["initial_lr"] for group in other.param_groups] == [
                group["initial_lr"] for group in saved[0]["param_groups"]
            ]
            before = [float(group["lr"]) for group in other.param_groups]
            scheduler = RESUMED[name](other, STEPS // 2 - 1)  # steps once, to where it was
            assert [float(g["lr"]) for g in other.param_groups] == pytest.approx(before, rel=1e-12)
            for group, kept in zip(other.param_groups, saved[0]["param_groups"], strict=True):
                group["lr"] = kept["lr"]
        seen = go_on(again, other, scheduler, range(STEPS // 2, STEPS))
        if by == "state_dict":
            assert seen == expected[0]
            assert_bitwise_equal(values(again), expected[1])
        else:  # torch computes the rates another way, and rounds them otherwise
            for mine, theirs in zip(seen, expected[0], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-9)
            torch.testing.assert_close(values(again), expected[1], rtol=1e-6, atol=1e-7)

    on_ranks(world, body)


@pytest.mark.parametrize("is_debugging", [False, True])
def test_learning_rates_of_ranks_are_compared_to_debug(monkeypatch: pytest.MonkeyPatch, is_debugging: bool) -> None:
    monkeypatch.setenv("BW_DEBUG", str(int(is_debugging)))

    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, 0.1, process_group=comm)
        loss_of(params, dyadic(params, 1)).backward()
        before = [p.detach().clone() for p in params]
        if comm.rank == 1:
            opt.param_groups[0]["lr"] = 0.2
        if is_debugging:
            with pytest.raises(RuntimeError, match=r"ranks disagree on parameter group 0: lr 0\.[12]"):
                opt.step()
            assert_bitwise_equal([p.detach() for p in params], before)
            opt.param_groups[0]["lr"] = 0.1 if comm.rank == 0 else None
            with pytest.raises(RuntimeError, match="refused" if comm.rank == 1 else "^rank 1: .*refused"):
                opt.step()
            opt.param_groups[0]["lr"] = 0.1
        opt.step()
        farthest = max(float((p.detach() - b).abs().max()) for p, b in zip(params, before, strict=True) if p.numel())
        assert (farthest > 0.15) != is_debugging, "0.1 a step, and 0.2 where rank 1 has taken its own"
        opt.close()

    run_local(2, body)
