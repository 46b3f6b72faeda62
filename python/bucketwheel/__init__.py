"""bucketwheel: sharded data-parallel training for PyTorch.

Importing compiles nothing; the native module builds itself at first use.
"""

from bucketwheel._version import __version__
from bucketwheel.comm import Communicator
from bucketwheel.errors import (
    BuildError,
    ClosedError,
    CommError,
    CommTimeout,
    DeviceError,
    Error,
    KeyBusy,
    LeaseLeak,
    MismatchError,
    PeerError,
    PoolError,
    ReleasedTwice,
    ShardedGradError,
    UseAfterRelease,
)
from bucketwheel.handle import Handle, wait_all
from bucketwheel.ops import PreMulSum, adam_step, all_gather, l2_norm, reduce_scatter
from bucketwheel.optim import ShardedAdamW
from bucketwheel.place import LocalRank, LocalWorld
from bucketwheel.plan import Packing, PackItem, pack
from bucketwheel.pool import Lease, Pool, PoolStats
from bucketwheel.request import AllGatherRequest, ReduceScatterRequest

__all__ = [
    "AllGatherRequest",
    "BuildError",
    "ClosedError",
    "CommError",
    "CommTimeout",
    "Communicator",
    "DeviceError",
    "Error",
    "Handle",
    "KeyBusy",
    "Lease",
    "LeaseLeak",
    "LocalRank",
    "LocalWorld",
    "MismatchError",
    "PackItem",
    "Packing",
    "PeerError",
    "Pool",
    "PoolError",
    "PoolStats",
    "PreMulSum",
    "ReduceScatterRequest",
    "ReleasedTwice",
    "ShardedAdamW",
    "ShardedGradError",
    "UseAfterRelease",
    "__version__",
    "adam_step",
    "all_gather",
    "l2_norm",
    "pack",
    "reduce_scatter",
    "wait_all",
]
