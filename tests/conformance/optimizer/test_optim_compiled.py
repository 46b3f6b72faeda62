"""Compiled models: the same training, also where compiling begins while p.grad holds placeholders.

While parameters are gathered: test_prefetch_compiled.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.counting_backend import CountingBackend, compiles_in_threads
from tests.support.optim_twins import run_local

pytestmark = compiles_in_threads


class Model(nn.Module):
    """``reentrant``: how the block is checkpointed; None: not at all."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8, bias=False)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.reentrant is None:
            return self.head(x + self.block(x))
        return self.head(x + checkpoint(self.block, x, use_reentrant=self.reentrant))


Call = Callable[[Tensor], Tensor]


def whole(model: Model, backend: Any) -> Call:
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def submodule(model: Model, backend: Any) -> Call:
    model.block = torch.compile(model.block, backend=backend, fullgraph=True, dynamic=False)  # type: ignore[assignment]
    return model


def in_place(model: Model, backend: Any) -> Call:
    model.compile(backend=backend, fullgraph=True, dynamic=False)
    return model


def not_at_all(model: Model, backend: Any) -> Call:
    return model


OPTIONS = [{}, {"overlap_grad_sync": False}, {"static_graph": True}]


def train(comm: Communicator, way: Callable[[Model, Any], Call], reentrant: bool | None, **options: Any) -> Any:
    """Each micro-batch has a size of its own: most are compiled while gradients of the first are in buckets."""
    torch.manual_seed(0)
    model, backend = Model(reentrant), CountingBackend()
    call = way(model, backend)
    opt = ShardedAdamW(model.parameters(), lr=0.05, process_group=comm, bucket_cap_mb=1e-4, **options)
    generator = torch.Generator().manual_seed(comm.rank)
    norms = []
    for step in range(3):
        for micro in range(3):
            loss = call(torch.randn((1 + micro, 4), generator=generator)).square().sum()
            if step and not micro:
                opt.zero_grad()  # after forward, as many loops have it
            loss.backward()
        norms.append(opt.clip_grad_norm_(1.0))
        opt.step()
    values = [p.detach().clone() for p in model.parameters()]
    opt.close()
    return norms, values, backend.graphs


def on_ranks(world: int, way: Callable[[Model, Any], Call], reentrant: bool | None, **options: Any) -> list[Any]:
    """One thread of a rank compiles after the other: Dynamo's state is that of the process."""
    torch._dynamo.reset()
    return run_local(world, lambda comm: train(comm, way, reentrant, **options), timeout_s=90)


CASES: list[tuple[Callable[[Model, Any], Call], bool | None, dict[str, Any]]] = [
    *((way, None, options) for way in (whole, submodule, in_place) for options in OPTIONS),
    *((submodule, reentrant, {}) for reentrant in (False, True)),  # checkpoints around a compiled block
]


@pytest.mark.parametrize("way, reentrant, options", CASES)
def test_a_compiled_model_trains_as_it_is(
    way: Callable[[Model, Any], Call], reentrant: bool | None, options: dict[str, Any]
) -> None:
    ((norms, values, graphs),) = on_ranks(1, way, reentrant, **options)
    ((other_norms, other_values, _),) = on_ranks(1, not_at_all, reentrant, **options)
    assert graphs >= 3, "every size of a micro-batch is compiled"
    assert_bitwise_equal([norms, values], [other_norms, other_values])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_autograd() -> None:
    """Dynamo breaks its graph at every hook; what comes out is the same."""
    backend = CountingBackend()

    def compiled_backward(model: Model, _: Any) -> Call:
        contexts = contextlib.ExitStack()
        contexts.enter_context(compiled_autograd._enable(torch.compile(backend=backend, dynamic=False)))
        left.append(contexts)
        return model

    left: list[contextlib.ExitStack] = []
    try:
        ((norms, values, _),) = on_ranks(1, compiled_backward, None)
    finally:
        for contexts in left:
            contexts.close()
    assert backend.graphs > 0, "no backward was compiled"
    ((other_norms, other_values, _),) = on_ranks(1, not_at_all, None)
    assert_bitwise_equal([norms, values], [other_norms, other_values])


def train_over_processes(rank: int, world: int) -> None:
    with Communicator(timeout_s=30) as comm:
        expected = train(comm, not_at_all, None)
        for way in (whole, submodule, in_place):
            torch._dynamo.reset()
            norms, values, graphs = train(comm, way, None)
            assert graphs >= 3
            assert_bitwise_equal([norms, values], list(expected[:2]), way.__name__)


def test_compiled_models_over_processes(rank_pool: Any) -> None:
    rank_pool(2).run(train_over_processes, timeout_s=90)
