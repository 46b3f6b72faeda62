"""Ranks and their collectives: how they find each other, what moves the bytes, and who is told when one fails.

Uses `pool` and below. Start with `communicator.py` and `handle.py`, then `collectives.py`. `backends.py` chooses a way to
move bytes: `shm.py`, `c10d.py` or `nccl.py`. `rendezvous.py` is how ranks talk before they have a communicator, `peers.py`
what ranks of several hosts know of each other, `replicas.py` is HSDP: the same shard on several groups.
"""

from bucketwheel.comm.backends import LocalRank, LocalWorld
from bucketwheel.comm.collectives import PreMulSum, all_gather, reduce_scatter
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle, wait_all

__all__ = ["Communicator", "Handle", "LocalRank", "LocalWorld", "PreMulSum", "all_gather", "reduce_scatter", "wait_all"]
