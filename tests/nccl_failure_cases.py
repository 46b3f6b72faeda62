"""NCCL communicators whose ranks, calls and operations fail: what the tests of these make, issue and compare."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from simulated_cuda import posing

from bucketwheel.comm import Communicator
from bucketwheel.errors import CommError
from bucketwheel.handle import Handle
from bucketwheel.ops import all_gather
from tests import simulated_nccl

SOON_S = 2.0  # until the death or the failure of a rank is known to the others
GONE_S = 5.0  # until what is given up in the background has ended

# Kind, message and dead rank of an error.
Error = tuple[str, str, int | None]


def script() -> ctypes.CDLL:
    """Of this rank, with nothing of an earlier test in it."""
    library = simulated_nccl.install()
    library.fake_nccl_release()
    library.fake_nccl_async_error(0)
    library.fake_nccl_null_windows(0)
    library.fake_nccl_reset()
    return library


@contextlib.contextmanager
def nccl_comm(name: str, *, timeout_s: float = 30.0, **choices: Any) -> Iterator[tuple[Communicator, ctypes.CDLL]]:
    """A communicator of all ranks, and the script of this one. Nothing of NCCL is left afterwards."""
    library = script()
    with posing():
        comm = Communicator(backend="nccl", device="cuda", name=name, timeout_s=timeout_s, **choices)
        try:
            yield comm, library
        finally:
            library.fake_nccl_release()
            comm.close(5.0)
        expect_gone(library)


def expect_gone(library: ctypes.CDLL) -> None:
    until = time.monotonic() + GONE_S
    while library.fake_nccl_live_comms() + library.fake_nccl_live_windows() and time.monotonic() < until:
        library.fake_nccl_release()  # an initialisation in the background may wait for ranks that never come
        time.sleep(0.002)
    assert (library.fake_nccl_live_comms(), library.fake_nccl_live_windows()) == (0, 0)
    assert library.fake_nccl_open_groups() == 0
    library.fake_nccl_reset()


def gather(comm: Communicator, numel: int = 10) -> tuple[torch.Tensor, Handle]:
    full = torch.empty(comm.size * numel)
    return full, all_gather(full, torch.full((numel,), float(comm.rank)), comm)


def expect_gathered(comm: Communicator, full: torch.Tensor) -> None:
    assert full.view(comm.size, -1).tolist() == [
        [float(rank)] * (full.numel() // comm.size) for rank in range(comm.size)
    ]


def error_of(call: Callable[[], Any]) -> Error:
    """Of what ``call()`` raises."""
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return "nothing", "", None


def expect_prefix(text: str, rank: int, size: int, name: str, seq: int | None = None) -> None:
    number = r"\d+" if seq is None else str(seq)
    assert re.match(rf"\[bucketwheel rank {rank}/{size} comm '{re.escape(name)}' seq {number}\] ", text), text


def read_flight(folder: Path | str, comm: str, rank: int) -> dict[str, Any]:
    """What the rank wrote when it failed, in a while."""
    path = Path(folder, f"{comm.replace('/', '_')}-rank{rank}.json")
    until = time.monotonic() + GONE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    record: dict[str, Any] = json.loads(path.read_text())
    return record
