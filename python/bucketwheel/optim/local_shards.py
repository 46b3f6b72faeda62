"""local_shards: the shards of a sharded model as plain parameters, for optimizers that do not know `shard`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bucketwheel.errors import ClosedError
from bucketwheel.layout.leased_params import LeasedParams, home_of
from bucketwheel.layout.precision import Precision
from bucketwheel.optim.foreign_steps import refuse_foreign_steps
from bucketwheel.optim.param_groups import OptimizerOptions, collect_params, of_sharded
from bucketwheel.optim.sharded_engine import ShardedEngine

_OWNER = "_bucketwheel_local_shards"


def local_shards(model: nn.Module) -> list[Parameter]:
    """Returns this rank's shards of a sharded model, for any elementwise optimizer of torch. Collective.

    The list has one 1-D parameter for each trainable parameter, in the order of ``model.parameters()``. It has whole rows of
    the parameter if the cuts are row cuts (docs/saving.md, "Row cuts"), and may be empty. With ``param_dtype`` of `shard` it
    is the master weight, in the original dtype.

    Use `local_shards` instead of `ShardedAdamW`, once for a model; a later call replaces the shards, and a step with the
    former ones raises `ClosedError`. Pass all shards to one optimizer, in groups if options differ: its step uses up all
    gradients, so if an optimizer lacks a shard that has elements, all ranks raise RuntimeError. Its ``step()`` is collective.
    Before the update ``step()`` reduces the gradients of the model, and each shard's ``.grad`` is this rank's part of the
    averaged gradient, in the dtype of the shard. ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` after
    backward clips by the global norm. After the update the gradients of the model are cleared; call ``zero_grad()`` of the
    optimizer as usual.

    Args:
        model: A model that `shard` has returned.

    Returns:
        Parameters of shape [number of this rank's elements], in the order of ``model.parameters()``.

    Raises:
        ValueError: The model is not sharded, or none of its sharded parameters requires a gradient."""
    infos = [info for info in collect_params([_group(model)]) if home_of(info.param) is not None]
    if not infos:
        raise ValueError("the model has no sharded parameter that is trained: call bw.shard first")
    refuse_foreign_steps()
    _watch_steps()
    options = OptimizerOptions(_NoStates(), None, 2)
    comms = of_sharded(infos, (None, None), options)
    assert comms is not None
    owner = _LocalShards(_Engine(comms[0], infos, ["local_shards"], options, comms[1]))
    return owner.params


def _group(model: nn.Module) -> dict[str, Any]:
    named = list(model.named_parameters())
    flags = dict.fromkeys(("amsgrad", "maximize"), False) | {"decoupled_weight_decay": True}
    return {"params": [p for _, p in named], "param_names": [name for name, _ in named], **flags}


class _NoStates(Precision):
    def kept_of(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {}


class _Engine(ShardedEngine):
    """Reduces gradients, and steps nothing."""

    def _new_rows(self) -> Any:
        return SimpleNamespace(table=SimpleNamespace(rows=0), add=lambda *given, **options: None)


class _LocalShards:
    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._homes: dict[LeasedParams, None] = {}
        self.params: list[Parameter] = []
        for info in engine.infos:
            home = home_of(info.param)
            assert home is not None
            self._homes[home] = None
            local = Parameter(home.parts_of(home.packed_of(info.param), home.masters))
            setattr(local, _OWNER, self)  # which lives as long as one of them
            self.params.append(local)

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are in ``.grad`` afterwards. Collective."""
        engine = self._engine
        if engine.closed:
            raise ClosedError(engine.closed)
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if lacking := sum(id(p) not in given for p in self.params if p.numel()):
            engine.refuse(
                f"{type(optimizer).__name__} lacks {lacking} of the {len(self.params)} parameters of bw.local_shards(model). "
                "Pass all of them to one optimizer, in groups if options differ: its step uses up all gradients of the model"
            )
        engine.grads.close("step")
        engine._end_residency()
        factors = engine.reduced.factors
        for info, local in zip(engine.infos, self.params, strict=True):
            local.grad = None
            if engine.grads.held[info.index]:
                pieces = [piece.grad for piece in engine.reduced.pieces_of(info.index)]
                sums = torch.cat([local.new_empty(0), *(piece.to(local.dtype) for piece in pieces)])
                local.grad = sums.mul_(factors[info.index] * engine.reduced.average)

    def after_step(self) -> None:
        for home in self._homes:
            if home.masters is not None:
                home.values.copy_(home.masters)
        used = list(itertools.compress(self._engine.grads.params, self._engine.grads.held))
        torch.autograd.graph.increment_version(used)
        self._engine.grads.is_used = True
        self._engine.zero_grad(True)


def _owners(optimizer: Optimizer) -> Sequence[_LocalShards]:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return list(dict.fromkeys(owner for p in params if (owner := p.__dict__.get(_OWNER)) is not None))


@functools.cache
def _watch_steps() -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for owner in _owners(optimizer):
            owner.before_step(optimizer)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for owner in _owners(optimizer):
            owner.after_step()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
