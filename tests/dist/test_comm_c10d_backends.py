"""The c10d backend over process groups of other kinds: what somebody has registered with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from comm_cases import check_all_gather, check_reduce_scatter

from bucketwheel.comm import Communicator
from bucketwheel.testing import RankPool

pytestmark = pytest.mark.dist


class Post(dist.ProcessGroup):
    """A backend that somebody registered: gloo, but counted."""

    sent_bytes = 0

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        Post.sent_bytes += tensors[0].nbytes
        return self.gloo.send(tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self.gloo.recv(tensors, source, tag)

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
    with RankPool(3, forked=True) as pool:
        pool.run(over_registered)
