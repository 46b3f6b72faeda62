"""Gathers whose result comes only when somebody waits: what is read too early is stale, every time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW

__all__ = ["delay_gathers", "pending", "start_at"]


class LateHandle:
    """Of a gather into memory beside the parameters, from where they are copied by the first wait."""

    is_captured = False

    def __init__(self, gather: Any, into: Tensor, beside: Tensor) -> None:
        self._gather, self._into, self._beside = gather, into, beside
        self._lock = threading.Lock()
        self._is_over = False

    def wait(self, stream: Any = None) -> LateHandle:
        with self._lock:
            self._gather.wait(stream)
            if not self._is_over:
                self._into.copy_(self._beside)
                self._is_over = True
        return self


class LateComm:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.started: list[int] = []  # addresses, in the order of the gathers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def _all_gather_into(self, full: Tensor, shard: Tensor) -> LateHandle:
        self.started.append(full.data_ptr())
        beside = full.clone()
        own = beside.narrow(0, self._comm.rank * shard.numel(), shard.numel())
        return LateHandle(self._comm._all_gather_into(beside, own), full, beside)


def delay_gathers(opt: ShardedAdamW) -> LateComm:
    engine: Any = opt._engine
    engine._gathers._comm = late = LateComm(engine._gathers._comm)
    return late


def start_at(params: Iterable[Tensor], seed: int = 0) -> None:
    """The same values every time: ranks that are threads share torch's own generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in params:
            p.copy_(torch.randn(p.shape, generator=generator) / 4)


def pending(opt: ShardedAdamW) -> list[int]:
    engine: Any = opt._engine
    return engine._gathers.pending
