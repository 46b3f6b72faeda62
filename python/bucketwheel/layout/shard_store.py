"""Shard store: one rank's part of parameters of one dtype. Values, masters, moments and sums of gradients: always there.

Where the *whole* parameters lie is another object: for ever (`FlatParams`), or in memory that is leased while they are needed
(`LeasedParams`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bucketwheel.layout.flat_params import FlatParams, ParamInfo, lasting_lease
from bucketwheel.layout.leased_params import LeasedParams
from bucketwheel.layout.masters import follow_param, take_param
from bucketwheel.layout.packing import Packing, Segment
from bucketwheel.layout.precision import Precision
from bucketwheel.layout.shard_memory import ShardSpace
from bucketwheel.pool.pool import Pool


def ranges_of(packing: Packing, packed: int) -> list[list[tuple[int, int]]]:
    """By rank: what it owns of a packed parameter, [begin, end) in its memory order, ascending."""
    return [packing.ranges(packed, rank) for rank in range(packing.world)]


Whole = FlatParams | LeasedParams


class ShardStore:
    """``rank``'s part of the parameters in ``whole``, with new states in ``state_pool``.

    ``indices[packed]`` is the index of every packed parameter, -1 of one that is gone. By index, of the others:
    ``packed_at``, the place in the packing; ``owned``, the parts that this rank owns. ``grad`` holds sums of gradients,
    ``states`` what the kernel keeps for each element: all 1-D over this rank's shard space.
    """

    def __init__(self, whole: Whole, *, rank: int, precision: Precision, state_pool: Pool) -> None:
        self.rank = rank
        self.whole = whole
        self.dtype = whole.dtype
        self.wire_dtype = whole.wire_dtype(precision)
        self._note_indices()
        given = whole.given_states(precision)
        make = lambda n, dtype: given[n] if n in given else self._new_shard(state_pool, n, dtype)  # noqa: E731
        self.grad = make("grad", precision.accum_of(self.dtype))
        self.states = {name: make(name, dtype) for name, dtype in precision.kept_of(self.dtype).items()}

    def _note_indices(self) -> None:
        self.indices = [info.index for info in self.whole.infos]
        self.packed_at = {index: packed for packed, index in enumerate(self.indices) if index >= 0}
        self.owned = {index: self.packing.owned(packed, self.rank) for index, packed in self.packed_at.items()}

    def renumber(self, infos: Mapping[Tensor, ParamInfo]) -> None:
        """Takes what ``infos`` say of the parameters now; those that are not there are gone."""
        self.whole.renumber(infos)
        self._note_indices()

    def _new_shard(self, pool: Pool, name: str, dtype: torch.dtype) -> Tensor:
        numel = self.packing.shard_numel
        lease = lasting_lease(pool, f"{name} of {self.whole.name}", numel * dtype.itemsize)
        shard = lease.tensor(dtype, (numel,))
        shard.data.zero_()  # its version stays 0 until somebody writes to it: so a load knows that a state is zeros
        return shard

    @property
    def packing(self) -> Packing:
        return self.whole.packing

    def ranges_of(self, index: int) -> list[list[tuple[int, int]]]:
        """By rank: what it owns of the parameter ``index``, [begin, end) in its memory order, ascending."""
        return ranges_of(self.packing, self.packed_at[index])

    def state_of(self, index: int) -> dict[str, Tensor]:
        """This rank's part of the states of the parameter ``index``; contiguous in shard space."""
        segments = self.owned[index]
        begin = segments[0].shard_begin if segments else 0
        numel = sum(s.numel for s in segments)
        return {name: shard.narrow(0, begin, numel) for name, shard in self.states.items()}

    def states_in(self, segment: Segment) -> dict[str, Tensor]:
        """The states of ``segment``."""
        return {name: shard.narrow(0, segment.shard_begin, segment.numel) for name, shard in self.states.items()}

    def value_parts(self, index: int) -> list[Tensor]:
        """This rank's part of the parameter ``index``, a view for each of its ranges, in the order of `state_of`."""
        return [self.whole.own(segment) for segment in self.owned[index]]

    def values_of(self, index: int) -> Tensor:
        """`value_parts`, one behind the other; a copy."""
        return torch.cat([self.grad.new_empty(0, dtype=self.dtype), *self.value_parts(index)])

    def memory(self) -> ShardSpace:
        """Where this rank's shards are."""
        buckets = self.packing.buckets
        parts = (Segment(0, b, 0, self.rank * b.shard_numel, b.shard_numel) for b in buckets)
        pieces = {"param": [self.whole.own(part) for part in parts], **{n: [shard] for n, shard in self.states.items()}}
        rows = [(index, s.param_begin, s.shard_begin, s.numel) for index, parts in self.owned.items() for s in parts]
        return ShardSpace(self.packing.shard_numel, pieces, rows, self.grad.dtype, self.grad)

    def read_masters(self, *, whole: bool = False) -> None:
        """`follow_param`, or `take_param`, for this rank's part of all parameters."""
        for segment in self.packing.segments(self.rank):
            (take_param if whole else follow_param)(self.whole.own(segment), self.states_in(segment))
