"""What some ranks have saved goes on, bit for bit, on any other number of them: by every route, whatever the cuts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor

from tests.support.checkpoint_jobs import KINDS
from tests.support.checkpoint_routes import AFTER, BEFORE, CUTS, ROUTES, Training, uninterrupted
from tests.support.replica_ranks import torch_groups

WORLDS: tuple[int | str, ...] = (1, 2, 3, 4)
HSDP = "2 x 2"
CAPS = {1: 2e-3, 2: 4e-4, 3: 1e-2, 4: 1e-4, HSDP: 1e-3}


def groups_of(rank: int) -> dict[int | str, dict[str, Any]]:
    """For each number of ranks what `Training` is given. On all 4 ranks alike; {}: not among them. Of 3 ranks gathers still
    run when a save begins."""
    found: dict[int | str, dict[str, Any]] = {}
    for world in (1, 2, 3, 4):
        group = dist.new_group(range(world), backend="gloo")
        found[world] = {"group": group} if rank < world else {}
    found[3] |= {"process_group": found[3]["group"], "overlap_param_sync": True} if rank < 3 else {}
    return {**found, HSDP: {"group": found[4]["group"], **torch_groups(rank, 4, 2)}}


_saving: list[int | str] = []  # the number of ranks whose process of `async_save` torch keeps


def end_process(*_: int) -> None:
    _async_process_executor._CHECKPOINT_PROCESS = None
    _saving.clear()


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left(rank_pool: Any) -> Iterator[None]:
    yield
    rank_pool(4).run(end_process)


def saved(given: dict[str, Any], world: int | str, kind: str, cut: str, routes: Sequence[str], where: Path) -> None:
    run = Training(kind, cut, **given, bucket_cap_mb=CAPS[world])
    if _saving != [world]:
        end_process()
        _saving.append(world)
    run.steps(*BEFORE)
    waiting = [ROUTES[route].save(run, where / route) for route in routes]
    run.steps(6)
    for wait in waiting:
        if wait is not None:
            wait()
    run.opt.close()


def loaded(given: dict[str, Any], world: int | str, kind: str, cut: str, routes: Sequence[str], where: Path) -> None:
    run = Training(kind, cut, **given, bucket_cap_mb=CAPS[world] * 3, seed=1)
    for route in routes:
        ROUTES[route].load(run, where / route)
        run.steps(*AFTER)
        run.expect(uninterrupted(kind), f"{where.name}, by {route}, at {world}, {kind}, cut at {cut}")
    run.opt.close()


Row = tuple[Any, Any, str, str, str, str]  # saved at, loaded at, kind, cut when saved, cut when loaded, route


def on_rank(rank: int, size: int, rows: Sequence[Row], directory: str) -> None:
    """Rows that save alike share a save, those that load alike an optimizer."""
    groups = groups_of(rank)
    for (a, kind, cut), same in itertools.groupby(rows, lambda row: (row[0], row[2], row[3])):
        chosen = list(same)
        where = Path(directory, f"saved at {a}, {kind}, cut at {cut}")
        if rank == 0:
            where.mkdir()
        dist.barrier()
        if groups[a]:
            routes = [route for route in ROUTES if any(route == row[5] for row in chosen)]
            saved(groups[a], a, kind, cut, routes, where)
        dist.barrier()
        for (b, cut), of_b in itertools.groupby(chosen, lambda row: (row[1], row[4])):
            if groups[b]:
                loaded(groups[b], b, kind, cut, [row[5] for row in of_b], where)


def chosen_pairwise(count: int) -> list[Row]:
    """As many pairs of values as ``count`` rows can have, both ways with replicas among them."""
    rng = random.Random(0)
    every = [row for row in itertools.product(WORLDS, WORLDS, KINDS, CUTS, CUTS, ROUTES) if "process" not in row[5]]
    pairs = lambda row: set(itertools.combinations(enumerate(row), 2))  # noqa: E731
    rows: list[Row] = [
        (HSDP, 3, "bf16, remainder", "rows", "elements", "dcp.save"),
        (2, HSDP, "amsgrad", "elements", "rows", "get_state_dict"),
        (HSDP, 2, "fp32", "elements", "rows", "bw.checkpoint.async_save"),
        (3, HSDP, "bf16, master", "rows", "rows", "bw.checkpoint.save"),
        (3, 2, "bf16 states", "elements", "rows", "async_save, process"),  # each starts processes, which takes seconds
    ]
    met = set().union(*map(pairs, rows))
    while len(rows) < count:
        rows.append(max(rng.sample(every, 200), key=lambda row: len(pairs(row) - met)))
        met |= pairs(rows[-1])
    return rows


@pytest.mark.parametrize("row", chosen_pairwise(24), ids=lambda row: " ".join(map(str, row)))
def test_of_each_pair_of_choices(rank_pool: Any, row: Row, tmp_path: Path) -> None:
    rank_pool(4).run(on_rank, [row], str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout_s(240)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("a", [*WORLDS, HSDP])
def test_of_all(rank_pool: Any, a: int | str, kind: str, tmp_path: Path) -> None:
    """With the same cuts by every route but those whose twin is among them; by DCP from rows to elements and back, too."""
    routes = [route for route in ROUTES if route not in ("get_state_dict, on the CPU", "get_state_dict, whole")]
    loads = [2, 3] if a == HSDP else [*WORLDS, HSDP] if a == 2 else WORLDS
    rows = []
    for cut, other in (("rows", "elements"), ("elements", "rows")):
        for b in loads:
            rows += [(a, b, kind, cut, cut, route) for route in routes]
            rows.append((a, b, kind, cut, other, "dcp.save"))
    rank_pool(4).run(on_rank, rows, str(tmp_path), timeout_s=200)
