"""Neighbours: how ranks send each other shards, over a gloo group of their own, from any thread."""

from __future__ import annotations

import collections
import secrets
from typing import Any

from torch import Tensor

from bucketwheel.checkpoint.live import Engine, exchange
from bucketwheel.comm import background, gloo
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.torch_internals import store_of

_CHUNK_BYTES = 256 << 20


class Neighbours:
    """The ranks of ``engine`` in a ring. Collective. One rank alone is its own neighbour, and so is each of several
    ranks that are threads of one process: it reaches no other."""

    def __init__(self, engine: Engine) -> None:
        self._rank, size = engine.ranks
        self._to_itself: collections.deque[Tensor] = collections.deque()
        self._sent: list[Any] = []
        self._group: Any = None
        distance = 0
        if size > 1 and not engine.are_threads:
            prefix = f"bucketwheel/snapshots/{exchange(engine, secrets.token_hex(8))[0]}"
            rendezvous = Rendezvous(store_of(None), self._rank, size, engine.timeout_s, prefix)
            self._group, distance = gloo.connect(rendezvous, "ring"), 1
            exchange(engine, None)  # a rank that released the group before all are connected would fail the others
        self.next, self.previous = (self._rank + distance) % size, (self._rank - distance) % size

    def send(self, tensor: Tensor, to: int) -> None:
        """``tensor``: 1-D, on the CPU, not empty. It must not change before `finish`."""
        if to == self._rank:
            self._to_itself.append(tensor)
        else:
            self._sent += [self._group.send([part], to, 0) for part in tensor.split(_CHUNK_BYTES)]

    def finish(self) -> None:
        """Waits until all is sent. RuntimeError if the other rank has gone, or after `give_up`."""
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Fills and returns ``tensor``, of the size that is sent. RuntimeError as from `finish`."""
        if source == self._rank:
            return tensor.copy_(self._to_itself.popleft())
        for part in tensor.split(_CHUNK_BYTES):
            self._group.recv([part], source, 0).wait()
        return tensor

    def give_up(self) -> None:
        """What waits here raises RuntimeError, and then what waits at the neighbours."""
        for other in {self.next, self.previous} if self._group else ():
            gloo.give_up(self._group, other)

    def release(self) -> None:
        """Frees the group, in a thread: gloo waits there for what is under way. Idempotent."""
        groups, self._group = [self._group], None
        background.start(groups.clear)
