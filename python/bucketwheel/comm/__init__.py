"""Communicators and collectives: how ranks connect, how data moves between them, and how all ranks learn of a failure.

Uses `pool` and below. Start with `communicator.py` and `handle.py`, then `collectives.py`. `backends.py` chooses the backend:
`shm.py`, `c10d.py` or `nccl.py`. Ranks exchange messages through `rendezvous.py` until they have a communicator. `peers.py`
detects ranks on other hosts that have failed. `replicas.py` is HSDP: several groups of ranks that hold the same shards."""

from bucketwheel.comm.backends import LocalRank, LocalWorld
from bucketwheel.comm.collectives import PreMulSum, all_gather, reduce_scatter
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle, wait_all

__all__ = ["Communicator", "Handle", "LocalRank", "LocalWorld", "PreMulSum", "all_gather", "reduce_scatter", "wait_all"]
