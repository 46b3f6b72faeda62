"""local_grad_norm and clip_grads_with_norm_: the norm of a model that is spread over several optimizers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, get_total_norm

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
    TINY,
    Run,
    dyadic,
    loss_of,
    make_params,
    run_local,
    share,
)
from tests.support.replica_ranks import with_replicas
from tests.support.simulated_cuda import Calls, posing


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


Clip = Callable[..., Tensor]


CLIPS: dict[str, Clip] = {
    "by method": lambda opt, params, *limit, **options: opt.clip_grad_norm_(*limit, parameters=params, **options),
    "by torch": lambda opt, params, *limit, **options: clip_grad_norm_(params, *limit, **options),
}


@pytest.mark.parametrize("world", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_a_nonfinite_norm_raises_on_every_rank_and_clips_nothing(world: int | None, bad: float, clip: Clip) -> None:
    def body(comm: Communicator | None) -> list[Tensor]:
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        params = make_params()
        opt = ShardedAdamW(params, lr=0.01, process_group=comm, **TINY)
        not_empty = [p for p in params if p.numel()]
        grads = dyadic(params, 0)
        if rank == size - 1:
            grads[6][200] = bad
        loss_of(params, grads).backward()
        for norm_type in (2.0, 1.0, math.inf, 3.0):
            with pytest.raises(RuntimeError, match="non-finite"):
                clip(opt, not_empty, 0.5, norm_type, error_if_nonfinite=True)
        assert not math.isfinite(opt.local_grad_norm())
        whole = opt.full_grad(params[0])
        assert_bitwise_equal(whole, dyadic(params, 0)[0])  # all ranks have the same
        opt.zero_grad()
        loss_of(params, share(dyadic(params, 1), rank, size)).backward()
        clip(opt, not_empty, 1e6, error_if_nonfinite=True)
        opt.step()
        return [p.detach().clone() for p in params]

    expected = body(None)
    for params in run_local(world, body) if world else []:
        if world == 3:
            torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-7)
        else:
            assert_bitwise_equal(params, expected)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_the_norm_has_the_same_bits_on_all_ranks_of_all_worlds(norm_type: float, clip: Clip) -> None:
    """A parameter that is used in three places counts once, one that is not used does not count."""

    def body(comm: Communicator | None) -> Tensor:
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        params = [p for p in make_params() if p.numel()]
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        grads = share(dyadic(params, 0), rank, size)
        tied = sum((params[3] * g).sum() for g in share(dyadic([params[3]] * 2, 1), rank, size))
        (loss_of(params, grads, lambda i: i != 5) + tied).backward()
        norm = clip(opt, params, 1e6, norm_type)
        assert opt.full_grad(params[5]) is None
        return norm.clone()

    params = [p for p in make_params() if p.numel()]
    whole = [g.double() for i, g in enumerate(dyadic(params, 0)) if i != 5]
    whole[3] += sum(g.double() for g in dyadic([params[3]] * 2, 1))
    exact = get_total_norm(whole, norm_type)
    first = run_local(1, body)[0]
    torch.testing.assert_close(first.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(body(None), first, rtol=1e-6, atol=0)
    for world in (2, 3, 4):
        norms = run_local(world, body)
        assert_bitwise_equal(norms, [norms[0]] * world)
        if norm_type == 3.0 or world == 3:  # neither cubes of sums nor thirds are exact
            torch.testing.assert_close(norms[0], first, rtol=3e-7, atol=0)
        else:
            assert_bitwise_equal(norms[0], first)


def test_the_local_optimizer_refuses_gradients_that_change_after_clipping() -> None:
    params = make_params()
    opt = ShardedAdamW(params)
    loss_of(params, dyadic(params, 0)).backward()
    opt.clip_grad_norm_(0.5)
    loss_of(params, dyadic(params, 1)).backward()
    with pytest.raises(RuntimeError, match="group 0 parameter 0.*changed after clip_grad_norm_"):
        opt.step()
    assert_bitwise_equal([p.detach() for p in params], [p.detach() for p in make_params()])
