"""Scripts: ranks that do not do the same. Other graphs, other orders, late gradients; and what they must not do."""

from __future__ import annotations

import contextlib
import operator
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.conformance.optimizer.scripts import ON_CPU, SHARDED, WIDE, script
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import Run, dyadic, loss_of, share

WAIT_S = 20


@script()
def used_on_some_ranks_only(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[0, 3, 7], on=[step])
        run.backward(step, used=[3, 6], on=[0, 1])
        run.backward(step, used=[1, 2, 4, 5, 8])
        run.step()


@script()
def no_backward_at_all_on_most_ranks(run: Run) -> None:
    for step in range(4):
        if step % 3 == 1 or run.rank == step % run.world:
            run.backward(step, on=None if step % 3 == 1 else [step % run.world])
        run.step()


@script()
def branches_that_alternate_between_ranks(run: Run) -> None:
    for step in range(4):
        run.backward(step, used=[3, 6], on=[step % 2, 2])
        run.backward(step + 10, used=[7], on=[1 - step % 2, 3])
        run.backward(step + 20, used=[5], on=[0])
        run.backward(step + 30, used=[0, 2, 4, 8])
        run.step()


@script()
def opposite_orders(run: Run) -> None:
    """Each parameter by a backward of its own, on every other rank from the last to the first."""
    for step in range(3):
        for i in range(9) if run.rank % 2 == step % 2 else range(8, -1, -1):
            run.backward(step, used=[i])
        run.step()


@script()
def random_orders_and_branches(run: Run) -> None:
    """Each backward is of one parameter, on one or two ranks; in an order of the rank's own. Some come twice, some never."""
    for step in range(6):
        same, own = random.Random(step), random.Random(f"{step} {run.rank}")
        chosen = [(10 * step + n, same.randrange(9), same.sample(range(4), 1 + n % 2)) for n in range(9)]
        for seed, param, ranks in own.sample(chosen, len(chosen)):
            run.backward(seed, used=[param], on=ranks)
        run.step()


@script()
def late_on_one_rank(run: Run) -> None:
    """Rank 0 has a second backward, of what has gone already."""
    for step in range(4):
        run.backward(step)
        if run.rank == 0:
            run.backward(step + 10, used=[3, 8], on=[0])
        run.step()


@script()
def reentrant_checkpoints_on_some_ranks(run: Run) -> None:
    for step in range(4):
        if run.rank % 2:
            run.backward(step)
        else:
            half = [g / 2 for g in share(dyadic(run.params, step), run.rank, run.world)]
            again = checkpoint(
                lambda x, half=half: loss_of(run.params, half) * x,
                torch.ones((), requires_grad=True),
                use_reentrant=step != 2,
            )
            (loss_of(run.params, half) + again).backward()
        run.step()


@script()
def weights_in_three_places_on_one_rank(run: Run) -> None:
    for step in range(3):
        if run.rank == 0:
            quarters = [g / 4 for g in share(dyadic(run.params, step), run.rank, run.world)]
            sum((loss_of(run.params, quarters) for _ in range(3)), loss_of(run.params, quarters)).backward()
        else:
            run.backward(step)
        run.step()


@script()
def no_sync_on_some_ranks_and_late_on_others(run: Run) -> None:
    """And a window in the middle of a step."""
    for step in range(3):
        with run.opt.no_sync() if run.rank % 2 else contextlib.nullcontext():
            run.backward(step, used=[0, 3, 8])
        run.backward(step + 10, used=[3, 6])
        run.opt.grad_sync()
        run.backward(step + 20, used=[6, 7], on=[1])
        run.see_grads()
        run.step()


def in_thread(fn: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def body() -> None:
        try:
            fn()
        except BaseException as error:  # noqa: BLE001 (it is raised below)
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "a backward in a thread hangs"
    if errors:
        raise errors[0]


@script(backends=("local", "shm", "c10d", "replicas"))  # the simulated device's current stream is a thread
def backward_in_another_thread(run: Run) -> None:
    """A new one each time; on rank 0 in the main one."""
    for step in range(3):
        loss = run.loss(step)
        loss.backward() if run.rank == 0 else in_thread(loss.backward)
        run.step()


# ---- exceptions


class _Fail(torch.autograd.Function):
    """Backward raises here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("in backward")


def offends(run: Run, step: int) -> bool:
    """Not in the twins, and not rank 0, whose gradients then are the mean's."""
    return step % 2 == 1 and run.rank == run.world - 1 > 0


@script()
def exception_in_forward_on_one_rank(run: Run) -> None:
    """The script catches it and goes on without a backward."""
    for step in range(4):
        with contextlib.suppress(ArithmeticError):
            if offends(run, step):
                raise ArithmeticError("in forward")
            run.backward(step, on=[0] if step % 2 else None)
        run.step()


@script()
def exception_in_backward_on_one_rank(run: Run) -> None:
    """After some gradients had come. What came counts: here, of two parameters that the others do not use."""
    for step in range(4):
        run.backward(step, used=[0, 1, 2, 3, 4, 5, 6])
        if step % 2:
            grads = [g * run.world for g in dyadic(run.params, step + 10)]
            late = loss_of(run.params[7:], grads[7:])  # autograd runs what was made last first
            if offends(run, step):
                early = _Fail.apply(loss_of(run.params[:7], grads[:7]))
                with pytest.raises(ArithmeticError):
                    (early + loss_of(run.params[7:], grads[7:])).backward()
            elif run.world == 1:
                late.backward()
        run.step()


@script()
def exception_in_backward_and_all_repeat(run: Run) -> None:
    """What had come is dropped on every rank, and comes again in the same window."""
    for step in range(4):
        grads = dyadic(run.params, step)
        if offends(run, step):
            early = _Fail.apply(loss_of(run.params[:5], grads[:5]))
            with pytest.raises(ArithmeticError):
                (early + loss_of(run.params[5:], grads[5:])).backward()
        else:
            run.backward(step + 10)
        if step % 2:
            run.opt.zero_grad()
        run.backward(step)
        run.step()


# ---- factors of gradients that some ranks do not have


@script(alone=False)
def scale_what_is_there(run: Run) -> None:
    """As for token counts: the ranks that have no gradient yet have nothing to scale."""
    for step in range(3):
        run.backward(step, used=[3, 7], on=[0])
        run.backward(step + 10, used=[0, 1])
        for p in run.params:
            if p.grad is not None:
                p.grad.mul_(0.5)
        run.step()


@script(alone=False)
def scale_old_and_new(run: Run) -> None:
    """Ranks without a backward of their own scale what earlier windows left."""
    run.backward(0, used=[0, 3, 6])
    run.opt.step()
    for p in run.params:
        if p.grad is not None:
            p.grad.mul_(0.25)
    run.backward(1, used=[3, 8], on=[1])
    for p in run.params:
        if p.grad is not None:
            p.grad.mul_(0.5)
    run.see_grads()
    run.step()


@script(alone=False, clips=True)
def clip_then_use_another(run: Run) -> None:
    run.backward(0, used=[0])
    run.clip(1e-3)
    run.backward(1, used=[3], on=[0])
    run.see_grads()
    run.clip(1e-3)
    run.step()


# ---- what ranks must not do differently: every rank raises, and after zero_grad on all of them training goes on


def replaced_by_backward(run: Run) -> None:
    run.backward(0)
    if run.rank == 0:
        run.params[3].grad = None
    run.backward(1)


def replaced_by_hand(run: Run) -> None:
    run.backward(0)
    if run.rank == run.world - 1:
        run.params[3].grad = dyadic(run.params, 9)[3]


def replaced_after_reduction(run: Run) -> None:
    run.backward(0)
    run.opt.grad_sync()
    if run.rank == 0:
        run.params[3].grad = None
    run.backward(1)


def taken_away_after_reduction(run: Run) -> None:
    run.backward(0)
    run.opt.grad_sync()
    if run.rank == 0:
        run.params[3].grad = None


def taken_away_before_reduction(run: Run) -> None:
    run.backward(0)
    if run.rank == 1:
        run.params[3].grad = None


def zeroed_on_one_rank(run: Run) -> None:
    run.backward(0)
    run.opt.grad_sync()
    if run.rank == 0:
        run.params[3].grad.zero_()
    run.backward(1, used=[0])


def zero_grad_forgotten_on_one_rank(run: Run) -> None:
    run.backward(0)
    run.opt.grad_sync()
    if run.rank != 0:
        run.opt.zero_grad()
    run.backward(1, used=[0])


def scaled_before_reduction(run: Run) -> None:
    run.backward(0)
    if run.rank == 0:
        run.params[3].grad.mul_(0.5)


def scaled_after_reduction(run: Run) -> None:
    run.backward(0)
    run.opt.grad_sync()
    if run.rank == 0:
        run.params[3].grad.mul_(0.5)


def scaled_around_another_backward(run: Run) -> None:
    run.backward(0, used=[3])
    if run.rank == 0:
        run.params[3].grad.mul_(0.5)
    run.backward(1, used=[0])


def clipped_by_other_norms(run: Run) -> None:
    run.backward(0, used=[3])
    run.opt.clip_grads_with_norm_(0.5, 1.0 + run.rank)


def expect_conflicts(run: Run, match: str, *conflicts: Callable[[Run], None]) -> None:
    for number, conflict in enumerate(conflicts):
        run.backward(50 + number)
        run.step()
        if run.world > 1:
            with pytest.raises(RuntimeError, match=match):
                conflict(run)
                run.opt.step()
        run.opt.zero_grad()
    run.backward(60)
    run.step()


@script(backends=SHARDED)
def replaced_on_one_rank_is_an_error_on_all(run: Run) -> None:
    expect_conflicts(
        run,
        "replaced or dropped.*group 0 parameter 3|group 0 parameter 3.*(replaced|dropped)",
        replaced_by_backward,
        replaced_by_hand,
        replaced_after_reduction,
        taken_away_after_reduction,
        taken_away_before_reduction,
        zeroed_on_one_rank,
        zero_grad_forgotten_on_one_rank,
    )


@script(backends=SHARDED, precisions=WIDE)
def scaled_on_one_rank_is_an_error_on_all(run: Run) -> None:
    expect_conflicts(
        run,
        "scaled the gradients",
        scaled_before_reduction,
        scaled_after_reduction,
        scaled_around_another_backward,
    )


@script(backends=ON_CPU, precisions=WIDE)  # on a device no host knows the factor
def clipped_by_other_norms_is_an_error_on_all(run: Run) -> None:
    expect_conflicts(run, "scaled the gradients", clipped_by_other_norms)


@script(backends=SHARDED)
def other_hyperparameters_on_one_rank_are_an_error_on_all(run: Run) -> None:
    """Before anything is updated, until they agree again."""
    for step, (key, other) in enumerate({"lr": 0.5, "betas": (0.5, 0.9), "weight_decay": 0.7}.items()):
        for group in run.opt.param_groups[-1:] if run.world > 1 else ():
            run.backward(step)
            usual, before = group[key], [p.detach().clone() for p in run.params]
            group[key] = other if run.rank == run.world - 1 else usual
            with pytest.raises(
                RuntimeError, match=rf"ranks disagree on .*group 0: .* on rank.* 0.*, 0\.\d on rank {run.world - 1}"
            ):
                run.opt.step()
            assert_bitwise_equal([p.detach() for p in run.params], before)
            group[key] = usual
            run.opt.zero_grad()
        run.backward(step)
        run.step()


def take_a_parameter_out(run: Run) -> Callable[[], None]:
    params = run.opt.param_groups[0]["params"]
    p = params.pop(3)
    return lambda: params.insert(3, p)


def give_an_iterator(run: Run) -> Callable[[], None]:
    group = run.opt.param_groups[0]
    params, group["params"] = group["params"], iter(group["params"])
    return lambda: group.update(params=params)


def put_one_in_twice(run: Run) -> Callable[[], None]:
    run.opt.param_groups.append({**run.opt.param_groups[0], "params": [run.params[3]]})
    return lambda: run.opt.param_groups.pop() and None


def assign_a_state(run: Run) -> Callable[[], None]:
    entry = run.opt.state[run.params[3]]
    shown, entry["exp_avg"] = entry["exp_avg"], torch.zeros_like(run.params[3])
    return lambda: entry.update(exp_avg=shown)


def assign_a_state_of_another_shape(run: Run) -> Callable[[], None]:
    entry = run.opt.state[run.params[3]]
    shown, entry["exp_avg"] = entry["exp_avg"], torch.zeros(7, 7)
    return lambda: entry.update(exp_avg=shown)


def take_a_step_away(run: Run) -> Callable[[], None]:
    entry = run.opt.state[run.params[3]]
    shown = entry.pop("step")
    return lambda: entry.update(step=shown)


def put_slow_weights(run: Run) -> Callable[[], None]:
    entry = run.opt.state[run.params[3]]
    entry["slow_buffer"] = run.params[3].detach().clone()  # Lookahead's (issue 44)
    return lambda: entry.__delitem__("slow_buffer")


def put_a_tensor_for_an_entry(run: Run) -> Callable[[], None]:
    p, entry = run.params[3], run.opt.state[run.params[3]]
    run.opt.state[p] = torch.ones(3)
    return lambda: run.opt.state.update({p: entry})


EDITS_OF_ONE_RANK: dict[Callable[[Run], Callable[[], None]], str] = {
    take_a_parameter_out: "different optimizer calls: .*a change of param_groups.* All ranks must make the same changes to param_groups",
    give_an_iterator: "params of parameter group 0 are a list_iterator|different optimizer calls: .*a change of param_groups",
    put_one_in_twice: r"shape \(64, 33\) is in groups 0 and 1|different optimizer calls: .*a change of param_groups",
    assign_a_state: "disagree on edits of optimizer.state: nothing on rank.*, exp_avg of 'group 0 parameter 3' on rank",
    assign_a_state_of_another_shape: r"'group 0 parameter 3': exp_avg has shape \(7, 7\), .* optimizer.full_state",
    take_a_step_away: "'group 0 parameter 3' has no 'step'",
    put_slow_weights: "has 'slow_buffer', but its states are .* Keep values of your own in a dict of your own",
    put_a_tensor_for_an_entry: "'group 0 parameter 3' must be a dict of states, got Tensor",
}
ROW = torch.tensor([1])
WRITES_TO_ROWS: list[Callable[[torch.Tensor], Any]] = [
    lambda part: operator.setitem(part, 3, 0.0),
    lambda part: operator.setitem(part.data, ROW, 0.0),
    lambda part: operator.setitem(part.detach(), slice(3), 0.0),
    lambda part: part.index_fill_(0, ROW, 0.0),
    lambda part: part.select(0, 1).zero_(),
    lambda part: part.view(-1).narrow(0, 1, 2).zero_(),
    lambda part: list(part)[1].zero_(),
    lambda part: part.as_strided((2,), (1,)).zero_(),
    lambda part: part.split(2)[0].zero_(),
]


@script(backends=SHARDED)
def what_one_rank_does_to_groups_and_states_is_an_error_on_all(run: Run) -> None:
    """And nothing is updated, until it is undone."""
    run.backward(0)
    run.step()
    for seed, (edit, match) in enumerate(EDITS_OF_ONE_RANK.items()):
        run.backward(seed)
        if run.world > 1:
            before = [p.detach().clone() for p in run.params]
            undo = edit(run) if run.rank == run.world - 1 else lambda: None
            with pytest.raises(RuntimeError, match=match):
                run.opt.step()
            assert_bitwise_equal([p.detach() for p in run.params], before)
            undo()
            if run.opt._engine.world > 1:
                part = run.opt.state[run.params[3]]["exp_avg"]
                for write in WRITES_TO_ROWS:
                    with pytest.raises(
                        RuntimeError, match="does not select rows of the parameter: optimizer.reset_state"
                    ):
                        write(part)
                assert torch.equal(part.data.mul_(1).detach(), part.clone()) and repr(part) == repr(part.clone())
        run.step()


@script(backends=SHARDED, torch=False)
def local_calls_do_not_hide_what_one_rank_did_to_states(run: Run) -> None:
    """Until the others have done it too."""
    run.backward(0)
    run.step()
    p, q = run.params[3], run.params[7]
    edits: dict[str, Callable[[], Any]] = {
        "exp_avg of 'group 0 parameter 3' on rank": lambda: run.opt.state[p].update(exp_avg=torch.ones_like(p)),
        "'group 0 parameter 7' starts anew on rank": lambda: run.opt.reset_state([q]),
        "'group 0 parameter 3' starts anew in rows of checksum": lambda: run.opt.reset_state([p], [1, 5]),
    }
    for seed, (match, edit) in enumerate(edits.items()):
        run.backward(seed)
        is_last = run.rank == run.world - 1
        if is_last:
            edit()
        if run.world > 1:
            run.opt.full_state(q)
            with pytest.raises(RuntimeError, match=f"disagree on edits of optimizer.state: .*{match}"):
                run.opt.step()
        if not is_last:
            edit()
        run.step()
    del run.opt.state[p]
    if run.rank == 0:
        run.opt.state_dict()
    run.backward(4)
    run.step()


@script(backends=SHARDED, torch=False, precisions=("bf16", "bf16, remainder", "fp16"))
def a_master_that_is_assigned_must_round_to_its_parameter(run: Run) -> None:
    run.backward(0)
    run.step()
    p = run.params[3]
    run.backward(1)
    run.opt.state[p]["master_param"] = p.detach().float() * 2
    with pytest.raises(
        RuntimeError, match="'group 0 parameter 3': master_param does not round to .* write to the parameter"
    ):
        run.opt.step()
    run.opt.state[p]["master_param"] = p.detach().float()
    run.step()


@script(backends=SHARDED)
def another_call_on_one_rank_is_an_error_on_all(run: Run) -> None:
    run.backward(0)
    if run.world > 1:
        with pytest.raises(RuntimeError, match="ranks made different optimizer calls"):
            run.opt.grad_sync() if run.rank == 0 else run.opt.step()
    run.opt.zero_grad()
    run.backward(1)
    run.step()


# ---- `close` drops what there is, and the communicator goes on with the next optimizer


def zero_grad_on_one_rank(run: Run) -> None:
    run.backward(0)
    run.opt.step()
    if run.rank == 0:
        run.opt.zero_grad()


def scaled_on_one_rank(run: Run) -> None:
    run.backward(0)
    run.opt.step()
    if run.rank == 0:
        run.params[3].grad.mul_(2.0)


def refused_step(run: Run) -> None:
    if run.world > 1:
        with pytest.raises(RuntimeError, match="replaced or dropped"):
            replaced_by_backward(run)
            run.opt.step()


def refused_call(run: Run) -> None:
    run.backward(0, on=[0])
    if run.world > 1:
        with pytest.raises(RuntimeError, match="ranks made different optimizer calls"):
            run.opt.grad_sync() if run.rank == 0 else run.opt.step()


def failed_forward_on_all_but_one(run: Run) -> None:
    run.backward(0, on=[0])
    run.opt.zero_grad()


def anything(run: Run) -> None:
    run.backward(0)
    run.backward(1, used=[3, 8], on=[0])
    with run.opt.no_sync():
        run.backward(2, used=[3, 4, 6], on=[1])
    run.params[run.rank].grad = None


@script(backends=SHARDED)
def closed_whatever_ranks_have_done(run: Run) -> None:
    for spoil in (
        zero_grad_on_one_rank,
        scaled_on_one_rank,
        refused_step,
        refused_call,
        failed_forward_on_all_but_one,
        anything,
    ):
        run.backward(3)
        run.step()
        spoil(run)
        run.restart()
    run.backward(4)
    run.step()


# ---- what the messages advise


@script(backends=SHARDED)
def remedies(run: Run) -> None:
    """Each of grads/agreement.py, followed to the letter where it was not followed in the scripts of errors above."""
    for step in range(2):
        run.backward(step, used=[0, 3], on=[0])
        run.opt.grad_sync()  # before zero_grad, where some ranks skip a backward
        run.opt.zero_grad()
        run.backward(step + 10)
        run.step()
        run.backward(step + 20, used=[0, 3], on=[0])
        run.opt.grad_sync()  # before scaling, where ranks use different parameters; and before stock code
        for p in run.params:
            if p.grad is not None:
                p.grad.mul_(0.5)
        torch.nn.utils.clip_grad_norm_(run.params, 1e9)  # asks for norms one after the other, and scales by 1
        run.step()
