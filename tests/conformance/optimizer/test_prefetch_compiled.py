"""Compiled modules while parameters are gathered: never stale, and not compiled again at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bucketwheel.comm.communicator import Communicator
from bucketwheel.gathers.module_hooks import MAX_COMPILATIONS
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.counting_backend import CountingBackend, compiles_in_threads
from tests.support.late_gathers import delay_gathers, pending, start_at

pytestmark = compiles_in_threads
WIDTH, STEPS = 6, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inner(x))


class Model(nn.Module):
    """The head uses the embedding's weight; blocks run in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in reversed(self.blocks):
            x = block(x)
        return F.linear(x, self.embed.weight)


Compile = Callable[[ShardedAdamW, Model, Any], Callable[[Tensor], Tensor]]


def whole(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend=backend, fullgraph=True)


def whole_before(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    opt.prefetch_params(model)
    return compiled


def whole_after(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    opt.prefetch_params(model)
    return torch.compile(model, backend=backend, fullgraph=True)


def the_compiled_one(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    opt.prefetch_params(compiled)  # type: ignore[arg-type]
    return compiled


def in_place(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    opt.prefetch_params(model)
    model.compile(backend=backend, fullgraph=True)
    return model


def blocks(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)  # type: ignore[assignment]
    opt.prefetch_params(model)
    return model


def blocks_in_place(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    opt.prefetch_params(model)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def its_forward(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    opt.prefetch_params(model)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)  # type: ignore[method-assign]
    return model


def a_function(opt: ShardedAdamW, model: Model, backend: Any) -> Callable[[Tensor], Tensor]:
    opt.prefetch_params(model)
    return torch.compile(lambda x: model(x) * 1, backend=backend, fullgraph=True)


# How it is compiled, and whether parameters may still be on their way when a step ends.
WAYS: list[tuple[Compile, bool]] = [(whole_after, False), (the_compiled_one, True), (in_place, False), (blocks, True)]
MORE_WAYS: list[tuple[Compile, bool]] = [
    (whole, False),
    (whole_before, False),
    (blocks_in_place, True),
    (its_forward, True),
    (a_function, False),
]


def inputs(rank: int, step: int) -> Tensor:
    return torch.sin(torch.arange(2.0 * WIDTH).view(2, WIDTH) + 7 * rank + step)


def train(rank: int, compile: Compile | None, backend: Any) -> tuple[list[Tensor], list[int], list[int]]:
    """Outputs; how much was compiled by the end of each step; how many parameters were pending after each."""
    torch._dynamo.reset()
    model = Model()
    start_at(model.parameters())
    with Communicator(timeout_s=30) as comm:
        options = {"overlap_param_sync": compile is not None, "bucket_cap_mb": 1e-4}
        opt = ShardedAdamW(model.parameters(), lr=0.05, process_group=comm, **options)  # type: ignore[arg-type]
        delay_gathers(opt)
        call = model if compile is None else compile(opt, model, backend)
        seen, graphs, left = [], [], []
        for step in range(STEPS):
            out = call(inputs(rank, step))
            out.square().sum().backward()
            seen.append(out.detach())
            opt.step()
            left.append(len(pending(opt)))
            opt.zero_grad()
            graphs.append(getattr(backend, "graphs", 0))
        opt.close()
    return seen, graphs, left


def train_compiled(rank: int, world: int, ways: list[tuple[Compile, bool]]) -> None:
    expected, _, _ = train(rank, None, None)
    for compile, overlaps in ways:
        seen, graphs, left = train(rank, compile, CountingBackend())
        assert_bitwise_equal(seen, expected, compile.__name__)
        assert 0 < graphs[0] == graphs[-1], f"{compile.__name__}: {graphs} graphs by step"
        assert (left[-1] > 0) == overlaps, f"{compile.__name__}: {left} parameters pending after each step"


@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE_WAYS, marks=pytest.mark.slow)], ids=["ways", "more ways"])
def test_compiled_forwards_are_never_stale(rank_pool: Any, ways: list[tuple[Compile, bool]]) -> None:
    """P3."""
    rank_pool(2).run(train_compiled, ways, timeout_s=120)


def train_beside_compiled(rank: int, world: int) -> tuple[int, int]:
    """A compiled function, far from any forward, reads parameters after every step."""
    torch._dynamo.reset()
    model, backend = Model(), CountingBackend()
    start_at(model.parameters())
    sums: list[Tensor] = []
    average = torch.compile(lambda params: [p * 0.5 for p in params], backend=backend)
    with Communicator(timeout_s=30) as comm:
        opt = ShardedAdamW(model.parameters(), lr=0.05, process_group=comm, overlap_param_sync=True)
        delay_gathers(opt)
        opt.prefetch_params(model)
        for step in range(STEPS):
            model(inputs(rank, step)).square().sum().backward()
            opt.step()
            left = len(pending(opt))
            opt.zero_grad()
            with torch.no_grad():
                sums = average(list(model.parameters()))
            opt.param_sync()
            assert_bitwise_equal(sums, [p.detach() * 0.5 for p in model.parameters()])
        opt.close()
    return backend.graphs, left


def test_what_compiled_code_reads_without_a_hook_arrives_within_step(rank_pool: Any) -> None:
    for graphs, left in rank_pool(2).run(train_beside_compiled, timeout_s=60):
        assert 1 <= graphs <= MAX_COMPILATIONS and left == 0


def train_by_turns(rank: int, world: int) -> int:
    """Trained compiled as a whole, evaluated as it is."""
    torch._dynamo.reset()
    backend = CountingBackend()
    seen: list[list[Tensor]] = []
    for overlaps in (False, True):
        model = Model()
        start_at(model.parameters())
        with Communicator(timeout_s=30) as comm:
            opt = ShardedAdamW(model.parameters(), lr=0.05, process_group=comm, overlap_param_sync=overlaps)
            delay_gathers(opt)
            opt.prefetch_params(model)
            call = torch.compile(model, backend=backend) if overlaps else model
            seen.append([])
            for step in range(STEPS + 4):
                out = call(inputs(rank, step))
                out.square().sum().backward()
                opt.step()
                opt.zero_grad()
                with torch.no_grad():
                    seen[-1] += [out.detach(), model(inputs(rank, 0))]
            opt.close()
    assert_bitwise_equal(seen[1], seen[0])
    return backend.graphs


def test_a_model_that_is_compiled_and_called_as_it_is(rank_pool: Any) -> None:
    assert all(1 <= graphs <= 1 + MAX_COMPILATIONS for graphs in rank_pool(2).run(train_by_turns, timeout_s=60))


def train_then_compile(rank: int, world: int) -> tuple[list[int], int]:
    """Called as it is for two steps; then its blocks are compiled, in place."""
    torch._dynamo.reset()
    model, backend = Model(), CountingBackend()
    start_at(model.parameters())
    graphs = []
    with Communicator(timeout_s=30) as comm:
        opt = ShardedAdamW(model.parameters(), lr=0.05, process_group=comm, overlap_param_sync=True, bucket_cap_mb=1e-4)
        delay_gathers(opt)
        opt.prefetch_params(model)
        for step in range(STEPS):
            if step == 2:
                opt.param_sync()
                for block in model.blocks:
                    block.compile(backend=backend, fullgraph=True)
            model(inputs(rank, step)).square().sum().backward()
            opt.step()
            opt.zero_grad()
            graphs.append(backend.graphs)
        left = len(pending(opt))
        opt.close()
    return graphs, left


def test_modules_that_are_compiled_later(rank_pool: Any) -> None:
    for graphs, left in rank_pool(2).run(train_then_compile, timeout_s=60):
        assert 0 < graphs[2] == graphs[-1] and left > 0, f"{graphs} graphs by step, {left} pending"


def train_with_inductor(rank: int, world: int) -> None:
    expected, _, _ = train(rank, None, None)
    for compile in (the_compiled_one, whole_after):
        seen, _, _ = train(rank, compile, "inductor")
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_inductor(rank_pool: Any) -> None:
    rank_pool(2).run(train_with_inductor, timeout_s=240)
