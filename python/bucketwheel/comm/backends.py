"""Who the ranks of a communicator are, and how they find each other: `LocalWorld`, `LocalRank`, `Place`."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from bucketwheel.comm import c10d, nccl, shm
from bucketwheel.comm.nccl import Making, NcclChoices
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.device import CPU, torch_device
from bucketwheel.errors import CommError
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool

__all__ = ["LocalRank", "LocalWorld", "Place"]

_numbers = itertools.count()


@dataclass(frozen=True)
class LocalRank:
    """One rank of a `LocalWorld`; pass it to `Communicator` as the group."""

    world: LocalWorld
    rank: int


class LocalWorld:
    """Ranks that are threads of this process.

    >>> world = LocalWorld(4)
    >>> comm = Communicator(world.rank(2))  # in the thread that is rank 2

    Each rank is taken once. ``stages_inputs`` sends tensors through the staging buffers, as between processes (for
    tests).
    """

    def __init__(self, size: int, *, stages_inputs: bool = False) -> None:
        self._native = core.LocalWorld(size, stages_inputs)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._native.world

    def rank(self, rank: int) -> LocalRank:
        """The group argument of the communicator of ``rank``."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a world of {self.size}")
        return LocalRank(self, rank)


@dataclass
class Place:
    """Who the ranks of a communicator are: those of a rendezvous, threads (``local``), or this process alone."""

    timeout_s: float
    rendezvous: Rendezvous | None = None
    local: LocalRank | None = None
    wire: str = "gloo"  # the backend of torch.distributed that carries the data of c10d
    # Numbers the splits: two communicators of a pair have one place, and their parts meet in one Store.
    splits: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def of(cls, group: dist.ProcessGroup | LocalRank | None, backend: str, timeout_s: float) -> Place:
        if isinstance(group, LocalRank):
            return cls(timeout_s, local=group)
        if (group is None and not _has_default_group()) or dist.get_world_size(group) == 1:
            return cls(timeout_s)
        if backend == "local":
            raise ValueError("backend 'local' takes a rank of a LocalWorld as its group")
        return cls(timeout_s, Rendezvous.of_group(group, timeout_s), wire=c10d.backend_of(group))

    def backend(self, asked: str, device: int) -> str:
        """What is to be made; ``"auto"``: whatever connects CPU ranks."""
        if asked != "auto":
            return asked
        if self.rendezvous is None:
            return "local"
        return "auto" if device == CPU else "nccl"

    def make(self, backend: str, device: int, name: str | None, choices: NcclChoices) -> Any:
        """The native communicator. Collective."""
        if backend == "local":
            return _join_local(self.local or LocalWorld(1).rank(0), device, self.timeout_s, name)
        agreed = self.agreed_name(name, "shm" if backend == "auto" else backend)
        if backend == "nccl":
            return nccl.make(Making(self.rendezvous, device, agreed, self.timeout_s, choices))
        if backend == "c10d":
            return c10d.make(self.rendezvous, self.wire, agreed, self.timeout_s)
        if self.rendezvous is None:
            return core.make_shm_comm(0, [-1], [os.getpid()], agreed, self.timeout_s)
        try:
            return shm.connect(self.rendezvous, agreed, self.timeout_s)
        except shm.CannotShare as error:
            if backend == "shm":
                raise CommError(
                    f"the ranks {error.what}, which backend 'shm' needs; 'auto' or 'c10d' work without{error}"
                ) from None
            if not isinstance(error, shm.NotOneHost):
                warnings.warn(
                    f"ranks talk over {self.wire}, which is slower, for they {error.what}{error}", stacklevel=3
                )
        agreed = agreed if name else agreed.replace("shm", "c10d")
        return c10d.make(self.rendezvous, self.wire, agreed, self.timeout_s)

    def agreed_name(self, name: str | None, backend: str) -> str:
        if self.rendezvous is None:
            return name or _default_name(backend)
        return _agreed_name(self.rendezvous, name, backend)

    def part(self, comm: Any, ranks: list[int], name: str, token: str) -> Place | None:
        """Of ``ranks`` of ``comm``; None on a rank that is not among them. Called by all ranks of ``comm``; ``name`` and
        ``token`` are those ranks' alone."""
        mine = ranks.index(comm.rank) if ranks else -1
        if self.local is None:
            if not ranks:
                return None
            alone = self.rendezvous is None or len(ranks) == 1
            rendezvous = None if alone else self.rendezvous.part(f"split/{name}", mine, len(ranks))  # type: ignore[union-attr]
            return Place(self.timeout_s, rendezvous, wire=self.wire)
        # Threads: the first of the new ranks makes the world, the others find it.
        if mine == 0:
            _worlds[token] = LocalWorld(len(ranks))
        comm.exchange(b"made")
        world = _worlds[token] if ranks else None
        comm.exchange(b"found")
        if mine == 0:
            del _worlds[token]
        return None if world is None else Place(self.timeout_s, local=world.rank(mine))


_worlds: dict[str, LocalWorld] = {}


def _join_local(place: LocalRank, device: int, timeout_s: float, name: str | None) -> Any:
    if device != CPU:
        pool = Pool(device=torch_device(device))
        return place.world._native.join_cuda(place.rank, name or "local", timeout_s, pool._native)
    return place.world._native.join(place.rank, name or "local", timeout_s)


def _agreed_name(rendezvous: Rendezvous, name: str | None, backend: str) -> str:
    everyone = rendezvous.exchange([name, _default_name(backend)])
    names = [given for given, _ in everyone]
    if len(set(names)) != 1:
        raise ValueError(f"ranks gave different names to one communicator: {[given or '' for given in names]}")
    return str(names[0] or everyone[0][1])


def _default_name(backend: str) -> str:
    return f"{backend}{next(_numbers)}"


def _has_default_group() -> bool:
    return dist.is_available() and dist.is_initialized()
