"""Scripts: what an optimizer keeps. Checkpoints, edits by others, groups that come and parameters that are frozen, models."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler

from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.conformance.optimizer.scripts import DISTRIBUTIONS, ON_CPU, SHARDED, WIDE, script
from tests.conformance.optimizer.updates import variant
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import Run, dyadic, loss_of, share

ANY = tuple(DISTRIBUTIONS)
HALF = ("bf16", "bf16, remainder", "fp16")  # with masters


def values_of(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.params]


def set_values(run: Run, values: list[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(run.params, values, strict=True):
            p.copy_(value)


def some_steps(run: Run, *seeds: int) -> None:
    for seed in seeds:
        run.backward(seed, used=[i for i in range(9) if (i + seed) % 4])
        run.step()


# ---- checkpoints


def two_groups(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:4], "weight_decay": 0.0}, {"params": params[4:], "lr": 0.03}]


def resumed(run: Run, first: str) -> None:
    """The reference goes on by itself. A state_dict is a copy, plain, and made without a step too."""
    some_steps(run, 0, 1, 2)
    if not run.is_reference:
        file = io.BytesIO()
        torch.save((run.opt.state_dict(), values_of(run)), file)
        kept = run.opt.state_dict()
        some_steps(run, 7)
        saved, values = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert_bitwise_equal(kept["state"], saved["state"], "a copy")
        untouched = copy.deepcopy(saved)
        run.restart()
        fresh = [state["exp_avg"] for state in run.opt.state_dict()["state"].values()]
        assert not any(getattr(shown, "piece", shown).any() for shown in fresh)
        loads = [lambda: set_values(run, values), lambda: run.opt.load_state_dict(saved)]
        for load in loads if first == "model" else reversed(loads):
            load()
        assert_bitwise_equal(saved["state"], untouched["state"])
        if first == "model":
            assert_bitwise_equal(run.opt.state_dict()["state"], untouched["state"])
    some_steps(run, 3, 4, 5)


variant("resumed_model_first", lambda run: resumed(run, "model"), make=two_groups, distributions=ANY[:4])
variant(
    "resumed_optimizer_first",  # loading is no edit
    lambda run: resumed(run, "optimizer"),
    make=two_groups,
    options={"lr": 0.01, "on_external_update": "error"},
    torch=False,
)


@script(make=two_groups)
def resumed_with_a_scheduler(run: Run) -> None:
    """Its groups keep ``initial_lr``, and a rate that was loaded is not the dict's."""

    def make() -> lr_scheduler.OneCycleLR:  # which changes betas, too
        return lr_scheduler.OneCycleLR(run.opt, max_lr=[0.1, 0.05], total_steps=8)

    scheduler = make()
    for step in range(6):
        if step == 3 and not run.is_reference:
            saved, of_scheduler = run.opt.state_dict(), scheduler.state_dict()
            groups, values = copy.deepcopy(saved["param_groups"]), values_of(run)
            run.restart()
            set_values(run, values)
            scheduler = make()
            scheduler.load_state_dict(of_scheduler)
            run.opt.load_state_dict(saved)
            assert [g["initial_lr"] for g in run.opt.param_groups] == [g["initial_lr"] for g in groups]
        some_steps(run, step)
        scheduler.step()
        run.see([(float(g["lr"]), *map(float, g["betas"])) for g in run.opt.param_groups])
    if not run.is_reference:
        assert saved["param_groups"] == groups


@script(precisions=("fp32", "fp32, bf16 states", "fp64"), options={"lr": 0.01, "weight_decay": 0.1})
def resumed_from_torch(run: Run) -> None:
    """Parameters that were not used yet have no state there."""
    reference = [Parameter(p.detach().clone()) for p in run.params]
    theirs = torch.optim.AdamW(
        reference,
        lr=0.01,
        weight_decay=0.1,
        **{name: run.opt.param_groups[0][name] for name in ("maximize", "amsgrad")},
    )
    loss_of(reference, dyadic(reference, 0), lambda i: i % 4 > 0).backward()
    theirs.step()
    run.opt.load_state_dict(theirs.state_dict())
    set_values(run, [p.detach() for p in reference])
    some_steps(run, 1, 2, 3)


@script(precisions=HALF)
def a_checkpoint_without_masters(run: Run) -> None:
    """The parameters are the weights then, loaded before or after."""
    some_steps(run, 0, 1)
    saved = run.opt.state_dict()
    for entry in saved["state"].values():
        entry.pop("master_param", None)
    run.opt.load_state_dict(saved)
    set_values(run, [torch.full_like(p, 0.75) for p in run.params])
    some_steps(run, 2, 3)


def break_shape(saved: Any) -> None:
    saved["state"][8]["exp_avg_sq"] = torch.zeros(7, 7)


def break_state(saved: Any) -> None:
    del saved["state"][8]["exp_avg"]


def break_step(saved: Any) -> None:
    del saved["state"][8]["step"]


def break_groups(saved: Any) -> None:
    saved["param_groups"] = [{**saved["param_groups"][0], "params": list(range(9))}]


def break_split(saved: Any) -> None:
    first, second = saved["param_groups"]
    second["params"].insert(0, first["params"].pop())


def break_amsgrad(saved: Any) -> None:
    saved["param_groups"][1]["amsgrad"] = not saved["param_groups"][1]["amsgrad"]


def break_maximize(saved: Any) -> None:
    saved["param_groups"][1]["maximize"] = not saved["param_groups"][1]["maximize"]


def break_rate(saved: Any) -> None:
    saved["param_groups"][1]["lr"] = "0.1"


def break_betas(saved: Any) -> None:
    del saved["param_groups"][1]["betas"]


BROKEN: dict[Callable[[Any], None], str] = {
    break_groups: "different number of parameter groups",
    break_split: "doesn't match the size of optimizer's group",
    break_shape: "group 1 parameter 4.*shape",
    break_state: "group 1 parameter 4.*no 'exp_avg'",
    break_step: "group 1 parameter 4.*no 'step'",
    break_amsgrad: "has amsgrad=(True|False), but this optimizer has amsgrad=(True|False)",
    break_maximize: "maximize must be the same",
    break_rate: "group 1: lr is '0.1', expected a number",
    break_betas: "group 1 has no .*betas",
}


@script(make=two_groups)
def a_checkpoint_that_does_not_fit_changes_nothing(run: Run) -> None:
    some_steps(run, 0, 1)
    if run.is_ours:
        saved = run.opt.state_dict()
        some_steps(run, 2)
        before = run.opt.state_dict()
        for break_it, match in BROKEN.items():
            broken = copy.deepcopy(saved)
            broken["param_groups"][0]["lr"] = 7.0
            if run.rank == run.world - 1:  # and no other rank loads it
                break_it(broken)
            with pytest.raises((KeyError, TypeError, ValueError), match=match):
                run.opt.load_state_dict(broken)
            after = run.opt.state_dict()
            assert_bitwise_equal(after["state"], before["state"])
            assert after["param_groups"] == before["param_groups"]
    else:
        some_steps(run, 2)
    some_steps(run, 3)


@script()
def a_checkpoint_is_not_loaded_over_gradients(run: Run) -> None:
    """One process and ranks alike (issue 44): gradients that no step has used, also where a step has used others."""
    some_steps(run, 0)
    if run.is_ours:
        for order in ("in no_sync", "first", "after a step", "assigned", "on one rank"):
            before = values_of(run)
            saved = run.opt.state_dict()
            if order == "after a step":
                run.backward(3)
                run.opt.step()
            if order == "assigned":
                for p in run.params:
                    p.grad = torch.zeros_like(p)
            elif order != "on one rank" or run.rank == 0:
                with run.opt.no_sync() if order == "in no_sync" else contextlib.nullcontext():
                    run.backward(3)
            with pytest.raises(
                (RuntimeError, ValueError), match="gradients are pending: no step has used .* parameter 0"
            ):
                run.opt.load_state_dict(saved)
            run.opt.zero_grad()
            set_values(run, before)
            run.opt.load_state_dict(saved)
    some_steps(run, 3)


@script()
def a_state_is_loaded_after_a_step(run: Run) -> None:
    """What a step has used is not pending (issue 44). It stays, as with torch, and a second step uses it again."""
    for seed in range(4):
        run.opt.zero_grad(set_to_none=seed != 2)
        run.backward(seed)
        run.opt.step()
        if seed == 2:
            run.opt.zero_grad(set_to_none=False)
        run.opt.load_state_dict(run.opt.state_dict())
        if run.is_ours and seed == 3:
            run.opt.load_full_state_dict(run.opt.full_state_dict(dst=None), src=None)
    run.opt.step()
    some_steps(run, 5)


@script()
def hooks_of_state_dicts(run: Run) -> None:
    called: list[str] = []
    run.opt.register_state_dict_pre_hook(lambda o: called.append("save"))
    run.opt.register_state_dict_post_hook(lambda o, saved: {**saved, "mine": 1})
    run.opt.register_load_state_dict_pre_hook(lambda o, saved: called.append("load") or {**saved, "theirs": 2})
    run.opt.register_load_state_dict_post_hook(lambda o: called.append("loaded"))
    some_steps(run, 0)
    saved = run.opt.state_dict()
    run.opt.load_state_dict(saved)
    run.see([saved["mine"], *called])
    some_steps(run, 1)


@script(backends=SHARDED)
def a_second_optimizer_goes_on(run: Run) -> None:
    """On the same parameters, where the first was closed in the middle of a window."""
    some_steps(run, 0, 1)
    if not run.is_reference:
        saved = run.opt.state_dict()
        run.backward(9)
        run.opt.close()
        run.opt.close()
        for use in (run.opt.step, run.opt.state_dict, run.opt.grad_sync, lambda: run.opt.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match="closed"):
                use()
        for p in run.params:
            p.grad = None
        loss_of(run.params, dyadic(run.params, 0)).backward()
        assert all(type(p.grad) is Tensor for p in run.params), "no hook is left"
        for p in run.params:
            p.grad = None
        assert run.make_optimizer is not None
        run.opt = run.make_optimizer(run.params)
        run.opt.load_state_dict(saved)
    some_steps(run, 2, 3)


# ---- edits by others: masters keep the digits of what an edit has left alone


def by_loading(params: list[Parameter]) -> None:
    nn.ParameterList(params).load_state_dict({str(i): p.detach() * 0.5 + 1 for i, p in enumerate(params)})


def in_place(params: list[Parameter]) -> None:
    with torch.no_grad():
        for p in params:
            p.clamp_(-0.25, 0.25)


def with_other_memory(params: list[Parameter]) -> None:
    for p in params:
        p.data = p.data * 0.5


def with_other_strides(params: list[Parameter]) -> None:
    for i in (0, 3):
        params[i].data = params[i].data.t().contiguous().t() * 0.5
    params[7].data = params[7].data.contiguous() * 0.5


def converted_and_back(params: list[Parameter]) -> None:
    dtype = params[0].dtype
    nn.ParameterList(params).to(torch.float64).to(dtype)


def edited(run: Run, edit: Callable[[list[Parameter]], None]) -> None:
    """Before a backward, and between a reduction and the step."""
    some_steps(run, 0)
    edit(run.params)
    some_steps(run, 1)
    run.backward(2)
    if edit is not converted_and_back:
        run.opt.grad_sync()
        edit(run.params)
    run.opt.step()
    run.opt.zero_grad()
    some_steps(run, 3)


def without_a_version(params: list[Parameter]) -> None:
    for i, p in enumerate(params):
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
        if i % 3 == 0:
            p.data.clamp_(-0.25, 0.25)
        elif i % 3 == 1:
            p.detach().view(bits).numpy()[...] = (p.detach() * 0.5).view(bits).numpy()
        else:
            torch.from_dlpack(p.detach()).masked_fill_(p.detach() < 0, 0.0)


def as_a_vector(params: list[Parameter]) -> None:
    vector = torch.nn.utils.parameters_to_vector(params[:7])
    torch.nn.utils.vector_to_parameters(vector.clamp(-0.5, 0.25), params[:7])


EDITS = (
    by_loading,
    in_place,
    with_other_memory,
    with_other_strides,
    converted_and_back,
    without_a_version,
    as_a_vector,
)
for each in EDITS:
    variant(f"edited_{each.__name__}", lambda run, edit=each: edited(run, edit))


def writes(params: list[Parameter]) -> None:
    with torch.no_grad():
        params[3].mul_(2)


def hides(params: list[Parameter]) -> None:
    params[3].data.mul_(2)


def moves(params: list[Parameter]) -> None:
    params[3].data = params[3].data * 2


@script(options={"lr": 0.01, "on_external_update": "error"}, torch=False)
def an_edit_is_an_error_before_anything_is_updated(run: Run) -> None:
    """On all ranks where one has it, until it is told."""
    some_steps(run, 0)
    for edit in (writes, by_loading, moves):
        run.backward(1)
        if not run.is_reference:
            before = values_of(run)
            if run.rank == run.world - 1:
                edit(run.params)
            edited_values = values_of(run)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"was modified .*on_external_update='error'.*reload_m"):
                    run.opt.step()
            assert_bitwise_equal(values_of(run), edited_values)
            set_values(run, before)
        run.opt.reload_master_params()
        run.step()


@script(options={"lr": 0.01, "on_external_update": "ignore"}, precisions=HALF[:1], torch=False)
def a_master_ignores_what_is_written_to_its_parameter(run: Run) -> None:
    """The next step goes on from the master, so it is as if nothing had been written."""
    some_steps(run, 0)
    for edit in (writes, hides, by_loading, moves):
        if not run.is_reference:
            edit(run.params)
        run.backward(1)
        run.step()


@script(options={"lr": 0.01, "on_external_update": "ignore"}, precisions=HALF, torch=False)
def an_edit_that_is_ignored_is_taken_when_told(run: Run) -> None:
    for step in range(3):
        run.params[3].data.mul_(2)
        run.opt.reload_master_params()
        run.backward(step)
        run.step()


# ---- groups that come later


def first_half(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:4], "lr": 0.01}]


def rest_of(run: Run) -> dict[str, Any]:
    return {"params": run.params[4:], "lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9)}


@script(make=first_half, clips=True)
def a_group_is_added_between_steps(run: Run) -> None:
    for step in range(2):
        run.backward(step, used={0, 1, 2, 3})
        run.step()
    run.opt.add_param_group(rest_of(run))
    for step in range(3):
        run.backward(10 + step)
        run.clip(0.5)
        run.step()


@script(make=first_half)
def a_group_is_added_with_gradients(run: Run) -> None:
    """Those that there are when it comes are stepped as they would have been."""
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


@script(make=first_half, clips=True, precisions=("fp32",))
def a_group_is_added_when_gradients_are_clipped(run: Run) -> None:
    run.backward(1, used={0, 2, 3})
    run.clip(0.25)
    run.opt.add_param_group(rest_of(run))
    run.see_grads()
    run.clip(0.125)
    run.step()
    run.backward(2)
    run.step()


@script(make=first_half)
def groups_are_added_twice(run: Run) -> None:
    run.opt.add_param_group({"params": run.params[4:6]})
    run.backward(0, used={0, 4, 5})
    run.step()
    run.opt.add_param_group({"params": run.params[6:]})
    with run.opt.no_sync():
        run.backward(1)
    run.backward(2)
    run.step()


@script(make=first_half, distributions=("static graph",))
def a_static_graph_is_learnt_anew_with_a_group(run: Run) -> None:
    for step in range(2):
        run.backward(step, used={0, 3})
        run.step()
    run.opt.add_param_group(rest_of(run))
    for step in range(3):
        run.backward(step, used={0, 3, 6})
        run.step()


@script(make=two_groups)
def groups_are_emptied_and_filled_again(run: Run) -> None:
    some_steps(run, 0)
    groups = list(run.opt.param_groups)
    run.opt.param_groups.clear()
    run.opt.step()
    run.opt.param_groups.extend(groups)
    some_steps(run, 1, 2)


@script(make=first_half)
def a_group_that_is_refused_leaves_everything_as_it_was(run: Run) -> None:
    run.backward(0, used={0, 1})
    if run.is_ours:
        is_max = run.opt.param_groups[0]["maximize"]
        for group, match in (
            ({"params": [Parameter(torch.zeros(3, dtype=torch.complex64))]}, "complex64"),
            ({"params": [run.params[0]]}, "more than one parameter group"),
            ({"params": [run.params[5]], "maximize": not is_max}, "maximize must be the same"),
            ({"params": [Parameter(torch.zeros(3).expand(4, 3))]}, "gaps or overlaps"),
        ):
            with pytest.raises(ValueError, match=match):
                run.opt.add_param_group(group)
        assert len(run.opt.param_groups) == 1
    run.step()
    run.opt.add_param_group(rest_of(run))


# ---- parameters that are frozen, for a while or at first


def frozen_at_first(params: list[Parameter]) -> list[dict[str, Any]]:
    for p in params[2:5] + params[7:]:
        p.requires_grad_(False)
    return [{"params": params[:6], "lr": 0.01, "weight_decay": 0.1}, {"params": params[6:], "lr": 0.02}]


def all_frozen(params: list[Parameter]) -> list[Parameter]:
    return [p.requires_grad_(False) for p in params]


def trainable(run: Run) -> set[int]:
    return {i for i, p in enumerate(run.params) if p.requires_grad}


def unfreeze(run: Run) -> None:
    for p in run.params:
        p.requires_grad_(True)


@script(make=frozen_at_first, clips=True, precisions=("fp32", "bf16", "fp64"))
def unfrozen(run: Run) -> None:
    for step in range(2):
        run.backward(step, used=trainable(run))
        run.step()
    unfreeze(run)
    for step in range(3):
        run.backward(10 + step)
        run.see_grads()
        run.clip(0.5)
        run.step()


@script(make=frozen_at_first)
def unfrozen_one_by_one(run: Run) -> None:
    for index in (4, 8, 2):
        run.params[index].requires_grad_(True)
        with run.opt.no_sync():
            run.backward(index, used=trainable(run))
        run.backward(20 + index, used=trainable(run))
        run.step()
    unfreeze(run)
    run.backward(40)
    run.step()


@script()
def frozen_for_a_while(run: Run) -> None:
    """They stay bitwise what they are, weight decay or not; their moments go on where they were."""
    run.backward(0)
    run.step()
    chosen = (0, 3, 7)
    before = [run.params[i].detach().clone() for i in chosen]
    for i in chosen:
        run.params[i].requires_grad_(False)
    for step in range(3):
        run.backward(1 + step, used=trainable(run))
        run.step()
    assert_bitwise_equal([run.params[i].detach() for i in chosen], before)
    unfreeze(run)
    for step in range(2):
        run.backward(10 + step)
        run.step()


@script(make=frozen_at_first, clips=True, precisions=("fp32", "bf16", "fp64"))
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
    unfreeze(run)
    run.backward(5)
    run.step()


@script(make=frozen_at_first)
def zeroed_and_started_before_they_are_taken_in(run: Run) -> None:
    unfreeze(run)
    run.backward(0)
    run.opt.zero_grad()
    with run.opt.no_sync():
        run.backward(1)
    run.opt.grad_sync(run.params)
    run.opt.param_sync(run.params)
    run.see_grads()
    run.step()


@script(make=all_frozen)
def frozen_parameters_alone(run: Run) -> None:
    if isinstance(run.opt, ShardedAdamW):
        assert run.opt.memory_summary()["params"] >= 0 and run.opt.describe()
    run.see_grads()
    run.opt.step()
    run.opt.zero_grad()
    unfreeze(run)
    run.backward(0)
    run.step()


# ---- a model whose parameters are gathered while it runs


class Parts(nn.Module):
    """Its children run in another order than they are registered in, one of them twice; ``forward`` has known gradients."""

    def __init__(self, params: list[Parameter]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(i, p) for i, p in enumerate(params))

    def forward(self, grads: list[Tensor], order: list[int]) -> Tensor:
        halves = [g / 2 if i == 3 else g for i, g in enumerate(grads)]
        return sum((self.parts[i](halves[i]) for i in [*order, 3]), torch.zeros(()))


class Part(nn.Module):
    def __init__(self, index: int, weight: Parameter) -> None:
        super().__init__()
        self.index = index
        self.weight = weight

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum().float()


ORDERS = [[3, 0, 8, 1, 7, 2, 6, 4, 5], [5, 4, 3, 2, 1, 0, 8, 7, 6]]


def attached(run: Run, attach: bool) -> None:
    """What is read right after a step, and by the next forward, is of that step; what is written stays."""
    model = Parts(run.params)
    if attach and run.is_ours:
        run.opt.prefetch_params(model)
    for step in range(6):
        grads = share(dyadic(run.params, step), run.rank, run.world)
        model(grads, ORDERS[step > 3]).backward()
        run.step()
        with torch.no_grad():
            run.see(model.eval()(dyadic(run.params, 9), ORDERS[0]))
        model.train()
        if step == 2:
            run.see(torch.stack([p.detach().float().abs().sum() for p in run.params]))
        if step == 4:
            set_values(run, [p.detach() * 0.5 for p in run.params])
    if attach and run.is_ours:
        run.opt.prefetch_params(model)()


variant("a_model_that_is_attached", lambda run: attached(run, True), distributions=ANY, precisions=WIDE)
variant("a_model_that_is_not_attached", lambda run: attached(run, False), backends=ON_CPU)
