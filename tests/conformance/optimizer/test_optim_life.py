"""From construction to the end beside the suite's scripts: profiler, several optimizers, threads, errors, late rounds."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ClosedError, PeerError
from bucketwheel.grads import agreement
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, dyadic, loss_of, make_params, on_ranks, run_local, share


@pytest.mark.parametrize("world", [None, 1])
def test_the_profiler_shows_steps_and_zero_grad_by_name(world: int | None) -> None:
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


PENDING = "parameter 'w[0-9]' belongs to another optimizer, .* no step has used the gradient of 'w[0-9]'; call"


@pytest.mark.parametrize(
    ("world", "parts"),
    [
        (None, (slice(0, 9), slice(0, 9))),
        (2, (slice(0, 9), slice(0, 9))),
        (2, (slice(0, 4), slice(2, 9))),
        (1, (slice(0, 9), slice(3, 5))),
    ],
    ids=str,
)
def test_a_later_optimizer_takes_parameters_over(world: int | None, parts: tuple[slice, slice]) -> None:
    """Issue 44: a notebook's cell run again, phases of fine-tuning. As the earlier one closed, and another one made."""
    worlds = [LocalWorld(world or 1) for _ in range(2)]  # a process may join each once

    def play(comm: Communicator | None, closes: bool) -> list[Tensor]:
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        given = [local.rank(rank) for local in worlds] if comm else [None, None]
        params = make_params()
        named = [(f"w{i}", p) for i, p in enumerate(params)]

        def backward(seed: int) -> None:
            loss_of(params, share(dyadic(params, seed), rank, size)).backward()

        first = ShardedAdamW(named[parts[0]], 0.1, process_group=given[0], **TINY)
        scheduler = torch.optim.lr_scheduler.StepLR(first, 2)  # keeps it alive, and looks at its groups
        backward(0)
        first.step()
        if closes:
            first.close()
            for p in params:
                p.grad = None
        second = ShardedAdamW(named[parts[1]], 0.01, process_group=given[1], **TINY)
        if not closes:
            for call in (first.step, first.zero_grad, first.state_dict, lambda: first.clip_grad_norm_(1.0)):
                with pytest.raises(ClosedError, match="a later optimizer for parameter 'w[0-9]' has replaced this one"):
                    call()
            first.close()  # as `with` does
            scheduler.step()
            for own in getattr(first._made_engine, "owned", ()):
                with pytest.raises(ClosedError):
                    own.exchange(b"")
            for p in params:
                p.grad = None
        for seed in (1, 2):
            backward(seed)
            second.step()
            second.zero_grad()
        values = [p.detach().clone() for p in params]
        second.close()
        if comm:
            comm.pool.expect_no_leases()
        return values

    expected = play(None, True)
    for values in on_ranks(world, lambda comm: play(comm, False)):
        assert_bitwise_equal(values, expected)


def test_an_optimizer_that_has_failed_is_replaced() -> None:
    """A notebook's cell is run again after an error (issue 44)."""
    worlds = [LocalWorld(2) for _ in range(2)]

    def body(comm: Communicator) -> None:
        params = make_params()
        made = []  # keeps the first one alive
        for number, local in enumerate(worlds):
            optimizer = ShardedAdamW(params, process_group=local.rank(comm.rank), **TINY)
            made.append(optimizer)
            loss_of(params, dyadic(params, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            comm.barrier(60)
            if number == 0:
                optimizer._made_engine.abort("the cell was stopped")
        optimizer.close()

    run_local(2, body)


@pytest.mark.parametrize("world", [None, 1, 2])
def test_an_optimizer_with_gradients_is_not_replaced(world: int | None) -> None:
    """Issue 44: on all ranks where one has them; and nothing has happened to it. Those of a window that was dropped are none."""

    def body(comm: Communicator | None) -> None:
        params = make_params()
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        make = lambda: ShardedAdamW([(f"w{i}", p) for i, p in enumerate(params)], process_group=comm, **TINY)  # noqa: E731
        first = make()
        for on in ([0, 1], [size - 1]):
            if rank in on:
                loss_of(params, dyadic(params, 1)).backward()
            with pytest.raises(ValueError, match=f"on rank {on[0]}, {PENDING}"):
                make()
            if on == [0, 1]:
                first.step()
                first.zero_grad()
            else:
                nn.ParameterList(params).zero_grad()  # the window stays open
        second = make()
        with pytest.raises(ClosedError, match="replaced"):
            first.zero_grad()
        with second.no_sync():
            loss_of(params, dyadic(params, 2)).backward()
        with pytest.raises(ValueError, match=PENDING):
            make()
        second.close()
        with make() as third:
            third.step()

    on_ranks(world, body)


def test_an_earlier_optimizer_that_is_left_on_some_ranks_is_replaced() -> None:
    """Issue 44: where the garbage collector has been is nobody's choice. With a window that only some have open."""

    def body(comm: Communicator) -> list[Tensor]:
        params = make_params()
        first = [ShardedAdamW(params, 0.1, process_group=comm, **TINY)]
        for step in (0, 1):
            loss_of(params, share(dyadic(params, step), comm.rank, comm.size)).backward()
            first[0].step() if step == 0 else None
            first[0].zero_grad()
        if comm.rank == 0:
            first.clear()
            gc.collect()
        second = ShardedAdamW(params, 0.1, process_group=comm, **TINY)
        second.step()
        second.close()
        return [p.detach() for p in params]

    one, other = run_local(2, body)
    assert_bitwise_equal(one, other)


@pytest.mark.parametrize("world", [None, 1, 2])
def test_a_group_that_comes_between_step_and_zero_grad_leaves_gradients_used(world: int | None) -> None:
    """Issue 44: they are those of the step, for a load too."""

    def body(comm: Communicator | None) -> None:
        params = make_params()
        other = ShardedAdamW(make_params()[:1], process_group=LocalWorld(1).rank(0))
        with ShardedAdamW(params, process_group=comm) as opt:
            loss_of(params, dyadic(params, 1)).backward()
            opt.step()
            opt.add_param_group({"params": [Parameter(torch.ones(3))]})
            if comm is None:
                with pytest.raises(ValueError, match="'group 2 parameter 0' belongs to another optimizer"):
                    opt.add_param_group({"params": other.param_groups[0]["params"]})
                assert len(opt._engine.infos) == len(opt.state_dict()["state"]) == 10
            opt.load_state_dict(opt.state_dict())
            opt.grad_sync()
            opt.load_state_dict(opt.state_dict())
            loss_of(params, dyadic(params, 1)).backward()
            opt.grad_sync()
            with pytest.raises(RuntimeError, match="gradients are pending"):
                opt.load_state_dict(opt.state_dict())

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
        if comm:
            comm.pool.check()
        if rank == last or not is_half_done:  # a step that waits for nobody's word may have begun before it heard
            assert_bitwise_equal([p.detach() for p in params], before)
        return str(raised.value)

    for text in on_ranks(world, body):
        assert "a batch" in text


def test_late_rounds_are_warned_of_once() -> None:
    agreement._warning_is_due = threading.Lock()

    def body(comm: Communicator) -> None:
        params = make_params()
        with ShardedAdamW(params, 0.01, process_group=comm, **TINY) as opt:
            for step in range(6):
                if step == 3:
                    assert not agreement._warning_is_due.locked(), "one round in every window so far"
                    comm.exchange(b"")
                with opt.no_sync():
                    loss_of(params, dyadic(params, step)).backward()
                for _ in range(2 if step >= 3 and comm.rank == 1 else 1):
                    loss_of(params, dyadic(params, step)).backward()
                opt.step()
                opt.zero_grad()
        with pytest.raises(ClosedError):
            opt.step()
        comm.pool.expect_no_leases()

    with pytest.warns(UserWarning) as caught:
        run_local(2, body)
    assert len([w for w in caught if "inside optimizer.no_sync()" in str(w.message)]) == 1


@pytest.mark.parametrize("world", [2])
def test_two_backwards_at_once(world: int, restore_threads: None) -> None:
    """Two threads of a rank begin together, each with parameters of its own, which share buckets with the other's.

    Large gradients leave the GIL to the other thread, or are copied by all of torch's. Where both reach one parameter,
    torch itself orders nothing: it calls hooks outside of its lock.
    """
    torch.set_num_threads(2)
    shapes = [(300, 300), (5,), (725, 725), (300, 301), (7, 3), (1000,), (731, 725)] * 2

    def losses(params: list[Parameter], step: int, rank: int, size: int) -> list[Tensor]:
        grads = share(dyadic(params, step), rank, size)
        return [loss_of(params, grads, lambda i, part=part: i % 2 == part) for part in (0, 1)]

    def train(comm: Communicator | None) -> list[Tensor]:
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        params = [Parameter(torch.full(shape, 0.5)) for shape in shapes]
        opt = ShardedAdamW(params, lr=0.01, process_group=comm, bucket_cap_mb=0.1)
        for step in range(6):
            start, done = threading.Barrier(2, timeout=20), []

            def body(loss: Tensor, start: threading.Barrier = start, done: list[int] = done) -> None:
                start.wait()
                loss.backward()
                done.append(1)

            if comm is None:
                sum(losses(params, step, rank, size), torch.zeros(())).backward()
            else:
                both = [
                    threading.Thread(target=body, args=(one,), daemon=True) for one in losses(params, step, rank, size)
                ]
                for thread in both:
                    thread.start()
                for thread in both:
                    thread.join(20)
                assert len(done) == 2, "one has failed, or they wait for each other"
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in params]

    expected = train(None)
    for mine in run_local(world, train):
        assert_bitwise_equal(mine, expected)


@pytest.mark.parametrize("world", [None, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_that_was_converted_is_refused_and_its_optimizer_can_be_closed(
    world: int | None, dtype: torch.dtype
) -> None:
    """Then another one does, as the error says."""

    def body(comm: Communicator | None) -> None:
        model = nn.Linear(3, 2)
        opt = ShardedAdamW(model.named_parameters(), process_group=comm)
        model.to(dtype)
        with pytest.raises(RuntimeError, match=f"'(weight|bias)' was torch.float32 .* is {dtype} .* make a new one"):
            model(torch.ones(2, 3, dtype=dtype)).sum().backward()
            opt.step()
        opt.close()
        model.zero_grad()
        with ShardedAdamW(model.named_parameters(), process_group=comm) as opt:
            model(torch.ones(2, 3, dtype=dtype)).sum().backward()
            opt.step()

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 2])
def test_parameters_get_back_their_memory_format(world: int | None) -> None:
    """That of their states, which they had when the optimizer was made."""

    def body(comm: Communicator | None) -> None:
        conv = nn.Conv2d(3, 4, 3)
        with ShardedAdamW(conv.parameters(), process_group=comm) as opt:
            conv(torch.ones(1, 3, 4, 4)).sum().backward()
            opt.zero_grad()
            conv.to(memory_format=torch.channels_last)
            opt.step()
            assert conv.weight.stride() == (27, 9, 3, 1)
            state = opt.state[conv.weight]["exp_avg"]
            assert comm or state.stride() == conv.weight.stride()

    on_ranks(world, body)


def test_a_dtype_that_excludes_placeholders_is_refused() -> None:
    def body(comm: Communicator) -> None:
        param = Parameter(torch.ones(5))
        opt = ShardedAdamW([("weight", param)], process_group=comm)
        param.grad_dtype = torch.bfloat16
        with pytest.raises(RuntimeError, match=r"'weight' has grad_dtype=torch.bfloat16.*grad_dtype = None"):
            (param * 2).sum().backward()
        param.grad = None
        param.grad_dtype = None
        (param * 2).sum().backward()
        opt.step()

    run_local(2, body)
