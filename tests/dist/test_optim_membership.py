"""Parameters that come later: groups that are added, frozen parameters that are trained, trained ones that are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_twins import TINY, WORLDS, Run, assert_as_local_and_torch, dyadic, make_params, run_local
from torch.nn import Parameter

from bucketwheel.comm import Communicator
from bucketwheel.optim import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal

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
    (added_between_steps, first_half),
    (added_with_gradients, first_half),
    (added_when_clipped, first_half),
    (added_twice, first_half),
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
        with ShardedAdamWFor(comm, params[:3]) as opt:
            late = [Parameter(torch.full((5,), float(comm.rank)))]
            opt.add_param_group({"params": late})
            return [p.detach().clone() for p in late]

    for values in run_local(world, body):
        assert_bitwise_equal(values, [torch.zeros(5)])


class ShardedAdamWFor:
    """An optimizer that is closed at the end of a block."""

    def __init__(self, comm: Communicator | None, params: Any, **options: Any) -> None:
        self.opt = ShardedAdamW(params, process_group=comm, **{**TINY, **options})

    def __enter__(self) -> ShardedAdamW:
        return self.opt

    def __exit__(self, *_: object) -> None:
        self.opt.close()


BAD: list[tuple[Callable[[list[Parameter]], Any], type[Exception], str]] = [
    (lambda p: {"params": [Parameter(torch.zeros(3, dtype=torch.complex64))]}, ValueError, "complex64"),
    (lambda p: {"params": [p[0]]}, ValueError, "more than one parameter group"),
    (lambda p: {"params": [p[5]], "maximize": True}, ValueError, "maximize must be the same"),
    (lambda p: {"params": [Parameter(torch.zeros(3).expand(4, 3))]}, ValueError, "gaps or overlaps"),
]


@pytest.mark.parametrize(("group", "error", "match"), BAD)
@pytest.mark.parametrize("world", [None, 2])
def test_a_group_that_is_refused_leaves_everything_as_it_was(
    world: int | None, group: Callable[[list[Parameter]], Any], error: type[Exception], match: str
) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = ShardedAdamW(params[:4], process_group=comm, **(TINY if comm else {}))
        run = Run(opt, params, comm.rank if comm else 0, comm.size if comm else 1)
        run.backward(0, used={0, 1})
        with pytest.raises(error, match=match):
            opt.add_param_group(group(params))
        assert len(opt.param_groups) == 1
        run.step()
        assert [int(opt.state[p]["step"]) for p in params[:4]] == [1, 1, 0, 0]
        opt.close()

    run_local(world, body) if world else body(None)


def test_ranks_that_add_different_groups_raise_on_all() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params[:4], process_group=comm, **TINY)
        with pytest.raises(RuntimeError, match="ranks disagree on parameter 4"):
            opt.add_param_group({"params": params[4:6] if comm.rank else params[6:8]})
        with pytest.raises(RuntimeError, match="ranks did different things with their gradients: .*add_param_group"):
            opt.step() if comm.rank else opt.add_param_group({"params": params[4:]})
        assert len(opt.param_groups) == 1
        run = Run(opt, params, comm.rank, comm.size)
        run.backward(0, used={0, 1})
        run.step()
        opt.close()

    run_local(2, body)


def test_torch_clips_no_gradient_that_nobody_has_reduced() -> None:
    """The first gradient of a parameter that was frozen is this rank's own until a method of the optimizer takes it in."""

    def body(comm: Communicator) -> torch.Tensor:
        params = make_params()
        params[3].requires_grad_(False)
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        run = Run(opt, params, comm.rank, comm.size)
        params[3].requires_grad_(True)
        run.backward(0)
        with pytest.raises(RuntimeError, match=r"shape \(64, 33\) was frozen .* call optimizer.grad_sync\(\)"):
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.grad_sync()
        norm = torch.nn.utils.clip_grad_norm_([p for p in params if p.numel()], 1.0)
        opt.step()
        opt.close()
        return norm

    want = torch.cat([g.flatten() for g in dyadic(make_params(), 0)]).norm()
    for norm in run_local(2, body):
        torch.testing.assert_close(norm, want)


@pytest.mark.parametrize("has_it", [(0, 1), (0,)])
@pytest.mark.parametrize("stock", ["clip", "unscale"])
def test_stock_code_on_new_gradients_alone_is_refused_on_all_ranks(stock: str, has_it: tuple[int, ...]) -> None:
    """Also where one rank has none of them, and goes on to step."""

    def body(comm: Communicator) -> None:
        params = make_params()
        head, others = params[3], [p for i, p in enumerate(params) if i != 3]
        head.requires_grad_(False)
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        for p in others:
            p.requires_grad_(False)
        head.requires_grad_(True)
        if comm.rank in has_it:
            (head * 2.0).sum().backward()
            (head * 1.0).sum().backward()  # adds to it
            assert type(head.grad) is not torch.Tensor
            with pytest.raises(RuntimeError, match=r"shape \(64, 33\) was frozen .* call optimizer.grad_sync"):
                if stock == "clip":
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
                else:
                    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
                    scaler.scale(torch.zeros(()))
                    scaler.unscale_(opt)
        else:
            with pytest.raises(RuntimeError, match="ranks did different things with their gradients: refused, .*"):
                opt.grad_sync()
        opt.grad_sync()
        grad = opt.full_grad(head)
        assert grad is not None and bool((grad == 3.0 * len(has_it) / 2).all())
        opt.step()
        opt.close()

    run_local(2, body)


@pytest.mark.parametrize("how", ["add", "unfreeze"])
def test_nothing_is_taken_in_inside_no_sync(how: str) -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        params[3].requires_grad_(False)
        opt = ShardedAdamW(params[:6], process_group=comm, **TINY)
        run = Run(opt, params, comm.rank, comm.size)
        with opt.no_sync():
            run.backward(0, used={0, 1})
            params[3].requires_grad_(how == "unfreeze")
            with pytest.raises(RuntimeError, match=r"inside no_sync\(\)"):
                opt.add_param_group({"params": params[6:]}) if how == "add" else opt.grad_sync()
        assert len(opt.param_groups) == 1
        run.backward(1, used={0, 1})
        run.step()
        assert int(opt.state[params[0]]["step"]) == 1
        opt.close()

    run_local(2, body)


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
