"""Leased parameters: of one unit and dtype. This rank keeps its part; the whole lies in memory that is leased while it is needed.

The packing is that of `FlatParams`: an all-gather of each bucket writes the whole parameters, in place.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bucketwheel.layout.flat_params import ParamInfo, lasting_lease, row_numel
from bucketwheel.layout.packing import Packing, PackItem, Segment, pack
from bucketwheel.layout.precision import Precision
from bucketwheel.pool.pool import Lease, Pool

_numbers = itertools.count()  # a lease may outlive its model
_HOME = "_bucketwheel_home"  # of a parameter: a weak reference to its LeasedParams, which has the parameter


def home_of(param: Tensor) -> LeasedParams | None:
    """Of a sharded parameter."""
    found = param.__dict__.get(_HOME)
    return None if found is None else found()


@dataclass(frozen=True, eq=False)
class ShardedBy:
    """The sharded model of leased parameters, as an optimizer sees it. ``comm``: the ranks that share the parameters;
    ``replicate``: the communicator of those that have the same part; ``groups``: both as they were given to `bucketwheel.shard`;
    ``engines``: a WeakSet of those that train them."""

    comm: Any
    replicate: Any
    groups: tuple[Any, Any]
    runtime: Any  # a weak reference
    engines: Any

    def before_close(self) -> None:
        """Ranks are about to agree on a window of gradients."""
        if (runtime := self.runtime()) is not None:
            runtime.before_close()

    def before_write(self) -> None:
        """Parameters are about to be written: all are let go. Local."""
        if (runtime := self.runtime()) is not None:
            runtime.before_write()

    def after_check(self) -> None:
        """RuntimeError on all ranks where their gathers differed. Collective."""
        if (runtime := self.runtime()) is not None:
            runtime.after_check()


class LeasedParams:
    """``infos``: in the order of the packing, from the last parameter of the unit to the first; with index -1 those that no
    optimizer trains. ``dtype``: of the parameters as they are gathered.

    ``values`` [shard_numel] is this rank's part, the input of gathers. ``masters``: the same as it was given, where that is
    more precise.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        *,
        rank: int,
        world: int,
        dtype: torch.dtype,
        bucket_cap_bytes: int,
        reduce_dtype: torch.dtype | None,
        pool: Pool,
        name: str,
        order: Mapping[int, int],
    ) -> None:
        self.order = order  # by the id of a parameter: its place among all of the model
        self.infos = [replace(info, index=-1, dtype=dtype) for info in reversed(infos)]
        self.name, self.dtype, self.rank, self.reduce_dtype = name, dtype, rank, reduce_dtype
        self.kept_dtype = infos[0].dtype
        wire = reduce_dtype or dtype
        items = [PackItem(info.param.numel(), info.granularity, row_numel(info.param)) for info in self.infos]
        self.packing: Packing = pack(items, world=world, bucket_numel=max(1, bucket_cap_bytes // wire.itemsize))
        self.sharded_by: ShardedBy | None = None  # set by `bucketwheel.shard`, once
        key = f"shard {next(_numbers)} of {name}"
        self._lease: Lease = lasting_lease(pool, key, self.packing.shard_numel * dtype.itemsize)
        self.values: Tensor = self._lease.tensor(dtype, (self.packing.shard_numel,)).zero_()
        self.masters: Tensor | None = None

    def take(self, flat: Tensor) -> None:
        """``flat`` [numel]: the whole parameters as they were given. Keeps this rank's part."""
        kept = torch.zeros(self.packing.shard_numel, dtype=flat.dtype, device=flat.device)
        for bucket in self.packing.buckets:
            begin = bucket.begin + self.rank * bucket.shard_numel
            part = flat.narrow(0, begin, bucket.shard_numel)
            kept.narrow(0, bucket.shard_begin, bucket.shard_numel).copy_(part)
        self.values.copy_(kept)
        self.masters = kept if flat.dtype != self.dtype else None
        for info in self.infos:
            setattr(info.param, _HOME, weakref.ref(self))

    def packed_of(self, param: Tensor) -> int:
        return next(packed for packed, info in enumerate(self.infos) if info.param is param)

    def pairs(self, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By bucket: its part of ``full`` [numel], and this rank's shard, which is gathered there."""
        return [
            (
                full.narrow(0, bucket.begin, self.packing.world * bucket.shard_numel),
                self.values.narrow(0, bucket.shard_begin, bucket.shard_numel),
            )
            for bucket in self.packing.buckets
        ]

    def take_back(self, full: Tensor) -> None:
        """This rank's part becomes what ``full`` has; masters where it differs from what it was."""
        for bucket, (whole, own) in zip(self.packing.buckets, self.pairs(full), strict=True):
            new = whole.narrow(0, self.rank * own.numel(), own.numel())
            if self.masters is not None:
                masters = self.masters.narrow(0, bucket.shard_begin, bucket.shard_numel)
                masters.copy_(torch.where(new == own, masters, new.to(masters.dtype)))
            own.copy_(new)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def written(self) -> Tensor:
        return self.values

    def own(self, segment: Segment) -> Tensor:
        return self.values.narrow(0, segment.shard_begin, segment.numel)

    def parts_of(self, packed: int, of: Tensor | None = None) -> Tensor:
        """This rank's part of a packed parameter, 1-D: a view of ``of`` (values), as all are contiguous in shard space."""
        segments = self.packing.owned(packed, self.rank)
        begin = segments[0].shard_begin if segments else 0
        return (self.values if of is None else of).narrow(0, begin, sum(s.numel for s in segments))

    def wire_dtype(self, precision: Precision) -> torch.dtype:
        if None not in (self.reduce_dtype, precision.reduce_dtype) and self.reduce_dtype != precision.reduce_dtype:
            raise ValueError(
                f"reduce_dtype={precision.reduce_dtype} for parameters that bw.shard sharded with reduce_dtype="
                f"{self.reduce_dtype}: pass reduce_dtype to bw.shard only"
            )
        return self.reduce_dtype or precision.wire_of(self.dtype)

    def given_states(self, precision: Precision) -> dict[str, Tensor]:
        if self.masters is None:
            return {}
        if precision.master_weights not in ("auto", "fp32"):
            raise ValueError(
                f"master_weights={precision.master_weights!r} for parameters that were sharded with param_dtype={self.dtype}: "
                f"their {self.kept_dtype} weights are the masters; use master_weights='auto'"
            )
        return {"master_param": self.masters}

    def gathers(self, bucket_begin: int, numel: int) -> Tensor | None:
        return None

    def renumber(self, infos: Mapping[Tensor, ParamInfo]) -> None:
        self.infos = [infos.get(info.param) or replace(info, index=-1) for info in self.infos]

    def release(self) -> None:
        """Of the optimizer: no parameter is trained any more."""
        self.infos = [replace(info, index=-1) for info in self.infos]


def arrivals_of(infos: Sequence[ParamInfo]) -> list[int] | None:
    """By parameter, which gradient in the order of arrival is its own: from the last parameter of the model to the first, then
    what is not sharded. None: from the last of ``infos`` to the first, as nothing is sharded.

    The order of ``infos`` is that of the optimizer's groups, which may have nothing to do with the model's.
    """
    homes = [home_of(info.param) for info in infos]
    if not any(homes):
        return None

    def place(index: int) -> tuple[bool, int]:
        home, info = homes[index], infos[index]
        return home is None, -info.index if home is None else -home.order[id(info.param)]

    found = [0] * len(infos)
    for arrival, index in enumerate(sorted(range(len(infos)), key=place)):
        found[index] = arrival
    return found


def plain_params(infos: Sequence[ParamInfo]) -> list[ParamInfo]:
    """Those that are not sharded."""
    return [info for info in infos if home_of(info.param) is None]
