"""Which communicators belong to the groups that a user gives: those of the gradients, and of replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from bucketwheel.comm.arguments import seconds_of
from bucketwheel.comm.backends import LocalRank, expect_group, expect_unlaunched
from bucketwheel.comm.communicator import Communicator
from bucketwheel.device import CPU, device_index, torch_device


def _communicator_for(
    process_group: dist.ProcessGroup | Communicator | LocalRank | None,
    device: torch.device,
    timeout_s: float | None,
    name: str,
    *,
    argument: str = "process_group",
    needs_one: bool = False,
) -> Communicator | None:
    """Where gradients are reduced; None: no other ranks, so no communication is needed, unless it ``needs_one``."""
    if isinstance(process_group, Communicator):
        if timeout_s is not None:
            raise ValueError(
                f"timeout_s={timeout_s} is for communicators that the optimizer makes, but {argument} is a "
                "Communicator with its own time limit: pass Communicator(timeout_s=...)"
            )
        if process_group.device != device_index(device):
            raise ValueError(
                f"the parameters are on {device}, but communicator {process_group.name!r} is for "
                f"{torch_device(process_group.device)}; make the communicator with device={str(device)!r}"
            )
        return process_group
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        expect_unlaunched()
        return None
    size = _size_of(process_group)
    if size < 0:  # torch's group of somebody else
        raise ValueError(
            f"rank {dist.get_rank()} is not in {argument}; every rank must pass its own group, and all ranks must call "
            "dist.new_group for each group"
        )
    if size == 1:
        return Communicator(process_group, name=name, device=device, timeout_s=timeout_s) if needs_one else None
    if device_index(device) == CPU or isinstance(process_group, LocalRank) or name == "sync_module":
        return Communicator(process_group, name=name, device=device, timeout_s=timeout_s)
    _, reduces = Communicator.pair(process_group, name=name, device=device, timeout_s=timeout_s)
    return reduces


def communicators_for(
    process_group: dist.ProcessGroup | Communicator | LocalRank | None,
    replicate_group: dist.ProcessGroup | Communicator | None,
    device: torch.device,
    timeout_s: float | None,
    name: str = "optimizer",
) -> tuple[Communicator | None, Communicator | None]:
    """Where states are sharded, and where they are replicated; None for a direction without other ranks. `sync_module` alone
    has no pairs of NCCL communicators."""
    timeout_s = seconds_of(timeout_s, "timeout_s")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
    expect_group(process_group, "process_group", Communicator)
    expect_group(replicate_group, "replicate_group", Communicator)
    how = (device, timeout_s, name)
    if replicate_group is None:
        return _communicator_for(process_group, *how), None
    if process_group is None:
        raise ValueError(
            "replicate_group needs a process_group: the ranks that this rank shards with (a group of one, to "
            "replicate only)"
        )
    if _size_of(process_group) == _size_of(replicate_group) == 1:
        return _communicator_for(process_group, *how), None
    # A group of one rank too: whether others have more in theirs is found when they are compared.
    shard = _communicator_for(process_group, *how, needs_one=True)
    try:
        return shard, _communicator_for(replicate_group, *how, argument="replicate_group", needs_one=True)
    except BaseException:
        if shard is not None and shard is not process_group:
            shard.close(0.0)
        raise


def _size_of(group: dist.ProcessGroup | Communicator | LocalRank | None) -> int:
    if isinstance(group, LocalRank):
        return group.world.size
    return group.size if isinstance(group, Communicator) else dist.get_world_size(group)


def close_all(comms: Sequence[Communicator], timeout: float | None = None) -> None:
    """What `communicators_for` made: each, and the other of its pair."""
    with contextlib.ExitStack() as stack:  # every one, whichever fails
        for comm in reversed(comms):
            stack.callback(comm.close, timeout)
            stack.callback(comm.gathers.close, timeout)
