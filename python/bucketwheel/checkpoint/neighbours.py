"""Neighbours: how ranks send each other shards, over a gloo group of their own, from threads that the training does not see."""

from __future__ import annotations

import secrets
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm import background, gloo
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.torch_internals import store_of

__all__ = ["Neighbours"]

_DATA, _ANSWER = 0, 1  # tags: the two directions of two ranks that are each other's neighbours
_CHUNK_BYTES = 256 << 20


class Neighbours:
    """All ranks of ``reducer``. Collective. One thread may send and another one receive at a time."""

    def __init__(self, reducer: Any, timeout_s: float) -> None:
        token = reducer.exchange(secrets.token_hex(8).encode())[0].decode()
        prefix = f"bucketwheel/snapshots/{token}"
        rendezvous = Rendezvous(store_of(None), reducer.rank, reducer.size, timeout_s, prefix)
        self._group = gloo.connect(rendezvous, "ring")
        self._others = sorted({(reducer.rank + 1) % reducer.size, (reducer.rank - 1) % reducer.size} - {reducer.rank})
        self.next, self.previous = (reducer.rank + 1) % reducer.size, (reducer.rank - 1) % reducer.size

    def send(self, tensor: Tensor, to: int, tag: int = _DATA) -> None:
        """uint8 or int64 on the host, 1-D. RuntimeError if the other one has gone, or `give_up` was called."""
        for part in tensor.split(_CHUNK_BYTES) if tensor.numel() else ():
            self._group.send([part], to, tag).wait()

    def receive(self, tensor: Tensor, source: int, tag: int = _DATA) -> Tensor:
        """Into ``tensor``, as long as what is sent; returns it."""
        for part in tensor.split(_CHUNK_BYTES) if tensor.numel() else ():
            self._group.recv([part], source, tag).wait()
        return tensor

    def answer(self, to: int) -> None:
        """Says that what came was received."""
        self.send(torch.ones(1, dtype=torch.uint8, device="cpu"), to, _ANSWER)

    def await_answer(self, source: int) -> None:
        self.receive(torch.empty(1, dtype=torch.uint8, device="cpu"), source, _ANSWER)

    def give_up(self) -> None:
        """What waits ends with a RuntimeError, here and then at the neighbours."""
        for other in self._others:
            gloo.give_up(self._group, other)

    def release(self) -> None:
        """Lets the group go; who frees one of gloo's waits for what is under way, so a thread of its own does."""
        background.start(_let_go, [self._group])
        self._group = None


def _let_go(groups: list[Any]) -> None:
    groups.clear()
