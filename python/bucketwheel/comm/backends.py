"""Backends: `LocalWorld`, `LocalRank` and `RankGroup`, which connects the ranks of a communicator."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from bucketwheel.comm import c10d, nccl, shm
from bucketwheel.comm.nccl import NcclChoices, NcclSetup
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.device import CPU, torch_device
from bucketwheel.errors import CommError, expect_int
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool

_numbers = itertools.count()


@dataclass(frozen=True)
class LocalRank:
    """One rank of a `LocalWorld`. Pass it to `Communicator` as ``group``.

    Attributes:
        world: The world of this rank.
        rank: The number of this rank, from 0."""

    world: LocalWorld
    rank: int


class LocalWorld:
    """Ranks that are threads of this process. Local. Each rank can join one communicator.

        >>> world = LocalWorld(4)
        >>> comm = Communicator(world.rank(2))  # in the thread that is rank 2

    Args:
        size: Number of ranks.
        stages_inputs: Copy tensors through staging buffers, as between processes (for tests)."""

    def __init__(self, size: int, *, stages_inputs: bool = False) -> None:
        self._native = core.LocalWorld(expect_int(size, "size", "a number of ranks"), stages_inputs)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._native.world

    def rank(self, rank: int) -> LocalRank:
        """Returns the ``group`` for the communicator of rank ``rank``. Local.

        Raises:
            ValueError: The world has no such rank."""
        if not 0 <= expect_int(rank, "rank", "a number") < self.size:
            raise ValueError(f"rank {rank} is not in a world of {self.size}")
        return LocalRank(self, rank)


@dataclass
class RankGroup:
    """Who the ranks of a communicator are: processes that have a rendezvous, or threads (``local``)."""

    backend: str  # as it was asked for; "auto": whatever connects the ranks
    timeout_s: float
    rendezvous: Rendezvous | None  # None: threads
    local: LocalRank | None = None
    wire: str = "gloo"  # the backend of torch.distributed that carries the data of c10d
    # Numbers the splits: two communicators of a pair have one group, and their parts meet in one Store.
    splits: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def of(cls, group: dist.ProcessGroup | LocalRank | None, backend: str, timeout_s: float) -> RankGroup:
        if isinstance(group, LocalRank):
            return cls("local", timeout_s, None, group)
        has_others = group is not None or (dist.is_available() and dist.is_initialized())
        if has_others and dist.get_world_size(group) > 1:
            if backend == "local":
                raise ValueError("backend 'local' takes a rank of a LocalWorld as its group")
            return cls(backend, timeout_s, Rendezvous.of_group(group, timeout_s), wire=c10d.backend_of(group))
        if not has_others:
            expect_unlaunched()
        if backend in ("auto", "local"):
            return cls("local", timeout_s, None, LocalWorld(1).rank(0))
        return cls(backend, timeout_s, Rendezvous(dist.HashStore(), 0, 1, timeout_s))

    def make(self, device: int, name: str | None, choices: NcclChoices) -> Any:
        """The native communicator. Collective."""
        backend = "nccl" if self.backend == "auto" and device != CPU else self.backend
        if backend != "nccl" and choices != NcclChoices():
            raise ValueError(f"max_ctas, cta_policy and registered are for backend 'nccl', not {backend!r}")
        if self.rendezvous is None:
            assert self.local is not None
            world, options = self.local.world._native, (self.local.rank, name or "local", self.timeout_s)
            if device == CPU:
                return world.join(*options)
            return world.join_cuda(*options, Pool(device=torch_device(device))._native)
        agreed = agreed_name(self.rendezvous, name)
        if backend == "nccl":
            return nccl.make(NcclSetup(self.rendezvous, device, agreed, self.timeout_s, choices))
        if backend != "c10d":
            try:
                return shm.connect(self.rendezvous, agreed, self.timeout_s)
            except shm.CannotShare as error:
                if backend == "shm":
                    raise CommError(
                        f"backend 'shm' cannot be used, because the ranks {error.what}; use 'auto' or 'c10d'{error}"
                    ) from None
                if not isinstance(error, shm.NotOneHost):
                    why = f"because they {error.what}{error}"
                    warnings.warn(f"the ranks use {self.wire}, which is slower than shared memory, {why}", stacklevel=3)
        return c10d.make(self.rendezvous, self.wire, agreed, self.timeout_s)

    def part(self, comm: Any, ranks: list[int], name: str, token: str) -> RankGroup | None:
        """Of ``ranks`` of ``comm``; None on a rank that is not among them. Called by all ranks of ``comm``; ``name`` and
        ``token`` are those ranks' alone."""
        mine = ranks.index(comm.rank) if ranks else -1
        if self.rendezvous is not None:
            if not ranks:
                return None
            rendezvous = self.rendezvous.part(f"split/{name}", mine, len(ranks))
            return RankGroup(self.backend, self.timeout_s, rendezvous, wire=self.wire)
        # Threads: the first of the new ranks makes the world, the others find it.
        if mine == 0:
            _worlds[token] = LocalWorld(len(ranks))
        comm.exchange(b"made")
        world = _worlds[token] if ranks else None
        comm.exchange(b"found")
        if mine == 0:
            del _worlds[token]
        return None if world is None else RankGroup("local", self.timeout_s, None, world.rank(mine))


_worlds: dict[str, LocalWorld] = {}


def agreed_name(rendezvous: Rendezvous, name: str | None) -> str:
    """The name of a communicator: all ranks give the same, or rank 0 makes one up."""
    everyone = rendezvous.exchange([name, f"comm{next(_numbers)}"])
    names = [given for given, _ in everyone]
    if len(set(names)) != 1:
        raise ValueError(f"ranks gave different names to one communicator: {[given or '' for given in names]}")
    return str(names[0] or everyone[0][1])


def expect_unlaunched() -> None:
    """RuntimeError in a process that a launcher (torchrun) has started as one of several: without a process group it would
    be alone, and nobody would notice."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        raise RuntimeError(
            f"WORLD_SIZE={size} says that this process is one of {size}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() first, as for DDP. If this process is to work alone, pass "
            "bucketwheel.LocalWorld(1).rank(0) as process_group (of a Communicator: as group)"
        )


def expect_group(group: Any, argument: str, *others: type) -> None:
    """TypeError unless it is a group of ranks, one of the ``others``, or None."""
    if group is None or isinstance(group, (dist.ProcessGroup, LocalRank, *others)):
        return
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # torch's group of somebody else
        return
    hint = ""
    if hasattr(group, "get_group"):
        hint = ": pass the group of one dimension, mesh.get_group()"
    elif isinstance(group, (str, int, list, tuple, range)):
        hint = ": make a group by torch.distributed.new_group(ranks, backend=...)"
    names = ", ".join(["a torch ProcessGroup", *(f"a {other.__name__}" for other in others), "a LocalRank"])
    raise TypeError(f"{argument} must be {names} or None, got {type(group).__name__} {group!r}{hint}")
