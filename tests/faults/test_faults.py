"""Faults at random: every rank that is left gets the right error in time, leaves nothing behind, and can go on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.faults.plans import ACTIONS, Plan, expect, live
from tests.support.held import expect_gone, traces_in_the_system
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dist
RUNS = 200
BLOCKS = 20


def run(plan: Plan) -> None:
    Path(plan.folder).mkdir()
    expect_dead = [plan.victim] if plan.dies else []
    before = traces_in_the_system()
    with RankPool(plan.world, backend=None) as pool:
        stories = pool.run(live, plan, timeout_s=60, expect_dead=expect_dead)
    expect(plan, stories)
    expect_gone(traces_in_the_system() - before)


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize("seed", [1, 3])
def test_some_faults(seed: int, tmp_path: Path) -> None:
    run(Plan.random(seed, f"{tmp_path}/{seed}"))


@pytest.mark.slow
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_many_faults(block: int, tmp_path: Path) -> None:
    for seed in range(block * RUNS // BLOCKS, (block + 1) * RUNS // BLOCKS):
        run(Plan.random(seed, f"{tmp_path}/{seed}"))


def test_the_plans_are_of_every_kind() -> None:
    plans = [Plan.random(seed, "") for seed in range(RUNS)]
    for backend in ("shm", "c10d"):
        for action in ACTIONS:
            alike = [plan for plan in plans if (plan.backend, plan.action) == (backend, action)]
            assert len(alike) >= 2, (backend, action)
            assert len({plan.at for plan in alike}) > 1
    assert {plan.world for plan in plans} == {2, 3, 4}
    kinds = {(plan.in_flight, plan.trains, plan.churns) for plan in plans}
    assert kinds == set(itertools.product([False, True], repeat=3))
    assert len({plan.backend for plan in plans if plan.does == "stop" and plan.churns}) == 2
