"""Unit hooks: what modules tell of their units. Before and after forward, and before backward.

Backward is seen by hooks of the autograd nodes that made the outputs. A view that is written to in place later gets another
node, so that of its base is hooked too.

[Note: saved by name] Inside of a forward whose unit has no planned address, what autograd saves of the unit's memory is saved
as a place in it, and read where the unit lies when backward comes to it. Not where other hooks of saved tensors are at work
(checkpoints run the forward again).
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bucketwheel.residency.module_hooks import ModuleHook

_autograd = torch._C._autograd
HOLDER = -1


class Boundaries(Protocol):
    """What the hooks tell. ``unit``: its number, 0 of the root, HOLDER of a module that has parameters of the root."""

    def before_forward(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None: ...
    def after_forward(self, unit: int, module: nn.Module, output: Any) -> Any: ...


def tensors_in(value: Any, found: list[Tensor]) -> None:
    """Adds the tensors of tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for one in value.values():
            tensors_in(one, found)
    elif isinstance(value, (list, tuple)):
        for one in value:
            tensors_in(one, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            tensors_in(getattr(value, field.name, None), found)


def nodes_of(tensor: Tensor) -> tuple[Any, ...]:
    """The nodes before which a backward that reaches the tensor's graph passes."""
    base = tensor._base
    return tuple(node for node in (tensor.grad_fn, None if base is None else base.grad_fn) if node is not None)


class _UnitHook(ModuleHook):
    def __init__(self, boundaries: Boundaries | None = None, unit: int = 0) -> None:
        self._boundaries = (lambda: None) if boundaries is None else weakref.ref(boundaries)
        self._unit = unit


class _BeforeForward(_UnitHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        boundaries: Any = self._boundaries()
        return None if boundaries is None else boundaries.before_forward(self._unit, module, args, kwargs)


class _AfterForward(_UnitHook):
    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        boundaries: Any = self._boundaries()
        return None if boundaries is None else boundaries.after_forward(self._unit, module, output)


def hook_unit(boundaries: Boundaries, unit: int, modules: Any) -> list[RemovableHandle]:
    """Hooks that know ``boundaries`` weakly. Ours is the first before forward and the last after."""
    hooks = []
    for module in modules:
        before, after = _BeforeForward(boundaries, unit), _AfterForward(boundaries, unit)
        hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(after, always_call=True))
    return hooks


class SavedByName:
    """[Note: saved by name]. ``unit_of``: of the begin of a storage, the unit whose memory that is, or None. ``memory_of``: of
    a unit, its memory (uint8) now, or an error."""

    def __init__(self, unit_of: Any, memory_of: Any) -> None:
        self._unit_of, self._memory_of = unit_of, memory_of

    @classmethod
    def push(cls, unit_of: Any, memory_of: Any) -> SavedByName | None:
        """From now on, until `pop`. None where others are at work."""
        if _autograd._top_saved_tensors_default_hooks(False) is not None:
            return None
        saved = cls(unit_of, memory_of)
        _autograd._push_saved_tensors_default_hooks(saved._pack, saved._unpack)
        return saved

    def pop(self) -> None:
        _autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: Tensor) -> Any:
        unit = None
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:
            unit = self._unit_of(tensor.untyped_storage().data_ptr())
        if unit is None:  # an alias: a node that kept its own output would keep itself
            alias = tensor.detach()
            return alias, alias._version, None
        weight = tensor._base if tensor._base is not None else tensor  # it has the version of both
        return weight, weight._version, (unit, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _unpack(self, saved: Any) -> Tensor:
        kept, version, place = saved
        if kept._version != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
                f"{tuple(kept.shape)} is at version {kept._version}, expected version {version}"
            )
        if place is None:
            return kept
        unit, dtype, offset, shape, stride = place
        memory = self._memory_of(unit)
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, shape, stride)
