"""One script run by a sharded model and by the same model whose parameters are whole: results are equal bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.support.optim_twins import run_local

Script = Callable[[Any, Any, int], list[Any]]


def whole_params(model: Any) -> list[Tensor]:
    """Copies of the parameters of a model, sharded or not."""
    if not hasattr(model, "full_params"):
        return [p.detach().clone() for p in model.parameters()]
    with model.full_params():
        return [p.detach().clone() for p in model.parameters()]


def run_script(
    comm: Communicator, models: list[nn.Module], script: Script, units: Any, options: Any, optim: Any
) -> tuple[list[Any], list[Tensor], dict[str, Any]]:
    """``units`` None: the parameters are whole."""
    model: Any = models[comm.rank]
    if units is not None:
        bw.shard(model, units, group=comm, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    group = None if units is not None else comm
    with bw.ShardedAdamW(trained, lr=1e-2, process_group=group, **optim) as opt:
        seen = script(model, opt, comm.rank)
        counts = model.residency_counts() if units is not None else {}
        return seen, whole_params(model), counts


def expect_twins(
    make: Callable[[], nn.Module],
    units: Any,
    script: Script,
    world: int = 2,
    *,
    optim: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The script gives the same values and parameters either way, on every rank. Returns rank 0's counters."""
    first = make()
    found = []
    for of in (units, None):
        models = [copy.deepcopy(first) for _ in range(world)]
        found.append(run_local(world, run_script, models, script, of, options, optim or {}))
    for (seen, params, _), (seen_whole, params_whole, _) in zip(*found, strict=True):
        assert seen == seen_whole
        for ours, theirs in zip(params, params_whole, strict=True):
            assert torch.equal(ours, theirs)
    return found[0][0][2]


def steps(loss: Callable[[Any, int], Tensor], count: int = 4, clip: float | None = None) -> Script:
    """So many steps, each on another batch of each rank."""

    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(count):
            value = loss(model, step + 100 * rank)
            value.backward()
            if clip is not None:
                seen.append(float(opt.clip_grad_norm_(clip)))
            opt.step()
            opt.zero_grad()
            seen.append(value.item())
        return seen

    return script
