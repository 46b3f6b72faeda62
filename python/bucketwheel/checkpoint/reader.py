"""`Reader`: what `Writer` and stock's FileSystemWriter have written, checked before anything is loaded."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bucketwheel.checkpoint.format import METADATA, Description, Stored, describe, folder_of
from bucketwheel.checkpoint.writer import CHUNK_BYTES
from bucketwheel.device import buffer_of
from bucketwheel.errors import CheckpointError
from bucketwheel.native import core

__all__ = ["Reader"]

_MOST_FILES = 256  # open at a time: each rank has written one, and a process may often open 1024
_PIECE_BYTES = 256 << 10  # stays in the second-level cache between its read and its checksum


class Reader(StorageReader):
    """Where `torch.distributed.checkpoint.load` reads from: ``storage_reader=bw.checkpoint.Reader(path)``.

    Reads what `Writer` and torch's FileSystemWriter write, of torch 2.10 to 2.15. A damaged, cut off or foreign file is a
    `CheckpointError`; nothing that a file says is executed.

    Args:
        path: the checkpoint's folder.
        verify: when checksums are compared, of all that this rank reads. ``"before"``: before any rank loads anything, at
            the cost of reading twice. ``"reading"``: each chunk as it is read, so an error may leave some values loaded.
            ``"never"``. A checkpoint of another writer has none: its sizes and names are checked.
        weights_only: refuse objects, beside tensors, whose pickles name more than tensors and plain Python values
            (`torch.load`). False executes what the pickles say: only for a checkpoint that you trust.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: str = "before", weights_only: bool = True) -> None:
        super().__init__()
        if verify not in ("before", "reading", "never"):
            raise ValueError(f"verify is {verify!r}, expected one of 'before', 'reading', 'never'")
        self.path = folder_of(path)
        self.verify_when = verify
        self.weights_only = weights_only
        self._checks = verify == "reading"  # whether a read compares checksums now; see `load`
        self._description: Description | None = None
        self._files: dict[str, int] = {}  # open ones, by relative path, until close()
        self._staging = memoryview(b"")
        self._whole: tuple[MetadataIndex, torch.Tensor] | None = None  # the last box read of another writer

    # ---- the checkpoint

    @property
    def description(self) -> Description:
        """What the checkpoint says of itself, read at the first use. Raises `CheckpointError`."""
        if self._description is None:
            try:
                self._description = describe(self.path)
            except CheckpointError:  # a save may have ended between the metadata and a look at its files
                self._description = describe(self.path)
        return self._description

    def is_replaced(self) -> bool:
        """Whether a save into the folder has ended since `description` was read."""
        read, path = self._description, self.path / METADATA
        return read is not None and not (path.exists() and core.crc32c(path.read_bytes()) == read.crc)

    def close(self) -> None:
        """Close its files; a later read opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])
        self._whole = None

    def verify(self) -> int:
        """Read everything and compare checksums; returns the bytes compared. Local. `CheckpointError` for the first that
        differs."""
        compared = 0
        try:
            for index, stored in self.description.items.items():
                if stored.sums is not None:
                    compared += stored.length
                    self._check_item(index, stored, 0, stored.sums.nbytes)
        finally:
            self.close()
        return compared

    def read_object(self, fqn: str) -> Any:
        """An object that is no tensor; its checksums are compared unless ``verify`` is ``"never"``. Raises `CheckpointError`,
        also if its pickle names what ``weights_only`` refuses."""
        content = self._object_bytes(MetadataIndex(fqn))
        try:
            return torch.load(content, map_location="cpu", weights_only=self.weights_only)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            raise CheckpointError(
                f"{fqn!r} in {self.path} is more than tensors and plain values{f': {named[1]}' if named else ''}. Reader(..., "
                "weights_only=False) loads it, and executes what it says"
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
        """All ranks come here before any of them loads: an error of one stops all."""
        try:
            self.check(plan.items)
        finally:
            self.close()
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self.load(plan.items, planner)
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # ---- the same for `bucketwheel.checkpoint.load`, which calls them for each state and closes at its end

    def in_order(self, items: Iterable[ReadItem]) -> list[ReadItem]:
        """In the order in which they lie in the files, which disks read fastest."""

        def place(item: ReadItem) -> tuple[str, int]:
            stored = self._stored(item.storage_index)
            return stored.path, stored.offset

        return sorted(items, key=place)

    def check(self, items: Iterable[ReadItem]) -> None:
        """What is looked at before a load: `CheckpointError` for an item that is damaged or refused."""
        for item in self.in_order(items):
            stored = self._stored(item.storage_index)
            if item.type == LoadItemType.BYTE_IO:
                if self.weights_only:
                    self.read_object(item.storage_index.fqn)
                elif self.verify_when == "before":
                    self._object_bytes(item.storage_index)
            elif stored.sums is None:
                self._foreign_box(item.storage_index)
            elif self.verify_when == "before":
                self._check_item(item.storage_index, stored, *self._needed(item))

    def load(self, items: Iterable[ReadItem], planner: LoadPlanner, *, checks: bool = False) -> None:
        """Reads items to where ``planner`` wants them. ``checks``: compare checksums on the way, whatever ``verify`` is."""
        before, self._checks = self._checks, self._checks or checks
        try:
            for item in self.in_order(items):
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._object_bytes(item.storage_index))
                    continue
                target = planner.resolve_tensor(item).detach()
                self._load(item, target)
                planner.commit_tensor(item, target)
                if self._checks and (stored := self._stored(item.storage_index)).sums is not None:
                    self._check_item(item.storage_index, stored, 0, 0)  # what lies around its data
        finally:
            self._checks = before

    # ---- inside

    def _stored(self, index: MetadataIndex) -> Stored:
        try:
            return self.description.items[index]
        except KeyError:
            raise CheckpointError(f"{self.path} has no {index.fqn!r} at {index.offset}") from None

    def _box(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        entry = self.description.metadata.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{index.fqn!r} in {self.path} is no tensor")
        hint = index.index
        if hint is None or hint >= len(entry.chunks) or entry.chunks[hint].offsets != index.offset:
            hint = next(i for i, chunk in enumerate(entry.chunks) if chunk.offsets == index.offset)
        return entry.properties.dtype, entry.chunks[hint].sizes

    def _needed(self, item: ReadItem) -> tuple[int, int]:
        """The bytes of the box from the first to the last element that is read."""
        dtype, sizes = self._box(item.storage_index)
        if 0 in item.lengths:
            return 0, 0
        first = last = 0
        for size, offset, length in zip(sizes, item.storage_offsets, item.lengths, strict=True):
            first, last = first * size + offset, last * size + offset + length - 1
        return first * dtype.itemsize, (last + 1) * dtype.itemsize

    def _load(self, item: ReadItem, target: torch.Tensor) -> None:
        dtype, sizes = self._box(item.storage_index)
        if target.shape != item.lengths:
            raise CheckpointError(f"{item.storage_index.fqn!r}: {tuple(item.lengths)} into {tuple(target.shape)}")
        if sizes:
            self._load_rows(item.storage_index, dtype, 0, sizes, item.storage_offsets, target)
        else:
            self._load_rows(item.storage_index, dtype, 0, (1,), (0,), target.view(1))

    def _load_rows(
        self, index: MetadataIndex, dtype: torch.dtype, begin: int, sizes: Any, offsets: Any, target: torch.Tensor
    ) -> None:
        """The part of a box, or of a row of it, from ``offsets`` on into ``target``; it begins at element ``begin``."""
        if target.numel() == 0:
            return
        row = torch.Size(sizes[1:]).numel()
        first = begin + offsets[0] * row
        has_whole_rows = target.shape[1:] == sizes[1:] and target.is_contiguous()
        has_bits = target.dtype == dtype and not (target.is_conj() or target.is_neg())
        if has_whole_rows and has_bits and target.is_cpu:
            self._read_box(index, first * dtype.itemsize, buffer_of(target))
            torch.autograd.graph.increment_version(target)  # torch does not see this write
            return
        rows = (self.description.chunk_bytes or CHUNK_BYTES) // (row * dtype.itemsize)
        if rows == 0 and len(sizes) > 1:
            for i, part in enumerate(target):
                self._load_rows(index, dtype, first + i * row, sizes[1:], offsets[1:], part)
            return
        rows = max(rows, 1)
        for at in range(0, len(target), rows):
            part = target[at : at + rows]
            staged = torch.empty(len(part), *sizes[1:], dtype=dtype, device="cpu")
            self._read_box(index, (first + at * row) * dtype.itemsize, buffer_of(staged))
            for dimension, (offset, length) in enumerate(zip(offsets[1:], part.shape[1:], strict=True), 1):
                staged = staged.narrow(dimension, offset, length)
            part.copy_(staged)

    def _read_box(self, index: MetadataIndex, begin: int, out: memoryview) -> None:
        """Bytes [begin, begin + len(out)) of a box's data, in row-major order."""
        stored = self._stored(index)
        if stored.sums is None:
            out[:] = buffer_of(self._foreign_box(index))[begin : begin + len(out)]
        elif self._checks:
            self._check_data(index, stored, begin, begin + len(out), out)
        else:
            self._read(stored, stored.sums.begin + begin, out)

    def _check_data(
        self, index: MetadataIndex, stored: Stored, begin: int, end: int, out: memoryview | None = None
    ) -> None:
        """Reads the chunks that hold bytes [begin, end) of a box, those bytes into ``out``, and compares checksums."""
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
        self._check_data(index, stored, begin, end)
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
            f"{self.path / stored.path} is damaged: the checksum of {index.fqn!r} at {index.offset} differs {where} "
            "from what was written"
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
                    raise CheckpointError(
                        f"{self.path / path} ends at byte {position}: it was cut off while it was read"
                    )
                position, out = position + got, out[got:]
        except OSError as error:
            raise CheckpointError(f"{self.path / path} cannot be read: {error}") from error

    def _object_bytes(self, index: MetadataIndex) -> BytesIO:
        stored = self._stored(index)
        content = BytesIO()
        if stored.length:  # made of its length in place: it may be large
            content.seek(stored.length - 1)
            content.write(b"\0")
            content.seek(0)
        with content.getbuffer() as memory:
            if stored.sums is not None and self.verify_when != "never":
                self._check_data(index, stored, 0, stored.length, memory)
            else:
                self._read(stored, 0, memory)
        return content

    def _foreign_box(self, index: MetadataIndex) -> torch.Tensor:
        """A box of another writer, loaded whole."""
        if self._whole is None or self._whole[0] != index:
            at = f"{index.fqn!r} at {index.offset} in {self.path}"
            content = self._object_bytes(index)
            try:
                tensor = torch.load(content, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged one may raise anything
                raise CheckpointError(f"{at} cannot be loaded: {error}") from error
            dtype, sizes = self._box(index)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.shape != sizes:
                raise CheckpointError(f"{at} is not a {dtype} of {tuple(sizes)}")
            self._whole = index, tensor.resolve_conj().resolve_neg().contiguous()
        return self._whole[1]
