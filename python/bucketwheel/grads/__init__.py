"""What becomes of a gradient: packed into its bucket, reduced over the ranks, its norm taken.

Uses `layout` and below. Start with `window.py`, the hooks and the sync window; `bucket.py` is where a gradient is packed,
`launch.py` where its reduce-scatter is issued, `reduced.py` what the shards hold then. `placeholder.py` stands in `p.grad`.
"""

from bucketwheel.grads.placeholder import ShardedGrad

__all__ = ["ShardedGrad"]
