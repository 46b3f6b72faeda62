"""Space: the parameters of one dtype in flat memory, and this rank's shards beside it: gradients, states and masters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .flat import FlatParams, ParamInfo
from .plan import Packing, Segment
from .pool import Pool
from .rows import AdamRows

__all__ = ["Space"]


class Space:
    """The parameters ``infos`` (of one dtype), moved into memory of ``param_pool``; ``rank``'s shards in ``state_pool``.

    ``indices[packed]`` is the index of every packed parameter. ``grad`` holds sums of gradients, ``states`` what the
    kernel keeps for each element: all 1-D over this rank's shard space.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        *,
        rank: int,
        world: int,
        wire_dtype: torch.dtype,
        bucket_cap_bytes: int,
        param_pool: Pool,
        state_pool: Pool,
    ) -> None:
        self.rank = rank
        self.dtype = infos[0].dtype
        self.wire_dtype = wire_dtype
        bucket_numel = max(1, bucket_cap_bytes // wire_dtype.itemsize)
        self.flat = FlatParams(infos, world=world, bucket_numel=bucket_numel, pool=param_pool)
        self.indices = [info.index for info in self.flat.infos]
        self._infos = self.flat.infos
        self._packed_at = {index: packed for packed, index in enumerate(self.indices)}
        self._state_pool = state_pool
        self.grad = self._new_shard("grad", torch.float32)
        self.states = {name: self._new_shard(name, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        if self.dtype != torch.float32:
            self.states["master_param"] = self._new_shard("master_param", torch.float32)

    def _new_shard(self, name: str, dtype: torch.dtype) -> Tensor:
        numel = self.packing.shard_numel
        lease = self._state_pool.acquire(f"{name}/{self.dtype}", numel * dtype.itemsize)
        return lease.tensor(dtype, (numel,)).zero_()

    @property
    def packing(self) -> Packing:
        return self.flat.packing

    @property
    def has_master(self) -> bool:
        return "master_param" in self.states

    def __contains__(self, index: int) -> bool:
        return index in self._packed_at

    def packed_at(self, index: int) -> int:
        """The place of the parameter ``index`` in the packing."""
        return self._packed_at[index]

    def owned(self, index: int) -> list[Segment]:
        """The parts of the parameter ``index`` that this rank owns."""
        return self.packing.owned(self._packed_at[index], self.rank)

    def state_of(self, index: int) -> dict[str, Tensor]:
        """This rank's part of the states of the parameter ``index``; contiguous in shard space."""
        segments = self.owned(index)
        begin = segments[0].shard_begin if segments else 0
        numel = sum(s.numel for s in segments)
        return {name: shard.narrow(0, begin, numel) for name, shard in self.states.items()}

    def add_row(self, rows: AdamRows, segment: Segment) -> None:
        """Adds the kernel's row for ``segment``."""
        info = self._infos[segment.param]
        cut = {name: shard.narrow(0, segment.shard_begin, segment.numel) for name, shard in self.states.items()}
        rows.add(
            info.index,
            info.group,
            self.flat.flat.narrow(0, segment.flat_begin, segment.numel),
            self.grad.narrow(0, segment.shard_begin, segment.numel),
            cut["exp_avg"],
            cut["exp_avg_sq"],
            cut.get("master_param"),
            param_begin=segment.param_begin,
        )

    def read_master(self, indices: Collection[int]) -> None:
        """Takes this rank's part of the parameters ``indices`` into the fp32 master shard.

        A master that rounds to the parameter as it is stays: it knows more digits of the same value.
        """
        for index in self.indices:
            for s in self.owned(index) if index in indices else ():
                own = self.flat.flat.narrow(0, s.flat_begin, s.numel)
                master = self.states["master_param"].narrow(0, s.shard_begin, s.numel)
                master.copy_(torch.where(master.to(own.dtype) == own, master, own.to(master.dtype)))

    def memory(self) -> dict[str, int]:
        """Bytes of the parameters, the gradient shard and the states."""
        return {
            "params": self.flat.lease.nbytes,
            "grads": self.grad.nbytes,
            "states": sum(shard.nbytes for shard in self.states.values()),
        }
