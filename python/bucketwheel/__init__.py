"""bucketwheel: sharded data-parallel training for PyTorch.

Importing compiles nothing; the native module builds itself at first use.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from bucketwheel._version import __version__

# The console script and `python -m bucketwheel` import what a command needs, so that usage and --version come without torch.
# argv[0] is "-m" while Python imports the package of the program.
_is_program = "bucketwheel_command" in sys.modules or (
    sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] == [__name__]
)
if TYPE_CHECKING or not _is_program:
    from bucketwheel import checkpoint
    from bucketwheel.checkpoint.snapshots import Snapshots
    from bucketwheel.comm.backends import LocalRank, LocalWorld
    from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest
    from bucketwheel.comm.communicator import Communicator
    from bucketwheel.comm.handle import Handle, wait_all
    from bucketwheel.errors import (
        BudgetTooSmall,
        BuildError,
        CaptureError,
        CheckpointError,
        ClosedError,
        CommError,
        CommTimeout,
        CrossRankMismatch,
        DeviceError,
        Error,
        KeyBusy,
        LeaseLeak,
        MismatchError,
        PeerError,
        PlanDiverged,
        PoolBusy,
        PoolError,
        ReleasedTwice,
        SeveralParamGroups,
        ShardedGradError,
        ShardedParamError,
        SizeExceedsPlan,
        UnknownKey,
        UseAfterRelease,
    )
    from bucketwheel.kernels.ops import PreMulSum, adam_step, all_gather, l2_norm, reduce_scatter
    from bucketwheel.layout.packing import Packing, PackItem, pack
    from bucketwheel.optim.local_shards import local_shards
    from bucketwheel.optim.module_sync import ModuleSync, sync_module
    from bucketwheel.optim.sharded_adamw import ShardedAdamW
    from bucketwheel.optim.trainer_callback import trainer_callback
    from bucketwheel.pool.fsdp2 import pool_for_fsdp2
    from bucketwheel.pool.pool import Lease, Pool, PoolStats
    from bucketwheel.shard.module import shard

    if not TYPE_CHECKING:  # or every name would pass the type checker
        from bucketwheel.optim.other_optimizers import missing_name as __getattr__  # noqa: F401
else:

    def __getattr__(name: str) -> Any:
        """The command was imported, and then the package is used as a library: makes all names."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        sys.modules.pop("bucketwheel_command", None)
        del globals()["__getattr__"]
        return getattr(importlib.reload(sys.modules[__name__]), name)


__all__ = [
    "UnknownKey",
    "SizeExceedsPlan",
    "PoolBusy",
    "PlanDiverged",
    "CrossRankMismatch",
    "BudgetTooSmall",
    "AllGatherRequest",
    "BuildError",
    "CaptureError",
    "CheckpointError",
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
    "ModuleSync",
    "PackItem",
    "Packing",
    "PeerError",
    "Pool",
    "PoolError",
    "PoolStats",
    "PreMulSum",
    "ReduceScatterRequest",
    "ReleasedTwice",
    "SeveralParamGroups",
    "ShardedAdamW",
    "ShardedGradError",
    "ShardedParamError",
    "Snapshots",
    "UseAfterRelease",
    "__version__",
    "adam_step",
    "all_gather",
    "checkpoint",
    "l2_norm",
    "local_shards",
    "pack",
    "pool_for_fsdp2",
    "reduce_scatter",
    "shard",
    "sync_module",
    "trainer_callback",
    "wait_all",
]
