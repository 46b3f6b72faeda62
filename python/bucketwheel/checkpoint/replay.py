"""Replay: a host copy of one rank's shard, which follows the rank's steps by doing them again on the CPU.

The CPU's Adam kernel has the bits of the CUDA one, so the copy has those of the shard. A step comes as a *record*: the
gradient shard, and what else the kernel got. All of a copy lies in one piece of memory, which may be a file:

    | words | mirror: step counts, parameters, states | (a second mirror) | record | record | ...

A *mirror* is the shard after some step; records of later steps wait until `advance`. With two mirrors one is whole at
any moment, also if the process is killed in the middle of a replay. Each mirror and record has two words: the step that
was begun and the step that is done, equal where it is whole.
"""

from __future__ import annotations

import array
import hashlib
import json
import threading
from typing import Any

import torch
from torch import Tensor

from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.layout.shard_memory import ShardMemory, ShardRow, StepInputs

__all__ = ["Record", "ShardCopy", "ShardLayout", "digests", "read_shard", "write_shard"]

_ALIGN = 64
_HYPERPARAMETERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "decoupled_weight_decay")
_AVERAGE, _GROUPS = 0, 1  # of a record's scalars


class _Regions:
    """Cuts one piece of memory into tensors, each aligned."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, torch.dtype, int]] = {}
        self.nbytes = 0

    def add(self, name: str, dtype: torch.dtype, numel: int) -> None:
        self._places[name] = (self.nbytes, dtype, numel)
        self.nbytes += -(-numel * dtype.itemsize // _ALIGN) * _ALIGN

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Of ``memory``: uint8 [nbytes]."""
        return {
            name: memory[at : at + numel * dtype.itemsize].view(dtype)
            for name, (at, dtype, numel) in self._places.items()
        }


class ShardLayout:
    """What a copy must know of a shard beside its values. ``text`` is all of it, equal where shards are alike."""

    def __init__(self, text: str) -> None:
        given = json.loads(text)
        self.text = text
        self.rank, self.world = int(given["rank"]), int(given["world"])
        self.amsgrad, self.resync = bool(given["amsgrad"]), bool(given["resync"])
        self.rows = [ShardRow(*row) for row in given["rows"]]
        self.mirror, self.record = _Regions(), _Regions()
        params, self.groups = len(given["names"]), int(given["groups"])
        self.mirror.add("steps", torch.int64, params)
        self.record.add("scalars", torch.float64, _GROUPS + len(_HYPERPARAMETERS) * self.groups)
        self.record.add("factors", torch.float64, params)
        self.record.add("used", torch.uint8, params)
        self.names_in = [list(dtypes) for _, dtypes, _ in given["spaces"]]  # of the tensors of each space
        for number, (numel, dtypes, grad) in enumerate(given["spaces"]):
            for name, dtype in dtypes.items():
                self.mirror.add(f"{number}.{name}", getattr(torch, dtype), numel)
            self.record.add(f"{number}.grad", getattr(torch, grad), numel)

    def grads_in(self, record: dict[str, Tensor]) -> list[Tensor]:
        """Of each row."""
        return [record[f"{row.space}.grad"][row.begin : row.begin + row.numel] for row in self.rows]

    @classmethod
    def of(cls, memory: ShardMemory, groups: int, rank: int, world: int) -> ShardLayout:
        spaces = [
            (
                s.numel,
                {name: _text(p[0].dtype if p else torch.uint8) for name, p in s.pieces.items()},
                _text(s.grad_dtype),
            )
            for s in memory.spaces
        ]
        flags = {"rank": rank, "world": world, "amsgrad": memory.amsgrad, "resync": memory.resync, "groups": groups}
        return cls(json.dumps({**flags, "names": memory.names, "spaces": spaces, "rows": memory.rows}))


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- between a shard and the memory of a copy -------------------------------------------------------------------------


def _pairs(memory: ShardMemory, mirror: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each piece of the shard with its place in a mirror."""
    found = [(memory.steps, mirror["steps"])]
    for number, space in enumerate(memory.spaces):
        for name, pieces in space.pieces.items():
            places = mirror[f"{number}.{name}"].split([piece.numel() for piece in pieces])
            found += zip(pieces, places, strict=True)
    return found


def read_shard(memory: ShardMemory, mirror: dict[str, Tensor]) -> None:
    """Copies the shard into a mirror; waits for the device."""
    for piece, place in _pairs(memory, mirror):
        place.copy_(piece)


def write_shard(memory: ShardMemory, mirror: dict[str, Tensor]) -> None:
    """The other way round."""
    with torch.no_grad():
        for piece, place in _pairs(memory, mirror):
            piece.copy_(place)


class Record:
    """Memory of its own for what the kernel gets in a step, and the places in it. ``is_pinned``: `fill` does not wait for the
    device."""

    def __init__(self, layout: ShardLayout, is_pinned: bool) -> None:
        self.memory = torch.empty(layout.record.nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self._tensors = layout.record.tensors(self.memory)
        self._grads = layout.grads_in(self._tensors)  # of each row
        # What the host writes: without torch, each call of which lets another thread have the interpreter.
        self._host = {name: self._tensors[name].numpy().data for name in ("scalars", "factors", "used")}

    def fill(self, memory: ShardMemory, given: StepInputs) -> None:
        """Copies what the kernel gets."""
        scalars: list[float] = [given.average]
        on_device = []
        for number, group in enumerate(given.param_groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and not lr.is_cpu:
                on_device.append((_GROUPS + number * len(_HYPERPARAMETERS), lr))
                lr = 0.0
            flags = (group["maximize"], group.get("decoupled_weight_decay", True))
            scalars += [float(x) for x in (lr, *group["betas"], group["eps"], group["weight_decay"], *flags)]
        self._host["scalars"][:] = array.array("d", scalars)
        for place, lr in on_device:
            self._tensors["scalars"][place].copy_(lr.detach().reshape(()).to(torch.float32), non_blocking=True)
        self._host["used"][:] = bytes(given.used)
        if given.factors is None:
            self._host["factors"][:] = array.array("d", [1.0]) * len(given.used)
        elif given.factors.is_cpu:
            self._host["factors"][:] = given.factors.numpy().data
        else:
            self._tensors["factors"].copy_(given.factors, non_blocking=True)
        for number, space in enumerate(memory.spaces):
            if space.grad is not None:
                self._tensors[f"{number}.grad"].copy_(space.grad, non_blocking=True)
        if given.grads is not None:
            pairs = [(part, given.grads[row.param]) for part, row in zip(self._grads, memory.rows, strict=True)]
            found = [(part, grad.as_strided(part.shape, (1,))) for part, grad in pairs if grad is not None]
            if found:
                torch._foreach_copy_([part for part, _ in found], [grad for _, grad in found], non_blocking=True)


# --- the copy ---------------------------------------------------------------------------------------------------------


class _Mirror:
    """One state of the shard, in ``memory``, and the kernel's tables over it: one for each slot that gradients come from."""

    def __init__(self, layout: ShardLayout, memory: Tensor, slots: list[dict[str, Tensor]]) -> None:
        self.memory = memory
        self.tensors = layout.mirror.tensors(memory)
        self._layout = layout
        self._slots = slots
        self._tables: dict[int, AdamRows] = {}  # by slot, made at its first record: adding rows is slow

    def _table(self, slot: int) -> AdamRows:
        layout = self._layout
        if slot in self._tables:
            return self._tables[slot]
        table = AdamRows(self.tensors["steps"], amsgrad=layout.amsgrad, resync=layout.resync)
        for row, grad in zip(layout.rows, layout.grads_in(self._slots[slot]), strict=True):
            cut = {
                name: self.tensors[f"{row.space}.{name}"][row.begin : row.begin + row.numel]
                for name in layout.names_in[row.space]
            }
            table.add(row.param, row.group, cut.pop("param"), grad, cut, param_begin=row.param_begin)
        self._tables[slot] = table
        return table

    def replay(self, slot: int) -> None:
        layout, record, count = self._layout, self._slots[slot], len(_HYPERPARAMETERS)
        scalars = record["scalars"].tolist()
        groups: list[dict[str, Any]] = []
        for number in range(layout.groups):
            begin = _GROUPS + number * count
            group = dict(zip(_HYPERPARAMETERS, scalars[begin : begin + count], strict=True))
            groups.append({**group, "betas": (group["beta1"], group["beta2"]), "amsgrad": layout.amsgrad})
        table = self._table(slot)
        table.begin_step(groups, record["used"].numpy().tobytes(), record["factors"], scalars[_AVERAGE])
        table.step()


class ShardCopy:
    """``memory``: uint8 [`nbytes_of`], zeros, or what another process has left of such a copy. Records are taken by one
    thread; whoever may `advance` it beside another one holds ``lock``."""

    def __init__(self, layout: ShardLayout, memory: Tensor, mirrors: int, slots: int) -> None:
        self.layout = layout
        self.lock = threading.Lock()
        regions = self._regions(layout, mirrors, slots)
        parts = regions.tensors(memory)
        self._base = parts["base"]
        self._words = parts["words"].view(-1, 2)  # of the mirrors, then of the slots: begun, done
        self._slots = [parts[f"record {i}"] for i in range(slots)]
        records = [layout.record.tensors(slot) for slot in self._slots]
        self._mirrors = [_Mirror(layout, parts[f"mirror {i}"], records) for i in range(mirrors)]

    @staticmethod
    def _regions(layout: ShardLayout, mirrors: int, slots: int) -> _Regions:
        regions = _Regions()
        regions.add("base", torch.int64, 1)
        regions.add("words", torch.int64, 2 * (mirrors + slots))
        for i in range(mirrors):
            regions.add(f"mirror {i}", torch.uint8, layout.mirror.nbytes)
        for i in range(slots):
            regions.add(f"record {i}", torch.uint8, layout.record.nbytes)
        return regions

    @classmethod
    def nbytes_of(cls, layout: ShardLayout, mirrors: int, slots: int) -> int:
        return cls._regions(layout, mirrors, slots).nbytes

    # Words are written one by one, in the order that a reader of a file needs.

    def begin(self, step: int, shard: Tensor) -> None:
        """The shard after ``step``: uint8, as `read_shard` fills it."""
        self._words.fill_(-1)
        self._base[0] = step
        for number, mirror in enumerate(self._mirrors):
            mirror.memory.copy_(shard)
            self._words[number] = step

    @property
    def base(self) -> int:
        """The step since which it follows by replay alone."""
        return int(self._base[0])

    def _whole(self) -> list[tuple[int, int]]:
        """Step and number of each mirror that is whole, ascending."""
        words = self._words[: len(self._mirrors)].tolist()
        return sorted((done, number) for number, (begun, done) in enumerate(words) if begun == done >= 0)

    @property
    def step(self) -> int:
        """The step that it is at; -1: it was torn, or never begun."""
        return self._whole()[-1][0] if self._whole() else -1

    @property
    def newest(self) -> int:
        """The step that it can `advance` to."""
        words = self._words[len(self._mirrors) :].tolist()
        step = self.step
        while words[(step + 1) % len(words)] == [step + 1, step + 1]:
            step += 1
        return step

    def has_room_for(self, step: int) -> bool:
        """Whether nobody needs what is in the record's slot."""
        return min((done for done, _ in self._whole()), default=-1) >= step - len(self._slots)

    def take(self, step: int, fill: Any) -> None:
        """Has ``fill(memory)`` write the record of ``step``, which has room."""
        slot = step % len(self._slots)
        words = self._words[len(self._mirrors) + slot]
        words[1] = -1
        words[0] = step
        fill(self._slots[slot])
        words[1] = step

    def advance(self, upto: int) -> None:
        """Replays records up to a step, of those that there are."""
        upto = min(upto, self.newest)
        for step, number in reversed(self._whole()):
            words = self._words[number]
            while step < upto:
                step += 1
                words[0] = step
                self._mirrors[number].replay(step % len(self._slots))
                words[1] = step

    def shard(self) -> dict[str, Tensor]:
        """The shard after `step`, by name: its own memory."""
        return self._mirrors[self._whole()[-1][1]].tensors

    def shard_bytes(self) -> Tensor:
        """The same as uint8."""
        return self._mirrors[self._whole()[-1][1]].memory


def digests(mirror: dict[str, Tensor]) -> dict[str, str]:
    """Of each tensor of a mirror."""
    bytes_of: dict[str, Any] = {name: tensor.view(torch.uint8).numpy() for name, tensor in mirror.items()}
    return {name: hashlib.sha256(given).hexdigest() for name, given in bytes_of.items()}
