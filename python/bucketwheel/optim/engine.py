"""Engine: which one an optimizer needs, and the communicators that it makes for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm.communicator import Communicator
from bucketwheel.device import CPU, device_index
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.optim.local_engine import LocalEngine
from bucketwheel.optim.local_engine_cuda import LocalEngineCuda
from bucketwheel.optim.param_groups import communicators_for, group_texts
from bucketwheel.optim.sharded_engine import ShardedEngine, ShardedOptions

__all__ = ["Group", "Ranks", "close_all", "make_engine"]

Group = dist.ProcessGroup | Communicator | None


@dataclass(frozen=True)
class Ranks:
    """The ranks to shard over and the replicas, as the user gave them; what a bucket holds at most."""

    process_group: Group
    replicate_group: Group
    bucket_cap_mb: float | None


def make_engine(
    infos: Sequence[ParamInfo],
    param_groups: Sequence[dict[str, Any]],
    device: torch.device,
    ranks: Ranks,
    options: ShardedOptions,
    *,
    is_capturable: bool,
) -> tuple[LocalEngine | ShardedEngine, list[Communicator]]:
    """An engine for the parameters ``infos`` on ``device``, and the communicators that were made for it. Collective."""
    is_on_cuda = device_index(device) != CPU
    if is_capturable and not is_on_cuda:
        raise ValueError(f"capturable=True is for parameters on CUDA, these are on {device}")
    comm, replicate = communicators_for(ranks.process_group, ranks.replicate_group, device)
    given = (ranks.process_group, ranks.replicate_group)
    owned = [made for made in (comm, replicate) if made is not None and made not in given]
    try:
        if comm is not None:
            if options.capturable:
                _expect_capturable(comm, options)
            return ShardedEngine(
                comm, infos, group_texts(param_groups), options, _cap_bytes(ranks, comm), replicate
            ), owned
        local: dict[str, Any] = {
            "precision": options.precision,
            "is_static": options.static_graph,
            "on_external_update": options.on_external_update,
        }
        if is_on_cuda:
            return LocalEngineCuda(infos, device=device, is_capturable=is_capturable, **local), owned
        return LocalEngine(infos, **local), owned
    except BaseException:
        close_all(owned, 0.0)
        raise


def _expect_capturable(comm: Communicator, options: ShardedOptions) -> None:
    if comm.backend != "nccl":
        raise ValueError(
            f"capturable=True needs a communicator of the nccl backend, whose operations can be part of a CUDA graph; this one is "
            f"of {comm.backend!r}"
        )
    if options.overlap_param_sync:
        raise ValueError(
            "capturable=True and overlap_param_sync=True exclude each other: a replay cannot wait for the gathers that a step "
            "before it has left running"
        )


def close_all(comms: Sequence[Communicator], timeout: float | None = None) -> None:
    """Each, and the other of its pair."""
    with contextlib.ExitStack() as stack:  # every one, whichever fails
        for comm in reversed(comms):
            stack.callback(comm.close, timeout)
            stack.callback(comm.gathers.close, timeout)


def _cap_bytes(ranks: Ranks, comm: Communicator) -> int:
    cap_mb = ranks.bucket_cap_mb
    if cap_mb is None:
        # Large enough that what a launch costs does not show; on the CPU that is Python, slow where a backward has emptied
        # the caches. Without NCCL the buckets of all ranks are on one host.
        cap_mb = 32.0 if comm.backend == "nccl" else 16.0
    return int(cap_mb * 2**20)
