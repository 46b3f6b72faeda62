"""Gathers whose result comes only when somebody waits: what is read too early is stale, every time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bucketwheel.layout.packing import rank_buckets
from bucketwheel.optim.sharded_adamw import ShardedAdamW

__all__ = ["delay_gathers", "pending", "start_at"]


class LateHandle:
    """Of a gather whose result lies beside the parameters, and is copied there by the first wait."""

    is_captured = False

    def __init__(self, into: Tensor, beside: Tensor) -> None:
        self._into, self._beside = into, beside
        self._lock = threading.Lock()
        self._is_over = False

    def wait(self, stream: Any = None) -> LateHandle:
        with self._lock:
            if not self._is_over:
                self._into.copy_(self._beside)
                self._is_over = True
        return self


def gathered_by(engine: Any) -> list[tuple[Tensor, Tensor]]:
    """Of each bucket of a step: the parameters, and this rank's part of them."""
    out, rank = [], engine.comm.rank
    for plan in rank_buckets([s.packing for s in engine.spaces], [s.indices for s in engine.spaces], rank):
        numel = plan.bucket.shard_numel
        full = engine.spaces[plan.space].whole.flat.narrow(0, plan.bucket.begin, engine.world * numel)
        out.append((full, full.narrow(0, rank * numel, numel)))
    return out


class LateSteps:
    def __init__(self, engine: Any) -> None:
        self._steps, self._gathered = engine._assembly.steps, gathered_by(engine)
        self.started: list[int] = []  # addresses, in the order of the gathers

    def run(self, step: Any, begun: Any, order: Iterable[int], used: bytes, running: list[Any]) -> None:
        for number in order:
            full, own = self._gathered[number]
            before, mine = full.clone(), []  # type: ignore[var-annotated]
            self._steps.run(step, begun, [number], used, mine)
            for handle, _ in mine:
                handle.wait()
                beside, kept = full.clone(), own.clone()
                full.copy_(before)
                own.copy_(kept)
                self.started.append(full.data_ptr())
                running.append((LateHandle(full, beside), number))


def delay_gathers(opt: ShardedAdamW) -> LateSteps:
    engine: Any = opt._engine
    late = LateSteps(engine)
    engine._assembly = replace(engine._assembly, steps=late)
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
