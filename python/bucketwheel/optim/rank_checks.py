"""Rank checks: what all ranks must have alike before the first step, each with its error."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from bucketwheel._version import __version__
from bucketwheel.comm.equal_lines import by_eight, digest_of, expect_equal_lines
from bucketwheel.comm.replicas import Reducer
from bucketwheel.device import buffer_of
from bucketwheel.layout.flat_params import ParamInfo, is_plain

_FOLDED = 1024  # bytes


def expect_equal_layout(comm: Reducer, infos: Sequence[ParamInfo], groups: Sequence[str], options: object) -> None:
    """RuntimeError on every rank, naming the first difference, unless all ranks were given the same. Collective."""
    lines = [f"the optimizer's options: {options}, bucketwheel {__version__}"]
    lines += [f"parameter group {g}: {text}" for g, text in enumerate(groups)]
    lines += [
        f"parameter {info.index}: {info.name!r} {tuple(info.param.shape)}, strides {info.stride}, {info.dtype}, group "
        f"{info.group}, granularity {info.granularity or 'auto'}"
        for info in infos
    ]
    expect_equal_lines(
        comm, lines, "; every rank must pass the same parameters in the same order, with the same options"
    )


def compare_values(comm: Reducer, infos: Sequence[ParamInfo], frozen: Sequence[tuple[str, Tensor]]) -> None:
    """RuntimeError on every rank where one was given the parameters without names in another order than rank 0: they have
    the values of rank 0's, at other places. Other values are all right, rank 0's are taken.

    A warning on every rank where ``frozen`` parameters, which stay as they are, have other values. Collective.
    """
    unnamed = [info for info in infos if not info.is_named]
    frozen = [(name, param) for name, param in frozen if is_plain(param)]
    trained, kept = digests_of([info.param for info in unnamed]), digests_of([param for _, param in frozen])
    payload = b"".join([digest_of(b"".join(kept)), *trained, *kept])[: comm.max_payload_bytes // 8 * 8]
    everyone = [by_eight(of) for of in comm.exchange(payload)]
    _expect_equal_order(unnamed, [of[1 : 1 + len(unnamed)] for of in everyone])
    if len({of[0] for of in everyone}) > 1:
        by_param = zip((name for name, _ in frozen), *(of[1 + len(unnamed) :] for of in everyone), strict=False)
        unequal = [repr(name) for name, *values in by_param if len(set(values)) > 1]
        warnings.warn(
            f"frozen parameters differ between ranks: {', '.join(unequal[:3]) or 'some of them'}"
            f"{', ...' if len(unequal) > 3 else ''}. The optimizer broadcasts rank 0's trainable parameters only; DDP "
            "also broadcasts frozen parameters and buffers. Call bucketwheel.sync_module(model) before the optimizer, "
            "with buffers='forward' if forwards write to buffers (BatchNorm)",
            stacklevel=5,  # the call of the optimizer's class
        )


def _expect_equal_order(infos: Sequence[ParamInfo], everyone: Sequence[Sequence[bytes]]) -> None:
    first, *rest = everyone
    for rank, mine in enumerate(rest, 1):
        moved = [i for i, (a, b) in enumerate(zip(first, mine, strict=True)) if a != b]
        if moved and sorted(first[i] for i in moved) == sorted(mine[i] for i in moved):
            place = {mine[i]: infos[i].name for i in moved}
            places = ", ".join(f"{infos[i].name!r} as {place[first[i]]!r}" for i in moved[:3])
            raise RuntimeError(
                f"rank {rank} passed the parameters in another order than rank 0: rank {rank} has rank 0's {places}"
                f"{', ...' if len(moved) > 3 else ''}; every rank must pass the same parameters in the same order. "
                "Pass model.named_parameters(), whose names are compared"
            )


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements in the order of their indices as uint8 ``[bytes]``: the tensor's memory where that has this order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # strides of what is empty may be anything


def digests_of(tensors: Sequence[Tensor]) -> list[bytes]:
    """The bytes of each tensor, wherever it lies, in 8. Reads everything once; the host gets at most 2 KiB of each."""
    folded = [_folded(bytes_of(one)).cpu() for one in tensors]
    return [digest_of(buffer_of(one)) for one in folded]


def _folded(data: Tensor) -> Tensor:
    """Adds up what is longer than `_FOLDED` bytes, as int64, on its device."""
    whole = data.numel() // _FOLDED * _FOLDED
    rows = data[:whole].clone() if data.storage_offset() % 8 else data[:whole]
    return torch.cat([rows.view(torch.int64).view(-1, _FOLDED // 8).sum(0).view(torch.uint8), data[whole:]])
