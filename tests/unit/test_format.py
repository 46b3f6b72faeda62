"""``.metadata``: whatever it says, nothing of it is executed, and what does not fit is refused before data is read.

``data/torch_2_15`` was written by torch 2.15's FileSystemWriter; [Note: a foreign pickle] says what differs.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketwheel import torch_internals
from bucketwheel.checkpoint import Reader
from bucketwheel.checkpoint.format import ATTRIBUTE, METADATA, Sums, describe, packed, packed_sums
from bucketwheel.errors import CheckpointError
from tests.unit.test_writer import save, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
OF_TORCH_2_15 = Path(__file__).parent / "data" / "torch_2_15"


def test_what_torch_2_15_wrote() -> None:
    """Whose properties of a tensor torch 2.14 and earlier cannot unpickle."""
    assert b"matrix" in (OF_TORCH_2_15 / METADATA).read_bytes()
    matrix, half, scalar = torch.zeros(3, 4), torch.zeros(5).bfloat16(), torch.tensor(0)
    state = {"matrix": matrix, "half": half, "scalar": scalar, "group": {"lr": 0.0, "names": []}}
    dcp.load(state, storage_reader=Reader(OF_TORCH_2_15))
    assert torch.equal(matrix, torch.arange(12.0).view(3, 4)) and torch.equal(half, torch.arange(5).bfloat16())
    assert scalar.item() == 7 and state["group"] == {"lr": 0.5, "names": ["a", "b"]}


@pytest.mark.parametrize("more", [(), ((4, 1),), ((4, 1), "what a later torch adds")])
def test_properties_of_any_torch(tmp_path: Path, more: tuple[Any, ...]) -> None:
    save(tmp_path, {"x": values(3, 4)})
    metadata = pickled(tmp_path)
    entry = metadata.state_dict_metadata["x"]
    entry.properties = Calls(TensorProperties, state=(*entry.properties.__getstate__()[:5], *more))
    write(tmp_path, metadata)
    assert describe(tmp_path).metadata.state_dict_metadata["x"].properties.dtype == torch.float32
    found = {"x": torch.zeros(3, 4)}
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert torch.equal(found["x"], values(3, 4))


# ---- tampered metadata, with the checksum that belongs to it ---------------------------------------------------------


def pickled(folder: Path) -> Metadata:
    return pickle.loads((folder / METADATA).read_bytes())


def write(folder: Path, metadata: Any) -> None:
    (folder / METADATA).write_bytes(packed(metadata))


class Calls:
    """Its pickle calls a function, and gives the result a state."""

    def __init__(self, *call: Any, state: Any = None) -> None:
        self.call, self.state = call, state

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:], self.state


@pytest.mark.parametrize("place", ["whole", "planner_data", "name", "attribute"])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch {}"),
        (eval, "open('{}', 'w')"),
        (getattr, os, "system"),
        (Path.touch, Path("{}")),
        (torch.load, "{}"),
    ],
    ids=range(5),
)
def test_nothing_is_executed(tmp_path: Path, call: tuple[Any, ...], place: str, ours: bool) -> None:
    save(tmp_path / "c", {"x": values(3)})
    flag = tmp_path / "executed"
    hostile = Calls(*(type(part)(str(part).format(flag)) if isinstance(part, (str, Path)) else part for part in call))
    metadata: Any = pickled(tmp_path / "c")
    if place == "whole":
        metadata = hostile
    elif place == "planner_data":
        metadata.planner_data = {"x": hostile}
    elif place == "name":
        metadata.state_dict_metadata["y"] = hostile
    else:
        metadata.more = hostile
    try:
        content = packed(metadata) if ours else pickle.dumps(metadata)
    except TypeError:  # a module cannot be pickled: by its name
        content = b"cposix\nsystem\n(S'touch " + str(flag).encode() + b"'\ntR."
    (tmp_path / "c" / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"names \S+, which no checkpoint's metadata holds: nothing"):
        describe(tmp_path / "c")
    assert not flag.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"N.",
        b"}.",
        b"\x80\x04",
        b"garbage",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff",  # a frame of 2^64 bytes
        b"\x80\x04Nr\xff\xff\xff\xff.",  # a memo of 2^32 entries
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes that are not there
        b"(" * 100_000 + b"l" * 100_000 + b".",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)R.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)R}S'state_dict_metadata'\nNsb.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}S'__reduce__'\nNs\x86b.",  # sets an attribute of the class
        b"cbuiltins\ngetattr\n(cbuiltins\nset\nS'pop'\ntR.",
    ],
    ids=range(15),
)
def test_what_is_no_metadata(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA).write_bytes(content)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=METADATA):
        describe(tmp_path)
    assert time.monotonic() - begin < 20 and Metadata.__reduce__ is object.__reduce__


def box(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def described(folder: Path, shape: list[int], boxes: list[ChunkStorageMetadata], dtype: Any = torch.float32) -> None:
    """A checkpoint of torch's, of one tensor in these boxes."""
    metadata = Metadata({"x": TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), boxes)})
    metadata.storage_data = {
        MetadataIndex("x", one.offsets): torch_internals.storage_info("f", 0, 1 << 20) for one in boxes
    }
    (folder / "f").write_bytes(bytes(1 << 20))
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ([], [([], [])]),
        ([4], [([0], [4])]),
        ([4], [([2], [2]), ([0], [2])]),
        ([0, 3], [([0, 0], [0, 3])]),
        ([4], [([0], [4]), ([4], [0])]),
        ([4, 6], [([0, 0], [4, 2]), ([0, 2], [1, 4]), ([1, 2], [3, 4])]),
        ([5, 7], [([0, 3], [1, 4]), ([1, 0], [3, 7]), ([4, 0], [1, 2]), ([0, 0], [1, 3]), ([4, 2], [1, 5])]),
    ],
)
def test_boxes_that_cover_a_tensor(tmp_path: Path, shape: list[int], boxes: list[Any]) -> None:
    described(tmp_path, shape, [box(*one) for one in boxes])
    assert len(describe(tmp_path).items) == len(boxes)


@pytest.mark.parametrize(
    ("shape", "boxes", "message"),
    [
        ([4], [], "boxes of 0 elements in all"),
        ([], [], "boxes of 0 elements in all"),
        ([4], [([0], [3])], "boxes of 3 elements in all"),
        ([4], [([0], [4]), ([1], [1])], "boxes of 5 elements in all"),
        ([4], [([0], [2]), ([1], [2])], "overlap"),
        ([4, 4], [([0, 0], [4, 2]), ([3, 1], [4, 2])], "has a box of .* at"),
        ([4, 4], [([0, 0], [4, 2]), ([0, 1], [4, 2])], "overlap"),
        ([4, 4], [([0, 0], [2, 4]), ([1, 0], [2, 4])], "overlap"),
        ([6], [([0], [3]), ([2], [2]), ([5], [1])], "overlap"),
        ([4], [([1], [4])], "has a box of .* at"),
        ([4], [([0, 0], [4, 1])], "has a box of .* at"),
        ([4], [([0], [4, 1])], "has a box of .* at"),
        ([4], [([-1], [4])], "not a size"),
        ([-4], [([0], [4])], "not a size"),
    ],
)
def test_boxes_that_do_not(tmp_path: Path, shape: list[int], boxes: list[Any], message: str) -> None:
    described(tmp_path, shape, [box(*one) for one in boxes])
    with pytest.raises(CheckpointError, match=message):
        describe(tmp_path)


def change_path(path: str) -> Callable[[Path, Metadata], None]:
    def change(folder: Path, metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    return change


def of_info(**changed: Any) -> Callable[[Path, Metadata], None]:
    return lambda folder, metadata: vars(next(iter(metadata.storage_data.values()))).update(changed)


def of_entry(**changed: Any) -> Callable[[Path, Metadata], None]:
    return lambda folder, metadata: vars(metadata.state_dict_metadata["x"]).update(changed)


def of_facts(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Metadata], None]:
    return lambda folder, metadata: change(getattr(metadata, ATTRIBUTE)) and None


def symlink(folder: Path, metadata: Metadata) -> None:
    (path,) = folder.glob("data-*/*")
    target = path.rename(folder.parent / "elsewhere")
    path.symlink_to(target)


def pipe(folder: Path, metadata: Metadata) -> None:
    (path,) = folder.glob("data-*/*")
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever


def resized(by: int) -> Callable[[Path, Metadata], None]:
    def change(folder: Path, metadata: Metadata) -> None:
        (path,) = folder.glob("data-*/*")
        content = path.read_bytes()
        path.write_bytes(content[:by] if by < 0 else content + bytes(by))

    return change


INFO = torch_internals.storage_info
SUMS = Sums(0, 12, 0, b"1234")
CHANGES: list[tuple[Callable[[Path, Metadata], Any], str]] = [
    (change_path("/etc/passwd"), "'/etc/passwd' is not a path inside the checkpoint"),
    (change_path("../elsewhere"), "is not a path inside"),
    (change_path("data/../../elsewhere"), "is not a path inside"),
    (change_path("nul\0"), "is missing"),
    (change_path("\udcff"), "is missing"),
    (change_path("long" * 1000), "is missing: .*too long"),
    (change_path(""), "is not a path inside"),
    (change_path("missing"), "the file 'missing' is missing"),
    (change_path("."), "is not a path inside"),
    (change_path(METADATA), "were written"),
    (symlink, "is not a path inside"),
    (pipe, "is no file"),
    (resized(-1), "bytes, .* were written"),
    (resized(1), "bytes, .* were written"),
    (of_info(offset=-1), "lies beyond its place"),
    (of_info(offset=10**6), "are needed: it is cut off"),
    (of_info(length=3), "lies beyond its place"),
    (of_info(length=10**6), "are needed: it is cut off"),
    (of_info(length=True), "_StorageInfo.length is a bool"),
    (of_info(offset=2.5), "_StorageInfo.offset is a float"),
    (of_info(transform_descriptors=["zstd"]), "FileSystemReader"),
    (of_entry(size=torch.Size([2])), "'x' of shape"),
    (of_entry(size=torch.Size([2, 2]), chunks=[box([0, 0], [2, 2])]), "is not stored"),
    (of_entry(properties=TensorProperties(dtype=torch.float64)), "12 bytes of data, its shape has 24"),
    (of_entry(properties=None), "stands where a TensorProperties belongs"),
    (of_entry(chunks={}), "chunks is a dict"),
    (of_entry(size=3), "not a size"),
    (lambda _, m: setattr(m, "storage_data", None), "where the data lies"),
    (lambda _, m: m.storage_data.clear(), "where 0 items lie and has checksums of 1"),
    (lambda _, m: m.state_dict_metadata.update(y=BytesStorageMetadata()), "'y' at None is not stored"),
    (lambda _, m: m.state_dict_metadata.update({5: BytesStorageMetadata()}), "a name is a int"),
    (lambda _, m: m.state_dict_metadata.update(y=StorageMeta()), "StorageMeta stands where"),
    (lambda _, m: m.storage_data.update({"k": StorageMeta()}), "StorageMeta stands where a _StorageInfo"),
    (lambda _, m: setattr(m, "planner_data", [{"a": (1, StorageMeta())}]), "planner_data holds StorageMeta"),
    (
        lambda _, m: m.storage_data.update(dict.fromkeys(m.storage_data, Calls(type(INFO("", 0, 0)), "p", 0, 1))),
        "_StorageInfo stands",
    ),
    (
        lambda _, m: m.storage_data.update(
            {Calls(MetadataIndex, state=vars(MetadataIndex("x", [0]))): INFO("p", 0, 1)}
        ),
        "'x' is stored twice",
    ),
    (lambda _, m: m.storage_data.update({Calls(MetadataIndex, "x"): 1}), "a int stands where a _StorageInfo"),
    (lambda _, m: m.storage_data.update({Calls(MetadataIndex, "x"): INFO("p", 0, 1)}), "MetadataIndex stands where"),
    (of_entry(chunks=[Calls(ChunkStorageMetadata, (0,), (3,))]), "ChunkStorageMetadata stands where"),
    (of_entry(properties=Calls(TensorProperties)), "TensorProperties stands where"),
    (lambda _, m: delattr(m, ATTRIBUTE), "it has no checksums, but a trailer"),
    (lambda _, m: setattr(m, ATTRIBUTE, 3), "a format that this bucketwheel does not know"),
    (of_facts(lambda facts: facts.update(version=1)), "a format that this bucketwheel does not know"),
    (of_facts(lambda facts: facts.update(chunk_bytes=0)), "no world size"),
    (of_facts(lambda facts: facts.update(world="1")), "no world size"),
    (of_facts(lambda facts: facts.update(sums=[])), "it has no checksums"),
    (of_facts(lambda facts: facts.update(sums=b"")), "where 1 items lie and has checksums of 0"),
    (of_facts(lambda facts: facts["files"].clear()), "None were written"),
    *(
        (of_facts(lambda facts, sums=sums: facts.update(sums=sums)), message)
        for sums, message in [
            (packed_sums([SUMS])[:-1], "checksums are cut off"),
            (packed_sums([SUMS])[:7], "checksums are cut off"),
            (packed_sums([SUMS]) + b"12345", "checksums are cut off"),
            (packed_sums([replace(SUMS, nbytes=1 << 60)]), "checksums are cut off"),
            (packed_sums([replace(SUMS, nbytes=16)]), "16 bytes of data, its shape has 12"),
            (packed_sums([replace(SUMS, begin=10**6)]), "lies beyond its place"),
        ]
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=range(len(CHANGES)))
def test_what_does_not_fit(tmp_path: Path, change: Callable[[Path, Metadata], None], message: str) -> None:
    folder = tmp_path / "c"
    save(folder, {"x": values(3)})
    metadata = pickled(folder)
    change(folder, metadata)
    write(folder, metadata)
    with pytest.raises(CheckpointError, match=message) as refused:
        describe(folder)
    assert str(folder) in str(refused.value)


def test_the_trailer(tmp_path: Path) -> None:
    """No byte of the metadata, and none of its end, can go or change."""
    save(tmp_path, {"x": values(3)})
    path = tmp_path / METADATA
    content = path.read_bytes()
    for at in [*range(0, len(content), 7), *range(len(content) - 24, len(content))]:
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        with pytest.raises(CheckpointError):
            describe(tmp_path)
    for other in (content[:-20], content[:-1], content[1:], content + b"x", content + content, content[:-20] + b"x"):
        path.write_bytes(other)
        with pytest.raises(CheckpointError):
            describe(tmp_path)
    path.write_bytes(content)
    assert PurePosixPath(next(iter(describe(tmp_path).items.values())).path).name == "__0_0.distcp"


def test_containers_in_containers(tmp_path: Path) -> None:
    described(tmp_path, [4], [box([0], [4])])
    metadata = pickled(tmp_path)
    metadata.planner_data = "deep"
    content = pickle.dumps(metadata, protocol=3)
    deep = b"X\x04\0\0\0deep"
    assert content.count(deep) == 1
    (tmp_path / METADATA).write_bytes(content.replace(deep, b"(" * 100_000 + b"l" * 100_000))
    with pytest.raises(CheckpointError, match="recursion"):
        describe(tmp_path)
