"""Board: what ranks tell each other while a save runs, here as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from bucketwheel import CheckpointError
from bucketwheel.checkpoint import everyone as module
from bucketwheel.checkpoint.everyone import Board, Everyone, FailedElsewhere
from bucketwheel.testing import run_threads


class Threads:
    are_threads = True


def on_boards(size: int, body: Callable[[Board, int], Any], timeout_s: float = 30.0) -> list[Any]:
    def run(rank: int, world: int) -> Any:
        board = Board(Everyone(Threads(), rank, world, timeout_s), "it")  # type: ignore[arg-type]
        try:
            return body(board, rank)
        finally:
            board.leave()

    found = run_threads(run, size)
    assert "bucketwheel/save/it" not in module._shared
    return list(found)


def test_texts_come_whole_and_no_key_stays() -> None:
    texts = [b"", b"x" * 100_000, b""]

    def body(board: Board, rank: int) -> Any:
        if rank != 0:
            board.tell(str(rank), texts[rank])
            return board.wait_for("outcome", "the commit")
        found = [board.wait_for(str(other), "data") for other in (1, 2)]
        board.tell("outcome", b"")
        body.store = board._store  # type: ignore[attr-defined]
        return found

    assert on_boards(3, body) == [texts[1:], b"", b""]
    assert body.store.num_keys() == 0  # type: ignore[attr-defined]


def test_a_failure_reaches_all_at_once() -> None:
    """Rank 0 waits for rank 1, which never says anything."""
    failed = threading.Event()

    def body(board: Board, rank: int) -> None:
        if rank == 2:
            board.tell("outcome", b"disk full")
            failed.set()
        elif rank == 1:
            assert failed.wait(30)
        with pytest.raises(FailedElsewhere, match="disk full"):
            board.wait_for("1" if rank == 0 else "outcome", "data")

    on_boards(3, body)


def test_ranks_that_write_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NOTE_S", 0.0)

    def body(board: Board, rank: int) -> None:
        for _ in range(15 * rank):
            time.sleep(0.1)
            board.note_write()
        if rank == 0:
            with pytest.raises(CheckpointError, match=r"no rank wrote data in 0\.6 s, while this one waited for data"):
                board.wait_for("1", "data")
            assert int(board._store.get("writes")) == 15

    on_boards(2, body, timeout_s=0.6)
