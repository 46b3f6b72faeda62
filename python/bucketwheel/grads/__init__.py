"""What becomes of a gradient: packed into its bucket, reduced over the ranks, its norm taken.

Uses `layout` and below. Hooks, buckets and launches are native: csrc/window/window.h. Start with `window.py`, the sync window in
Python; `window_plan.py` plans the memory of buckets, `reduced.py` is what the shards hold after a window. `placeholder.py`
stands in `p.grad`.
"""

from bucketwheel.grads.placeholder import ShardedGrad

__all__ = ["ShardedGrad"]
