"""state_dict: what `ShardedAdamW` saves and loads. Plain tensors, numbers and lists; no communication.

A sharded parameter's entry holds this rank's elements and, as ``ranges``, which they are. A full entry (world size 1,
or `torch.optim.AdamW`'s) has the parameter's shape and no ``ranges``; any rank takes its own part out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .flat import ParamInfo
from .rows import expect_uniform_flags

if TYPE_CHECKING:
    from .optim import ShardedAdamW

__all__ = ["load", "save"]

# Of param_groups: what says how this optimizer works, whatever the saved one was.
_KEPT_KEYS = {
    "params",
    "param_names",
    "granularity",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
}


def save(optimizer: ShardedAdamW) -> dict[str, Any]:
    engine = optimizer._engine
    number = _numbers(optimizer.param_groups)
    state = {}
    for info, tensors in zip(engine.infos, engine.states, strict=True):
        entry: dict[str, Any] = {"step": engine.steps[info.index].to(torch.float32)}
        for name, tensor in tensors.items():
            copy = entry[name] = tensor.clone()
            if engine.world == 1 and copy.shape != info.param.shape:
                entry[name] = copy.as_strided(info.param.shape, info.stride)
        if engine.world > 1:
            entry["ranges"] = [list(pair) for pair in engine.owned_ranges(info.index)]
        state[number[info.param]] = entry
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [number[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load(optimizer: ShardedAdamW, state_dict: dict[str, Any]) -> None:
    engine = optimizer._engine
    if any(info.param.grad is not None for info in engine.infos) and engine.world > 1:
        raise RuntimeError("load_state_dict while gradients are pending: call step() or zero_grad() first")
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if any(len(a["params"]) != len(b["params"]) for a, b in zip(groups, optimizer.param_groups, strict=True)):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    if any(group.get("amsgrad") for group in groups):
        raise NotImplementedError("amsgrad=True in the loaded state dict is not implemented yet")
    expect_uniform_flags([{**ours, **theirs} for ours, theirs in zip(optimizer.param_groups, groups, strict=True)])
    saved_as = {
        p: saved
        for theirs, ours in zip(groups, optimizer.param_groups, strict=True)
        for saved, p in zip(theirs["params"], ours["params"], strict=True)
    }
    plans: list[tuple[ParamInfo, int, dict[str, Tensor]]] = []
    for info, tensors in zip(engine.infos, engine.states, strict=True):
        entry = state_dict["state"].get(saved_as[info.param])
        plans.append(_plan(info, tensors, engine.owned_ranges(info.index), entry))
    for info, step, loaded in plans:
        engine.steps[info.index] = step
        for name, tensor in engine.states[info.index].items():
            if name in loaded:
                tensor.copy_(loaded[name].contiguous().as_strided(tensor.shape, tensor.stride()))  # memory order
    for theirs, ours in zip(groups, optimizer.param_groups, strict=True):
        ours.update({key: value for key, value in theirs.items() if key not in _KEPT_KEYS})
    engine.follow_loaded_state()


def _numbers(param_groups: Sequence[dict[str, Any]]) -> dict[Tensor, int]:
    """As torch numbers parameters: through all groups, frozen ones counted."""
    return {p: i for i, p in enumerate(p for group in param_groups for p in group["params"])}


def _plan(
    info: ParamInfo, tensors: dict[str, Tensor], ranges: Sequence[tuple[int, int]], entry: dict[str, Any] | None
) -> tuple[ParamInfo, int, dict[str, Tensor]]:
    """What to copy into one parameter's states; ValueError if it does not fit. No entry: a fresh start (zeros)."""
    if entry is None:  # torch saves nothing for a parameter that was never stepped
        return info, 0, {name: torch.zeros_like(t) for name, t in tensors.items() if name != "master_param"}
    loaded = {}
    for name, tensor in tensors.items():
        value = entry.get(name)
        if value is None:
            if name != "master_param":  # the master is read from the parameter
                raise ValueError(f"the state of {info.name!r} has no {name!r}; it has {sorted(entry)}")
            continue
        if "ranges" in entry:
            if [tuple(pair) for pair in entry["ranges"]] != list(ranges):
                raise ValueError(
                    f"the state of {info.name!r} was saved for the elements {entry['ranges']}, this rank owns {list(ranges)}: it is "
                    "another rank's, or was saved at another world size or bucket_cap_mb"
                )
            part = value.flatten()
        else:
            if value.shape != info.param.shape:
                raise ValueError(
                    f"the state {name!r} of {info.name!r} has shape {tuple(value.shape)}, the parameter {tuple(info.param.shape)}"
                )
            part = _cut(value, info, ranges)
        if part.numel() != tensor.numel():
            raise ValueError(
                f"the state {name!r} of {info.name!r} has {part.numel()} elements here, expected {tensor.numel()}"
            )
        loaded[name] = part
    return info, int(entry.get("step", 0)), loaded


def _cut(full: Tensor, info: ParamInfo, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The elements of ``ranges`` out of a tensor of the parameter's shape, in the parameter's memory order."""
    param = info.param
    laid_out = torch.empty_strided(param.shape, info.stride, dtype=torch.float32, device=param.device).copy_(full)
    flat = laid_out.as_strided((param.numel(),), (1,))
    return torch.cat([flat[begin:end] for begin, end in ranges]) if ranges else flat[:0]
