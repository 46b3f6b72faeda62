"""Agreement that is not made: nothing is left of it, and who is missing is named."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from bucketwheel.comm import background, peers
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError
from tests.support.failure_cases import SOON_S, error_of, expect_no_threads
from tests.support.nccl_failure_cases import expect_gone, hosts_apart, script
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

pytestmark = pytest.mark.dist


def not_made(rank: int, size: int) -> None:
    library = script()
    with posing(), hosts_apart():
        if rank == 0:
            library.fake_nccl_fail(b"ncclCommInitRankConfig", 1, 3)
        error = error_of(lambda: Communicator(backend="nccl", device="cuda", timeout_s=1.5))
        assert error[0] in ("CommError", "CommTimeout")
    expect_gone(library)
    expect_no_threads()


def test_a_communicator_that_is_not_made_leaves_no_threads(rank_pool):
    rank_pool(2).run(not_made, timeout_s=30)


def no_thread_is_left(rank: int, size: int, backend: str, refused: list[int]) -> None:
    """The system refuses a rank the thread that reads the Store."""
    starts = 0

    def start(*args: Any, **options: Any) -> None:
        nonlocal starts
        starts += 1
        if starts == refused[rank]:
            raise RuntimeError("can't start new thread")
        background.start(*args, **options)

    options = {"device": "cuda"} if backend == "nccl" else {}
    begin = time.monotonic()
    with posing() if backend == "nccl" else contextlib.nullcontext(), hosts_apart():
        with mock.patch.object(peers, "start", start):
            kind, text, _ = error_of(lambda: Communicator(backend=backend, timeout_s=20, **options))
    assert kind == "CommError" and time.monotonic() - begin < 15, text
    for other, number in enumerate(refused):
        assert (f"\n  rank {other}: RuntimeError: can't start new thread" in text) == bool(number), text
    expect_no_threads()


@pytest.mark.parametrize("refused", [[1, 0], [1, 1]], ids=str)
@pytest.mark.parametrize("backend", ["c10d", slow_case("nccl")])
def test_agreement_without_its_thread_leaves_none(backend, refused, rank_pool):
    rank_pool(2).run(no_thread_is_left, backend, refused, timeout_s=30)


def one_does_not_connect(rank: int, size: int) -> tuple[str, str, float]:
    place = dist.PrefixStore("connecting", dist.distributed_c10d._get_default_store())
    if rank == size - 1:
        return "", "", 0.0
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        peers.make_peers(Rendezvous(place, rank, size, 1.5), "late", 1.5)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begin


def test_a_rank_that_does_not_connect(rank_pool):
    for kind, text, took_s in rank_pool(3).run(one_does_not_connect, timeout_s=30)[:2]:
        assert kind == "CommTimeout" and "ranks [2] have not come" in text, text
        assert took_s < 1.5 + SOON_S
