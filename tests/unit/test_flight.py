"""The flight command on hand-made rings: what it finds, what it prints, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bucketwheel.__main__ import main

GATHER, REDUCE = ("all_gather", 2, 96), ("reduce_scatter", 1, 4096)
NOBODY_KNOWS = "(not noticed yet) rank 0 failed first: timeout. Not arrived: rank 1 (pid 101)"


class Rank:
    """Makes the ring of one rank. Its clock has nothing to do with that of others."""

    def __init__(
        self, rank: int, world: int, reason: str = "timeout in all_gather", comm: str = "box", id: str = "5eed"
    ) -> None:
        self.rank, self.world, self.comm, self.id = rank, world, comm, id
        self.reason = f"[bucketwheel rank {rank}/{world} comm '{comm}' seq 1] {reason}"
        self.now_s = 1000.0 * (rank + 1)
        self.operations: list[dict[str, Any]] = []

    def done(self, *calls: tuple[str, int, int]) -> Rank:
        for call in calls:
            self._add(call, "done", 10.0, 9.0, 8.0)
        return self

    def running(self, call: tuple[str, int, int], seconds: float) -> Rank:
        return self._add(call, "running", seconds + 0.01, seconds, None)

    def failed(self, call: tuple[str, int, int], seconds: float, ago_s: float = 0.0) -> Rank:
        return self._add(call, "failed", seconds + ago_s, seconds + ago_s, ago_s)

    def issued(self, call: tuple[str, int, int], seconds: float) -> Rank:
        return self._add(call, "issued", seconds, None, None)

    def captured(self, call: tuple[str, int, int]) -> Rank:
        return self._add(call, "captured", 5.0, None, None)

    def _add(self, call: tuple[str, int, int], state: str, *ago_s: float | None) -> Rank:
        times = [None if ago is None else self.now_s - ago for ago in ago_s]
        entry = dict(zip(("kind", "tensors", "bytes"), call, strict=True), seq=len(self.operations) + 1, state=state)
        self.operations.append({**entry, **dict(zip(("issued_s", "started_s", "finished_s"), times, strict=True))})
        return self

    def write(self, folder: Path) -> None:
        ring = {
            **{
                "comm": self.comm,
                "id": self.id,
                "rank": self.rank,
                "world": self.world,
                "backend": "shm",
                "pid": 100 + self.rank,
            },
            **{"host": f"node{self.rank}", "written_at": 1.5e9 - self.rank, "now_s": self.now_s},
            **{"reason": self.reason, "operations": self.operations},
        }
        file = f"{self.comm.replace('/', '_')}-{self.id}-rank{self.rank}.json"
        (folder / file).write_text(json.dumps(ring))


@pytest.fixture
def flight(tmp_path, capsys):
    """``flight(*ranks)`` writes the rings; returns the exit status, the text and the object of ``--json``."""

    def run(*ranks: Rank) -> tuple[int, str, dict[str, Any]]:
        for rank in ranks:
            rank.write(tmp_path)
        status = main(["flight", str(tmp_path)])
        text = capsys.readouterr().out
        assert main(["flight", str(tmp_path), "--json"]) == status
        found = json.loads(capsys.readouterr().out)
        assert found["status"] == status
        return status, text, found

    return run


def the_one(found: dict[str, Any]) -> dict[str, Any]:
    (communicator,) = found["communicators"]
    return communicator


def test_what_is_said_of_a_rank_that_never_came(flight):
    status, text, found = flight(
        Rank(0, 3, "timeout in all_gather").done(REDUCE).running(GATHER, 60.0),
        Rank(1, 3, NOBODY_KNOWS).done(REDUCE),
        Rank(2, 3, "rank 0 failed first: timeout").done(REDUCE).failed(GATHER, 59.5),
    )
    assert status == 1
    one = the_one(found)
    assert (one["late"], one["stopped_at"], one["culprits"], one["why"]) == ([1], 2, [1], "late")
    assert (one["missing"], one["mismatch"]) == ([], {})
    assert text.splitlines() == [
        "communicator 'box' (5eed), 3 ranks, shm",
        "  rank 0  node0:100  in 2 (all_gather of 2 tensors, 96 bytes) for 60.0 s | timeout in all_gather",
        f"  rank 1  node1:101  had not called 2 | {NOBODY_KNOWS}",
        "  rank 2  node2:102  in 2 (all_gather of 2 tensors, 96 bytes) for 59.5 s | rank 0 failed first: timeout",
        "  => ranks [1] stopped first, at operation 2: late",
    ]


DIED = "rank 2 (pid 102) died; needed for all_gather of 2 tensors"
ROUND = "timeout in collect() of round 7. Not arrived: rank 1 (pid 101, last seen in operation 1)"
ABSENT = "timeout in reduce_scatter. Not arrived: rank 1 (pid 101, last seen in operation 1)"
ANSWERS = "timeout in all_gather. Not arrived: rank 1 (last issued 1). Unknown (no answer): rank 2"
ALONE = (
    "timeout in bw.checkpoint.save (collect() of round 7). Not arrived: rank 1 (pid 101, is in close, has not called "
    "bw.checkpoint.save, last seen in operation 1), rank 2 (is in bw.checkpoint.save, last posted 6): call it on all ranks"
)
LEFT = ALONE.replace("timeout in", "rank 1 (pid 101) has gone; needed for")
ODD = "rank 3 failed first: odd"
ALIKE = ("all_gather", 1, 8)
CALLS = (
    "ranks called different operations:\n  rank 0: all_gather of 1 tensor, 8 bytes: float32[2]\n"
    "  rank 1: all_gather of 1 tensor, 8 bytes: int64[1]\n  rank 2: (has not arrived)\n"
    "  rank 3: all_gather of 1 tensor, 8 bytes: float32[2]"
)
# Rings, who stopped first, at which operation, and how.
CASES: dict[str, tuple[list[Rank], list[int], int, str]] = {
    "its stream is held up": (
        [Rank(0, 2).running(GATHER, 30.0), Rank(1, 2, NOBODY_KNOWS).issued(GATHER, 30.0)],
        [1],
        1,
        "late",
    ),
    # It wrote its ring when it came: it had begun the operation too, but was there for no time.
    "it came after the failure": (
        [
            Rank(0, 3, ABSENT).done(GATHER).running(REDUCE, 2.0),
            Rank(1, 3, "rank 0 failed first: timeout").done(GATHER).failed(REDUCE, 0.001),
            Rank(2, 3).done(GATHER).failed(REDUCE, 1.9, ago_s=20.0),
        ],
        [1],
        2,
        "late",
    ),
    # Its device hangs in an operation that is over elsewhere.
    "it is left behind": (
        [Rank(0, 2).done(GATHER, GATHER).running(REDUCE, 60.0), Rank(1, 2).done(GATHER).running(GATHER, 60.2)],
        [1],
        2,
        "late",
    ),
    # Rank 1 was not there yet either, but that is no reason.
    "it died": (
        [
            Rank(0, 4, DIED).done(GATHER).running(GATHER, 1.0),
            Rank(1, 4, f"(not noticed yet) rank 0 failed first: {DIED}").done(GATHER),
            Rank(3, 4, f"rank 0 failed first: {DIED}").done(GATHER).failed(GATHER, 1.0),
        ],
        [2],
        2,
        "died or left",
    ),
    "nobody saw them die": ([Rank(1, 4, "timeout").running(GATHER, 9.0)], [0, 2, 3], 1, "died or left"),
    "another size": (
        [
            Rank(0, 4, ODD).done(GATHER).failed(REDUCE, 0.1),
            Rank(1, 4, ODD).done(GATHER).failed(REDUCE, 0.1),
            Rank(2, 4, ODD).done(GATHER).failed(("reduce_scatter", 1, 4100), 0.1),
            Rank(3, 4, "odd").done(GATHER).failed(REDUCE, 0.1),
        ],
        [2],
        2,
        "called something else than most",
    ),
    # The dtype is in the reason alone.
    "another dtype": (
        [
            Rank(0, 4, CALLS).done(GATHER).failed(ALIKE, 0.3),
            Rank(1, 4, CALLS).done(GATHER).failed(ALIKE, 0.3),
            Rank(2, 4, f"(not noticed yet) rank 0 failed first: {CALLS}").done(GATHER),
            Rank(3, 4, CALLS).done(GATHER).failed(ALIKE, 0.3),
        ],
        [1],
        2,
        "called something else than most",
    ),
    # Who aborts is to blame, though another had not begun the operation either.
    "an abort": (
        [
            Rank(0, 3, "aborted by rank 2: no data").done(GATHER).running(GATHER, 0.5),
            Rank(1, 3, "(not noticed yet) aborted by rank 2: no data").done(GATHER),
            Rank(2, 3, "aborted by rank 2: no data").done(GATHER),
        ],
        [2],
        2,
        "aborted",
    ),
    "it is missing from a round of agreement": (
        [
            Rank(0, 3, ROUND).done(GATHER),
            Rank(1, 3, f"(not noticed yet) rank 0 failed first: {ROUND}").done(GATHER),
            Rank(2, 3, f"rank 0 failed first: {ROUND}").done(GATHER),
        ],
        [1],
        2,
        "late",
    ),
    # What the others have called, too, where it ended before they did (issue 44).
    "it has not called": (
        [Rank(0, 3, ALONE).done(GATHER), Rank(2, 3, LEFT)],
        [1],
        1,
        "had not called bw.checkpoint.save",
    ),
    "who does not answer is not late": ([Rank(rank, 3, ANSWERS).done(GATHER) for rank in range(3)], [1], 2, "late"),
    # Together in one operation: nobody is late, whatever clocks say.
    "all agree": (
        [
            Rank(0, 2, "timeout").done(GATHER).captured(GATHER).running(REDUCE, 60.0),
            Rank(1, 2, "timeout").done(GATHER).captured(GATHER).running(REDUCE, 59.9),
        ],
        [],
        3,
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_stopped_first(flight, case):
    ranks, culprits, stopped_at, why = CASES[case]
    status, text, found = flight(*ranks)
    one = the_one(found)
    assert (one["culprits"], one["stopped_at"], one["why"]) == (culprits, stopped_at, why)
    assert status == (1 if culprits else 0)
    assert f"ranks {culprits} stopped first" in text or not culprits
    if case == "another dtype":
        assert sorted(one["mismatch"].values()) == [[0, 3], [1]]
        assert "=> all_gather of 1 tensor, 8 bytes: int64[1]: ranks [1]" in text


def test_communicators_of_one_name(flight, tmp_path):
    """Two shard groups, say. Their ranks have nothing to do with each other, nor has an unreadable file of one with the
    other.
    """
    (tmp_path / "row-b0-rank2.json").write_text("{")
    status, text, found = flight(
        Rank(0, 3, "timeout", comm="row", id="a0").done(GATHER).running(REDUCE, 9.0),
        Rank(1, 3, NOBODY_KNOWS, comm="row", id="a0").done(GATHER),
        Rank(0, 3, "timeout", comm="row", id="b0").done(REDUCE),
        Rank(1, 3, "timeout", comm="row", id="b0").done(REDUCE),
    )
    first, second = found["communicators"]
    assert status == 1 and (first["id"], second["id"]) == ("a0", "b0")
    assert (first["culprits"], first["missing"]) == ([2], [2])
    assert (second["culprits"], second["missing"], second["mismatch"]) == ([], [], {})
    assert "communicator 'row' (a0), 3 ranks, shm" in text.splitlines()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"rank": 0}', '{"rank": 5, "world": 2, "now_s": 1, "operations": []}']
)
def test_a_broken_file(flight, tmp_path, content):
    """It is named, and its rank has written something."""
    (tmp_path / "box-5eed-rank1.json").write_text(content)
    (tmp_path / "unrelated.json").write_text("{")
    (tmp_path / "box-5eed-rank0.json.77").write_text("{")
    status, text, found = flight(Rank(0, 2, "timeout").done(GATHER))
    assert (status, list(found["broken"])) == (1, ["box-5eed-rank1.json"])
    assert "box-5eed-rank1.json cannot be read: " in text
    assert re.search(r"^  rank 1  cannot be read$", text, re.MULTILINE)
    assert the_one(found)["missing"] == []


def test_directories_without_rings(tmp_path, capsys):
    assert main(["flight", str(tmp_path / "nothing")]) == 2
    assert "nothing is not a directory" in capsys.readouterr().err
    assert main(["flight", str(tmp_path)]) == 2
    assert "no flight ring (COMM-ID-rankN.json) in" in capsys.readouterr().err
