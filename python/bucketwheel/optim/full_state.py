"""Full states: the states of whole parameters, gathered from the ranks to one of them, and handed out to all.

They travel by parameter and by state, in chunks of a parameter's memory order. A rank holds one chunk beside its states;
the whole is with the rank that asked for it, or in its file, which is mapped. Full dicts are those of `torch.optim.AdamW`,
so this is also the way from and to whatever reads and writes these.
"""

from __future__ import annotations

import copy
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.checkpoint.boxes import boxes_of
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.masters import forget_master, join_master, load_master
from bucketwheel.optim import state_dict as states

if TYPE_CHECKING:
    from bucketwheel.optim.local_engine import LocalEngine
    from bucketwheel.optim.sharded_adamw import ShardedAdamW
    from bucketwheel.optim.sharded_engine import ShardedEngine

    Engine: TypeAlias = LocalEngine | ShardedEngine

__all__ = ["CHUNK_BYTES", "FullLoad", "read", "save", "whole_entry"]

CHUNK_BYTES = 64 << 20
_REMAINDER_PARTS = 4  # joining and splitting masters takes some tensors of their size

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


def _chunks(ranges: Sequence[tuple[int, int]], numel: int) -> Iterator[tuple[int, int]]:
    for begin, end in ranges:
        for first in range(begin, end, numel):
            yield first, min(first + numel, end)


def _chunk_numel(engine: Engine, info: ParamInfo, name: str, dtype: torch.dtype, chunk_bytes: int) -> int:
    parts = _REMAINDER_PARTS if name == "master_param" and "remainder" in engine.states[info.index] else 1
    return max(1, chunk_bytes // (parts * dtype.itemsize))


# --- from the ranks to one ---------------------------------------------------------------------------------------------


def _kept(engine: Engine, info: ParamInfo) -> dict[str, torch.dtype]:
    """The states of a parameter as they are saved, and their dtypes."""
    found = {name: tensor.dtype for name, tensor in engine.states[info.index].items()}
    if found.pop("remainder", None):
        found["master_param"] = torch.float32
    return found


def _gather(engine: Engine, info: ParamInfo, name: str, whole: Tensor | None, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Fills ``whole`` (dense, with the parameter's strides) with a state of all ranks; None: this rank only sends.

    Collective of the ranks among which states are sharded.
    """
    dtype = _kept(engine, info)[name]
    numel = _chunk_numel(engine, info, name, dtype, chunk_bytes)
    buffer = torch.empty(min(numel, info.param.numel()), dtype=dtype, device=info.device)
    for owner, ranges in enumerate(engine.ranges_of(info.index)):
        for begin, end in _chunks(ranges, numel):
            chunk = buffer[: end - begin]
            if owner == engine.part[0]:
                ((_, values, views),) = _own_views(engine, info, begin, end)
                is_split = name == "master_param" and "remainder" in views
                chunk.copy_(join_master(values, views["remainder"]) if is_split else views[name])
            engine.broadcast_part(chunk, owner)
            if whole is not None:
                _flat(whole)[begin:end] = chunk


def whole_entry(engine: Engine, info: ParamInfo) -> dict[str, Tensor]:
    """A parameter's state as `torch.optim.AdamW` has it, on its device. Collective, on every rank."""
    entry = {"step": engine.steps[info.index].to(torch.float32)}
    for name, dtype in _kept(engine, info).items():
        entry[name] = torch.empty_strided(info.param.shape, info.stride, dtype=dtype, device=info.device)
        _gather(engine, info, name, entry[name])
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
    is_dst = dst is None or rank == dst
    file, saved, error = None, {}, None
    try:
        _expect_arguments(dst, size, path, chunk_bytes)
        if is_dst:
            saved = _skeleton(optimizer, masters, model)
            if path is not None:
                file = _MappedFile(Path(path), saved)
                saved = file.saved
    except Exception as found:  # noqa: BLE001 (whatever it is, the other ranks hear of it)
        error = found
    to = "" if path is None else ", path=..."
    engine.expect_done_by_all(f"full_state_dict({dst=}{to}, {masters=}, {chunk_bytes=})", error)
    try:
        if dst is None or rank // engine.world == dst // engine.world:  # other shard groups have the same
            entries = [saved["state"][key] for key in saved["state"]] if is_dst else [{}] * len(engine.infos)
            for info, entry in zip(engine.infos, entries, strict=True):
                for name in _kept(engine, info):
                    if masters or name != "master_param":
                        _gather(engine, info, name, entry.get(name), chunk_bytes)
        if file is not None:
            file.commit()
    except OSError as found:
        error = found
    finally:
        if file is not None:
            file.remove()
    if path is not None:
        engine.expect_done_by_all("full_state_dict, writing the file", error)
        return {}
    return saved


def _expect_arguments(rank: int | None, size: int, path: Any, chunk_bytes: int) -> None:
    if rank is not None and not 0 <= rank < size:
        raise ValueError(f"rank {rank!r} is asked for; there are ranks 0 to {size - 1}, or None for all")
    if path is not None and rank is None:
        raise ValueError("full_state_dict: a path is for the file of one rank; give its number as dst")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes!r}")


def _skeleton(optimizer: ShardedAdamW, masters: bool, model: torch.nn.Module | None) -> dict[str, Any]:
    """The dict, on the CPU, with states of which nothing is written yet; those of `engine.infos` in order."""
    engine = optimizer._engine
    key_of: dict[Tensor, Any] = dict(states.numbers_of(optimizer.param_groups))
    if model is not None:
        key_of = _names_in(model, key_of)
    steps = engine.steps.to("cpu", torch.float32)
    state = {}
    for info in engine.infos:
        entry = {"step": steps[info.index].clone()}
        for name, dtype in _kept(engine, info).items():
            if masters or name != "master_param":
                # Of memory that nothing has touched, whatever torch.utils.deterministic asks of torch.empty.
                memory = torch.UntypedStorage(info.param.numel() * dtype.itemsize, device="cpu")
                empty = torch.empty(0, dtype=dtype, device="cpu")
                entry[name] = empty.set_(memory, 0, info.param.shape, info.stride)
        state[key_of[info.param]] = entry
    groups = []
    for group in optimizer.param_groups:
        kept = {k: _on_cpu(v) for k, v in group.items() if k not in ("params", "granularity")}
        groups.append({**kept, "params": [key_of[p] for p in group["params"]]})
    return {"state": state, "param_groups": groups}


def _on_cpu(value: Any) -> Any:
    """A copy."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _names_in(model: torch.nn.Module, of: Mapping[Tensor, Any]) -> dict[Tensor, str]:
    """As torch.distributed.checkpoint names parameters."""
    names: dict[Tensor, str] = {}
    for name, param in model.named_parameters():
        names[param] = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    unnamed = [number for param, number in of.items() if param not in names]
    if unnamed:
        raise ValueError(f"full_state_dict: parameter {unnamed[0]} of the groups is none of the model's")
    return names


class _MappedFile:
    """A torch.save file beside ``path`` that becomes ``path`` by `commit`. ``saved``: what `torch.load` reads of it, with
    tensors that are the file's memory: what is written to them is written to it."""

    def __init__(self, path: Path, skeleton: dict[str, Any]) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with torch.serialization.skip_data():
                torch.save(skeleton, self._temporary)
            with open(self._temporary, "r+b") as file:  # a disk that is full is an error here, and a signal later
                os.posix_fallocate(file.fileno(), 0, os.path.getsize(self._temporary))
            with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
                self.saved = torch.load(self._temporary, weights_only=True, mmap=True)
            for key, entry in skeleton["state"].items():
                _fill(self.saved["state"][key]["step"], entry["step"])
            _fill(self.saved["param_groups"], skeleton["param_groups"])
        except BaseException:
            self.remove()
            raise

    def commit(self) -> None:
        self.saved = {}
        for name in (self._temporary, self._path.parent):
            if name == self._path.parent:
                os.replace(self._temporary, self._path)
            number = os.open(name, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)

    def remove(self) -> None:
        """What is left of a file that was not committed."""
        self._temporary.unlink(missing_ok=True)


def _fill(to: Any, of: Any) -> None:
    """Copies the values of the tensors in ``of`` (dicts, lists and tuples) to those in ``to``."""
    if isinstance(of, Tensor):
        to.copy_(of)
    elif isinstance(of, dict):
        _fill(list(to.values()), list(of.values()))
    elif isinstance(of, (list, tuple)):
        for one, other in zip(to, of, strict=True):
            _fill(one, other)


# --- from one rank to all ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """What a dict has of a parameter. ``dtypes``: of the states that are to be read."""

    step: int
    dtypes: dict[str, torch.dtype]


@dataclass(frozen=True)
class _Header:
    """What all ranks must know before states travel. ``found``: of the parameters that are trained; ``frozen``: of others,
    by their place in `TrainedParams.frozen`; None: nothing. ``groups``: what is taken of the dict's."""

    found: list[_Found | None]
    frozen: list[_Found | None]
    groups: list[dict[str, Any]]


class FullLoad:
    """`ShardedAdamW.load_full_state_dict`, after its hooks. Of a rank that has the dict made with it, of others with None."""

    def __init__(
        self, optimizer: ShardedAdamW, given: Mapping[str, Any] | None, src: int | None, chunk_bytes: int
    ) -> None:
        self._optimizer = optimizer
        self._engine = optimizer._engine
        self._src = src
        self._chunk_bytes = chunk_bytes
        _expect_arguments(src, self._engine.ranks[1], None, chunk_bytes)
        self._entries: dict[Tensor, dict[str, Any]] = {}  # of the dict, where this rank has it
        self._payload = b""  # the header
        states.expect_no_gradients(optimizer)
        if src is None or src == self._engine.ranks[0]:
            if given is None:
                raise ValueError(
                    f"load_full_state_dict: rank {self._engine.ranks[0]} is to have the dict and was given None"
                )
            self._payload = pickle.dumps(self._read(_as_torchs(optimizer, given)))

    def _read(self, given: Mapping[str, Any]) -> _Header:
        """ValueError, KeyError or TypeError naming what does not fit."""
        saved_as = states.expect_groups(self._optimizer, given["param_groups"])
        self._entries = {p: given["state"].get(key) or {} for p, key in saved_as.items()}
        frozen = self._optimizer._trained.frozen
        kept_of = self._engine.precision.kept_of
        return _Header(
            [self._find(info.param, _kept(self._engine, info), repr(info.name)) for info in self._engine.infos],
            [
                self._find(p, kept_of(p.dtype), f"a parameter of shape {tuple(p.shape)} that is frozen now")
                for p in frozen
            ],
            [_on_cpu(group) for group in states.kept_groups(given["param_groups"])],
        )

    def _find(self, param: Tensor, names: Iterable[str], of: str) -> _Found | None:
        if not (entry := self._entries[param]):  # torch saves nothing for a parameter that was never stepped
            return None
        names = states.saved_names(names)
        states.expect_entry(entry, names, of)
        found = {name: entry[name] for name in names if entry.get(name) is not None}
        for name, value in found.items():
            if type(value) not in (Tensor, Parameter):
                raise ValueError(
                    f"the state {name!r} of {of} is a {type(value).__name__}, and load_full_state_dict takes whole tensors: give what "
                    "full_state_dict() or get_optimizer_state_dict(..., StateDictOptions(full_state_dict=True)) returned, or "
                    "call load_state_dict"
                )
            states.expect_shape(value, param, name, of)
        return _Found(int(entry["step"]), {name: value.dtype for name, value in found.items()})

    def carry_out(self) -> None:
        """Collective. Nothing is left to fail but communication."""
        engine, trained = self._engine, self._optimizer._trained
        header: _Header = pickle.loads(self._from_src(self._payload))
        for info, found in zip(engine.infos, header.found, strict=True):
            self._load(info, found or _Found(0, {}))
        loaded = {}
        for p, found in zip(trained.frozen, header.frozen, strict=True):
            if found is not None:
                loaded[p] = self._whole(p, found)
        trained.loaded = loaded
        states.update_groups(self._optimizer, header.groups)

    def _from_src(self, payload: bytes) -> bytes:
        if self._src is None:
            return payload
        device = self._engine.steps.device
        size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        self._engine.broadcast(size, self._src)
        said = torch.zeros(int(size), dtype=torch.uint8, device=device)
        said[: len(payload)] = torch.tensor(list(payload), dtype=torch.uint8, device=device)
        self._engine.broadcast(said, self._src)
        return bytes(said.tolist())

    def _load(self, info: ParamInfo, found: _Found) -> None:
        """What is not found starts anew: moments are zero, the parameter is the weight."""
        engine, numel = self._engine, info.param.numel()
        engine.steps[info.index] = found.step
        for _, values, views in _own_views(engine, info, 0, numel):
            if "master_param" not in found.dtypes:
                forget_master(values, views)
            for name in views.keys() - found.dtypes.keys() - {"master_param", "remainder"}:
                views[name].zero_()
        ranges = [(0, numel)] if self._src is not None else engine.owned_ranges(info.index)
        for name, dtype in found.dtypes.items():
            size = _chunk_numel(engine, info, name, dtype, self._chunk_bytes)
            for begin, end, chunk in self._chunks(info.param, info.stride, name, dtype, ranges, size):
                for lo, values, views in _own_views(engine, info, begin, end):
                    part = chunk[lo - begin :][: values.numel()]
                    if name == "master_param":
                        load_master(values, views, part.to(torch.float32))
                    else:
                        views[name].copy_(part)

    def _whole(self, param: Tensor, found: _Found) -> dict[str, Tensor]:
        """The entry of a frozen parameter, which nobody has divided yet, on the CPU of every rank."""
        entry = {"step": torch.tensor(float(found.step), dtype=torch.float32, device="cpu")}
        for name, dtype in found.dtypes.items():
            entry[name] = torch.empty(param.shape, dtype=dtype, device="cpu")
            size, ranges = max(1, self._chunk_bytes // dtype.itemsize), [(0, param.numel())]
            for begin, end, chunk in self._chunks(param, entry[name].stride(), name, dtype, ranges, size):
                entry[name].view(-1)[begin:end] = chunk
        return entry

    def _chunks(
        self,
        param: Tensor,
        stride: tuple[int, ...],
        name: str,
        dtype: torch.dtype,
        ranges: Sequence[tuple[int, int]],
        size: int,
    ) -> Iterator[tuple[int, int, Tensor]]:
        """``ranges`` of a state, which `_src` has, in chunks: [begin, end) in the memory order that ``stride`` says, and the
        values."""
        value = self._entries[param][name].detach() if self._entries else None
        buffer = torch.empty(min(size, param.numel()), dtype=dtype, device=param.device)
        for begin, end in _chunks(ranges, size):
            chunk = buffer[: end - begin]
            if value is not None:
                for box in boxes_of(param.shape, stride, [(begin, end)]):
                    of = tuple(slice(first, first + n) for first, n in zip(box.offsets, box.sizes, strict=True))
                    chunk.as_strided(box.sizes, box.strides, box.begin).copy_(value[of])
            if self._src is not None:
                self._engine.broadcast(chunk, self._src)
            yield begin, end, chunk


def read(given: Any) -> Any:
    """The dict, of which the file's tensors stay in the file until they are read."""
    if isinstance(given, (str, os.PathLike)):
        return torch.load(given, map_location="cpu", weights_only=True, mmap=True)
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"load_full_state_dict takes a dict, a path or None, got {type(given).__name__}")
    return None if given is None else dict(given)


def _as_torchs(optimizer: ShardedAdamW, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The dict with parameters in our order: of numbers already; of names where these are our parameters'."""
    name_of: dict[Tensor, str] = {info.param: info.name for info in optimizer._engine.infos if info.is_named}
    if "param_groups" not in given and any(str(key).startswith("param_groups.") for key in given):
        given = _unflattened(optimizer, given, name_of)
    for key in ("state", "param_groups"):
        if key not in given:
            raise KeyError(f"the loaded state dict has no {key!r}; it has {sorted(map(str, given))[:8]}")
    groups = list(given["param_groups"])
    for i, (theirs, ours) in enumerate(zip(groups, optimizer.param_groups, strict=False)):
        names = [name_of.get(p) for p in ours["params"]]
        if len(names) == len(theirs["params"]) and set(names) == set(theirs["params"]):
            groups[i] = {**theirs, "params": names}
    return {**given, "param_groups": groups}


def _unflattened(
    optimizer: ShardedAdamW, given: Mapping[str, Any], name_of: Mapping[Tensor, str]
) -> dict[str, dict[str, Any] | list[dict[str, Any]]]:
    """Of a dict made with ``flatten_optimizer_state_dict``, whose keys are ``state.NAME.exp_avg``, ``param_groups.NAME.lr``."""
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in given.items():
        kind, _, rest = key.partition(".")
        name, _, what = rest.rpartition(".")
        if kind in found:
            found[kind].setdefault(name, {})[what] = value
    groups = []
    for g, group in enumerate(optimizer.param_groups):
        names = [name_of.get(p, f"a frozen parameter {g}.{i}") for i, p in enumerate(group["params"])]
        missing = [
            name
            for p, name in zip(group["params"], names, strict=True)
            if p.requires_grad and name not in found["param_groups"]
        ]
        if missing:
            raise ValueError(
                f"the flattened state dict has no 'param_groups.{missing[0]}.lr'; its names are those of the model: make this "
                "optimizer with model.named_parameters()"
            )
        options = next((found["param_groups"][name] for name in names if name in found["param_groups"]), {})
        groups.append({**options, "params": names})
    return {"state": found["state"], "param_groups": groups}
