"""Piece: torch's stager copies pieces into memory of the staging before, and never into what is still in use."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bucketwheel.checkpoint import TensorShard, piece
from bucketwheel.checkpoint.piece import Buffers

NUMEL = 1 << 16


def part(value: float, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> TensorShard:
    return TensorShard(torch.full((numel,), value, dtype=dtype), (2 * numel,), (1,), [(numel, 2 * numel)], (1, 2), "w")


def unseen(value: float, of_optimizer: Buffers | None = None) -> TensorShard:
    """As `state_dict` makes them."""
    copied = piece.copy_unseen(part(value).piece, of_optimizer or Buffers(), {})
    return TensorShard(copied, (2 * NUMEL,), (1,), [(NUMEL, 2 * NUMEL)], (1, 2), "w", is_unseen=True)


def staged(state: dict[str, Any]) -> dict[str, Any]:
    """As `async_save` stages by default, with a stager of its own for each save."""
    return DefaultStager(StagingOptions(False, False, False, False)).stage(state)


@pytest.fixture(autouse=True)
def buffers(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    monkeypatch.setattr(piece, "_buffers", Buffers())
    return piece._buffers


def places(state: dict[str, Any]) -> set[int]:
    return {shard.piece.data_ptr() for shard in state.values()}


def test_the_next_staging_takes_the_memory_of_the_last(buffers: Buffers) -> None:
    copies = staged({"a": part(1), "b": part(2), "half": part(3, dtype=torch.bfloat16)})
    taken = places(copies)
    assert [float(shard.piece[-1]) for shard in copies.values()] == [1, 2, 3]
    assert buffers.nbytes == NUMEL * (4 + 4 + 2)
    del copies
    again = staged({"a": part(4), "b": part(5), "half": part(6, dtype=torch.bfloat16)})
    assert places(again) == taken
    assert [float(shard.piece[0]) for shard in again.values()] == [4, 5, 6]
    assert torch.equal(again["a"], part(4)) and again["a"].part == (1, 2)


def test_what_is_in_use_is_left_alone(buffers: Buffers) -> None:
    first = staged({"a": part(1)})
    view = first["a"].piece[3:]
    second = staged({"a": part(2)})
    del first
    third = staged({"a": part(3)})
    assert len(places(second) | places(third) | {view.data_ptr() - 12}) == 3
    assert float(view[0]) == 1 and float(second["a"].piece[0]) == 2
    del view, second, third
    staged({"a": part(4)})
    assert buffers.nbytes == 4 * NUMEL  # of the staging before; the other two are gone


def test_no_more_is_kept_than_the_last_staging_took(buffers: Buffers) -> None:
    staged({"a": part(1), "b": part(1)})
    staged({"a": part(2, NUMEL + 1)})
    staged({"a": part(3, NUMEL + 1)})
    assert buffers.nbytes == 4 * (NUMEL + 1)


def test_one_of_two_names_of_a_shard_is_a_copy_once(buffers: Buffers) -> None:
    shard = part(1)
    copies = staged({"a": shard, "b": shard})
    assert copies["a"] is copies["b"] and buffers.nbytes == 4 * NUMEL


@pytest.mark.parametrize("first", ["exported", "staged"])
def test_what_nobody_has_seen_is_not_copied_until_somebody_has_it(buffers: Buffers, first: str) -> None:
    exported = unseen(1)
    copied = staged({"a": exported})["a"]
    again = staged({"a": exported})["a"]
    assert buffers.nbytes == 4 * NUMEL  # of the second
    shards = {"exported": exported, "staged": copied}
    shards.pop(first).piece.zero_()
    (other,) = shards.values()
    assert torch.equal(other, part(1)) and torch.equal(again, part(1))
    other.piece.zero_()
    assert torch.equal(again, part(1))


def test_what_somebody_has_seen_is_copied(buffers: Buffers) -> None:
    exported = unseen(1)
    view = exported.piece[3:]
    copied = staged({"a": exported})["a"]
    view.zero_()
    assert torch.equal(copied, part(1)) and buffers.nbytes == 4 * NUMEL


def test_state_dicts_of_optimizers_take_the_memory_of_those_before(buffers: Buffers) -> None:
    """Also where a piece is copied by the stager because somebody has seen it."""
    of = {"a": Buffers(), "b": Buffers()}

    def save(value: float) -> set[int]:
        return places(staged({"a": unseen(value, of["a"]), "b": unseen(value, of["b"]), "seen": part(value)}))

    for one in of.values():
        unseen(0, one)
        assert one.nbytes == 0, "memory is kept before anything has been staged"
    save(1)
    assert save(2) == save(3)
    assert [one.nbytes for one in (*of.values(), buffers)] == [4 * NUMEL] * 3


def test_small_pieces_and_other_copies_are_ordinary_memory(buffers: Buffers) -> None:
    assert torch.equal(staged({"a": part(1, 100)})["a"], part(1, 100))
    other = copy.deepcopy(part(2))
    assert torch.equal(other, part(2))
    assert buffers.nbytes == 0


def test_what_a_stager_is_asked_for_it_does_itself(buffers: Buffers) -> None:
    """As pinned memory, which needs a GPU."""
    shared = DefaultStager(StagingOptions(False, True, False, False)).stage({"a": part(1)})["a"]
    assert shared.piece.is_shared() and torch.equal(shared, part(1))
    assert buffers.nbytes == 0


def test_a_process_that_loads_a_shard_needs_no_native_code() -> None:
    """The one of `async_save` writes files, nothing else."""
    code = (
        "import pickle, sys\n"
        "given = pickle.load(sys.stdin.buffer)\n"
        "assert given.piece.tolist() == [1.0, 1.0], given\n"
        "assert 'bucketwheel._cpu' not in sys.modules, 'native code is loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(part(1, 2)), check=True, timeout=120)
