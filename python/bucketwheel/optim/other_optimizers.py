"""Names of optimizers that bucketwheel does not have, for which its users look: what to use instead."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch

# Beside those of torch.optim.
_OTHERS = (
    "adam8bit adamw8bit adan fusedadam fusedlamb lamb lars lion prodigy shampoo soap sophia zeroredundancyoptimizer"
)


def missing_name(name: str) -> NoReturn:
    """``bucketwheel.__getattr__``: AttributeError."""
    says, plain = f"module 'bucketwheel' has no attribute {name!r}", name.removeprefix("Sharded")
    is_torchs = isinstance(getattr(torch.optim, plain, None), type)
    if plain.lower() in ("adam", "adamw"):
        says += ": use bw.ShardedAdamW, which is Adam with decoupled_weight_decay=False"
    elif is_torchs or plain.lower() in _OTHERS.split():
        says += (
            f": bw has Adam and AdamW (bw.ShardedAdamW); use {'torch.optim.' * is_torchs}{plain} with DDP or FSDP2, "
        )
        says += "or shard it by hand with bw.reduce_scatter and bw.all_gather, as in examples/zero1_by_hand.py"
    raise AttributeError(says, name=name, obj=sys.modules["bucketwheel"])
