"""1,000 damaged checkpoints: each is an error before a value is loaded; none crashes, executes anything or loads wrong values.

Of a checkpoint of ours, each bit counts. One of torch's has no checksums: what is cut off, missing, foreign or hostile shows.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from bucketwheel.checkpoint import Reader, TensorShard, Writer
from bucketwheel.checkpoint.format import METADATA, packed
from bucketwheel.errors import CheckpointError
from tests.support.checkpoint_jobs import Calls, pickled, save_parts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
ROWS, COLUMNS = 40, 50
UNTOUCHED = -7.0


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {name: torch.randn(ROWS, COLUMNS, generator=generator) for name in ("a", "b")}
    return {**state, "step": torch.tensor(float(seed)), "group": {"lr": 0.5 + seed, "name": "decay"}}


def save_by_two_ranks(folder: Path, seed: int) -> None:
    """Half of each matrix by each rank."""
    states = [state_of(seed) for _ in range(2)]
    for rank, state in enumerate(states):
        part = (rank * ROWS * COLUMNS // 2, (rank + 1) * ROWS * COLUMNS // 2)
        for name in ("a", "b"):
            piece = state[name].flatten()[slice(*part)]
            state[name] = TensorShard(piece, (ROWS, COLUMNS), (COLUMNS, 1), [part], (rank, 2))
    save_parts(states, Writer(folder, chunk_bytes=4096, sync=False))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of ours, of one structure and different values, and one of torch's."""
    folder = tmp_path_factory.mktemp("whole")
    save_by_two_ranks(folder / "ours", 1)
    save_by_two_ranks(folder / "other", 2)
    dcp.save(state_of(1), storage_writer=dcp.FileSystemWriter(folder / "torchs", sync_files=False))
    return folder


def blank() -> dict[str, Any]:
    matrices = {name: torch.full((ROWS, COLUMNS), UNTOUCHED) for name in ("a", "b")}
    return {**matrices, "step": torch.tensor(UNTOUCHED), "group": {"lr": UNTOUCHED, "name": ""}}


def is_untouched(state: dict[str, Any]) -> bool:
    tensors = all((state[name] == UNTOUCHED).all() for name in ("a", "b", "step"))
    return tensors and state["group"] == {"lr": UNTOUCHED, "name": ""}


# ---- damage: each changes one checkpoint ------------------------------------------------------------------------------


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.distcp"))


def any_file(folder: Path, chance: random.Random) -> Path:
    return chance.choice([folder / METADATA, *data_files(folder)])


def flip_bits(folder: Path, whole: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    content = bytearray(path.read_bytes())
    for bit in chance.sample(range(8 * len(content)), chance.choice([1, 1, 2, 8, 100])):
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def zero_a_block(folder: Path, whole: Path, chance: random.Random) -> None:
    path = chance.choice(data_files(folder))
    content = bytearray(path.read_bytes())
    begin = chance.randrange(0, len(content) - 512)
    content[begin : begin + 512] = bytes(512)
    assert content != path.read_bytes()
    path.write_bytes(content)


def cut_off(folder: Path, whole: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    os.truncate(path, chance.choice([0, 1, path.stat().st_size - 1, chance.randrange(path.stat().st_size)]))


def lengthen(folder: Path, whole: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.choice([1, 20, 5000])))


def remove(folder: Path, whole: Path, chance: random.Random) -> None:
    any_file(folder, chance).unlink()


def rename(folder: Path, whole: Path, chance: random.Random) -> None:
    path = chance.choice(data_files(folder))
    path.rename(path.with_name(chance.choice(["__5_0.distcp", "__0_0", ".distcp"])))


def swap_files(folder: Path, whole: Path, chance: random.Random) -> None:
    first, second = data_files(folder)
    first.rename(folder / "between")
    second.rename(first)
    (folder / "between").rename(second)


def foreign_file(folder: Path, whole: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    size = path.stat().st_size
    kind = chance.randrange(4)
    if kind == 0:
        with open(path, "wb") as file:
            torch.save(state_of(1), file)
    else:
        path.write_bytes([b"", chance.randbytes(size), b"text\n" * (size // 5 + 1), pickle.dumps({"a": 1})][kind])


def file_of_another(folder: Path, whole: Path, chance: random.Random) -> None:
    """Of a checkpoint of the same structure: other values of the same sizes."""
    at = chance.randrange(3)
    if at == 2:
        shutil.copy(whole / "other" / METADATA, folder / METADATA)
    else:
        shutil.copy(data_files(whole / "other")[at], data_files(folder)[at])


def tampered(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """With the checksum that belongs to it."""
    metadata = pickled(folder)
    change(metadata)
    (folder / METADATA).write_bytes(packed(metadata))


def tamper_with_names(folder: Path, whole: Path, chance: random.Random) -> None:
    name = chance.choice(["/etc/passwd", "../ours/x", "..", ".", "", METADATA, "x\0y", "data", "\u2028", "a" * 5000])

    def change(metadata: Metadata) -> None:
        if chance.random() < 0.5:
            chance.choice(list(metadata.storage_data.values())).relative_path = name
        else:
            old = chance.choice(list(metadata.state_dict_metadata))
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(old)

    tampered(folder, change)


def tamper_with_places(folder: Path, whole: Path, chance: random.Random) -> None:
    def change(metadata: Metadata) -> None:
        first, second = chance.sample(list(metadata.storage_data), 2)
        infos = metadata.storage_data
        kind = chance.randrange(4)
        if kind == 0:
            infos[first], infos[second] = infos[second], infos[first]
        elif kind == 1:
            infos[first].offset += chance.choice([-1, 1, 4, 1 << 40, -(1 << 40)])
        elif kind == 2:
            infos[first].length = chance.choice([-1, 0, 3, 1 << 40, 1 << 70])
        else:
            metadata.state_dict_metadata["a"].chunks[0].offsets = torch.Size([chance.choice([1, 19, 21, 40]), 0])

    tampered(folder, change)


def hostile_pickle(folder: Path, whole: Path, chance: random.Random) -> None:
    hostile = Calls(os.system, f"touch {folder / 'executed'}")
    kind = chance.randrange(3)
    if kind == 0:
        (folder / METADATA).write_bytes(pickle.dumps(hostile))
    else:
        changes = [lambda m: setattr(m, "planner_data", hostile), lambda m: m.state_dict_metadata.update(a=hostile)]
        tampered(folder, changes[kind - 1])


OURS = [
    *[flip_bits] * 6,
    *(zero_a_block, cut_off, cut_off, lengthen, remove, rename, swap_files, foreign_file),
    *(file_of_another, tamper_with_names, tamper_with_places, hostile_pickle),
]
TORCHS = [cut_off, remove, rename, foreign_file, hostile_pickle]
CASES = range(1000)
FAST = 60


def kind_of(case: int) -> tuple[str, Callable[[Path, Path, random.Random], None]]:
    kinds = [("ours", damage) for damage in OURS] + [("torchs", damage) for damage in TORCHS]
    return kinds[case % len(kinds)]


@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("cases", [CASES[:FAST], pytest.param(CASES[FAST:], marks=pytest.mark.slow)], ids=["60", "940"])
def test_damage_is_an_error_before_anything_is_loaded(tmp_path: Path, whole: Path, cases: Sequence[int]) -> None:
    for name in ("ours", "torchs"):  # it is the damage that is refused
        state = blank()
        dcp.load(state, storage_reader=Reader(whole / name))
        assert torch.equal(state["a"], state_of(1)["a"]) and state["group"] == state_of(1)["group"]
    for case in cases:
        owner, damage = kind_of(case)
        folder = tmp_path / str(case)
        shutil.copytree(whole / owner, folder)
        damage(folder, whole, random.Random(case))
        told = f"case {case}: {damage.__name__} of {owner}"
        if owner == "ours":
            with pytest.raises(CheckpointError):
                pytest.fail(f"{told}: {Reader(folder).verify()} bytes compared, no error")
        state = blank()
        with pytest.raises(CheckpointException, match=r"CheckpointError|CRC|metadata|Missing key"):
            dcp.load(state, storage_reader=Reader(folder))
            pytest.fail(f"{told}: no error")
        assert is_untouched(state), told
        assert not (folder / "executed").exists(), told
        shutil.rmtree(folder)
