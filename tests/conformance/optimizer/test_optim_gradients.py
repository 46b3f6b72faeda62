"""Gradients of every kind, as G1 to G16 of the optimizer's test rows have them; loops: test_optim_semantics.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
    OPTIONS,
    TINY,
    Run,
    assert_as_local,
    assert_as_local_and_torch,
    dyadic,
    loss_of,
    make_params,
    on_ranks,
    outcome_of_local,
    run_local,
    share,
)

WAIT_S = 20


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_g1_after_backward_each_rank_holds_its_part(world: int) -> None:
    """A placeholder in p.grad, and in the shards the sum over the ranks: each element on one rank."""

    def body(comm: Communicator) -> list[list[tuple[int, int, Tensor]]]:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        loss_of(params, share(dyadic(params, 0), comm.rank, comm.size)).backward()
        assert all(type(p.grad) is ShardedGrad for p in params)
        opt.grad_sync()
        engine: Any = opt._engine
        return [
            [
                (begin, end, piece.grad.clone())
                for (begin, end), piece in zip(engine.owned_ranges(i), engine.reduced._params[i].pieces, strict=True)
            ]
            for i in range(len(params))
        ]

    ranks = run_local(world, body)
    for i, (p, grad) in enumerate(zip(make_params(), dyadic(make_params(), 0), strict=True)):
        flat = torch.empty_strided(p.shape, p.stride()).copy_(grad).as_strided((p.numel(),), (1,))
        pieces = sorted((piece for rank in ranks for piece in rank[i]), key=lambda piece: piece[0])
        assert [begin for begin, _, _ in pieces] == [0, *(end for _, end, _ in pieces[:-1])][: len(pieces)]
        assert sum(end - begin for begin, end, _ in pieces) == p.numel()
        for begin, end, values in pieces:
            assert_bitwise_equal(values, flat[begin:end] * world, f"elements {begin} to {end} of parameter {i}")


@pytest.mark.parametrize("world", [2, 3])
def test_g5_what_no_rank_uses_keeps_its_bits(world: int) -> None:
    """The parameter, its moments, its master and its step; its norm is 0, and its state is saved."""
    unused = (0, 3, 6)

    def body(comm: Communicator) -> None:
        params = make_params(torch.bfloat16)
        opt = ShardedAdamW(params, process_group=comm, weight_decay=0.5, **TINY)

        def step(seed: int, used: Callable[[int], bool]) -> None:
            loss_of(params, share(dyadic(params, seed), comm.rank, comm.size), used).backward()
            opt.step()

        step(0, lambda i: True)
        opt.zero_grad()
        names = ("step", "exp_avg", "exp_avg_sq", "master_param")
        held = lambda: [  # noqa: E731
            (params[i].detach().clone(), *(opt.state_dict()["state"][i][name].clone() for name in names))
            for i in unused
        ]
        before = held()
        loss_of(params, share(dyadic(params, 1), comm.rank, comm.size), lambda i: i not in unused).backward()
        assert opt.local_grad_norm(parameters=[params[i] for i in unused]) == 0.0
        opt.step()
        assert_bitwise_equal(held(), before)
        state = opt.state_dict()["state"]
        assert [float(state[i]["step"]) for i in range(9)] == [1.0 if i in unused else 2.0 for i in range(9)]

    run_local(world, body)


# --- G4: no_sync ------------------------------------------------------------------------------------------------------


def g4_exceptions_at_every_depth(run: Run) -> None:
    """Of nested contexts, each is left by an exception, in forward or in backward; then all works as before."""
    for step in range(3):
        with pytest.raises(ValueError), run.opt.no_sync():
            run.backward(step, used=[0, 3])
            with pytest.raises(KeyError), run.opt.no_sync():
                run.backward(step + 1, used=[3, 6])
                raise KeyError
            run.backward(step + 2, used=[7, 8])  # still inside
            raise ValueError
        run.backward(step + 3)
        run.step()


def g4_entered_twice_at_once(run: Run) -> None:
    """One context is left inside of another that was entered later."""
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


def g4_everything_inside_with_step_inside_too(run: Run) -> None:
    """The whole loop: step() and clip_grad_norm_() reduce what is there."""
    with run.opt.no_sync():
        for step in range(3):
            run.backward(2 * step)
            run.backward(2 * step + 1, used=[0, 3, 8])
            run.clip(0.5)
            run.step()


def g4_forward_and_backward_on_different_sides(run: Run) -> None:
    outside = run.loss(0)
    with run.opt.no_sync():
        inside = run.loss(1, used=[0, 3, 6])
        outside.backward()
    inside.backward()
    run.see_grads()
    run.step()
    with run.opt.no_sync():
        inside = run.loss(2)
    with run.opt.no_sync():
        inside.backward()
    run.step()


# --- G11, G12: more than one loss -------------------------------------------------------------------------------------


def g11_one_graph_three_times(run: Run) -> None:
    for step in range(2):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        run.opt.grad_sync()
        with run.opt.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        run.step()


def g12_autograd_grad_in_the_middle(run: Run) -> None:
    """Before, between and behind backwards of a window, also of the same graph: no hook runs, nothing changes."""
    for step in range(2):
        loss = run.loss(step)
        torch.autograd.grad(loss, run.params, retain_graph=True)
        loss.backward(retain_graph=True)
        before = [p.grad for p in run.params]
        for p, grad in zip(run.params, torch.autograd.grad(loss, run.params), strict=True):
            assert type(grad) is Tensor and grad.shape == p.shape
        assert all(p.grad is grad for p, grad in zip(run.params, before, strict=True))
        run.step()


# --- G13, G16 ---------------------------------------------------------------------------------------------------------


def g13_strides_and_gaps(run: Run) -> None:
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
        run.step()


def g13_other_dtypes(run: Run) -> None:
    """What torch allows once p.grad_dtype is None: the values are cast."""
    for p in run.params:
        p.grad_dtype = None
    for step, dtype in enumerate((torch.bfloat16, torch.float64, torch.float32)):
        for i, g in enumerate(dyadic(run.params, step)):
            if i != 3:
                run.params[i].grad = g.to(dtype)
        run.see_grads()
        run.step()


def g16_zero_grad_twice_and_unused_parameters(run: Run) -> None:
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


@pytest.mark.parametrize(
    "script",
    [
        g4_exceptions_at_every_depth,
        g4_entered_twice_at_once,
        g4_everything_inside_with_step_inside_too,
        g4_forward_and_backward_on_different_sides,
        g11_one_graph_three_times,
        g12_autograd_grad_in_the_middle,
        g13_strides_and_gaps,
        g16_zero_grad_twice_and_unused_parameters,
    ],
    ids=lambda script: script.__name__,
)
def test_gradients_are_those_of_torch(script: Callable[[Run], None]) -> None:
    assert_as_local_and_torch(script, lr=0.01, weight_decay=0.1)


def test_g13_gradients_of_another_dtype() -> None:
    """torch.optim.AdamW refuses them; the reference has what they are cast to, and the same bits."""

    def cast(run: Run) -> None:
        for step in range(3):
            for i, g in enumerate(dyadic(run.params, step)):
                if i != 3:
                    run.params[i].grad = g
            run.see_grads()
            run.step()

    expected = outcome_of_local(cast, lr=0.01)
    mine = assert_as_local(g13_other_dtypes, lr=0.01)
    assert_bitwise_equal([mine.params, mine.states, mine.seen], [expected.params, expected.states, expected.seen])


def test_g13_a_dtype_that_excludes_placeholders_is_refused() -> None:
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

        other = Parameter(torch.ones(3))
        other.grad_dtype = torch.float64
        with pytest.raises(
            ValueError, match=r"'bias' is torch.float32 and has grad_dtype=torch.float64.*grad_dtype = None"
        ):
            ShardedAdamW([("bias", other)], process_group=comm)

    run_local(2, body)


# --- G14: parameters --------------------------------------------------------------------------------------------------


def dense_params() -> list[Parameter]:
    """Dense, in every order of dimensions; some share no memory with anything although they are views."""
    generator = torch.Generator().manual_seed(3)
    made = [
        torch.randn((4, 3, 5, 2), generator=generator).to(memory_format=torch.channels_last),
        torch.randn((2, 3, 2, 5, 2), generator=generator).to(memory_format=torch.channels_last_3d),
        torch.randn((7, 5), generator=generator).t(),
        torch.randn((3, 4, 5), generator=generator).permute(1, 2, 0),
        torch.randn((4, 1, 6), generator=generator).transpose(0, 2),
        torch.randn(40, generator=generator)[8:32].view(4, 6),  # a part of something else
        torch.randn((6, 5), generator=generator).as_strided((1, 30), (77, 1)),  # any stride, of a dimension of one
    ]
    return [Parameter(t) for t in made]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_g14_dense_parameters_of_any_strides(world: int, options: dict[str, Any]) -> None:
    def train(comm: Communicator | None) -> list[Tensor]:
        params = dense_params()
        strides = [p.stride() for p in params]
        opt = ShardedAdamW(params, lr=0.01, process_group=comm, **options)
        for step in range(3):
            rank, size = (comm.rank, comm.size) if comm else (0, 1)
            loss_of(params, share(dyadic(params, step), rank, size)).backward()
            opt.step()
            opt.zero_grad()
        opt.param_sync()
        assert [p.stride() for p in params] == strides
        values = [p.detach().clone() for p in params]
        opt.close()
        assert [p.stride() for p in params] == strides
        return values

    expected = train(None)
    for params in run_local(world, train):
        assert_bitwise_equal(params, expected)


@pytest.mark.parametrize("world", [None, 2])
def test_g14_expanded_and_overlapping_parameters_are_refused(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        for bad in (
            torch.zeros(1).expand(5),
            torch.zeros(3, 1).expand(3, 4),
            torch.zeros(8).as_strided((3, 4), (2, 1)),  # rows overlap
        ):
            with pytest.raises(ValueError, match="'bad'.*gaps or overlaps"):
                ShardedAdamW([("good", Parameter(torch.zeros(3))), ("bad", Parameter(bad))], process_group=comm)

    on_ranks(world, body)


# --- G17: threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_g17_two_backwards_at_once(world: int) -> None:
    """Two threads of a rank begin together, each with parameters of its own, which share buckets with the other's.

    Large gradients leave the GIL to the other thread. Where both reach one parameter, torch itself orders nothing: it
    calls hooks outside of its lock.
    """
    shapes = [(300, 300), (5,), (64, 64), (300, 301), (7, 3), (1000,)] * 2
    rounds = 6

    def make() -> list[Parameter]:
        return [Parameter(torch.full(shape, 0.5)) for shape in shapes]

    def losses(params: list[Parameter], step: int, rank: int, size: int) -> list[Tensor]:
        grads = share(dyadic(params, step), rank, size)
        return [loss_of(params, grads, lambda i, part=part: i % 2 == part) for part in (0, 1)]

    def train(comm: Communicator) -> list[Tensor]:
        params = make()
        opt = ShardedAdamW(params, lr=0.01, process_group=comm, bucket_cap_mb=0.1)
        for step in range(rounds):
            start, errors = threading.Barrier(2, timeout=WAIT_S), []

            def body(loss: Tensor, start: threading.Barrier = start, errors: list[BaseException] = errors) -> None:
                try:
                    start.wait()
                    loss.backward()
                except BaseException as error:  # noqa: BLE001 (it is raised below)
                    errors.append(error)

            threads = [
                threading.Thread(target=body, args=(loss,), daemon=True)
                for loss in losses(params, step, comm.rank, comm.size)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
                assert not thread.is_alive(), "two backwards wait for each other"
            assert not errors, errors
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in params]

    params = make()
    opt = ShardedAdamW(params, lr=0.01)
    for step in range(rounds):
        sum(losses(params, step, 0, 1), torch.zeros(())).backward()
        opt.step()
        opt.zero_grad()
    for mine in run_local(world, train):
        assert_bitwise_equal(mine, [p.detach() for p in params])
