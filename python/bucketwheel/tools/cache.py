"""``bucketwheel cache``: the built native modules in the cache folder: lists them, or removes them.

"used here" is the module that this installation loads, with the compilers and GPUs that it sees now. ``clear`` removes other
modules and the build folders; ``clear --all`` removes every module. A build folder whose lock is held stays. Links are
neither followed nor removed. Exit status: 0; 1 if the folder cannot be used, is another user's or cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from bucketwheel.errors import BuildError
from bucketwheel.native import cache, modules
from bucketwheel.native.toolchain import CPU, CUDA

# What is listed and removed: paths in the folder that builds make.
_MODULE, _BUILD = re.compile(r"(cpu|cuda)-.+-[0-9a-f]{16}"), re.compile(r"builds/(cpu|cuda)(-[0-9a-f]{12}){2}")


@dataclass(frozen=True)
class Item:
    """A folder in the cache: a built module, or the folder of a build."""

    path: Path
    state: str  # used here, not used here, not known; build folder
    size_bytes: int
    written_at: float  # last, in seconds since 1970

    def __str__(self) -> str:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.written_at))
        return f"{self.state:14} {_mib(self.size_bytes):>12}  {written}  {self.path.name}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="list as one object of JSON, sizes in bytes")
    actions = parser.add_subparsers(dest="action", metavar="[clear]")
    clear = actions.add_parser("clear", help="remove modules that this installation does not use, and build folders")
    clear.add_argument("--all", action="store_true", help="also remove the modules that this installation uses")


def main(options: argparse.Namespace) -> int:
    try:
        folder = cache.cache_dir().resolve()
        items, unknown = look(folder)
        if options.action == "clear":
            print(clear(folder, items, everything=options.all))
        elif options.json:
            print(json.dumps({"folder": folder, "items": [*map(vars, items)], "unknown": unknown}, default=str))
        else:
            print("\n".join([*map(str, items), f"{folder}: {_told(items)}", *unknown]))
    except (BuildError, OSError, ValueError) as error:  # ValueError: an environment variable
        print(error, file=sys.stderr)
        return 1
    return 0


def look(folder: Path) -> tuple[list[Item], list[str]]:
    """All that ``folder`` has of builds; and for each module, why it is not known which one is used here."""
    used, unknown = set(), {}
    for module in (CPU, CUDA):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if entry := modules.find(module).entry:
                    used.add(entry.name)
        except BuildError as error:
            unknown[module.kind] = f"not known: {str(error).splitlines()[0]}"
    items = []
    for path in sorted([*folder.glob("*"), *folder.glob("builds/*")]):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or path.parent.is_symlink() or not path.is_dir():
            continue
        if _BUILD.fullmatch(name):
            items.append(Item(path, "build folder", *_measured(path)))
        elif found := _MODULE.fullmatch(name):
            state = "not known" if found[1] in unknown else "used here" if name in used else "not used here"
            items.append(Item(path, state, *_measured(path)))
    return items, list(unknown.values())


def _measured(path: Path) -> tuple[int, float]:
    """Bytes in a folder, and when something in it was written last."""
    size_bytes, newest = 0, 0.0
    for folder, _, names in os.walk(path):
        for name in ("", *names):
            with suppress(FileNotFoundError):  # a build goes on
                status = os.lstat(os.path.join(folder, name))
                size_bytes, newest = size_bytes + status.st_size, max(newest, status.st_mtime)
    return size_bytes, newest


def clear(folder: Path, items: Sequence[Item], *, everything: bool) -> str:
    """Remove items; returns what was removed and what stays. Raises `BuildError` if the folder is another user's."""
    if folder.exists() and (owner := folder.stat().st_uid) != os.geteuid():
        raise cache.unwritable(folder, f"only user {owner} may remove modules, as its owner")
    unwanted = [item for item in items if everything or item.state in ("build folder", "not used here")]
    removed, locked = [], []
    with tempfile.TemporaryDirectory(prefix="new-", dir=folder) if unwanted else nullcontext("") as trash:
        for item in unwanted:
            lock = cache.try_take(item.path) if item.state == "build folder" else nullcontext(True)
            with lock as is_free, suppress(FileNotFoundError):  # somebody else has removed it
                if is_free:
                    item.path.rename(Path(trash, item.path.name))  # readers find all of it or nothing
                    removed.append(item)
                else:
                    locked.append(f"{item.path.name} is locked by {cache.builder_of(item.path)}")
    kept = [item for item in items if item not in removed]
    return "\n".join([f"removed: {_told(removed)}", f"kept: {_told(kept)}", *locked])


def _told(items: Sequence[Item]) -> str:
    builds = sum(item.state == "build folder" for item in items)
    size_bytes = sum(item.size_bytes for item in items)
    return f"modules: {len(items) - builds}, build folders: {builds}, {_mib(size_bytes)}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
