"""How processes start, restart, load data and end: no hang, no crash, nothing lost. They run tests/support/lifecycle.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import lifecycle
from tests.support.held import expect_gone, traces_in_the_system
from tests.support.requirements import slow_case

pytestmark = pytest.mark.dist
SCRIPT = Path(lifecycle.__file__)
ROOT = SCRIPT.parents[2]
SOME_EXITS = ["in_flight"]


def run(*words: str, launcher: tuple[str, ...] = (), timeout_s: float = 100) -> list[Any]:
    """The answers of the script, which has to end with 0."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    # Else torch's process groups find the addresses of the processes that were ended, with or without us.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, *launcher, str(SCRIPT), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, (
        f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def train(rank: int, world: int, backend: str, folder: str) -> Any:
    return lifecycle.train(rank, world, backend, Path(folder), dies=False)


@pytest.mark.timeout_s(180)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "c10d"])
def test_an_elastic_restart_resumes_training(backend, tmp_path, rank_pool):
    (tmp_path / "whole").mkdir()
    (tmp_path / "torn").mkdir()
    whole = rank_pool(2).run(train, backend, str(tmp_path / "whole"))
    before = traces_in_the_system()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    run("train", backend, str(tmp_path / "torn"), launcher=torchrun, timeout_s=150)
    for rank in range(2):
        assert json.loads((tmp_path / "torn" / f"answer {rank}").read_text()) == whole[rank]
    expect_gone(traces_in_the_system() - before)


@pytest.mark.timeout_s(240)
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("shm", SOME_EXITS),
        slow_case("shm", [name for name in lifecycle.EXITS if name not in SOME_EXITS]),
        slow_case("c10d", list(lifecycle.EXITS)),
        slow_case("nccl", ["in_flight"]),
    ],
)
def test_processes_end_whatever_is_in_flight(backend, names):
    before = traces_in_the_system()
    answers = run("exits", backend, *names, timeout_s=220)
    assert [name for name, *_ in answers] == names
    for name, codes, texts in answers:
        if name == "raises":
            assert codes == [0, 1] and "the data ran out" in texts[1] and not texts[0], (codes, texts)
        else:
            assert (codes, texts) == ([0, -9 if name == "peer_dies" else 0], ["", ""]), name
    expect_gone(traces_in_the_system() - before)


@pytest.mark.timeout_s(240)
@pytest.mark.parametrize(
    ("backend", "contexts"),
    [("shm", ["fork"]), slow_case("shm", ["spawn", "forkserver"]), slow_case("c10d", ["fork", "spawn"])],
)
def test_rows_may_come_from_other_processes(backend, contexts):
    for rank in run("workers", backend, *contexts, timeout_s=220):
        assert len(rank) == 1 + len(contexts)
        assert all(answer == rank[0] for answer in rank)


@pytest.mark.timeout_s(180)
@pytest.mark.parametrize(
    ("backend", "methods"),
    [("shm", ["fork"]), slow_case("shm", ["spawn", "fork"]), slow_case("c10d", ["spawn", "fork"])],
)
def test_ranks_may_be_started_by_torch(backend, methods):
    answers = run("starts", backend, *methods, timeout_s=150)
    assert len(answers) == 2 * len(methods)
    first, second = answers[:2]
    assert first[1] == second[1], "the ranks have the same parameters"
    assert answers == [first, second] * len(methods)
