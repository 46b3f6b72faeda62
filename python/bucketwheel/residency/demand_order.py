"""Forward order: in which order forward needs the buckets, learnt on each rank and agreed on by all.

Pure: parameters are noted as they are needed, payloads come back for an exchange. Ranks watch the forwards before the
steps 1, 2, 4, 8, ...: the second one sees compiled parts that the first did not, the later ones what has changed, and what
watching and agreeing cost vanishes. All exchange at these steps, whether they have seen a forward or not; what the
lowest rank has seen that saw one is the order of all, so ranks may use different modules.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence


class DemandOrder:
    """The order of ``params_of_bucket`` (for every bucket, the parameters that have a part in it).

    Until a forward has been seen it is from the last bucket to the first: buckets are in the order of backward.
    """

    def __init__(self, params_of_bucket: Sequence[Collection[int]]) -> None:
        self._params_of_bucket = [frozenset(params) for params in params_of_bucket]
        self.buckets: list[int] = list(reversed(range(len(self._params_of_bucket))))
        self._steps = 0
        self._needed: dict[int, None] | None = None  # parameters in the order of first need; None: not watching

    @property
    def is_watching(self) -> bool:
        return self._needed is not None

    def begin_forward(self) -> None:
        """What is noted from now on counts, if the next step agrees on the order and no forward has begun before."""
        if self._needed is None and self._agrees_next():
            self._needed = {}

    def note(self, param: int) -> None:
        """``param`` is needed now."""
        if self._needed is not None:
            self._needed.setdefault(param)

    def _agrees_next(self) -> bool:
        return self._steps & (self._steps + 1) == 0

    def next_step(self, rank: int, exchange: Callable[[bytes], list[bytes]], max_bytes: int) -> list[int]:
        """The buckets in the order in which this step gathers them, equal on all ranks. Every rank calls it at every step.

        ``exchange``: this rank's payload of at most ``max_bytes`` for those of all ranks. Who has seen a forward is asked
        first, so that one rank sends an order, however many there are.
        """
        agrees, own = self._agrees_next(), self._proposal()
        self._steps += 1
        self._needed = None
        if not (agrees and self.buckets):
            return self.buckets
        leader = next((other for other, has_seen in enumerate(exchange(b"\1" if own else b"")) if has_seen), None)
        if leader is None:
            return self.buckets
        order: list[int] = []
        per_round = max_bytes // 4
        while len(order) < len(self.buckets):
            some = own[len(order) : len(order) + per_round] if rank == leader else []
            answer = exchange(struct.pack(f"<{len(some)}I", *some))[leader]
            order += struct.unpack(f"<{len(answer) // 4}I", answer)
        self.buckets = order
        return order

    def _proposal(self) -> list[int]:
        """Buckets by the first of their parameters that was needed, then those of which none was; empty if none at all was."""
        if not self._needed:
            return []
        place = {param: at for at, param in enumerate(self._needed)}
        first = lambda bucket: min(  # noqa: E731
            (place[param] for param in self._params_of_bucket[bucket] if param in place), default=len(place)
        )
        return sorted(reversed(range(len(self._params_of_bucket))), key=first)
