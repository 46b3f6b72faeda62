"""TensorShard: one rank's part of a tensor, in a form that torch.distributed.checkpoint saves and loads."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bucketwheel.checkpoint.boxes import Box, boxes_of
from bucketwheel.checkpoint.live import part_of
from bucketwheel.torch_internals import call_of_torch

if TYPE_CHECKING:  # it takes a second, and who calls the methods below has imported it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_aten = torch.ops.aten


class TensorShard(Tensor):
    """One rank's part of a tensor, as in ``optimizer.state_dict()``. `torch.distributed.checkpoint` saves and loads it.

    The ``shape``, ``stride()`` and ``dtype`` are those of the complete tensor; the values of the other ranks are not here. The
    stride defines the memory order of the elements. You can copy it, move it to another device, pickle it (and load it with
    ``weights_only=True``), and compare it by `torch.equal`. Operations that need all elements raise RuntimeError instead of
    using a part. All methods are local.

    Attributes:
        piece: The rank's elements one after another, 1-D, with memory of its own.
        ranges: The rank's elements as ``(begin, end)`` pairs in memory order, ascending; ``end`` is excluded.
        part: The rank, and the number of ranks.
        param_name: The name of the parameter, for messages."""

    piece: Tensor
    ranges: tuple[tuple[int, int], ...]
    part: tuple[int, int]
    param_name: str
    _stream: tuple[int, int, int] | None  # in which ``piece`` was written, on CUDA: its id, device and kind of device

    @staticmethod
    def __new__(
        cls,
        piece: Tensor,
        shape: Sequence[int],
        stride: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        part: tuple[int, int],
        param_name: str = "",
    ) -> TensorShard:
        owned = sum(end - begin for begin, end in ranges)
        if piece.shape != (owned,):
            raise ValueError(
                f"piece has shape {tuple(piece.shape)}, expected the {owned} elements of ranges {list(ranges)}"
            )
        make: Any = torch.Tensor._make_wrapper_subclass
        self: TensorShard = make(cls, tuple(shape), strides=tuple(stride), dtype=piece.dtype, device=piece.device)
        self.piece, self.param_name = piece, param_name
        self.ranges = tuple((int(begin), int(end)) for begin, end in ranges)
        self.part = (int(part[0]), int(part[1]))
        stream = torch.cuda.current_stream(piece.device) if piece.is_cuda else None
        self._stream = None if stream is None else (stream.stream_id, stream.device_index, stream.device_type)
        return self

    def _like(self, piece: Tensor) -> TensorShard:
        return TensorShard(piece, self.shape, self.stride(), self.ranges, self.part, self.param_name)

    @functools.cached_property
    def boxes(self) -> tuple[Box, ...]:
        # One rank must say that there is such a tensor if it has no elements.
        """The rank's elements as boxes of the complete tensor, each with ``offsets`` and ``sizes``."""
        ranges = ((0, 0),) if self.numel() == 0 and self.part[0] == 0 else self.ranges
        return boxes_of(self.shape, self.stride(), ranges)

    def view_of(self, box: Box) -> Tensor:
        """Returns the elements of one of `boxes`, in the shape of the box: a view of ``piece``. Local.

        Args:
            box: One of `boxes`."""
        return self.piece.as_strided(box.sizes, box.strides, self.piece.storage_offset() + box.begin)

    # --- torch.distributed.checkpoint --------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._expect_kept_by_writer(fqn)
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.shape)),
            )
            for i, (box, chunk) in enumerate(zip(self.boxes, self.__create_chunk_list__(), strict=True))
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offset = tuple(index.offset or ())
        for box in self.boxes:
            if box.offsets == offset:
                return self.view_of(box)
        raise ValueError(f"{index.fqn!r} has no box at {offset} on rank {self.part[0]}; it has {self.boxes}")

    def _expect_kept_by_writer(self, fqn: str) -> None:
        """RuntimeError for torch's `HuggingFaceStorageWriter` where it would lose something: it does not say so."""
        call = call_of_torch("_save_state_dict") or {}
        is_distributed = getattr(call.get("storage_writer"), "save_distributed", None)
        if is_distributed is None or (is_distributed and len(self.boxes) <= 1):
            return
        (rank, world), count = self.part, len(self.boxes)
        why = (
            f"keeps one box per tensor and rank, but rank {rank} has {count} of {fqn!r}: the others would be lost"
            if is_distributed
            else f"with save_distributed=False writes one file, but rank {rank} of {world} has a part of {fqn!r}"
        )
        raise RuntimeError(
            f"torch's HuggingFaceStorageWriter {why}. Use dcp.save with another writer, or save optimizer.full_state_dict()"
        )

    # --- what torch may do with it -----------------------------------------------------------------------------------

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self = args[0] if args and isinstance(args[0], TensorShard) else None
        packet = func.overloadpacket
        if self is not None:
            if packet in (_aten.detach, _aten.alias):
                return self._like(self.piece)
            if packet in (_aten.clone, _aten._to_copy, _aten._pin_memory):
                kwargs.pop("memory_format", None)
                return self._like(func(self.piece, *args[1:], **kwargs))
            if packet is _aten.is_pinned:
                return self.piece.is_pinned()
            if packet in (_aten.new_empty, _aten.empty_like, _aten.zeros_like) and (
                len(args) < 2 or tuple(args[1]) == self.shape
            ):
                if self.piece.is_cuda and self._stream is not None:
                    # torch's stager copies ``piece`` next, in a stream of its own, without this edge before it was written.
                    stream_id, index, kind = self._stream
                    written_in = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)
                    torch.cuda.current_stream(self.piece.device).wait_stream(written_in)
                kept = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "pin_memory")}
                make = torch.zeros_like if packet is _aten.zeros_like else torch.empty_like
                return self._like(make(self.piece, **kept))
            if packet is _aten.copy_:
                self._take(args[1])
                return self
            if packet is _aten.equal and isinstance(args[1], TensorShard):
                other = args[1]
                return (self.shape, self.ranges) == (other.shape, other.ranges) and torch.equal(self.piece, other.piece)
        elif packet is _aten.copy_ and args[0].dim() == 0 and call_of_torch("_copy_state_dict"):
            raise RuntimeError(
                "torch's FileSystemWriter does not stage a rank's part of a scalar correctly. Pass async_save "
                "async_stager=DefaultStager(StagingOptions(False, False, False, False)), or checkpoint_id without "
                "a writer"
            )
        next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, TensorShard))._refuse(func)

    def _take(self, other: Tensor) -> None:
        if isinstance(other, TensorShard):
            if (self.shape, self.ranges) != (other.shape, other.ranges):
                raise RuntimeError(f"copy_: {self!r} and {other!r} hold different elements")
            self.piece.copy_(other.piece)
            return
        if other.shape != self.shape:
            raise RuntimeError(f"copy_: {self!r} needs a tensor of its shape, got {tuple(other.shape)}")
        for box in self.boxes:
            self.view_of(box).copy_(part_of(other, box.offsets, box.sizes))

    def _refuse(self, func: Any) -> NoReturn:
        rank, world = self.part
        raise RuntimeError(
            f"{func} needs all of {self.param_name or 'a tensor'!r}, but this is rank {rank}'s part of {world}. Save "
            "and load it with bw.checkpoint or torch.distributed.checkpoint; optimizer.full_state_dict() gathers whole "
            "states that any torch optimizer loads. Do not wrap a model of bw.shard in DDP or FSDP"
        )

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("numpy()")

    def tolist(self) -> NoReturn:
        self._refuse("tolist()")

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        rank, world = self.part
        ranges = ", ".join(f"[{begin}, {end})" for begin, end in self.ranges) or "nothing"
        named = f"{self.param_name!r}, " if self.param_name else ""
        return f"TensorShard({named}{tuple(self.shape)}, {self.dtype}, rank {rank} of {world} has {ranges})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.part[1] > 1:
            warn_of_part(f"rank {self.part[0]}'s part of {self.part[1]}")
        return _reduced(self)


@dataclass(frozen=True)
class StoredState:
    """A state in a checkpoint, of which ``load`` writes this rank's part to where it lies."""

    shape: torch.Size
    load: Callable[[], None]


def _rebuild(*given: Any) -> TensorShard:
    return TensorShard(*given)


def _reduced(shard: TensorShard) -> Any:
    given = (shard.piece, tuple(shard.shape), tuple(shard.stride()), shard.ranges, shard.part, shard.param_name)
    return _rebuild, given


@functools.cache
def warn_of_part(part: str) -> None:
    """Once in a process, of one rank: a file that a framework writes of rank 0's `state_dict` has no other rank's part."""
    warnings.warn(
        f"the pickled state dict is {part}; unless each rank saves its own file, it cannot be loaded. Call "
        "bw.checkpoint.save(folder, model, optimizer) on all ranks. If a framework saves the optimizer, make it with "
        "full_state_dict=True (docs/frameworks.md, Checkpoints)",
        stacklevel=3,
    )


torch.serialization.add_safe_globals([_rebuild])
ForkingPickler.register(TensorShard, _reduced)  # to another process: torch's async_save by a process sends each rank's
