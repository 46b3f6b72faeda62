"""Digests: what tensors hold in 8 bytes each, so that ranks can compare large ones by small messages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from bucketwheel.device import buffer_of

__all__ = ["bytes_of", "digests_of"]

_FOLDED = 1024  # bytes that what is larger than twice that is added up to, as int64, on its device


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements in the order of their indices as uint8 ``[bytes]``: the tensor's memory where that has this order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # strides of what is empty may be anything


def digests_of(tensors: Sequence[Tensor]) -> list[bytes]:
    """Of each tensor's bytes, wherever it lies. Reads everything once; the host gets at most 2 KiB of each."""
    with torch.no_grad():
        folded = [_folded(one).cpu() for one in tensors]
        return [hashlib.blake2b(buffer_of(one), digest_size=8).digest() for one in folded]


def _folded(tensor: Tensor) -> Tensor:
    data = bytes_of(tensor)
    whole = data.numel() // _FOLDED * _FOLDED
    if whole <= _FOLDED:
        return data
    rows = data[:whole]
    if rows.storage_offset() % 8:
        rows = rows.clone()
    return torch.cat([rows.view(torch.int64).view(-1, _FOLDED // 8).sum(0).view(torch.uint8), data[whole:]])
