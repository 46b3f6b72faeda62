"""Trace: the leases of a pool in their order, as a value and as a file.

>>> trace = Trace("train", [TraceEvent("acquire", 0, "a", 4096, -1), TraceEvent("release", 0, "a", 4096, -1)])
>>> trace.lifetimes().intervals
{'a': [(0, 1)]}

A file has one JSON object on each line: first ``{"bucketwheel_trace": 1, "name": ..., "align": ...}``, then one for each
event, with the fields of `TraceEvent`.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from bucketwheel.pool.placement import Interval, PlanKey, aligned

HEADER = "bucketwheel_trace"
VERSION = 1
_KINDS = ("live", "acquire", "use", "release")


@dataclass(frozen=True)
class TraceEvent:
    """One call of a pool.

    Attributes:
        kind: ``"live"`` (the lease was live when the trace began), ``"acquire"``, ``"use"`` (another stream uses the lease) or
            ``"release"``.
        lease: Number of the lease in the trace.
        key: The key of the lease; empty for a lease without one.
        nbytes: The requested number of bytes.
        stream: Number of the stream, in the order of first appearance; -1 means the host.
        where: The code that acquired the lease, as ``"file.py:12 in name"``, or empty."""

    kind: str
    lease: int
    key: str
    nbytes: int
    stream: int
    where: str = ""


@dataclass(frozen=True)
class Lifetimes:
    """Sizes and live intervals of the keys of a trace, in the order of first acquires: the arguments of `place`.

    Attributes:
        sizes: Bytes of each key.
        intervals: For each key, the half-open intervals in which it is live, in positions of the trace's events.
        keys: Role, unit and position of each key.
        steps: Number of events. All intervals stop there or before.
        unnamed_bytes: The most bytes that leases without a key have at once. They are in none of the dicts."""

    sizes: dict[str, int]
    intervals: dict[str, list[Interval]]
    keys: dict[str, PlanKey] | None
    steps: int
    unnamed_bytes: int = 0

    def with_slack(self, slack: Mapping[str, int]) -> Lifetimes:
        """Returns lifetimes in which keys stay reserved for some time after their release. Local.

        A key of a role in ``slack`` stays reserved until that number of further acquires of its role, or to the end if there
        are fewer, but never into its own next interval. 0 needs the least memory; 1 is a double buffer.

        Args:
            slack: Number of further acquires for each role.

        Raises:
            ValueError: A role that no key has, or a negative number."""
        keys_of: dict[str, list[str]] = defaultdict(list)  # by role
        for key, of in (self.keys or {}).items():
            keys_of[of.role].append(key)
        reserved = dict(self.intervals)
        for role, count in slack.items():
            if role not in keys_of or type(count) is not int or count < 0:
                raise ValueError(f"slack of {count} for {role!r}; the roles are {', '.join(keys_of) or '(none)'}")
            acquires = sorted(start for key in keys_of[role] for start, _ in self.intervals[key])
            for key in keys_of[role]:
                reserved[key] = self._reserved(self.intervals[key], acquires, count)
        return replace(self, intervals=reserved)

    def _reserved(self, intervals: list[Interval], acquires: list[int], count: int) -> list[Interval]:
        """``intervals`` of a key, each until ``count`` of the sorted ``acquires`` have come behind it."""
        found = []
        for (start, stop), (next_start, _) in itertools.pairwise([*intervals, (self.steps, self.steps)]):
            last = bisect_left(acquires, stop) + count - 1
            until = acquires[last] + 1 if last < len(acquires) else self.steps
            found.append((start, min(max(stop, until), next_start)))
        return found


@dataclass
class Trace:
    """The calls of one pool, usually in one training step. `Pool.trace` records it. All methods are local.

    Attributes:
        name: Name of the trace.
        events: The calls, in their order.
        align: Alignment of the pool in bytes."""

    name: str
    events: list[TraceEvent] = field(default_factory=list)
    align: int = 512

    def lifetimes(self, slack: Mapping[str, int] | None = None) -> Lifetimes:
        """Returns when each key is live, in positions in ``events``. Local.

        - A lease is live from its acquire to its release, or to the end of the trace. A lease that is live when the trace
          begins is live from position 0.
        - A key that is never acquired in the trace is left out: it keeps its memory.
        - The size of a key is the size of its largest lease.
        - The role of ``"grads/3/1"`` is the part before the first ``/``. Unit and position are the numbers after it. Without
          numbers the unit is the key's place in the order of first acquires, and the position is 0. A trace knows no dtypes.

        Args:
            slack: As in `Pool.plan`.

        Raises:
            ValueError: A trace that no pool can have made, such as a release of a lease that is not live, or two live leases
                of one key; or a bad ``slack``."""
        sizes: dict[str, int] = {}
        intervals: dict[str, list[Interval]] = {}
        changes: list[tuple[int, int]] = []  # of the bytes of unnamed leases
        acquired = {event.key for event in self.events if event.kind == "acquire"}
        for lease in _leases(self.events, "event {}".format):
            key, nbytes = lease.acquire.key, lease.acquire.nbytes
            if not key:
                size = aligned(nbytes, self.align)
                changes += [(lease.start, size), (lease.stop, -size)]
            elif key in acquired:
                sizes[key] = max(sizes.get(key, 0), nbytes)
                intervals.setdefault(key, []).append((lease.start, lease.stop))
        keys = {key: plan_key(key, order) for order, key in enumerate(sizes)}
        unnamed_bytes = max(itertools.accumulate((size for _, size in sorted(changes)), initial=0))
        found = Lifetimes(sizes, intervals, keys, len(self.events), unnamed_bytes)
        return found.with_slack(slack) if slack else found

    def save(self, path: str | Path) -> None:
        """Writes the trace to a file, and replaces the file if it exists. Local.

        Args:
            path: The file. It has one JSON object on each line."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps({HEADER: VERSION, "name": self.name, "align": self.align}) + "\n")
            file.writelines(json.dumps(vars(event)) + "\n" for event in self.events)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads a trace that `save` wrote. Local.

        Args:
            path: The file.

        Raises:
            ValueError: The file is damaged. The message names the file and the record; the first record is 1.
            OSError: The file cannot be read."""

        def place(number: int) -> str:
            return f"{path}, record {number}"

        events = []
        with open(path, "rb") as file:
            name, align = _header(_record(file.readline(), place(1)), place(1))
            for number, line in enumerate(file, 2):
                events.append(_event(_record(line, place(number)), place(number)))
        _leases(events, lambda at: place(at + 2))
        return cls(name, events, align)


@dataclass
class _Lease:
    acquire: TraceEvent
    start: int
    stop: int


def _leases(events: Sequence[TraceEvent], place: Callable[[int], str]) -> list[_Lease]:
    """In the order of the acquires. ValueError with the ``place`` of the first event that cannot be."""
    found: dict[int, _Lease] = {}
    holders: dict[str, int] = {}
    for at, event in enumerate(events):
        if event.kind in ("live", "acquire"):
            if event.lease in found:
                raise ValueError(f"{place(at)}: lease {event.lease} is acquired a second time")
            if event.key and event.key in holders:
                raise ValueError(f"{place(at)}: key {event.key!r} is acquired while lease {holders[event.key]} has it")
            holders[event.key] = event.lease
            found[event.lease] = _Lease(event, at, len(events))
            continue
        lease = found.get(event.lease)
        if lease is None or lease.stop < len(events):
            why = "already released" if lease else "never acquired"
            raise ValueError(f"{place(at)}: {event.kind} of lease {event.lease}, which was {why}")
        if event.kind == "release":
            lease.stop = at
            holders.pop(lease.acquire.key, None)
    return list(found.values())


def plan_key(key: str, order: int) -> PlanKey:
    """What the name of a key says to policies; ``order``: of its first acquire."""
    role, *rest = key.split("/")
    numbers = [int(part) for part in rest if part.isdecimal()]
    return PlanKey(role, numbers[0] if numbers else order, numbers[1] if len(numbers) > 1 else 0, "")


# --- the file ---------------------------------------------------------------------------------------------------------


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{place}: {str(found)[:80]!r}, expected an object")
    return found


def _header(found: dict[str, Any], place: str) -> tuple[str, int]:
    if found.get(HEADER) != VERSION:
        raise ValueError(f"{place}: {HEADER!r} is {found.get(HEADER)!r}, expected {VERSION}")
    name, align = found.get("name"), found.get("align")
    if not isinstance(name, str) or type(align) is not int or align < 1:
        raise ValueError(f"{place}: name {name!r} and align {align!r}, expected text and a positive number")
    return name, align


_TYPES = get_type_hints(TraceEvent)
_LEAST = {"lease": 0, "nbytes": 0, "stream": -1}


def _event(found: dict[str, Any], place: str) -> TraceEvent:
    if found.keys() != _TYPES.keys():
        odd = next(iter(found.keys() ^ _TYPES.keys()))
        raise ValueError(f"{place}: the field {odd!r} is {'unknown' if odd in found else 'missing'}")
    for name, value in found.items():
        if type(value) is not _TYPES[name]:
            raise ValueError(f"{place}: {name} is {value!r}, expected {'text' if _TYPES[name] is str else 'a number'}")
        if name in _LEAST and found[name] < _LEAST[name]:
            raise ValueError(f"{place}: {name} is {value}, expected at least {_LEAST[name]}")
    if found["kind"] not in _KINDS:
        raise ValueError(f"{place}: kind is {found['kind']!r}, expected one of {', '.join(_KINDS)}")
    return TraceEvent(**found)
