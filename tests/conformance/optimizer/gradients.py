"""Scripts: what a loop may do with gradients. Windows and micro-batches, zeroing, stepping, ``p.grad`` by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.conformance.optimizer.scripts import DISTRIBUTIONS, PRECISIONS, WIDE, script
from tests.support.optim_twins import Run, dyadic, loss_of, share

ALL_BUT_3 = [i for i in range(9) if i != 3]
ANY = tuple(DISTRIBUTIONS)

# ---- which parameters have a gradient


@script(distributions=ANY)
def every_step_alike(run: Run) -> None:
    for step in range(5):
        run.backward(step)
        run.see_grads()
        run.step()


@script(clips=True)
def some_never_used(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=ALL_BUT_3)
        run.clip(0.5)
        run.step()


@script()
def unused_now_and_then(run: Run) -> None:
    for step in range(6):
        run.backward(step, used=[i for i in range(9) if (i + step) % 3])
        run.step()


@script()
def no_backward_anywhere(run: Run) -> None:
    run.opt.step()
    run.backward(0)
    run.step()
    run.opt.step()


# ---- windows


@script()
def retain_graph_and_a_second_loss(run: Run) -> None:
    for step in range(2):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        run.opt.grad_sync()
        with run.opt.no_sync():
            loss.backward(retain_graph=True)
        (loss * 2 + run.loss(step + 10, used=[3, 6])).backward()
        run.step()


@script()
def autograd_grad_in_the_middle(run: Run) -> None:
    """Before, between and behind backwards of a window, also of the same graph: no hook runs, nothing changes."""
    for step in range(2):
        loss = run.loss(step)
        torch.autograd.grad(loss, run.params, retain_graph=True)
        run.see([p.grad is None for p in run.params])
        loss.backward(retain_graph=True)
        before = [p.grad for p in run.params]
        for p, grad in zip(run.params, torch.autograd.grad(loss, run.params), strict=True):
            assert type(grad) is Tensor and grad.shape == p.shape
        assert all(p.grad is grad for p, grad in zip(run.params, before, strict=True))
        run.step()


@script()
def no_sync_left_by_exceptions(run: Run) -> None:
    """At every depth, in forward or in backward; then all works as before."""
    for step in range(3):
        with pytest.raises(ValueError), run.opt.no_sync():
            run.backward(step, used=[0, 3])
            with pytest.raises(KeyError), run.opt.no_sync():
                run.backward(step + 1, used=[3, 6])
                raise KeyError
            run.backward(step + 2, used=[7, 8])  # still inside
            raise ValueError
        run.backward(step + 3)
        run.see_grads()
        run.step()


@script()
def no_sync_entered_twice(run: Run) -> None:
    """One inside the other, and one left before another that was entered later."""
    with run.opt.no_sync():
        with run.opt.no_sync():
            run.backward(0)
        run.backward(1, used=[0, 3])
    run.backward(2)
    run.step()
    for step in range(2):
        first, second = run.opt.no_sync(), run.opt.no_sync()
        first.__enter__()
        run.backward(step)
        second.__enter__()
        run.backward(step + 1, used=[0, 8])
        first.__exit__(None, None, None)
        run.backward(step + 2, used=[3])
        second.__exit__(None, None, None)
        run.backward(step + 3)
        run.step()


@script()
def forward_and_backward_on_different_sides_of_no_sync(run: Run) -> None:
    first, second = run.loss(0), run.loss(1)
    with run.opt.no_sync():
        first.backward()
        third = run.loss(2, used=[0, 3, 6])
    second.backward()
    third.backward()
    run.see_grads()
    run.step()
    with run.opt.no_sync():
        first = run.loss(3)
    with run.opt.no_sync():
        first.backward()
    run.step()


@script(clips=True, distributions=ANY)
def no_sync_around_all_backwards(run: Run) -> None:
    """What step and clip_grad_norm_ reduce then, outside of it and inside."""
    for step in range(2):
        with run.opt.no_sync():
            run.backward(2 * step, used=ALL_BUT_3)
            run.backward(2 * step + 1)
        run.clip(0.25)
        run.step()
    with run.opt.no_sync():
        for step in range(2):
            run.backward(2 * step)
            run.backward(2 * step + 1, used=[0, 3, 8])
            run.clip(0.5)
            run.step()


@script()
def no_sync_after_a_synced_backward(run: Run) -> None:
    run.backward(0, used=[0, 1, 6, 8])
    with run.opt.no_sync():
        run.backward(1)
        run.backward(2, used=[0, 3])
    run.step()


@script(clips=True)
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


@script(distributions=ANY)
def a_window_for_each_micro_batch(run: Run) -> None:
    for step in range(3):
        for micro in range(3):
            run.backward(10 * step + micro, used={0, 2, 3, 8})
            run.opt.grad_sync()
        run.step()


@script()
def backwards_without_no_sync(run: Run) -> None:
    """A gradient that comes after its bucket has gone goes in a second round."""
    for step in range(3):
        for micro in range(3):
            run.backward(10 * step + micro, used=None if micro else [0, 3, 6])
        run.step()


@script()
def checkpoints_of_both_kinds(run: Run) -> None:
    """Half of every gradient directly, half through a checkpoint: in two portions if reentrant."""
    for step in range(4):
        half = [g / 2 for g in share(dyadic(run.params, step), run.rank, run.world)]
        again = checkpoint(
            lambda x, half=half: loss_of(run.params, half) * x,
            torch.ones((), requires_grad=True),
            use_reentrant=step % 2,
        )
        (loss_of(run.params, half) + again).backward()
        run.step()


# ---- zeroing


@script()
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
    with run.opt.no_sync():
        run.backward(0)
    run.opt.zero_grad()
    run.backward(1, used=[0, 6])
    run.step()


@script()
def zero_grad_of_the_model(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        if step != 1:
            run.opt.step()
        torch.nn.ParameterList(run.params).zero_grad()


@script()
def zero_grad_to_zero(run: Run) -> None:
    """What has a gradient of zeros is stepped, and decays."""
    for step in range(3):
        run.backward(step, used=[0, 3, 6] if step else None)
        run.opt.step()
        run.opt.zero_grad(set_to_none=False)
        run.opt.zero_grad(set_to_none=False)
        run.opt.step()
    run.opt.zero_grad(set_to_none=False)
    run.backward(9, used=[8])
    run.opt.zero_grad()
    run.opt.zero_grad(set_to_none=False)  # of nothing: nothing
    run.opt.step()


@script()
def zero_grad_to_zero_between_backward_and_step(run: Run) -> None:
    run.backward(0)
    run.opt.zero_grad(set_to_none=False)
    run.backward(1, used=[0, 3])
    run.opt.step()
    run.backward(2)
    run.opt.zero_grad(set_to_none=False)
    run.opt.step()


@script()
def zero_grad_to_zero_of_the_model(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[0, 3, 8])
        run.opt.step()
        torch.nn.ParameterList(run.params).zero_grad(set_to_none=False)
        with run.opt.no_sync():
            run.backward(step + 3, used=[0])
        torch.nn.ParameterList(run.params).zero_grad(set_to_none=False)


# ---- stepping


@script(clips=True)
def step_twice(run: Run) -> None:
    run.backward(0, used=ALL_BUT_3)
    run.clip(0.5)
    run.opt.step()
    run.see_grads()
    run.opt.step()
    run.opt.zero_grad()
    run.opt.step()


@script()
def backward_again_after_step(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[0, 3, step])
        run.opt.step()
        run.see_grads()


@script()
def closures(run: Run) -> None:
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            assert torch.is_grad_enabled()
            run.opt.zero_grad()
            run.backward(step)
            return torch.tensor(float(step))

        with torch.no_grad():
            run.see(run.opt.step(closure))
    run.see(run.opt.step())


@script()
def hooks_of_steps(run: Run) -> None:
    calls: list[str] = []
    before = run.opt.register_step_pre_hook(lambda opt, args, kwargs: calls.append("before"))
    run.opt.register_step_post_hook(lambda opt, args, kwargs: calls.append("after"))
    for step in range(3):
        run.backward(step)
        run.step()
        if step == 1:
            before.remove()
    run.see(calls)


# ---- p.grad by hand


@script(precisions=WIDE)
def grads_scaled_between_backwards(run: Run) -> None:
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
        torch._foreach_mul_([p.grad for p in run.params], 0.5)
        run.step()


@script(clips=True)
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


@script()
def grad_taken_away_and_made_again(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        if step == 1:
            run.opt.grad_sync()
        run.params[3].grad = None
        run.backward(step + 10, used=[3, 6])
        run.step()


@script()
def grad_assigned_before_backward(run: Run) -> None:
    for p, g in zip(run.params, dyadic(run.params, 77), strict=True):
        p.grad = torch.zeros_like(p).copy_(g)
    run.backward(0, used=[0, 3, 7])
    run.see_grads()
    run.step()


@script()
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


@script()
def grad_assigned_without_backward(run: Run) -> None:
    for step in range(2):
        for i, g in enumerate(dyadic(run.params, step)):
            run.params[i].grad = g if i != 3 else None
        run.step()


@script(precisions=[name for name in PRECISIONS if name != "fp16"])  # torch copies its negated views without the sign
def grads_with_other_strides(run: Run) -> None:
    """Assigned before a backward that adds to it, after one that it replaces, and without any."""
    odd: list[Callable[[Tensor], Tensor]] = [
        lambda g: torch.stack([g, g], dim=-1)[..., 1],  # gaps
        lambda g: g.permute(*reversed(range(g.dim()))).contiguous().permute(*reversed(range(g.dim()))),
        lambda g: torch._neg_view(g.neg()),
    ]
    for step, make in enumerate(odd):
        for i, g in enumerate(dyadic(run.params, 50 + step)):
            if i in (0, 3, 7):
                run.params[i].grad = make(g)
        run.backward(step, used=[0, 7])
        run.see_grads()
        run.opt.step()
        for i, g in enumerate(dyadic(run.params, 60 + step)):
            if i in (0, 3, 8):
                run.params[i].grad = make(g)
        run.params[6].grad = torch.full((1,), 0.25, dtype=run.params[6].dtype).expand(257)
        run.step()


@script(precisions=("fp32", "fp32, bf16 states", "fp64"))
def grads_of_other_dtypes(run: Run) -> None:
    """What torch allows once p.grad_dtype is None: the values are cast. torch's AdamW refuses them, so there they are."""
    for p in run.params:
        p.grad_dtype = None
    for step, dtype in enumerate((torch.bfloat16, torch.float64, torch.float32)):
        for i, g in enumerate(dyadic(run.params, step)):
            if i != 3:
                run.params[i].grad = g.to(dtype) if run.is_ours else g
        run.see_grads()
        run.step()
