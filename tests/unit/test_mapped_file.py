"""A torch.save file that is written through its memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketwheel.checkpoint.mapped_file import MappedFile, copy_values
from bucketwheel.testing import assert_bitwise_equal


def values() -> dict[str, Any]:
    torch.manual_seed(0)
    transposed = torch.randn(40, 6).t()
    return {
        "tensors": [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.zeros(0, 4), torch.tensor(2.5), transposed],
        "groups": ({"lr": 0.1, "names": ["a", "b"], "none": None, "large": torch.arange(100_000)},),
    }


def empty_like(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, 9)
    if isinstance(value, dict):
        return {k: empty_like(v) for k, v in value.items()}
    return type(value)(map(empty_like, value)) if isinstance(value, (list, tuple)) else value


def expect_equal(found: Any, expected: Any) -> None:
    assert_bitwise_equal(found["tensors"], expected["tensors"])
    assert found["groups"][0].keys() == expected["groups"][0].keys()
    assert_bitwise_equal(found["groups"][0]["large"], expected["groups"][0]["large"])
    assert found["tensors"][4].stride() == expected["tensors"][4].stride()


def test_what_is_written_to_its_tensors_is_in_the_file(tmp_path: Path) -> None:
    path, expected = tmp_path / "x.pt", values()
    path.write_bytes(b"before")
    file = MappedFile(path, empty_like(expected))
    assert not any(tensor.any() for tensor in file.saved["tensors"]), "zeros"
    copy_values(file.saved, expected)
    assert path.read_bytes() == b"before", "until it is complete"
    file.commit()
    file.remove()
    assert os.listdir(tmp_path) == ["x.pt"]
    for is_mapped in (True, False):
        expect_equal(torch.load(path, weights_only=True, mmap=is_mapped), expected)
    (tmp_path / "moved.pt").write_bytes(path.read_bytes())
    expect_equal(torch.load(tmp_path / "moved.pt", weights_only=True), expected)


def test_it_is_as_readable_as_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    MappedFile(tmp_path / "x.pt", [torch.ones(3)]).commit()
    assert (tmp_path / "x.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"before")
    MappedFile(tmp_path / "x.pt", [torch.ones(3)]).remove()
    assert os.listdir(tmp_path) == ["x.pt"] and (tmp_path / "x.pt").read_bytes() == b"before"


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    def reserve(descriptor: int, offset: int, length: int) -> None:
        assert offset == 0 and length == os.fstat(descriptor).st_size > 8_000_000
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(OSError, match="No space left"):
        MappedFile(tmp_path / "x.pt", [torch.ones(2_000_000)])
    assert not os.listdir(tmp_path)
