"""Gradients, steps and the optimizer's making in CUDA streams of their own, simulated: the CPU's bits.

G18 of the optimizer's test rows; on a GPU: tests/gpu/test_ordering.py. Each edge alone: tests/unit/test_bucket.py.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.optimizer.test_optim_cuda import in_world
from tests.support.optim_twins import TINY, dyadic, make_params
from tests.support.simulated_streams import SideStream, current, on, streams_are_simulated, torchs_streams

STEPS = 4
HOLD_S = 0.01


class InStreams:
    """Side streams by name, behind the current one when they are taken, and waited for by it afterwards: as torch asks."""

    def __init__(self) -> None:
        self._streams: dict[str, SideStream] = {}

    @contextlib.contextmanager
    def beside(self, *names: str) -> Iterator[list[Callable[[], AbstractContextManager[Any]]]]:
        """Makers of contexts, one for each name. What runs in one has no edge to the others."""
        for name in {*names} - {*self._streams}:
            self._streams[name] = SideStream(name, HOLD_S if name == "late" else 0.0)
        streams = [self._streams[name] for name in names]
        for stream in streams:
            stream.wait_stream(current())
        yield [partial(on, stream) for stream in streams]
        for stream in streams:
            current().wait_stream(stream)


class InOne:
    """The same on the CPU, without streams."""

    @contextlib.contextmanager
    def beside(self, *names: str) -> Iterator[list[Callable[[], AbstractContextManager[Any]]]]:
        yield [contextlib.nullcontext for _ in names]


def trained(comm: Communicator, streams: InStreams | InOne, options: dict[str, Any]) -> list[Tensor]:
    """Norms, and parameters after each step."""
    params = make_params(seed=comm.rank)
    grads = [dyadic(params, 10 * step + comm.rank) for step in range(STEPS)]
    rng = random.Random(1)
    with streams.beside("maker") as (maker,), maker():
        opt = bw.ShardedAdamW(params, lr=0.02, weight_decay=0.1, process_group=comm, **options)
    seen = []
    for step in range(STEPS):
        with streams.beside("late", "early") as sides:  # gradients of one bucket come from both
            for i in (*reversed(range(len(params))), 3, 0):  # the last two after their buckets have gone
                with rng.choice(sides)():
                    (params[i] * grads[step][i]).sum().backward()
        with streams.beside("stepper") as (stepper,), stepper():
            seen.append(opt.clip_grad_norm_(0.5).clone())
            opt.step()
            opt.zero_grad()
        with streams.beside("reader") as (reader,), reader():  # where parameters may still be on their way
            seen += [p.detach().clone() for p in params]
    opt.close()
    return seen


OPTIONS: list[dict[str, Any]] = [
    TINY,
    {"bucket_cap_mb": 3e-3, "overlap_param_sync": True},
    {**TINY, "max_inflight_buckets": 1},
    {"overlap_grad_sync": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_g18_streams_that_only_their_users_join_leave_the_bits_of_one(world: int, options: dict[str, Any]) -> None:
    def body(rank: int, comm: Communicator) -> list[Tensor]:
        with torchs_streams() as operations:
            out = trained(comm, InStreams(), options)
        assert operations.deferred > STEPS * len(make_params()), "gradients were packed in their streams"
        return out

    expected = in_world(world, False, lambda rank, comm: trained(comm, InOne(), options))
    with streams_are_simulated():
        got = in_world(world, True, body, delays=3)
    for rank, tensors in enumerate(got):
        assert_bitwise_equal(tensors, expected[rank], f"rank {rank}")
