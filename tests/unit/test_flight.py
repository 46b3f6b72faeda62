"""The flight command on hand-made rings: what it finds, what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bucketwheel.__main__ import main
from bucketwheel.tools import flight

GATHER, REDUCE = ("all_gather", 2, 96), ("reduce_scatter", 1, 4096)


def ring(rank: int, world: int, reason: str, *operations: tuple[str, tuple[str, int, int]], id: str = "5eed") -> dict:
    """``operations``: each a state and what was called."""
    calls = []
    for seq, (state, (kind, tensors, size)) in enumerate(operations, 1):
        times = {"issued_s": 1.0, "started_s": 0.0 if state in ("issued", "captured") else 2.0, "finished_s": 0.0}
        calls.append({"seq": seq, "kind": kind, "tensors": tensors, "bytes": size, "state": state, **times})
    reason = f"[bucketwheel rank {rank}/{world} comm 'box' seq 1] {reason}"
    facts = {"comm": "box", "id": id, "rank": rank, "world": world, "backend": "shm", "pid": 100 + rank, "host": "node"}
    return {**facts, "written_at": 1.5e9 - rank, "now_s": 3.0, "reason": reason, "operations": calls}


def write(folder: Path, rings: list[dict]) -> None:
    for one in rings:
        (folder / f"box-{one['id']}-rank{one['rank']}.json").write_text(json.dumps(one))


G, R = ("done", GATHER), ("done", REDUCE)
UNAWARE = "(not noticed yet) rank 0 failed first: "
LEAVES = "rank 2 (pid 102) has closed the communicator; needed for all_gather of 2 tensors"
ROUND = "timeout in collect() of round 7. Not arrived: rank 1 (pid 101, last seen in operation 1). Unknown (no answer): rank 2"
ALONE = (
    "timeout in bw.checkpoint.save (collect() of round 7). Not arrived: rank 1 (pid 101, is in close, has not called "
    "bw.checkpoint.save, last seen in operation 1), rank 2 (is in bw.checkpoint.save, last posted 6): call it on all ranks"
)
LEFT = ALONE.replace("timeout in", "rank 1 (pid 101) has ended; needed for")
ODD = "rank 3 failed first: odd"
CALLS = (
    "ranks called different operations:\n  rank 0: all_gather of 1 tensor, 8 bytes: float32[2]\n"
    "  rank 1: all_gather of 1 tensor, 8 bytes: int64[1]\n  rank 2: (has not arrived)\n"
    "  rank 3: all_gather of 1 tensor, 8 bytes: float32[2]"
)
FAILED = ("failed", REDUCE)
# Rings, the ranks that stopped first, at which operation, and how.
CASES: dict[str, tuple[list[dict], list[int], int, str]] = {
    "its stream is held up": (
        [ring(0, 2, "timeout", ("running", GATHER)), ring(1, 2, UNAWARE, ("issued", GATHER))],
        *([1], 1, "late"),
    ),
    "its device hangs in an operation that is over elsewhere": (
        [ring(0, 2, "timeout", G, G, ("running", REDUCE)), ring(1, 2, "timeout", G, ("running", GATHER))],
        *([1], 2, "late"),
    ),
    # Rank 1 was not there yet either, but that is no reason.
    "it left": (
        [ring(0, 3, LEAVES, G, FAILED), ring(1, 3, UNAWARE + LEAVES, G), ring(2, 3, "aborted", G)],
        *([2], 2, "died or left"),
    ),
    "no rank saw them die": ([ring(1, 4, "timeout", ("running", GATHER))], [0, 2, 3], 1, "died or left"),
    "another size": (
        [ring(rank, 4, ODD, G, ("failed", (*REDUCE[:2], 4100)) if rank == 2 else FAILED) for rank in range(4)],
        *([2], 2, "called another operation than most ranks"),
    ),
    "another dtype, which the reason alone has": (
        [ring(rank, 4, UNAWARE + CALLS if rank == 2 else CALLS, G) for rank in range(4)],
        *([1], 2, "called another operation than most ranks"),
    ),
    # Rank 1 had not begun the operation either.
    "an abort": (
        [ring(0, 3, "aborted by rank 2", G, FAILED), ring(1, 3, UNAWARE, G), ring(2, 3, "aborted by rank 2", G)],
        *([2], 2, "aborted"),
    ),
    "it is missing from a round of agreement": (
        [ring(0, 3, ROUND, G), ring(1, 3, UNAWARE + ROUND, G), ring(2, 3, "rank 0 failed first: " + ROUND, G)],
        *([1], 2, "late"),
    ),
    # By its public name, also where another rank's call has ended before (issue 44).
    "it has not called": (
        [ring(0, 3, ALONE, G), ring(2, 3, LEFT)],
        *([1], 1, "had not called bw.checkpoint.save"),
    ),
    "all agree": (
        [ring(rank, 2, "timeout", G, ("captured", GATHER), ("running", REDUCE)) for rank in range(2)],
        *([], 3, ""),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_stopped_first(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    rings, culprits, stopped_at, why = CASES[case]
    write(tmp_path, rings)
    (verdict,) = flight.judge(flight.read(tmp_path)[0])
    assert (verdict.culprits, verdict.stopped_at, verdict.why) == (culprits, stopped_at, why)
    assert main(["flight", str(tmp_path)]) == bool(culprits)
    assert capsys.readouterr().out.count(f"ranks {culprits} stopped first, at operation {stopped_at}: {why}") == bool(
        why
    )


def test_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two communicators of one name, whose ranks have nothing to do with each other; and of a file that is no ring."""
    write(tmp_path, [ring(0, 3, "timeout", R, ("running", GATHER)), ring(1, 3, UNAWARE + "timeout", R)])
    write(tmp_path, [ring(rank, 2, "timeout", G, id="b0") for rank in range(2)])
    (tmp_path / "box-c0-rank1.json").write_text("{")
    assert main(["flight", str(tmp_path)]) == 1
    broken, *lines = capsys.readouterr().out.splitlines()
    assert broken.startswith("box-c0-rank1.json cannot be read: ")
    assert lines[lines.index("communicator 'box' (5eed), 3 ranks, shm") :][:5] == [
        "communicator 'box' (5eed), 3 ranks, shm",
        "  rank 0  node:100  in 2 (all_gather of 2 tensors, 96 bytes) | timeout",
        "  rank 1  node:101  had not called 2 | (not noticed yet) rank 0 failed first: timeout",
        "  rank 2  wrote nothing",
        "  => ranks [2] stopped first, at operation 2: died or left",
    ]
    assert "  => no rank stopped before the others, at operation 2" in lines
    assert main(["flight", str(tmp_path / "nothing")]) == 2
    assert "no flight ring (COMM-ID-rankN.json) in" in capsys.readouterr().err
