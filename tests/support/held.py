"""What this process holds of the system, and what of ours the system holds."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path

# What a rank may hold for a moment after it has closed what held it.
_SETTLED_S = 8.0
_GONE_S = 30.0
_MEMORY = "memfd:bucketwheel"


def held() -> dict[str, int]:
    gc.collect()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": Path("/proc/self/maps").read_text().count(_MEMORY),
    }


def still_held(before: dict[str, int]) -> str:
    """More than ``before``, after a while; empty if it is none."""
    until = time.monotonic() + _SETTLED_S
    while any((now := held())[what] > before[what] for what in before) and time.monotonic() < until:
        time.sleep(0.05)
    if all(now[what] <= before[what] for what in before):
        return ""
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    files = [_target(fd) for fd in os.listdir("/proc/self/fd")]
    return f"before {before}, now {now}: threads {names}, files {files}"


def _target(fd: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def traces_in_the_system() -> set[str]:
    """Files of shared memory; and of processes that this one has started, or nobody any more: their sockets, and which of
    them map shared memory.
    """
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "bucketwheel" in line]
    names = {f"socket:[{line[-2]}]": line[-1] for line in lines}
    files = {name for name in os.listdir("/dev/shm") if "bucketwheel" in name or "bw" in name}
    sockets, processes = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if _is_ours(process.name):
                sockets |= {names[link] for link in _links_of(process) if link in names}
                if _MEMORY in (process / "maps").read_text():
                    processes.add(f"pid {process.name}")
    return sockets | files | processes


def _links_of(process: Path) -> list[str]:
    """What its descriptors are; those that are closed meanwhile, as the one that lists our own, are nothing."""
    links = []
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    return links


def _is_ours(pid: str) -> bool:
    line = [pid]
    while line[-1] not in ("0", "1", str(os.getpid())):
        line.append(Path(f"/proc/{line[-1]}/stat").read_text().rpartition(")")[2].split()[1])
    return line[-1] == str(os.getpid()) or line[1:] == ["1"]


def expect_gone(traces: set[str]) -> None:
    """In a while: tests that run beside this one leave theirs at their end."""
    until = time.monotonic() + _GONE_S
    while (left := traces & traces_in_the_system()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
