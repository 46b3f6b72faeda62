"""Gradients beside the suite: where they lie, what dtype they may have, and two backwards at once."""

from __future__ import annotations

import threading
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
    TINY,
    dyadic,
    loss_of,
    make_params,
    on_ranks,
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


# --- G4: no_sync ------------------------------------------------------------------------------------------------------


# --- G11, G12: more than one loss -------------------------------------------------------------------------------------


# --- G13, G16 ---------------------------------------------------------------------------------------------------------


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
