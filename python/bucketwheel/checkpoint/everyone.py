"""Everyone: all ranks of a checkpoint, and how they talk to each other.

During a call they use the optimizer's communicator, or rounds in the torch Store. After it training uses the communicator,
so the threads of a save use keys of the Store, with a prefix that is this save's alone:

| key | says |
|---|---|
| ``<rank>`` | what the rank has written |
| ``outcome`` | empty: the checkpoint is complete; else why the save has failed on some rank. The first word stands |
| ``writes`` | counts while data is written |
| ``left`` | how many ranks have read the outcome; the last one deletes all keys |

Ranks that are threads of one process share an object instead of the Store.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.checkpoint.live import Engine, exchange
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CheckpointError
from bucketwheel.torch_internals import another_connection, store_of, timeout_of

_USUAL_LIMIT_S = 600.0  # of waiting for other ranks, where torch does not say
_POLL_S = (0.002, 0.5)  # between two looks at a key: the shortest pause and the longest
_POLL_SHARE = 0.02  # between these: so much of the time that it has taken so far
_NOTE_S = 1.0  # between two notes that data is being written
_MOST_BYTES = 7 << 20  # torch's TCPStore takes 8 MiB
_LEAVE_S = 5.0  # rank 0, whose process may have the Store, waits so long for the others to read the outcome

_shared: dict[str, Any] = {}  # the objects of saves that run in threads as ranks


@dataclass(frozen=True)
class Everyone:
    """All ranks of a checkpoint: those of an optimizer, else of `torch.distributed`, else this process alone."""

    engine: Engine | None
    rank: int
    size: int
    timeout_s: float  # how long they wait for each other

    def exchange(self, mine: Any, what: str) -> list[Any]:
        """The JSON values of all ranks. Collective. ``what``: a public name and more, for messages."""
        if self.engine is not None:
            return exchange(self.engine, mine)
        call = what.partition(" ")[0]
        return [mine] if self.size == 1 else Rendezvous.of_group(None, self.timeout_s, call).exchange(mine)

    def agree(self, what: str, error: Exception | None) -> None:
        """Raises ``error``, or another rank's. Collective."""
        if self.engine is not None:
            self.engine.expect_done_by_all(what, error)
            return
        said = self.exchange([what, "" if error is None else f"{type(error).__name__}: {error}"], what)
        calls = [call for call, _ in said]
        if any(call != what for call in calls):
            text = f"ranks made different calls: {', '.join(calls)} (by rank)"
            raise RuntimeError(f"{text}. All ranks must make the same call with the same folder")
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(said):
            if text:
                raise ValueError(f"{what} has failed on rank {rank} and was cancelled on all ranks: {text}")


def everyone_of(engine: Engine | None) -> Everyone:
    if engine is not None:
        return Everyone(engine, *engine.ranks, engine.timeout_s)
    if not (dist.is_available() and dist.is_initialized()):
        return Everyone(None, 0, 1, 0.0)
    limit_s = timeout_of(None, torch.device("cpu"))
    return Everyone(None, dist.get_rank(), dist.get_world_size(), _USUAL_LIMIT_S if limit_s is None else limit_s)


class FailedElsewhere(CheckpointError):
    """Another rank has failed; its text."""


class Board:
    """What ranks tell each other while a save runs. ``name``: of the save, the same on all ranks. Local.

    Every method raises RuntimeError if the Store is gone.
    """

    def __init__(self, everyone: Everyone, name: str) -> None:
        self._rank, self._size, self._timeout_s = everyone.rank, everyone.size, everyone.timeout_s
        self._name = f"bucketwheel/save/{name}"
        self._store: Any = None  # of one rank: nobody listens
        self._noted = time.monotonic()  # when this rank said last that it writes
        if everyone.engine is not None and everyone.engine.are_threads:
            self._store = _shared.setdefault(self._name, dist.HashStore())
        elif everyone.size > 1:
            if not dist.is_initialized():
                raise CheckpointError("the default process group is gone: save before destroy_process_group()")
            # Of its own, since training may wait in its connection for what this save is to say.
            self._store = dist.PrefixStore(self._name, another_connection(store_of(None)))

    def tell(self, key: str, said: bytes) -> None:
        """CheckpointError if it is too long."""
        text = zlib.compress(said)
        if len(text) > _MOST_BYTES:
            raise CheckpointError(
                f"a key of the torch Store cannot hold {len(text)} bytes: make staging_bytes larger, for fewer checksums"
            )
        if self._store is not None and key == "outcome":
            self._store.compare_set(key, "", text)
        elif self._store is not None:
            self._store.set(key, text)

    def wait_for(self, key: str, what: str) -> bytes:
        """What another rank has told. `FailedElsewhere` as soon as some rank has failed. CheckpointError, which names ``what``,
        if no rank has written anything for the ranks' time limit."""
        began = since = time.monotonic()
        seen = -1
        while not self._store.check([key]) and not self._store.check(["outcome"]):
            writes, now = self._store.add("writes", 0), time.monotonic()
            if writes != seen:
                seen, since = writes, now
            elif now - since > self._timeout_s:
                raise CheckpointError(f"no rank wrote data in {self._timeout_s:g} s, while this one waited for {what}")
            time.sleep(max(min(_POLL_SHARE * (now - began), _POLL_S[1]), _POLL_S[0], 5e-5 * self._size))
        if self._store.check(["outcome"]) and (text := zlib.decompress(self._store.get("outcome"))):
            raise FailedElsewhere(text.decode())
        return zlib.decompress(self._store.get(key))

    def note_write(self) -> None:
        """Data is being written."""
        if self._store is not None and time.monotonic() - self._noted > _NOTE_S:
            self._noted = time.monotonic()
            self._store.add("writes", 1)

    def leave(self) -> None:
        """This rank has read, or told, the outcome. The last one to leave deletes all keys; rank 0 waits some seconds for it."""
        if self._store is None:
            return
        if self._store.add("left", 1) == self._size:
            _shared.pop(self._name, None)
            for key in (*map(str, range(1, self._size)), "outcome", "writes", "left"):
                self._store.delete_key(key)
        until = time.monotonic() + _LEAVE_S
        while self._rank == 0 and self._store.check(["left"]) and time.monotonic() < until:
            time.sleep(_POLL_S[0])
