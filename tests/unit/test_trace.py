"""Traces: when keys are live, the file, and what is wrong with a bad one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketwheel.pool.placement import PlanKey, place
from bucketwheel.pool.trace import Lifetimes, Trace, TraceEvent


class Calls:
    """Writes a trace as a pool would."""

    def __init__(self, name: str = "train", align: int = 512) -> None:
        self.trace = Trace(name, align=align)
        self._live: dict[str, TraceEvent] = {}
        self._leases = 0

    def acquire(self, key: str, nbytes: int = 1024, stream: int = -1, name: str | None = None) -> Calls:
        """``name`` tells unnamed leases apart."""
        return self._add(TraceEvent("acquire", self._leases, key, nbytes, stream, "step.py:3 in step"), name or key)

    def use(self, key: str, stream: int) -> Calls:
        return self._again("use", self._live[key], stream)

    def release(self, key: str, stream: int = -1) -> Calls:
        return self._again("release", self._live.pop(key), stream)

    def _add(self, event: TraceEvent, name: str) -> Calls:
        self._live[name] = event
        self._leases += 1
        self.trace.events.append(event)
        return self

    def _again(self, kind: str, of: TraceEvent, stream: int) -> Calls:
        self.trace.events.append(TraceEvent(kind, of.lease, of.key, of.nbytes, stream))
        return self


def test_a_step() -> None:
    calls = Calls().acquire("weight/0").acquire("weight/1", 2048).release("weight/0").acquire("grad/1/2")
    found = calls.release("weight/1").acquire("weight/0", 4096).acquire("scratch").trace.lifetimes()
    assert found.intervals == {
        "weight/0": [(0, 2), (5, 7)],
        "weight/1": [(1, 4)],
        "grad/1/2": [(3, 7)],
        "scratch": [(6, 7)],
    }
    assert found.sizes == {"weight/0": 4096, "weight/1": 2048, "grad/1/2": 1024, "scratch": 1024}
    assert list(found.sizes) == list(found.intervals) == list(found.keys)
    assert found.keys["weight/1"] == PlanKey("weight", 1, 0, "")
    assert found.keys["grad/1/2"] == PlanKey("grad", 1, 2, "")
    assert found.keys["scratch"] == PlanKey("scratch", 3, 0, "")
    assert (found.steps, found.unnamed_bytes) == (7, 0)
    assert place(found.sizes, found.intervals, keys=found.keys).load_bytes == 4096 + 2 * 1024


def test_an_empty_trace() -> None:
    assert Trace("none").lifetimes() == Lifetimes({}, {}, {}, 0)


def test_live_at_begin_and_end() -> None:
    """What the pool had before the trace conflicts with all, until it is released."""
    calls = Calls().acquire("old").acquire("older").acquire("new").release("older").acquire("next")
    found = calls.release("old").trace.lifetimes()
    assert found.intervals == {"old": [(0, 5)], "older": [(1, 3)], "new": [(2, 6)], "next": [(4, 6)]}
    live_from_0 = {**found.intervals, "older": [(0, 3)], "new": [(0, 6)]}
    loads = [place(found.sizes, which).load_bytes for which in (found.intervals, live_from_0)]
    assert loads == [3 * 1024] * 2


def test_unnamed_leases() -> None:
    calls = Calls(align=512).acquire("", 100, name="1").acquire("", 600, name="2").acquire("a").release("1")
    found = calls.acquire("", 1, name="3").release("2").release("a").trace.lifetimes()
    assert found.sizes == {"a": 1024}
    assert found.unnamed_bytes == 512 + 1024


def test_slack() -> None:
    calls = Calls()
    for unit in range(4):
        calls.acquire(f"weight/{unit}").acquire(f"grad/{unit}").release(f"weight/{unit}").release(f"grad/{unit}")
    trace = calls.acquire("weight/0").release("weight/0").trace
    plain = trace.lifetimes()
    assert plain.intervals["weight/0"] == [(0, 2), (16, 17)] and plain.intervals["weight/3"] == [(12, 14)]
    assert trace.lifetimes({}) == trace.lifetimes({"weight": 0}) == plain
    one, three, many = (trace.lifetimes({"weight": count}).intervals for count in (1, 3, 99))
    assert one["weight/0"] == [(0, 5), (16, 18)] and one["weight/2"] == [(8, 13)] and one["weight/3"] == [(12, 17)]
    assert three["weight/0"] == [(0, 13), (16, 18)] and three["weight/3"] == [(12, 18)]
    assert many["weight/0"] == [(0, 16), (16, 18)] and many["weight/1"] == [(4, 18)]
    assert {key: one[key] for key in one if "grad" in key} == {
        key: plain.intervals[key] for key in one if "grad" in key
    }


def test_slack_is_the_number_of_buffers_more() -> None:
    calls = Calls()
    for unit in range(6):
        calls.acquire(f"weight/{unit}").release(f"weight/{unit}")
    totals = []
    for count in range(4):
        found = calls.trace.lifetimes({"weight": count})
        totals.append(place(found.sizes, found.intervals).total_bytes)
    assert totals == [1024, 2048, 3072, 4096]


@pytest.mark.parametrize(
    ("slack", "message"), [({"grad": 1}, "'grad'; the roles are weight$"), ({"weight": -1}, "slack of -1 ")]
)
def test_bad_slack(slack: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Calls().acquire("weight/0").trace.lifetimes(slack)


def random_trace(chosen: random.Random) -> Trace:
    calls = Calls("step é\n\u2028", align=chosen.choice((64, 512)))
    live: list[str] = []
    for number in range(chosen.randrange(40)):
        key = f"{chosen.choice('ab')}/{chosen.randrange(5)}"
        if key not in live and chosen.random() < 0.5:
            calls.acquire(key, chosen.choice((0, 1, 512, 1000)), chosen.randrange(-1, 3))
            live.append(key)
        elif chosen.random() < 0.2:
            calls.acquire("", chosen.randrange(2000), name=(name := f"unnamed {number}"))
            live.append(name)
        elif live:
            calls.use(chosen.choice(live), chosen.randrange(3))
            calls.release(live.pop(chosen.randrange(len(live))), chosen.randrange(3))
    return calls.trace


@given(chosen=st.randoms())
@settings(deadline=None, derandomize=True, database=None)
def test_random_traces(chosen: random.Random, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The lifetimes are those of a simple replay, and the file has all."""
    trace = random_trace(chosen)
    found = trace.lifetimes()
    live: dict[int, TraceEvent] = {}
    unnamed = [0]
    for at, event in enumerate(trace.events):
        if event.kind == "acquire":
            live[event.lease] = event
        elif event.kind == "release":
            del live[event.lease]
        named = {one.key: one.nbytes for one in live.values() if one.key}
        assert named.keys() == {key for key, of in found.intervals.items() if any(a <= at < b for a, b in of)}
        assert all(found.sizes[key] >= nbytes for key, nbytes in named.items())
        unnamed.append(sum(-(-one.nbytes // trace.align) * trace.align for one in live.values() if not one.key))
    assert found.unnamed_bytes == max(unnamed)
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    trace.save(path)
    assert Trace.load(path) == trace


HEADER = {"bucketwheel_trace": 1, "name": "train", "align": 512}
ACQUIRE = {"kind": "acquire", "lease": 0, "key": "a", "nbytes": 8, "stream": 0, "where": ""}
RELEASE = {**ACQUIRE, "kind": "release"}

BAD_FILES = {
    "empty": ([""], 1, "not JSON"),
    "version": ([{**HEADER, "bucketwheel_trace": 2}], 1, "'bucketwheel_trace' is 2, expected 1"),
    "no header": ([ACQUIRE], 1, "'bucketwheel_trace' is None, expected 1"),
    "align": ([{**HEADER, "align": 0}], 1, "align 0, expected"),
    "name": ([{**HEADER, "name": 5}], 1, "name 5 and"),
    "cut short": ([HEADER, json.dumps(ACQUIRE)[:-9]], 2, "not JSON"),
    "not text": ([HEADER, b"\xff\xfe"], 2, "not JSON"),
    "blank": ([HEADER, "", ACQUIRE], 2, "not JSON"),
    "deep": ([HEADER, "[" * 100_000], 2, "not JSON"),
    "a list": ([HEADER, ACQUIRE, [1, 2]], 3, r"'\[1, 2\]', expected an object"),
    "kind": ([HEADER, {**ACQUIRE, "kind": "free"}], 2, "kind is 'free', expected one of live, acquire, use, release"),
    "negative size": ([HEADER, {**ACQUIRE, "nbytes": -1}], 2, "nbytes is -1, expected at least 0"),
    "stream": ([HEADER, {**ACQUIRE, "stream": -2}], 2, "stream is -2"),
    "a number as text": ([HEADER, {**ACQUIRE, "nbytes": "8"}], 2, "nbytes is '8', expected a number"),
    "a truth": ([HEADER, {**ACQUIRE, "lease": True}], 2, "lease is True, expected a number"),
    "a key that is no text": ([HEADER, {**ACQUIRE, "key": None}], 2, "key is None, expected text"),
    "unknown field": ([HEADER, {**ACQUIRE, "color": 1}], 2, "the field 'color' is unknown"),
    "missing field": ([HEADER, {**ACQUIRE}, {"kind": "use"}], 3, "the field '.*' is missing"),
    "never acquired": ([HEADER, ACQUIRE, {**RELEASE, "lease": 4}], 3, "release of lease 4, which was never acquired"),
    "twice": ([HEADER, ACQUIRE, RELEASE, RELEASE], 4, "release of lease 0, which was already released"),
    "used late": (
        [HEADER, ACQUIRE, RELEASE, {**ACQUIRE, "kind": "use"}],
        4,
        "use of lease 0, which was already released",
    ),
    "a number again": ([HEADER, ACQUIRE, RELEASE, ACQUIRE], 4, "lease 0 is acquired a second time"),
    "busy": ([HEADER, ACQUIRE, {**ACQUIRE, "lease": 1}], 3, "key 'a' is acquired while lease 0 has it"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file(name: str, tmp_path: Path) -> None:
    records, number, message = BAD_FILES[name]

    def line(record: Any) -> bytes:
        text = record if isinstance(record, (bytes, str)) else json.dumps(record)
        return (text if isinstance(text, bytes) else text.encode()) + b"\n"

    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(map(line, records)))
    with pytest.raises(ValueError, match=f"{path}, record {number}: .*{message}"):
        Trace.load(path)


def test_a_trace_that_no_pool_can_have_made() -> None:
    trace = Calls().acquire("a").trace
    trace.events.append(TraceEvent("acquire", 1, "a", 8, -1))
    with pytest.raises(ValueError, match="^event 1: key 'a' is acquired while lease 0 has it"):
        trace.lifetimes()
