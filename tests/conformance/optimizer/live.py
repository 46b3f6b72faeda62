"""Scripts: ``param_groups`` and ``state`` are edited between steps, which torch reads in every one."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch.nn import Parameter

from tests.conformance.optimizer.scripts import WIDE, script
from tests.conformance.optimizer.states import some_steps, two_groups
from tests.conformance.optimizer.updates import variant
from tests.support.optim_twins import Run

# ---- groups that are edited by hand, which torch reads in every step


def step_on(run: Run, seed: int, clips: bool = False) -> None:
    """A step of what is in the groups now."""
    run.params[:] = [p for group in run.opt.param_groups for p in group["params"]]
    run.backward(seed)
    if clips:
        run.clip(0.5)
    run.step()


def forget_gone(run: Run) -> None:
    """torch saves no state that has an entry of a parameter without a group."""
    for p in [p for p in run.opt.state if not any(p is known for known in run.params)]:
        del run.opt.state[p]


def edit_groups(run: Run, clips: bool) -> None:
    """Parameters are moved, let go and put back, which go on from their states; groups are exchanged, cut and inserted."""
    step_on(run, 0)
    groups = run.opt.param_groups
    groups[1]["params"].insert(1, groups[0]["params"].pop(3))
    step_on(run, 1, clips)
    groups.reverse()
    gone = [groups[0]["params"].pop(2), groups[1]["params"].pop(0)]
    step_on(run, 2, clips)
    gone[0].grad = gone[1].grad = None
    run.see(torch.cat([p.detach().flatten() for p in gone]))
    groups.insert(1, {**groups[1], "params": gone[:1], "lr": 0.03})
    step_on(run, 3)
    run.opt.param_groups = [{**group, "params": [*group["params"]]} for group in groups[1:]]
    late = run.params[0]
    step_on(run, 4, clips)
    run.opt.param_groups[0]["params"] = [*run.opt.param_groups[0]["params"], gone[1], late]
    for seed in (5, 6):
        step_on(run, seed)
    forget_gone(run)


variant("groups_are_edited", lambda run: edit_groups(run, False), make=two_groups)
variant(
    "groups_are_edited_and_clipped", lambda run: edit_groups(run, True), make=two_groups, clips=True, precisions=WIDE
)


@script(make=two_groups)
def groups_are_edited_with_gradients(run: Run) -> None:
    """Those of parameters that stay are stepped; so is what a new parameter has."""
    first, second = run.opt.param_groups
    run.backward(0)
    late = [first["params"].pop(1), second["params"].pop(4)]
    run.opt.step()
    run.opt.zero_grad()
    for p in late:
        p.grad = None
    run.see(torch.cat([p.detach().flatten() for p in late]))
    with run.opt.no_sync():
        run.backward(1)
    second["params"].append(late[0])
    run.opt.grad_sync()
    run.backward(2)
    first["params"].insert(1, late[1])
    first["params"].insert(1, second["params"].pop())
    run.params[:] = [*first["params"], *second["params"]]
    run.step()
    step_on(run, 3)


@script(make=two_groups, worlds=(1, 2, 4))
def densified(run: Run) -> None:
    """A parameter gets more rows, then fewer, as 3D Gaussian splatting does; and its optimizer goes on from what it was."""
    for step, rows in enumerate((range(7), [*range(7), 2, 3, 3], [1, 4, 8], [*range(3)])):
        step_on(run, step)
        group = run.opt.param_groups[0]
        old, state = group["params"][0], run.opt.state
        new = Parameter(torch.cat([old.detach(), old.detach()])[list(rows)].clone())
        stored = run.opt.full_state(old) if run.is_ours else state[old]
        for name in stored.keys() - {"step"}:
            stored[name] = torch.cat([stored[name], stored[name] * (name == "master_param")])[list(rows)]
        del state[old]
        group["params"][0] = new
        if step != 2:
            state[new] = stored
    step_on(run, 9)


@script(make=two_groups)
def replaced_by_its_like(run: Run) -> None:
    """With the entry that it had, or one that is zeroed."""
    for step, index in enumerate((0, 3, 0, 2)):
        step_on(run, step)
        group = run.opt.param_groups[step % 2]
        old = group["params"][index]
        group["params"][index] = Parameter(old.detach().clone() * 0.5)
        entry = run.opt.state[group["params"][index]] = run.opt.state.pop(old)
        if step == 2:
            entry["exp_avg"] = torch.zeros_like(old)
    step_on(run, 5)


@script(make=two_groups, distributions=("static graph",))
def a_static_graph_is_learnt_anew_with_other_groups(run: Run) -> None:
    for seed in range(4):
        if seed == 2:
            del run.opt.param_groups[0]["params"][1:3]
        step_on(run, seed)
    forget_gone(run)


# ---- what others do to `optimizer.state`


def moments_of(run: Run, p: Parameter) -> list[str]:
    return [name for name in run.opt.state[p] if name.startswith(("exp", "max"))]


@script()
def states_are_edited(run: Run) -> None:
    """Entries are deleted, emptied, exchanged and written to; then all of them are replaced."""
    for seed in (0, 1):
        step_on(run, seed)
    state, params = run.opt.state, run.params
    state[params[0]]["step"] = torch.tensor(5.0)
    state[params[1]].clear()
    del state[params[3]]
    for name in moments_of(run, params[4]):
        state[params[4]][name] = torch.full_like(params[4], 0.25)
    for name in moments_of(run, params[6]):
        state[params[6]][name].zero_()
        state[params[8]][name] = torch.ones_like(params[8]) / 8
        state[params[7]][name] += 0.5
    state[params[7]]["step"].fill_(3)
    step_on(run, 2)
    state[params[8]] = dict(state[params[8]])  # as loops that move states to a device do
    run.see([run.opt.state_dict()["state"][i]["step"].item() for i in range(9)])
    step_on(run, 3)
    run.opt.state = defaultdict(dict)
    step_on(run, 4)
    del run.opt.state[params[3]]
    for seed in (5, 6):
        step_on(run, seed)


@script()
def moments_of_rows_are_reset(run: Run) -> None:
    for seed, (index, rows) in enumerate(
        ((3, [1, 5, 40]), (7, slice(2)), (8, torch.tensor([True, False] * 3)), (6, range(50, 257)), (0, -1))
    ):
        step_on(run, seed)
        p, rows = run.params[index], list(rows) if isinstance(rows, range) else rows
        if run.is_ours:
            run.opt.reset_state([p], rows)
            run.opt.reset_state([run.params[5]])
        else:
            for name in moments_of(run, p):
                run.opt.state[p][name][rows] = 0.0
            del run.opt.state[run.params[5]]
        whole = run.opt.full_state(p) if run.is_ours else run.opt.state[p]
        run.see(whole["step"])
        run.see(whole["exp_avg"])
    step_on(run, 9)
    p, group = run.params[4], run.opt.param_groups[0]["params"]
    for name in moments_of(run, p):  # what was assigned before goes too
        run.opt.state[p][name] = torch.ones_like(p)
    old, new = run.params[2], Parameter(run.params[2].detach().clone())
    run.params[2] = group[2] = new
    run.opt.state[new] = run.opt.state.pop(old)
    if run.is_ours:
        with pytest.raises(ValueError, match="rows= of a parameter that the next step"):
            run.opt.reset_state([new], [0])
        run.opt.reset_state(iter([p, new]))
    else:
        del run.opt.state[p], run.opt.state[new]
    step_on(run, 10)
    if run.is_ours:
        with pytest.raises(ValueError, match="rows= needs parameters="):
            run.opt.reset_state(rows=[0])
        with pytest.raises(ValueError, match="not trained by this optimizer"):
            run.opt.reset_state(Parameter(torch.zeros(3)))


# ---- memory of parameters


def exchanged(run: Run, which: range) -> None:
    """Memory, not values: what the parameters had is its holders' (issue 44), also after the end of the optimizer."""
    some_steps(run, 0)
    old = [run.params[i].data for i in which]
    for i in which:
        run.params[i].data = run.params[i].data * 0.5
    run.backward(1)
    if run.is_ours and run.world > 1 and run.opt._engine.comm.is_registered:
        with pytest.raises(RuntimeError, match=r"parameter [0-8]' new memory .*\(registered=True\): write val"):
            run.opt.step()
        old = [one.clone() for one in old]
    run.opt.step()
    run.opt.zero_grad()
    some_steps(run, 2)
    latest = [p.data for p in run.params]
    for i in which:
        run.params[i].data = run.params[i].data.clone()
    if not run.is_reference:
        saved = run.opt.state_dict()
        run.opt.close()
        run.opt = run.make_optimizer(run.params)
        run.opt.load_state_dict(saved)
    some_steps(run, 3)
    for one in (*old, *(latest[i] for i in which)):
        run.see(one)


variant("exchanged_memory", lambda run: exchanged(run, range(9)))
variant("exchanged_memory_of_one", lambda run: exchanged(run, range(3, 4)))
