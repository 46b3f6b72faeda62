"""The conformance suite of the optimizer: one process against torch, ranks against one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.optim import lr_scheduler

from tests.conformance.optimizer.scripts import SCRIPTS, Setting
from tests.conformance.optimizer.suite import expect_conformance, expect_torchs, rows, values_of
from tests.conformance.optimizer.updates import SCHEDULERS

pytestmark = pytest.mark.dist
FIRST, REST = rows()


@pytest.mark.parametrize(
    ("name", "setting"), [*FIRST, *(pytest.param(*row, marks=pytest.mark.slow) for row in REST)], ids=str
)
def test_ranks(name: str, setting: Setting, rank_pool: Any) -> None:
    """Ranks do what one process does."""
    expect_conformance(name, setting, rank_pool)


@pytest.mark.parametrize("name", [name for name, one in SCRIPTS.items() if one.alone])
def test_alone(name: str) -> None:
    """One process does what torch does."""
    expect_torchs(SCRIPTS[name])


def test_the_suite_covers_all_pairs() -> None:
    """Each script meets every value that it may have; and each value every other."""
    assert len(SCRIPTS) <= 150
    rows = [*FIRST, *REST]
    for name, one in SCRIPTS.items():
        met = {value for script, setting in rows if script == name for value in values_of(setting)}
        assert met == {value for setting in one.settings() for value in values_of(setting)}, name
    pairs = [
        {pair for _, setting in some for pair in itertools.combinations(values_of(setting), 2)}
        for some in (rows, FIRST)
    ]
    possible = {
        pair for one in SCRIPTS.values() for s in one.settings() for pair in itertools.combinations(values_of(s), 2)
    }
    assert pairs[0] == possible and len(pairs[1]) > 0.8 * len(possible), [len(found) for found in (*pairs, possible)]


def test_there_is_no_other_scheduler() -> None:
    known = {name for name in lr_scheduler.__all__ if isinstance(getattr(lr_scheduler, name), type)}
    assert known - {"LRScheduler"} | {"SWALR"} == set(SCHEDULERS)
