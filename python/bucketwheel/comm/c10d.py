"""How the ranks of the c10d backend get connected: by a torch process group of their own, of whose collectives they use one.

That is all_to_all with a size for each pair of ranks. Other collectives of gloo are slower from 16 MiB on, and its sums are
in the tensors' dtype, in an order of their own (docs/numerics.md).
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bucketwheel.comm import background, gloo
from bucketwheel.comm import peers as agreement
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError
from bucketwheel.native import core

# What is under way for each peer at once, and for all of them (benchmarks/README.md).
_PEER_BYTES, _ROOM_BYTES = 3 << 20, 16 << 20
_LEAST_BYTES = 64 << 10  # of each peer, where there are many
_MOST_THREADS = 6  # of gloo's, each of which carries one all_to_all
_SLICE = timedelta(milliseconds=50)  # between two looks whether the communicator has failed
_PAUSE_S = 0.01
# Behind the time limit of an operation. Our own limit comes first: torch's passes without a word to the other ranks.
_LATE_S = 10.0


def backend_of(group: dist.ProcessGroup | None) -> str:
    """The name of the backend that carries our data for ``group``: its own for the CPU if that was registered with torch
    (``Backend.register_backend``), else gloo, which every torch has and any Store can connect."""
    for entry in str(dist.get_backend_config(group)).split(","):
        device, _, name = entry.rpartition(":")
        if device in ("", "cpu") and name.upper() in dist.Backend._plugins:
            return name
    return "gloo"


def make(rendezvous: Rendezvous, backend: str, name: str, timeout_s: float) -> Any:
    """The native communicator of the ranks that meet, on all of them or on none: `CommError`, `CommTimeout`."""
    if rendezvous.size == 1:
        alone = core.LocalWorld(1).join(0, name, timeout_s)
        return core.make_c10d_comm(core.peers_of(alone), _Group(None, 0, 1, timeout_s))

    def connect() -> Any:
        group = _Group(_connect(rendezvous, backend), rendezvous.rank, rendezvous.size, timeout_s)
        peers = agreement.make_peers(rendezvous, name, timeout_s)
        try:
            return core.make_c10d_comm(peers, group)
        except BaseException:
            peers.leave(0.0)  # else threads wait for it
            raise

    return rendezvous.make(connect)


class _Group:
    """A process group that is one communicator's alone, and the memory that it works in. Called by the thread of the
    communicator's stream, which is never the main one. What is given up goes on in that memory, which nobody reads then,
    until it notices, or its time is over."""

    def __init__(self, group: Any, rank: int, size: int, timeout_s: float) -> None:
        """``group``: none where there is one rank, which starts nothing."""
        self._group = group
        newer: Any = getattr(group, "all_to_all_single", None)
        self._all_to_all: Any = getattr(group, "alltoall_base", newer)
        self._peers = [peer for peer in range(size) if peer != rank]
        self._limit_s = timeout_s + _LATE_S
        length = max(min(_PEER_BYTES * len(self._peers), _ROOM_BYTES), _LEAST_BYTES * max(len(self._peers), 1))
        self.rooms = [
            (torch.empty(length, dtype=torch.uint8, device="cpu"), torch.empty(length, dtype=torch.uint8, device="cpu"))
            for _ in range(core.C10D_ROOMS)
        ]
        self._works: list[list[Any]] = [[] for _ in self.rooms]  # by room, until they are over: they own what they send

    def start(self, room: int, source: Tensor | None, begin: int, sent: list[int], received: list[int]) -> None:
        """Sends ``source``, or the first bytes of the room's own; receives from byte ``begin`` of the room on."""
        out, into = self.rooms[room]
        source = out[: sum(sent)] if source is None else source
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self._limit_s)
        into = into[begin : begin + sum(received)]
        self._works[room].append(self._all_to_all(into, source, received, sent, options))

    def wait(self, room: int) -> bool:
        works = self._works[room]
        while works:
            if not works[0].is_completed():
                with contextlib.suppress(RuntimeError):  # that the time is over, or what it has failed with
                    works[0].wait(_SLICE)
            if not works[0].is_completed():
                return False
            works[0].wait()  # raises what it has failed with
            works.pop(0)
        return True

    def abandon(self) -> None:
        background.start(_let_go, self, [work for works in self._works for work in works])

    def give_up(self) -> None:
        """What is under way ends, on all ranks, where the backend can do that."""
        if isinstance(self._group, dist.ProcessGroupGloo):
            for peer in self._peers:  # each by itself: gloo gives up one connection at a time
                gloo.give_up(self._group, peer)
        else:
            with contextlib.suppress(RuntimeError):  # it may say that it cannot
                self._group.abort()


def _let_go(group: _Group, works: list[Any]) -> None:
    """Keeps the group and its memory until nothing is under way: who frees a group of gloo's waits for that."""
    until = time.monotonic() + group._limit_s
    group.give_up()
    while not all(work.is_completed() for work in works) and time.monotonic() < until:
        time.sleep(_PAUSE_S)


def _connect(rendezvous: Rendezvous, backend: str) -> Any:
    if backend == "gloo":
        return gloo.connect(rendezvous, "data", threads=min(2 * (rendezvous.size - 1), _MOST_THREADS))
    late = f"backend {backend!r} of torch.distributed has not connected the ranks"
    return rendezvous.ask(lambda _: _registered_group(rendezvous, backend), late=late)


def _registered_group(rendezvous: Rendezvous, backend: str) -> Any:
    limit = timedelta(seconds=rendezvous.left_s)
    store = dist.PrefixStore("data", rendezvous.store)
    plugin = dist.Backend._plugins[backend.upper()]
    try:
        if not plugin.extended_api:
            return plugin.creator_fn(store, rendezvous.rank, rendezvous.size, limit)
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rendezvous.rank, rendezvous.size
        options.timeout, options.group_id = limit, "bucketwheel"
        options.global_ranks_in_group = list(range(rendezvous.size))
        return plugin.creator_fn(options, None)
    except RuntimeError as error:
        raise CommError(f"backend {backend!r} of torch.distributed could not connect the ranks: {error}") from error
