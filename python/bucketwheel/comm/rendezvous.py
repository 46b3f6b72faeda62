"""Meeting: how the ranks of a process group talk before they have a communicator, through the group's torch Store."""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bucketwheel.comm.background import start
from bucketwheel.errors import CommError, CommTimeout

__all__ = ["STEP_S", "Meeting", "has_keys", "undo"]

STEP_S = 1.0  # for a step that ranks take together, where they have met so late that less is left

_LOOK_S = 0.05
_SLICE_S = 0.5  # between two waits for the Store a thread sees that it is given up
# Behind the deadline, for what the Store is told and asked then, and asked of each rank.
_ANSWER_S = 1.5
_ANSWER_OF_ONE_S = 0.002
_OUTCOME_S = 1.0  # behind that: ranks whose attempts have ended so late learn of each other how they ended

_Call = Callable[[threading.Event], Any]


class Meeting:
    """Rounds of one JSON value from every rank to all ranks. All ranks take part in the same rounds.

    Rank 0 collects and publishes, so that a round costs every other rank two messages, however many there are.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        """``store`` is this meeting's alone: a `PrefixStore` with a prefix that no other has."""
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._round = 0

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None, timeout_s: float) -> Meeting:
        """The next meeting of a process group: each rank counts its own, see [Note: missed meetings]."""
        rank, store = dist.get_rank(group), _store_of(group)
        meeting = cls(store, rank, dist.get_world_size(group), timeout_s)
        meeting.store = meeting.ask(lambda _: _next_place(store, rank))
        return meeting

    @staticmethod
    def miss(group: dist.ProcessGroup | None) -> None:
        """A call that should have come to a meeting of the group has failed before."""
        _may_be_behind.add(_store_of(group))

    @functools.cached_property
    def id(self) -> str:
        """16 hexadecimal digits that are this meeting's alone, the same on all ranks: of the first that asks for them."""
        return str(self.ask(lambda _: self.store.compare_set("id", "", secrets.token_hex(8)).decode()))

    def part(self, name: str, rank: int, size: int) -> Meeting:
        """A meeting of some of the ranks; ``name`` is theirs alone."""
        return Meeting(dist.PrefixStore(name, self.store), rank, size, self.timeout_s)

    def exchange(self, mine: Any, *, grace_s: float = 0.0) -> list[Any]:
        """Everybody's value by rank. `CommTimeout` naming the ranks that have not come within ``grace_s`` behind the meeting's
        deadline, or behind now if that has passed; rank 0 is awaited a little longer. Behind the deadline, and for ranks that
        have met in a round before, that is 1.5 s away at least. On all ranks the same: who comes later hears that the others
        have gone."""
        self._round += 1
        now = time.monotonic()
        until = max(self.deadline, now) + grace_s
        if self._round > 1 or now >= self.deadline:
            until = max(until, now + self._answer_s)
        if self.rank != 0:
            until += self._answer_s  # rank 0 says first who has come
        values = self.ask(functools.partial(self._exchange, self._round, mine, until), until)
        if isinstance(values, dict):
            raise CommTimeout(self._too_late(f"ranks {values['missing']} have not come"))
        return list(values)

    def _exchange(self, number: int, mine: Any, until: float, given_up: threading.Event) -> Any:
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        together = f"{number}/all"
        if self.rank == 0:
            awaited = keys[1:]
        else:
            self.store.set(keys[self.rank], json.dumps(mine))
            awaited = [together]
        missing: list[int] = []
        if not has_keys(self.store, awaited, until - time.monotonic(), given_up):
            if given_up.is_set():  # what the round comes to is for the others to say
                return None
            missing = [rank for rank in range(1, self.size) if not self.store.check([keys[rank]])]
            if self.rank != 0 and not missing:
                missing = [0]
        if missing:
            values = self._decide(together, {"missing": missing})
        elif self.rank == 0:
            values = self._decide(together, [mine, *(json.loads(self.store.get(key)) for key in awaited)])
        else:
            values = json.loads(self.store.get(together))
        if self.rank == 0 and not isinstance(values, dict):
            for key in awaited:
                self.store.delete_key(key)
            if number > 1:
                self.store.delete_key(f"{number - 1}/all")  # who has come to this round has read it
        return values

    def ask(self, call: _Call, until: float | None = None, late: str = "the Store does not answer") -> Any:
        """What ``call(given_up)``, which talks to the Store, returns or raises. `CommTimeout`, of which ``late`` is the reason,
        when it has not by ``until``, by default the meeting's deadline: `given_up` is set then, and when Ctrl-C ends the wait.

        In a thread of its own. A Store that cannot be reached keeps a call, whatever its time limit, until the system gives
        the connection up; that takes minutes at least, and no signal is heard meanwhile.
        """
        answer: Future[Any] = Future()
        given_up = threading.Event()
        until = self.deadline if until is None else until
        try:
            start(_answer, answer, call, given_up)
            wait([answer], max(until - time.monotonic(), 0.0) + self._answer_s)
            if not answer.done():
                raise CommTimeout(self._too_late(late))
            return answer.result()
        finally:
            given_up.set()
            del answer  # else it and an error that it raises keep each other

    @property
    def left_s(self) -> float:
        """For a step that the ranks take together."""
        return max(self.deadline - time.monotonic(), STEP_S)

    @property
    def _answer_s(self) -> float:
        return _ANSWER_S + self.size * _ANSWER_OF_ONE_S

    def _too_late(self, why: str) -> str:
        return f"the communicator was not made within {self.timeout_s} s: {why}"

    def _decide(self, key: str, outcome: Any) -> Any:
        """What the round came to: that of the first rank that says so."""
        text = json.dumps(outcome)
        first = self.store.compare_set(key, "", text).decode()
        if first == text:
            self.store.set(key, text)  # wakes those that wait for it, which the other call does not on every Store
        return json.loads(first)

    def attempt(self, step: Callable[[], Any]) -> str:
        """What went wrong in ``step``; empty if nothing did."""
        try:
            step()
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def failures(self, mine: str) -> str:
        """What failed on some rank, listed for a message; empty if ``mine`` is on every rank."""
        return self.outcome(mine)[0]

    def make(self, make: Callable[[], Any]) -> Any:
        """The native communicator that ``make`` returns, on all ranks or on none: `CommError` that lists what failed, or
        `CommTimeout` naming who has not come."""
        made: list[Any] = []
        try:
            failures = self.failures(self.attempt(lambda: made.append(make())))
            if failures:
                raise CommError(f"the communicator could not be made on all ranks{failures}")
        except BaseException as error:
            undo(made, error)
            raise
        return made[0]

    def outcome(self, mine: str, note: Any = None) -> tuple[str, list[Any]]:
        """`failures`, and everybody's ``note``."""
        everyone = self.exchange([mine, note], grace_s=self._answer_s + _OUTCOME_S)
        failures = "".join(f"\n  rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text)
        return failures, [one for _, one in everyone]


def undo(made: list[Any], error: BaseException) -> None:
    """End native communicators whose making has failed. Where it was interrupted, by Ctrl-C say, other ranks may go on with
    theirs: they hear of it there."""
    for comm in made:
        comm.abort(f"{type(error).__name__} while the communicator was made")
        comm.close(0.0)


def _answer(answer: Future[Any], call: _Call, given_up: threading.Event) -> None:
    try:
        answer.set_result(call(given_up))
    except BaseException as error:  # noqa: BLE001 (raised by who asks)
        answer.set_exception(error)


def _store_of(group: dist.ProcessGroup | None) -> Any:
    whole: Any = group if group is not None else dist.group.WORLD
    return dist.distributed_c10d._get_process_group_store(whole)


# [Note: missed meetings] Each rank counts the meetings of a group that it has come to, so that ranks that make the same calls
# come to the same ones. A rank whose call fails before it comes to its meeting is behind if the others have waited for it
# there in vain. It finds out when it comes again: the others have given up the meeting that is its next, and then it goes on
# to the first that they have not. A rank that comes late finds the same, but has missed no call: it is told, as the others
# were, that it had not come, and may be behind from then on, for it may be that it never made the call that they waited for.
_may_be_behind: weakref.WeakSet[Any] = weakref.WeakSet()  # in the meetings of these Stores' groups


def _next_place(store: dist.Store, rank: int) -> dist.Store:
    # torchrun may give restarted processes the Store of those that it ended, with what is in it.
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_behind = store in _may_be_behind
    while True:
        number = store.add(f"bucketwheel/{life}/meetings/{rank}", 1)
        place = dist.PrefixStore(f"bucketwheel/{life}/{number}", store)
        is_given_up = place.check(["1/all"]) and isinstance(json.loads(place.get("1/all")), dict)
        if not is_given_up:
            _may_be_behind.discard(store)
            return place
        _may_be_behind.add(store)
        if not is_behind:
            return place


def has_keys(store: dist.Store, keys: list[str], timeout_s: float, given_up: threading.Event | None = None) -> bool:
    """Blocks until the Store has them all. False at the time limit, or once nobody waits for the answer; RuntimeError when
    there is no Store."""
    until = time.monotonic() + timeout_s
    while given_up is None or not given_up.is_set():
        look_until = min(until, time.monotonic() + _SLICE_S)
        try:
            store.wait(keys, timedelta(seconds=max(look_until - time.monotonic(), _LOOK_S)))
            return True
        except RuntimeError:  # of which the Stores have different kinds
            if time.monotonic() < look_until - _LOOK_S:
                raise  # not the time limit
        if time.monotonic() >= until:
            return False
    return False
