"""Buckets: what drops a late gradient in a CUDA stream, and large gradients. Other streams:
conformance/optimizer/test_optim_streams.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bucketwheel import device
from bucketwheel.grads import bucket as buckets
from bucketwheel.grads.bucket import GradBucket, Part
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool

LARGE = (1 << 18) + 3


def on_the_host() -> buckets.Acquire:
    pool = Pool("host")
    return lambda bucket, late: bucket.lease_of(pool, late)


def test_what_drops_a_gradient_comes_after_its_store_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By streams that only write down whom they wait for."""
    waits: list[tuple[str, str]] = []
    streams: dict[str, Any] = {
        name: SimpleNamespace(
            name=name, cuda_stream=name, wait_stream=lambda other, name=name: waits.append((name, other.name))
        )
        for name in "abc"
    }
    current = ["a"]
    for module in (buckets, device):
        monkeypatch.setattr(module, "stream_of", lambda device: streams[current[0]])
    accumulator = core.ShardAccumulator(torch.zeros(8), [(0, 8)])
    bucket, memory = GradBucket(0, 8, torch.float32, [Part(0, 0, 0, 4), Part(1, 4, 0, 4)], accumulator), on_the_host()
    bucket.is_on_cpu = False  # as far as streams go
    for param, current[0] in enumerate("ab"):
        bucket.store(memory, param, torch.ones(4), late=True, add=True)
    waits.clear()
    current[0] = "c"
    bucket.drop(1)
    assert {("c", "a"), ("c", "b")} == set(waits)
    assert "c" in [stream.name for stream in bucket.take_streams()]
    lease, flat = bucket.take(memory, [], late=True)
    assert flat.tolist() == [1.0] * 4 + [0.0] * 4
    lease.release()


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


@pytest.mark.parametrize("kind", large_gradients())
def test_large_gradients_are_stored_as_they_read(kind: str) -> None:
    numel, begin = LARGE, 5
    accumulator = core.ShardAccumulator(torch.empty(numel + 9), [(0, numel + 9)])
    bucket = GradBucket(0, numel + 9, torch.float32, [Part(0, begin, 0, numel)], accumulator)
    grad = large_gradients()[kind]
    assert grad.is_neg() == ("negated" in kind) and grad._is_zerotensor() == ("nowhere" in kind)
    memory = bucket.store(on_the_host(), 0, grad, late=False, add=False)
    assert torch.equal(memory[begin : begin + numel], grad.float() + 0.0)
    bucket.drop_memory()
