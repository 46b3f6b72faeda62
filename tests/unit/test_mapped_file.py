"""What full states, which write their files by it, do not show: who may read a file, and a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketwheel.checkpoint.mapped_file import MappedFile


def test_it_is_as_readable_as_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    MappedFile(tmp_path / "x.pt", [torch.ones(3)]).commit()
    assert (tmp_path / "x.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    left, other = (MappedFile(tmp_path / "x.pt", [torch.ones(3)]) for _ in range(2))
    with pytest.raises(
        FileNotFoundError
    ):  # if it is alive, it commits nothing, the other's unfinished file least of all
        left.commit()
    other.commit()
    assert os.listdir(tmp_path) == ["x.pt"]


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    def reserve(descriptor: int, offset: int, length: int) -> None:
        assert offset == 0 and length == os.fstat(descriptor).st_size > 8_000_000
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(OSError, match="No space left"):
        MappedFile(tmp_path / "x.pt", [torch.ones(2_000_000)])
    assert not os.listdir(tmp_path)
