"""Files of snapshots: memory that outlives its process, in a folder that the user named.

A file is made under another name and renamed when its copy has been begun, so what has a snapshot's name is a whole one.
Other users can neither read a file nor have prepared it: it is ours alone, in a folder that is ours alone.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import stat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["FILE_NAME", "SnapshotFile", "file_name", "open_snapshots", "private_folder"]

FILE_NAME = re.compile(
    r"\.?(?P<run>[0-9a-f]{16})-(?P<owner>\d+)-(?P<keeper>\d+)\.(snapshot|\d+)"
)  # also unfinished ones

_MAGIC = b"bucketwheel snapshot 1\n"
_HEADER = 4096  # bytes that the header is a multiple of
_SUFFIX = ".snapshot"


def file_name(run: str, owner: int, keeper: int) -> str:
    """Of the copy of the shard of ``owner`` that ``keeper`` keeps; without what it ends with."""
    return f"{run}-{owner}-{keeper}"


def private_folder(directory: str | os.PathLike[str]) -> Path:
    """Makes the folder, mode 0700. PermissionError if it is somebody else's, or others may look into it."""
    folder = Path(directory)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _expect_ours(folder, os.stat(folder, follow_symlinks=False), "a folder", 0o700)
    return folder


def _expect_ours(path: Path, found: os.stat_result, kind: str, mode: int) -> None:
    is_kind = stat.S_ISDIR(found.st_mode) if mode == 0o700 else stat.S_ISREG(found.st_mode)
    if not is_kind or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} must be {kind} of this user (uid {os.geteuid()}) of mode {mode:04o}; it has uid {found.st_uid} and "
            f"mode {stat.S_IMODE(found.st_mode):04o}: name another one, or chmod it"
        )


class SnapshotFile:
    """A new file of ``nbytes`` beside its header; ``about``: JSON, for who reads it. OSError where there is no room."""

    def __init__(self, folder: Path, name: str, about: dict[str, Any], nbytes: int) -> None:
        self._path = folder / f"{name}{_SUFFIX}"
        self._made = folder / f".{name}.{os.getpid()}"
        text = json.dumps({**about, "nbytes": nbytes}).encode()
        header = _MAGIC + f"{len(text)}\n".encode() + text
        begin = -(-len(header) // _HEADER) * _HEADER
        with contextlib.suppress(FileNotFoundError):  # of a process of this number that was killed
            self._made.unlink()
        file = os.open(self._made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(
                file, 0, begin + max(nbytes, 1)
            )  # else a write would end the process where memory is short
            os.pwrite(file, header, 0)
            self.memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)[begin : begin + nbytes]
        except BaseException:
            self._made.unlink()
            raise
        finally:
            os.close(file)

    def publish(self) -> None:
        """It has its name from now on, instead of another one of that name."""
        os.replace(self._made, self._path)

    def remove(self) -> None:
        for path in (self._path, self._made):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def open_snapshots(folder: Path) -> list[tuple[Path, dict[str, Any], Tensor]]:
    """All files of a folder: path, what they say they are, and memory, to which writes do not reach the file."""
    _expect_ours(folder, os.stat(folder, follow_symlinks=False), "a folder", 0o700)
    return [found for path in sorted(folder.glob(f"*{_SUFFIX}")) if (found := _open(path)) is not None]


def _open(path: Path) -> tuple[Path, dict[str, Any], Tensor] | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:  # another rank has just removed it
        return None
    try:
        _expect_ours(path, os.fstat(file), "a file", 0o600)
        size = os.fstat(file).st_size
        memory = mmap.mmap(file, size, access=mmap.ACCESS_COPY) if size else mmap.mmap(-1, 1)
    finally:
        os.close(file)
    end = memory.find(b"\n", len(_MAGIC), len(_MAGIC) + 20)
    length = memory[len(_MAGIC) : end] if memory[: len(_MAGIC)] == _MAGIC and end > 0 else b""
    begin = end + 1 + int(length) if length.isdigit() else size
    about = json.loads(memory[end + 1 : begin]) if begin < size else {}
    begin = -(-begin // _HEADER) * _HEADER
    if size < begin + about.get("nbytes", 1):
        raise ValueError(f"{path} is no snapshot of this version, or was cut short; remove it")
    return path, about, torch.frombuffer(memory, dtype=torch.uint8)[begin:]
