"""local_grad_norm and clip_grads_with_norm_: the norm of a model that is spread over several optimizers."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, assert_as_local_and_torch, dyadic, loss_of, make_params, run_local
from tests.support.replica_ranks import with_replicas
from tests.support.simulated_cuda import Calls, posing


def clip_with_norms(run: Run) -> None:
    """Numbers and tensors, below and above the limit, of all and of some, on top of each other."""
    run.clips = True
    for step, norm in enumerate([4.0, 0.125, torch.tensor(2.0), torch.tensor([8.0]), torch.tensor(3.0).double()]):
        run.backward(step, used=[i for i in range(9) if i != 6])
        run.opt.clip_grads_with_norm_(1.0, norm)
        run.opt.clip_grads_with_norm_(0.5, norm, parameters=[run.params[i] for i in (3, 6, 8)])
        run.see_grads()
        run.clip(0.25)
        run.step()


def clip_with_what_is_no_norm(run: Run) -> None:
    run.clips = True
    for step, (max_norm, norm) in enumerate([(0.0, 2.0), (1.0, math.inf), (1.0, 0.0), (1.0, math.nan)]):
        run.backward(step)
        run.opt.clip_grads_with_norm_(max_norm, norm)
        run.step()


@pytest.mark.parametrize("script", [clip_with_norms, clip_with_what_is_no_norm])
def test_clips_as_torch_does(script: Any) -> None:
    assert_as_local_and_torch(script)


@pytest.mark.parametrize("world", [1, 2])
def test_clips_on_cuda_as_on_the_cpu_and_waits_for_nothing(world: int) -> None:
    def play(comm: Communicator | None, rank: int, counts: bool) -> list[Tensor]:
        params = make_params()
        opt = ShardedAdamW(params, lr=0.1, process_group=comm, **TINY)
        run = Run(opt, params, rank, world)
        for step in range(5):
            calls = Calls() if counts else None
            run.backward(step)
            norm = opt.local_grad_norm(parameters=params[:4])
            opt.clip_grads_with_norm_(0.5, norm * 2, parameters=params[2:])
            opt.clip_grads_with_norm_(0.25, norm)
            run.step()
            if calls is not None and step >= 3:
                calls.expect_free_running()
        return [p.detach().clone() for p in params]

    def everywhere(poses: bool) -> list[list[Tensor]]:
        if world == 1:
            return [play(None, 0, poses)]
        device = "cuda" if poses else None
        return with_replicas(world, 1, lambda rank, comm, _: play(comm, rank, False), device=device)

    expected = everywhere(False)
    with posing():
        got = everywhere(True)
    assert_bitwise_equal(got, expected)


@pytest.mark.parametrize("poses", [False, True])
def test_a_captured_factor_is_that_of_its_gradient(poses: bool) -> None:
    """A gradient that replaces a clipped one is not clipped."""
    with posing() if poses else contextlib.nullcontext():
        params = make_params()
        opt = ShardedAdamW(params, lr=0.1)
        run = Run(opt, params)
        run.backward(0)
        opt.clip_grads_with_norm_(1.0, 4.0)
        opt.zero_grad()
        run.backward(1, used=[0, 3])
        opt.clip_grads_with_norm_(1.0, 0.5)
        expected = dyadic(params, 1)
        for i in (0, 3):
            assert_bitwise_equal(opt.full_grad(params[i]), expected[i])


def test_bad_norms_are_refused() -> None:
    opt = ShardedAdamW([Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"one element, got shape \(2,\)"):
        opt.clip_grads_with_norm_(1.0, torch.ones(2))
    with pytest.raises(ValueError, match="not trained by this optimizer"):
        opt.clip_grads_with_norm_(1.0, 1.0, parameters=[Parameter(torch.ones(1))])


def test_ranks_that_give_different_norms_are_told() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm)
        run = Run(opt, params, comm.rank, comm.size)
        run.backward(0)
        opt.clip_grads_with_norm_(0.5, 1.0 + comm.rank)
        with pytest.raises(RuntimeError, match="scaled the gradients"):
            opt.step()

    run_local(2, body)


# --- tensor parallelism -----------------------------------------------------------------------------------------------

SHAPES = {"up": (8, 6), "down": (6, 8), "norm": (6,)}  # split by rows, split by columns, a copy on every rank
SPLITS = {"up": 0, "down": 1}


def part_of(whole: dict[str, Tensor], place: int, places: int) -> list[Parameter]:
    """What rank ``place`` of a tensor-parallel group holds."""
    return [
        Parameter(tensor.chunk(places, SPLITS[name])[place].clone().contiguous() if name in SPLITS else tensor.clone())
        for name, tensor in whole.items()
    ]


def whole_model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-8, 9, shape, generator=generator) / 16 for name, shape in SHAPES.items()}


def spread(rank: int, data: Communicator, tensor: Communicator, ord: float) -> tuple[list[Tensor], list[Tensor]]:
    """Three steps of a rank; ``data``: the ranks with the same part, ``tensor``: those with the other parts."""
    params = part_of(whole_model(0), tensor.rank, tensor.size)
    is_local = data.size == 1
    opt = ShardedAdamW(params, lr=0.1, process_group=None if is_local else data, **TINY)
    norms = []
    for step in range(3):
        grads = part_of(whole_model(10 + step), tensor.rank, tensor.size)
        loss_of(params, [g + (2 * data.rank - (data.size - 1)) / 16 for g in grads]).backward()
        counted = params if tensor.rank == 0 else params[:2]  # the copy counts once
        own = opt.local_grad_norm(ord, parameters=counted).reshape(1)
        gathered = own.new_empty(tensor.size)
        tensor.all_gather_into(gathered, own).wait()
        norm = torch.linalg.vector_norm(gathered, ord)
        opt.clip_grads_with_norm_(0.5, norm)
        opt.step()
        opt.zero_grad()
        norms.append(norm.clone())
    opt.param_sync()
    out = [p.detach().clone() for p in params]
    opt.close()
    return out, norms


@pytest.mark.parametrize("ord", [2.0, math.inf])
@pytest.mark.parametrize("data_ranks", [1, 2])
@pytest.mark.parametrize("poses", [False, True])
def test_a_tensor_parallel_model_clips_as_a_whole(poses: bool, data_ranks: int, ord: float) -> None:
    whole = {name: Parameter(tensor) for name, tensor in whole_model(0).items()}
    theirs = torch.optim.AdamW(whole.values(), lr=0.1)
    expected = []
    for step in range(3):
        for p, grad in zip(whole.values(), whole_model(10 + step).values(), strict=True):
            p.grad = grad
        expected.append(torch.nn.utils.clip_grad_norm_(whole.values(), 0.5, ord))
        theirs.step()

    with posing() if poses else contextlib.nullcontext():
        ranks = with_replicas(data_ranks, 2, spread, ord, device="cuda" if poses else None)
    for rank, (params, norms) in enumerate(ranks):
        assert_bitwise_equal(norms, ranks[0][1], f"norms of rank {rank}")
        assert_bitwise_equal(params[2], ranks[0][0][2], f"the copy on rank {rank}")
        torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
        own = part_of({name: p.detach() for name, p in whole.items()}, rank // data_ranks, 2)
        torch.testing.assert_close(params, [p.detach() for p in own], rtol=2e-6, atol=1e-7)
        assert_bitwise_equal(params, ranks[rank - rank % data_ranks][0], "data-parallel ranks")
