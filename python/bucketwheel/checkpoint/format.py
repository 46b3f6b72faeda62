"""What a checkpoint's ``.metadata`` says, read without executing anything of it, and checked against the files.

The file is stock torch.distributed.checkpoint's: a pickled `Metadata`. `Writer` adds the attribute ``bucketwheel`` to it
(`Sums`), and a trailer behind the pickle, which stock readers do not see: magic, length and CRC32C of the pickle.

[Note: a foreign pickle]
A pickle is a program that calls what it names. Here each name must be in a table, and stands for an inert class of this
load alone: it keeps what it is given. Values are checked and made into the classes of the installed torch afterwards, which
also settles what differs between releases: `TensorProperties` has strides in its state from torch 2.15 on. pickle's version
in C, which is several times as fast, reads what has our checksum. It does not read other pickles, as a damaged byte can make
it reserve memory for four billion entries.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import stat
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketwheel.errors import CheckpointError
from bucketwheel.native import core

__all__ = ["ATTRIBUTE", "METADATA", "Description", "Stored", "Sums", "describe", "folder_of", "packed", "packed_sums"]

METADATA = ".metadata"
ATTRIBUTE = "bucketwheel"  # of the pickled Metadata
VERSION = 2

_TRAILER = struct.Struct("<8sQI")
_SUMS = struct.Struct("<QQI")  # of an item: begin, nbytes, envelope of `Sums`; its chunks follow
_MAGIC = b"\x89bwckpt\n"

# What a pickle may name, beside what `_replaced` has: each becomes a `_Record`.
_RECORDS = {
    f"torch.distributed.checkpoint.{name}" for name in (
        "metadata.Metadata", "metadata.MetadataIndex", "metadata.TensorStorageMetadata", "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata", "metadata.TensorProperties", "metadata.StorageMeta",
        "metadata._MEM_FORMAT_ENCODING", "filesystem._StorageInfo",
    )
}  # fmt: skip
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_PATHS = [f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")]


def _replaced() -> dict[str, Any]:
    """What stands for a name of the pickle. Made anew for each load, since a pickle may write to functions."""
    return {
        **_DTYPES,
        **dict.fromkeys(_PATHS, lambda *parts: "/".join(map(str, parts))),
        "torch.Size": tuple,
        "torch.serialization._get_layout": lambda layout: layout,
        "collections.OrderedDict": OrderedDict,
        "builtins.set": set,
        "builtins.getattr": lambda record, member: record(member),  # an enum's member, by Python 3.11
    }


@dataclass(frozen=True)
class Sums:
    """The checksums of one stored item: a box of a tensor as torch.save writes it, or the bytes of another object."""

    begin: int  # bytes of its header, before the data
    nbytes: int  # of data
    envelope: int  # CRC32C of the header, then of the trailer behind the data
    chunks: bytes  # of each ``chunk_bytes`` of data, uint32, little endian


@dataclass(frozen=True)
class Stored:
    """Where an item lies. ``sums`` is None in a checkpoint that another writer than ours has written."""

    path: str
    offset: int
    length: int
    sums: Sums | None


@dataclass(frozen=True)
class Description:
    """All that a checkpoint says of itself. ``world`` and ``chunk_bytes`` are 0 where another writer wrote it."""

    metadata: Metadata
    items: dict[MetadataIndex, Stored]
    world: int
    chunk_bytes: int
    crc: int  # of the content of ``.metadata``


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The absolute path, since the working directory may change while a thread writes. ValueError for a URL, which `Path`
    would make a folder of."""
    if "://" in str(path):
        raise ValueError(f"{path} is a URL, expected the path of a folder")
    return Path(path).absolute()


def describe(folder: Path) -> Description:
    """What is in a checkpoint's folder. Reads no data.

    Raises `CheckpointError` for whatever is not a whole checkpoint: a damaged file, a pickle that names anything but
    what a checkpoint holds, sizes that do not fit each other or the files.
    """
    path = folder / METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        is_copy = any(folder.glob("data-*")) or any(folder.glob("*.distcp"))
        hidden = (
            f". There is data but no {METADATA}, a hidden file: a copy by `cp -r FOLDER/*` leaves it out"
            if is_copy
            else ""
        )
        raise CheckpointError(f"{folder} is no checkpoint, or its save has not finished: {error}{hidden}") from error
    body, is_ours = _body(content, path)
    try:
        pickled = _loaded(body, is_ours)
        metadata = _metadata(pickled)
        extra = pickled.state.get(ATTRIBUTE)
        if (extra is not None) != is_ours:
            _refuse("its trailer is missing or damaged" if extra is not None else "it has no checksums, but a trailer")
        infos = _infos(pickled.state.get("storage_data"))
        facts = _facts(extra, len(infos)) if is_ours else _Facts(0, 0, None, [None] * len(infos))
        items = {i: Stored(*info, sums) for (i, info), sums in zip(infos.items(), facts.sums, strict=True)}
        _expect_items(metadata, items)
        _expect_files(folder, items, facts.files)
    except (CheckpointError, RecursionError) as error:  # a recursion: names in containers in containers
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    return Description(metadata, items, facts.world, facts.chunk_bytes, core.crc32c(content))


def packed(metadata: Metadata) -> bytes:
    """The content of ``.metadata``: the pickle, and our trailer."""
    body = pickle.dumps(metadata, protocol=4)
    return body + _TRAILER.pack(_MAGIC, len(body), core.crc32c(body))


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(what)


def _body(content: bytes, path: Path) -> tuple[bytes, bool]:
    """The pickle, and whether our trailer was behind it."""
    if len(content) < _TRAILER.size or content[-_TRAILER.size :][: len(_MAGIC)] != _MAGIC:
        return content, False
    _, length, crc = _TRAILER.unpack(content[-_TRAILER.size :])
    body = content[: -_TRAILER.size]
    if length != len(body):
        raise CheckpointError(f"{path} is damaged: it holds {len(body)} bytes, {length} were written")
    if core.crc32c(body) != crc:
        raise CheckpointError(f"{path} is damaged: its checksum differs from what was written")
    return body, True


# ---- the pickle: [Note: a foreign pickle] ----------------------------------------------------------------------------


class _Record:
    """An object of the pickle: its state, nothing else."""

    name = ""
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _find_class(unpickler: Any, module: str, name: str) -> Any:
    full = f"{module}.{name}"
    if full in _RECORDS:
        return unpickler.records.setdefault(full, type(name, (_Record,), {"name": name}))
    if full not in unpickler.replaced:
        _refuse(f"the pickle names {full}, which no checkpoint's metadata holds: nothing was executed")
    return unpickler.replaced[full]


class _Unpickler(pickle._Unpickler):
    find_class = _find_class


class _FastUnpickler(pickle.Unpickler):
    find_class = _find_class


def _loaded(body: bytes, is_whole: bool) -> _Record:
    file = io.BytesIO(body)
    unpickler: Any = (_FastUnpickler if is_whole else _Unpickler)(file)
    unpickler.records, unpickler.replaced = {}, _replaced()  # of this load
    try:
        pickled = unpickler.load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"it is not a whole pickle: {type(error).__name__}: {error}") from error
    if (left := len(file.read())) != 0:
        _refuse(f"{left} bytes follow the pickle")
    return _expect_record(pickled, "Metadata")


def _expect_record(value: Any, name: str, state: type = dict) -> _Record:
    if not isinstance(value, _Record) or value.name != name or not isinstance(value.state, state):
        _refuse(f"{_short(value)} stands where a {name} belongs")
    return value


def _field(record: _Record, name: str, kind: type) -> Any:
    value = record.state.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        _refuse(f"{record.name}.{name} is {_short(value)}")
    return value


def _short(value: Any) -> str:
    return value.name if isinstance(value, _Record) else f"a {type(value).__name__}"


def _size(value: Any, what: str) -> torch.Size:
    if not isinstance(value, tuple) or not all(type(one) is int and 0 <= one < 2**63 for one in value):
        _refuse(f"{what} is {_short(value)}, not a size")
    return torch.Size(value)


def _index(value: Any) -> MetadataIndex:
    record = _expect_record(value, "MetadataIndex")
    fqn, offset = _field(record, "fqn", str), record.state.get("offset")
    return MetadataIndex(fqn, None if offset is None else _size(offset, f"the offset of {fqn!r}"))


def _metadata(pickled: _Record) -> Metadata:
    entries: dict[str, Any] = {}
    for fqn, value in _field(pickled, "state_dict_metadata", dict).items():
        if not isinstance(fqn, str):
            _refuse(f"a name is {_short(fqn)}")
        is_bytes = isinstance(value, _Record) and value.name == "BytesStorageMetadata"
        entries[fqn] = BytesStorageMetadata() if is_bytes else _tensor(fqn, value)
    planner_data = pickled.state.get("planner_data")
    _expect_plain(planner_data)
    return Metadata(entries, planner_data=planner_data, storage_meta=StorageMeta())


def _tensor(fqn: str, value: Any) -> TensorStorageMetadata:
    record = _expect_record(value, "TensorStorageMetadata")
    size = _size(record.state.get("size"), f"the shape of {fqn!r}")
    chunks = []
    for chunk in _field(record, "chunks", list):
        state = _expect_record(chunk, "ChunkStorageMetadata").state
        chunks.append(
            ChunkStorageMetadata(*(_size(state.get(name), f"a box of {fqn!r}") for name in ("offsets", "sizes")))
        )
    _expect_cover(fqn, size, chunks)
    return TensorStorageMetadata(_properties(record.state.get("properties")), size, chunks)


def _properties(value: Any) -> TensorProperties:
    """Of dtype, layout, requires_grad, memory format, pin_memory; strides, which torch 2.15 adds, are not needed."""
    state = _expect_record(value, "TensorProperties", tuple).state
    if len(state) < 5 or not isinstance(state[0], torch.dtype):
        _refuse("the properties of a tensor have no dtype")
    return TensorProperties(dtype=state[0], requires_grad=state[2] is True)


def _expect_plain(value: Any) -> None:
    """Names and numbers in containers."""
    if isinstance(value, dict):
        _expect_plain([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            _expect_plain(one)
    elif not isinstance(value, (str, int, float, bytes, type(None))):
        _refuse(f"planner_data holds {_short(value)}")


def _infos(value: Any) -> dict[MetadataIndex, tuple[str, int, int]]:
    if not isinstance(value, dict):
        _refuse("it does not say where the data lies")
    found = {}
    for key, info in value.items():
        record = _expect_record(info, "_StorageInfo")
        index = _index(key)
        if index in found or record.state.get("transform_descriptors"):
            _refuse(f"{index.fqn!r} is stored twice, or transformed: load it with torch's FileSystemReader")
        found[index] = tuple(
            _field(record, name, kind) for name, kind in (("relative_path", str), ("offset", int), ("length", int))
        )
    return found


@dataclass(frozen=True)
class _Facts:
    """The attribute that `Writer` adds."""

    world: int
    chunk_bytes: int
    files: dict[str, int] | None  # their sizes; None of another writer
    sums: Sequence[Sums | None]  # in the order of the items


def _facts(extra: Any, items: int) -> _Facts:
    if not isinstance(extra, dict) or extra.get("version") != VERSION:
        _refuse(
            "its checksums are of a format that this bucketwheel does not know: load it with the release that wrote it"
        )
    if not all(type(extra.get(name)) is int and extra[name] > 0 for name in ("world", "chunk_bytes")):
        _refuse("its checksums have no world size")
    files, sums = extra.get("files"), extra.get("sums")
    if not isinstance(files, dict) or not isinstance(sums, bytes):
        _refuse("it has no checksums")
    found = list(_unpacked_sums(sums, extra["chunk_bytes"]))
    if len(found) != items:
        _refuse(f"it says where {items} items lie and has checksums of {len(found)}")
    return _Facts(extra["world"], extra["chunk_bytes"], files, found)


def packed_sums(sums: Iterable[Sums]) -> bytes:
    """Of all items, in their order; pickled as one object, since a large job has 100,000 items."""
    return b"".join(_SUMS.pack(one.begin, one.nbytes, one.envelope) + one.chunks for one in sums)


def _unpacked_sums(packed: bytes, chunk_bytes: int) -> Iterator[Sums]:
    at = 0
    while at < len(packed):
        if len(packed) < at + _SUMS.size:
            _refuse("its checksums are cut off")
        begin, nbytes, envelope = _SUMS.unpack_from(packed, at)
        end = at + _SUMS.size + 4 * -(-nbytes // chunk_bytes)
        if len(packed) < end:
            _refuse("its checksums are cut off")
        yield Sums(begin, nbytes, envelope, packed[at + _SUMS.size : end])
        at = end


# ---- what must fit ---------------------------------------------------------------------------------------------------


def _expect_cover(fqn: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """The boxes lie within the shape, do not overlap, and leave nothing out."""
    boxes = []
    for chunk in chunks:
        begin, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        end = tuple(at + extent for at, extent in zip(begin, sizes, strict=False))
        if len(begin) != len(size) or len(sizes) != len(size) or any(e > s for e, s in zip(end, size, strict=True)):
            _refuse(f"{fqn!r} of shape {tuple(size)} has a box of {sizes} at {begin}")
        if 0 not in sizes:
            boxes.append((begin, end))
    numel = sum(math.prod(e - b for b, e in zip(begin, end, strict=True)) for begin, end in boxes)
    if numel != size.numel() or not chunks:
        _refuse(f"{fqn!r} of shape {tuple(size)} has boxes of {numel} elements in all")
    if not size:  # one element, so one box
        return
    # Sweep along the dimension that tells most boxes apart.
    axis = max(range(len(size)), key=lambda d: len({begin[d] for begin, _ in boxes}))
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for begin, end in sorted(boxes, key=lambda box: box[0][axis]):
        active = [box for box in active if box[1][axis] > begin[axis]]
        for other_begin, other_end in active:
            if all(b < oe and ob < e for b, e, ob, oe in zip(begin, end, other_begin, other_end, strict=True)):
                _refuse(f"{fqn!r} has boxes at {begin} and {other_begin} that overlap")
        active.append((begin, end))


def _expect_items(metadata: Metadata, items: dict[MetadataIndex, Stored]) -> None:
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                _expect_item(
                    items, MetadataIndex(fqn, chunk.offsets), chunk.sizes.numel() * entry.properties.dtype.itemsize
                )
        else:
            _expect_item(items, MetadataIndex(fqn), None)


def _expect_item(items: dict[MetadataIndex, Stored], index: MetadataIndex, nbytes: int | None) -> None:
    """``nbytes``: of its data; None for an object, which is all data."""
    stored = items.get(index)
    if stored is None:
        _refuse(f"{index.fqn!r} at {index.offset} is not stored")
    nbytes = stored.length if nbytes is None else nbytes
    sums = stored.sums or Sums(0, nbytes, 0, b"")
    if min(stored.offset, stored.length) < 0 or sums.begin + sums.nbytes > stored.length:
        _refuse(f"{index.fqn!r} at {index.offset} lies beyond its place in {stored.path}")
    if sums.nbytes != nbytes:
        _refuse(f"{index.fqn!r} at {index.offset} has {sums.nbytes} bytes of data, its shape has {nbytes}")


def _expect_files(folder: Path, items: dict[MetadataIndex, Stored], files: dict[str, int] | None) -> None:
    """Each file lies in the folder, is there, and has the size that was written (None: is not known), at least what is read
    of it."""
    ends: dict[str, int] = {}
    for stored in items.values():
        ends[stored.path] = max(ends.get(stored.path, 0), stored.offset + stored.length)
    root = os.path.realpath(folder)
    for name, end in ends.items():
        try:
            path = os.path.realpath(os.path.join(root, name))
            if os.path.isabs(name) or ".." in name.split("/") or not path.startswith(f"{root}{os.sep}"):
                _refuse(f"{name!r} is not a path inside the checkpoint")
            found = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a name that no file has
            raise CheckpointError(f"the file {name[:200]!r} is missing: {str(error)[:200]}") from error
        if not stat.S_ISREG(found.st_mode):
            _refuse(f"{name!r} is no file")
        if files is not None and found.st_size != files.get(name):
            _refuse(f"the file {name} has {found.st_size} bytes, {files.get(name)} were written")
        if found.st_size < end:
            _refuse(f"the file {name} has {found.st_size} bytes, {end} are needed: it is cut off")
