"""Files of snapshots: memory that outlives its process, in a folder that the user named, which nobody else may look into.

A file is made under another name and renamed when its copy has been begun, so what has a snapshot's name is a whole one.
It begins with a line of JSON that describes it.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["SnapshotFile", "open_snapshots", "private_folder", "remove_other_runs"]

_PAGE = 4096  # the line of JSON is padded to a multiple of it
_PREFIX, _SUFFIX = "bucketwheel-1-", ".snapshot"  # 1: the version of what is in it


def private_folder(directory: str | os.PathLike[str]) -> Path:
    """Makes the folder, mode 0700. PermissionError if it is somebody else's, or others may look into it."""
    folder = Path(directory)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.stat(folder, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of this user (uid {os.geteuid()}) of mode 0700; it has uid {found.st_uid} and "
            f"mode {stat.S_IMODE(found.st_mode):04o}: name another one, or chmod it"
        )
    return folder


class SnapshotFile:
    """A new file with ``nbytes`` of memory for the shard of ``owner``; ``about``: JSON, for who reads it. OSError where there
    is no room."""

    def __init__(self, folder: Path, run: str, owner: int, about: dict[str, Any], nbytes: int) -> None:
        self._path = folder / f"{_PREFIX}{run}-{owner}{_SUFFIX}"
        self._made = folder / f"{self._path.name}.unfinished"
        text = json.dumps({**about, "run": run}).encode()
        line = text.ljust(-(-(len(text) + 1) // _PAGE) * _PAGE - 1) + b"\n"
        with self._made.open("w+b") as file:
            try:  # else a write would end the process where memory is short
                os.posix_fallocate(file.fileno(), 0, len(line) + nbytes)
            except OSError as error:
                raise OSError(
                    error.errno, f"{error.strerror} for {len(line) + nbytes} bytes", str(self._made)
                ) from None
            os.pwrite(file.fileno(), line, 0)
            self.memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)[len(line) :]

    def publish(self) -> None:
        """It has its name from now on, instead of another one of that name."""
        os.replace(self._made, self._path)

    def remove(self) -> None:
        for path in (self._path, self._made):
            path.unlink(missing_ok=True)


def remove_other_runs(folder: Path, run: str) -> None:
    """Unfinished ones too."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}*"):
        if not path.name.startswith(_PREFIX + run):
            path.unlink(missing_ok=True)


def open_snapshots(folder: Path) -> list[tuple[dict[str, Any], Tensor]]:
    """All files of a folder: what they say they are, and memory, to which writes do not reach the file."""
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        about = json.loads(memory.readline())
        found.append((about, torch.frombuffer(memory, dtype=torch.uint8)[memory.tell() :]))
    return found
