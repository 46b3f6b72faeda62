"""`BW_COMM_CHECK=1` on the nccl backend: ranks that call different operations, or with tensors at different places."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch

from bucketwheel.comm import nccl
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import all_gather
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import SOON_S, Error, die, error_of, fresh_ranks, gather, nccl_comm

pytestmark = pytest.mark.dist


def later_tensors_differ(rank: int, size: int) -> str:
    with mock.patch.dict(os.environ, BW_COMM_CHECK="1"), nccl_comm("checked") as (comm, script):
        before = script.fake_nccl_calls(b"ncclAllGather")
        sizes = [4] * 10 + ([8, 4] if rank == 0 else [4, 8])
        shards = [torch.zeros(n) for n in sizes]
        kind, text, _ = error_of(lambda: all_gather([torch.empty(size * n) for n in sizes], shards, comm))
        assert kind == "MismatchError" and "ranks called different operations" in text, text
        assert script.fake_nccl_calls(b"ncclAllGather") == before
        return text


def test_every_tensor_is_checked_and_nothing_is_issued(rank_pool):
    texts = rank_pool(2).run(later_tensors_differ)
    assert len({text.split("ranks called", 1)[1] for text in texts}) == 1, "one may have been told by the other"


def one_calls_nothing(rank: int, size: int) -> Error:
    with mock.patch.dict(os.environ, BW_COMM_CHECK="1"), nccl_comm("checked", timeout_s=4.0) as (comm, _):
        if rank == 0:
            return error_of(lambda: gather(comm))
        time.sleep(6.0)
        return error_of(lambda: comm.exchange(b""))


def test_a_rank_that_calls_nothing(rank_pool):
    mine, theirs = rank_pool(2).run(one_calls_nothing, timeout_s=30)
    assert "ranks [1] made no call" in mine[1]
    assert theirs[0] == "MismatchError" and "ranks [1] made no call" in theirs[1]


def one_dies(rank: int, size: int) -> tuple[Error, float]:
    with mock.patch.dict(os.environ, BW_COMM_CHECK="1"), nccl_comm("checked", timeout_s=20.0) as (comm, _):
        comm.exchange(b"")
        begin = time.monotonic()
        if rank == 1:
            time.sleep(0.3)
            die()
        return error_of(lambda: gather(comm)), time.monotonic() - begin


def test_a_check_ends_when_a_peer_has_died():
    with fresh_ranks(2) as pool:
        (_, text, _), took_s = pool.run(one_dies, expect_dead=[1], timeout_s=30)[0]
    assert "rank 1 " in text and took_s < 0.3 + SOON_S, (text, took_s)


def at_offsets(rank: int, size: int, is_equal: bool) -> Error:
    with mock.patch.dict(os.environ, BW_COMM_CHECK="1"), nccl_comm("placed", registered=True) as (comm, script):
        lease = comm.pool.acquire("key", 1 << 16)
        assert comm.register_pool() == 1 == script.fake_nccl_live_windows()
        assert comm.features["windows"]
        memory = lease.tensor(torch.float32, (1 << 14,))
        shift = 0 if is_equal else 256 * rank
        full = memory[shift : shift + size * 16]
        error = error_of(lambda: all_gather(full, torch.full((16,), float(rank)), comm).synchronize())  # noqa: F821
        if is_equal:
            assert full.view(size, 16)[:, 0].tolist() == [float(other) for other in range(size)]
        del memory, full
        lease.release()
        return error


@pytest.mark.parametrize("is_equal", [True, False])
def test_places_in_registered_memory(is_equal, rank_pool):
    for kind, text, _ in rank_pool(2).run(at_offsets, is_equal, timeout_s=30):
        if is_equal:
            assert (kind, text) == ("nothing", "")
        else:
            assert kind == "MismatchError", text
            assert "rank 0: all_gather" in text and text.count(" at slab ") == 2


def other_slabs(rank: int, size: int) -> None:
    with nccl_comm("slabs", registered=True) as (comm, script):
        lease = comm.pool.acquire("key", 1 << (22 + 3 * rank))
        with pytest.raises(ValueError, match="ranks have different slabs to register"):
            comm.register_pool()
        check_usable(comm)
        lease.release()


def test_other_slabs_are_refused_on_all_ranks(rank_pool):
    rank_pool(2).run(other_slabs, timeout_s=30)


def one_is_told(rank: int, size: int) -> Error:
    with mock.patch.dict(os.environ, BW_COMM_CHECK=str(rank)), nccl_comm("checked", timeout_s=20.0) as (comm, _):
        part = comm.split(0)
        check_usable(part)
        error = error_of(lambda: gather(part, 1 + rank))
        part.close()
        return error


def test_all_check_if_one_is_told_to(rank_pool):
    for kind, text, _ in rank_pool(2).run(one_is_told, timeout_s=30):
        assert kind == "MismatchError" and "rank 0: all_gather" in text, text


def one_is_told_nonsense(rank: int, size: int) -> tuple[str, str]:
    with mock.patch.dict(os.environ, BW_COMM_CHECK="yes" if rank == 1 else ""):
        try:
            with nccl_comm("checked", timeout_s=20.0):
                return "nothing", ""
        except (ValueError, CommError) as error:
            return type(error).__name__, str(error)


def test_a_value_that_means_nothing_is_told_on_all_ranks(rank_pool):
    """Whoever went on alone would wait for the others."""
    theirs, mine = rank_pool(2).run(one_is_told_nonsense, timeout_s=30)
    assert mine[0] == "ValueError" and "BW_COMM_CHECK='yes': expected 0 or 1" in mine[1]
    assert theirs[0] == "CommError" and "BW_COMM_CHECK='yes': expected 0 or 1" in theirs[1]


class GoneStore:
    asked = 0

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        raise RuntimeError("Connection reset by peer")


def test_a_check_without_a_store_says_so_soon_and_asks_once():
    store, peers = GoneStore(), mock.Mock(**{"trouble.side_effect": ["", "", "rank 0 died", "rank 0 died"]})
    check = nccl._Check(mock.Mock(store=store, rank=1, size=2, timeout_s=600.0), peers)
    assert (
        check("name", 1, "all_gather")
        == "this rank called all_gather, but could not read the calls of other ranks: rank 0 died"
    )
    peers.trouble.side_effect = lambda: ""
    begin = time.monotonic()
    assert check("name", 2, "all_gather").endswith("could not read the calls of other ranks: Connection reset by peer")
    assert time.monotonic() - begin < SOON_S and store.asked == 2
