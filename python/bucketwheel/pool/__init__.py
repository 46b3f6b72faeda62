"""Memory for communication: `Pool.acquire` takes a `Lease`, whose bytes are reused once those who used them are done.

A `Trace` of a step becomes a `Plan`, in which every key has a place. Uses `device` and below. Start with `pool.py`,
then `trace.py`, `placement.py` and `plan.py`; the pool itself and the search for places are native, in csrc/pool and
csrc/plan.
"""

from bucketwheel.pool.placement import Placement, place
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.policies import POLICIES
from bucketwheel.pool.pool import Lease, Pool, PoolStats
from bucketwheel.pool.trace import Trace

__all__ = ["POLICIES", "Lease", "Placement", "Plan", "Pool", "PoolStats", "Trace", "place"]
