"""What bench_gpu.py compares as a whole: optimizers on equal parameters, and on a GPT's training step.

Systems, by name: `OURS`, ShardedAdamW in one process; `SHARDED`, the same over a communicator of one rank, which
buckets, reduces and gathers as several ranks do; `TORCH`, torch's fused AdamW with `clip_grad_norm_`; and, not in
`SYSTEMS`, `OVER_NCCL`, which is `SHARDED` over a pair of NCCL communicators, `ZERO3`, whose parameters are sharded over one
rank too (`bw.shard`), and `FSDP2`, torch's `fully_shard` with its fused AdamW, which needs a process group of one rank.
Both have the blocks of the GPT as units.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from clip_step import Inject
from gpt_systems import BETAS, EPS, LR, MAX_NORM, WEIGHT_DECAY, Block, Gpt, GptConfig
from gpu_timing import random
from torch import Tensor, nn

import bucketwheel as bw
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from tests.gpu.device import DEVICE

__all__ = [
    "FSDP2",
    "GPT_MEDIUM",
    "GPT_TINY",
    "MIXED",
    "OURS",
    "OVER_NCCL",
    "SHARDED",
    "SYSTEMS",
    "TORCH",
    "ZERO3",
    "GivenGrads",
    "TrainingStep",
    "fully_sharded",
    "make_systems",
]

OURS, SHARDED, TORCH = SYSTEMS = ("ours", "ours, sharded", "clip_grad_norm_ + torch fused")
OVER_NCCL = "ours, over NCCL"
ZERO3, FSDP2 = "ours, parameters sharded", "FSDP2 + torch fused"
MIXED = "float32, used as bfloat16"  # weights: by autocast where parameters are whole, else by what is gathered
GPT_MEDIUM = GptConfig(layers=24, width=1024, heads=16, context=512, vocabulary=50257)
GPT_TINY = GptConfig(layers=2, width=32, heads=2, context=8, vocabulary=97)


class _Optimizer:
    """The optimizer of one system. Its state is fp32 for ours, with masters for bfloat16; torch's is of the parameters' dtype."""

    def __init__(self, name: str, params: Iterable[nn.Parameter], **more: Any) -> None:
        self._params = list(params)
        self._is_ours = name not in (TORCH, FSDP2)
        self._comms = _communicators(name)
        options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        self._optimizer: Any = (
            bw.ShardedAdamW(self._params, process_group=self._comms[-1] if self._comms else None, **options, **more)
            if self._is_ours
            else torch.optim.AdamW(self._params, fused=True, **options)
        )
        dtype = self._params[0].dtype
        self.numel = sum(p.numel() for p in self._params)
        # Of ours: configuration A or C; sharded gradients are fp32 shards, which makes D of C, and their norm is there
        # already.
        self.step_bytes = self.numel * (30 if self._comms and dtype == torch.bfloat16 else 28)
        self.clip_bytes = 0 if self._comms else self.numel * dtype.itemsize

    def clip(self) -> None:
        if self._is_ours:
            self._optimizer.clip_grad_norm_(MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(self._params, MAX_NORM)

    def step(self) -> None:
        self._optimizer.step()

    def clip_and_step(self) -> None:
        self.clip()
        self.step()

    def close(self) -> None:
        if self._is_ours:
            self._optimizer.close()
        for comm in self._comms:
            comm.close()


def _communicators(name: str) -> Sequence[Communicator]:
    """The one that reduces gradients is the last."""
    if name == OVER_NCCL:
        return Communicator.pair(device="cuda")
    return [Communicator(LocalWorld(1).rank(0), device="cuda")] if name == SHARDED else []


class GivenGrads(_Optimizer):
    """A system whose parameters get ``grads`` with every `refresh`."""

    def __init__(self, name: str, values: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self._grads = grads
        self._is_sharded = name == SHARDED
        super().__init__(name, map(nn.Parameter, values))
        self.refresh()

    def refresh(self) -> None:
        """Gradients as after a backward: other tensor objects in the same memory, or, sharded, reduced into the shards."""
        if self._is_sharded:
            self._optimizer.zero_grad()
            Inject.apply(self._grads, *self._params).backward()
            self._optimizer.grad_sync()
        else:
            for p, g in zip(self._params, self._grads, strict=True):
                p.grad = g.detach()

    def values(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self._params])


def make_systems(numels: Sequence[int], dtype: torch.dtype) -> dict[str, GivenGrads]:
    """All three, with equal parameters and gradients."""
    values = [random(n, dtype) for n in numels]
    grads = [random(n, dtype, scale=1e-2) for n in numels]
    copies = lambda tensors: [x.clone() for x in tensors]  # noqa: E731
    return {
        # torch's clipping scales gradients where they are.
        name: GivenGrads(name, copies(values), copies(grads) if name == TORCH else grads)
        for name in SYSTEMS
    }


@functools.cache
def _gpt(config: GptConfig) -> Gpt:
    """The one that every system's is a copy of: to draw its values takes seconds."""
    return Gpt(config).to(DEVICE.tensors)


def fully_sharded(module: nn.Module, units: Iterable[nn.Module], param_dtype: torch.dtype | None = None) -> Any:
    """FSDP2 as it is by default, over the default process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(DEVICE.tensors.type, (1,))
    for one in (*units, module):
        fully_shard(one, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    return module


class TrainingStep(_Optimizer):
    """One GPT with one system. ``weights``: "float32, autocast", "bfloat16" (ours then keeps float32 masters, torch none) or
    `MIXED`. ``more``: options of our optimizer."""

    def __init__(self, name: str, weights: str, config: GptConfig, batch: int, **more: Any) -> None:
        self._is_sharded = name == ZERO3
        is_mixed = weights == MIXED and name in (ZERO3, FSDP2)
        self._autocasts = weights != "bfloat16" and not is_mixed
        self._is_capturable = "capturable" in more
        dtype, used = torch.bfloat16 if weights == "bfloat16" else torch.float32, torch.bfloat16 if is_mixed else None
        model = copy.deepcopy(_gpt(config)).to(dtype)
        self._model: Any = model
        if name == ZERO3:
            self._model = bw.shard(model, (Block,), group=LocalWorld(1).rank(0), param_dtype=used)
        elif name == FSDP2:
            self._model = fully_sharded(model, model.blocks, used)
        super().__init__(name, self._model.parameters(), **more)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocabulary, (batch, config.context + 1), generator=generator)
        self._tokens = tokens.to(DEVICE.tensors)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._autocasts:
            return nullcontext()
        # A cast that is kept beyond the capture would be read by replays where it is.
        return torch.autocast(DEVICE.tensors.type, torch.bfloat16, cache_enabled=not self._is_capturable)

    def backward(self) -> Tensor:
        with self._autocast():
            loss = self._model(self._tokens)
        loss.backward()
        return loss.detach()

    def finish(self) -> None:
        self.clip_and_step()
        self._optimizer.zero_grad()

    def train(self) -> Tensor:
        loss = self.backward()
        self.finish()
        return loss

    def in_turn_s(self, samples: int, steps: int = 5) -> float:
        """Seconds a step, of some that follow each other from an idle device to an idle device: with the host's time, where
        the device waits for it."""
        found = []
        for _ in range(samples):
            DEVICE.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                self.train()
            DEVICE.synchronize()
            found.append((time.perf_counter() - begin) / steps)
        return statistics.median(found)

    def capture(self, warm_up: int = 3) -> list[Tensor]:
        """Captures a step in a CUDA graph, which `train` replays from now on. Returns the losses of the eager steps before."""
        losses: list[Tensor] = []

        def step() -> None:
            self._optimizer.zero_grad()
            losses.append(self.backward())
            self.clip_and_step()

        DEVICE.warm_up(step, warm_up)
        eager = [loss.clone() for loss in losses]
        replay = DEVICE.capture(step)

        def train() -> Tensor:
            replay()
            return losses[-1]

        self.train = train  # type: ignore[method-assign]
        return eager

    def close(self) -> None:
        self.__dict__.pop("train", None)  # the graph goes before its communicators
        super().close()
        if self._is_sharded:
            self._model.close()
