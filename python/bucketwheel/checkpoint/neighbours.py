"""Neighbours: how ranks send each other shards, over a gloo group of their own, from a thread that the training does not see."""

from __future__ import annotations

import collections
import json
import secrets
from typing import Any

from torch import Tensor

from bucketwheel.comm import background, gloo
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.torch_internals import store_of

__all__ = ["Neighbours", "exchange"]

_CHUNK_BYTES = 256 << 20


def exchange(engine: Any, mine: Any) -> list[Any]:
    """A JSON value from every rank of an optimizer to all. Collective."""
    reducer = getattr(engine, "reducer", None)
    said = json.dumps(mine).encode()
    return [json.loads(other) for other in ([said] if reducer is None else reducer.exchange(said))]


class Neighbours:
    """All ranks of ``engine``. Collective. Ranks that are threads of one process reach only themselves: each is its own
    neighbour, as one rank alone is."""

    def __init__(self, engine: Any) -> None:
        self._rank, size = engine.ranks
        self._to_itself: collections.deque[Tensor] = collections.deque()
        self._sent: list[Any] = []
        self._group: Any = None
        distance = 0
        if size > 1 and engine.comm.backend != "local":
            prefix = f"bucketwheel/snapshots/{exchange(engine, secrets.token_hex(8))[0]}"
            rendezvous = Rendezvous(store_of(None), self._rank, size, engine.timeout_s, prefix)
            self._group, distance = gloo.connect(rendezvous, "ring"), 1
            exchange(engine, None)  # one that let go of the group earlier would fail the others' connecting
        self.next, self.previous = (self._rank + distance) % size, (self._rank - distance) % size

    def send(self, tensor: Tensor, to: int) -> None:
        """Of the host, 1-D, not empty. It must not change before `finish`."""
        if to == self._rank:
            self._to_itself.append(tensor)
        else:
            self._sent += [self._group.send([part], to, 0) for part in tensor.split(_CHUNK_BYTES)]

    def finish(self) -> None:
        """Waits until all is sent. RuntimeError if the other one has gone, or after `give_up`."""
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Waits for what is sent, as long as ``tensor``, which it returns. RuntimeError as from `finish`."""
        if source == self._rank:
            return tensor.copy_(self._to_itself.popleft())
        for part in tensor.split(_CHUNK_BYTES):
            self._group.recv([part], source, 0).wait()
        return tensor

    def give_up(self) -> None:
        """What waits ends with a RuntimeError, here and then at the neighbours."""
        for other in {self.next, self.previous} if self._group else ():
            gloo.give_up(self._group, other)

    def release(self) -> None:
        """Lets the group go; who frees one of gloo's waits for what is under way, so a thread of its own does. Idempotent."""
        groups, self._group = [self._group], None
        background.start(groups.clear)
