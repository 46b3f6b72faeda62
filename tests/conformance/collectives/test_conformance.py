"""The conformance suite on every backend that needs no GPU, with one to four ranks; a fresh communicator for each case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.collectives.suite import CASES, ENDS, GRAPHS, Case
from tests.support.comm_cases import on_nccl

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("case", [*CASES, *ENDS], ids=lambda case: case.__name__)
def test_conformance(run: Callable[[Case], object], case: Case) -> None:
    run(case)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("case", GRAPHS, ids=lambda case: case.__name__)
def test_conformance_of_graphs(rank_pool, world: int, case: Case) -> None:
    rank_pool(world).run(on_nccl, case)
