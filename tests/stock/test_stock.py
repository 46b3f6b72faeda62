"""Stock torch code on the gradients of the real sharded optimizer, beside the scripts of tests/conformance/optimizer and
tests/unit/test_placeholder.py. Gradients are dyadic and their norms exact, so everything is compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ShardedGradError
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import dyadic, loss_of, on_ranks, run_local, share
from tests.support.stock_flows import Run, expect_equal_to_unsharded, make_params


def used_by(rank: int) -> Callable[[int], bool]:
    return lambda i: i != rank


STOCK = {
    "clip": lambda run: clip_grad_norm_(run.params, 0.25),
    "clip, one by one": lambda run: clip_grad_norm_(run.params, 0.25, foreach=False),
    "clip values": lambda run: clip_grad_value_(run.params, 0.25),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)
def test_divergent_ranks_are_told_to_sync_first(world: int, stock: Callable[[Run], Any]) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        run = Run(comm)
        run.loss(used_by(comm.rank)).backward()
        with pytest.raises(RuntimeError, match=r"call optimizer\.grad_sync\(\) first"):
            stock(run)
        run.opt.zero_grad()
        for run.step in range(2):
            run.loss(used_by(comm.rank)).backward()
            run.opt.grad_sync()
            stock(run)
            run.opt.step()
            run.opt.zero_grad()
        return [p.detach().clone() for p in run.params]

    results = run_local(world, body)
    for params in results:
        assert_bitwise_equal(params, results[0])


@pytest.mark.parametrize("overlap", [True, False])
def test_stock_code_on_gradients_kept_from_no_sync(overlap: bool) -> None:
    """They are not reduced yet, and nobody outside can tell."""

    def flow(run: Run) -> None:
        for part in range(3):
            with run.opt.no_sync():
                (run.loss(lambda i, part=part: i != part) / 2).backward()  # type: ignore[misc]
                assert all(type(g) is Tensor for i, g in enumerate(run.grads) if i != part)
            assert run.comm is None or all(type(g) is ShardedGrad for g in run.grads)
            for p in run.params:
                p.grad = p.grad.mul_(0.5) if p.grad is not None else None
        run.params[4].grad.zero_()
        run.params[5].grad = None
        run.params[6].grad = torch.full_like(run.params[6], 0.25)
        if run.step:
            run.loss(lambda i: i % 2 == 0).backward()
        run.seen.append(clip_grad_norm_(run.params, 0.25))
        run.opt.step()
        if run.step:
            with run.opt.no_sync():  # adds to what the shards hold
                run.loss().backward()
            run.seen.append(get_total_norm(run.grads))
            run.opt.step()

    expect_equal_to_unsharded(flow, overlap_grad_sync=overlap)


def test_a_scaled_half_gradient_does_not_overflow() -> None:
    def body(comm: Communicator) -> float:
        p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        opt = ShardedAdamW([p], process_group=comm)
        (p * 100.0).sum().backward()
        p.grad.mul_(1 / 1024)
        (p * 100.0).sum().backward()
        grad = opt.full_grad(p)
        assert grad is not None
        opt.close()
        return float(grad[0])

    assert run_local(1, body)[0] == pytest.approx(100 + 100 / 1024, rel=1e-3)


# --- hooks that edit gradients in backward (issue 44) -----------------------------------------------------------------

EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp_": lambda p: p.grad.clamp_(-0.25, 0.25),
    "clip_grad_value_": lambda p: clip_grad_value_([p], 0.25),
    "clip_grad_norm_": lambda p: clip_grad_norm_([p], 0.5),
    "another tensor": lambda p: setattr(p, "grad", p.grad.sign()),
    "linear": lambda p: p.grad.mul_(0.5),
}
FIRST = range(3)  # parameters whose gradients open a window


class Hooked:
    """One rank, and hooks ``edit`` on all parameters."""

    def __init__(self, comm: Communicator | None, edit: Callable[[nn.Parameter], Any], dtype: torch.dtype) -> None:
        self.comm, self.edit = comm, edit
        self.params = [nn.Parameter(p.detach().to(dtype)) for p in make_params()]
        self.handles: list[Any] = []

    def make_optimizer(self) -> None:
        self.opt = ShardedAdamW(self.params, lr=0.01, process_group=self.comm, bucket_cap_mb=1e-3)

    def hook(self) -> None:
        for p in self.params:
            self.handles.append(p.register_post_accumulate_grad_hook(lambda p: (self.edit(p), None)[1]))

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()

    def backward(self, step: int, used: Callable[[int], bool] = lambda i: True) -> None:
        rank, world = (self.comm.rank, self.comm.size) if self.comm else (0, 1)
        loss_of(self.params, share(dyadic(self.params, step), rank, world), used).backward()
        if self.comm and not self.opt._engine.grads.is_in_no_sync:  # type: ignore[union-attr]
            assert all(p.grad is None or type(p.grad) is ShardedGrad for p in self.params), "it is this rank's alone"

    def expect_mean(self, step: int, edited: Callable[[int], bool] = lambda i: True) -> None:
        """As DDP: the mean of what the hooks have made of each rank's gradient. Then steps."""
        world = self.comm.size if self.comm else 1
        everyone = [share(dyadic(self.params, step), rank, world) for rank in range(world)]
        for index, (p, *grads) in enumerate(zip(self.params, *everyone, strict=True)):
            twins = [nn.Parameter(torch.zeros_like(p)) for _ in grads]
            for twin, grad in zip(twins, grads, strict=True):
                twin.grad = grad.clone()
                if edited(index):
                    self.edit(twin)
            mean = torch.stack([twin.grad.float() for twin in twins]).mean(0)
            rtol = 1e-2 if p.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(self.opt.full_grad(p), mean, rtol=rtol, atol=1e-6)
        self.opt.step()
        self.opt.zero_grad()


@pytest.mark.parametrize(("world", "dtype"), [(None, torch.float32), (2, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("when", ["before", "after", "later", "while open", "again", "unfrozen"])
def test_hooks_edit_this_ranks_gradient_whenever_they_were_registered(
    when: str, edit: Callable[[nn.Parameter], Any], dtype: torch.dtype, world: int | None
) -> None:
    def body(comm: Communicator | None) -> None:
        one = Hooked(comm, edit, dtype)
        if when in ("before", "again"):
            one.hook()
        for p in one.params[1:]:
            p.requires_grad_(when != "unfrozen")
        one.make_optimizer()
        for p in one.params:
            p.requires_grad_(True)
        if when == "again":
            one.unhook()  # as many hooks as before, in another order
        if when in ("after", "again", "unfrozen"):
            one.hook()
        if when == "later":
            one.backward(7)
            one.opt.step()
            one.opt.zero_grad()
            one.hook()
        if when == "while open":  # the first gradients are packed, and no hook will see them
            one.backward(0, lambda i: i in FIRST)
            one.hook()
            one.backward(0, lambda i: i not in FIRST)
            one.expect_mean(0, lambda i: i not in FIRST)
        for step in range(3):
            one.backward(step)
            one.expect_mean(step)
        one.opt.close()

    on_ranks(world, body)


@pytest.mark.parametrize("edit", [*EDITS.values(), lambda p: p.grad.norm()], ids=[*EDITS, "norm"])
def test_hooks_on_a_sum_that_is_in_the_buckets_are_linear_or_refused(edit: Callable[[nn.Parameter], Any]) -> None:
    def body(comm: Communicator) -> None:
        one = Hooked(comm, edit, torch.float32)
        one.make_optimizer()
        one.backward(0)
        one.hook()
        if edit is EDITS["linear"]:
            one.backward(0)
            one.edit = lambda p: None  # (g + g) / 2
            one.expect_mean(0)
            return
        with pytest.raises(ShardedGradError, match=r"every backward of the step runs inside optimizer.no_sync\(\)"):
            one.backward(0)
        one.opt.zero_grad()
        with one.opt.no_sync():
            one.backward(0)
        one.expect_mean(0)
        one.opt.close()

    run_local(2, body)
