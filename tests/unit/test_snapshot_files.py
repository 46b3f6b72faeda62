"""Files of snapshots: whole ones alone have a name, in a folder that nobody else may look into."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from bucketwheel.checkpoint.snapshot_files import SnapshotFile, open_snapshots, private_folder, remove_other_runs

RUN, OTHER = "0123456789abcdef", "f" * 16


def test_a_file_holds_memory_and_has_its_name_once_it_is_published(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "one" / "two")
    assert folder.stat().st_mode & 0o777 == 0o700
    for value in (3, 4):  # the second in place of the first
        SnapshotFile(folder, RUN, 1, {}, 20_000).memory.fill_(9)  # is left unfinished
        file = SnapshotFile(folder, RUN, 1, {"what": "x" * 5000}, 10_000)
        assert file.memory.numel() == 10_000
        assert not file.memory.any()
        file.memory.fill_(value)
        assert [about["what"] for about, _ in open_snapshots(folder)] == ["x" * 5000] * (value - 3)
        file.publish()
        [(about, memory)] = open_snapshots(folder)
        assert about["run"] == RUN
        assert torch.equal(memory, torch.full((10_000,), value, dtype=torch.uint8))
    memory.zero_()
    assert open_snapshots(folder)[0][1][0] == 4, "what is read is nobody else's"
    file.memory.fill_(5)
    assert open_snapshots(folder)[0][1][0] == 5, "what is written is in the file"
    file.remove()
    file.remove()
    assert not list(folder.iterdir())


def test_files_of_other_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = {"mine.snapshot", f"bucketwheel-2-{RUN}-0.snapshot", f"bucketwheel-2-{RUN}-1.snapshot.unfinished"}
    for name in kept | {f"bucketwheel-2-{OTHER}-0.snapshot", f"bucketwheel-2-{OTHER}-1.snapshot.unfinished"}:
        (tmp_path / name).touch()
    remove_other_runs(tmp_path, RUN)
    assert set(os.listdir(tmp_path)) == kept


def test_a_folder_that_others_may_look_into_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "ours")
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match=r"ours must belong to this user .* mode 0700; it has .* mode 0750"):
        private_folder(folder)
    folder.chmod(0o700)
    with mock.patch("os.geteuid", return_value=12345), pytest.raises(PermissionError, match="uid 12345"):
        private_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(PermissionError, match="must belong"):
        private_folder(tmp_path / "link")


def test_memory_that_is_short_is_told_before_it_is_used(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        SnapshotFile(tmp_path, RUN, 0, {}, 1 << 60)
    assert not os.listdir(tmp_path)
