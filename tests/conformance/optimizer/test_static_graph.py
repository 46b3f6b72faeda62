"""static_graph=True over ranks: the same training without agreement, and an error on all ranks where a step differs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import PeerError
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, dyadic, make_params, run_local, share
from tests.support.requirements import slow_case

pytestmark = pytest.mark.dist


def gone(run: Run) -> None:
    run.backward(9, used={0, 3} if run.rank else {0})
    run.opt.step()


def new(run: Run) -> None:
    run.backward(9, used={0, 3, 6} if run.rank == 0 else {0, 3})
    run.opt.step()


def too_often(run: Run) -> None:
    for _ in range(3 if run.rank == run.world - 1 else 1):
        run.backward(9, used={0, 3})
    run.opt.step()


def new_by_hand(run: Run) -> None:
    run.backward(9, used={0, 3})
    if run.rank == 0:
        run.params[6].grad = torch.ones_like(run.params[6])
    run.opt.clip_grad_norm_(1.0)


def skipped(run: Run) -> None:
    if run.rank:
        run.backward(9, used={0, 3})
    run.opt.step()


def skipped_and_clipped(run: Run) -> None:
    if run.rank:
        run.backward(9, used={0, 3})
    run.opt.clip_grad_norm_(1.0)


def dropped(run: Run) -> None:
    run.backward(9, used={0, 3})
    if run.rank == 0:
        run.opt.zero_grad()
    run.opt.step()


def replaced(run: Run) -> None:
    run.backward(9, used={0, 3})
    if run.rank == 0:
        run.opt.zero_grad()
        run.backward(9, used={0, 3})
    run.opt.step()


@pytest.mark.parametrize("world", [3, slow_case(2), slow_case(4)])
@pytest.mark.parametrize(
    "break_it, offender, name",
    [
        (skipped, 0, "weight0"),
        (skipped_and_clipped, 0, "weight0"),
        (dropped, 0, "weight0"),
        (replaced, 0, "weight[03]"),
        (gone, 0, "weight3"),
        (new, 0, "weight6"),
        (too_often, -1, "weight[03]"),
        (new_by_hand, 0, "weight6"),
    ],
)
def test_a_deviation_raises_on_all_ranks_and_names_the_parameter(
    world: int, break_it: Callable[[Run], None], offender: int, name: str
) -> None:
    """The promise broken on one rank. Nobody hangs."""
    run_local(world, deviate, break_it, offender % world, name)


def deviate(comm: Communicator, break_it: Callable[[Run], None], offender: int, name: str) -> None:
    params = make_params()
    named = [(f"weight{i}", p) for i, p in enumerate(params)]
    run = Run(ShardedAdamW(named, process_group=comm, static_graph=True, **TINY), params, comm.rank, comm.size)
    for step in range(2):
        run.backward(step, used={0, 3})
        run.step()
    with pytest.raises(
        RuntimeError, match=f"static_graph=True, but the gradients of parameter '{name}' on rank"
    ) as error:
        break_it(run)
        run.opt.step()  # a rank that was done before the others were told finds out here
    assert isinstance(error.value, PeerError) != (comm.rank == offender)
    assert comm.rank == offender or error.value.rank == offender
    with contextlib.suppress(RuntimeError):  # the same error, where there is something left to say to the others
        run.opt.close()
    assert all(p.grad is None or type(p.grad) is torch.Tensor for p in params), "the hooks and placeholders are gone"


def test_a_gradient_that_some_ranks_do_not_have_is_scaled_once_it_is_reduced() -> None:
    """By all of them then. Before, it is refused on all: the ranks without it would never hear of the factor."""

    def body(comm: Communicator) -> list[Any]:
        params = make_params()
        named = [(f"weight{i}", p) for i, p in enumerate(params)]
        run = Run(ShardedAdamW(named, process_group=comm, static_graph=True, **TINY), params, comm.rank, comm.size)
        for step in range(3):
            run.backward(step, used={0, 3} if comm.rank == 0 else {0})
            params[0].grad.mul_(0.5)  # type: ignore[union-attr]
            if step:
                run.opt.grad_sync()
            if step or comm.rank == 0:
                params[3].grad.mul_(0.5)  # type: ignore[union-attr]
            run.see_grads()
            run.step()
        with pytest.raises(
            RuntimeError, match=r"the gradients of 'weight3' cannot be scaled .* call optimizer.grad_sync\(\)"
        ):
            run.backward(9, used={0, 3} if comm.rank == 0 else {0})
            if comm.rank == 0:
                params[3].grad.mul_(0.5)  # type: ignore[union-attr]
            run.opt.step()
        return run.seen

    for seen in run_local(2, body):
        for step in range(3):
            whole = dyadic(make_params(), step)
            grads = seen[len(whole) * step : len(whole) * (step + 1)]
            assert_bitwise_equal(grads[0], whole[0] * 0.5)
            assert_bitwise_equal(grads[3], share(whole, 0, 2)[3] * 0.25)


@pytest.mark.parametrize("forward_fails", [False, True])
def test_gradients_may_be_dropped_on_one_rank_before_close(forward_fails: bool) -> None:
    """Nobody needs them any more, so no promise is broken; what one rank has launched alone ends with the communicator."""
    dropped = threading.Barrier(2, timeout=20)

    def body(comm: Communicator) -> None:
        params = make_params()
        run = Run(ShardedAdamW(params, process_group=comm, static_graph=True, **TINY), params, comm.rank, comm.size)
        for step in range(2):
            run.opt.zero_grad()
            run.backward(step)
            run.opt.step()
        if comm.rank == 0:
            run.opt.zero_grad()
            if forward_fails:
                run.backward(2)
                run.opt.zero_grad()
        dropped.wait()  # who closes before fails the other's backward
        run.opt.close()

    run_local(2, body)
