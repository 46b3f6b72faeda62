"""Unfrozen: gradients of parameters that are new in param_groups, or were frozen when the optimizer was made.

Such a gradient is of this rank alone until the next collective call of the optimizer takes the parameter in. Until then
it is kept aside, behind a placeholder, so that stock code never takes it for a whole one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.torch_internals import after_backward


def add_hook(param: Tensor, hook: Any, *, before: bool = False) -> Any:
    """A post-accumulate hook, or one ``before`` accumulation. ``param`` may be frozen: torch takes no hook then, but keeps one
    that is there."""
    is_trained = param.requires_grad
    param.requires_grad_(True)
    try:
        return param.register_hook(hook) if before else param.register_post_accumulate_grad_hook(hook)
    finally:
        param.requires_grad_(is_trained)


def run_last(handle: Any, param: Tensor) -> None:
    """Moves our hook behind those that were registered later, which may edit ``p.grad``. Called by ours in a backward that has
    begun to call the hooks of ``param``, in their old order: so there ours runs again at its end, unless another has taken it
    off by then, as `close` does."""
    hooks = handle.hooks_dict_ref()
    ours = hooks.pop(handle.id, None)
    if ours is not None:
        hooks[handle.id] = ours
        after_backward(lambda: ours(param) if handle.id in hooks else None)


class UnfrozenGrads:
    """Implements `GradOwner`. ``refuse`` raises an error on all ranks, as long as it lives; it is called by what would need all
    of them."""

    def __init__(self, refuse: weakref.WeakMethod[Callable[[str], NoReturn]]) -> None:
        self._refuse = refuse
        # Parameters that may be unfrozen, each with its number and its hook. An entry goes when the parameter is taken in.
        self._watched: dict[Tensor, tuple[int, Any]] = {}
        self._placeholders: list[ShardedGrad] = []  # by number
        self._kept: dict[int, Tensor] = {}  # gradients, by number; until `release`

    def watch(self, frozen: Iterable[Tensor]) -> None:
        """From now on exactly these; of others what is kept goes into ``p.grad``."""
        wanted = [p for p in frozen if type(p) is Parameter and p.is_floating_point()]
        known = {id(p) for p in wanted}
        self.release([p for p in self._watched if id(p) not in known])
        for param in wanted:
            if param not in self._watched:
                number = len(self._placeholders)
                name = f"a parameter of shape {tuple(param.shape)} that is new in param_groups or was frozen"
                self._placeholders.append(ShardedGrad(param, self, number, name))
                hook = add_hook(param, _hook(weakref.ref(self), number))
                weakref.finalize(self, hook.remove).atexit = False
                self._watched[param] = (number, hook)

    def release(self, params: Iterable[Tensor] | None = None) -> None:
        """Takes the hooks off, of all parameters by default, and puts what is kept into ``p.grad``."""
        for param in list(self._watched if params is None else params):
            number, hook = self._watched.pop(param, (-1, None))
            if hook is not None:
                hook.remove()
                kept = self._kept.pop(number, None)
                if param.grad is self._placeholders[number]:
                    param.grad = kept

    def on_gradient(self, number: int, param: Tensor) -> None:
        placeholder = self._placeholders[number]
        if param.grad is not None and param.grad is not placeholder:
            _, handle = self._watched.get(param, (number, None))
            if handle is None:  # taken off by a hook before it
                return
            if next(reversed(handle.hooks_dict_ref())) != handle.id:
                run_last(handle, param)
                return
            self._kept[number] = param.grad
            param.grad = placeholder

    # --- what stock code asks of placeholders (`GradOwner`) ----------------------------------------------------------

    def accumulate(self, index: int, grad: Tensor) -> None:
        with torch.no_grad():
            self._kept[index] = self._kept[index] + grad

    def scale(self, indices: Sequence[int], factor: float | Tensor) -> None:
        for index in indices:
            self._kept[index].mul_(factor)

    def zero(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._kept[index].zero_()

    def norms(self, indices: Sequence[int], ord: float) -> Tensor:
        self._refuse_for("norms", indices)

    def unscale(self, indices: Sequence[int], found_inf: Tensor, inv_scale: Tensor) -> None:
        self._refuse_for("unscale", indices)

    def clamp(self, indices: Sequence[int], low: float | None, high: float | None) -> None:
        self._refuse_for("clamp", indices)

    def _refuse_for(self, what: str, indices: Sequence[int]) -> NoReturn:
        shape = tuple(self._placeholders[indices[0]].shape)
        text = (
            f"{what}: a parameter of shape {shape} is new in param_groups or was frozen when the optimizer was made, and "
            "its first gradient is not reduced yet; call optimizer.grad_sync() or optimizer.clip_grad_norm_() on all "
            "ranks before torch's functions"
        )
        if (refuse := self._refuse()) is not None:
            refuse(text)
        raise RuntimeError(text)


def _hook(owner: weakref.ref[UnfrozenGrads], number: int) -> Callable[[Tensor], None]:
    def on_gradient(param: Tensor) -> None:
        alive = owner()
        if alive is not None:
            alive.on_gradient(number, param)

    return on_gradient
