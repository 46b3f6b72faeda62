"""gloo process groups that are one communicator's alone: how ranks get one, and how what waits in it is ended."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError
from bucketwheel.torch_internals import set_default_timeout

_NO_TIMEOUT = timedelta(days=365)  # gloo gives a group up for good when a time limit of its own passes
_UNUSED_TAG = 8


def connect(rendezvous: Rendezvous, name: str, threads: int = 2) -> Any:
    """A gloo process group of the ranks that meet, nobody else's; ``name`` is this one's among theirs. `CommError`, or
    `CommTimeout` when neither gloo nor the Store answers a little after the deadline."""
    return rendezvous.ask(lambda _: _connect(rendezvous, name, threads), late="neither gloo nor the Store has answered")


def _connect(rendezvous: Rendezvous, name: str, threads: int) -> Any:
    store, options = dist.PrefixStore(name, rendezvous.store), dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = timedelta(seconds=rendezvous.left_s), threads
    try:
        options._devices = _devices()
        group = dist.ProcessGroupGloo(store, rendezvous.rank, rendezvous.size, options)
    except RuntimeError as error:
        raise CommError(f"the ranks could not connect through gloo: {error}") from error
    set_default_timeout(group, _NO_TIMEOUT)
    return group


def _devices() -> list[Any]:
    """As torch chooses them."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    return [dist.ProcessGroupGloo.create_default_device()]


def give_up(group: Any, peer: int) -> None:
    """Whatever waits in the gloo group ends with a RuntimeError, here and then on the other ranks. A time limit that passes
    is the one way to have gloo do that. ``peer``: any other rank."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(0, dtype=torch.uint8, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
