"""Files of snapshots: memory that outlives its process, in a folder that other users have no access to.

A file begins with a line of JSON that describes it. It gets its name when it holds a whole copy.
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

_PAGE = 4096  # the line of JSON is padded to a multiple of it
_PREFIX, _SUFFIX = "bucketwheel-2-", ".snapshot"  # 2: the version of what is in it


def private_folder(directory: str | os.PathLike[str]) -> Path:
    """Makes the folder with mode 0700. PermissionError if it is another user's, or others have access to it."""
    folder = Path(directory).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.stat(folder, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must belong to this user (uid {os.geteuid()}) and have mode 0700; it has uid {found.st_uid} and "
            f"mode {stat.S_IMODE(found.st_mode):04o}: choose another folder, or chmod this one"
        )
    return folder


class SnapshotFile:
    """A new file with ``nbytes`` of memory for a copy of the shard of rank ``owner``. ``about``: what `open_snapshots`
    returns of it. OSError if there is no room."""

    def __init__(self, folder: Path, run: str, owner: int, about: dict[str, Any], nbytes: int) -> None:
        self._path = folder / f"{_PREFIX}{run}-{owner}{_SUFFIX}"
        self._made = folder / f"{self._path.name}.unfinished"
        text = json.dumps({**about, "run": run}).encode()
        line = text.ljust(-(-(len(text) + 1) // _PAGE) * _PAGE - 1) + b"\n"
        with self._made.open("w+b") as file:
            try:  # without it a write where there is no room is a signal (SIGBUS)
                os.posix_fallocate(file.fileno(), 0, len(line) + nbytes)
            except OSError as error:
                self._made.unlink()
                raise OSError(
                    error.errno, f"{error.strerror} for {len(line) + nbytes} bytes", str(self._made)
                ) from None
            os.pwrite(file.fileno(), line, 0)
            self.memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)[len(line) :]

    def publish(self) -> None:
        """Gives it its name, and replaces the file that had it."""
        os.replace(self._made, self._path)

    def remove(self) -> None:
        for path in (self._path, self._made):
            path.unlink(missing_ok=True)


def remove_other_runs(folder: Path, run: str) -> None:
    """Removes the files of all runs but this one, unfinished ones too."""
    for path in folder.glob(f"bucketwheel-*{_SUFFIX}*"):  # of other versions too
        if not path.name.startswith(_PREFIX + run):
            path.unlink(missing_ok=True)


def open_snapshots(folder: Path) -> list[tuple[dict[str, Any], Tensor]]:
    """Of each file in a folder: ``about`` with its ``run``, and its memory. Writes to the memory do not reach the
    file."""
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        about = json.loads(memory.readline())
        found.append((about, torch.frombuffer(memory, dtype=torch.uint8)[memory.tell() :]))
    return found
