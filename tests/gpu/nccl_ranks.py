"""Two ranks of one GPU that talk over NCCL, each a process.

NCCL refuses two ranks of a communicator on one GPU. ``BW_GPU_RANKS`` names the way around that:

    hosts   the ranks say that they are two hosts, and reach each other by sockets: with any NCCL. Real kernels, groups,
            aborts and graphs; windows that no peer reads directly, if any; slow: the ranks' kernels take turns on the GPU
    multi   NCCL 2.30 or newer, which ``BW_NCCL_LIB`` names, is told that ranks share a GPU: windows and peer memory too

On the simulated device the fake NCCL needs neither, and gets the variables all the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from bucketwheel.comm import nccl_library
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.kernels.ops import all_gather
from tests.gpu.device import DEVICE
from tests.gpu.run_all import MULTI_RANK_UNFIT
from tests.support import simulated_nccl
from tests.support.ranks import RankPool

__all__ = ["TIMEOUT_S", "WORLD", "new_pool", "on_communicator", "on_the_last", "on_rank"]
__all__ += ["route", "timed", "times_ms", "unfit"]

WORLD = 2
TIMEOUT_S = 8.0  # what is stuck must leave the other tests of its part the time they need
MULTI_RANK_VERSION = 23000
# Few blocks: what two ranks want of the GPU has to fit on it at once.
_BOTH = {"NCCL_MAX_CTAS": "4", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
_VARIABLES = {
    # Whatever BW_NCCL_LIB names, this route shows the NCCL that torch brings.
    "hosts": {**_BOTH, "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0", "BW_NCCL_LIB": ""},
    "multi": {**_BOTH, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"},
}


def route() -> str:
    named = os.environ.get("BW_GPU_RANKS", "hosts")
    if named not in _VARIABLES:
        raise ValueError(f"BW_GPU_RANKS={named!r}; known are {', '.join(_VARIABLES)}")
    return named


def unfit() -> str:
    """Why this machine does not have the route; empty where it does."""
    if route() == "hosts":
        return ""
    if not os.environ.get("BW_NCCL_LIB"):
        return f"{MULTI_RANK_UNFIT}, and BW_NCCL_LIB names none"
    found = nccl_library.info()
    if found.version < MULTI_RANK_VERSION:
        return f"{MULTI_RANK_UNFIT}; {found.path} is {nccl_library.version_text(found.version)}"
    return ""


def new_pool() -> RankPool:
    """The ranks; their process group is gloo's."""
    return RankPool(WORLD, env={**_VARIABLES[route()], "BW_GPU_RANKS": route()}, forked=False)


# ---- intervals of operations

PAUSE_S = 0.03  # of a simulated stream, likewise
Timed = tuple[Handle, Handle]


def timed(issue: Callable[..., Handle], comm: Communicator) -> Timed:
    """Where the operation begins and ends: handles made with timing. On the simulated device, whose operations are short
    beside what the host needs to issue the next one, with a pause between."""
    begin = all_gather([], [], comm, timing=True)
    if DEVICE.is_simulated:
        comm.stream.pause(PAUSE_S)
    return begin, issue(timing=True)


def overlap_ms(one: Timed, other: Timed) -> float:
    """How long both were under way; where they were not, minus the time between them."""
    return min(begin.elapsed_time(end) for begin, _ in (one, other) for _, end in (one, other))


def times_ms(gather: Timed, reduce: Timed) -> dict[str, Any]:
    """Of both, counted from the gather's begin: for `tell`."""
    begin = gather[0]
    return {
        "gather_ms": [0.0, begin.elapsed_time(gather[1])],
        "reduce_ms": [begin.elapsed_time(one) for one in reduce],
        "overlap_ms": overlap_ms(gather, reduce),
    }


# ---- in the ranks


def on_rank(rank: int, world: int, case: Callable[..., Any], *args: Any) -> Any:
    """For `RankPool.run`: ``case(*args)``."""
    _enter(rank)
    result = case(*args)
    DEVICE.synchronize()
    return result


def on_communicator(rank: int, world: int, case: Callable[..., Any], *args: Any) -> Any:
    """For `RankPool.run`: ``case(comm, *args)`` on one communicator for all cases, since making one takes NCCL seconds."""
    _enter(rank)
    result = case(_communicator(), *args)
    DEVICE.synchronize()
    return result


def on_the_last(rank: int, world: int, case: Callable[..., Any], *args: Any) -> Any:
    """The same for a case that ends the communicator; the next case gets another one."""
    _enter(rank)
    with _communicator() as comm:
        _communicator.cache_clear()
        result = case(comm, *args)
    DEVICE.synchronize()
    return result


@functools.cache
def _enter(rank: int) -> Any:
    """Once in the life of a rank, before it uses NCCL, which reads its variables then. What is returned must be kept."""
    if route() == "hosts":
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    if not DEVICE.is_simulated:
        torch.cuda.set_device(0)
    opened = DEVICE.opened()
    opened.__enter__()
    if DEVICE.is_simulated and route() == "hosts":
        simulated_nccl.install().fake_nccl_null_windows(1)  # as an older NCCL between hosts
    return opened


@functools.cache
def _communicator() -> Communicator:
    return Communicator(backend="nccl", device="cuda", timeout_s=TIMEOUT_S, name="kept")
