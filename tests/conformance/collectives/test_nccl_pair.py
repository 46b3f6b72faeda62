"""Pairs of NCCL communicators: they overlap, or take turns where NCCL's launch order is not known; and their options."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

from bucketwheel.comm import nccl
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from tests.support.simulated_nccl import simulated

pytestmark = pytest.mark.dist


def both_at_once(rank: int, world: int, kept_on: set[int]) -> tuple[int, list[str]]:
    """How many communicators had work on the device at one time, and the warnings of making the pair."""
    overlaps = len(kept_on) == world
    with simulated() as script, mock.patch.object(nccl, "_is_launch_order_kept", rank in kept_on):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gathers, reduces = Communicator.pair(timeout_s=30, name="two")
        with gathers, reduces:
            assert (gathers.name, reduces.name) == ("two/ag", "two/rs")
            assert gathers.features["overlap"] is reduces.features["overlap"] is overlaps
            script.fake_nccl_reset()
            numel = 300_000
            for turn in range(10):
                full, shard = torch.empty(world * numel), torch.full((numel,), float(rank + turn))
                summed, whole = torch.empty(numel), torch.full((world * numel,), float(rank))
                # The second rank is late, so the work of both is under way on the first.
                if rank == 1:
                    gathers.stream.pause(0.01)
                    reduces.stream.pause(0.01)
                first, second = all_gather(full, shard, gathers), reduce_scatter(summed, whole, reduces)
                second.synchronize(20)
                first.synchronize(20)
                assert full.view(world, -1)[:, 0].tolist() == [float(r + turn) for r in range(world)]
                assert float(summed[-1]) == sum(range(world))
            return int(script.fake_nccl_max_concurrent()), [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("kept_on", "says"), [({0, 1}, ""), (set(), "NCCL_LAUNCH_ORDER_IMPLICIT"), ({0}, "on ranks [1]")]
)
def test_the_two_of_a_pair_overlap_or_take_turns(rank_pool, kept_on, says):
    """They take turns where a rank does not keep NCCL's launch order, and say so."""
    for concurrent, warned in rank_pool(2).run(both_at_once, kept_on):
        assert concurrent == (1 if says else 2)
        assert any("take turns" in text and says in text for text in warned) if says else not warned, warned


def told(rank: int, world: int) -> list[dict[str, Any]]:
    with simulated():
        gathers, reduces = Communicator.pair(timeout_s=30, registered=True, cta_policy="zero")
        alone = Communicator(backend="nccl", device="cuda", timeout_s=30, registered=True, cta_policy="zero")
        with gathers, reduces, alone:
            for comm in (gathers, reduces, alone):
                lease = comm.pool.acquire("key", 1 << 16)
                assert comm.register_pool() == 1
                lease.release()
            return [comm.features for comm in (gathers, reduces, alone)]


def test_what_each_of_a_pair_does(rank_pool):
    for features in rank_pool(2).run(told):
        assert [one["copy_engines"] for one in features] == [True, False, True]
        assert [one["overlap"] for one in features] == [True, True, False]
        assert [one["symmetric_avg"] for one in features] == [False, True, True]


def configured(rank: int, world: int) -> dict[str, int]:
    """What NCCL was told of the second of a pair."""
    with simulated() as script:
        gathers, reduces = Communicator.pair(timeout_s=30, max_ctas=8, cta_policy="efficiency")
        with gathers, reduces:
            names = ("max_ctas", "cta_policy", "split_share", "blocking")
            return {name: script.fake_nccl_last_config(name.encode()) for name in names}


def test_options_reach_nccl(rank_pool):
    expected = {"max_ctas": 8, "cta_policy": 1, "split_share": 0, "blocking": 1}
    assert rank_pool(2).run(configured) == [expected, expected]


def shared(rank: int, world: int) -> list[bool]:
    with simulated():
        found = []
        for value in ("0", "1"):
            with mock.patch.dict(os.environ, NCCL_COMM_SPLIT_SHARE_RESOURCES=value):
                gathers, reduces = Communicator.pair(timeout_s=30)
            with gathers, reduces:
                assert gathers.features["overlap"] == reduces.features["overlap"]
                found.append(gathers.features["overlap"])
        return found


def test_a_pair_that_shares_resources_does_not_overlap(rank_pool):
    assert rank_pool(2).run(shared) == [[True, False]] * 2


def refused(rank: int, world: int) -> list[str]:
    messages = []
    with simulated() as script:
        made = script.fake_nccl_calls(b"ncclCommInitRankConfig")
        cases: list[dict[str, Any]] = [
            {"cta_policy": "none"},
            {"cta_policy": "zero"},
        ]
        for case in cases:
            with pytest.raises(ValueError) as caught:
                Communicator(backend="nccl", device="cuda", timeout_s=20, **case)
            messages.append(str(caught.value))
        with (
            mock.patch.dict(os.environ, NCCL_COMM_BLOCKING="0"),
            pytest.raises(ValueError, match="COMM_BLOCKING=0 is not"),
        ):
            Communicator(backend="nccl", device="cuda", timeout_s=20)
        with pytest.raises(ValueError, match="are for backend 'nccl', not 'shm'"):
            Communicator(backend="shm", max_ctas=3)
        with pytest.raises(ValueError, match="pass device='cuda'"):
            Communicator(backend="nccl", device=None)
        assert script.fake_nccl_calls(b"ncclCommInitRankConfig") == made, "refused before NCCL hears of it"
        with Communicator(backend="nccl", device="cuda", timeout_s=20) as comm:
            assert comm.exchange(b"x") == [b"x"] * world
    return messages


def test_options_that_nccl_has_not(rank_pool):
    for messages in rank_pool(2).run(refused):
        assert "['default', 'efficiency', 'zero'], got 'none'" in messages[0]
        assert "needs registered=True" in messages[1]


# In a new process, as a forked one of the tests has imported bucketwheel; there each import in a process of its own.
IMPORTS = """import os, sys, torch, torch.distributed as dist
for setup in sys.argv[1:]:
    if (child := os.fork()) == 0:
        exec(setup)
        import bucketwheel
        from bucketwheel.comm import nccl
        print(os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"], nccl._is_launch_order_kept, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_the_launch_order_is_asked_for_at_import():
    group = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); "
    second = "config = dist.get_backend_config; "
    second += "dist.get_backend_config = lambda g=None: config(g) if g is dist.group.WORLD else 'cuda:nccl'; "
    answers = {
        "": "1 True",
        "os.environ['NCCL_LAUNCH_ORDER_IMPLICIT'] = '0'": "0 False",
        "os.environ['NCCL_LAUNCH_ORDER_IMPLICIT'] = '1'": "1 True",
        group: "1 True",
        # A second group, and one that may have been and gone: it has needed CUDA.
        group + "dist.new_group([0]); " + second: "1 False",
        "torch.cuda.is_initialized = lambda: True": "1 False",
    }
    environment = {name: value for name, value in os.environ.items() if name != "NCCL_LAUNCH_ORDER_IMPLICIT"}
    command = [sys.executable, "-c", IMPORTS, *answers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.splitlines() == list(answers.values()), done.stderr
