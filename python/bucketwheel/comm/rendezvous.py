"""Rendezvous: how the ranks of a process group talk before they have a communicator, through the group's torch Store."""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist

from bucketwheel.comm import patience
from bucketwheel.comm.background import start
from bucketwheel.errors import CommError, CommTimeout
from bucketwheel.native.toolchain import say
from bucketwheel.torch_internals import store_of

_ANSWER_OF_RANK_S = 0.002  # of the Store, for what it is asked of each
_PAUSE_S = (0.5e-3, 0.1)  # between two looks whether the Store has a key: the shortest and the longest
_PAUSE_OF_RANK_S = 5e-5  # at least so much for each rank
_PAUSE_SHARE = 0.02  # between these: so much of the time that it has taken so far

_EVERY_RANK = "every rank must make the communicator (ShardedAdamW, sync_module, Communicator) within that time"

_Call = Callable[[threading.Event], Any]


class Rendezvous:
    """Rounds of one JSON value from every rank to all ranks. All ranks take part in the same rounds.

    Rank 0 collects and publishes, so that a round costs every other rank two messages, however many there are.
    """

    def __init__(
        self, base: dist.Store, rank: int, size: int, timeout_s: float, prefix: str = "", call: str = ""
    ) -> None:
        """``prefix``: of the keys in ``base``, these ranks' alone. ``call``: what ranks call to come here, for messages; without
        one they make a communicator."""
        self.base, self.prefix = base, prefix
        self.store = dist.PrefixStore(prefix, base) if prefix else base
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._round = 0
        self._failed: dict[str, Any] = {}  # the outcome of the last round if ranks were missing: there is no other one
        self._what = f"call {call}" if call else "make a communicator (ShardedAdamW, sync_module, Communicator)"
        self._failure = f"{call} could not finish" if call else "the communicator was not made"
        self._lacking = f"not called {call}: call it on all ranks" if call else f"not arrived; {_EVERY_RANK}"

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None, timeout_s: float, call: str = "") -> Rendezvous:
        """The next one of a process group. Each rank counts its own, in the Store: ranks that make the same calls come to
        the same one. A rank that comes when the others have given up is told so by the first round, as they were."""
        rank, store = dist.get_rank(group), store_of(group)
        # torchrun may give restarted processes the Store of those that it ended, with what is in it. Where it does not, an
        # agent that joined later has restarted its processes less often than the others.
        is_new = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
        restarts = "0" if is_new else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"bucketwheel/{restarts}{'/calls' * bool(call)}"
        rendezvous = cls(store, rank, dist.get_world_size(group), timeout_s)
        number = rendezvous.ask(lambda _: store.add(f"{prefix}/rank {rank}", 1))
        return cls(store, rank, rendezvous.size, timeout_s, f"{prefix}/{number}", call)

    @functools.cached_property
    def id(self) -> str:
        """16 hexadecimal digits that are this rendezvous's alone, the same on all ranks: of the first that asks for them."""
        return str(self.ask(lambda _: self.store.compare_set("id", "", secrets.token_hex(8)).decode()))

    def part(self, name: str, rank: int, size: int) -> Rendezvous:
        """One of some of the ranks; ``name`` is theirs alone."""
        return Rendezvous(self.base, rank, size, self.timeout_s, f"{self.prefix}/{name}" if self.prefix else name)

    def exchange(self, mine: Any, *, grace_s: float = 0.0) -> list[Any]:
        """Everybody's value by rank. `CommTimeout` naming the ranks that have not come within ``grace_s`` behind the
        deadline, or behind now if that has passed; rank 0 is awaited a little longer. Ranks that have come to a round before
        have 1.5 s at least. The outcome is the same on all ranks: a rank that comes later hears that the others have gone."""
        values = self._failed or self._round_of(mine, grace_s)
        if isinstance(values, dict):
            self._failed = values
            missing = values["missing"]
            if self.rank in missing:
                raise CommTimeout(
                    f"{self._failure}: the other ranks gave up after {values['timeout_s']:g} s, before rank "
                    f"{self.rank} arrived; ranks {_listed(missing)} had {self._lacking}"
                )
            raise CommTimeout(self._too_late(f"ranks {_listed(missing)} have {self._lacking}"))
        return list(values)

    def _round_of(self, mine: Any, grace_s: float) -> Any:
        self._round += 1
        now = time.monotonic()
        until = max(self.deadline, now) + grace_s
        if self._round > 1 or now >= self.deadline:
            until = max(until, now + self._answer_s)
        if self.rank != 0:
            until += self._answer_s  # rank 0 says first who has come
        return self.ask(functools.partial(self._exchange, self._round, mine, until), until)

    def _exchange(self, number: int, mine: Any, until: float, given_up: threading.Event) -> Any:
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        together = f"{number}/all"
        self.store.set(keys[self.rank], json.dumps(mine))
        awaited = keys if self.rank == 0 else [together]
        if self._waits_for(awaited, keys, until, given_up) and self.rank != 0:
            return json.loads(self.store.get(together))
        missing = self._missing(keys)
        if missing or self.rank != 0:
            failed = {"missing": missing or [0], "timeout_s": self.timeout_s}
            return None if given_up.is_set() else self._decide(together, failed)
        values = self._decide(together, [json.loads(self.store.get(key)) for key in keys])
        for key in keys:
            self.store.delete_key(key)
        if number > 1:
            self.store.delete_key(f"{number - 1}/all")  # who has come to this round has read it
        return values

    def _waits_for(self, awaited: list[str], keys: list[str], until: float, given_up: threading.Event) -> bool:
        """`has_keys`. [Note: who is missing], csrc/comm/public_call.h; ``keys``: of all ranks."""
        begin, waited_s = time.monotonic(), patience.PATIENCE.report_s
        while not has_keys(
            self.store, awaited, min(until, begin + waited_s) - time.monotonic(), given_up, size=self.size
        ):
            if begin + waited_s >= until or given_up.is_set():
                return False
            if next((rank for rank, key in enumerate(keys) if self.store.check([key])), None) == self.rank:
                say(
                    f"rank {self.rank} has waited {waited_s:g} s for ranks {_listed(self._missing(keys))} to "
                    f"{self._what}; it gives up after {self.timeout_s:g} s"
                )
            waited_s *= 2
        return True

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    def ask(self, call: _Call, until: float | None = None, late: str = "the Store does not answer") -> Any:
        """What ``call(given_up)``, which talks to the Store, returns or raises. `CommTimeout`, of which ``late`` is the reason,
        when it has not by ``until``, by default the deadline: `given_up` is set then, and when Ctrl-C ends the wait.

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
        return max(self.deadline - time.monotonic(), patience.PATIENCE.step_s)

    @property
    def _answer_s(self) -> float:
        return patience.PATIENCE.store_s + self.size * _ANSWER_OF_RANK_S

    def _too_late(self, why: str) -> str:
        return f"{self._failure} within {self.timeout_s:g} s: {why}"

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

    def make(self, make: Callable[[], Any]) -> Any:
        """The native communicator that ``make`` returns, on all ranks or on none: `CommError` that lists what failed, or
        `CommTimeout` naming who has not come."""
        made: list[Any] = []
        try:
            failures, _ = self.outcome(self.attempt(lambda: made.append(make())))
            if failures:
                raise CommError(f"the communicator could not be made on all ranks{failures}")
        except BaseException as error:
            for comm in made:
                undo(comm, error)
            raise
        return made[0]

    def outcome(self, mine: str, note: Any = None) -> tuple[str, list[Any]]:
        """The failures of all ranks, listed for a message (empty: there are none), and everybody's ``note``."""
        everyone = self.exchange([mine, note], grace_s=self._answer_s + patience.PATIENCE.step_s)
        failures = "".join(f"\n  rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text)
        return failures, [one for _, one in everyone]


def undo(comm: Any, error: BaseException) -> None:
    """End a native communicator whose making has failed. Where it was interrupted, by Ctrl-C say, other ranks may go on
    with theirs: they hear of it there."""
    comm.abort(f"{type(error).__name__} while the communicator was made")
    comm.close(0.0)


def _listed(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 16 else f"{str(ranks[:16])[:-1]}, ... {len(ranks)} in all]"


def _answer(answer: Future[Any], call: _Call, given_up: threading.Event) -> None:
    try:
        answer.set_result(call(given_up))
    except BaseException as error:  # noqa: BLE001 (raised by who asks)
        answer.set_exception(error)


def has_keys(
    store: dist.Store, keys: list[str], timeout_s: float, given_up: threading.Event | None = None, *, size: int = 1
) -> bool:
    """Blocks until the Store has them all. False at the time limit, or once nobody waits for the answer; RuntimeError when
    there is no Store. Looks again and again, less often where ``size`` ranks do: of a wait that ends without the keys torch's
    TCPStore warns on stderr."""
    begin = time.monotonic()
    while given_up is None or not given_up.is_set():
        if store.check(keys):
            return True
        waited_s = time.monotonic() - begin
        if waited_s >= timeout_s:
            return False
        pause_s = max(min(max(_PAUSE_SHARE * waited_s, _PAUSE_S[0]), _PAUSE_S[1]), size * _PAUSE_OF_RANK_S)
        time.sleep(min(pause_s, timeout_s - waited_s))
    return False
