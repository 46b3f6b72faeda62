"""Full states: the states of whole parameters, gathered from the ranks to one of them, and handed out to all.

They travel by parameter and by state, in chunks of a parameter's memory order. A rank holds one chunk beside its states;
the whole is with the rank that asked for it. Full dicts are those of `torch.optim.AdamW`, so this is also the way from and
to whatever reads and writes these.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from bucketwheel.checkpoint.boxes import boxes_of
from bucketwheel.checkpoint.live import part_of, value_of
from bucketwheel.checkpoint.on_disk import save_whole
from bucketwheel.checkpoint.param_numbers import follow_names, numbers_of
from bucketwheel.checkpoint.plain_values import as_plain
from bucketwheel.checkpoint.tensor_shard import StoredState
from bucketwheel.errors import failing_together
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.masters import load_master
from bucketwheel.torch_internals import call_of_torch

if TYPE_CHECKING:
    from bucketwheel.optim.local_engine import LocalEngine
    from bucketwheel.optim.sharded_adamw import ShardedAdamW
    from bucketwheel.optim.sharded_engine import ShardedEngine

    Engine: TypeAlias = LocalEngine | ShardedEngine

CHUNK_BYTES = 64 << 20


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's memory, 1-D."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _own(engine: Engine, info: ParamInfo, name: str) -> list[Tensor]:
    """This rank's part of a state as it is saved, 1-D in memory order: itself, or the parameter and the remainder of its
    master (see `value_of`)."""
    state = engine.states[info.index]
    if name in state:
        return [_flat(state[name])]
    parts = engine.value_parts(info.index)
    return [torch.cat(parts) if parts else _flat(state["remainder"]).view(torch.bfloat16), _flat(state["remainder"])]


def _buffer(engine: Engine, chunk_bytes: int) -> Tensor:
    return torch.empty(max(chunk_bytes, 8), dtype=torch.uint8, device=engine.steps.device)


def _chunks(buffer: Tensor, ranges: Sequence[tuple[int, int]], dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """``ranges`` of a parameter, cut into chunks that fit the buffer: [begin, end) and memory for them."""
    numel = buffer.numel() // dtype.itemsize
    memory = buffer[: numel * dtype.itemsize].view(dtype)
    for begin, end in ranges:
        for first in range(begin, end, numel):
            last = min(first + numel, end)
            yield first, last, memory[: last - first]


def _kept(engine: Engine, info: ParamInfo, masters: bool = True) -> dict[str, torch.dtype]:
    """The states of a parameter as they are saved, and their dtypes."""
    found = {name: tensor.dtype for name, tensor in engine.states[info.index].items()}
    if found.pop("remainder", None):
        found["master_param"] = torch.float32
    return {name: dtype for name, dtype in found.items() if masters or name != "master_param"}


# --- from the ranks to one ---------------------------------------------------------------------------------------------


def _gather(engine: Engine, info: ParamInfo, name: str, whole: Tensor | None, buffer: Tensor) -> None:
    """Fills ``whole`` (dense, with the parameter's strides) with a state of all ranks; None: this rank only sends.

    Collective of the ranks among which states are sharded.
    """
    own, at = _own(engine, info, name), 0
    for owner, ranges in enumerate(engine.ranges_of(info.index)):
        for begin, end, chunk in _chunks(buffer, ranges, _kept(engine, info)[name]):
            if owner == engine.part[0]:
                chunk.copy_(value_of([part[at : at + end - begin] for part in own]))
                at += end - begin
            engine.broadcast_part(chunk, owner)
            if whole is not None:
                _flat(whole)[begin:end] = chunk


def whole_entry(engine: Engine, info: ParamInfo) -> dict[str, Tensor]:
    """A parameter's state as `torch.optim.AdamW` has it, on its device. Collective, on every rank."""
    entry = {"step": engine.steps[info.index].to(torch.float32)}
    buffer = _buffer(engine, min(CHUNK_BYTES, 8 * info.param.numel()))
    for name, dtype in _kept(engine, info).items():
        entry[name] = torch.empty_strided(info.param.shape, info.stride, dtype=dtype, device=info.device)
        _gather(engine, info, name, entry[name], buffer)
    return entry


def save(
    optimizer: ShardedAdamW,
    dst: int | None,
    *,
    path: str | os.PathLike[str] | None,
    chunk_bytes: int,
    masters: bool,
    model: torch.nn.Module | None,
) -> dict[str, Any]:
    """`ShardedAdamW.full_state_dict`."""
    engine = optimizer._engine
    rank, size = engine.ranks
    saved: dict[str, Any] = {}
    to = "" if path is None else ", path=..."
    with failing_together(engine.expect_done_by_all, f"full_state_dict({dst=}{to}, {masters=}, {chunk_bytes=})"):
        _expect_arguments(dst, size, chunk_bytes)
        if path is not None and dst is None:
            raise ValueError("full_state_dict: path= needs dst=, the number of the rank that writes the file")
        if dst in (None, rank):
            saved = _skeleton(optimizer, masters, model)
    if dst is None or rank // engine.world == dst // engine.world:  # other shard groups have the same
        buffer = _buffer(engine, chunk_bytes)
        entries = list(saved["state"].values()) if saved else [{}] * len(engine.infos)
        for info, entry in zip(engine.infos, entries, strict=True):
            for name in _kept(engine, info, masters):
                _gather(engine, info, name, entry.get(name), buffer)
    if path is None:
        return saved
    with failing_together(engine.expect_done_by_all, "full_state_dict, writing the file"):
        if saved:
            save_whole(saved, path)
    return {}


def save_for_torch(optimizer: ShardedAdamW) -> dict[str, Any] | None:
    """What `state_dict` is to return where its caller would take a part for the whole. Then it is collective. Else None.

    - torch's `get_optimizer_state_dict` has called it for whole states: all on each rank, with ``cpu_offload`` on rank 0,
      which alone keeps it.
    - The optimizer was made with ``full_state_dict=True``: all on rank 0. Before the first step there is nothing to gather:
      Accelerate then moves what it gets to the device, and loads it again, on each rank.
    """
    engine = optimizer._engine
    call = call_of_torch("_get_optim_state_dict") if engine.world > 1 else None
    if call is None and engine.world > 1 and engine.options.full_state_dict and engine.steps.any():
        return optimizer.full_state_dict() or None
    if call is None or not call["info"].full_state_dict:
        return None
    return optimizer.full_state_dict(0 if call["info"].cpu_offload else None) or {"state": {}, "param_groups": []}


def _expect_arguments(rank: int | None, size: int, chunk_bytes: int) -> None:
    if rank is not None and not 0 <= rank < size:
        raise ValueError(f"the rank is {rank!r}, expected 0 to {size - 1}, or None for all ranks")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes!r}")


def _skeleton(optimizer: ShardedAdamW, masters: bool, model: torch.nn.Module | None) -> dict[str, Any]:
    """The dict, on the CPU, with states of which nothing is written yet: those of `engine.infos`, in order."""
    engine = optimizer._engine
    key_of: dict[Tensor, Any] = dict(numbers_of(optimizer.param_groups))
    if model is not None:
        key_of = _names_in(model, key_of)
    steps = engine.steps.to("cpu", torch.float32)
    state = {}
    for info in engine.infos:
        entry = state[key_of[info.param]] = {"step": steps[info.index].clone()}
        for name, dtype in _kept(engine, info, masters).items():
            entry[name] = torch.empty_strided(info.param.shape, info.stride, dtype=dtype, device="cpu")
    groups = []
    for group in optimizer.param_groups:
        kept = {k: _on_cpu(as_plain(v)) for k, v in group.items() if k not in ("params", "granularity")}
        groups.append({**kept, "params": [key_of[p] for p in group["params"]]})
    return {"state": state, "param_groups": groups}


def _on_cpu(value: Any) -> Any:
    """A copy."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _names_in(model: torch.nn.Module, number_of: Mapping[Tensor, int]) -> dict[Tensor, str]:
    """As torch.distributed.checkpoint names parameters."""
    names: dict[Tensor, str] = {}
    for name, param in model.named_parameters():
        names[param] = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    unnamed = [number for param, number in number_of.items() if param not in names]
    if unnamed:
        raise ValueError(f"full_state_dict: parameter {unnamed[0]} of the groups is not in the model")
    return names


# --- from one rank to all ----------------------------------------------------------------------------------------------


def spread(optimizer: ShardedAdamW, given: Any, src: int | None, chunk_bytes: int) -> dict[str, Any]:
    """What `plan_load` takes, on every rank, of the dict that rank ``src`` has (None: each has it). Its states are sent when
    they are loaded, those of frozen parameters at once. Collective."""
    engine, header = optimizer._engine, b""
    entries: dict[Any, Any] = {}  # of the dict, on a rank that has it
    with failing_together(engine.expect_done_by_all, f"load_full_state_dict({src=}, {chunk_bytes=})"):
        rank, size = engine.ranks
        _expect_arguments(src, size, chunk_bytes)
        if src in (None, rank):
            if given is None:
                raise ValueError(f"load_full_state_dict: rank {rank} must pass the dict, got None")
            saved = _as_ours(optimizer, given)
            entries = {key: entry for key, entry in saved["state"].items() if entry}
            groups = [{key: _on_cpu(value) for key, value in group.items()} for group in saved["param_groups"]]
            header = pickle.dumps((groups, {key: _without_data(key, entry) for key, entry in entries.items()}))
    if src is not None:
        length = engine.steps.new_full((), len(header))
        engine.broadcast(length, src)
        sent = torch.tensor(list(header) or [0] * int(length), dtype=torch.uint8, device=length.device)
        engine.broadcast(sent, src)
        header = bytes(sent.tolist())
    groups, state = pickle.loads(header)
    sender = _Sender(engine, entries, src, _buffer(engine, chunk_bytes))
    infos = {info.param: info for info in engine.infos}
    for theirs, ours in zip(groups, optimizer.param_groups, strict=False):
        for key, p in zip(theirs["params"], ours["params"], strict=False):
            info, entry = infos.get(p), state.get(key, {})
            for name, like in entry.items():
                is_sent_later = isinstance(like, Tensor) and like.is_meta
                if is_sent_later and info is None:
                    entry[name] = sender.whole(key, name, like)
                elif is_sent_later and info is not None:
                    entry[name] = StoredState(like.shape, partial(sender.load, info, key, name, like.dtype))
    return {"state": state, "param_groups": groups}


def _without_data(key: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Puts a tensor on the meta device in the place of each state until that is sent."""
    found: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, Tensor) and type(value) is not Tensor:
            raise ValueError(
                f"the state {name!r} of {key!r} is a {type(value).__name__}, but load_full_state_dict takes whole "
                "tensors, from full_state_dict() or get_optimizer_state_dict(..., "
                "StateDictOptions(full_state_dict=True)); load_state_dict takes parts"
            )
        is_state = isinstance(value, Tensor) and name != "step"
        found[name] = torch.empty(value.shape, dtype=value.dtype, device="meta") if is_state else _on_cpu(value)
    return found


@dataclass(frozen=True)
class _Sender:
    """Sends states of ``entries``, which rank ``src`` has (None: each has them), to all."""

    engine: Engine
    entries: Mapping[Any, Mapping[str, Tensor]]
    src: int | None
    buffer: Tensor

    def load(self, info: ParamInfo, key: Any, name: str, dtype: torch.dtype) -> None:
        """This rank's part, to where it lies."""
        own, at, owned = _own(self.engine, info, name), 0, self.engine.owned_ranges(info.index)
        ranges = owned if self.src is None else [(0, info.param.numel())]
        like = torch.empty_strided(info.param.shape, info.stride, dtype=dtype, device="meta")
        for begin, end, chunk in self._chunks(key, name, like, ranges):
            for lo, hi in ((max(first, begin), min(last, end)) for first, last in owned):
                if lo < hi:
                    views, value = [part[at : at + hi - lo] for part in own], chunk[lo - begin : hi - begin]
                    if len(views) == 1:
                        views[0].copy_(value)
                    else:
                        load_master(views[0], {"remainder": views[1]}, value.float())
                    at += hi - lo

    def whole(self, key: Any, name: str, like: Tensor) -> Tensor:
        """On the CPU of every rank: nobody has divided it yet."""
        found = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        for begin, end, chunk in self._chunks(key, name, found, [(0, found.numel())]):
            _flat(found)[begin:end] = chunk
        return found

    def _chunks(self, key: Any, name: str, like: Tensor, ranges: Any) -> Iterator[tuple[int, int, Tensor]]:
        """Of ``ranges`` of the memory order of ``like``."""
        value = self.entries[key][name].detach() if self.entries else None
        for begin, end, chunk in _chunks(self.buffer, ranges, like.dtype):
            if value is not None:
                for box in boxes_of(like.shape, like.stride(), [(begin, end)]):
                    place = chunk.as_strided(box.sizes, box.strides, box.begin)
                    place.copy_(part_of(value, box.offsets, box.sizes))
            if self.src is not None:
                self.engine.broadcast(chunk, self.src)
            yield begin, end, chunk


def _as_ours(optimizer: ShardedAdamW, given: Any) -> Mapping[str, Any]:
    """The dict with ``state`` and ``param_groups``, which are in our order where both have names. Tensors of a file stay in
    it until they are read."""
    if isinstance(given, (str, os.PathLike)):
        given = torch.load(given, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(given, Mapping):
        raise TypeError(f"load_full_state_dict takes a dict, a path or None, got {type(given).__name__}")
    for key in ("state", "param_groups"):
        if key not in given:
            flat = any(str(name).startswith("param_groups.") for name in given)
            raise KeyError(
                f"the loaded state dict has no {key!r}; it has {sorted(map(str, given))[:8]}"
                f"{'. It is flattened: make it without flatten_optimizer_state_dict' if flat else ''}"
            )
    name_of: dict[Tensor, str] = {info.param: info.name for info in optimizer._engine.infos if info.is_named}
    groups, ours = list(given["param_groups"]), list(optimizer.param_groups)
    if any(isinstance(p, str) for group in groups for p in group["params"]):
        ours = [{"param_names": [name_of.get(p, "") for p in group["params"]], **group} for group in ours]
    return {**given, "param_groups": follow_names(groups, ours)}
