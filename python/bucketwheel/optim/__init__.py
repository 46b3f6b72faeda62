"""`ShardedAdamW`: torch's AdamW with gradients and states sharded over ranks.

Uses all rooms below. Start with `sharded_adamw.py`, the class; behind it stands `sharded_engine.py`, or `local_engine.py`
where there is one rank.
"""

from typing import TYPE_CHECKING

from bucketwheel.optim.sharded_adamw import ShardedAdamW

if TYPE_CHECKING:
    from bucketwheel.checkpoint.live import ShardedOptimizer

    _checkpointed: type[ShardedOptimizer] = ShardedAdamW

__all__ = ["ShardedAdamW"]
