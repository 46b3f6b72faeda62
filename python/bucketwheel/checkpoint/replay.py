"""Replay: a host copy of one rank's shard, which follows the rank's steps by doing them again on the CPU.

The CPU's Adam kernel has the bits of the CUDA one, so the copy has those of the shard. What it needs of a step is a
*record*: the gradient shard, and what else the kernel got.
"""

from __future__ import annotations

import array
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bucketwheel.checkpoint.live import ShardedOptimizer
from bucketwheel.device import buffer_of
from bucketwheel.layout.shard_memory import ShardMemory, StepInputs

_ALIGN = 64
# A record's scalars: the average, then these of each group.
_HYPERPARAMETERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "decoupled_weight_decay")


class _Regions:
    """Cuts one piece of memory into tensors, each aligned. ``fields``: name, dtype and number of elements of each."""

    def __init__(self, fields: Iterable[tuple[str, str, int]]) -> None:
        self._places: dict[str, tuple[int, torch.dtype, int]] = {}
        self.nbytes = 0
        for name, dtype_name, numel in fields:
            dtype: torch.dtype = getattr(torch, dtype_name)
            self._places[name] = (self.nbytes, dtype, numel)
            self.nbytes += -(-numel * dtype.itemsize // _ALIGN) * _ALIGN

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Of ``memory``: uint8 [nbytes]."""
        return {
            name: memory[at : at + numel * dtype.itemsize].view(dtype)
            for name, (at, dtype, numel) in self._places.items()
        }

    def unequal(self, one: Tensor, other: Tensor) -> list[str]:
        """The tensors whose bits differ between two pieces of memory."""
        pairs = zip(self.tensors(one).items(), self.tensors(other).values(), strict=True)
        return [name for (name, a), b in pairs if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]


class ShardLayout:
    """What a copy must know of a shard beside its values: rank, dtypes, sizes, rows. ``text``: all of it, as JSON."""

    def __init__(self, text: str) -> None:
        given = json.loads(text)
        self.text = text
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.rank = int(given["rank"])
        self.amsgrad, self._resync = bool(given["amsgrad"]), bool(given["resync"])
        # Each row of the kernel: its space and group, its parameter, its begin in this, in the space, and its numel.
        self.rows: list[tuple[int, int, int, int, int, int]] = [tuple(row) for row in given["rows"]]
        self.mirror, self.record = _Regions(given["mirror"]), _Regions(given["record"])

    @classmethod
    def of(cls, memory: ShardMemory, groups: int, rank: int, world: int) -> ShardLayout:
        params = len(memory.infos)
        mirror = [("steps", "int64", params)]
        scalars = 1 + len(_HYPERPARAMETERS) * groups
        record = [("scalars", "float64", scalars), ("factors", "float64", params), ("used", "uint8", params)]
        rows: list[tuple[int, ...]] = []
        for number, space in enumerate(memory.spaces):
            rows += [(number, memory.infos[row[0]].group, *row) for row in space.rows]
            for name, pieces in space.pieces.items():
                mirror.append((f"{number}.{name}", _text(pieces[0].dtype if pieces else torch.uint8), space.numel))
            record.append((f"{number}.grad", _text(space.grad_dtype), space.numel))
        given: dict[str, Any] = {"rank": rank, "world": world, "amsgrad": memory.amsgrad, "resync": memory.resync}
        given |= {"names": [info.name for info in memory.infos], "mirror": mirror, "record": record, "rows": rows}
        return cls(json.dumps(given))

    def pairs(self, memory: ShardMemory, mirror: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each piece of the shard with its place in a mirror."""
        tensors = self.mirror.tensors(mirror)
        found = [(memory.steps, tensors["steps"])]
        for number, space in enumerate(memory.spaces):
            for name, pieces in space.pieces.items():
                places = tensors[f"{number}.{name}"].split([piece.numel() for piece in pieces])
                found += zip(pieces, places, strict=True)
        return found

    def read(self, memory: ShardMemory, mirror: Tensor) -> None:
        """Copies the shard into a mirror; waits for the device."""
        for piece, place in self.pairs(memory, mirror):
            place.copy_(piece)

    def rows_over(self, mirror: Tensor, optimizer: ShardedOptimizer) -> Any:
        """What steps a mirror, without gradients."""
        tensors = self.mirror.tensors(mirror)
        rows = optimizer._host_rows(tensors.pop("steps"), amsgrad=self.amsgrad, resync=self._resync)
        for space, group, param, param_begin, begin, numel in self.rows:
            of_space = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{space}.")}
            cut = {name.split(".")[1]: whole[begin : begin + numel] for name, whole in of_space.items()}
            rows.add(param, group, cut.pop("param"), None, cut, param_begin=param_begin)
        return rows


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Record:
    """What the kernel gets in one step, in ``memory`` (uint8 [layout.record.nbytes])."""

    def __init__(self, layout: ShardLayout, memory: Tensor) -> None:
        self.memory = memory
        self._layout = layout
        self._tensors = layout.record.tensors(memory)
        self.grads = [  # of each row
            self._tensors[f"{space}.grad"][begin : begin + numel] for space, _, _, _, begin, numel in layout.rows
        ]
        # Written by the host without torch: in a call of torch another thread may take the interpreter.
        self._host = {name: buffer_of(self._tensors[name]) for name in ("scalars", "factors", "used")}

    def fill(self, memory: ShardMemory, given: StepInputs) -> None:
        """Copies what the kernel gets. If this memory is pinned, it does not wait for the device."""
        scalars: list[float] = [given.average]
        on_device = []
        for group in given.param_groups:
            lr = group["lr"]
            if isinstance(lr, Tensor) and not lr.is_cpu:
                on_device.append((len(scalars), lr))
                lr = 0.0
            flags = (group["maximize"], group.get("decoupled_weight_decay", True))
            scalars += [float(x) for x in (lr, *group["betas"], group["eps"], group["weight_decay"], *flags)]
        self._host["scalars"][:] = array.array("d", scalars).tobytes()
        for place, lr in on_device:
            self._tensors["scalars"][place].copy_(lr.detach().reshape(()).to(torch.float32), non_blocking=True)
        self._host["used"][:] = bytes(given.used)
        if given.factors is None:
            self._host["factors"][:] = array.array("d", [1.0]).tobytes() * len(given.used)
        elif given.factors.is_cpu:
            self._host["factors"][:] = buffer_of(given.factors)
        else:
            self._tensors["factors"].copy_(given.factors, non_blocking=True)
        for number, space in enumerate(memory.spaces):
            if space.grad is not None:
                self._tensors[f"{number}.grad"].copy_(space.grad, non_blocking=True)
        if given.grads is not None:
            of_rows = (given.grads[param] for _, _, param, *_ in self._layout.rows)
            pairs = zip(self.grads, of_rows, strict=True)
            found = [(part, grad.as_strided(part.shape, (1,))) for part, grad in pairs if grad is not None]
            if found:
                torch._foreach_copy_([part for part, _ in found], [grad for _, grad in found], non_blocking=True)

    def replay(self, rows: Any) -> None:
        average, *scalars = self._tensors["scalars"].tolist()
        groups: list[dict[str, Any]] = []
        for number in range(0, len(scalars), len(_HYPERPARAMETERS)):
            group = dict(zip(_HYPERPARAMETERS, scalars[number:], strict=False))
            groups.append({**group, "betas": (group["beta1"], group["beta2"]), "amsgrad": self._layout.amsgrad})
        rows.table.set_grads(self.grads)
        rows.begin_step(groups, bytes(self._host["used"]), self._tensors["factors"], average)
        rows.step()


class ShardCopy:
    """``optimizer``: steps it. ``memory``: uint8 [`nbytes_of`], of a file; None: of its own, with records that are pinned if
    ``is_pinned``. For one thread at a time, except `record`.

        | base, steps, kept | mirror: step counts, parameters, states | (a second mirror) | record | record | ...

    A *mirror* is the shard after some step; records of later steps stay until `advance`. With two mirrors one is whole
    at any moment, even if the process is killed in a replay. *steps*: the step of each mirror, -1 during a replay;
    *kept*: the step of each record.
    """

    def __init__(
        self,
        layout: ShardLayout,
        optimizer: ShardedOptimizer,
        mirrors: int,
        slots: int,
        memory: Tensor | None = None,
        is_pinned: bool = False,
    ) -> None:
        self.layout = layout
        self._optimizer = optimizer
        head, nbytes = _head(layout, mirrors, slots), slots * layout.record.nbytes
        if memory is None:  # zeroed, so that steps need not wait for pages
            first = torch.empty(head.nbytes, dtype=torch.uint8, device="cpu")
            records = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned).zero_()
        else:
            first, records = memory.split([head.nbytes, nbytes])
        tensors = head.tensors(first)
        self._base, self._steps, self._kept = (tensors[name] for name in ("base", "steps", "kept"))
        self._mirrors = tensors["mirrors"].split(layout.mirror.nbytes)
        self._records = [Record(layout, slot) for slot in records.split(layout.record.nbytes)]

    @staticmethod
    def nbytes_of(layout: ShardLayout, mirrors: int, slots: int) -> int:
        return _head(layout, mirrors, slots).nbytes + slots * layout.record.nbytes

    def begin(self, step: int, fill: Callable[[Tensor], Any]) -> None:
        """A new beginning: ``fill(mirror)`` writes the shard after ``step``, as `ShardLayout.read` does."""
        self._steps.fill_(-1)
        self._kept.fill_(-1)
        fill(self._mirrors[0])
        for mirror in self._mirrors[1:]:
            mirror.copy_(self._mirrors[0])
        self._base.fill_(step)
        self._steps.fill_(step)

    def record(self, step: int) -> Record:
        """The slot of a step's record. The record counts after `keep`."""
        return self._records[step % len(self._records)]

    def keep(self, step: int) -> None:
        self._kept[step % len(self._records)] = step

    @functools.cached_property
    def _rows(self) -> list[Any]:
        """Of each mirror."""
        return [self.layout.rows_over(mirror, self._optimizer) for mirror in self._mirrors]

    @property
    def base(self) -> int:
        """The step of the last `begin`."""
        return int(self._base)

    @property
    def step(self) -> int:
        """The step of the newest whole mirror; -1: there is none, a replay was cut short."""
        return int(self._steps.max())

    @property
    def newest(self) -> int:
        """The newest step that it can `advance` to."""
        kept, step = self._kept.tolist(), self.step
        while kept[(step + 1) % len(kept)] == step + 1:
            step += 1
        return step

    def advance(self, upto: int) -> None:
        """Replays the records up to a step, as far as there are any."""
        upto = min(upto, self.newest)
        for number, at in enumerate(self._steps.tolist()):
            for step in range(at + 1, upto + 1) if at >= 0 else ():
                self._steps[number] = -1
                self.record(step).replay(self._rows[number])
                self._steps[number] = step

    @property
    def shard(self) -> Tensor:
        """The mirror of `step`: a view."""
        return self._mirrors[int(self._steps.argmax())]


def _head(layout: ShardLayout, mirrors: int, slots: int) -> _Regions:
    words = [("base", "int64", 1), ("steps", "int64", mirrors), ("kept", "int64", slots)]
    return _Regions([*words, ("mirrors", "uint8", mirrors * layout.mirror.nbytes)])
