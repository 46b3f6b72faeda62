"""static_graph=True over ranks: the same training without agreement, and an error on all ranks where a step differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import PeerError
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, dyadic, make_params, run_local, share

pytestmark = pytest.mark.dist


def exchanges_of(comm: Communicator) -> list[bytes]:
    """What this rank says to the others, from now on."""
    said: list[bytes] = []
    original = comm.exchange

    def exchange(payload: bytes) -> list[bytes]:
        said.append(payload)
        return original(payload)

    comm.exchange = exchange  # type: ignore[method-assign]
    return said


@pytest.mark.parametrize("is_static", [True, False])
def test_after_the_first_step_ranks_agree_on_nothing(is_static: bool) -> None:
    def body(comm: Communicator) -> list[int]:
        run = Run(ShardedAdamW(make_params(), process_group=comm, static_graph=is_static, **TINY), [], comm.rank, 2)
        run.params = [p for group in run.opt.param_groups for p in group["params"]]
        said = exchanges_of(comm)
        counts = []
        for step in range(4):
            run.backward(step, used={0, 3 + comm.rank})
            run.step()
            counts.append(len(said))
        run.opt.close()
        return counts

    counts = run_local(2, body)
    assert counts == [[1, 1, 1, 1] if is_static else [1, 2, 3, 4]] * 2


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


@pytest.mark.parametrize("world", [2, 3, 4])
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
    """G15, the promise broken on one rank. Nobody hangs."""
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


def deviate_in_a_process(rank: int, world: int, break_it: Callable[[Run], None], offender: int, name: str) -> None:
    with Communicator(timeout_s=20) as comm:
        deviate(comm, break_it, offender, name)


@pytest.mark.parametrize(("break_it", "offender", "name"), [(gone, 0, "weight3"), (too_often, 1, "weight[03]")])
def test_a_deviation_names_the_parameter_in_every_process(
    break_it: Callable[[Run], None], offender: int, name: str, rank_pool: Any
) -> None:
    """G15: the text travels through shared memory."""
    rank_pool(2).run(deviate_in_a_process, break_it, offender, name, timeout_s=60)


def scale_early(run: Run) -> None:
    """Rank 1 owns parts of parameter 3, has no gradient of it, and would not hear of the factor."""
    run.backward(9, used={0, 3} if run.rank == 0 else {0})
    grad = run.params[3].grad
    if grad is not None:
        grad.mul_(0.5)
    run.opt.step()


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
        seen = run.seen
        with pytest.raises(
            RuntimeError, match=r"cannot scale the gradients of 'weight3', .* call optimizer.grad_sync\(\)"
        ):
            scale_early(run)
            run.opt.step()
        return seen

    results = run_local(2, body)
    for step in range(3):
        whole = dyadic(make_params(), step)
        first = share(whole, 0, 2)
        for seen in results:
            grads = seen[len(whole) * step : len(whole) * (step + 1)]
            assert_bitwise_equal(grads[0], whole[0] * 0.5)
            assert_bitwise_equal(grads[3], first[3] * 0.25)
