"""Names of optimizers that bucketwheel does not have, for which its users look: what to use instead."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch

__all__ = ["missing_name"]

# Beside those of torch.optim.
_OTHERS = (
    "adam8bit adamw8bit adan fusedadam fusedlamb lamb lars lion prodigy shampoo soap sophia zeroredundancyoptimizer"
)


def missing_name(name: str) -> NoReturn:
    """``bucketwheel.__getattr__``: AttributeError."""
    says, plain = f"module 'bucketwheel' has no attribute {name!r}", name.removeprefix("Sharded")
    kinds = torch.optim.Optimizer.__subclasses__()
    of_torch = {kind.__name__.lower(): kind.__name__ for kind in kinds if hasattr(torch.optim, kind.__name__)}
    if plain.lower() in ("adam", "adamw"):
        says += ": use bw.ShardedAdamW, which is Adam with decoupled_weight_decay=False"
    elif plain.lower() in {*of_torch, *_OTHERS.split()}:
        whole = f"torch.optim.{of_torch[plain.lower()]}" if plain.lower() in of_torch else "the optimizer that you mean"
        says += (
            f": AdamW and Adam only, as bw.ShardedAdamW; use {whole} with DDP or FSDP2, or shard it by hand with "
            "bw.reduce_scatter and bw.all_gather, as examples/zero1_by_hand.py"
        )
    raise AttributeError(says, name=name, obj=sys.modules["bucketwheel"])
