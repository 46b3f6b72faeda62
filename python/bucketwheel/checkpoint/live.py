"""Live boxes: a parameter's part on this rank, and its states, as boxes of its shape: views of the memory that training uses.

Saves read them and loads write to them, so that neither holds a copy of the states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bucketwheel.checkpoint.boxes import Box, boxes_of
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.leased_params import LeasedParams
from bucketwheel.layout.masters import join_master
from bucketwheel.layout.shard_memory import ShardMemory

PARAM = "param"  # beside the names of the states


class Engine(Protocol):
    """What a checkpoint asks of an optimizer's engine; see `ShardedEngine`."""

    infos: list[ParamInfo]
    steps: Tensor
    write_observers: list[Any]
    step_observers: list[Any]

    @property
    def states(self) -> list[dict[str, Tensor]]: ...
    @property
    def part(self) -> tuple[int, int]: ...
    @property
    def ranks(self) -> tuple[int, int]: ...
    @property
    def are_threads(self) -> bool: ...
    @property
    def timeout_s(self) -> float: ...
    def owned_ranges(self, index: int) -> list[tuple[int, int]]: ...
    def value_parts(self, index: int) -> list[Tensor]: ...
    def shard_memory(self) -> ShardMemory: ...
    def write_order(self) -> list[int]: ...
    def param_sync(self) -> None: ...
    def bind_moved(self) -> None: ...
    def share_params(self) -> None: ...
    def announce_write(self, indices: Collection[int] | None = None) -> None: ...
    def expect_loaded_model(self) -> None: ...
    def exchange(self, said: bytes) -> list[bytes]: ...
    def expect_done_by_all(self, what: str, error: Exception | None) -> None: ...


class ShardedOptimizer(Protocol):
    """What a checkpoint asks of an optimizer: a `ShardedAdamW`."""

    param_groups: list[dict[str, Any]]

    @property
    def _engine(self) -> Engine: ...
    def _follow_groups(self) -> None: ...
    def _follow_state(self) -> None: ...
    def _waiting_states(self) -> dict[Tensor, dict[str, Any]]: ...
    def _load(
        self, what: str, find: Callable[[], dict[str, Any]], load_model: Callable[[], None] | None = None
    ) -> None: ...
    def _host_rows(self, *args: Any, **options: Any) -> Any: ...  # of `AdamRows`, which step a copy in host memory


def engine_of(optimizer: ShardedOptimizer | None) -> Engine | None:
    """Of a `ShardedAdamW`, or None of None. TypeError for another optimizer."""
    if optimizer is not None and not hasattr(optimizer, "_engine"):
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}, expected a ShardedAdamW (others: use torch.distributed.checkpoint)"
        )
    return None if optimizer is None else optimizer._engine


def exchange(engine: Engine, mine: Any) -> list[Any]:
    """The JSON values of all ranks of an optimizer. Collective."""
    return [json.loads(said) for said in engine.exchange(json.dumps(mine).encode())]


def live_boxes(engine: Engine, info: ParamInfo) -> list[tuple[Box, dict[str, Tensor]]]:
    """The boxes that this rank owns of a parameter, each with views of its sizes: of the parameter (`PARAM`) and of each
    state. Together, the ranks that states are sharded over have each element once."""
    shape, states = info.param.shape, engine.states[info.index]
    parts, ranges = engine.value_parts(info.index), engine.owned_ranges(info.index)
    if info.param.numel() == 0:  # one rank must say that there is such a tensor
        nothing = torch.empty(0, dtype=info.dtype, device=info.device)
        parts, ranges = ([nothing], [(0, 0)]) if engine.part[0] == 0 else ([], [])
    flat = {name: state.as_strided((state.numel(),), (1,)) for name, state in states.items()}
    found = []
    at = 0
    for values, (begin, end) in zip(parts, ranges, strict=True):
        for box in boxes_of(shape, info.stride, [(begin, end)]):
            views = {name: _view(state, box, at) for name, state in flat.items()}
            found.append((box, {PARAM: _view(values, box, 0), **views}))
        at += end - begin
    return found


def sharded_boxes(param: Tensor, home: LeasedParams) -> list[tuple[Box, Tensor]]:
    """The boxes that this rank owns of a sharded parameter that no optimizer trains, each with a view of the values."""
    packed = home.packed_of(param)
    values = home.parts_of(packed, home.masters)
    ranges = home.packing.ranges(packed, home.rank)
    if param.numel() == 0 and home.rank == 0:
        ranges = [(0, 0)]
    found, at = [], 0
    for begin, end in ranges:
        found += [
            (box, _view(values, box, at)) for box in boxes_of(param.shape, home.infos[packed].stride, [(begin, end)])
        ]
        at += end - begin
    return found


def _view(flat: Tensor, box: Box, at: int) -> Tensor:
    """The box of a range whose elements begin at ``at``."""
    return flat.as_strided(box.sizes, box.strides, flat.storage_offset() + at + box.begin)


def part_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of the box of ``sizes`` that begins at ``offsets``."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def parts_of(views: Mapping[str, Tensor], name: str) -> tuple[Tensor, ...]:
    """What a state is made of, as it is saved: itself, or the parameter and the remainder of its master."""
    if name == "master_param" and "remainder" in views:
        return views[PARAM], views["remainder"]
    return (views[name],)


def value_of(views: Sequence[Tensor]) -> Tensor:
    """What `parts_of` stands for."""
    return views[0] if len(views) == 1 else join_master(*views)


def split_views(views: Sequence[Tensor], most: int) -> Iterator[tuple[Tensor, ...]]:
    """Cuts views of one shape into parts of at most ``most`` elements (at least one), in row-major order."""
    first = views[0]
    if first.numel() <= most or first.numel() <= 1:
        yield tuple(views)
        return
    if all(view.is_contiguous() for view in views):
        yield from zip(*(view.view(-1).split(max(most, 1)) for view in views), strict=True)
        return
    rows = most // (first.numel() // len(first))
    blocks = (view.split(rows) if rows else view.unbind() for view in views)
    for block in zip(*blocks, strict=True):
        yield from [block] if rows else split_views(block, most)
