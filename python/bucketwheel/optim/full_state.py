"""Full states: the states of whole parameters, gathered from the ranks to one of them, and handed out to all.

They travel by parameter and by state, in chunks of a parameter's memory order. A rank holds one chunk beside its states;
the whole is with the rank that asked for it, or in its file, which is mapped. Full dicts are those of `torch.optim.AdamW`,
so this is also the way from and to whatever reads and writes these.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from bucketwheel.checkpoint.boxes import boxes_of
from bucketwheel.checkpoint.mapped_file import MappedFile, copy_values
from bucketwheel.checkpoint.param_numbers import follow_names, numbers_of
from bucketwheel.checkpoint.plain_values import as_plain
from bucketwheel.errors import failing_together
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.masters import forget_master, join_master, load_master, saved_names
from bucketwheel.optim import state_dict as states
from bucketwheel.torch_internals import call_of_torch

if TYPE_CHECKING:
    from bucketwheel.optim.local_engine import LocalEngine
    from bucketwheel.optim.sharded_adamw import ShardedAdamW
    from bucketwheel.optim.sharded_engine import ShardedEngine

    Engine: TypeAlias = LocalEngine | ShardedEngine

__all__ = ["CHUNK_BYTES", "FullLoad", "save", "save_for_torch", "whole_entry"]

CHUNK_BYTES = 64 << 20


# --- a range of a parameter --------------------------------------------------------------------------------------------


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's memory, 1-D."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _own_views(
    engine: Engine, info: ParamInfo, begin: int, end: int
) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
    """What this rank has of [begin, end) of a parameter's memory order: where that begins, and the parameter's values and
    states there, as views."""
    at = 0
    parts = zip(engine.owned_ranges(info.index), engine.value_parts(info.index), strict=True)
    for (first, last), values in parts:
        lo, hi = max(first, begin), min(last, end)
        if lo < hi:
            of = slice(at + lo - first, at + hi - first)
            views = {name: _flat(state)[of] for name, state in engine.states[info.index].items()}
            yield lo, values[lo - first : hi - first], views
        at += last - first


def _buffer(engine: Engine, chunk_bytes: int, numel: int) -> Tensor:
    """Bytes for every chunk of states of ``numel`` elements at most."""
    size = min(max(chunk_bytes, 8), 8 * numel)
    return torch.empty(size, dtype=torch.uint8, device=engine.steps.device)


def _chunks(
    buffer: Tensor, ranges: Sequence[tuple[int, int]], dtype: torch.dtype, parts: int = 1
) -> Iterator[tuple[int, int, Tensor]]:
    """``ranges`` of a parameter, cut into chunks of a ``parts``-th of the buffer: [begin, end) and memory for them."""
    fits = buffer.numel() // dtype.itemsize
    memory = buffer[: fits * dtype.itemsize].view(dtype)
    numel = max(1, fits // parts)
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


def _parts(engine: Engine, info: ParamInfo) -> int:
    """Joining and splitting masters takes some tensors of their size."""
    return 4 if "remainder" in engine.states[info.index] else 1


def _longest(params: Iterable[Tensor]) -> int:
    return max((p.numel() for p in params), default=0)


# --- from the ranks to one ---------------------------------------------------------------------------------------------


def _gather(engine: Engine, info: ParamInfo, name: str, whole: Tensor | None, buffer: Tensor) -> None:
    """Fills ``whole`` (dense, with the parameter's strides) with a state of all ranks; None: this rank only sends.

    Collective of the ranks among which states are sharded.
    """
    dtype, parts = _kept(engine, info)[name], _parts(engine, info)
    for owner, ranges in enumerate(engine.ranges_of(info.index)):
        for begin, end, chunk in _chunks(buffer, ranges, dtype, parts):
            if owner == engine.part[0]:
                ((_, values, views),) = _own_views(engine, info, begin, end)
                is_split = name not in views
                chunk.copy_(join_master(values, views["remainder"]) if is_split else views[name])
            engine.broadcast_part(chunk, owner)
            if whole is not None:
                _flat(whole)[begin:end] = chunk


def whole_entry(engine: Engine, info: ParamInfo) -> dict[str, Tensor]:
    """A parameter's state as `torch.optim.AdamW` has it, on its device. Collective, on every rank."""
    entry = {"step": engine.steps[info.index].to(torch.float32)}
    buffer = _buffer(engine, CHUNK_BYTES, info.param.numel())
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
    file, saved, error = None, {}, None
    to = "" if path is None else ", path=..."
    with failing_together(engine.expect_done_by_all, f"full_state_dict({dst=}{to}, {masters=}, {chunk_bytes=})"):
        _expect_arguments(dst, size, chunk_bytes)
        if path is not None and dst is None:
            raise ValueError("full_state_dict: a path is for the file of one rank; give its number as dst")
        if dst in (None, rank):
            saved = _skeleton(optimizer, masters, model)
            if path is not None:
                file = MappedFile(path, saved)
                for in_file, entry in zip(file.saved["state"].values(), saved["state"].values(), strict=True):
                    in_file["step"].copy_(entry["step"])
                copy_values(file.saved["param_groups"], saved["param_groups"])
                saved = file.saved
    try:
        if dst is None or rank // engine.world == dst // engine.world:  # other shard groups have the same
            buffer = _buffer(engine, chunk_bytes, _longest(info.param for info in engine.infos))
            entries = list(saved["state"].values()) if saved else [{}] * len(engine.infos)
            for info, entry in zip(engine.infos, entries, strict=True):
                for name in _kept(engine, info, masters):
                    _gather(engine, info, name, entry.get(name), buffer)
        if file is not None:
            file.commit()
    except OSError as found:
        error = found
    finally:
        if file is not None:
            file.remove()
    if path is None:
        return saved
    engine.expect_done_by_all("full_state_dict, writing the file", error)
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
        raise ValueError(f"rank {rank!r} is asked for; there are ranks 0 to {size - 1}, or None for all")
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
            # Memory that nothing has touched, whatever torch.utils.deterministic asks of torch.empty.
            memory = torch.UntypedStorage(info.param.numel() * dtype.itemsize, device="cpu")
            entry[name] = torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, info.param.shape, info.stride)
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
        raise ValueError(f"full_state_dict: parameter {unnamed[0]} of the groups is none of the model's")
    return names


# --- from one rank to all ----------------------------------------------------------------------------------------------

# What a dict has of a parameter: its step, and the dtypes of the states that are to be read. None: nothing.
_Found: TypeAlias = "tuple[int, dict[str, torch.dtype]] | None"


class FullLoad:
    """`ShardedAdamW.load_full_state_dict`. A rank that has the dict gives it, others None."""

    def __init__(self, optimizer: ShardedAdamW, given: Any, src: int | None, chunk_bytes: int) -> None:
        """Changes nothing. ValueError, KeyError or TypeError naming what does not fit."""
        self._optimizer = optimizer
        self._engine = optimizer._engine
        self._frozen = optimizer._trained.frozen
        self._src = src
        self._entries: dict[Tensor, dict[str, Any]] = {}  # of the dict, on a rank that has it
        self._header = b""  # there too: what all ranks must know before states travel
        rank, size = self._engine.ranks
        _expect_arguments(src, size, chunk_bytes)
        params = [*(info.param for info in self._engine.infos), *self._frozen]
        self._buffer = _buffer(self._engine, chunk_bytes, _longest(params))
        states.expect_no_gradients(optimizer)
        if src in (None, rank):
            if given is None:
                raise ValueError(f"load_full_state_dict: rank {rank} is to have the dict and was given None")
            self._header = self._read(_as_ours(optimizer, _opened(given)))

    def _read(self, given: Mapping[str, Any]) -> bytes:
        saved_as = states.expect_groups(self._optimizer, given["param_groups"])
        self._entries = {p: given["state"].get(key) or {} for p, key in saved_as.items()}
        found = [
            self._find(info.param, list(_kept(self._engine, info)), repr(info.name)) for info in self._engine.infos
        ]
        for p in self._frozen:
            names = saved_names(self._engine.precision.kept_of(p.dtype))
            found.append(self._find(p, names, f"a parameter of shape {tuple(p.shape)} that is frozen now"))
        kept = states.kept_groups(given["param_groups"])
        groups = [{key: _on_cpu(value) for key, value in group.items()} for group in kept]
        return pickle.dumps((found, groups))

    def _find(self, param: Tensor, names: Sequence[str], of: str) -> _Found:
        entry = self._entries[param]
        if not entry:  # torch saves nothing for a parameter that was never stepped
            return None
        found = states.expect_states(entry, names, param, of)
        for name, value in found.items():
            if type(value) is not Tensor:
                raise ValueError(
                    f"the state {name!r} of {of} is a {type(value).__name__}, and load_full_state_dict takes whole tensors, "
                    "as full_state_dict() and get_optimizer_state_dict(..., StateDictOptions(full_state_dict=True)) return "
                    "them; load_state_dict takes parts"
                )
        return int(entry["step"]), {name: value.dtype for name, value in found.items()}

    def carry_out(self) -> None:
        """Collective. Nothing is left to fail but communication."""
        self._engine.announce_write()
        infos = self._engine.infos
        found, groups = pickle.loads(self._from_src(self._header))
        for info, of_param in zip(infos, found, strict=False):
            self._load(info, *(of_param or (0, {})))
        of_frozen = zip(self._frozen, found[len(infos) :], strict=True)
        self._optimizer._trained.loaded = {p: self._whole(p, *entry) for p, entry in of_frozen if entry}
        states.update_groups(self._optimizer, groups)

    def _from_src(self, said: bytes) -> bytes:
        if self._src is None:
            return said
        size = self._engine.steps.new_full((), len(said))
        self._engine.broadcast(size, self._src)
        numbers = torch.tensor(list(said) or [0] * int(size), dtype=torch.uint8, device=size.device)
        self._engine.broadcast(numbers, self._src)
        return bytes(numbers.tolist())

    def _load(self, info: ParamInfo, step: int, dtypes: Mapping[str, torch.dtype]) -> None:
        """What is not found starts anew: moments are zero, the parameter is the weight."""
        engine, numel = self._engine, info.param.numel()
        engine.steps[info.index] = step
        for _, values, views in _own_views(engine, info, 0, numel):
            if "master_param" not in dtypes:
                forget_master(values, views)
            for name in views.keys() - dtypes.keys() - {"master_param", "remainder"}:
                views[name].zero_()
        ranges = [(0, numel)] if self._src is not None else engine.owned_ranges(info.index)
        parts = _parts(engine, info)
        for name, dtype in dtypes.items():
            for begin, end, chunk in self._sent(info.param, info.stride, name, dtype, ranges, parts):
                for lo, values, views in _own_views(engine, info, begin, end):
                    part = chunk[lo - begin :][: values.numel()]
                    if name == "master_param":
                        load_master(values, views, part.to(torch.float32))
                    else:
                        views[name].copy_(part)

    def _whole(self, param: Tensor, step: int, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The entry of a frozen parameter, which nobody has divided yet, on the CPU of every rank."""
        entry = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
        for name, dtype in dtypes.items():
            whole = entry[name] = torch.empty(param.shape, dtype=dtype, device="cpu")
            ranges = [(0, param.numel())]
            for begin, end, chunk in self._sent(param, whole.stride(), name, dtype, ranges):
                _flat(whole)[begin:end] = chunk
        return entry

    def _sent(
        self,
        param: Tensor,
        stride: tuple[int, ...],
        name: str,
        dtype: torch.dtype,
        ranges: Sequence[tuple[int, int]],
        parts: int = 1,
    ) -> Iterator[tuple[int, int, Tensor]]:
        """`_chunks` of a state, in the memory order that ``stride`` says, with the values that the rank `_src` has."""
        value = self._entries[param][name].detach() if self._entries else None
        for begin, end, chunk in _chunks(self._buffer, ranges, dtype, parts):
            if value is not None:
                for box in boxes_of(param.shape, stride, [(begin, end)]):
                    of = tuple(slice(first, first + n) for first, n in zip(box.offsets, box.sizes, strict=True))
                    chunk.as_strided(box.sizes, box.strides, box.begin).copy_(value[of])
            if self._src is not None:
                self._engine.broadcast(chunk, self._src)
            yield begin, end, chunk


def _opened(given: Any) -> Mapping[str, Any]:
    """The dict. Tensors of a file stay in it until they are read."""
    if isinstance(given, (str, os.PathLike)):
        given = torch.load(given, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(given, Mapping):
        raise TypeError(f"load_full_state_dict takes a dict, a path or None, got {type(given).__name__}")
    return given


def _as_ours(optimizer: ShardedAdamW, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The dict with ``state`` and ``param_groups``, which are in our order where both have names."""
    name_of: dict[Tensor, str] = {info.param: info.name for info in optimizer._engine.infos if info.is_named}
    if "param_groups" not in given and any(str(key).startswith("param_groups.") for key in given):
        given = _unflattened(optimizer, given, name_of)
    for key in ("state", "param_groups"):
        if key not in given:
            raise KeyError(f"the loaded state dict has no {key!r}; it has {sorted(map(str, given))[:8]}")
    groups, ours = list(given["param_groups"]), list(optimizer.param_groups)
    if any(isinstance(p, str) for group in groups for p in group["params"]):
        ours = [{"param_names": [name_of.get(p, "") for p in group["params"]], **group} for group in ours]
    return {**given, "param_groups": follow_names(groups, ours)}


def _unflattened(optimizer: ShardedAdamW, given: Mapping[str, Any], name_of: Mapping[Tensor, str]) -> dict[str, Any]:
    """Of a dict made with ``flatten_optimizer_state_dict``, whose keys are ``state.NAME.exp_avg``, ``param_groups.NAME.lr``."""
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in given.items():
        kind, _, rest = key.partition(".")
        name, _, what = rest.rpartition(".")
        if kind in found:
            found[kind].setdefault(name, {})[what] = value
    groups = []
    for group in optimizer.param_groups:
        names = [name_of.get(p, "") for p in group["params"]]
        for p, name in zip(group["params"], names, strict=True):
            if p.requires_grad and name not in found["param_groups"]:
                raise ValueError(
                    f"the flattened state dict has no 'param_groups.{name}.lr'; its names are those of the model: make this "
                    "optimizer with model.named_parameters()"
                )
        options = next((found["param_groups"][name] for name in names if name in found["param_groups"]), {})
        groups.append({**options, "params": names})
    return {"state": found["state"], "param_groups": groups}
