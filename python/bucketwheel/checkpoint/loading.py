"""load: reads a checkpoint into a model and an optimizer, at any world size and with any buckets. It loads all or nothing.

Each rank reads the parts of sharded parameters and states that it owns, directly into their memory. Then the parameters are
gathered. Nothing is written until all ranks have checked names, shapes and checksums, with one exception: moments of an optimizer
that has not stepped are zeros, so they are read into place while they are checked, and zeroed if the load fails.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.nn import Module
from torch.nn.parameter import is_lazy

from bucketwheel.checkpoint.boxes import Box
from bucketwheel.checkpoint.everyone import everyone_of
from bucketwheel.checkpoint.format import folder_of
from bucketwheel.checkpoint.live import (
    PARAM,
    Engine,
    ShardedOptimizer,
    engine_of,
    live_boxes,
    part_of,
    parts_of,
    sharded_boxes,
)
from bucketwheel.checkpoint.param_numbers import WRAPPERS, follow_names, numbered_groups, prefix_of
from bucketwheel.checkpoint.reader import Reader, pieces_of
from bucketwheel.checkpoint.saving import EXTRA_OF, WHOLE, finish_before, is_extra_state, model_tensors
from bucketwheel.checkpoint.tensor_shard import StoredState
from bucketwheel.checkpoint.writer import CHUNK_BYTES
from bucketwheel.errors import CheckpointError, failing_together
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.leased_params import home_of
from bucketwheel.layout.masters import load_master, moments_of, saved_names
from bucketwheel.torch_internals import loads_its_own_way

_NAMED = 5  # of missing names, in a message
_PART = (
    "To load the tensors that fit: torch.distributed.checkpoint.load({'model': tensors}, checkpoint_id=..., planner="
    "DefaultLoadPlanner(allow_partial_load=True)) with those of the model, then model.load_state_dict(..., False)"
)
_TRIES = 5  # to read a checkpoint that newer saves replace meanwhile


def load(
    directory: str | os.PathLike[str], model: Module | None = None, optimizer: ShardedOptimizer | None = None
) -> Any:
    """Loads a checkpoint into a model and an optimizer, and returns its ``extra`` (None if it has none). Collective as `save`.

    Any number of ranks may have saved the checkpoint, with any buckets and replicas: by `save`, or by
    ``torch.distributed.checkpoint.save`` of ``{"model": ..., "optim": ...}``, where ``"optim"`` is ``optimizer.state_dict()``
    of a `ShardedAdamW` or a `torch.optim.AdamW`, or the result of `get_optimizer_state_dict`. If the ranks saved different
    ``extra``, each rank gets its own at the same number of ranks. At another number all ranks get rank 0's, with a warning.

    States keep their dtypes and the kind of master weights that this optimizer has. Tensors of the model are converted to the
    dtype that they have here. The load needs 1 MiB of memory beside the tensors, and three times the largest box (a block that
    one rank wrote) if another writer made the checkpoint. A model that has its own ``load_state_dict``,
    ``_load_from_state_dict`` or load hooks, or whose ``state_dict`` returns tensors that are not its own, is loaded by its
    ``load_state_dict``. That takes the size of the model twice, on the CPU of each rank.

    If a rank raises, all ranks raise, and nothing has been loaded.

    Args:
        directory: The folder of the checkpoint, which all ranks can read.
        model: The module to load. None loads no model.
        optimizer: A `ShardedAdamW` to load. None loads no optimizer.

    Raises:
        CheckpointError: The folder has no checkpoint, or a damaged one. All checksums of data that is read are compared first.
        ValueError: Names, shapes, parameter groups or ``amsgrad`` do not fit, or another rank raised an error. The message has
            its text.
        KeyError: A parameter group of the checkpoint lacks a hyperparameter, or an entry is missing.
        RuntimeError: There are gradients that no step has used, or the ranks made different calls."""
    engine = engine_of(optimizer)
    folder = folder_of(directory)
    everyone = everyone_of(engine)
    finish_before(everyone, folder)
    what = f"bw.checkpoint.load of {folder.name}"  # ranks compare it; copies may lie in other places
    for tries_left in reversed(range(_TRIES)):
        checkpoint = _Checkpoint(folder, engine)
        try:
            if optimizer is not None:
                optimizer._load(what, partial(checkpoint.plan, model, optimizer), checkpoint.load_model)
            else:
                with failing_together(everyone.agree, what):
                    checkpoint.plan(model, None)
                checkpoint.load_model()
            return checkpoint.extra
        except _Overtaken:
            if not tries_left:
                raise
        finally:
            checkpoint.end()


class _Overtaken(CheckpointError):
    """Raised by all ranks: since one of them read ``.metadata``, a save has replaced the checkpoint."""


# What is to be read of a stored box, and where it goes: into a tensor, or a parameter and the remainder of its master.
_Read = tuple[ReadItem, Sequence[Tensor]]


class _Checkpoint:
    """One that is being loaded on this rank."""

    def __init__(self, folder: Path, engine: Engine | None) -> None:
        self.reader = Reader(folder)
        self._folder = folder
        self._engine = engine
        self.extra: Any = None
        # A model, and what its own `load_state_dict` is to have:
        self._own_loading: tuple[Module, dict[str, Any]] | None = None
        # What is read once all ranks have checked theirs:
        self._of_model: list[_Read] = []
        self._of_states: list[_Read] = []
        self._at_once: list[_Read] = []  # while it is checked, into moments that were zeros
        self._extra_states: list[tuple[Module, Any]] = []
        # Until the model is loaded on all ranks: moments that were zeros, and tensors of a model that loads itself, as they were.
        self._zeros: list[Tensor] = []
        self._before: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []

    @property
    def _entries(self) -> Mapping[str, Any]:
        return self.reader.description.metadata.state_dict_metadata

    def plan(self, model: Module | None, optimizer: ShardedOptimizer | None) -> dict[str, Any]:
        """Checks everything, and returns what the optimizer is to load. Writes nothing but moments that were zeros."""
        try:
            return self._plan(model, optimizer)
        except CheckpointError:
            if not self.reader.is_replaced():
                raise
        # Nothing is loaded: `load_model` finds the same, and all ranks try again.
        return {"state": {}, "param_groups": [] if optimizer is None else numbered_groups(optimizer.param_groups)}

    def _plan(self, model: Module | None, optimizer: ShardedOptimizer | None) -> dict[str, Any]:
        if self._engine is not None:
            self._engine.bind_moved()
        if model is not None:
            self._plan_model(model)
        found = {} if optimizer is None else self._optimizer_state(model, optimizer)
        self.extra = self._extra()
        if self._engine is not None and self._zeros:
            self._engine.announce_write()
        later = [(item, None) for item, _ in [*self._of_model, *self._of_states]]
        for item, views in sorted([*later, *self._at_once], key=self._place):
            if views is None:
                self.reader.check(item)
            else:
                self._read([(item, views)], checks=True)
        return found

    def end(self) -> None:
        """The load is over. If the model was not loaded on all ranks, all is as it was before."""
        for moment in self._zeros:
            moment.zero_()
        for home, name, tensor, before in self._before:
            home[name] = tensor  # loading may have bound another
            (tensor.detach() if tensor.shape == before.shape else tensor.resize_(before.shape)).copy_(before)
        if self._before and self._engine is not None:
            self._engine.expect_loaded_model()
        self.reader.close()

    def load_model(self) -> None:
        """All ranks have checked what they load. Collective."""
        # All ranks have read ``.metadata`` by now. If it is unchanged, they have read the same checkpoint.
        newer = CheckpointError(f"another save replaced {self._folder}") if self.reader.is_replaced() else None
        everyone = everyone_of(self._engine)
        try:
            everyone.agree("bw.checkpoint.load", newer)
        except (CheckpointError, ValueError) as error:
            raise _Overtaken(str(error)) from error
        with failing_together(everyone.agree, "bw.checkpoint.load"):
            if self._own_loading is not None:
                model, tensors = self._own_loading
                homes = (home for module in model.modules() for home in (module._parameters, module._buffers))
                own = ((home, name, t) for home in homes for name, t in home.items() if not (t is None or is_lazy(t)))
                self._before = [(home, name, t, t.detach().to("cpu", copy=True)) for home, name, t in own]
                model.load_state_dict(tensors)
            self._read(self._of_model)
            for module, value in self._extra_states:
                module.set_extra_state(value)
        self._zeros, self._before = [], []

    def _extra(self) -> Any:
        """This rank's, where ranks have given different ones and are as many as then; else rank 0's."""
        ours = everyone_of(self._engine)
        is_alike = ours.size == self.reader.description.world
        if not is_alike and ours.rank == 0 and any(key.startswith(EXTRA_OF) for key in self._entries):
            warnings.warn(
                f"{self._folder} has an `extra` of each of {self.reader.description.world} ranks. On another number of "
                f"ranks, here {ours.size}, all ranks load that of rank 0",
                stacklevel=2,
            )
        keys = [f"{EXTRA_OF}{ours.rank}"] * is_alike + ["extra"]
        return next((self.reader.read_object(key) for key in keys if key in self._entries), None)

    # --- the model ---------------------------------------------------------------------------------------------------

    def _plan_model(self, model: Module) -> None:
        wanted = {f"model.{key}": value for key, value in model_tensors(model).items()}
        if not any(key.startswith("model.") for key in self._entries):
            raise ValueError(f"{self._folder} holds no model: {self._expected_form()}")
        own = {*model.parameters(), *model.buffers()}
        if loads_its_own_way(model) or any(isinstance(value, Tensor) and value not in own for value in wanted.values()):
            self._plan_own_loading(model, wanted)
            return
        self._expect_names(wanted)
        known: dict[Tensor, ParamInfo] = {info.param: info for info in self._engine.infos} if self._engine else {}
        last = {id(value): key for key, value in wanted.items()}  # of tied weights, as load_state_dict does
        for key, value in wanted.items():
            if is_extra_state(key):
                module = model.get_submodule(key.removeprefix("model.").removesuffix("_extra_state").removesuffix("."))
                self._extra_states.append((module, self._extra_state(key)))
                continue
            self._expect_shape(key, value.shape)
            if last[id(value)] != key:
                continue
            if self._engine is not None and value in known:
                boxes = live_boxes(self._engine, known[value])
                self._of_model += self._reads_of(key, [(box, parts_of(views, PARAM)) for box, views in boxes])
            elif (home := home_of(value)) is not None:
                if home.sharded_by is not None:
                    home.sharded_by.before_write()
                self._of_model += self._reads_of(key, [(box, (view,)) for box, view in sharded_boxes(value, home)])
            else:
                self._of_model += self._reads_of(key, [_whole(value.detach())])

    def _plan_own_loading(self, model: Module, wanted: Mapping[str, Any]) -> None:
        extra = [key for key, value in wanted.items() if is_extra_state(key) and self._has(key, value)]
        inside = tuple(f"{key}." for key in extra)
        others = (key for key in self._entries if key.startswith("model.") and not key.startswith(inside))
        tensors = model.state_dict()  # it has the versions of modules beside
        tensors.clear()
        for key in dict.fromkeys([*extra, *others]):
            tensors[key.removeprefix("model.")] = self._extra_state(key) if key in extra else self._value(key)
        self._own_loading = model, tensors

    def _expected_form(self) -> str:
        tops = _some(sorted({key.partition(".")[0] for key in self._entries}))
        return (
            f"expected {{'model': model.state_dict(), 'optim': optimizer.state_dict()}}, found {tops} at the top. "
            "torch.distributed.checkpoint.load(state, checkpoint_id=...) loads any dict into a dict of its structure"
        )

    def _expect_names(self, wanted: Mapping[str, Any]) -> None:
        inside = tuple(f"{key}." for key in wanted if is_extra_state(key))
        there = [key for key in self._entries if key.startswith("model.")]
        missing = [key for key, value in wanted.items() if not self._has(key, value)]
        unexpected = [key for key in there if key not in wanted and not key.startswith(inside)]
        if missing or unexpected:
            here, there = ([key.removeprefix("model.") for key in keys] for keys in (wanted, there))
            raise ValueError(
                f"{self._folder} does not fit the model: the checkpoint lacks {_some(missing)}, the model lacks "
                f"{_some(unexpected)}. {_remedy(here, there)}"
            )

    def _has(self, key: str, value: Any) -> bool:
        if key in self._entries or f"{WHOLE}{key}" in self._entries:
            return True
        is_empty = isinstance(value, (dict, list)) and not value  # of which nothing is saved
        return is_extra_state(key) and (is_empty or any(name.startswith(f"{key}.") for name in self._entries))

    def _extra_state(self, key: str) -> Any:
        """Of a module: an object, or a dict or a list."""
        for name in (f"{WHOLE}{key}", key):
            if name in self._entries:
                return self._value(name)
        found = self._nested(f"{key}.")
        if found is None:
            raise ValueError(f"{self._folder} has entries of {key!r}, but not the structure that joins them")
        return found

    def _nested(self, prefix: str) -> Any:
        """What stock has saved as an entry for each leaf: a dict or a list. None if it does not say which: its user has."""
        paths = self.reader.description.metadata.planner_data or {}
        found: dict[Any, Any] = {}
        for name in self._entries:
            if name.startswith(prefix):
                path = paths.get(name, ())
                depths = [n for n in range(1, len(path)) if ".".join(map(str, path[:n])) + "." == prefix]
                if not depths:
                    return None
                *parents, last = path[depths[0] :]
                at = found
                for parent in parents:
                    at = at.setdefault(parent, {})
                at[last] = self._value(name)
        return _with_lists(found)

    def _expect_shape(self, key: str, shape: torch.Size) -> None:
        entry = self._entries[key]
        found = None if isinstance(entry, BytesStorageMetadata) else tuple(entry.size)
        if found != tuple(shape):
            raise ValueError(f"{key!r} has shape {found} in {self._folder} and {tuple(shape)} here. {_PART}")

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def _optimizer_state(self, model: Module | None, optimizer: ShardedOptimizer) -> dict[str, Any]:
        assert self._engine is not None
        names: dict[Tensor, list[str]] = {}  # several of tied weights
        for name, p in () if model is None else model.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        ours: list[dict[str, Any]] = optimizer.param_groups
        groups = self._groups(ours, names)
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in ours]:
            return {"state": {}, "param_groups": groups}  # which the optimizer refuses
        of_param: dict[str, dict[str, str]] = {}
        for key in self._entries:
            if key.startswith("optim.state."):
                saved, _, name = key.removeprefix("optim.state.").rpartition(".")
                of_param.setdefault(saved, {})[name] = key
        infos = {info.param: info for info in self._engine.infos}
        is_new = _is_new(self._engine)
        state = {}
        for group, theirs in zip(ours, groups, strict=True):
            for p, saved in zip(group["params"], theirs["params"], strict=True):
                if str(saved) in of_param:
                    state[saved] = self._entry(infos.get(p), of_param[str(saved)], is_new)
        return {"state": state, "param_groups": groups}

    def _entry(self, info: ParamInfo | None, keys: Mapping[str, str], is_new: bool) -> dict[str, Any]:
        """Of a parameter; one that is frozen (None) has whole tensors, which wait until it is trained."""
        if info is None:
            return {name: self._value(key) for name, key in keys.items()}
        assert self._engine is not None
        boxes, states = live_boxes(self._engine, info), self._engine.states[info.index]
        entry: dict[str, Any] = {"step": self._value(keys["step"])} if "step" in keys else {}
        for name, state in zip(saved_names(states), states.values(), strict=True):
            if name in keys:
                self._expect_shape(keys[name], info.param.shape)
                reads = self._reads_of(keys[name], [(box, parts_of(views, name)) for box, views in boxes])
                if is_new and name != "master_param":
                    self._zeros.append(state)
                    self._at_once += reads
                    reads = []
                self._of_states += reads
                entry[name] = StoredState(info.param.shape, partial(self._read, reads))
        return entry

    def _groups(self, ours: Sequence[dict[str, Any]], names: Mapping[Tensor, Sequence[str]]) -> list[dict[str, Any]]:
        """``param_groups``, of numbered groups, or of one for each parameter's name ("flattened" by torch)."""
        prefix = "optim.param_groups."
        keys = [key for key in self._entries if key.startswith(prefix)]
        if not keys:
            raise ValueError(f"{self._folder} holds no optimizer: {self._expected_form()}")
        found: Any = self._nested(prefix) if f"{prefix}0.params" in keys else None
        if (whole := f"{WHOLE}optim.param_groups") in self._entries:
            found = self._value(whole)
        if found is None:
            found = {}
            for key in keys:
                which, _, name = key.removeprefix(prefix).rpartition(".")
                found.setdefault(which, {})[name] = self._value(key)
        if isinstance(found, dict) and all(str(which).isdigit() for which in found):
            found = [found[which] for which in sorted(found, key=int)]
        groups, table = (found, {}) if isinstance(found, list) else ([], found)
        by_name = {name for group in groups for name in group["params"] if isinstance(name, str)} or set(table)
        if not by_name:
            return follow_names(groups, ours)
        if not all(p in names for group in ours for p in group["params"]):
            raise ValueError(f"{self._folder} stores optimizer states by the model's parameter names: pass model=")
        named = [[_name_in(by_name, names[p]) for p in group["params"]] for group in ours]
        if groups:
            return follow_names(groups, [{"params": of_group} for of_group in named])
        return [{**table.get(of_group[0] if of_group else "", {}), "params": of_group} for of_group in named]

    # --- reading -----------------------------------------------------------------------------------------------------

    def _reads_of(self, key: str, boxes: Sequence[tuple[Box, Sequence[Tensor]]]) -> list[_Read]:
        """What is to be read of a tensor into views of boxes of it; masters in parts of a chunk, since they are joined."""
        found: list[_Read] = []
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in boxes]
        for item in create_read_items_for_chunk_list(key, self._entries[key], chunks):
            views = [part_of(view, item.dest_offsets, item.lengths) for view in boxes[item.dest_index.index or 0][1]]
            if len(views) == 1:
                found.append((item, views))
                continue
            strides = [item.lengths[dim + 1 :].numel() for dim in range(len(item.lengths))]
            for begin, sizes in pieces_of(item.lengths, strides, CHUNK_BYTES // 4):
                offsets = [at + more for at, more in zip(item.storage_offsets, begin, strict=True)]
                part = replace(item, storage_offsets=torch.Size(offsets), lengths=torch.Size(sizes))
                found.append((part, [part_of(view, begin, sizes) for view in views]))
        return found

    def _place(self, read: tuple[ReadItem, Any]) -> tuple[str, int]:
        return self.reader.place(read[0])

    def _read(self, reads: list[_Read], *, checks: bool = False) -> None:
        for item, views in sorted(reads, key=self._place):
            target = views[0] if len(views) == 1 else torch.empty_like(views[0], dtype=torch.float32)
            self.reader.read(item, target, checks=checks)
            if len(views) > 1:
                load_master(views[0], {"remainder": views[1]}, target)

    def _value(self, key: str) -> Any:
        """A tensor that is small, or not divided here; or another object."""
        if isinstance(entry := self._entries[key], BytesStorageMetadata):
            return self.reader.read_object(key)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        self._read(self._reads_of(key, [_whole(whole)]), checks=True)
        return whole


def _is_new(engine: Engine) -> bool:
    """Whether no step was taken and nobody has written to moments or to numbers of steps, so that moments are zeros."""
    moments = [moment for states in engine.states for moment in moments_of(states).values()]
    return not engine.steps.any() and not any(tensor._version for tensor in (engine.steps, *moments))


def _whole(tensor: Tensor) -> tuple[Box, Sequence[Tensor]]:
    return Box((0,) * tensor.dim(), tuple(tensor.shape), 0, tensor.stride()), [tensor]


def _name_in(there: Collection[str], names: Sequence[str]) -> str:
    """A parameter's name as the checkpoint has it: one of ``names``, or without the names of wrappers; else the first."""
    for count in range(len(WRAPPERS) + 1):
        for name in names:
            plain = ".".join(part for part in name.split(".") if part not in WRAPPERS[:count])
            if plain in there:
                return plain
    return names[0]


def _with_lists(found: Any) -> Any:
    """Dicts that were lists have the keys 0, 1 and so on."""
    if not isinstance(found, dict):
        return found
    values = {key: _with_lists(value) for key, value in found.items()}
    return [values[i] for i in range(len(values))] if values and values.keys() == set(range(len(values))) else values


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(map(repr, names[:_NAMED]))}{more}" if names else "nothing"


def _remedy(here: Sequence[str], there: Sequence[str]) -> str:
    """For names of a model that does not fit."""
    if prefix := prefix_of(there, here):
        inside = "model"
        for name in reversed(prefix[:-1].split(".")):
            inside = f"torch.nn.ModuleDict({{{name!r}: {inside}}})"
        return f"All names in the checkpoint begin with {prefix!r}: load the checkpoint into {inside}"
    prefix = prefix_of(here, there)
    return f"The model adds {prefix!r} to all names: load into model.{prefix[:-1]}" if prefix else _PART
