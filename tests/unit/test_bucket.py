"""Buckets that several CUDA streams write to: who waits for whom. The streams are false ones that record what waits.

Of G18 of the optimizer's test rows; the whole: conformance/optimizer/test_optim_streams.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bucketwheel as bw
from bucketwheel import device
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.grads import bucket as buckets
from bucketwheel.grads import launch
from bucketwheel.grads.bucket import GradBucket, Part
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool
from tests.support.simulated_cuda import posing


class Streams:
    """torch's current stream is the one named last by `use`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[tuple[str, str]] = []  # who, for whom
        self._named: dict[str, FalseStream] = {}
        self.use("a")
        for module in (buckets, device, launch):
            monkeypatch.setattr(module, "stream_of", lambda device: self.current)

    def use(self, name: str) -> None:
        self.current = self._named.setdefault(name, FalseStream(self, name))

    def waited(self) -> list[tuple[str, str]]:
        """Since the last call."""
        waits, self.waits = self.waits, []
        return waits


class FalseStream:
    device = torch.device("cpu")

    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self.name = streams, name
        self.cuda_stream = hash(name)

    def wait_stream(self, other: Any) -> None:
        self._streams.waits.append((self.name, other.name))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def bucket_of_two() -> GradBucket:
    accumulator = core.ShardAccumulator(torch.zeros(8), [(0, 8)])
    bucket = GradBucket(0, 8, torch.float32, [Part(0, 0, 0, 4), Part(1, 4, 0, 4)], accumulator)
    bucket.is_on_cpu = False  # as far as streams go
    return bucket


def on_the_host() -> buckets.Acquire:
    pool = Pool("host")
    return lambda bucket, late: bucket.lease_of(pool, late)


@pytest.mark.parametrize("add", [False, True])
def test_what_is_written_again_comes_after_what_was_there(streams: Streams, add: bool) -> None:
    bucket, memory = bucket_of_two(), on_the_host()
    bucket.store(memory, 0, torch.ones(4), late=False, add=False)
    streams.use("b")
    bucket.store(memory, 1, torch.ones(4), late=False, add=False)
    streams.use("c")
    streams.waited()
    bucket.store(memory, 1, torch.ones(4), late=False, add=add)
    assert {("c", "a"), ("c", "b")} == set(streams.waited())
    streams.use("d")
    bucket.store(memory, 1, torch.ones(4), late=False, add=add)
    assert {("d", "a"), ("d", "c")} == set(streams.waited()), "c is behind b"
    assert [stream.name for stream in bucket.take_streams()] == ["a", "d"]
    bucket.take(memory, [], late=False)[0].release()


def test_what_drops_a_gradient_comes_after_its_store_and_is_waited_for(streams: Streams) -> None:
    bucket, memory = bucket_of_two(), on_the_host()
    bucket.store(memory, 0, torch.ones(4), late=True, add=True)
    streams.use("b")
    bucket.store(memory, 1, torch.ones(4), late=True, add=True)
    streams.use("c")
    streams.waited()
    bucket.drop(1)
    assert {("c", "a"), ("c", "b")} == set(streams.waited())
    assert "c" in [stream.name for stream in bucket.take_streams()]
    lease, flat = bucket.take(memory, [], late=True)
    assert flat.tolist() == [1.0] * 4 + [0.0] * 4
    lease.release()


def test_a_captured_window_waits_for_no_stream_of_gradients_that_were_dropped(streams: Streams) -> None:
    with posing(), Communicator(LocalWorld(1).rank(0), device="cuda") as comm:
        param = torch.nn.Parameter(torch.ones(8))
        opt = bw.ShardedAdamW([param], process_group=comm)
        grads = opt._engine.grads
        param.sum().backward()
        param.sum().backward()  # late
        opt.zero_grad()
        grads.launcher.begin_window(param.device, is_captured=True)
        assert grads.buckets[0].take_streams() == []
        opt.step()
        opt.close()


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


LARGE = (1 << 18) + 3


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
