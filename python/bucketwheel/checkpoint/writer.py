"""Writer: a storage writer for torch.distributed.checkpoint with checksums, one file per rank, and a commit by rename.

[Note: the commit]
Ranks write into ``DIR/.saving``, one file each, and fsync it. The coordinator then renames the folder to ``DIR/data-<id>`` and
replaces ``DIR/.metadata``, which names that folder, by a rename. Before this rename the earlier checkpoint is complete and loads;
after it the new one is. Then the coordinator removes folders of earlier checkpoints. The next save removes the files that a
crash leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from bucketwheel import torch_internals
from bucketwheel.checkpoint.format import ATTRIBUTE, METADATA, VERSION, Stored, Sums, folder_of, packed, packed_sums
from bucketwheel.checkpoint.live import split_views
from bucketwheel.checkpoint.on_disk import sync_path
from bucketwheel.checkpoint.staging import LiveTensor
from bucketwheel.device import buffer_of
from bucketwheel.errors import CheckpointError, expect_int
from bucketwheel.native import core

CHUNK_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20
SAVING = ".saving"

_PAGE = 4096  # where a write past the page cache begins and ends, of any disk and file system
_SECTOR = 512  # where its memory begins
_IN_PLACE_BYTES = 1 << 18  # what is smaller is copied: a write has its own cost

_O_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


def _address(memory: memoryview) -> int:
    """Of writable memory of at least one byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Recorder(BytesIO):
    """A file that torch.save writes to, without the one hole that it leaves for data."""

    hole: int | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        self.hole = self.tell()
        return self.hole


@functools.lru_cache(maxsize=4096)
def envelope_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What torch.save writes before and behind the bytes of a contiguous tensor. No memory of its size is touched."""
    storage = torch.UntypedStorage(torch.Size(sizes).numel() * dtype.itemsize, device="cpu")
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, sizes)  # type: ignore[call-overload]
    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(tensor, recorder)
    content, hole = recorder.getvalue(), recorder.hole
    return content[:hole], b"" if hole is None else content[hole:]


class DataFile:
    """One rank's file of a save in progress. From one thread at a time, any thread; local.

    [Note: past the page cache]
    With O_DIRECT the disk reads from the memory that is written, where the page cache copies it, keeps it and frees it
    again. That costs a fraction of the processor's time, which training has. It takes whole pages of the file, and memory
    that begins like a sector. So large data begins on a page of the file, behind a gap, and is written from where it lies if
    that does; all else is copied into one buffer, which is written when it is full. The end goes through the page cache;
    so does the rest where the file system, or the disk, refuses.

    Holds the buffer, and one chunk of data that is not contiguous or not on the CPU.
    """

    def __init__(
        self, path: Path, *, chunk_bytes: int = CHUNK_BYTES, buffer_bytes: int = BUFFER_BYTES, sync: bool = True
    ) -> None:
        self.path = path
        self.chunk_bytes = chunk_bytes
        self.sync = sync
        self.size = 0  # with what is in the buffer
        self.on_write: Callable[[], None] = lambda: None  # called as often as data is written
        self._file = open(path, "xb", buffering=0)
        self._is_direct = False
        self._set_direct(sync)  # who does not wait for the disk has the page cache write later
        self._buffer = memoryview(mmap.mmap(-1, buffer_bytes))  # begins on a page, and has memory where it was used
        self._filled = 0  # of the buffer
        self._staging: torch.Tensor | None = None  # made for the first data that cannot be written from where it lies

    def add(self, index: MetadataIndex, data: torch.Tensor | LiveTensor | BytesIO) -> WriteResult:
        """Write one box of a tensor, or the bytes of another object.

        Raises `TypeError` for a tensor without strided memory, `OSError` if the disk is full.
        """
        before, behind, gap = b"", b"", 0
        views: Iterable[memoryview]
        if isinstance(data, BytesIO):
            views = [data.getbuffer()]
        else:
            before, behind = envelope_of(data.dtype, tuple(data.shape))
            pieces = self._pieces(data) if isinstance(data, torch.Tensor) else data.chunks()
            views = (buffer_of(piece) for piece in pieces)
            if data.shape.numel() * data.dtype.itemsize >= _IN_PLACE_BYTES:
                gap = -(self.size + len(before)) % _PAGE
        self._write(memoryview(bytes(gap) + before))
        nbytes = 0
        sums: list[int] = []  # of each chunk
        for view in views:
            left = view
            while left:
                at = nbytes % self.chunk_bytes
                part = left[: self.chunk_bytes - at]
                sums.append(core.crc32c(part, sums.pop() if at else 0))
                nbytes, left = nbytes + len(part), left[len(part) :]
            self._write(view)
        self._write(memoryview(behind))
        length = len(before) + nbytes + len(behind)
        envelope = core.crc32c(behind, core.crc32c(before))
        chunks = b"".join(one.to_bytes(4, "little") for one in sums)
        stored = Stored(self.path.name, self.size - length, length, Sums(len(before), nbytes, envelope, chunks))
        return WriteResult(index=index, size_in_bytes=length, storage_data=stored)

    def close(self) -> None:
        """The file is on disk when this returns, if ``sync``. No item names a file without data, so that is removed."""
        self._set_direct(False)
        self._put(self._buffer[: self._filled])
        if self.sync:
            os.fsync(self._file.fileno())
        self._file.close()
        self._buffer = memoryview(b"")
        if not self.size:
            self.path.unlink()

    def discard(self) -> None:
        """Remove it, and write no more: the save has failed. No error: the disk may be full, the file gone."""
        self._buffer = memoryview(b"")
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.truncate(self.path, 0)  # a process that was forked meanwhile has it open still
            self.path.unlink()

    def _write(self, data: memoryview) -> None:
        """Of writable memory. Without O_DIRECT all that is large goes from where it lies."""
        self.size += len(data)
        if len(data) >= _IN_PLACE_BYTES:
            is_aligned = _address(data) % _SECTOR == 0 and self._filled % _PAGE == 0
            whole = len(data) // _PAGE * _PAGE if is_aligned or not self._is_direct else 0
            if whole:
                self._put(self._buffer[: self._filled], data[:whole])
                self._filled, data = 0, data[whole:]
        while data:
            part = data[: len(self._buffer) - self._filled]
            end = self._filled + len(part)
            if len(part) < _IN_PLACE_BYTES:
                self._buffer[self._filled : end] = part
            else:  # the same without the GIL
                ctypes.memmove(_address(self._buffer) + self._filled, _address(part), len(part))
            self._filled, data = end, data[len(part) :]
            if self._filled == len(self._buffer):
                self._put(self._buffer)
                self._filled = 0

    def _put(self, *parts: memoryview) -> None:
        self.on_write()
        left = list(parts)
        while left:
            try:
                written = os.writev(self._file.fileno(), left)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EFAULT) or not self._is_direct:
                    raise
                self._set_direct(False)  # the file system, the disk or a device's driver (EFAULT) allows no such write
                continue
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_O_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (_O_DIRECT if is_direct else 0))
        except OSError:  # of a file system without it
            is_direct = False
        self._is_direct = is_direct and _O_DIRECT != 0

    def _pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(f"a tensor of {tensor.layout}, {tensor.device} and {tensor.dtype} has no bytes to save")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.is_cpu and tensor.is_contiguous():
            yield from tensor.view(-1).split(BUFFER_BYTES // tensor.itemsize)
            return
        if self._staging is None:
            self._staging = torch.empty(self.chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=tensor.is_cuda)
        for (part,) in split_views([tensor], self.chunk_bytes // tensor.itemsize):
            staged = self._staging[: part.nbytes]
            staged.view(part.dtype).view(part.shape).copy_(part)
            yield staged


def start(folder: Path) -> None:
    """Make ``folder/.saving`` anew, empty: one rank does, before any makes its `DataFile` there."""
    folder.mkdir(parents=True, exist_ok=True)
    saving = folder / SAVING
    if saving.exists():  # renamed first: a rank of an earlier job that still writes does not write among ours
        saving.rename(folder / f".discarded-{uuid.uuid4().hex[:12]}")
    for left in folder.glob(".discarded-*"):
        shutil.rmtree(left, ignore_errors=True)
    saving.mkdir()


def publish(
    folder: Path, metadata: Metadata, results: Sequence[Sequence[WriteResult]], *, chunk_bytes: int, sync: bool = True
) -> Callable[[], None]:
    """[Note: the commit] One rank does, once the files of all are closed; ``results`` by rank. Local.

    Raises `CheckpointError` if the files are not what the ranks have written. After an error before the commit all files are
    in ``.saving``. Returns what removes the data of earlier checkpoints.
    """
    ends: dict[str, int] = {}
    for result in (one for of_rank in results for one in of_rank):
        stored = result.storage_data
        ends[stored.path] = max(ends.get(stored.path, 0), stored.offset + stored.length)
    saving = folder / SAVING
    save_id = uuid.uuid4().hex[:12]
    data = f"data-{save_id}"
    by_index = {result.index: result.storage_data for of_rank in results for result in of_rank}
    metadata.storage_data = {
        index: torch_internals.storage_info(f"{data}/{stored.path}", stored.offset, stored.length)
        for index, stored in by_index.items()
    }
    metadata.storage_meta = StorageMeta(save_id=save_id)
    metadata.version = "1.0.0"  # of stock's format
    facts = {
        "version": VERSION,
        "world": len(results),
        "chunk_bytes": chunk_bytes,
        "files": {f"{data}/{name}": size for name, size in ends.items()},
        "sums": packed_sums(stored.sums for stored in by_index.values()),
    }
    setattr(metadata, ATTRIBUTE, facts)
    flush = sync_path if sync else lambda path: None
    flush(saving)
    saving.rename(folder / data)
    temporary = folder / f"{METADATA}.tmp"
    try:
        # Here: a rank that fails takes its file away until the folder has another name.
        found = {path.name: stat_of(path).st_size for path in (folder / data).iterdir()}
        if found != ends:
            raise CheckpointError(
                f"{saving} has files of {found} bytes, but this save wrote {ends}: another save may write there"
            )
        flush(folder)
        temporary.write_bytes(packed(metadata))
        flush(temporary)
        temporary.replace(folder / METADATA)
    except BaseException:
        there = folder / METADATA
        # Else it has been committed, whatever an interrupted rename says.
        if not there.exists() or data.encode() not in there.read_bytes():
            (folder / data).rename(saving)  # each rank removes its file there
        raise
    flush(folder)

    def remove_earlier() -> None:
        for path in folder.iterdir():
            if re.fullmatch("data-[0-9a-f]{12}", path.name) and path.name != data:
                shutil.rmtree(path, ignore_errors=True)

    return remove_earlier


def stat_of(path: Path) -> os.stat_result:
    """As the file is now: NFS asks the server at an open, and what `os.stat` says may be a minute old."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno())


class Writer(StorageWriter):
    """A storage writer for ``torch.distributed.checkpoint`` with checksums. Each rank writes one file.

    Pass it to ``save`` or ``async_save`` as ``storage_writer=bw.checkpoint.Writer(path)``. The format is torch's, which
    `FileSystemReader` reads, with a CRC32C of all bytes. The folder is on a file system that all ranks share. It may have an
    earlier checkpoint, which stays complete until the new one is. The constructor is local.

    Args:
        path: The folder of the checkpoint.
        chunk_bytes: Number of bytes that have one checksum and are written at a time; 1 MiB by default, at least 4096. A load
            reads whole chunks.
        sync: Wait until all data is on disk. If False, a crash of the machine (not of the job) may lose the checkpoint.

    Raises:
        ValueError: ``chunk_bytes`` is below 4096. ``save`` raises it for ``use_collectives=False``."""

    def __init__(self, path: str | os.PathLike[str], *, chunk_bytes: int = CHUNK_BYTES, sync: bool = True) -> None:
        super().__init__()
        self.path = folder_of(path)
        self.chunk_bytes = expect_int(chunk_bytes, "chunk_bytes")
        if self.chunk_bytes < 4096:
            raise ValueError(f"chunk_bytes is {chunk_bytes}, expected at least 4096")
        self.sync = sync

    @property
    def checkpoint_id(self) -> Path:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = folder_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("Writer does not support use_collectives=False: use torch's FileSystemWriter")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        start(self.path)
        return [replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        file = DataFile(self.path / SAVING / plan.storage_data, chunk_bytes=self.chunk_bytes, sync=self.sync)
        try:
            done.set_result([file.add(item.index, planner.resolve_data(item)) for item in plan.items])
            file.close()
        except BaseException:
            file.discard()
            raise
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            publish(self.path, metadata, results, chunk_bytes=self.chunk_bytes, sync=self.sync)()
        except BaseException:  # the disk may be full
            shutil.rmtree(self.path / SAVING, ignore_errors=True)
            raise
