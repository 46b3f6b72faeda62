"""`ShardedAdamW`: torch's AdamW with gradients and states sharded over ranks.

Uses all rooms below. Start with `sharded_adamw.py`, the class; behind it stands `sharded_engine.py`, or `local_engine.py`
where there is one rank.
"""

from bucketwheel.optim.sharded_adamw import ShardedAdamW

__all__ = ["ShardedAdamW"]
