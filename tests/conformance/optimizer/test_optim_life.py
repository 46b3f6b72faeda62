"""From construction to the end: odd groups, hooks of steps, the profiler, several optimizers.

S8, S12 and S14 of the optimizer's test rows.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ClosedError, PeerError
from bucketwheel.grads import agreement
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
    TINY,
    dyadic,
    loss_of,
    make_params,
    on_ranks,
    run_local,
)

# --- S8: groups -------------------------------------------------------------------------------------------------------


# --- S12: hooks and the profiler --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [None, 2])
def test_s12_hooks_of_steps_run_once_and_may_give_other_arguments(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm)
        calls: list[str] = []
        losses = [torch.tensor(1.0), torch.tensor(2.0)]
        opt.register_step_pre_hook(lambda o, args, kwargs: calls.append("before") or ((o, lambda: losses[1]), kwargs))
        opt.register_step_post_hook(lambda o, args, kwargs: calls.append("after"))
        everywhere = [
            register_optimizer_step_pre_hook(lambda o, *_: calls.append("before all") if o is opt else None),
            register_optimizer_step_post_hook(lambda o, *_: calls.append("after all") if o is opt else None),
        ]
        try:
            loss_of(params, dyadic(params, 0)).backward()
            assert opt.step(lambda: losses[0]) is losses[1], "the hook has replaced the closure"
        finally:
            for handle in everywhere:
                handle.remove()
        assert sorted(calls[:2]) == ["before", "before all"] and sorted(calls[2:]) == ["after", "after all"]
        assert all(float(state["step"]) == 1.0 for state in opt.state_dict()["state"].values())

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 1])
def test_s12_the_profiler_shows_steps_and_zero_grad_by_name(world: int | None) -> None:
    """By the names that torch's own optimizers have, and where no profiler runs `zero_grad` makes no range."""

    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for step in range(3):
                loss_of(params, dyadic(params, step)).backward()
                opt.step()
                opt.zero_grad(set_to_none=step != 1)
        events = [event for event in profile.events() if event.name.startswith("Optimizer.")]
        assert Counter(event.name for event in events) == {
            "Optimizer.step#ShardedAdamW.step": 3,
            "Optimizer.zero_grad#ShardedAdamW.zero_grad": 3,
        }
        assert all(event.is_user_annotation for event in events)
        with mock.patch.object(torch.autograd.profiler, "record_function", side_effect=AssertionError):
            opt.zero_grad()

    on_ranks(world, body)


# --- S14: several optimizers ------------------------------------------------------------------------------------------


def test_s14_local_optimizers_of_the_same_parameters_are_independent() -> None:
    """As those of torch are: each updates with the gradients that are there."""
    mine, theirs = make_params(), make_params()
    for params, kind in ((mine, ShardedAdamW), (theirs, torch.optim.AdamW)):
        first, second = kind(params, lr=0.01), kind(params, lr=0.1)
        loss_of(params, dyadic(params, 0)).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)


# --- with -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [None, 1, 2])
def test_with_closes(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        with ShardedAdamW(params, 0.01, process_group=comm) as opt:
            loss_of(params, dyadic(params, 1)).backward()
            opt.step()
        with pytest.raises(ClosedError):
            opt.step()
        if comm:
            comm.pool.expect_no_leases()

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 1, 2])
@pytest.mark.parametrize("is_half_done", [False, True])
def test_an_exception_that_leaves_with_reaches_the_other_ranks(world: int | None, is_half_done: bool) -> None:
    """``is_half_done``: with gradients that a static graph does not allow to drop, so that closing is an error too."""

    def body(comm: Communicator | None) -> str:
        params = make_params()
        opt = ShardedAdamW(params, 0.01, process_group=comm, static_graph=is_half_done)
        before = [p.detach().clone() for p in params]
        rank, last = (comm.rank, comm.size - 1) if comm else (0, 0)
        if is_half_done:
            loss_of(params, dyadic(params, 0)).backward()
            opt.step()
            before = [p.detach().clone() for p in params]
            opt.zero_grad()
        if comm:
            comm.exchange(b"")
        begin = time.monotonic()
        with pytest.raises(KeyError if rank == last else PeerError) as raised:
            with opt:
                loss_of(params, dyadic(params, 1)).backward()
                if rank == last:
                    opt.zero_grad()
                    raise KeyError("a batch")
                opt.step()
        assert time.monotonic() - begin < 20, "nobody has waited for the time limit"
        with pytest.raises(ClosedError):
            opt.zero_grad()
        if rank == last or not is_half_done:  # a step that waits for nobody's word may have begun before it heard
            assert_bitwise_equal([p.detach() for p in params], before)
        return str(raised.value)

    for text in on_ranks(world, body):
        assert "a batch" in text


# --- late rounds ------------------------------------------------------------------------------------------------------


def test_late_rounds_are_warned_of_once() -> None:
    agreement._warning_is_due = threading.Lock()

    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, 0.01, process_group=comm, **TINY)
        for step in range(3):
            with opt.no_sync():
                loss_of(params, dyadic(params, step)).backward()
            loss_of(params, dyadic(params, step)).backward()
            opt.step()
            opt.zero_grad()
        assert not agreement._warning_is_due.locked(), "one round in every window so far"
        comm.exchange(b"")
        for step in range(3):
            for _ in range(2 if comm.rank == 1 else 1):
                loss_of(params, dyadic(params, step)).backward()
            opt.step()
            opt.zero_grad()
        opt.close()

    with pytest.warns(UserWarning) as caught:
        run_local(2, body)
    assert len([w for w in caught if "inside optimizer.no_sync()" in str(w.message)]) == 1
