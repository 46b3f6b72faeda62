"""Flight rings of real ranks that failed: all of them are there, and the command finds the rank that is to blame."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError, CommTimeout, PeerError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.tools import flight
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dist


def verdict_of(folder: Path) -> flight.Verdict:
    (verdict,) = flight.judge(flight.read(folder)[0])
    return verdict


def sleeper(rank: int, size: int, folder: Path) -> None:
    with Communicator(backend="shm", name="sleepy", timeout_s=5) as comm:
        full, shard = torch.empty(size * 8), torch.ones(8)
        all_gather(full, shard, comm).wait()
        if rank == 1:
            until = time.monotonic() + 30
            while len(list(folder.glob("*.json"))) < size:
                assert time.monotonic() < until, "a watchdog has written nothing"
                time.sleep(0.01)
        else:
            with pytest.raises(CommTimeout):
                reduce_scatter(shard, full, comm).wait()


def test_a_rank_that_sleeps(tmp_path):
    """Its watchdog writes its ring while it sleeps."""
    with RankPool(3, env={"BW_TRACE_DIR": str(tmp_path)}) as pool:
        pool.run(sleeper, tmp_path)
    verdict = verdict_of(tmp_path)
    (id,) = {ring.facts["id"] for ring in verdict.rings.values()}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"sleepy-{id}-rank{rank}.json" for rank in range(3)]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert (verdict.culprits, verdict.stopped_at, verdict.why) == ([1], 2, "had not called reduce_scatter")
    assert "in 2 (reduce_scatter of 1 tensor, 96 bytes) | " in verdict.rings[0].line()
    assert "had not called 2 | (not noticed yet)" in verdict.rings[1].line()


def killed(rank: int, size: int) -> None:
    with Communicator(backend="shm", name="doomed") as comm:
        full, shard = torch.empty(size * 8), torch.ones(8)
        all_gather(full, shard, comm).wait()
        comm.exchange(b"")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerError):
            all_gather(full, shard, comm).wait()


def test_a_rank_that_is_killed(tmp_path):
    with RankPool(3, env={"BW_TRACE_DIR": str(tmp_path)}) as pool:
        pool.run(killed, expect_dead=[2])
    verdict = verdict_of(tmp_path)
    assert (verdict.culprits, verdict.stopped_at, verdict.why) == ([2], 2, "died or left") and 2 not in verdict.rings


def test_the_ring_holds_the_last_operations(tmp_path, monkeypatch):
    monkeypatch.setenv("BW_TRACE_DIR", str(tmp_path))
    code = """
import torch
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather
comm = Communicator(name="box")
for _ in range(1030):
    all_gather(torch.empty(3), torch.empty(3), comm).wait()
comm.abort('"why"')
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert (record["comm"], record["rank"], record["world"]) == ("box", 0, 1)
    assert path.name == f"box-{record['id']}-rank0.json" and len(record["id"]) == 16
    assert 'aborted by rank 0: "why"' in record["reason"]
    assert [op["seq"] for op in record["operations"]] == list(range(7, 1031))
    last = record["operations"][-1]
    assert (last["kind"], last["tensors"], last["bytes"], last["state"]) == ("all_gather", 1, 12, "done")
    assert last["issued_s"] <= last["started_s"] <= last["finished_s"]


def rows(rank: int, size: int) -> None:
    """Two shard groups, whose communicators have one name; then each rank has one of that name alone."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with Communicator(groups[rank // 2], name="row", timeout_s=30) as comm:
        all_gather(torch.empty(4), torch.ones(2), comm).wait()
        comm.exchange(b"")
        if rank in (1, 2):
            comm.abort(f"by {rank}")
        with pytest.raises(CommError):
            comm.exchange(b"")
    with Communicator(LocalWorld(1).rank(0), name="row") as comm:
        comm.abort("alone")


def test_communicators_of_one_name_write_files_of_their_own(tmp_path):
    """Of other processes, and of the same one."""
    with RankPool(4, env={"BW_TRACE_DIR": str(tmp_path)}) as pool:
        pool.run(rows)
    verdicts = flight.judge(flight.read(tmp_path)[0])
    assert len(list(tmp_path.iterdir())) == 4 + 4 and len(verdicts) == 2 + 4
    shared = [verdict.culprits for verdict in verdicts if len(verdict.rings) == 2]
    assert sorted(shared) == [[0], [1]]


# Rank 0 aborts, which the watchdog writes out for both; then `spoil(file)` with that of rank 1, which writes it again
# when it hears of the abort itself.
TWICE = """
import os, resource, sys, time
from pathlib import Path
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError
from bucketwheel.comm.backends import LocalWorld

folder = Path(os.environ["BW_TRACE_DIR"])
world = LocalWorld(2)
first, second = (Communicator(world.rank(rank), name=NAME, timeout_s=20) for rank in range(2))
first.abort("over")
until = time.monotonic() + 20
while len(files := sorted(folder.glob("*.json"))) < 2 and time.monotonic() < until:
    time.sleep(0.01)
assert "not noticed yet" in files[1].read_text()
SPOIL(files[1])
try:
    second.exchange(b"")
except CommError:
    pass
first.close(0.0)
second.close(0.0)
"""
LINK = (
    "lambda file: (file.unlink(), file.with_name(f'{file.name}.{os.getpid()}').symlink_to(folder.parent / 'precious'))"
)


@pytest.mark.parametrize(
    ("name", "spoil", "why"),
    [
        ("n" * 300 + "/\u00e9\n\0", "lambda file: None", ""),
        ("box", LINK, "File exists"),
        ("box", "lambda file: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))", "File too large"),
    ],
    ids=["whole", "link", "full"],
)
def test_files_are_whole_or_it_is_told(tmp_path, name, spoil, why):
    """Links of others are not followed."""
    folder, precious = tmp_path / "rings", tmp_path / "precious"
    precious.write_text("precious")
    code = TWICE.replace("NAME", repr(name)).replace("SPOIL", f"({spoil})")
    command, env = [sys.executable, "-c", code], {**os.environ, "BW_TRACE_DIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert precious.read_text() == "precious"
    if why:
        assert "[bucketwheel rank 1/2 comm 'box'] its last operations are not in BW_TRACE_DIR: cannot " in done.stderr
        assert why in done.stderr and done.stderr.count("\n") == 1
        assert not [path for path in folder.glob("*.json.*") if not path.is_symlink()]
    else:
        rings = verdict_of(folder).rings
        assert [ring.facts["comm"] for ring in rings.values()] == [name, name] and done.stderr == ""
        assert not any("not noticed yet" in ring.reason for ring in rings.values())
