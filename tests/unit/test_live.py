"""Live boxes: how views of a parameter's part and of its states are cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bucketwheel.checkpoint.live import split_views
from tests.support.bits import assert_bitwise_equal

SHAPES = [(), (0,), (1,), (7,), (5, 7), (1, 9), (4, 3, 2, 2), (3, 1, 5)]


def layouts(shape: tuple[int, ...]) -> list[Tensor]:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    kinds = [values.permute(order).contiguous() for order in itertools.permutations(range(len(shape)))]
    orders = itertools.permutations(range(len(shape)))
    return [
        kind.permute(sorted(range(len(order)), key=order.__getitem__))
        for kind, order in zip(kinds, orders, strict=True)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_parts_are_bounded_and_in_row_major_order(shape: tuple[int, ...], most: int) -> None:
    for tensor in layouts(shape):
        parts = list(split_views([tensor, -tensor], most))
        assert all(first.numel() <= most for first, _ in parts)
        assert_bitwise_equal(torch.cat([first.reshape(-1) for first, _ in parts]), tensor.reshape(-1))
        assert_bitwise_equal(torch.cat([second.reshape(-1) for _, second in parts]), -tensor.reshape(-1))
        assert all(first.numel() == 0 or first._is_view() for first, _ in parts) or len(parts) == 1
