"""What a training loop may do with gradients: sharded ranks do what `torch.optim.AdamW` does, on the mean gradient.

G2 to G6, G8, G11 to G13 and G16 of the optimizer's test rows; more of them: test_optim_gradients.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.optim_twins import Run, assert_as_local, assert_as_local_and_torch, dyadic, over_worlds

ALL_BUT_3 = [i for i in range(9) if i != 3]

# --- which parameters have a gradient
# ------------------------------------------------------------------------------------


def some_never_used(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=ALL_BUT_3)
        run.clip(0.5)
        run.step()


def unused_now_and_then(run: Run) -> None:
    for step in range(6):
        run.backward(step, used=[i for i in range(9) if (i + step) % 3])
        run.step()


def used_on_one_rank_only(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[0, 3, 7], on=[step])
        run.backward(step, used=[1, 2, 8])
        run.step()


def used_on_two_ranks_only(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[3, 6], on=[0, 1])
        run.backward(step, used=[4, 5, 6, 7, 8])
        run.step()


def no_backward_at_all_on_most_ranks(run: Run) -> None:
    for step in range(3):
        if step == 1 or run.rank == 0:
            run.backward(step, on=None if step == 1 else [0])
        run.step()


def no_backward_anywhere(run: Run) -> None:
    run.opt.step()
    run.backward(0)
    run.step()
    run.opt.step()


# --- several backwards -----------------------------------------------------------------------------------------------


def retain_graph_and_a_second_loss(run: Run) -> None:
    for step in range(2):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        (loss * 2 + run.loss(step + 10, used=[3, 6])).backward()
        run.step()


def autograd_grad_has_no_effect(run: Run) -> None:
    assert len(torch.autograd.grad(run.loss(0), run.params)) == len(run.params)
    run.see([p.grad is None for p in run.params])
    run.backward(1, used=ALL_BUT_3)
    torch.autograd.grad(run.loss(2), run.params)
    run.step()


def no_sync_nested(run: Run) -> None:
    with run.opt.no_sync():
        with run.opt.no_sync():
            run.backward(0)
        run.backward(1, used=[0, 3])
    run.backward(2)
    run.step()


def no_sync_left_by_an_exception(run: Run) -> None:
    with pytest.raises(KeyError), run.opt.no_sync():
        run.backward(0)
        raise KeyError
    run.backward(1)
    run.see_grads()
    run.step()


def no_sync_forward_outside_backward_inside(run: Run) -> None:
    first, second = run.loss(0), run.loss(1)
    with run.opt.no_sync():
        first.backward()
        third = run.loss(2)
    second.backward()
    third.backward()
    run.step()


def no_sync_around_everything(run: Run) -> None:
    for step in range(2):
        with run.opt.no_sync():
            run.backward(2 * step, used=ALL_BUT_3)
            run.backward(2 * step + 1)
        run.clip(0.25)
        run.step()


def no_sync_after_a_synced_backward(run: Run) -> None:
    run.backward(0, used=[0, 1, 6, 8])
    with run.opt.no_sync():
        run.backward(1)
        run.backward(2, used=[0, 3])
    run.step()


def grad_sync_mixed_with_no_sync(run: Run) -> None:
    for step in range(2):
        run.backward(0 + step)
        run.opt.grad_sync()
        with run.opt.no_sync():
            run.backward(1 + step, used=[0, 3, 6])
        run.opt.grad_sync()
        run.opt.grad_sync()
        with run.opt.no_sync():
            run.backward(2 + step, used=[3, 8])
        run.backward(3 + step)
        run.clip(0.5)
        run.step()


# --- zeroing ---------------------------------------------------------------------------------------------------------


def zero_grad_between_backward_and_step(run: Run) -> None:
    run.backward(0)
    run.step()
    run.backward(1)
    run.opt.zero_grad()
    run.opt.step()  # nothing to do
    run.backward(2)
    run.opt.zero_grad()
    run.opt.zero_grad()
    run.backward(3, used=ALL_BUT_3)
    run.step()


def zero_grad_after_no_sync(run: Run) -> None:
    with run.opt.no_sync():
        run.backward(0)
    run.opt.zero_grad()
    run.backward(1, used=[0, 6])
    run.step()


def zero_grad_of_the_model(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        if step != 1:
            run.opt.step()
        torch.nn.ParameterList(run.params).zero_grad()


def zero_grad_to_zero(run: Run) -> None:
    run.backward(0, used=[0, 3, 6, 8])
    run.opt.step()
    run.opt.zero_grad(set_to_none=False)
    run.backward(1, used=[0, 1])
    run.opt.step()  # 3, 6 and 8 with zero
    run.opt.zero_grad(set_to_none=False)
    run.opt.step()


def zero_grad_to_zero_between_backward_and_step(run: Run) -> None:
    run.backward(0)
    run.opt.zero_grad(set_to_none=False)
    run.backward(1, used=[0, 3])
    run.opt.step()
    run.backward(2)
    run.opt.zero_grad(set_to_none=False)
    run.opt.step()


def zero_grad_to_zero_of_the_model(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[0, 3, 8])
        run.opt.step()
        torch.nn.ParameterList(run.params).zero_grad(set_to_none=False)
        with run.opt.no_sync():
            run.backward(step + 3, used=[0])
        torch.nn.ParameterList(run.params).zero_grad(set_to_none=False)


# --- stepping --------------------------------------------------------------------------------------------------------


def step_twice(run: Run) -> None:
    run.backward(0, used=ALL_BUT_3)
    run.clip(0.5)
    run.opt.step()
    run.see_grads()
    run.opt.step()
    run.opt.zero_grad()
    run.opt.step()


def backward_again_after_step(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[0, 3, step])
        run.opt.step()
        run.see_grads()


def backward_again_after_clip(run: Run) -> None:
    for step in range(2):
        run.backward(step)
        for p in run.params:
            p.grad.mul_(0.25)
        run.backward(step + 5, used=[0, 2, 3])
        run.see_grads()
        run.opt.grad_sync()
        for p in run.params:
            p.grad.div_(2)
        run.backward(step + 9, used=[3, 8])
        run.step()


# --- p.grad by hand --------------------------------------------------------------------------------------------------


def one_grad_taken_away(run: Run) -> None:
    run.backward(0)
    run.step()
    run.backward(1)
    run.params[3].grad = None
    run.params[8].grad = None
    run.clip(0.5)
    run.opt.step()
    run.params[0].grad = None  # of what the shards hold
    run.opt.step()
    run.backward(2, used=[0, 3])
    run.step()


def grad_taken_away_and_made_again(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        if step == 1:
            run.opt.grad_sync()
        run.params[3].grad = None
        run.backward(step + 10, used=[3, 6])
        run.step()


def grad_assigned_before_backward(run: Run) -> None:
    for p, g in zip(run.params, dyadic(run.params, 77), strict=True):
        p.grad = torch.zeros_like(p).copy_(g)
    run.backward(0, used=[0, 3, 7])
    run.see_grads()
    run.step()


def grad_assigned_after_backward(run: Run) -> None:
    run.backward(0)
    for i, g in enumerate(dyadic(run.params, 77)):
        if i in (0, 3, 8):
            run.params[i].grad = g
    run.opt.step()
    for i, g in enumerate(dyadic(run.params, 78)):
        if i in (0, 7):
            run.params[i].grad = g  # replaces what was stepped with
    run.see_grads()
    run.step()


def grad_assigned_without_backward(run: Run) -> None:
    for step in range(2):
        for i, g in enumerate(dyadic(run.params, step)):
            run.params[i].grad = g if i != 3 else None
        run.step()


def grad_with_other_strides(run: Run) -> None:
    grads = dyadic(run.params, 5)
    run.params[0].grad = grads[0].t().contiguous().t()
    run.params[3].grad = torch.stack([grads[3], grads[3]], dim=-1)[..., 1]
    run.params[6].grad = torch.full((1,), 0.25, dtype=run.params[6].dtype).expand(257)
    run.params[7].grad = grads[7].contiguous()
    run.params[8].grad = grads[8].contiguous()
    run.see_grads()
    run.step()


@pytest.mark.parametrize(
    "script",
    [value for value in list(globals().values()) if callable(value) and getattr(value, "__module__", "") == __name__],
    ids=lambda script: script.__name__,
)
@over_worlds(2)
@pytest.mark.timeout_s(240)
def test_a_loop_does_what_torch_does(worlds, script) -> None:
    assert_as_local_and_torch(script, worlds=worlds, lr=0.01, weight_decay=0.1)
    assert_as_local(script, dtype=torch.bfloat16, worlds=worlds[-1:], lr=0.01, weight_decay=0.1)
