"""Reader: reads checkpoints of `Writer` and of torch's FileSystemWriter, and checks them before anything is loaded."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bucketwheel.checkpoint.format import METADATA, Description, Stored, describe, folder_of
from bucketwheel.checkpoint.live import part_of
from bucketwheel.device import buffer_of
from bucketwheel.errors import CheckpointError
from bucketwheel.native import core

_MOST_FILES = 256  # open at a time: each rank has written one, and a process may often open 1024
_PIECE_BYTES = 256 << 10  # stays in the second-level cache between its read and its checksum


class Reader(StorageReader):
    """A storage reader for ``torch.distributed.checkpoint`` that checks all data before anything is loaded.

    Pass it to ``load`` as ``storage_reader=bw.checkpoint.Reader(path)``. It reads checkpoints of `Writer`, of
    `bucketwheel.checkpoint.save`, and of torch's `FileSystemWriter` (torch 2.10 to 2.15). Before any rank loads, each rank
    compares the checksums of all data that it reads, so it reads the data twice. Checkpoints of other writers have no
    checksums; their names and sizes are checked. A damaged, truncated or foreign file raises `CheckpointError`. Loading
    executes no code from the files: objects other than tensors load as by ``torch.load(weights_only=True)``. The constructor
    and all methods below are local.

    Args:
        path: The folder of the checkpoint."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = folder_of(path)
        self._description: Description | None = None
        self._files: dict[str, int] = {}  # open ones, by relative path, until close()
        self._staging = memoryview(b"")
        self._whole: tuple[MetadataIndex, torch.Tensor] | None = None  # the last box read of another writer

    # ---- the checkpoint

    @property
    def description(self) -> Description:
        """The checkpoint's metadata, read at the first use.

        Raises:
            CheckpointError: The folder has no checkpoint, or a damaged one."""
        if self._description is None:
            try:
                self._description = describe(self.path)
            except CheckpointError:  # a save may have ended between the metadata and a look at its files
                self._description = describe(self.path)
        return self._description

    def is_replaced(self) -> bool:
        """Returns whether a save into the folder has ended since `description` was read."""
        read, path = self._description, self.path / METADATA
        return read is not None and not (path.exists() and core.crc32c(path.read_bytes()) == read.crc)

    def close(self) -> None:
        """Closes the files of the checkpoint. A later read opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])
        self._whole = None

    def verify(self) -> int:
        """Reads all data and compares the checksums. Returns the number of bytes that were compared.

        Raises:
            CheckpointError: The first checksum that differs."""
        compared = 0
        try:
            for index, stored in self.description.items.items():
                if stored.sums is not None:
                    compared += stored.length
                    self._check_item(index, stored, 0, stored.sums.nbytes)
        finally:
            self.close()
        return compared

    def read_object(self, fqn: str, offset: torch.Size | None = None) -> Any:
        """Returns an object that is not a tensor, or a tensor's box of a checkpoint of another writer. Compares its checksums.

        Args:
            fqn: The name in the checkpoint.
            offset: The offset of the box; None for an object.

        Raises:
            CheckpointError: The data is damaged, or has a type that ``torch.load(weights_only=True)`` refuses."""
        content = self._object_bytes(MetadataIndex(fqn, offset))
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{fqn!r} in {self.path} is not made of tensors and plain values{f': {named[1]}' if named else ''}. "
                "torch's FileSystemReader loads it, but runs the code that the file names"
            ) from error
        except Exception as error:  # a damaged one may raise anything
            raise CheckpointError(f"{fqn!r} in {self.path} cannot be loaded: {error}") from error

    # ---- stock's protocol

    @property
    def checkpoint_id(self) -> Path:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        self._description = None
        if checkpoint_id is not None:
            self.path = folder_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        return self.description.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks all items of the plan. All ranks call it before any rank loads, so an error on one rank stops all."""
        try:
            for item in sorted(plan.items, key=self.place):
                self.check(item)
        finally:
            self.close()
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            for item in sorted(plan.items, key=self.place):
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._object_bytes(item.storage_index))
                    continue
                target = planner.resolve_tensor(item).detach()
                self.read(item, target)
                planner.commit_tensor(item, target)
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # ---- item by item: for the above, and for `bucketwheel.checkpoint.load`, which closes at its end

    def place(self, item: ReadItem) -> tuple[str, int]:
        """Returns the file and the offset of an item. Disks read items fastest in this order."""
        stored = self._stored(item.storage_index)
        return stored.path, stored.offset

    def check(self, item: ReadItem) -> None:
        """Checks an item before a load.

        Raises:
            CheckpointError: The item is damaged, or has a type that is refused."""
        index, stored = item.storage_index, self._stored(item.storage_index)
        if item.type == LoadItemType.BYTE_IO:
            self.read_object(index.fqn)
        elif stored.sums is None:
            self._foreign_box(index)
        else:
            dtype, sizes = self._box(index)
            first, last = _span(sizes, item.storage_offsets, item.lengths)
            self._check_item(index, stored, first * dtype.itemsize, last * dtype.itemsize)

    def read(self, item: ReadItem, target: torch.Tensor, *, checks: bool = False) -> None:
        """Reads a part of a box into a tensor.

        Args:
            item: The part to read.
            target: The tensor, of the shape of the part and of any dtype.
            checks: Compare checksums while reading.

        Raises:
            CheckpointError: The shape differs, or the data is damaged."""
        index, stored = item.storage_index, self._stored(item.storage_index)
        if target.shape != item.lengths:
            raise CheckpointError(f"{index.fqn!r}: shape {tuple(item.lengths)} does not fit {tuple(target.shape)}")
        dtype, sizes = self._box(index)
        first, last = _span(sizes, item.storage_offsets, item.lengths)
        is_plain = target.is_cpu and target.is_contiguous() and not (target.is_conj() or target.is_neg())
        if stored.sums is None:
            target.copy_(part_of(self._foreign_box(index), item.storage_offsets, item.lengths))
        elif is_plain and target.dtype == dtype and last - first == target.numel():
            self._read_data(index, stored, first * dtype.itemsize, last * dtype.itemsize, buffer_of(target), checks)
            torch.autograd.graph.increment_version(target)  # torch does not see this write
        else:
            strides = [sizes[dim + 1 :].numel() for dim in range(len(sizes))]
            for begin, lengths in pieces_of(item.lengths, strides, self.description.chunk_bytes // dtype.itemsize):
                offsets = [at + more for at, more in zip(item.storage_offsets, begin, strict=True)]
                first, last = _span(sizes, offsets, lengths)
                staged = torch.empty(last - first, dtype=dtype, device="cpu")
                self._read_data(index, stored, first * dtype.itemsize, last * dtype.itemsize, buffer_of(staged), checks)
                part_of(target, begin, lengths).copy_(staged.as_strided(lengths, strides))
        if checks and stored.sums is not None:
            self._check_item(index, stored, 0, 0)  # what lies around its data

    # ---- inside

    def _stored(self, index: MetadataIndex) -> Stored:
        try:
            return self.description.items[index]
        except KeyError:
            raise CheckpointError(f"{self.path} has no {index.fqn!r} at {index.offset}") from None

    def _box(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        entry = self.description.metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunks = entry.chunks[index.index or 0 :] + entry.chunks  # its number is a hint
        return entry.properties.dtype, next(chunk.sizes for chunk in chunks if chunk.offsets == index.offset)

    def _read_data(
        self, index: MetadataIndex, stored: Stored, begin: int, end: int, out: memoryview | None, checks: bool = True
    ) -> None:
        """Bytes [begin, end) of a box's data, in row-major order, into ``out``. ``checks``: reads all of the chunks that hold
        them, and compares checksums."""
        if not checks and out is not None and stored.sums is not None:
            self._read(stored, stored.sums.begin + begin, out)
            return
        assert stored.sums is not None
        chunk_bytes = self.description.chunk_bytes
        for at in range(begin // chunk_bytes * chunk_bytes, end, chunk_bytes):
            size = min(chunk_bytes, stored.sums.nbytes - at)
            first, last = max(at, begin), min(at + size, end)
            target = None if out is None else out[first - begin : last - begin]
            chunk = target if target is not None and len(target) == size else self._stage(size)
            crc = self._read_summed(stored, stored.sums.begin + at, chunk)
            if crc != int.from_bytes(stored.sums.chunks[4 * (at // chunk_bytes) :][:4], "little"):
                raise CheckpointError(self._damaged(index, stored, f"in bytes {at} to {at + size} of its data"))
            if target is not None and chunk is not target:
                target[:] = chunk[first - at : last - at]

    def _check_item(self, index: MetadataIndex, stored: Stored, begin: int, end: int) -> None:
        """What lies around its data, and the chunks that hold bytes [begin, end) of that; read in their order."""
        assert stored.sums is not None
        after = stored.sums.begin + stored.sums.nbytes
        crc = self._read_summed(stored, 0, self._stage(stored.sums.begin))
        self._read_data(index, stored, begin, end, None)
        if self._read_summed(stored, after, self._stage(stored.length - after), crc) != stored.sums.envelope:
            raise CheckpointError(self._damaged(index, stored, "around its data"))

    def _read_summed(self, stored: Stored, at: int, out: memoryview, crc: int = 0) -> int:
        """``out`` from byte ``at`` of an item on; returns ``crc``, continued over it."""
        for piece in range(0, len(out), _PIECE_BYTES):
            part = out[piece : piece + _PIECE_BYTES]
            self._read(stored, at + piece, part)
            crc = core.crc32c(part, crc)
        return crc

    def _damaged(self, index: MetadataIndex, stored: Stored, where: str) -> str:
        return (
            f"{self.path / stored.path} is damaged: the bytes of {index.fqn!r} at {index.offset} do not match "
            f"their checksum {where}"
        )

    def _stage(self, size: int) -> memoryview:
        if len(self._staging) < size:
            self._staging = memoryview(bytearray(size))
        return self._staging[:size]

    def _read(self, stored: Stored, at: int, out: memoryview) -> None:
        """``out`` from byte ``at`` of an item on."""
        path, position = stored.path, stored.offset + at
        try:
            if path not in self._files:
                if len(self._files) == _MOST_FILES:
                    self.close()
                self._files[path] = os.open(self.path / path, os.O_RDONLY)
            while out:
                got = os.preadv(self._files[path], [out], position)
                if got == 0:
                    raise CheckpointError(f"{self.path / path} ends at byte {position}: the file was truncated")
                position, out = position + got, out[got:]
        except OSError as error:
            raise CheckpointError(f"{self.path / path} cannot be read: {error}") from error

    def _object_bytes(self, index: MetadataIndex) -> BytesIO:
        stored = self._stored(index)
        content = bytearray(stored.length)
        if stored.sums is None:
            self._read(stored, 0, memoryview(content))
        else:
            self._read_data(index, stored, 0, stored.length, memoryview(content))
        return BytesIO(content)

    def _foreign_box(self, index: MetadataIndex) -> torch.Tensor:
        """A box of another writer, loaded whole."""
        if self._whole is None or self._whole[0] != index:
            tensor = self.read_object(index.fqn, index.offset)
            dtype, sizes = self._box(index)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.shape != sizes:
                raise CheckpointError(f"{index.fqn!r} at {index.offset} in {self.path} is not {dtype} {tuple(sizes)}")
            self._whole = index, tensor.resolve_conj().resolve_neg()
        return self._whole[1]


def pieces_of(sizes: Sequence[int], strides: Sequence[int], most: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """(offsets, sizes) of the pieces of a box whose elements lie ``strides`` apart, row-major: each spans ``most`` elements,
    or is one."""
    if 0 in sizes:
        return
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if span <= most or dim is None:
        yield [0] * len(sizes), sizes
        return
    step = max(most // strides[dim], 1)
    for at in range(0, sizes[dim], step):
        taken = [*sizes[:dim], min(step, sizes[dim] - at), *sizes[dim + 1 :]]
        for offsets, inner in pieces_of(taken, strides, most):
            yield [*offsets[:dim], at + offsets[dim], *offsets[dim + 1 :]], inner


def _span(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The elements of a box from the first to the last of a part of it."""
    if 0 in lengths:
        return 0, 0
    first = last = 0
    for size, offset, length in zip(sizes, offsets, lengths, strict=True):
        first, last = first * size + offset, last * size + offset + length - 1
    return first, last + 1
