"""The c10d backend: how it comes to be chosen, its lifetime, hosts that share nothing but a network."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bucketwheel.comm import c10d, shm
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError
from bucketwheel.kernels.ops import all_gather
from bucketwheel.native import core
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.conformance.optimizer.test_optim_cuda import trained
from tests.support.bits import assert_bitwise_equal
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import SOON_S, error_of, expect_prefix, gather
from tests.support.network_hosts import Hosts, enter, network_hosts
from tests.support.optim_twins import dyadic, loss_of, make_params, share
from tests.support.ranks import RankPool
from tests.support.requirements import slow_case

pytestmark = pytest.mark.dist


# -------------------------------------------------------------------------------------------------------------- choice


@contextlib.contextmanager
def hosts_apart(rank: int) -> Iterator[None]:
    """Rank 1 claims another process: the ranks cannot have found each other, and all say so."""
    pid = os.getpid() + (1_000_000 if rank == 1 else 0)
    with mock.patch.object(shm.os, "getpid", return_value=pid):
        yield


def chosen(rank: int, size: int) -> str:
    with hosts_apart(rank), pytest.raises(CommError) as caught:
        Communicator(backend="shm", timeout_s=30)
    for name in (None, "mine"):
        with hosts_apart(rank):
            comm = Communicator(timeout_s=30, name=name)
        with comm:
            assert comm.backend == "c10d" and comm.name.startswith(name or "comm")
            check_usable(comm)
            halves = comm.split(rank % 2)  # who shares a host again may share memory
            assert halves is not None and halves.backend in ("local", "shm")
            with halves:
                check_usable(halves)
    with Communicator(backend="c10d", timeout_s=30) as comm, comm.split(rank // 2) as pair:
        assert pair.backend == "c10d"
        check_usable(pair)
    with pytest.raises(ValueError, match="'c10d' is for CPU tensors"):
        Communicator(backend="c10d", device="cuda")
    with Communicator() as comm:
        assert comm.backend == "shm"
        check_usable(comm)
    return str(caught.value)


def test_auto_takes_it_where_ranks_cannot_share_memory(rank_pool):
    texts = rank_pool(3).run(chosen)
    assert len(set(texts)) == 1
    assert "use 'auto' or 'c10d'" in texts[0] and "belongs to another process" in texts[0]


# ------------------------------------------------------------------------------------------------------------ lifetime


def leaves_at_once(rank: int, size: int) -> None:
    """The last operation reaches every rank, whoever closes first."""
    for turn in range(30):
        with Communicator(backend="c10d", timeout_s=30, name=f"turn {turn}") as comm:
            full, handle = gather(comm, 100_000)
            if rank == turn % size:
                handle.wait()
            else:
                time.sleep(0.01)
            handle.synchronize(20)
            assert full.view(size, -1)[:, -1].tolist() == [float(r) for r in range(size)]


def test_closing_loses_nothing(rank_pool):
    rank_pool(3).run(leaves_at_once, timeout_s=90)


def interrupted(rank: int, size: int) -> str:
    """Ctrl-C while the main thread waits for an operation: it is the caller's, and the operation's result is good."""
    runners = set()
    wait = c10d._Group.wait

    def watched(group: Any, room: int) -> bool:
        runners.add(threading.get_ident())
        return wait(group, room)

    with mock.patch.object(c10d._Group, "wait", watched), Communicator(backend="c10d", timeout_s=30) as comm:
        stream = core.Stream("the caller's")
        for given in (None, stream):
            full = torch.empty(size)
            handle = all_gather(full, torch.full((1,), float(rank)), comm, stream=given)
            handle.wait()
            assert full.tolist() == [float(r) for r in range(size)]
        assert len(runners) == 1 and threading.main_thread().ident not in runners
        if rank == 0:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(1.0)
        full, handle = gather(comm)
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                handle.wait()
                time.sleep(5.0)  # it comes with the next step of Python's
        handle.wait()
        assert full.view(size, -1)[:, 0].tolist() == [float(r) for r in range(size)]
        check_usable(comm)
    return "went on"


def test_an_interrupt_is_the_callers(rank_pool):
    assert rank_pool(2).run(interrupted) == ["went on"] * 2


# --------------------------------------------------------------------------------------------------------------- hosts


def train_apart(rank: int, world: int, hosts: Hosts) -> Any:
    enter(hosts, rank, world)
    with Communicator() as comm:
        assert comm.backend == "c10d"
        check_usable(comm)
    result = train_together(rank, world)
    dist.barrier()  # rank 0 has the Store
    dist.destroy_process_group()
    return result


def train_together(rank: int, world: int) -> Any:
    return trained(rank, None, torch.float32, "own")


@pytest.mark.timeout_s(180)
def test_four_hosts_train_like_one(rank_pool):
    together = rank_pool(4).run(train_together)
    with network_hosts(4) as hosts, RankPool(4, backend=None) as pool:
        apart = pool.run(train_apart, hosts, timeout_s=120)
    for rank, result in enumerate(apart):
        assert_bitwise_equal(result, together[rank], f"rank {rank}")


LIMIT_S = 6.0


def train_on(comm: Communicator) -> None:
    params = make_params()
    with ShardedAdamW(params, 0.01, process_group=comm) as opt:
        for step in range(100):
            loss_of(params, share(dyadic(params, step), comm.rank, comm.size)).backward()
            opt.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()


def cut(rank: int, world: int, hosts: Hosts, folder: Path, host: int) -> None:
    """Once all ranks have come here."""
    (folder / f"met {rank}").touch()
    if rank == 0:
        while len(list(folder.glob("met *"))) < world:
            time.sleep(0.01)
        hosts.cut(host)
        (folder / "cut").touch()
    while not (folder / "cut").exists():
        time.sleep(0.01)


def loses_a_link(rank: int, world: int, hosts: Hosts, folder: Path, lost: int) -> tuple[str, str, float]:
    enter(hosts, rank, world)
    comm = Communicator(timeout_s=LIMIT_S, name="cut")
    check_usable(comm)
    cut(rank, world, hosts, folder, lost)
    begin = time.monotonic()
    kind, text, _ = error_of(lambda: train_on(comm))
    took_s = time.monotonic() - begin
    comm.close(0.5)
    assert error_of(lambda: gather(comm))[0] in (kind, "ClosedError")
    return kind, text, took_s


@pytest.mark.parametrize("lost", [2, slow_case(0)])  # which has the Store
def test_a_cut_link_is_a_named_error(lost, tmp_path):
    """On both sides of it, and those who still reach each other learn who is missing."""
    with network_hosts(4) as hosts, RankPool(4, backend=None) as pool:
        results = pool.run(loses_a_link, hosts, tmp_path, lost)
    for rank, (kind, text, took_s) in enumerate(results):
        assert kind in ("CommTimeout", "PeerError"), text
        assert rank == lost or f"rank {lost}" in text, text
        expect_prefix(text, rank, 4, "cut")
        # Its own limit, and the time for the others' answers, of whom one cannot answer.
        assert took_s < LIMIT_S + 3.0 + 2 * SOON_S
    kinds = [kind for kind, _, _ in results]
    assert kinds.count("CommTimeout") >= 2, results
