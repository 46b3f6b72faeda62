"""Files of snapshots: whole ones alone have a name, and nobody else reads or prepares them."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from bucketwheel.checkpoint.snapshot_files import FILE_NAME, SnapshotFile, file_name, open_snapshots, private_folder

RUN = "0123456789abcdef"


def test_a_file_holds_memory_and_has_its_name_once_it_is_published(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "one" / "two")
    assert folder.stat().st_mode & 0o777 == 0o700
    name = file_name(RUN, 1, 2)
    for value in (3, 4):  # the second in place of the first
        file = SnapshotFile(folder, name, {"what": "x" * 5000}, 10_000)
        assert file.memory.numel() == 10_000
        assert not file.memory.any()
        file.memory.fill_(value)
        assert [about["what"] for _, about, _ in open_snapshots(folder)] == ["x" * 5000] * (value - 3)
        assert all(FILE_NAME.fullmatch(path.name) for path in folder.iterdir())
        file.publish()
        [(path, about, memory)] = open_snapshots(folder)
        assert path.stat().st_mode & 0o777 == 0o600
        assert torch.equal(memory[:10_000], torch.full((10_000,), value, dtype=torch.uint8))
    memory.zero_()
    assert open_snapshots(folder)[0][2][0] == 4, "what is read is nobody else's"
    file.memory.fill_(5)
    assert open_snapshots(folder)[0][2][0] == 5, "what is written is in the file"
    file.remove()
    file.remove()
    assert not list(folder.iterdir())


def test_what_others_may_look_into_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "ours")
    folder.chmod(0o750)
    for call in (private_folder, open_snapshots):
        with pytest.raises(
            PermissionError, match=r"ours must be a folder of this user .* mode 0700; it has .* mode 0750"
        ):
            call(folder)
    folder.chmod(0o700)
    with mock.patch("os.geteuid", return_value=12345), pytest.raises(PermissionError, match="uid 12345"):
        private_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="must be a folder"):
        private_folder(tmp_path / "link")
    file = SnapshotFile(folder, file_name(RUN, 0, 0), {}, 8)
    file.publish()
    [path] = folder.iterdir()
    path.chmod(0o640)
    with pytest.raises(PermissionError, match="must be a file of this user .* mode 0600"):
        open_snapshots(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        open_snapshots(folder)


def test_a_file_that_was_left_unfinished_is_made_anew(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "f")
    SnapshotFile(folder, file_name(RUN, 0, 0), {}, 8).memory.fill_(1)
    again = SnapshotFile(folder, file_name(RUN, 0, 0), {}, 8)
    assert not again.memory.any()
    again.publish()
    assert len(os.listdir(folder)) == 1


def test_another_file_is_no_snapshot(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "f")
    for content in (b"something else", b"", b"bucketwheel snapshot 1\n12", b"bucketwheel snapshot 1\nx\n{}"):
        path = folder / f"{file_name(RUN, 0, 0)}.snapshot"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ValueError, match="is no snapshot of this version"):
            open_snapshots(folder)
        path.unlink()
    SnapshotFile(folder, file_name(RUN, 0, 0), {}, 5000).publish()
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="or was cut short; remove it"):
        open_snapshots(folder)


def test_memory_that_is_short_is_told_before_it_is_used(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "f")
    with pytest.raises(OSError):
        SnapshotFile(folder, file_name(RUN, 0, 0), {}, 1 << 60)
    assert not list(folder.iterdir())
