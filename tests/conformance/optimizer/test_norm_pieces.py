"""local_grad_norm and clip_grads_with_norm_: the norm of a model that is spread over several optimizers."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, loss_of
from tests.support.replica_ranks import with_replicas
from tests.support.simulated_cuda import posing

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
        tensor._all_gather_into(gathered, own).wait()
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
