"""`Reader`: what it reads of ours and of stock checkpoints, and in which pieces. Damage: tests/faults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bucketwheel.checkpoint import Reader, Writer
from bucketwheel.checkpoint.live import part_of
from tests.unit.test_writer import assert_equal, blank, save, some_state, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def load(folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    dcp.load(found, storage_reader=Reader(folder))
    return found


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
def test_ours(tmp_path: Path, chunk_bytes: int) -> None:
    state = some_state()
    save(tmp_path, state, chunk_bytes=chunk_bytes)
    found = blank(state)
    before = found["matrix"]._version
    assert_equal(load(tmp_path, found), state)
    assert found["matrix"]._version > before  # as autograd, and others that ask for versions, see writes
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_equal(found, state)


def test_torchs(tmp_path: Path) -> None:
    state = some_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    assert_equal(load(tmp_path, blank(state)), state)
    assert Reader(tmp_path).verify() == 0


@pytest.mark.parametrize("writer", [Writer, dcp.FileSystemWriter])
def test_views_whose_memory_has_other_values(writer: Any, tmp_path: Path) -> None:
    turned = torch.complex(values(3, 2), values(3, 2, seed=1))
    state = {"conjugate": turned.conj(), "negative": turned.conj().imag.contiguous()}
    dcp.save(state, storage_writer=writer(tmp_path))
    for found in (
        blank(state),
        {"conjugate": torch.zeros_like(turned).conj(), "negative": torch._neg_view(torch.ones(3, 2))},
    ):
        load(tmp_path, found)
        assert all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.parametrize("writer", ["ours", "torch"])
def test_every_part_of_a_box(tmp_path: Path, writer: str) -> None:
    """Of rows that fit a chunk, and of rows that do not; into memory that is contiguous, and that is not."""
    state = {"few": values(9, 5), "long": values(3, 4, 2000), "vector": values(5000), "scalar": torch.tensor(2.5)}
    writers = {"ours": Writer(tmp_path, chunk_bytes=4096), "torch": dcp.FileSystemWriter(tmp_path)}
    dcp.save(state, storage_writer=writers[writer])
    reader = Reader(tmp_path)
    for name, tensor in state.items():
        index = MetadataIndex(name, [0] * tensor.dim())
        generator = torch.Generator().manual_seed(0)
        for _ in range(25):
            begin = [int(torch.randint(size, (), generator=generator)) for size in tensor.shape]
            length = [
                int(torch.randint(1, size - at + 1, (), generator=generator))
                for size, at in zip(tensor.shape, begin, strict=True)
            ]
            sizes = torch.Size(length)
            item = ReadItem(LoadItemType.TENSOR, index, sizes, index, torch.Size(begin), sizes)
            reader.check(item)
            for checks in (False, True):
                for target in (torch.zeros(length), torch.zeros([*length, 2])[..., 0]):
                    reader.read(item, target, checks=checks)
                    assert torch.equal(target, part_of(tensor, begin, length))
    reader.close()


class Odd:
    """What only a pickle can hold."""

    ran = 0

    def __init__(self) -> None:
        self.value = 3

    def __setstate__(self, state: dict[str, int]) -> None:
        Odd.ran += 1
        self.__dict__.update(state)


@pytest.mark.parametrize("ours", [True, False])
def test_objects_execute_nothing(tmp_path: Path, ours: bool) -> None:
    writer = Writer(tmp_path) if ours else dcp.FileSystemWriter(tmp_path)
    dcp.save({"x": values(3), "odd": Odd()}, storage_writer=writer)
    Odd.ran = 0
    found: dict[str, Any] = {"x": torch.zeros(3), "odd": None}
    with pytest.raises(CheckpointException, match="'odd' in .* is not made of tensors and plain values") as refused:
        load(tmp_path, found)
    assert Odd.ran == 0 and (found["x"] == 0).all() and "FileSystemReader loads it" in str(refused.value)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path))
    assert found["odd"].value == 3 and Odd.ran == 1


def test_files_are_closed(tmp_path: Path) -> None:
    save(tmp_path, {"x": values(3)})

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    count = opened()
    reader = Reader(tmp_path)
    dcp.load({"x": torch.zeros(3)}, storage_reader=reader)
    assert opened() == count
    with mock.patch.object(Reader, "read", side_effect=RuntimeError), pytest.raises(CheckpointException):
        dcp.load({"x": torch.zeros(3)}, storage_reader=reader)
    assert opened() == count
    assert reader.verify() and opened() == count


def test_few_files_are_open_at_a_time(rank_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint that thousands of ranks have written, a process may not open all."""
    rank_pool(2).run(save_rows, str(tmp_path))
    monkeypatch.setattr("bucketwheel.checkpoint.reader._MOST_FILES", 1)
    read, opened = Reader._read, []

    def counted(reader: Reader, *given: Any) -> None:
        read(reader, *given)
        opened.append(len(reader._files))

    monkeypatch.setattr(Reader, "_read", counted)
    reader = Reader(tmp_path)
    assert reader.verify() > 0 and len(reader.description.items) == 2 and max(opened) == 1


def save_rows(rank: int, world: int, folder: str) -> None:
    dcp.save({"rows": sharded(init_device_mesh("cpu", (2,)), Shard(0))}, storage_writer=Writer(folder))


def test_another_folder_by_reset(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        save(tmp_path / name, {"x": values(3, seed=seed)})
    reader, found = Reader(tmp_path / "a"), {"x": torch.zeros(3)}
    for seed, name in [(1, "b"), (0, "a")]:
        dcp.load(found, checkpoint_id=tmp_path / name, storage_reader=reader)
        assert torch.equal(found["x"], values(3, seed=seed))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def sharded(mesh: Any, *placements: Any) -> DTensor:
    return distribute_tensor(values(11, 6), mesh, placements)


def save_and_load_dtensors(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    fully_shard(model, mesh=mesh)
    state = {"rows": sharded(mesh, Shard(0)), "columns": sharded(mesh, Shard(1)), "model": model.state_dict()}
    for name, writer in {"ours": Writer(f"{folder}/ours"), "torch": dcp.FileSystemWriter(f"{folder}/torch")}.items():
        dcp.save(state, storage_writer=writer)
        found = {
            "rows": sharded(mesh, Shard(1)).zero_(),
            "columns": sharded(mesh, Replicate()).zero_(),
            "model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()},
        }
        dcp.load(found, storage_reader=Reader(f"{folder}/{name}"))
        assert torch.equal(found["rows"].full_tensor(), values(11, 6))
        assert torch.equal(found["columns"].to_local(), values(11, 6))
        assert all((value.full_tensor() == 0.5).all() for value in found["model"].values())
    found = {"rows": torch.zeros(11, 6)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(f"{folder}/ours"))
    assert torch.equal(found["rows"], values(11, 6))


def test_dtensors_and_fsdp2_of_two_ranks(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(save_and_load_dtensors, str(tmp_path))
    reader = Reader(tmp_path / "ours")
    assert reader.description.world == 2 and reader.verify() > 2 * 11 * 6 * 4
    boxes = reader.description.metadata.state_dict_metadata["columns"].chunks
    assert sorted(tuple(box.offsets) for box in boxes) == [(0, 0), (0, 3)]
    assert len(list(tmp_path.glob("ours/data-*/__?_0.distcp"))) == 2
    reader.close()
