"""Memory for communication: `Pool.acquire` takes a `Lease`, whose bytes are reused once those who used them are done.

Uses `device` and below. Start with `pool.py`; the placement itself is native, in csrc/pool.
"""

from bucketwheel.pool.pool import Lease, Pool, PoolStats

__all__ = ["Lease", "Pool", "PoolStats"]
