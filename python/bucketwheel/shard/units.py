"""Units: which parameters come and go together, by the module tree. Refuses what can be known from it. Communicates nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from bucketwheel.layout.flat_params import ParamInfo, expect_apart, expect_dense
from bucketwheel.layout.leased_params import home_of
from bucketwheel.layout.precision import PARAM_DTYPES
from bucketwheel.residency.absent_param import sharded


@dataclass(frozen=True)
class Unit:
    """``modules``: whose forward needs all of it; of the root, the model. ``holders``: of the root, the modules that have some
    of its parameters and lie in no unit."""

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[ParamInfo, ...]
    holders: tuple[nn.Module, ...] = ()
    stays: bool = False  # between its forward and its backward

    @property
    def nbytes(self) -> int:
        return sum(info.param.nbytes for info in self.params)


def _chosen(model: nn.Module, given: Any) -> dict[nn.Module, str]:
    """The modules that ``units`` names. ValueError where one names none, or where two lie in each other."""
    asked = tuple(given) if isinstance(given, Iterable) else (given,)
    found: dict[nn.Module, str] = {}
    for one in asked:
        if isinstance(one, type) and issubclass(one, nn.Module):
            some = {module: name for name, module in model.named_modules() if isinstance(module, one)}
        elif isinstance(one, nn.Module):
            some = {module: name for name, module in model.named_modules() if module is one}
        else:
            raise TypeError(f"units has {one!r}; expected classes of modules, or modules of the model")
        if not some:
            kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()})[:12])
            raise ValueError(f"units has {one!r}, and the model has no such module; it has {kinds}")
        found |= some
    if model in found:
        raise ValueError("units has the model itself: its other parameters form a unit anyway, so leave it out")
    for module, name in found.items():
        inner = next((found[m] for m in module.modules() if m is not module and m in found), None)
        if inner is not None:
            raise ValueError(f"unit {inner!r} lies inside unit {name!r}: units must not overlap; name one of the two")
    return found


def _ignored(model: nn.Module, ignored: Iterable[Any]) -> set[Parameter]:
    found: set[Parameter] = set()
    for one in ignored:
        if isinstance(one, nn.Module):
            found |= set(one.parameters())
        elif isinstance(one, Parameter):
            found.add(one)
        else:
            raise TypeError(f"ignored has {one!r}; expected parameters or modules")
    if found and not found & set(model.parameters()):
        raise ValueError("ignored has no parameter of the model, so it has no effect; leave it out")
    return found


def _expect_shardable(infos: Sequence[ParamInfo]) -> None:
    """ValueError or TypeError naming the first parameter that cannot be sharded."""
    devices = {info.device for info in infos}
    for info in infos:
        param, name = info.param, info.name
        if home_of(param) is not None or sharded(param) is not None:
            raise ValueError(f"parameter {name!r} is sharded already: call bw.shard once for a model")
        if type(param) is not Parameter or type(param.data) is not torch.Tensor:
            raise TypeError(
                f"parameter {name!r} is a {type(param).__name__}; plain parameters only: name it in ignored="
            )
        if param.dtype not in PARAM_DTYPES or param.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"parameter {name!r} is {param.dtype} on {param.device}; float32, bfloat16, float16 and float64 on cpu "
                "and cuda can be sharded: name it in ignored="
            )
        if param.grad is not None:
            raise ValueError(f"parameter {name!r} has a gradient: call zero_grad() before bw.shard")
        if len(devices) > 1:
            raise ValueError(
                f"parameters are on {' and '.join(sorted(map(str, devices)))}: move the model to one device"
            )
    expect_dense(infos)
    expect_apart(infos, ())


def find_units(
    model: nn.Module, units: Any, *, ignored: Iterable[Any], reshard: bool | Mapping[Any, bool]
) -> list[Unit]:
    """The root first, then the others in the order of the model. A parameter that several units have is the root's."""
    chosen, left_out = _chosen(model, units), _ignored(model, ignored)
    names: dict[Parameter, str] = {}
    for name, param in model.named_parameters():
        if param not in left_out:
            names.setdefault(param, name)
    infos = {p: ParamInfo(-1, name, p, 0, None, p.dtype, p.stride(), p.device) for p, name in names.items()}
    _expect_shardable(list(infos.values()))
    homes: dict[Parameter, nn.Module | None] = {}
    inside: set[nn.Module] = set()
    for unit in chosen:
        inside |= set(unit.modules())
        for param in unit.parameters():
            homes[param] = unit if homes.get(param, unit) is unit else None
    for module in set(model.modules()) - inside:
        homes.update(dict.fromkeys(module.parameters(recurse=False)))
    stays = _stays(chosen, reshard)
    of: dict[nn.Module | None, list[ParamInfo]] = {}
    for param, info in infos.items():
        of.setdefault(homes.get(param), []).append(info)
    root = of.pop(None, [])
    held = {info.param for info in root}
    holders = tuple(m for m in model.modules() if m is not model and held & set(m.parameters(recurse=False)))
    found = [Unit("root", (model,), tuple(root), holders)]
    return found + [Unit(name, (m,), tuple(of[m]), (), stays[m]) for m, name in chosen.items() if m in of]


def _stays(chosen: Mapping[nn.Module, str], reshard: bool | Mapping[Any, bool]) -> dict[nn.Module, bool]:
    """By unit whether it stays after forward."""
    if not isinstance(reshard, Mapping):
        return dict.fromkeys(chosen, not reshard)
    stays = dict.fromkeys(chosen, False)
    for key, value in reshard.items():
        some: Collection[nn.Module] = [
            m for m, name in chosen.items() if m is key or name == key or (isinstance(key, type) and isinstance(m, key))
        ]
        if not some:
            raise ValueError(
                f"reshard names {key!r}, which is not a unit; units are {', '.join(map(repr, chosen.values()))}"
            )
        stays.update(dict.fromkeys(some, not value))
    return stays
