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

from bucketwheel.__main__ import main
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError, CommTimeout, PeerError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dist


def verdict_of(folder, capsys, status: int = 1) -> tuple[dict, str]:
    assert main(["flight", str(folder), "--json"]) == status
    (one,) = json.loads(capsys.readouterr().out)["communicators"]
    assert main(["flight", str(folder)]) == status
    return one, capsys.readouterr().out


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


def test_a_rank_that_sleeps(tmp_path, capsys):
    """Its watchdog writes its ring while it sleeps."""
    with RankPool(3, env={"BW_TRACE_DIR": str(tmp_path)}, forked=True) as pool:
        pool.run(sleeper, tmp_path)
    one, text = verdict_of(tmp_path, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"sleepy-{one['id']}-rank{rank}.json" for rank in range(3)
    ]
    assert (one["culprits"], one["late"], one["missing"], one["stopped_at"]) == ([1], [1], [], 2)
    assert "ranks [1] stopped first, at operation 2: had not called reduce_scatter" in text
    assert "in 2 (reduce_scatter of 1 tensor, 96 bytes) for" in text
    assert "had not called 2 | (not noticed yet)" in text


def killed(rank: int, size: int) -> None:
    with Communicator(backend="shm", name="doomed") as comm:
        full, shard = torch.empty(size * 8), torch.ones(8)
        all_gather(full, shard, comm).wait()
        comm.exchange(b"")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerError):
            all_gather(full, shard, comm).wait()


def test_a_rank_that_is_killed(tmp_path, capsys):
    with RankPool(3, env={"BW_TRACE_DIR": str(tmp_path)}, forked=True) as pool:
        pool.run(killed, expect_dead=[2])
    one, text = verdict_of(tmp_path, capsys)
    assert (one["culprits"], one["missing"], one["stopped_at"]) == ([2], [2], 2)
    assert "ranks [2] stopped first, at operation 2: died or left" in text


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
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


def test_communicators_of_one_name_write_files_of_their_own(tmp_path, capsys):
    """Of other processes, and of the same one."""
    with RankPool(4, env={"BW_TRACE_DIR": str(tmp_path)}, forked=True) as pool:
        pool.run(rows)
    assert len(list(tmp_path.iterdir())) == 4 + 4
    assert main(["flight", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["communicators"]
    assert {one["comm"] for one in found} == {"row"} and len({one["id"] for one in found}) == len(found) == 2 + 4
    shared = [one for one in found if one["world"] == 2]
    assert sorted(one["culprits"] for one in shared) == [[0], [1]] and not any(one["missing"] for one in shared)
    assert len({line.split()[0] for one in shared for line in one["ranks"].values()}) == 4


# --------------------------------------------------------------------------------------------------------- the files

# Rank 0 aborts, which the watchdog writes out for both; then `spoil(file)` with that of rank 1, which writes it again
# when it hears of the abort itself.
TWICE = """
import json, os, resource, shutil, sys, time
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


def write_twice(folder: Path, spoil: str = "lambda file: None", name: str = "box") -> str:
    """What the ranks say on stderr."""
    code = TWICE.replace("NAME", repr(name)).replace("SPOIL", f"({spoil})")
    env = {**os.environ, "BW_TRACE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def reasons(folder: Path) -> list[str]:
    return [json.loads(path.read_text())["reason"] for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("name", ["box", "n" * 300 + "/\u00e9\n\0"])
def test_files_are_whole_and_for_their_user_alone(tmp_path, capsys, name):
    assert write_twice(tmp_path, name=name) == ""
    reasons = [json.loads(path.read_text())["reason"] for path in tmp_path.iterdir()]
    assert len(reasons) == 2 and not any("not noticed yet" in reason for reason in reasons)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    one, _ = verdict_of(tmp_path, capsys)
    assert (one["comm"], one["missing"]) == (name, [])
    assert all(path.name.isprintable() and len(path.name) < 150 for path in tmp_path.iterdir())


LINK = "file.with_name(f'{file.name}.{os.getpid()}').symlink_to"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (f"lambda file: (file.unlink(), {LINK}(folder.parent / 'precious'))", "File exists"),
        ("lambda file: shutil.rmtree(folder)", "No such file or directory"),
        ("lambda file: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))", "File too large"),
    ],
    ids=["link", "folder", "full"],
)
def test_what_cannot_be_written_is_told(tmp_path, spoil, why):
    """Links of others are not followed."""
    folder, precious = tmp_path / "rings", tmp_path / "precious"
    precious.write_text("precious")
    said = write_twice(folder, spoil)
    assert "[bucketwheel rank 1/2 comm 'box'] its last operations are not in BW_TRACE_DIR: cannot " in said
    assert why in said and said.count("\n") == 1
    assert not [path for path in folder.glob("*.json.*") if not path.is_symlink()]
    assert precious.read_text() == "precious"
