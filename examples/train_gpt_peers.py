"""What train_gpt.py is compared with: DDP and FSDP2, each with torch's fused AdamW."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from train_gpt import Gpt


class PeerAdamW(torch.optim.AdamW):
    """A peer, DDP or FSDP2 with torch's fused AdamW, behind the same words as `bw.ShardedAdamW`."""

    def __init__(self, name: str, model: Gpt, groups_of: Callable[[Gpt], list[dict]], lr: float) -> None:
        self.model: nn.Module = model
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if name == "ddp" and not is_alone:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if name == "fsdp2" and not is_alone:
            for module in (*model.blocks, model):
                fully_shard(module)
        super().__init__(groups_of(model), lr=lr, betas=(0.9, 0.95), fused=True)
        self.parameters = list(model.parameters())
        self.is_ddp = isinstance(self.model, DistributedDataParallel)

    def no_sync(self) -> contextlib.AbstractContextManager:
        """DDP's gradients are whole anyway, so it reduces them once, after the last micro-batch."""
        return self.model.no_sync() if self.is_ddp else contextlib.nullcontext()

    def grad_sync(self) -> None:
        """Both have waited at the end of backward."""

    def param_sync(self) -> None:
        """DDP's ranks have computed all parameters themselves; FSDP2 gathers them in forward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Without None DDP's gradients stay in its buckets, instead of lying beside them while they accumulate."""
        super().zero_grad(set_to_none and not self.is_ddp)

    def close(self) -> None:
        """Nothing to give back."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def memory_summary(self) -> dict[str, int]:
        states = [s for state in self.state.values() for s in state.values()]
        parts = {"params": self.parameters, "grads": [p.grad for p in self.parameters], "states": states}
        return {name: sum(local_bytes(tensor) for tensor in tensors) for name, tensors in parts.items()}


def local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
