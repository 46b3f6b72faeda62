"""Compiled modules while parameters are gathered: never stale, and not compiled again at every step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.residency.module_hooks import MAX_COMPILATIONS
from tests.support.bits import assert_bitwise_equal
from tests.support.counting_backend import CountingBackend, compiles_in_threads
from tests.support.late_gathers import delay_gathers, pending, start_at
from tests.support.requirements import slow_case

pytestmark = compiles_in_threads
WIDTH, STEPS = 6, 8


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


def attached(opt: ShardedAdamW, model: Any) -> Any:
    opt.prefetch_params(model)
    return model


def whole_before(opt: ShardedAdamW, model: Model, compiled: Any) -> Any:
    call = compiled(model)
    attached(opt, model)
    return call


def in_place(opt: ShardedAdamW, model: Model, compiled: Any) -> Any:
    attached(opt, model).compile(**compiled.keywords)
    return model


def blocks(opt: ShardedAdamW, model: Model, compiled: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = compiled(block)
    return attached(opt, model)


def blocks_in_place(opt: ShardedAdamW, model: Model, compiled: Any) -> Any:
    for block in attached(opt, model).blocks:
        block.compile(**compiled.keywords)
    return model


def times_1(model: Model, x: Tensor) -> Tensor:
    return model(x) * 1  # type: ignore[no-any-return]


# How it is compiled, and whether parameters may still be on their way when a step ends.
WAYS: dict[str, tuple[Callable[[ShardedAdamW, Model, Any], Any], bool]] = {
    "whole": (lambda opt, model, compiled: compiled(attached(opt, model)), False),
    "the compiled one": (lambda opt, model, compiled: attached(opt, compiled(model)), True),
    "in place": (in_place, False),
    "blocks": (blocks, True),
    "not attached": (lambda opt, model, compiled: compiled(model), False),
    "whole, before": (whole_before, False),
    "blocks in place": (blocks_in_place, True),
    "a function": (lambda opt, model, compiled: compiled(partial(times_1, attached(opt, model))), False),
    "not compiled": (lambda opt, model, compiled: attached(opt, model), True),
}


def inputs(rank: int, step: int) -> Tensor:
    return torch.sin(torch.arange(2.0 * WIDTH).view(2, WIDTH) + 7 * rank + step)


def nothing(model: Model, compiled: Any, step: int) -> list[Tensor]:
    return []


def averages(model: Model, compiled: Any, step: int) -> list[Tensor]:
    """Compiled code, far from any forward, that reads parameters after every step."""
    return compiled(halves)(list(model.parameters()))  # type: ignore[no-any-return]


def halves(params: list[Tensor]) -> list[Tensor]:
    return [p * 0.5 for p in params]


def compiles_later(model: Model, compiled: Any, step: int) -> list[Tensor]:
    if step == 2 and hasattr(compiled, "keywords"):
        for block in model.blocks:
            block.compile(**compiled.keywords)
    return []


def train(
    rank: int, way: str | None, backend: Any, then: Callable[..., list[Tensor]] = nothing
) -> tuple[list[Tensor], list[int], list[int]]:
    """Outputs; how much was compiled by the end of each step; how many parameters were pending after each. ``then`` is
    called behind each step; ``way`` None: nothing overlaps."""
    torch._dynamo.reset()
    model = Model()
    start_at(model.parameters())
    with Communicator(timeout_s=30) as comm:
        overlaps = way is not None
        opt = ShardedAdamW(
            model.parameters(), lr=0.05, process_group=comm, overlap_param_sync=overlaps, bucket_cap_mb=1e-4
        )
        delay_gathers(opt)
        compiled: Any = (
            partial(torch.compile, backend=backend, fullgraph=then is nothing) if overlaps else lambda fn: fn
        )
        call = WAYS[way or "not attached"][0](opt, model, compiled)
        seen, graphs, left = [], [], []
        for step in range(STEPS):
            out = call(inputs(rank, step))
            out.square().sum().backward()
            seen.append(out.detach())
            opt.step()
            left.append(len(pending(opt)))
            opt.zero_grad()
            with torch.no_grad():
                seen += then(model, compiled, step)
            graphs.append(getattr(backend, "graphs", 0))
        opt.close()
    return seen, graphs, left


def train_in_ways(rank: int, world: int, ways: list[str]) -> None:
    expected, _, _ = train(rank, None, None)
    for way in ways:
        seen, graphs, left = train(rank, way, CountingBackend())
        assert_bitwise_equal(seen, expected, way)
        assert 0 < graphs[0] == graphs[-1], f"{way}: {graphs} graphs by step"
        assert (left[-1] > 0) == WAYS[way][1], f"{way}: {left} parameters pending after each step"


@pytest.mark.parametrize("ways", [list(WAYS)[:4], slow_case(list(WAYS)[4:-1])], ids=["ways", "more ways"])
def test_compiled_forwards_are_never_stale(rank_pool: Any, ways: list[str]) -> None:
    rank_pool(2).run(train_in_ways, ways, timeout_s=120)


def train_beside(rank: int, world: int, way: str, then: Callable[..., list[Tensor]]) -> tuple[list[int], list[int]]:
    seen, graphs, left = train(rank, way, CountingBackend(), then)
    assert_bitwise_equal(seen, train(rank, None, None, then)[0])
    return graphs, left


@pytest.mark.parametrize(
    "way, then, most, overlaps",
    [
        ("not compiled", averages, MAX_COMPILATIONS, False),  # arrive within step: no hook would see them read
        ("not compiled", compiles_later, 4, True),
    ],
)
def test_what_else_is_compiled(
    rank_pool: Any, way: str, then: Callable[..., list[Tensor]], most: int, overlaps: bool
) -> None:
    for graphs, left in rank_pool(2).run(train_beside, way, then, timeout_s=120):
        assert 0 < graphs[-3] == graphs[-1] <= most, graphs
        assert (left[-1] > 0) == overlaps, left
