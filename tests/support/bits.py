"""Compare values bit for bit."""

from typing import Any

import torch


def assert_bitwise_equal(actual: Any, expected: Any, name: str = "value") -> None:
    """Raise AssertionError unless both hold the same bits: tensors, arrays, numbers, `TensorShard`s, or lists, tuples and
    dicts of them. +0 differs from -0; any NaN equals any NaN."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        assert actual.keys() == expected.keys(), f"{name}: keys are {list(actual)}, expected {list(expected)}"
        for key in expected:
            assert_bitwise_equal(actual[key], expected[key], f"{name}[{key!r}]")
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected), f"{name}: length is {len(actual)}, expected {len(expected)}"
        for index in range(len(expected)):
            assert_bitwise_equal(actual[index], expected[index], f"{name}[{index}]")
    elif isinstance(expected, (str, bytes, type(None))):
        assert actual == expected, f"{name}: actual {actual!r}, expected {expected!r}"
    elif hasattr(expected, "piece") and hasattr(actual, "piece"):
        assert_bitwise_equal((actual.ranges, actual.piece), (expected.ranges, expected.piece), name)
    else:
        a, e = (torch.as_tensor(x).detach().cpu().contiguous() for x in (actual, expected))
        found, wanted = (f"{x.dtype} {tuple(x.shape)}" for x in (a, e))
        assert found == wanted, f"{name}: actual is {found}, expected {wanted}"
        if a.is_complex():
            a, e = torch.view_as_real(a), torch.view_as_real(e)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        differs = a.view(bits) != e.view(bits)
        if a.is_floating_point():
            differs &= ~(a.isnan() & e.isnan())
        if differs.any():
            first = tuple(differs.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {int(differs.sum())} of {a.numel()} elements differ, the first at {list(first)}: actual "
                f"{a[first].item()!r}, expected {e[first].item()!r}, {a.dtype}; largest difference "
                f"{(a.double() - e.double()).abs().nan_to_num().max():.3g}"
            )
