"""Comparison of tensors bit for bit, with a message that shows the bits."""

from __future__ import annotations

from typing import Any

__all__ = ["assert_bitwise_equal"]


def assert_bitwise_equal(actual: Any, expected: Any, name: str = "") -> None:
    """Raise AssertionError unless both hold the same bits: tensors, arrays, numbers, or lists, tuples and dicts of
    them.

    Shape and dtype must be equal. +0 differs from -0; any NaN equals any NaN. The message gives the number of differing
    elements and the first of them, in decimal and in hex.
    """
    label = name or "value"
    if isinstance(expected, dict) and isinstance(actual, dict):
        if actual.keys() != expected.keys():
            raise AssertionError(f"{label}: keys are {list(actual)}, expected {list(expected)}")
        for key in expected:
            assert_bitwise_equal(actual[key], expected[key], f"{name}[{key!r}]")
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(actual) != len(expected):
            raise AssertionError(f"{label}: length is {len(actual)}, expected {len(expected)}")
        for index in range(len(expected)):
            assert_bitwise_equal(actual[index], expected[index], f"{name}[{index}]")
    elif isinstance(expected, (str, bytes, type(None))):
        if actual != expected:
            raise AssertionError(f"{label}: actual {actual!r}, expected {expected!r}")
    else:
        _assert_equal_bits(actual, expected, label)


def _assert_equal_bits(actual: Any, expected: Any, label: str) -> None:
    import torch

    a, e = (torch.as_tensor(x).detach().cpu().contiguous() for x in (actual, expected))
    if a.dtype != e.dtype or a.shape != e.shape:
        found, wanted = (f"{x.dtype} {tuple(x.shape)}" for x in (a, e))
        raise AssertionError(f"{label}: actual is {found}, expected {wanted}")
    if a.is_complex():
        a, e = torch.view_as_real(a), torch.view_as_real(e)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = a.view(bits) != e.view(bits)
    if a.is_floating_point():
        differs &= ~(a.isnan() & e.isnan())
    count = int(differs.sum())
    if count == 0:
        return
    flat = int(differs.flatten().nonzero()[0, 0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)] if a.ndim else []
    raise AssertionError(
        f"{label}: {count} of {a.numel()} elements differ, the first at {index} (flat {flat}): "
        f"actual {_show(a, bits, flat)}, expected {_show(e, bits, flat)}, {a.dtype}; "
        f"largest difference {_largest_difference(a, e)}"
    )


def _show(tensor: Any, bits: Any, flat: int) -> str:
    digits = 2 * tensor.element_size()
    pattern = int(tensor.view(bits).flatten()[flat]) & ((1 << 4 * digits) - 1)
    return f"{tensor.flatten()[flat].item()!r} (0x{pattern:0{digits}x})"


def _largest_difference(a: Any, e: Any) -> str:
    import torch

    difference = (a.to(torch.float64) - e.to(torch.float64)).abs()
    return f"{difference[difference.isfinite()].max().item() if difference.isfinite().any() else float('nan'):.3g}"
