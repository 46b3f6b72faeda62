"""Faults at random between four hosts, which are network namespaces: links are cut, processes end, hosts go without a word."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest

from bucketwheel.comm import patience
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import Error
from tests.faults.plans import CALLS, Story, call
from tests.support.comm_cases import check_usable
from tests.support.failure_cases import SOON_S
from tests.support.network_hosts import Hosts, enter, network_hosts
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.slow]
RUNS = 50
BLOCKS = 10
WORLD = 4
STORE = 0  # the host that has it
TIMEOUT_S = 8.0  # of operations
HEARTBEAT_S = 3.0
ACTIONS = ("kill", "cut", "cut and kill")


@dataclass(frozen=True)
class Plan:
    seed: int
    victim: int
    action: str
    at: int  # before which call
    in_flight: bool  # its last operation is not waited for before it acts
    pause_s: float  # the others compute before that call
    folder: str

    @classmethod
    def random(cls, seed: int, folder: str) -> Plan:
        chance = random.Random(seed)
        return cls(
            seed=seed,
            victim=chance.randrange(WORLD),
            action=chance.choice(ACTIONS),
            at=chance.randrange(1, CALLS),
            in_flight=chance.random() < 0.5,
            pause_s=chance.choice([0.0, 0.0, 0.5, 4.5]),
            folder=folder,
        )

    @property
    def dies(self) -> bool:
        return "kill" in self.action


def live(rank: int, world: int, hosts: Hosts, plan: Plan) -> Story:
    story = Story()
    enter(hosts, rank, world)
    table = replace(patience.PATIENCE, heartbeat_timeout_s=HEARTBEAT_S)
    with mock.patch.object(patience, "PATIENCE", table):
        comm = Communicator(timeout_s=TIMEOUT_S, name="apart")
    assert comm.backend == "c10d"
    check_usable(comm)
    chance = random.Random(plan.seed + 1)  # the same on all ranks
    try:
        for number in range(CALLS):
            if number == plan.at:
                _comes_to_the_call(rank, comm, hosts, plan, story)
            call(comm, chance, is_waited=True)
    except Error as error:
        story.at_s = time.monotonic()
        story.kind, story.text, story.rank = type(error).__name__, str(error), getattr(error, "rank", None)
    begin = time.monotonic()
    with contextlib.suppress(Error):
        comm.close(0.5)
    story.closed_s = time.monotonic() - begin
    return story


def _comes_to_the_call(rank: int, comm: Communicator, hosts: Hosts, plan: Plan, story: Story) -> None:
    acted = Path(plan.folder, "acted")
    if rank != plan.victim:
        time.sleep(plan.pause_s)
        story.acted_s = time.monotonic()
    if plan.in_flight:
        call(comm, random.Random(plan.at), is_waited=rank != plan.victim)
    if rank != plan.victim:
        return
    if "cut" in plan.action:
        hosts.cut(rank)
    acted.write_text(str(time.monotonic()))
    story.acted_s = time.monotonic()
    if plan.dies:
        os.kill(os.getpid(), signal.SIGKILL)


def expect(plan: Plan, stories: list[Story | None]) -> None:
    acted_s = float(Path(plan.folder, "acted").read_text())
    is_named = 0
    for rank, story in enumerate(stories):
        where = f"{plan}\nrank {rank}: {story}"
        if plan.dies and rank == plan.victim:
            assert story is None, where
            continue
        assert story is not None, where
        assert story.kind in ("PeerError", "CommTimeout"), where
        assert story.closed_s < 0.5 + 2 * SOON_S, where
        took_s = story.at_s - max(acted_s, story.acted_s)
        if plan.action == "kill" and plan.victim != STORE:
            assert (story.kind, story.rank) == ("PeerError", plan.victim), where
            assert took_s < SOON_S + 1.0, where
        elif plan.victim != STORE and rank != plan.victim:
            assert (story.kind, story.rank) == ("PeerError", plan.victim), where
            assert took_s < HEARTBEAT_S + 2 * SOON_S, where
        else:  # nobody can tell it why: its neighbours, or its own time limit
            assert took_s < TIMEOUT_S + 2 * SOON_S, where
        is_named += story.rank == plan.victim
    assert is_named >= 2, f"{plan}: {stories}"  # the ranks beside it at least


def run(plan: Plan) -> None:
    Path(plan.folder).mkdir(parents=True)
    expect_dead = [plan.victim] if plan.dies else []
    with network_hosts(WORLD) as hosts, RankPool(WORLD, backend=None) as pool:
        stories = pool.run(live, hosts, plan, timeout_s=90, expect_dead=expect_dead)
    expect(plan, stories)


@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_faults_between_hosts(block: int, tmp_path: Path) -> None:
    for seed in range(block * RUNS // BLOCKS, (block + 1) * RUNS // BLOCKS):
        run(Plan.random(seed, f"{tmp_path}/{seed}"))
