"""How a saved state names parameters where nothing else does: by their numbers, as torch counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bucketwheel.checkpoint.plain_values import as_plain

__all__ = ["numbered_groups", "numbers_of"]


def numbers_of(param_groups: Sequence[dict[str, Any]]) -> dict[Tensor, int]:
    """Through all groups, frozen ones counted."""
    grouped = (p for group in param_groups for p in group["params"])
    numbers: dict[Tensor, int] = {}
    for i, p in enumerate(grouped):
        numbers.setdefault(p, i)
    return numbers


def numbered_groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``param_groups`` with numbers in the place of parameters, and Python's numbers in that of numpy's."""
    number = numbers_of(param_groups)
    own = [{key: as_plain(value) for key, value in group.items() if key != "params"} for group in param_groups]
    return [{**of, "params": [number[p] for p in group["params"]]} for of, group in zip(own, param_groups, strict=True)]
