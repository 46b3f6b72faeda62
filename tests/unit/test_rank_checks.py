"""Rank checks: digests are equal for equal values wherever and however they lie, others for others."""

from __future__ import annotations

import pytest
import torch

from bucketwheel.grads.agreement import raise_different_calls
from bucketwheel.optim.rank_checks import digests_of


@pytest.mark.parametrize("numel", [0, 1, 7, 255, 1031, 70001])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.complex64]
)
def test_equal_values_have_equal_digests_and_others_do_not(numel: int, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(numel)).to(dtype)
    shifted = torch.cat([values[:1], values])[1 if numel else 0 :]  # of no whole word
    spread = torch.stack([values, values], 1)[:, 0]
    kinds = [values, shifted, spread, values.conj_physical().conj()]
    if dtype.is_floating_point:
        kinds.append(torch._neg_view(-values))
    assert len(set(digests_of(kinds))) == 1
    for at in {0, numel // 2, numel - 1} if numel else ():
        other = values.clone()
        other[at] = other[at] == 0
        assert digests_of([other]) != digests_of([values]), at


@pytest.mark.parametrize(
    ("calls", "remedy"),
    [
        (("bw.checkpoint.save into 'run'", "close"), "Call bw.checkpoint.save on all ranks, not only `if rank == 0:`"),
        (("step", "bw.checkpoint.save into 'run'"), "Call bw.checkpoint.save on all ranks, not only `if rank == 0:`"),
        (("bw.checkpoint.save into 'a'", "bw.checkpoint.save into 'b'"), "the same call with the same folder"),
        (("step", "close"), "A rank without further inputs must go on calling the optimizer"),
        (("step", "full_grad"), "All ranks must make the same calls"),
    ],
)
def test_different_calls_have_their_remedy(calls: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        raise_different_calls(calls, [b""] * len(calls))
    assert ", ".join(calls) in str(caught.value) and remedy in str(caught.value)
