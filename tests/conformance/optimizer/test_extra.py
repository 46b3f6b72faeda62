"""`extra` of bw.checkpoint: each rank's comes back to it, and takes its size in memory once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from bucketwheel import checkpoint
from tests.support import checkpoint_jobs as jobs
from tests.support.bits import assert_bitwise_equal
from tests.support.checkpoint_jobs import Model
from tests.support.optim_twins import on_ranks


def kept_extras(folder: Path) -> list[str]:
    return [
        key for key in checkpoint.Reader(folder).description.metadata.state_dict_metadata if key.startswith("extra")
    ]


@pytest.mark.parametrize("with_model", [True, False])
def test_each_rank_has_its_own_extra_again(with_model: bool, tmp_path: Path) -> None:
    """Rank 1 has what rank 0 has, without being the same objects, and on another device than tensors name; rank 3 has none."""

    def of(rank: int) -> Any:
        name = "".join(["run", "1"])  # not one object for both
        tensors = torch.full((3, 4), 2.0 if rank == 2 else 1.0).t()
        return None if rank == 3 else {"rng": tensors, "a": name, "b": name if rank else "".join(["run", "1"])}

    def save(comm: Any) -> None:
        job = jobs.of(comm)
        checkpoint.save(tmp_path, job.model if with_model else None, job.opt, of(comm.rank))

    def load(comm: Any) -> Any:
        job = jobs.of(comm)
        return checkpoint.load(tmp_path, job.model if with_model else None, job.opt)

    on_ranks(4, save)
    assert kept_extras(tmp_path) == ["extra", "extra_of_rank_2"]
    assert_bitwise_equal(on_ranks(4, load), [of(0), of(0), of(2), of(0)])
    with pytest.warns(
        UserWarning,
        match="an `extra` of each of 4 ranks. On another number of ranks, here 2, all ranks load that of rank 0",
    ):
        assert_bitwise_equal(on_ranks(2, load), [of(0)] * 2)
    with pytest.warns(UserWarning, match="here 1, all ranks load that of rank 0"):
        assert_bitwise_equal(load(None), of(0))
    state = {"extra": None}
    dcp.load(state, checkpoint_id=tmp_path)
    assert_bitwise_equal(state["extra"], of(0))
    assert_bitwise_equal(_load_state_dict_from_keys({"extra"}, checkpoint_id=tmp_path)["extra"], of(0))


def test_extras_of_torchs_ranks(rank_pool: Any, tmp_path: Path) -> None:
    """Rank 0 without one."""
    assert rank_pool(2).run(_extras, str(tmp_path)) == [(None, 3), ({"rank": 1}, 3)]
    assert kept_extras(tmp_path / "a") == ["extra_of_rank_1"] and kept_extras(tmp_path / "b") == ["extra"]


def _extras(rank: int, world: int, folder: str) -> Any:
    checkpoint.save(f"{folder}/a", Model(), extra={"rank": rank} if rank else None)
    checkpoint.save(f"{folder}/b", Model(), extra=3 if rank == 0 else None)
    return checkpoint.load(f"{folder}/a", Model()), checkpoint.load(f"{folder}/b", Model())
