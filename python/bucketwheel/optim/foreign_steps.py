"""Foreign steps: other optimizers cannot read the gradients of our parameters, and must not begin to; nor torch's Join.

`torch.compile` traces the hook, as part of the step of whatever optimizer it compiles: [Note: on the host].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bucketwheel.checkpoint.tensor_shard import TensorShard
from bucketwheel.grads.agreement import NO_JOIN
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.optim.sharded_engine import engine_of
from bucketwheel.torch_internals import before_join


@functools.cache
def refuse_foreign_steps() -> None:
    """From now on the step of any optimizer raises where a ``p.grad`` is a placeholder: its `refusal`.

    Optimizers with a true attribute ``steps_sharded_grads`` pass: the one that holds the gradients, and wrappers that
    only call its step. Join raises where it is given a module of our parameters.
    """
    register_optimizer_step_pre_hook(_before_any_step)
    before_join(_before_any_join)


def _before_any_join(joined: Sequence[Any]) -> None:
    """TypeError for a DDP wrapper of our parameters: a rank that has joined would make its collectives, and none of ours."""
    for wrapper in joined:
        if isinstance(wrapper, nn.Module) and any(engine_of(p) is not None for p in wrapper.parameters()):
            raise TypeError(
                f"torch's Join was given a {type(wrapper).__name__} of ShardedAdamW's parameters. {NO_JOIN}"
            )


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if getattr(optimizer, "steps_sharded_grads", False):
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param.grad, ShardedGrad):
                raise param.grad.refusal(f"{name}.step")
    first = next(iter(optimizer.state.values()), None)
    part = first.get("exp_avg") if isinstance(first, dict) else None
    if isinstance(part, TensorShard):
        raise RuntimeError(
            f"{name}.step: its state is rank {part.part[0]}'s part of {part.part[1]}, loaded from the state_dict of a sharded "
            "optimizer. Load optimizer.full_state_dict() instead, or the checkpoint with torch.distributed.checkpoint"
        )
