"""``python -m bucketwheel cache``: the folder of built modules, what is in it, who builds there; ``--clear`` empties it.

Exit status: 0 done; 1 the folder cannot be used or is not trusted, or something in it could not be removed. `facts`
looks, `clear` removes, `render` prints.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import socket
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bucketwheel._version import __version__
from bucketwheel.errors import BuildError
from bucketwheel.native import cache, modules, trust
from bucketwheel.native.toolchain import CPU, CUDA

__all__ = ["add_arguments", "clear", "facts", "main", "render"]

_MODULES = {module.kind: module for module in (CPU, CUDA)}
_ENTRY = re.compile(r"bucketwheel_(cpu|cuda)-([^-]+)-(.+)-([0-9a-f]{16})")
_OBJECT = re.compile(r"[0-9a-f]{64}\.o(\.[0-9a-f]+)?")
_BUILDER = re.compile(r"\.?(?P<host>.+)-\d+-[0-9a-f]{12}")

Facts = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove all but what living builders hold")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")


def main(options: argparse.Namespace) -> int:
    try:
        chosen = cache.choose_folder()
        why_not = trust.why_not(chosen.path)
        if why_not is not None and options.clear:
            raise trust.refusal(chosen.path, why_not)
    except BuildError as error:
        print(json.dumps({"error": str(error)}) if options.json else error)
        return 1
    cleared = clear(chosen.path) if options.clear else None
    found = {"path": str(chosen.path), "why": chosen.why, "refused": why_not, **facts(chosen.path)}
    if cleared is not None:
        found["cleared"] = cleared
    print(json.dumps(found) if options.json else render(found))
    return int(why_not is not None or bool(cleared and cleared["failed"]))


# ---- looking ---------------------------------------------------------------------------------------------------------


def facts(folder: Path) -> Facts:
    """What is in the cache, as values that JSON can hold."""
    in_use = _in_use()
    entries = [_entry(path, in_use) for path in _entries(folder)]
    entries.sort(key=lambda entry: entry["last_use"] or "", reverse=True)
    return {
        "entries": entries,
        "objects": {"number": len(_objects(folder)), "size_bytes": sum(map(size_of, _objects(folder)))},
        "size_bytes": sum(map(size_of, _all(folder))),
        "locks": [
            {"name": path.name, "is_held": cache.is_held(path), "holder": cache.holder(path)} for path in _locks(folder)
        ],
        "builders": [{"name": path.name, "is_alive": _is_alive(path)} for path in _builders(folder)],
    }


def _entry(path: Path, in_use: dict[str, str]) -> Facts:
    kind, version, soabi, key = _parts(path)
    module = _MODULES[kind]
    last = _last_use(path / module.manifest)
    if soabi != str(sysconfig.get_config_var("SOABI")):
        fits = f"another Python, {soabi}"
    elif version != __version__:
        fits = f"another bucketwheel, {version}"
    elif cache.checked(path, module, {}) is None:
        fits = "damaged: it is built again when it is needed"
    elif (why := _why_refused(path)) is not None:
        fits = f"refused: {why}"
    elif kind in in_use and in_use[kind] != path.name:
        fits = "this Python; other sources, flags or compiler"
    else:
        fits = "this Python"
    return {
        "name": path.name,
        "module": module.name,
        "key": key,
        "size_bytes": size_of(path),
        "last_use": None if last is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last)),
        "is_in_use": in_use.get(kind) == path.name,
        "fits": fits,
    }


def _parts(path: Path) -> tuple[str, str, str, str]:
    found = _ENTRY.fullmatch(path.name)
    assert found
    kind, version, soabi, key = found.groups()
    return kind, version, soabi, key


def _in_use() -> dict[str, str]:
    """By kind, the entry that this Python would take now; none where a module is not looked for in the cache."""
    found = {}
    for kind, module in _MODULES.items():
        try:
            entry = modules.find(module).entry
        except (BuildError, ValueError):
            continue
        if entry is not None:
            found[kind] = entry.name
    return found


def _why_refused(entry: Path) -> str | None:
    return next(filter(None, map(trust.why_not, [entry, *sorted(entry.iterdir())])), None)


def _last_use(manifest: Path) -> float | None:
    try:
        return manifest.stat().st_mtime
    except OSError:
        return None


def size_of(path: Path) -> int:
    """Bytes of a file, or of all in a folder; links count as themselves."""
    paths = [path]
    if path.is_dir() and not path.is_symlink():
        paths = [Path(top, name) for top, folders, files in os.walk(path) for name in [*folders, *files]]
    total = 0
    for one in paths:
        try:
            status = one.lstat()
        except OSError:
            continue
        total += 0 if one.is_dir() and not one.is_symlink() else status.st_size
    return total


def _entries(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("bucketwheel_*")) if _ENTRY.fullmatch(path.name) and path.is_dir()]


def _objects(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "objects").glob("*")) if _OBJECT.fullmatch(path.name)]


def _locks(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "locks").glob("*")) if _ENTRY.fullmatch(path.name)]


def _logs(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "logs").glob("*.log")) if _ENTRY.fullmatch(path.stem)]


def _builders(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / "tmp").glob("*")) if _BUILDER.fullmatch(path.name)]


def _all(folder: Path) -> list[Path]:
    """Only what bucketwheel has made: somebody may have named a folder that has more in it."""
    return [*_entries(folder), *_objects(folder), *_locks(folder), *_logs(folder), *_builders(folder)]


def _is_alive(builder: Path) -> bool | None:
    """Whether the builder that made this folder lives; None where that cannot be known: on another host."""
    found = _BUILDER.fullmatch(builder.name)
    if found is None or found["host"] != socket.gethostname():
        return None
    return cache.is_held(builder / "alive") if (builder / "alive").exists() else None


# ---- clearing --------------------------------------------------------------------------------------------------------


def clear(folder: Path) -> Facts:
    """Remove all that no living builder holds; ``removed``, ``size_bytes`` of it, ``kept`` and ``failed`` with reasons."""
    removed: list[Facts] = []
    kept: list[Facts] = []
    failed: list[Facts] = []

    def remove(path: Path) -> None:
        size_bytes = size_of(path)
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            failed.append({"name": path.name, "why": str(error)})
            return
        removed.append({"name": path.name, "size_bytes": size_bytes})

    names = {path.name for path in [*_entries(folder), *_locks(folder)]}
    for name in sorted(names | {path.stem for path in _logs(folder)}):
        mine = [folder / name, folder / "logs" / f"{name}.log", folder / "locks" / name]
        with _lock_of(folder, name) as holder:
            for path in mine:
                if os.path.lexists(path) and holder is None:
                    remove(path)
                elif os.path.lexists(path):
                    kept.append({"name": path.name, "why": f"held by {holder}"})
    for path in _builders(folder):
        if _is_alive(path) is False:
            remove(path)
        else:
            kept.append({"name": path.name, "why": "its builder lives, or may live on another host"})
    if kept and _objects(folder):
        kept.append({"name": "objects", "why": "builders link them where they lie"})
    else:
        for path in _objects(folder):
            remove(path)
    size_bytes = sum(one["size_bytes"] for one in removed)
    return {"removed": removed, "size_bytes": size_bytes, "kept": kept, "failed": failed}


@contextmanager
def _lock_of(folder: Path, name: str) -> Iterator[str | None]:
    """Hold an entry's lock, so that nobody builds it now: None; or who holds it, or may do so."""
    path = folder / "locks" / name
    try:
        lock = _open_lock(path)
    except FileNotFoundError:  # nobody has ever locked it
        yield None
        return
    except OSError as error:
        yield f"somebody, perhaps: its lock cannot be opened ({error.strerror})"
        return
    with lock:
        holder: str | None = None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = cache.holder(path)
        except OSError:  # a file system without locks: what is written there is all that is known
            text = cache.holder(path)
            holder = None if text in ("failed", cache.NOBODY) else f"{text}, if it lives: there are no locks here"
        yield holder


def _open_lock(path: Path) -> IO[bytes]:
    """NFS gives a lock of its only holder for what may be written; other file systems do for what may be read alone."""
    try:
        return open(path, "r+b")
    except OSError:
        return open(path, "rb")


# ---- printing --------------------------------------------------------------------------------------------------------


def render(found: Facts) -> str:
    lines = [f"cache {found['path']} ({found['why']})"]
    if found["refused"]:
        lines.append(f"not used: {found['refused']}")
    if cleared := found.get("cleared"):
        lines += [f"removed {one['name']}, {_mib(one['size_bytes'])}" for one in cleared["removed"]]
        lines += [f"kept {one['name']}: {one['why']}" for one in cleared["kept"]]
        lines += [f"could not remove {one['name']}: {one['why']}" for one in cleared["failed"]]
        lines.append(f"removed {len(cleared['removed'])} things, {cleared['size_bytes']} bytes")
    for entry in found["entries"]:
        mark = "*" if entry["is_in_use"] else " "
        lines.append(
            f"{mark} {entry['module']:5} {entry['key']}  {_mib(entry['size_bytes']):>10}  "
            f"{entry['last_use'] or 'unknown':19}  {entry['fits']}"
        )
    if any(entry["is_in_use"] for entry in found["entries"]):
        lines.append("(* this Python takes it now)")
    for lock in found["locks"]:
        if lock["is_held"]:
            lines.append(f"building {lock['name']}: {lock['holder']}")
    for builder in found["builders"]:
        state = {True: "at work", False: "dead", None: "on another host, or beginning"}[builder["is_alive"]]
        lines.append(f"builder {builder['name']}: {state}")
    objects = found["objects"]
    lines.append(
        f"{len(found['entries'])} entries, {objects['number']} objects ({_mib(objects['size_bytes'])}), "
        f"{_mib(found['size_bytes'])} in all"
    )
    return "\n".join(lines)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
