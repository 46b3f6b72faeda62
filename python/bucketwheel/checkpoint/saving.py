"""save and async_save: each rank writes its part of a training job to one file, directly from the job's memory.

Names and format are those of `torch.distributed.checkpoint` for ``{"model": model.state_dict(), "optim":
optimizer.state_dict(), "extra": extra}``. Each rank computes from the layout which parts it writes. After the call, training uses
the communicators, so ranks exchange messages through the torch Store (everyone.py): rank 0 waits for the data of the others and
commits ([Note: the commit] in writer.py), and the others wait for the commit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.nn import Module, Parameter

from bucketwheel.checkpoint.everyone import Board, Everyone, FailedElsewhere, everyone_of
from bucketwheel.checkpoint.format import Stored, Sums, describe, folder_of
from bucketwheel.checkpoint.live import PARAM, Engine, ShardedOptimizer, engine_of, live_boxes, parts_of, sharded_boxes
from bucketwheel.checkpoint.param_numbers import numbered_groups, numbers_of
from bucketwheel.checkpoint.plain_values import digest_of, expect_loadable, is_kept_by_entries, pickled
from bucketwheel.checkpoint.staging import LiveTensor, SaveStats, Staging, Watched
from bucketwheel.checkpoint.writer import BUFFER_BYTES, CHUNK_BYTES, SAVING, DataFile, publish, start
from bucketwheel.errors import CheckpointError, expect_int, failing_together
from bucketwheel.layout.flat_params import ParamInfo, is_plain
from bucketwheel.layout.leased_params import home_of
from bucketwheel.layout.masters import saved_names

STAGING_BYTES = 256 << 20
EXTRA_OF = "extra_of_rank_"  # and its number: the ``extra`` of a rank whose is not that of rank 0
WHOLE = "whole."  # before the name of what `_odd_containers` finds
_LEAST_STAGING = 16 << 10
_EXIT_S = 60.0  # how long the end of the process waits for a save


def save(
    directory: str | os.PathLike[str],
    model: Module | None = None,
    optimizer: ShardedOptimizer | None = None,
    extra: Any = None,
    *,
    staging_bytes: int = STAGING_BYTES,
) -> None:
    """Saves a training job, and returns when the checkpoint is on disk. Collective over the optimizer's ranks, with replicas.

    Without an optimizer the call is collective over the ranks of `torch.distributed`, or local if there is no process group.
    Each rank writes its own part. Names and format are those of ``torch.distributed.checkpoint.save`` for ``{"model":
    model.state_dict(), "optim": optimizer.state_dict(), "extra": extra}``. Gradients are not saved.

    Args:
        directory: The folder of the checkpoint, on a file system that all ranks share. It is made if needed. It may have an
            earlier checkpoint, which stays complete until the new one is.
        model: The module whose ``state_dict()`` is saved. Pass the module inside `DistributedDataParallel` or `torch.compile`;
            otherwise names begin with ``module.`` or ``_orig_mod.``. Each rank writes its shards, frozen parameters are
            divided among the ranks, and buffers are those of rank 0.
        optimizer: A `ShardedAdamW`.
        extra: Other values for a resume, such as the state of a scheduler, the position in the data, or a random state:
            tensors, numbers, strings and bytes in lists, tuples and dicts. If ranks pass different values, each rank's is
            saved. A value that differs from rank 0's needs its size in memory until it is written.
        staging_bytes: Memory for the save, in bytes, beside the memory of the job; 256 MiB by default, at least 16 KiB.

    Raises:
        CheckpointError: The save failed on a rank. All ranks raise it, with the reason of the first rank that failed. The
            message says which checkpoint the folder has.
        TypeError: ``extra`` or a module's extra state has a value that ``torch.load(weights_only=True)`` refuses, or the model
            has a tensor without plain memory. The message names it.
        ValueError: ``staging_bytes`` is too small, there is nothing to save, or another rank raised an error before it began
            to write. The message has the text of that error.
        OSError: Rank 0 cannot make the folder, or this rank cannot make its file.
        RuntimeError: The ranks made different calls, or passed different folders."""
    async_save(directory, model, optimizer, extra, staging_bytes=staging_bytes).wait()


def async_save(
    directory: str | os.PathLike[str],
    model: Module | None = None,
    optimizer: ShardedOptimizer | None = None,
    extra: Any = None,
    *,
    staging_bytes: int = STAGING_BYTES,
) -> PendingSave:
    """Starts a save as `save` does, and returns while a thread writes. Collective as `save`.

    The checkpoint has the values of the time of the call. `ShardedAdamW.step`, and all calls of the optimizer that write to
    parameters or states, first copy the values that are not yet written into staging memory. If that needs more than
    ``staging_bytes``, they wait for the thread. Buffers are copied in the call if they fit.

    If other code writes in place to a tensor that is not yet saved, and torch's version counter shows the write, the save
    fails and names the tensor. Writes through ``p.data`` are not noticed: the checkpoint may have a part of them, or a load
    may refuse it as damaged. With ``capturable=True`` the call returns only when this rank's data is written, because replays
    of CUDA graphs give no notice.

    If another save of this optimizer or into this folder is still running, the call first waits for it. At its end the process
    waits up to one minute for a save.

    Args:
        directory: As in `save`.
        model: As in `save`.
        optimizer: As in `save`.
        extra: As in `save`.
        staging_bytes: Memory for the copies, in bytes, beside the memory of the job; 256 MiB by default, at least 16 KiB.

    Returns:
        The running save. ``wait()`` returns when the checkpoint is complete and raises `CheckpointError` if the save failed;
            ``done()`` tells whether it has ended; ``progress()`` returns the bytes that this rank has written and has to
            write; ``stats`` has ``staged_bytes``, ``peak_staging_bytes``, and ``waits`` and ``waited_s`` of steps.

    Raises:
        TypeError: As in `save`.
        ValueError: As in `save`.
        OSError: As in `save`.
        RuntimeError: As in `save`."""
    limit = expect_int(staging_bytes, "staging_bytes")
    if limit < _LEAST_STAGING:
        raise ValueError(f"staging_bytes is {limit}, expected at least {_LEAST_STAGING}")
    engine = engine_of(optimizer)
    everyone = everyone_of(engine)
    folder = folder_of(directory)
    finish_before(everyone, folder)
    if optimizer is not None:
        optimizer._follow_groups()
    what = f"bw.checkpoint.save into {folder}"  # ranks compare it
    with failing_together(everyone.agree, what):
        if optimizer is not None and engine is not None:
            optimizer._follow_state()
            engine.bind_moved()  # who asks a parameter where it lies waits for its gather
        contents = _Contents(model, optimizer, extra, everyone, limit)
        if everyone.rank == 0:
            _warn_of_others(folder, contents)
            start(folder)
    name, digest = everyone.exchange([secrets.token_hex(8), contents.digest], what)[0]
    with failing_together(everyone.agree, what):
        if extra is not None and contents.digest != digest:
            contents.add_object(f"{EXTRA_OF}{everyone.rank}", extra)
        board = Board(everyone, name)
        pending = PendingSave(folder, contents, board)
    pending._start()
    if optimizer is not None and any(group["capturable"] for group in optimizer.param_groups):
        pending._written.wait()
    return pending


# --- what is saved, and by whom ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sharded:
    """A parameter (`PARAM`) or a state, of which each rank has boxes."""

    info: ParamInfo
    name: str


# One box, or the bytes of another object: its index, the shape of the whole tensor or None, what `DataFile.add` takes, its bytes.
_Item = tuple[MetadataIndex, tuple[int, ...] | None, Any, int]


class _Contents:
    """What this rank writes. Takes copies of what is small."""

    def __init__(
        self, model: Module | None, optimizer: ShardedOptimizer | None, extra: Any, everyone: Everyone, limit: int
    ) -> None:
        self.rank, self.size = everyone.rank, everyone.size
        self.engine = engine = everyone.engine  # until all is written
        self.part_bytes = min(BUFFER_BYTES, limit // 4 // 4096 * 4096)  # what is read, staged and written at a time
        self.chunk_bytes = min(CHUNK_BYTES, self.part_bytes)
        device = torch.device("cpu") if engine is None else engine.steps.device
        self.staging = Staging(limit - self.part_bytes, self.part_bytes, device)  # the rest is the DataFile's
        self.items: list[_Item] = []
        self.same: dict[str, str] = {}  # tied weights: a name, and that under which it is written
        tree: dict[str, Any] = {}
        if model is not None:
            tree["model"] = self._of_model(model)
        if optimizer is not None and engine is not None:
            tree["optim"] = _of_optimizer(optimizer, engine)
        if extra is not None:
            expect_loadable("extra", extra)
        elif not tree:
            raise ValueError("nothing to save: give a model, an optimizer or extra")
        self.digest = digest_of(extra) if everyone.size > 1 else ""
        odd = _odd_containers(tree)
        planner = DefaultSavePlanner(flatten_sharded_tensors=False)
        planner.set_up_planner(tree, is_coordinator=True)
        self.paths = {**planner.mappings, **{f"{WHOLE}{key}": (WHOLE[:-1], key) for key in odd}}
        # Of parameters, or of their states.
        self.shapes = {
            key: tuple(leaf.info.param.shape if isinstance(leaf, _Sharded) else leaf.shape)
            for key, leaf in planner.state_dict.items()
            if isinstance(leaf, (_Sharded, Parameter))
        }
        self._add_sharded(planner.state_dict)
        self._add_others({**planner.state_dict, **{f"{WHOLE}{key}": value for key, value in odd.items()}})
        if extra is not None and self.rank == 0:
            self.add_object("extra", extra)

    def _of_model(self, model: Module) -> dict[str, Any]:
        known: dict[Tensor, ParamInfo] = {info.param: info for info in self.engine.infos} if self.engine else {}
        found: dict[str, Any] = {}
        first: dict[Tensor, str] = {}
        for key, value in model_tensors(model).items():
            found[key] = value
            if isinstance(value, Tensor):
                if (written := first.setdefault(value, key)) != key:
                    self.same[f"model.{key}"] = f"model.{written}"
                if value in known:
                    found[key] = _Sharded(known[value], PARAM)
                elif (home := home_of(value)) is not None:  # frozen, or of no optimizer
                    found[key] = _Sharded(home.infos[home.packed_of(value)], PARAM)
        return found

    def _add_sharded(self, leaves: Mapping[str, Any]) -> None:
        """In the order in which a step will write to them. Replicas share the boxes of their shard out among them."""
        for key, leaf in leaves.items():
            if isinstance(leaf, _Sharded) and leaf.info.index < 0 and key not in self.same:
                self._add_untrained(key, leaf.info)
        if self.engine is None:
            return
        world = self.engine.part[1]
        turns = _Turns(self.size // world, self.rank // world)
        of_param: dict[int, list[tuple[str, str]]] = {}
        for key, leaf in leaves.items():
            if isinstance(leaf, _Sharded) and leaf.info.index >= 0 and key not in self.same:
                of_param.setdefault(leaf.info.index, []).append((key, leaf.name))
        for index in dict.fromkeys([*self.engine.write_order(), *of_param]):  # those without elements are in no bucket
            info, states = self.engine.infos[index], self.engine.states[index]
            boxes = live_boxes(self.engine, info) if index in of_param else []
            for key, name in of_param.get(index, ()):
                what = "parameter" if name == PARAM else f"the state {name!r} of parameter"
                source = info.param if name == PARAM else states[name if name in states else "remainder"]
                others = ", or a state beside it in memory," if name != PARAM and world > 1 else ""
                watched = Watched(f"{what} {info.name!r}{others}", source)
                for box, all_views in boxes:
                    views = parts_of(all_views, name)
                    dtype = torch.float32 if len(views) > 1 else views[0].dtype
                    nbytes = box.numel * dtype.itemsize
                    if turns.is_mine(nbytes):
                        data = LiveTensor(self.staging, index, views, dtype, watched)
                        place = MetadataIndex(key, torch.Size(box.offsets))
                        self.items.append((place, tuple(info.param.shape), data, nbytes))

    def _add_untrained(self, key: str, info: ParamInfo) -> None:
        """A sharded parameter that no optimizer trains."""
        home = home_of(info.param)
        assert home is not None
        if self.rank // home.packing.world:  # a replica
            return
        watched = Watched(f"parameter {info.name!r}", home.values)
        for box, view in sharded_boxes(info.param, home):
            data = LiveTensor(self.staging, None, [view], view.dtype, watched)
            place = MetadataIndex(key, torch.Size(box.offsets))
            self.items.append((place, tuple(info.param.shape), data, view.nbytes))

    def _add_others(self, leaves: Mapping[str, Any]) -> None:
        """All ranks have the same frozen parameters and steps, so each writes some of them. Rank 0 writes the rest."""
        turns = _Turns(self.size, self.rank)
        for key, leaf in leaves.items():
            if isinstance(leaf, _Sharded) or key in self.same:
                continue
            if isinstance(leaf, Tensor) and not is_plain(leaf):
                kind = f"{type(leaf).__name__} on {leaf.device}"
                raise TypeError(f"{key!r} is a {kind}, not a plain tensor: save it by torch.distributed.checkpoint")
            is_spread = isinstance(leaf, Tensor) and (isinstance(leaf, Parameter) or key.startswith("optim.state."))
            if not (turns.is_mine(leaf.nbytes) if is_spread else self.rank == 0):
                continue
            if not isinstance(leaf, Tensor):
                self.add_object(key, leaf)
                continue
            value = leaf.detach().resolve_conj().resolve_neg()
            if not isinstance(leaf, Parameter) and self.staging.reserve(leaf.nbytes):
                leaf = value = value.to("cpu", copy=True)
            data = LiveTensor(self.staging, None, [value], value.dtype, Watched(repr(key), leaf))
            index = MetadataIndex(key, torch.Size([0] * value.dim()))
            self.items.append((index, tuple(value.shape), data, value.nbytes))

    def add_object(self, key: str, value: Any) -> None:
        expect_loadable(key, value)
        content = pickled(value)
        self.items.append((MetadataIndex(key), None, content, content.getbuffer().nbytes))


class _Turns:
    """Shares bytes out among ``count`` ranks, each time to the one that has the fewest. The same on all ranks."""

    def __init__(self, count: int, mine: int) -> None:
        self._dealt = [0] * count
        self._mine = mine

    def is_mine(self, nbytes: int) -> bool:
        turn = self._dealt.index(min(self._dealt))
        self._dealt[turn] += max(nbytes, 1)
        return turn == self._mine


def model_tensors(model: Module) -> dict[str, Any]:
    """``model.state_dict()``, with the parameters themselves. TypeError for what is neither a tensor with memory of
    its own nor a module's extra state: nothing could load it."""
    found = dict(model.state_dict(keep_vars=True))
    for key, value in found.items():
        if not isinstance(value, Tensor) and not is_extra_state(key):
            raise TypeError(f"{key!r} of the model is a {type(value).__name__}, expected a tensor or extra state")
        if isinstance(value, Tensor) and home_of(value) is None and not is_plain(value):
            what = f"is a {type(value).__name__} on {value.device}, not plain: use torch.distributed.checkpoint"
            meta = "is on the meta device, without values: call model.to_empty(device=...), then make the optimizer"
            raise TypeError(f"'model.{key}' {meta if value.is_meta else what}")
    return found


def is_extra_state(key: str) -> bool:
    """Whether it is what a module's ``get_extra_state`` has returned."""
    return key.rpartition(".")[2] == "_extra_state"


def _of_optimizer(optimizer: ShardedOptimizer, engine: Engine) -> dict[str, Any]:
    numbers = numbers_of(optimizer.param_groups)
    steps = engine.steps.to("cpu", torch.float32)
    state: dict[int, dict[str, Any]] = {}
    for info in engine.infos:
        sharded = {name: _Sharded(info, name) for name in saved_names(engine.states[info.index])}
        state[numbers[info.param]] = {"step": steps[info.index], **sharded}
    for param, entry in optimizer._waiting_states().items():
        state[numbers[param]] = dict(entry)
    return {"state": state, "param_groups": numbered_groups(optimizer.param_groups)}


def _odd_containers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Extra states of modules, and the groups, if stock's entries, one for each leaf, lose their structure. They are saved
    as one object each, too: stock reads the entries, and a load the object."""
    found = {f"model.{key}": value for key, value in tree.get("model", {}).items() if is_extra_state(key)}
    if "optim" in tree:
        found["optim.param_groups"] = tree["optim"]["param_groups"]
    return {key: value for key, value in found.items() if not is_kept_by_entries(value)}


def _warn_of_others(folder: Path, contents: _Contents) -> None:
    """Warns where the folder holds a checkpoint of other parameters. Looks once, as large metadata take seconds to read."""
    if folder in _looked_at:
        return
    try:
        entries = describe(folder).metadata.state_dict_metadata
    except CheckpointError:
        return
    _looked_at.add(folder)
    there = {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    has_both = all(any(key.startswith("model.") for key in keys) for keys in (there, contents.shapes))
    for key, shape in contents.shapes.items():
        if there.get(key) != shape and (key.startswith("model.") if has_both else key.endswith(".exp_avg")):
            of = f"has shape {there[key]} there and {shape} here" if key in there else "is not in it"
            warnings.warn(
                f"this save replaces a checkpoint of other parameters in {folder}: {key!r} {of}. If ranks train "
                "different parameters (pipeline stages, experts), give each data-parallel group a folder of its own",
                stacklevel=4,
            )
            return


# --- the save while it runs -------------------------------------------------------------------------------------------

_running: set[PendingSave] = set()  # of this process; until each has ended, and its error has been shown
_looked_at: set[Path] = set()  # by `_warn_of_others`, for the life of the process


class PendingSave:
    """A save that a thread carries out, from `async_save`. All methods are local."""

    def __init__(self, folder: Path, contents: _Contents, board: Board) -> None:
        self._folder = folder
        self._contents = contents
        self._board = board
        self._owner = None if contents.engine is None else weakref.ref(contents.engine)
        self._nbytes = sum(nbytes for *_, nbytes in contents.items)
        path = folder / SAVING / f"__{self._contents.rank}_0.distcp"
        self._file = DataFile(path, chunk_bytes=contents.chunk_bytes, buffer_bytes=contents.part_bytes)
        self._file.on_write = board.note_write
        self._remains = "and the checkpoint there is unchanged"  # in errors; until this rank has told what it wrote
        self._written = threading.Event()  # this rank's data
        self._ended = threading.Event()
        self._error: CheckpointError | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the checkpoint is complete and on disk. Local; blocks the host.

        Args:
            timeout: Limit in seconds. None means no limit.

        Raises:
            CheckpointError: The save failed. An earlier checkpoint is unchanged unless the message says otherwise.
            TimeoutError: The save has not ended after ``timeout`` seconds. It goes on."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save into {self._folder} has not ended after {timeout} s")
        if self._error is not None:
            _running.discard(self)
            raise self._error

    def done(self) -> bool:
        """Returns whether the save has ended, so that `wait` would return or raise at once. Local."""
        return self._ended.is_set()

    def progress(self) -> tuple[int, int]:
        """Returns the number of bytes that this rank has written, and the number that it writes in all. Local."""
        return self._contents.staging.written_bytes, self._nbytes

    @property
    def stats(self) -> SaveStats:
        """What the save has cost training so far."""
        return self._contents.staging.stats

    def _show_error(self) -> None:
        if self._error is not None:
            _running.discard(self)
            warnings.warn(str(self._error), RuntimeWarning, stacklevel=4)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._contents.engine is not None:
            self._contents.engine.write_observers.append(self._contents.staging.before_write)
        _running.add(self)
        threading.Thread(target=self._run, name="bucketwheel checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            rows = self._write()
            if self._contents.rank == 0:
                self._commit(rows)
            else:
                self._remains = "and the folder holds this checkpoint or the earlier one"
                self._board.tell(str(self._contents.rank), json.dumps(rows).encode())
                self._board.wait_for("outcome", "rank 0's commit")
        except BaseException as error:  # noqa: BLE001 (the caller of wait() gets it)
            self._fail(error)
        finally:
            self._let_go(self._error)
            if self._error is None:
                _running.discard(self)
            self._written.set()
            with contextlib.suppress(RuntimeError):  # the Store is gone
                self._board.leave()
            self._ended.set()

    def _write(self) -> list[Any]:
        """Returns what it has written, for JSON."""
        rows = []
        for index, shape, data, nbytes in self._contents.items:
            rows.append(_row(index, shape, data, self._file.add(index, data).storage_data))
            if not isinstance(data, LiveTensor):
                self._contents.staging.written_bytes += nbytes
        self._contents.staging.expect_good()
        self._let_go(None)
        self._file.close()
        self._written.set()
        return rows

    def _commit(self, rows: list[Any]) -> None:
        others = range(1, self._contents.size)
        reports = [rows, *(json.loads(self._board.wait_for(str(rank), "the other ranks' data")) for rank in others)]
        contents = self._contents
        remove_earlier = publish(self._folder, *_joined(reports, contents), chunk_bytes=contents.chunk_bytes)
        self._remains = "and the folder holds this checkpoint"
        self._board.tell("outcome", b"")
        remove_earlier()

    def _let_go(self, error: BaseException | None) -> None:
        """The live memory is not needed any more."""
        contents = self._contents
        contents.staging.end(error)
        contents.items = []
        if contents.engine is not None:
            contents.engine.write_observers.remove(contents.staging.before_write)
        contents.engine = None

    def _fail(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, FailedElsewhere):
            text = f"the save into {self._folder} has failed on rank {self._contents.rank}, {self._remains}: {text}"
        self._error = CheckpointError(text)
        self._error.__cause__ = error
        with contextlib.suppress(RuntimeError):  # the Store is gone, as the other ranks find too
            self._board.tell("outcome", text[:100_000].encode())
        self._file.discard()


def _row(index: MetadataIndex, shape: tuple[int, ...] | None, data: Any, stored: Stored) -> list[Any]:
    """Says what a rank has written, in JSON: other users of the machine may reach the Store, so nothing of it is unpickled."""
    assert stored.sums is not None
    dtype = None if shape is None else str(data.dtype).removeprefix("torch.")
    sizes = None if shape is None else data.shape
    sums = (*stored.sums[:3], stored.sums.chunks.hex())
    return [index.fqn, shape, dtype, index.offset, sizes, *stored[:3], sums]


def _joined(reports: Sequence[Any], contents: _Contents) -> tuple[Metadata, list[list[WriteResult]]]:
    """The metadata of a checkpoint, and where what is, from the rows of all ranks."""
    also: dict[str, list[str]] = {}
    for name, written in contents.same.items():
        also.setdefault(written, []).append(name)
    entries: dict[str, Any] = {}
    properties: dict[str, TensorProperties] = {}  # by dtype: pickled once
    results: list[list[WriteResult]] = [[] for _ in reports]
    for rank, rows in enumerate(reports):
        for fqn, shape, dtype, offset, sizes, path, begin, length, sums in rows:
            stored = Stored(path, begin, length, Sums._make([*sums[:3], bytes.fromhex(sums[3])]))
            for name in (fqn, *also.get(fqn, ())):
                index = MetadataIndex(name, None if offset is None else torch.Size(offset))
                results[rank].append(WriteResult(index, length, stored))
                if shape is None:
                    entries[name] = BytesStorageMetadata()
                    continue
                kind = properties.setdefault(dtype, TensorProperties(dtype=getattr(torch, dtype)))
                entry = entries.setdefault(name, TensorStorageMetadata(kind, torch.Size(shape), []))
                entry.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
    paths = {**{name: (name,) for name in entries}, **contents.paths}  # of a rank's own extra too: stock reads by keys
    return Metadata(entries, planner_data=paths), results


def finish_before(everyone: Everyone, folder: Path) -> None:
    """Waits for saves of this rank that still run, of the same optimizer or into ``folder``. Warns of one that has failed where
    nobody has called its `wait`."""
    for pending in list(_running):
        owner = None if pending._owner is None else pending._owner()
        is_related = owner is everyone.engine or os.path.realpath(pending._folder) == os.path.realpath(folder)
        if is_related and pending._contents.rank == everyone.rank:
            pending._ended.wait()
            pending._show_error()


def _finish_at_exit() -> None:
    until = time.monotonic() + _EXIT_S
    for pending in list(_running):
        pending._ended.wait(max(until - time.monotonic(), 0.0))
        pending._show_error()


atexit.register(_finish_at_exit)
