"""What train_gpt.py is compared with: DDP, DDP with ZeroRedundancyOptimizer, and FSDP2, each with torch's fused AdamW.

Each has the options that take the least memory: DDP's gradients and ZeroRedundancyOptimizer's parameters lie in their
buckets, and FSDP2 shards by blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from train_gpt import Gpt

PEERS = ("ddp", "zero", "fsdp2")


class Peer:
    """A wrapped model and its torch optimizer, behind the same words as `bw.ShardedAdamW`."""

    def __init__(self, name: str, model: Gpt, groups_of: Callable[[Gpt], list[dict]], lr: float) -> None:
        self.model: nn.Module = model
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.is_ddp = name in ("ddp", "zero") and not is_alone
        if self.is_ddp:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if name == "fsdp2" and not is_alone:
            for module in (*model.blocks, model):
                fully_shard(module)
        options = {"lr": lr, "betas": (0.9, 0.95), "fused": True}
        if name == "zero" and not is_alone:
            self.optimizer = ZeroRedundancyOptimizer(
                groups_of(model), torch.optim.AdamW, parameters_as_bucket_view=True, **options
            )
        else:
            self.optimizer = torch.optim.AdamW(groups_of(model), **options)
        self.parameters = list(model.parameters())
        self.steps = 0

    def no_sync(self) -> contextlib.AbstractContextManager:
        """DDP's gradients are whole anyway, so it reduces them once, after the last micro-batch."""
        return self.model.no_sync() if self.is_ddp else contextlib.nullcontext()

    def grad_sync(self) -> None:
        """All have waited at the end of backward."""

    def param_sync(self) -> None:
        """DDP's and ZeroRedundancyOptimizer's parameters are whole after the step; FSDP2 gathers them in forward."""

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1

    def zero_grad(self) -> None:
        """Without None DDP's gradients stay in its buckets, instead of lying beside them while they accumulate. But DDP
        makes its buckets anew after the first step: there None lets the old ones go."""
        self.optimizer.zero_grad(set_to_none=not self.is_ddp or self.steps == 1)

    def close(self) -> None:
        """Nothing to give back."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def memory_summary(self) -> dict[str, int]:
        local = getattr(self.optimizer, "optim", self.optimizer)  # of ZeroRedundancyOptimizer: with this rank's states
        states = [s for state in local.state.values() for s in state.values()]
        parts = {"params": self.parameters, "grads": [p.grad for p in self.parameters], "states": states}
        return {name: sum(local_bytes(tensor) for tensor in tensors) for name, tensors in parts.items()}


def local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
