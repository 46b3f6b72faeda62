"""What tests of failures issue and compare, whatever the backend: a gather, and the error that a call raises."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import all_gather

SOON_S = 2.0  # until the death or the failure of a rank is known to the others

Error = tuple[str, str, int | None]  # kind, message and rank


def gather(comm: Communicator, numel: int = 10) -> tuple[torch.Tensor, Handle]:
    full = torch.empty(comm.size * numel)
    return full, all_gather(full, torch.full((numel,), float(comm.rank)), comm)


def error_of(call: Callable[[], Any]) -> Error:
    """Of what ``call()`` raises."""
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error), error.rank
    return "nothing", "", None


def expect_prefix(text: str, rank: int, size: int, name: str, seq: int | None = None) -> None:
    number = r"\d+" if seq is None else str(seq)
    assert re.match(rf"\[bucketwheel rank {rank}/{size} comm '{re.escape(name)}' seq {number}\] ", text), text


def threads_of_agreement() -> list[str]:
    """And of wires: Python's, of communicators between hosts."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bw_")]


def expect_no_threads() -> None:
    until = time.monotonic() + 5
    while threads_of_agreement() and time.monotonic() < until:
        time.sleep(0.01)
    assert threads_of_agreement() == []
