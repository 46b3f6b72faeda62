"""Given modules: what the optimizer can know of the modules that its parameters come from.

``model.parameters()`` is a generator, which has its module; a list of parameters has lost it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from bucketwheel.torch_internals import module_behind

__all__ = ["GivenModules", "buffers_of", "params_of"]


def params_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Those that DDP would make equal on all ranks, by name."""
    return _not_ignored(model, model.named_parameters())


def buffers_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Those that DDP would make equal on all ranks, persistent or not, by name."""
    return _not_ignored(model, model.named_buffers())


def _not_ignored(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return [(name, tensor) for name, tensor in tensors if name not in ignored]


@dataclass(frozen=True)
class GivenModules:
    """``names`` of parameters in their module; ``others``: its buffers and frozen parameters, by name."""

    names: Mapping[Tensor, str] = field(default_factory=dict)
    others: tuple[tuple[str, Tensor], ...] = ()

    @classmethod
    def of(cls, params: Any) -> GivenModules:
        """From what the optimizer is given; it is not begun."""
        groups = params if isinstance(params, (list, tuple)) else [{"params": params}]
        given = (module_behind(group.get("params")) for group in groups if isinstance(group, dict))
        modules = list(dict.fromkeys(module for module in given if module is not None))
        names: dict[str, Tensor] = {}
        for module in modules:
            for name, param in module.named_parameters():
                names.setdefault(name, param)  # of several modules one has the name
        held = (one for module in modules for one in [*params_of(module), *buffers_of(module)])
        others = tuple(one for one in held if not one[1].requires_grad)
        return cls({param: name for name, param in names.items()}, others)

    def names_in(self, param_groups: Sequence[dict[str, Any]], g: int) -> list[tuple[str, bool]]:
        """For each parameter of group ``g`` its name, and whether it is one: else it says where the parameter is."""
        params = param_groups[g]["params"]
        names = param_groups[g].get("param_names") or ()
        if len(names) != len(params):  # or parameters were put there by hand
            names = [self.names.get(param) for param in params]
        return [(name or f"group {g} parameter {i}", bool(name)) for i, name in enumerate(names)]

    def frozen_in(self, param_groups: Sequence[dict[str, Any]]) -> list[tuple[str, Tensor]]:
        """``others``, and what else is frozen in the groups."""
        known = {id(tensor) for _, tensor in self.others}
        found = list(self.others)
        for g, group in enumerate(param_groups):
            named = zip(self.names_in(param_groups, g), group["params"], strict=True)
            found += [(name, p) for (name, _), p in named if not p.requires_grad and id(p) not in known]
        return found
