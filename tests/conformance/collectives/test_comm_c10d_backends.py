"""The c10d backend over process groups of other kinds: what somebody has registered with torch."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bucketwheel.comm import c10d
from bucketwheel.comm.communicator import Communicator
from tests.support.comm_cases import check_all_gather, check_reduce_scatter
from tests.support.failure_cases import SOON_S, Error, error_of, expect_no_threads
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dist


class Post(dist.ProcessGroup):
    """A backend that somebody registered: gloo, but counted."""

    sent_bytes = 0

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def alltoall_base(self, into: torch.Tensor, out: torch.Tensor, *sizes_and_options: Any) -> Any:
        Post.sent_bytes += out.nbytes
        return self.gloo.alltoall_base(into, out, *sizes_and_options)

    def barrier(self, options: Any) -> Any:
        return self.gloo.barrier(options)

    def getBackendName(self) -> str:
        return "post"


def make_post(store: dist.Store, rank: int, size: int, timeout: Any) -> Post:
    return Post(store, rank, size, timeout)


def make_extended(options: Any, _: Any) -> Post:
    return Post(options.store, options.group_rank, options.group_size, options.timeout)


def over_registered(rank: int, size: int) -> None:
    dist.Backend.register_backend("post", make_post, devices=["cpu"])
    dist.Backend.register_backend("extended_post", make_extended, extended_api=True, devices=["cpu"])
    for name in ("post", "cpu:extended_post"):
        group = dist.new_group(backend=name)
        with Communicator(group, backend="c10d", timeout_s=30) as comm:
            before = Post.sent_bytes
            check_all_gather(comm, [(torch.float32, 5000)], "foreign")
            check_reduce_scatter(comm, [(torch.bfloat16, 5000)], "foreign")
            assert Post.sent_bytes - before > (size - 1) * (5000 * 4 + 5000 * 2)


def test_a_registered_backend_carries_the_data():
    with RankPool(3) as pool:
        pool.run(over_registered)


def over_one_that_hangs(rank: int, size: int) -> tuple[Error, float]:
    """Torch's own group of the backend is made; ours is not, for rank 1 waits for something."""
    is_over = threading.Event()
    made: list[Post] = []

    def make_or_hang(*args: Any) -> Post:
        if made and rank == 1:
            is_over.wait(60)
        made.append(make_post(*args))
        return made[-1]

    dist.Backend.register_backend("hanging_post", make_or_hang, devices=["cpu"])
    group = dist.new_group(backend="hanging_post")
    begin = time.monotonic()
    error = error_of(lambda: Communicator(group, backend="c10d", timeout_s=1))
    took_s = time.monotonic() - begin
    is_over.set()
    return error, took_s


def test_a_registered_backend_that_does_not_connect_is_given_up():
    with RankPool(2) as pool:
        for rank, ((kind, text, _), took_s) in enumerate(pool.run(over_one_that_hangs, timeout_s=50)):
            assert kind in ("CommTimeout", "CommError") and "within 1 s" in text, (kind, text)
            assert took_s < 1 + 3 * SOON_S
            hangs = "backend 'hanging_post' of torch.distributed has not connected the ranks"
            assert rank == 0 or text.endswith(hangs), text


# ------------------------------------------------------------------------------------------------------------- failure


class Holding:
    """A group whose all_to_all ends when it is let, and that cannot abort."""

    def __init__(self) -> None:
        self.is_let = threading.Event()

    def alltoall_base(self, into: torch.Tensor, *_: Any) -> Any:
        return mock.Mock(is_completed=self.is_let.is_set, wait=mock.Mock(side_effect=RuntimeError))

    def abort(self) -> None:
        raise RuntimeError("Backend holding does not support abort")


@pytest.mark.parametrize("ends", ["all_to_all", "time"])
def test_what_is_abandoned_keeps_its_memory_until_it_is_over(ends):
    held = Holding()
    with mock.patch.object(c10d, "_LATE_S", 0.0):
        group = c10d._Group(held, 0, 2, 60.0 if ends == "all_to_all" else 0.5)
    group.start(0, None, 0, [0, 100], [0, 100])
    assert not group.wait(0)
    group.abandon()
    memory = weakref.ref(group.rooms[0][1])
    del group
    time.sleep(0.2)
    assert memory() is not None
    if ends == "all_to_all":
        held.is_let.set()
    expect_no_threads()
    assert memory() is None
