"""Flight rings of real ranks that failed: all of them are there, and the command finds the rank that is to blame."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch

from bucketwheel.__main__ import main
from bucketwheel.comm import Communicator
from bucketwheel.errors import CommError, CommTimeout, PeerError
from bucketwheel.ops import all_gather, reduce_scatter
from bucketwheel.testing import RankPool

pytestmark = pytest.mark.dist


def verdict_of(folder, capsys, status: int = 1) -> tuple[dict, str]:
    assert main(["flight", str(folder), "--json"]) == status
    (one,) = json.loads(capsys.readouterr().out)["communicators"]
    assert main(["flight", str(folder)]) == status
    return one, capsys.readouterr().out


def sleeper(rank: int, size: int, sleep_s: float, comes: bool) -> None:
    with Communicator(backend="shm", name="sleepy", timeout_s=0.7) as comm:
        full, shard = torch.empty(size * 8), torch.ones(8)
        all_gather(full, shard, comm).wait()
        if rank == 1:
            time.sleep(sleep_s)
            if comes:
                with pytest.raises(CommError, match="failed first"):
                    reduce_scatter(shard, full, comm).wait()
        else:
            with pytest.raises(CommTimeout):
                reduce_scatter(shard, full, comm).wait()


@pytest.mark.parametrize("comes", [False, True], ids=["never", "late"])
def test_a_rank_that_sleeps(tmp_path, capsys, comes):
    """Its watchdog writes its ring while it sleeps; when it comes, it has a failed operation like the others."""
    with RankPool(3, env={"BW_TRACE_DIR": str(tmp_path)}, forked=True) as pool:
        pool.run(sleeper, 1.6, comes)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"sleepy-rank{rank}.json" for rank in range(3)]
    one, text = verdict_of(tmp_path, capsys)
    assert (one["culprits"], one["late"], one["waiting"], one["missing"]) == ([1], [1], [0, 2], [])
    assert one["stopped_at"] == 2 and one["origin"] in (0, 2)
    assert "look at rank 1" in text and "waited in operation 2 (reduce_scatter of 1 tensor, 96 bytes)" in text
    if not comes:
        assert "rank 1 stopped first: had not called operation 2" in text
        assert "not noticed yet" in one["ranks"][1]["reason"]


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
    assert "rank 2 wrote nothing: it died or left, say the others" in text
