"""MappedFile: a torch.save file that is written piece by piece, through memory that is the file's."""

from __future__ import annotations

import glob
import mmap
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["MappedFile", "copy_values", "sync_path"]


class MappedFile:
    """A torch.save file beside ``path`` that becomes ``path`` by `commit`.

    ``saved``: ``skeleton`` (dicts, lists, tuples, numbers and CPU tensors, whose values are not read) as it is in the file. Its
    tensors are the file's memory, zeros at first.
    """

    def __init__(self, path: str | os.PathLike[str], skeleton: Any) -> None:
        self._path = Path(path).absolute()
        self._temporary = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex[:12]}.tmp")
        for left in self._path.parent.glob(f".{glob.escape(self._path.name)}.*.tmp"):  # by a process that was killed
            left.unlink(missing_ok=True)
        try:
            with torch.serialization.skip_data():
                torch.save(skeleton, self._temporary)
            with open(self._temporary, "r+b") as file:  # a disk that is full is an error here, and a signal later
                os.posix_fallocate(file.fileno(), 0, os.path.getsize(self._temporary))
            with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
                self.saved = torch.load(self._temporary, weights_only=True, mmap=True)
        except BaseException:
            self.remove()
            raise

    def commit(self) -> None:
        """`saved` is on disk, and called ``path``, when this returns."""
        sync_path(self._temporary)
        os.replace(self._temporary, self._path)
        sync_path(self._path.parent)

    def remove(self) -> None:
        """What was not committed."""
        self._temporary.unlink(missing_ok=True)


def copy_values(to: Any, of: Any) -> None:
    """Copies the values of all tensors in ``of`` (dicts, lists, tuples) to those in ``to``, which is made alike."""
    if isinstance(of, dict):
        copy_values([*to.values()], [*of.values()])
    elif isinstance(of, (list, tuple)):
        for one, other in zip(to, of, strict=True):
            copy_values(one, other)
    elif isinstance(of, Tensor):
        to.copy_(of)


def sync_path(path: Path) -> None:
    """A file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
