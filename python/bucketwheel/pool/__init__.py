"""Memory for communication. `Pool.acquire` returns a `Lease`; after its last use the pool gives the bytes to another lease.

A `Trace` of a step becomes a `Plan`, in which each key has a fixed place. Uses `device` and below, and `torch_internals`. Start
with `pool.py`, then `trace.py`, `placement.py` and `plan.py`. The pool itself and the search for places are native, in
csrc/pool and csrc/plan."""

from bucketwheel.pool.placement import Placement, place
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.policies import POLICIES
from bucketwheel.pool.pool import Lease, Pool, PoolStats
from bucketwheel.pool.trace import Trace

__all__ = ["POLICIES", "Lease", "Placement", "Plan", "Pool", "PoolStats", "Trace", "place"]
