"""What a checkpoint's ``.metadata`` says, read without executing anything of it, and checked against the files.

The file is stock torch.distributed.checkpoint's: a pickled `Metadata`. `Writer` adds the attribute ``bucketwheel`` to it
(world size, sizes of files, `Sums`), and a trailer behind the pickle, which stock readers do not see: magic, length and
CRC32C of the pickle. The checksum is compared first.

[Note: a pickle]
A pickle is a program that calls what it names, and writes attributes to what it has. Each name must be in a table here. A
class of torch is reached through a stand-in, made for this load alone, that makes instances of the class: what a pickle
writes to a class or a function stays in that load.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorProperties

from bucketwheel.errors import CheckpointError
from bucketwheel.native import core

METADATA = ".metadata"
ATTRIBUTE = "bucketwheel"  # of the pickled Metadata
VERSION = 2

_TRAILER = struct.Struct("<8sQI")
_SUMS = struct.Struct("<QQI")  # of an item: begin, nbytes, envelope of `Sums`; its chunks follow
_MAGIC = b"\x89bwckpt\n"

# Classes that a pickle may name, beside what `_Unpickler` has.
_CLASSES = {
    f"torch.distributed.checkpoint.{name}" for name in (
        "metadata.Metadata", "metadata.MetadataIndex", "metadata.TensorStorageMetadata", "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata", "metadata.TensorProperties", "metadata.StorageMeta", "filesystem._StorageInfo",
    )
}  # fmt: skip
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_PATHS = [f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")]


class Sums(NamedTuple):
    """The checksums of one stored item: a box of a tensor as torch.save writes it, or the bytes of another object."""

    begin: int  # bytes of its header, before the data
    nbytes: int  # of data
    envelope: int  # CRC32C of the header, then of the trailer behind the data
    chunks: bytes  # of each ``chunk_bytes`` of data, uint32, little endian


class Stored(NamedTuple):
    """Where an item lies. ``sums`` is None in a checkpoint that another writer than ours has written."""

    path: str
    offset: int
    length: int
    sums: Sums | None


class Description(NamedTuple):
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
        hidden = f". The data lacks its hidden file {METADATA}, which `cp -r FOLDER/*` does not copy"
        text = f"{folder} is not a checkpoint, or its save has not finished: {error}{hidden if is_copy else ''}"
        raise CheckpointError(text) from error
    try:
        return _described(folder, content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything, and hold anything
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {type(error).__name__}: {error}") from error


def packed(metadata: Metadata) -> bytes:
    """The content of ``.metadata``: the pickle, and our trailer."""
    body = pickle.dumps(metadata, protocol=4)
    return body + _trailer_of(body)


def _trailer_of(body: bytes) -> bytes:
    return _TRAILER.pack(_MAGIC, len(body), core.crc32c(body))


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(what)


def _described(folder: Path, content: bytes) -> Description:
    body, trailer = content[: -_TRAILER.size], content[-_TRAILER.size :]
    is_ours = trailer.startswith(_MAGIC)
    if is_ours and trailer != _trailer_of(body):
        _refuse("the file is damaged: its content does not match its checksum")
    file = BytesIO(body if is_ours else content)
    metadata = (_Unpickler if is_ours else _SlowUnpickler)(file).load()
    facts = vars(metadata).get(ATTRIBUTE)
    if (facts is not None) != is_ours or file.read():
        _refuse("the file is damaged: bytes at its end are missing or wrong")
    facts = facts or {"version": VERSION, "world": 0, "chunk_bytes": 0, "files": None}
    if facts["version"] != VERSION:
        _refuse(f"checksums have format {facts['version']}, not {VERSION}: load them with the release that wrote them")
    infos = metadata.storage_data
    sums = _unpacked_sums(facts["sums"], facts["chunk_bytes"]) if is_ours else [None] * len(infos)
    items = {}
    for (index, info), of_item in zip(infos.items(), sums, strict=True):
        if getattr(info, "transform_descriptors", None):
            _refuse(f"{index.fqn!r} is stored transformed: load it with torch's FileSystemReader")
        items[index] = Stored(info.relative_path, info.offset, info.length, of_item)
    _expect_items(metadata.state_dict_metadata, items)
    _expect_files(folder, items.values(), facts["files"])
    return Description(metadata, items, facts["world"], facts["chunk_bytes"], core.crc32c(content))


# ---- the pickle: [Note: a pickle] ------------------------------------------------------------------------------------


class _Properties(TensorProperties):
    """Of any torch: from 2.15 on the state has strides too."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(vars(TensorProperties(dtype=state[0], requires_grad=state[2])))


class _Names:
    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)  # type: ignore[call-arg]
        self._known = {
            **_DTYPES,
            **dict.fromkeys(_PATHS, lambda *parts: "/".join(map(str, parts))),
            "torch.Size": torch.Size,
            "torch.serialization._get_layout": lambda layout: layout,
            "collections.OrderedDict": OrderedDict,
            "builtins.set": set,
            "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": lambda value: value,
            "builtins.getattr": lambda owner, member: member,  # an enum's member, by Python 3.11
        }

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._known:
            if full not in _CLASSES:
                _refuse(f"the pickle names {full}, which the metadata of a checkpoint cannot contain: no code was run")
            real = _Properties if name == "TensorProperties" else super().find_class(module, name)  # type: ignore[misc]
            self._known[full] = type(name, (), {"__new__": lambda cls, *args: object.__new__(real)})
        return self._known[full]


class _Unpickler(_Names, pickle.Unpickler):
    pass


class _SlowUnpickler(_Names, pickle._Unpickler):
    """Of a file without our checksum: a few damaged bytes make the other one take all memory of the machine."""


def packed_sums(sums: Iterable[Sums]) -> bytes:
    """Of all items, in their order; pickled as one object, since a large job has 100,000 items."""
    return b"".join(_SUMS.pack(*one[:3]) + one.chunks for one in sums)


def _unpacked_sums(packed: bytes, chunk_bytes: int) -> Iterator[Sums]:
    at = 0
    while at < len(packed):
        begin, nbytes, envelope = _SUMS.unpack_from(packed, at)
        end = at + _SUMS.size + 4 * -(-nbytes // chunk_bytes)
        yield Sums(begin, nbytes, envelope, packed[at + _SUMS.size : end])
        at = end


# ---- what must fit ---------------------------------------------------------------------------------------------------


def _expect_items(entries: Mapping[str, Any], items: Mapping[MetadataIndex, Stored]) -> None:
    """The boxes of a tensor lie within its shape and have as many elements, and each item is stored. Checksums protect what
    our writer wrote; of another's checkpoint this shows that nothing is missing."""
    for fqn, entry in entries.items():
        is_object = isinstance(entry, BytesStorageMetadata)
        chunks: list[Any] = [None] if is_object else entry.chunks
        if not is_object:
            places = [zip(chunk.offsets, chunk.sizes, entry.size, strict=True) for chunk in chunks]
            is_inside = all(at >= 0 and n >= 0 and at + n <= size for place in places for at, n, size in place)
            numel = sum(chunk.sizes.numel() for chunk in chunks)
            if not is_inside or numel != entry.size.numel() or not chunks:
                _refuse(f"{len(chunks)} boxes of {fqn!r}, {numel} elements, do not fit its shape {tuple(entry.size)}")
        for chunk in chunks:
            index = MetadataIndex(fqn, None if is_object else chunk.offsets)
            stored = items.get(index)
            if stored is None:
                _refuse(f"{fqn!r} at {index.offset} is not stored")
            nbytes = stored.length if is_object else chunk.sizes.numel() * entry.properties.dtype.itemsize
            sums = stored.sums or Sums(0, nbytes, 0, b"")
            if min(stored.offset, stored.length - sums.begin - nbytes) < 0 or sums.nbytes != nbytes:
                _refuse(f"the {nbytes} bytes of {fqn!r} at {index.offset} do not fit their place in {stored.path}")


def _expect_files(folder: Path, items: Iterable[Stored], files: Mapping[str, int] | None) -> None:
    """Each file lies in the folder and has the size that was written (None: is not known), at least what is read of it."""
    ends: dict[str, int] = {}
    for stored in items:
        ends[stored.path] = max(ends.get(stored.path, 0), stored.offset + stored.length)
    root = os.path.realpath(folder)
    for name, end in ends.items():
        path = os.path.realpath(os.path.join(root, name))
        if not path.startswith(f"{root}{os.sep}"):
            _refuse(f"{name!r} is not a path inside the checkpoint")
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size is None or size < end or (files is not None and size != files.get(name)):
            wanted = f"{end} are needed" if files is None else f"{files.get(name)} were written"
            _refuse(
                f"the file {name[:200]} has {size} bytes, {wanted}" if size is not None else f"{name[:200]} is missing"
            )
