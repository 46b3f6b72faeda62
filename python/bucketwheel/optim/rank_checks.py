"""Rank checks: what all ranks must have alike before the first step, each with its error."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from bucketwheel._version import __version__
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.replicas import REPLICAS_MARK, Reducer
from bucketwheel.layout.flat_params import ParamInfo

__all__ = ["expect_equal_layout", "expect_equal_places"]


def expect_equal_layout(comm: Reducer, infos: Sequence[ParamInfo], groups: Sequence[str], options: object) -> None:
    """RuntimeError on every rank, naming the first difference, unless all ranks were given the same. Collective."""
    lines = [f"the optimizer's options: {options}, bucketwheel {__version__}"]
    lines += [f"parameter group {g}: {text}" for g, text in enumerate(groups)]
    lines += [
        f"parameter {info.index}: {info.name!r} {tuple(info.param.shape)}, strides {info.stride}, {info.dtype}, group "
        f"{info.group}, granularity {info.granularity}"
        for info in infos
    ]
    counts = struct.pack("<qq", len(groups), len(infos))
    digests = [hashlib.sha256(line.encode()).digest()[:8] for line in lines]
    payload = counts + b"".join(digests[: (comm.max_payload_bytes - len(counts)) // 8])
    everyone = comm.exchange(payload)
    if all(other == payload for other in everyone):
        return
    if any(other.startswith(REPLICAS_MARK) for other in everyone):
        raise RuntimeError("some ranks of the process_group pass a replicate_group and this one does not")
    numbers = [struct.unpack_from("<qq", other) for other in everyone]
    if len(set(numbers)) > 1:
        raise RuntimeError(
            f"ranks disagree on the numbers of parameter groups and trainable parameters: {numbers} by rank"
        )
    at = len(counts)
    while len({other[at : at + 8] for other in everyone}) == 1:
        at += 8
    raise RuntimeError(
        f"ranks disagree on {lines[(at - len(counts)) // 8]} (here on rank {comm.rank}); every rank must pass the "
        "same parameters in the same order, with the same options"
    )


def expect_equal_places(comm: Communicator, places: Sequence[tuple[int, int]]) -> None:
    """RuntimeError on every rank unless registered memory lies at the same ``places`` (`Lease.place`) on all. Collective.

    NCCL adds a rank's own offset to the begin of its peers' windows, so it would read something else.
    """
    digests = comm.exchange(hashlib.sha256(repr(list(places)).encode()).digest())
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"ranks have the optimizer's registered memory at other places, on rank {comm.rank} at {list(places)} "
            "(slab, offset): all must make the same acquires of the communicators' pools, in one order, before the "
            "optimizer is made, and close() the one before it"
        )
