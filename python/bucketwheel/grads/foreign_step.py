"""Optimizers that cannot read the gradients of their parameters are refused before their step begins."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["refuse_foreign_steps"]


def refuse_foreign_steps(placeholder: type[Any]) -> None:
    """From now on the step of any optimizer raises where a ``p.grad`` is a ``placeholder``: its `refusal`.

    Optimizers with a true attribute ``steps_sharded_grads`` pass: the one that holds the gradients, and wrappers that
    only call its step.
    """
    register_optimizer_step_pre_hook(functools.partial(_refuse, placeholder))


def _refuse(
    placeholder: type[Any], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if getattr(optimizer, "steps_sharded_grads", False):
        return None
    _check_gradients(placeholder, optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def checked_closure() -> Any:
        loss = closure()  # makes its gradients inside of the step
        _check_gradients(placeholder, optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked_closure}
    return (optimizer, checked_closure, *args[2:]), kwargs


def _check_gradients(placeholder: type[Any], optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param.grad, placeholder):
                raise param.grad.refusal(f"{type(optimizer).__name__}.step")
