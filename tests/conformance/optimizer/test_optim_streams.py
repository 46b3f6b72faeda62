"""Gradients, steps and the optimizer's making in CUDA streams of their own, simulated: the CPU's bits, everything in order.
Without any of the edges of docs/developers/ordering.md something is not: `make mutants` (window.cpp, reductions.cpp).

On a GPU: tests/gpu/test_ordering.py.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.residency.gathers import Gathers
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, dyadic, make_params, run_local
from tests.support.replica_ranks import with_replicas
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing
from tests.support.simulated_streams import SideStream, checked, current, on, streams_are_simulated, torchs_streams

STEPS = 3


class InStreams:
    """Side streams by name, behind the current one when they are taken, and waited for by it afterwards: as torch asks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._streams: dict[str, SideStream] = {}

    @contextlib.contextmanager
    def beside(self, *names: str) -> Iterator[list[Callable[[], AbstractContextManager[Any]]]]:
        """Makers of contexts, one for each name. What runs in one has no edge to the others."""
        for name in {*names} - {*self._streams}:
            self._streams[name] = SideStream(f"{name} of rank {self._rank}")
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


def trained(comm: Communicator, streams: InStreams | InOne, seed: int, options: dict[str, Any]) -> list[Tensor]:
    """Norms, and parameters after each step."""
    params = make_params(seed=comm.rank)
    grads = [dyadic(params, 10 * step + comm.rank) for step in range(STEPS)]
    rng = random.Random(seed)
    with streams.beside("maker") as (maker,), maker():
        opt = bw.ShardedAdamW(params, lr=0.02, weight_decay=0.1, process_group=comm, **options)
    seen = []
    for step in range(STEPS):
        for is_first in (True, False) if step == 1 else (False,):
            order = [*reversed(range(len(params))), 3, 0, 3, 0]  # the last ones after their buckets have gone
            is_second = step == 1 and not is_first
            with streams.beside("left", "right") as sides:  # gradients of one bucket come from both
                for i in (0, *order) if is_second else order:
                    # The second window is opened beside what its first buckets are launched from.
                    with (sides[i != 0] if is_second else rng.choice(sides))():
                        (params[i] * grads[step][i]).sum().backward()
            if is_first:  # the second window adds to the sums of the first, but for one parameter
                with streams.beside("stepper") as (stepper,), stepper():
                    seen.append(opt.clip_grad_norm_(0.5).clone())
                    params[1].grad = None
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


World = Any  # ranks that shard, or (they, replicas)


def in_ranks(world: World, body: Callable[[int, Communicator, dict[str, Any]], Any], device: str | None) -> list[Any]:
    """``body(rank, communicator, options of replicas)``"""
    if isinstance(world, int):
        return run_local(world, lambda comm: body(comm.rank, comm, {}), timeout_s=40, device=device)
    in_columns = lambda rank, shard, replicate: body(rank, shard, {"replicate_group": replicate})  # noqa: E731
    return with_replicas(*world, in_columns, device=device)


def checked_ranks(world: World, seed: int, options: dict[str, Any]) -> tuple[list[list[Tensor]], list[str]]:
    """What the ranks have trained, and what was not in order."""

    def body(rank: int, comm: Communicator, hsdp: dict[str, Any]) -> list[Tensor]:
        with torchs_streams(f"main of rank {rank}"):
            return trained(comm, InStreams(rank), seed, {**options, **hsdp})

    with posing(), streams_are_simulated(), checked(seed) as races:
        got = in_ranks(world, body, "cuda")
    return got, races


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, OPTIONS[2]),
        ((2, 2), OPTIONS[1]),
        *(slow_case(world, OPTIONS[0]) for world in (1, 2, (2, 2))),
        *(slow_case(2, options) for options in OPTIONS[1::2]),
        slow_case((2, 2), OPTIONS[2]),
    ],
    ids=str,
)
def test_streams_that_only_their_users_join_are_in_order(world: World, options: dict[str, Any]) -> None:
    body = lambda rank, comm, hsdp: trained(comm, InOne(), 0, {**options, **hsdp})  # noqa: E731
    expected = in_ranks(world, body, None)
    for seed in range(2):
        got, races = checked_ranks(world, seed, options)
        assert races == [], f"seed {seed}"
        for rank, tensors in enumerate(got):
            assert_bitwise_equal(tensors, expected[rank], f"seed {seed}, rank {rank}")


class Elsewhere:
    """A gather's handle. A stream that nobody uses waits, so the host still waits until all ranks have issued."""

    is_captured = False

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def wait(self, stream: Any = None) -> None:
        self._handle.wait(SideStream("nobody's").native)


def leave_elsewhere(gathers: Gathers, leave: Callable[[Gathers], None] = Gathers.leave_running) -> None:
    gathers.running = [(Elsewhere(handle), bucket) for handle, bucket in gathers.running]  # type: ignore[misc]
    leave(gathers)


def test_a_step_that_does_not_wait_for_its_gathers_is_found() -> None:
    """Edges 9 and 11 of docs/developers/ordering.md, with both places. Those of native code: `make mutants`."""
    races: list[str] = []
    for seed in range(12):
        with mock.patch.object(Gathers, "leave_running", leave_elsewhere):
            races += checked_ranks(2, seed, OPTIONS[seed % 2])[1]
        pairs = [race.split(" and ") for race in races]
        one, other = "write by memcpy_async", "read by aten.mul.Tensor"
        if any((one in a and other in b) or (one in b and other in a) for a, b in pairs):
            return
    raise AssertionError(f"only {races}")
