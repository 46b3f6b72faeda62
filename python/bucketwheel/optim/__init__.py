"""`ShardedAdamW`: `torch.optim.AdamW` with gradients and states that are sharded over the ranks.

Uses all rooms below. Start with the class in `sharded_adamw.py`. It calls `sharded_engine.py`, or `local_engine.py` if there
is one rank."""

from typing import TYPE_CHECKING

from bucketwheel.optim.sharded_adamw import ShardedAdamW

if TYPE_CHECKING:
    from bucketwheel.checkpoint.live import ShardedOptimizer

    _checkpointed: type[ShardedOptimizer] = ShardedAdamW

__all__ = ["ShardedAdamW"]
