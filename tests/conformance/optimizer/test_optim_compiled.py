"""Compiled models: the same training, also where compiling begins while p.grad holds placeholders.

While parameters are gathered: test_prefetch_compiled.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.counting_backend import CountingBackend, compiles_in_threads
from tests.support.optim_twins import run_local

pytestmark = [compiles_in_threads, pytest.mark.timeout_s(300)]


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
    return run_local(world, lambda comm: train(comm, way, reentrant, **options), timeout_s=250)


CASES: list[tuple[Callable[[Model, Any], Call], bool | None, dict[str, Any]]] = [
    *((whole, None, options) for options in OPTIONS),
    *((way, None, {}) for way in (submodule, in_place)),
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


# --- compiled functions that call the optimizer ----------------------------------------------------------------------


def usual(opt: ShardedAdamW, model: Model, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    loss.backward()
    opt.clip_grad_norm_(1.0)
    opt.step()
    opt.zero_grad()
    return loss


def by_stock_code(opt: ShardedAdamW, model: Model, x: Tensor) -> Tensor:
    opt.zero_grad(set_to_none=False)
    loss = model(x).square().sum()
    (2.0 * loss).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return loss + norm


def by_every_method(opt: ShardedAdamW, model: Model, x: Tensor) -> Tensor:
    with opt.no_sync():
        model(x[:1]).square().sum().backward()
    loss = model(x).square().sum()
    loss.backward()
    opt.grad_sync()
    opt.clip_grads_with_norm_(0.5, opt.local_grad_norm())
    grad = opt.full_grad(model.head.weight)
    opt.step()
    opt.param_sync()
    opt.zero_grad()
    return loss + (0.0 if grad is None else grad.sum())


def by_parts(opt: ShardedAdamW, model: Model, x: Tensor, compiled: Callable[[Any], Any] = lambda f: f) -> Tensor:
    """`step` and `zero_grad` themselves are compiled."""
    loss = model(x).square().sum()
    loss.backward()
    compiled(opt.step)()
    compiled(opt.zero_grad)()
    return loss


Loop = Callable[..., Tensor]
LOOPS: list[Loop] = [usual, by_stock_code, by_every_method, by_parts]


def losses_of(comm: Communicator | None, loop: Loop, compiled: Any, dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Model().to(dtype)
    with ShardedAdamW(model.parameters(), lr=0.05, process_group=comm, bucket_cap_mb=1e-4, **options) as opt:
        opt.prefetch_params(model)
        call = partial(loop, compiled=compiled) if loop is by_parts else compiled(loop)
        generator = torch.Generator().manual_seed(comm.rank if comm else 0)
        losses = [call(opt, model, torch.randn((2, 4), generator=generator).to(dtype)).detach() for _ in range(4)]
    return losses, [p.detach() for p in model.parameters()]


def expect_the_same(comm: Communicator | None) -> None:
    """With any loop, gathers on their way or not; no function of the library is traced."""
    for number, loop in enumerate(LOOPS):
        dtype, late = (torch.bfloat16, True) if number % 2 else (torch.float32, False)
        torch._dynamo.reset()
        counters.clear()
        compiled = partial(torch.compile, backend=CountingBackend(), dynamic=False)
        found = losses_of(comm, loop, compiled, dtype, overlap_param_sync=late)
        assert_bitwise_equal(found, losses_of(comm, loop, lambda f: f, dtype, overlap_param_sync=late))
        breaks = [text for text in counters["graph_break"] if "bucketwheel" in text or "ShardedAdamW" in text]
        assert any("ShardedAdamW" in text for text in breaks), counters
        assert all("marked" in text and "ShardedAdamW" in text for text in breaks), breaks


def test_a_compiled_loop_calls_the_optimizer() -> None:
    expect_the_same(None)


def compiled_loops(rank: int, world: int) -> None:
    with Communicator(timeout_s=60) as comm:
        expect_the_same(comm)


def test_compiled_loops_over_processes(rank_pool: Any) -> None:
    rank_pool(2).run(compiled_loops, timeout_s=170)


@pytest.mark.slow
def test_a_loop_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    found = losses_of(None, usual, partial(torch.compile, dynamic=False), torch.float32)
    torch.testing.assert_close(found, losses_of(None, usual, lambda f: f, torch.float32))


def test_a_whole_graph_is_refused_by_name() -> None:
    """By torch. Of other optimizers it is what it was before there was one of ours."""
    model = Model()
    opt, stock = ShardedAdamW(model.parameters()), torch.optim.SGD(Model().parameters())
    compiled = partial(torch.compile, backend="eager", fullgraph=True)
    for call, name in [(opt.step, "step"), (opt.zero_grad, "zero_grad"), (lambda: opt.grad_sync(), "grad_sync")]:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=f"marked(.|\n)*{name}"):
            compiled(call)()
    counters.clear()
    torch.compile(stock.step, backend="eager")()
    assert not any("bucketwheel" in text for text in counters["graph_break"])
