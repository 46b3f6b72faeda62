"""``.metadata``: of torch's and of ours; nothing of it is executed, and what does not fit is refused before data is read.

``data/torch_2_15`` was written by torch 2.15's FileSystemWriter, whose properties of a tensor torch 2.14 cannot unpickle.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketwheel import torch_internals
from bucketwheel.checkpoint import Reader
from bucketwheel.checkpoint.format import ATTRIBUTE, METADATA, describe, packed
from bucketwheel.errors import CheckpointError
from tests.support.checkpoint_jobs import Calls, pickled
from tests.unit.test_writer import save, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
OF_TORCH_2_15 = Path(__file__).parent / "data" / "torch_2_15"


def test_what_torch_2_15_wrote() -> None:
    matrix, half, scalar = torch.zeros(3, 4), torch.zeros(5).bfloat16(), torch.tensor(0)
    state = {"matrix": matrix, "half": half, "scalar": scalar, "group": {"lr": 0.0, "names": []}}
    dcp.load(state, storage_reader=Reader(OF_TORCH_2_15))
    assert torch.equal(matrix, torch.arange(12.0).view(3, 4)) and torch.equal(half, torch.arange(5).bfloat16())
    assert scalar.item() == 7 and state["group"] == {"lr": 0.5, "names": ["a", "b"]}


@pytest.mark.parametrize("place", ["whole", "planner_data", "attribute"])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    "call", [(os.system, "touch {}"), (eval, "open('{}', 'w')"), (Path.touch, Path("{}")), (torch.load, "{}")]
)
def test_nothing_is_executed(tmp_path: Path, call: tuple[Any, ...], place: str, ours: bool) -> None:
    save(tmp_path / "c", {"x": values(3)})
    flag = tmp_path / "executed"
    hostile = Calls(*(type(part)(str(part).format(flag)) if isinstance(part, (str, Path)) else part for part in call))
    metadata: Any = pickled(tmp_path / "c")
    if place == "whole":
        metadata = hostile
    else:
        setattr(metadata, place, {"x": hostile})
    (tmp_path / "c" / METADATA).write_bytes(packed(metadata) if ours else pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names \S+, which the metadata of a checkpoint cannot contain: no code"):
        describe(tmp_path / "c")
    assert not flag.exists()


CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"N.",
        b"garbage",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff",  # a frame of 2^64 bytes
        b"(" * 100_000 + b"l" * 100_000 + b".",
        CLASS + b".",
        CLASS + b")R}S'state_dict_metadata'\nNsb.",
        CLASS + b"N}S'__reduce__'\nNs\x86b.",  # writes an attribute to the class
        b"cbuiltins\ngetattr\n(cbuiltins\nset\nS'pop'\ntR.",
    ],
    ids=range(9),
)
def test_what_is_no_metadata(tmp_path: Path, content: bytes) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match=METADATA):
        describe(tmp_path)
    assert Metadata.__reduce__ is object.__reduce__


@pytest.mark.parametrize(
    ("shape", "boxes", "fits"),
    [
        ([], [([], [])], True),
        ([4], [([2], [2]), ([0], [2])], True),
        ([0, 3], [([0, 0], [0, 3])], True),
        ([4, 6], [([0, 0], [4, 2]), ([0, 2], [1, 4]), ([1, 2], [3, 4])], True),
        ([4], [], False),
        ([4], [([0], [3])], False),
        ([4], [([0], [4]), ([1], [1])], False),
        ([4], [([1], [4])], False),
        ([4], [([0, 0], [4, 1])], False),
        ([4], [([-1], [4])], False),
        ([-4], [([0], [4])], False),
    ],
)
def test_boxes_of_another_writer_leave_nothing_out(
    tmp_path: Path, shape: list[int], boxes: list[Any], fits: bool
) -> None:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)
    info = torch_internals.storage_info("f", 0, 1 << 20)
    metadata = Metadata({"x": entry}, storage_data={MetadataIndex("x", chunk.offsets): info for chunk in chunks})
    (tmp_path / "f").write_bytes(bytes(1 << 20))
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    if fits:
        assert len(describe(tmp_path).items) == len(boxes)
    else:
        with pytest.raises(CheckpointError, match=METADATA):
            describe(tmp_path)


def of_info(**changed: Any) -> Callable[[Path, Metadata], None]:
    return lambda folder, metadata: vars(next(iter(metadata.storage_data.values()))).update(changed)


def symlink(folder: Path, metadata: Metadata) -> None:
    (path,) = folder.glob("data-*/*")
    path.symlink_to(path.rename(folder.parent / "elsewhere"))


def pipe(folder: Path, metadata: Metadata) -> None:
    (path,) = folder.glob("data-*/*")
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_info(relative_path="/etc/passwd"), "'/etc/passwd' is not a path inside the checkpoint"),
        (of_info(relative_path="data/../../elsewhere"), "is not a path inside"),
        (of_info(relative_path="missing"), "missing is missing"),
        (symlink, "is not a path inside"),
        (pipe, "is missing"),
        (of_info(transform_descriptors=["zstd"]), "FileSystemReader"),
        (of_info(offset=10**6), "bytes, .* were written"),
        (lambda _, m: m.storage_data.clear(), "is longer"),
        (lambda _, m: getattr(m, ATTRIBUTE).update(version=1), "format 1, not 2: .* the release that wrote them"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: Callable[[Path, Metadata], None], message: str) -> None:
    folder = tmp_path / "c"
    save(folder, {"x": values(3)})
    metadata = pickled(folder)
    change(folder, metadata)
    (folder / METADATA).write_bytes(packed(metadata))
    with pytest.raises(CheckpointError, match=message) as refused:
        describe(folder)
    assert str(folder) in str(refused.value)


def test_no_byte_of_it_can_change_or_go(tmp_path: Path) -> None:
    save(tmp_path, {"x": values(3)})
    path = tmp_path / METADATA
    content = path.read_bytes()
    changed = [content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :] for at in range(0, len(content), 7)]
    for other in (*changed, content[:-20], content[:-1], content[1:], content + b"x", content[:-20] + b"x"):
        path.write_bytes(other)
        with pytest.raises(CheckpointError):
            describe(tmp_path)
