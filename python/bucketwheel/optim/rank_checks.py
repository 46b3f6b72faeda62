"""Rank checks: what all ranks must have alike before the first step, each with its error."""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor

from bucketwheel._version import __version__
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.replicas import REPLICAS_MARK, Reducer
from bucketwheel.layout.digests import digests_of
from bucketwheel.layout.flat_params import ParamInfo, is_plain

__all__ = ["compare_values", "expect_equal_lines", "expect_equal_layout", "expect_equal_places"]


def expect_equal_layout(comm: Reducer, infos: Sequence[ParamInfo], groups: Sequence[str], options: object) -> None:
    """RuntimeError on every rank, naming the first difference, unless all ranks were given the same. Collective."""
    lines = [f"the optimizer's options: {options}, bucketwheel {__version__}"]
    lines += [f"parameter group {g}: {text}" for g, text in enumerate(groups)]
    lines += [
        f"parameter {info.index}: {info.name!r} {tuple(info.param.shape)}, strides {info.stride}, {info.dtype}, group "
        f"{info.group}, granularity {info.granularity or 'auto'}"
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
            f"{_first_apart(comm, lines[1 + len(groups) :], numbers, everyone)}"
        )
    raise RuntimeError(
        f"ranks disagree on {lines[_first_unequal(everyone, len(counts))]} (here on rank {comm.rank}); every rank must "
        "pass the same parameters in the same order, with the same options"
    )


def _first_apart(
    comm: Reducer, params: Sequence[str], numbers: Sequence[tuple[int, int]], everyone: Sequence[bytes]
) -> str:
    """Of which parameter rank 0 and another one say something else, if payloads reach as far. Collective."""
    begins = [24 + 8 * groups for groups, _ in numbers]  # behind the counts and the options
    for at in range((max(map(len, everyone)) - max(begins)) // 8):
        found = [other[begin + 8 * at :][:8] for begin, other in zip(begins, everyone, strict=True)]
        if len(set(found)) > 1:
            mine = params[at] if at < len(params) else f"no parameter {at}"
            said = [str(one, "utf-8", "ignore") for one in comm.exchange(mine.encode()[: comm.max_payload_bytes])]
            other = next(rank for rank, one in enumerate(found) if one != found[0])
            return f". The first difference: rank 0 has {said[0]}; rank {other} has {said[other]}"
    return ""


def _first_unequal(everyone: Sequence[bytes], begin: int = 0) -> int:
    """Of the 8-byte digests from ``begin`` on, which differ."""
    at = begin
    while len({other[at : at + 8] for other in everyone}) == 1:
        at += 8
    return (at - begin) // 8


def expect_equal_lines(comm: Reducer, lines: Sequence[str]) -> None:
    """RuntimeError on every rank, naming the first that is not the same on all. Collective."""
    payload = b"".join(hashlib.sha256(line.encode()).digest()[:8] for line in lines)[: comm.max_payload_bytes]
    everyone = comm.exchange(payload)
    if len(set(everyone)) > 1:
        raise RuntimeError(f"ranks disagree on {lines[_first_unequal(everyone)]} (here on rank {comm.rank})")


def compare_values(comm: Reducer, infos: Sequence[ParamInfo], others: Sequence[tuple[str, Tensor]]) -> None:
    """RuntimeError on every rank where one was given the parameters without names in another order than rank 0: they have
    the values of rank 0's, at other places. Other values are all right, rank 0's are taken.

    A warning on every rank where ``others``, which have names and stay as they are, have other values. Collective.
    """
    unnamed = [info for info in infos if not info.is_named]
    params = digests_of([info.param for info in unnamed])
    others = [(name, other) for name, other in others if is_plain(other)]
    named = [
        hashlib.sha256(f"{name} {tuple(other.shape)} {other.dtype}".encode() + value).digest()[:8]
        for (name, other), value in zip(others, digests_of([other for _, other in others]), strict=True)
    ]
    sums = [hashlib.sha256(b"".join(values)).digest() for values in (params, named)]
    everyone = comm.exchange(b"".join(sums))
    if len({one[: len(sums[0])] for one in everyone}) > 1:
        _expect_equal_order(unnamed, comm.exchange(b"".join(params)[: comm.max_payload_bytes]))
    if len({one[len(sums[0]) :] for one in everyone}) > 1:
        _warn_of_unequal([name for name, _ in others], comm.exchange(b"".join(named)[: comm.max_payload_bytes]))


def _expect_equal_order(infos: Sequence[ParamInfo], everyone: Sequence[bytes]) -> None:
    first, *rest = ([of[at : at + 8] for at in range(0, len(of), 8)] for of in everyone)
    for rank, mine in enumerate(rest, 1):
        moved = [i for i, (a, b) in enumerate(zip(first, mine, strict=True)) if a != b]
        if moved and sorted(first[i] for i in moved) == sorted(mine[i] for i in moved):
            place = {mine[i]: infos[i].name for i in moved}
            places = ", ".join(f"{infos[i].name!r} as {place[first[i]]!r}" for i in moved[:3])
            raise RuntimeError(
                f"rank {rank} was given the parameters in another order than rank 0: it has rank 0's {places}"
                f"{', ...' if len(moved) > 3 else ''}; every rank must pass the same parameters in the same order. "
                "Pass model.named_parameters(), of which the names are compared"
            )


def _warn_of_unequal(names: Sequence[str], everyone: Sequence[bytes]) -> None:
    size = min(map(len, everyone))
    unequal = [i for i in range(size // 8) if len({of[8 * i : 8 * i + 8] for of in everyone}) > 1]
    shown = ", ".join(repr(names[i]) for i in unequal[:3]) or "their number"
    warnings.warn(
        f"frozen parameters and buffers differ between ranks: {shown}{', ...' if len(unequal) > 3 else ''}. The optimizer "
        "gives all ranks rank 0's trainable parameters only, where DDP gives them its frozen parameters and buffers too: "
        "call bucketwheel.sync_module(model) before, with buffers='forward' if forwards write to buffers (BatchNorm)",
        stacklevel=6,  # the call of the optimizer's class
    )


def expect_equal_places(comm: Communicator, places: Mapping[str, tuple[int, int]]) -> None:
    """RuntimeError on every rank, naming the first difference, unless these lie at the same places of registered memory on
    all (`Lease.place`). Collective.

    NCCL adds a rank's own offset to the begin of its peers' windows, so it would read something else.
    """
    everyone = comm.exchange(b"".join(struct.pack("<qq", *place) for place in places.values()))
    by_place = zip(*(struct.iter_unpack("<qq", other) for other in everyone), strict=True)
    for what, by_rank in zip(places, by_place, strict=True):
        if len(set(by_rank)) > 1:
            raise RuntimeError(
                f"ranks have the optimizer's registered memory at other places (slab, offset): {what} at {list(by_rank)}. "
                "All must make the same acquires of the communicators' pools, in one order, before the optimizer is made, "
                "and close() the one before it"
            )
