"""Gradients during backward: they are packed into buckets and reduced over the ranks, and their norm is computed.

Uses `comm`, `kernels`, `layout` and below. Hooks, buckets and launches are native: csrc/window/window.h. Start with `window.py`,
the Python side of a sync window. `window_plan.py` plans the memory of the buckets, `reduced.py` has the reduced gradients of
this rank's shard, and `placeholder.py` is the object in `p.grad`."""

from bucketwheel.grads.placeholder import ShardedGrad

__all__ = ["ShardedGrad"]
