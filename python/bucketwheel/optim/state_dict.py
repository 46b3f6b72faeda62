"""state_dict: what `ShardedAdamW` saves and loads.

A sharded parameter's entry holds a `TensorShard` of each state: this rank's part, which knows what it is part of. A full
entry (world size 1, or `torch.optim.AdamW`'s) has plain tensors of the parameter's shape; any rank takes its own part
out of it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bucketwheel.checkpoint.param_numbers import follow_names, numbered_groups, numbers_of
from bucketwheel.checkpoint.tensor_shard import StoredState, TensorShard
from bucketwheel.errors import failing_together
from bucketwheel.kernels.adam_rows import expect_uniform_flags
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.masters import load_master, master_of, moments_of, saved_names
from bucketwheel.optim.param_groups import expect_hyperparameters
from bucketwheel.torch_internals import call_of_torch

if TYPE_CHECKING:
    from bucketwheel.optim.local_engine import LocalEngine
    from bucketwheel.optim.sharded_adamw import ShardedAdamW
    from bucketwheel.optim.sharded_engine import ShardedEngine

# Of param_groups: what says how this optimizer works, whatever the saved one was.
_KEPT_KEYS = set(
    "params param_names granularity foreach fused capturable differentiable decoupled_weight_decay".split()
)


def save(optimizer: ShardedAdamW) -> dict[str, Any]:
    engine = optimizer._engine
    number = numbers_of(optimizer.param_groups)
    state: dict[int, Any] = {}
    for info in engine.infos:
        if info.param not in number:  # it has left the groups, and no step has followed that
            continue
        entry: dict[str, Tensor] = own_entry(engine, info)
        if engine.world > 1:
            of = (info.param.shape, info.stride, engine.owned_ranges(info.index), engine.part, info.name)
            entry.update({name: TensorShard(entry[name], *of) for name in entry.keys() - {"step"}})
        state[number[info.param]] = entry
    for param, waiting in optimizer._waiting_states().items():
        state[number[param]] = deepcopy(dict(waiting))
    return {"state": state, "param_groups": numbered_groups(optimizer.param_groups)}


def own_entry(engine: LocalEngine | ShardedEngine, info: ParamInfo) -> dict[str, Tensor]:
    """Copies of what this rank has of a parameter: its step, and 1-D in memory order (world size 1: in the parameter's shape)
    its states, each in memory of its own."""
    tensors = engine.states[info.index]
    entry = {"step": engine.steps[info.index].to(torch.float32)}
    for name in saved_names(tensors):
        copy = tensors[name].clone() if name in tensors else master_of(engine.values_of(info.index), tensors)
        assert copy is not None
        is_flat = engine.world == 1 and copy.shape != info.param.shape
        entry[name] = copy.as_strided(info.param.shape, info.stride) if is_flat else copy
    return entry


def plan_load(optimizer: ShardedAdamW, state_dict: dict[str, Any]) -> Callable[[], None]:
    """What loads ``state_dict``. ValueError, KeyError or RuntimeError if it cannot be loaded; nothing is changed here."""
    engine, ours = optimizer._engine, optimizer.param_groups
    if (pending := engine.first_pending()) is not None:  # those that a step has used stay, as with torch
        raise RuntimeError(
            f"load_state_dict while gradients are pending: no step has used the gradient of {pending.name!r}; call "
            "step() or zero_grad() first"
        )
    groups, state = state_dict["param_groups"], _as_given_to_torch(state_dict["state"])
    # torch's set_optimizer_state_dict gives names of its own as parameters, and has ordered them.
    is_strict = not any(isinstance(p, str) for group in groups for p in group["params"])
    groups = follow_names(groups, ours, strict=is_strict)
    if len(groups) != len(ours):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(groups)}, this optimizer has {len(ours)}"
        )
    if any(len(a["params"]) != len(b["params"]) for a, b in zip(groups, ours, strict=True)):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )
    # Copies: schedulers write to learning rates that are tensors.
    kept = deepcopy([{key: value for key, value in theirs.items() if key not in _KEPT_KEYS} for theirs in groups])
    wanted = engine.precision.amsgrad
    if any(bool(theirs.get("amsgrad", wanted)) != wanted for theirs in groups):
        raise ValueError(
            f"the loaded state dict has amsgrad={not wanted}, but this optimizer has amsgrad={wanted}; make it "
            "with the same value"
        )
    expect_uniform_flags([{**group, **theirs} for group, theirs in zip(ours, kept, strict=True)])
    _expect_hyperparameters(groups)
    pairs = (zip(a["params"], b["params"], strict=True) for a, b in zip(ours, groups, strict=True))
    saved_as: dict[Tensor, Any] = dict(itertools.chain.from_iterable(pairs))
    plans = [(info, _plan(engine, info, state.get(saved_as[info.param]))) for info in engine.infos]
    of_frozen = _states_of_frozen(optimizer, state, saved_as)

    def load() -> None:
        optimizer._trained.loaded = of_frozen
        for plan in plans:
            _carry_out(engine, *plan)
        for group, theirs in zip(ours, kept, strict=True):
            rate = group["lr"]
            group.update(theirs)
            if group["capturable"] and isinstance(rate, Tensor):  # and CUDA graphs read them where they are
                group["lr"] = rate.copy_(torch.as_tensor(group["lr"], dtype=rate.dtype, device=rate.device))
        engine.expect_loaded_model()

    return load


def load_with_model(
    engine: LocalEngine | ShardedEngine, what: str, load_model: Callable[[], None], load: Callable[[], None]
) -> None:
    """``load`` is what `plan_load` returned; ``load_model`` writes this rank's part of the parameters. Collective."""
    engine.announce_write()
    with failing_together(engine.expect_done_by_all, what):
        load_model()  # remainders are made for its values
        load()
    engine.share_params()
    engine.expect_loaded_model()


def _as_given_to_torch(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """``state``; where torch's `set_optimizer_state_dict` hands it over, without what that does to it. RuntimeError for what
    cannot be undone."""
    call = call_of_torch("_load_optim_state_dict")
    if call is None:
        return state
    if call["info"].broadcast_from_rank0:  # it sends memory, to contiguous tensors of that shape
        for key, name, value in ((key, name, value) for key, entry in state.items() for name, value in entry.items()):
            if isinstance(value, Tensor) and not value.is_contiguous():
                raise RuntimeError(
                    f"set_optimizer_state_dict with broadcast_from_rank0=True: the state {name!r} of {key!r} has strides "
                    f"{value.stride()}, which torch does not send to the other ranks. Pass a contiguous tensor, or "
                    "call optimizer.load_full_state_dict(state_dict), which keeps strides"
                )
    # Of a flattened dict it takes what `optimizer.state` shows: a remainder, which is not there, and no master.
    flat = {key: call["state_dict"].get(f"state.{key}.master_param") for key, e in state.items() if "remainder" in e}
    return {**state, **{key: {**state[key], "master_param": master} for key, master in flat.items()}}


def load_taken_in(optimizer: ShardedAdamW) -> None:
    """Loads what `load` found for parameters that were frozen then, into those that have been taken in since."""
    engine, loaded = optimizer._engine, optimizer._trained.loaded
    for info in engine.infos:
        if info.param in loaded:
            _carry_out(engine, info, _plan(engine, info, loaded.pop(info.param)))


def _states_of_frozen(
    optimizer: ShardedAdamW, state: dict[Any, Any], saved_as: dict[Tensor, Any]
) -> dict[Tensor, dict[str, Any]]:
    """Entries of parameters that are frozen now. ValueError for one that will not fit, and for a rank's part: nobody has
    divided them yet."""
    found = {p: state[saved_as[p]] for p in optimizer._trained.frozen if state.get(saved_as[p])}
    for p, entry in found.items():
        names = saved_names(optimizer._engine.precision.kept_of(p.dtype))
        states = _expect_states(entry, names, p, f"a parameter of shape {tuple(p.shape)} that is frozen now")
        if any(isinstance(value, TensorShard) for value in states.values()):
            raise ValueError(
                f"the loaded state has a rank's part of a parameter of shape {tuple(p.shape)} that is frozen now; "
                "make the optimizer with the same trained parameters as in the save, load the state, and freeze "
                "parameters afterwards"
            )
    return found


def _carry_out(engine: LocalEngine | ShardedEngine, info: ParamInfo, loaded: Mapping[str, Any]) -> None:
    """What is not found starts anew: moments are zero, the parameter is the weight."""
    assign(engine, info, loaded)
    state = engine.states[info.index]
    for name in saved_names(state):
        if name == "master_param" and name not in loaded:
            weight = engine.values_of(info.index)
            load_master(weight, state, weight.to(torch.float32))
        elif name not in loaded:
            state[name].zero_()


def assign(engine: LocalEngine | ShardedEngine, info: ParamInfo, values: Mapping[str, Any]) -> None:
    """Copies this rank's part (1-D, in memory order) of states of a parameter into the engine's; others stay. A
    `StoredState` is read."""
    engine.announce_write()
    state = engine.states[info.index]
    for name, value in values.items():
        if name == "step":
            engine.steps[info.index] = value
        elif isinstance(value, StoredState):
            value.load()
        else:
            like = state["exp_avg"]
            laid_out = value.contiguous().as_strided(like.shape, like.stride())  # memory order
            if name == "master_param":
                load_master(engine.values_of(info.index), state, laid_out.to(torch.float32))
            else:
                state[name].copy_(laid_out)


def reset_chosen(optimizer: ShardedAdamW, parameters: Iterable[Tensor] | None, rows: Any) -> None:
    """`ShardedAdamW.reset_state`."""
    if rows is not None and parameters is None:
        raise ValueError("reset_state: rows= needs parameters=")
    engine, trained = optimizer._engine, optimizer._trained
    optimizer._follow_state()
    some = [parameters] if isinstance(parameters, Tensor) else parameters
    chosen: list[Any] | None = None if some is None else list(some)
    if not trained.are_those_of(optimizer.param_groups):
        trained.note_waiting(optimizer.param_groups)
    indices = trained.indices(chosen)
    for p in trained.frozen if chosen is None else chosen:
        if p not in trained.index_of and optimizer.state.get(p):
            if rows is not None:
                raise ValueError("reset_state: rows= of a parameter that the next step() adds; call it after that step")
            del optimizer.state[p]
    given = rows.tolist() if isinstance(rows, Tensor) else rows
    # So that ranks can compare it.
    which = "" if rows is None else f" in rows of checksum {zlib.crc32(repr(given).encode()):08x}"
    for info in engine.infos if indices is None else [engine.infos[i] for i in indices]:
        reset(engine, info, rows)
        optimizer._shown.said.add(f"{info.name!r} starts anew{which}")


def reset(engine: LocalEngine | ShardedEngine, info: ParamInfo, rows: Any = None) -> None:
    """Zeroes the moments, of ``rows`` (what indexes the first dimension) alone where they are given, else the step too."""
    engine.announce_write()
    moments = moments_of(engine.states[info.index]).values()
    if rows is None:
        engine.steps[info.index] = 0
        for moment in moments:
            moment.zero_()
        return
    chosen = torch.zeros(info.param.shape, dtype=torch.bool, device=info.device)
    chosen[rows] = True
    own = cut(chosen, info, engine.owned_ranges(info.index))
    for moment in moments:
        moment.as_strided(own.shape, (1,)).masked_fill_(own, 0.0)


def _expect_states(entry: dict[str, Any], names: Sequence[str], param: Tensor, of: str) -> dict[str, Any]:
    """The states ``names`` that a saved entry has. ValueError unless it has a step and all of them, in the parameter's shape;
    without a master the parameter is the weight."""
    missing = [name for name in ("step", *names) if name != "master_param" and entry.get(name) is None]
    if missing:
        raise ValueError(f"the state of {of} has no {missing[0]!r}; it has {sorted(entry)}")
    found = {name: entry[name] for name in names if entry.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, (Tensor, StoredState)):
            raise ValueError(f"the state {name!r} of {of} is a {type(value).__name__}, not a tensor")
        if value.shape != param.shape:
            raise ValueError(
                f"the state {name!r} of {of} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}"
            )
    return found


def _expect_hyperparameters(groups: Sequence[dict[str, Any]]) -> None:
    """KeyError, TypeError or ValueError naming the first of the loaded groups that a step would not take."""
    for g, group in enumerate(groups):
        missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
        if missing:
            raise KeyError(f"the loaded parameter group {g} has no {missing[0]!r}; it has {sorted(group)}")
        try:
            expect_hyperparameters(group["lr"], group["betas"], group["eps"], group["weight_decay"], False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"the loaded parameter group {g}: {error}") from None


def _plan(engine: LocalEngine | ShardedEngine, info: ParamInfo, entry: dict[str, Any] | None) -> dict[str, Any]:
    """What `_carry_out` takes; ValueError if it does not fit."""
    if not entry:  # torch saves nothing for a parameter that was never stepped
        return {"step": 0}
    names, ranges = saved_names(engine.states[info.index]), engine.owned_ranges(info.index)
    loaded = _expect_states(entry, names, info.param, repr(info.name))
    for name, value in loaded.items():
        if isinstance(value, TensorShard):
            if list(value.ranges) != list(ranges) or value.stride() != info.stride:
                placed = "" if value.param_name in ("", info.name) else f", in the place of {value.param_name!r}"
                raise ValueError(
                    f"the state of {info.name!r} is rank {value.part[0]}'s part of {value.part[1]}{placed}, for the elements "
                    f"{list(value.ranges)}; this is rank {engine.part[0]} of {engine.part[1]} and owns {list(ranges)}. A part "
                    "loads on the rank that saved it, at the same world size and bucket_cap_mb. bw.checkpoint.save on all ranks, "
                    "or a framework's own save with ShardedAdamW(..., full_state_dict=True), loads at any world size"
                )
            loaded[name] = value.piece
        elif not isinstance(value, StoredState):
            loaded[name] = cut(value, info, ranges)
    return {"step": int(entry["step"]), **loaded}


def cut(full: Tensor, info: ParamInfo, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The elements of ``ranges`` out of a tensor of the parameter's shape, in the parameter's memory order."""
    param = info.param
    laid_out = torch.empty_strided(param.shape, info.stride, dtype=full.dtype, device=param.device).copy_(full)
    flat = laid_out.as_strided((param.numel(),), (1,))
    return torch.cat([flat[begin:end] for begin, end in ranges]) if ranges else flat[:0]
