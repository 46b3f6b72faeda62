"""Files that are on disk, whole, before they get their name."""

from __future__ import annotations

import glob
import os
import uuid
from pathlib import Path
from typing import Any

import torch


def save_whole(value: Any, path: str | os.PathLike[str]) -> None:
    """torch.save into a file beside ``path`` that becomes ``path`` once it is on disk. OSError if it cannot be written."""
    path = Path(path).absolute()
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):  # by a writer that was killed
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(temporary, "xb") as file:  # torch.save has a RuntimeError where it cannot open a path
            torch.save(value, file)
        sync_path(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """A file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
