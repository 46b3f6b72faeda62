"""Large gradients, for whose copy on the CPU the GIL is given up. Streams: conformance/optimizer/test_optim_streams.py."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.optim_twins import run_local
from tests.support.simulated_cuda import posing

LARGE = (1 << 22) + 3  # 16 MiB of float32, and more


def large_gradients() -> dict[str, torch.Tensor]:
    values = torch.arange(LARGE, dtype=torch.float32)
    return {
        "plain": values,
        "with gaps": torch.arange(2 * LARGE, dtype=torch.float32)[::2],
        "one element for all": torch.tensor(3.0).expand(LARGE),
        "negated when read": torch._neg_view(values),
        "zeros that lie nowhere": torch._efficientzerotensor((LARGE,), dtype=torch.float32, device="cpu"),
        "another dtype": values.double(),
        "a subclass": values.as_subclass(torch.nn.Parameter),
    }


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("kind", large_gradients())
def test_large_gradients_are_stored_as_they_read(kind: str, device: str | None) -> None:
    grad = large_gradients()[kind]
    assert grad.is_neg() == ("negated" in kind) and grad._is_zerotensor() == ("nowhere" in kind)

    def body(comm: Communicator) -> None:
        params = [Parameter(torch.zeros(numel)) for numel in (5, LARGE, 4)]
        params[1].grad_dtype = None
        opt = ShardedAdamW(params, process_group=comm, bucket_cap_mb=64)
        params[1].grad = grad
        found = opt.full_grad(params[1])
        assert found is not None and torch.equal(found, grad.float() + 0.0)
        opt.close()

    with posing() if device else contextlib.nullcontext():
        run_local(1, body, device=device)
