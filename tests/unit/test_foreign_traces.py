"""Traces from memory snapshots of torch and from lists of intervals, and what is wrong with bad ones."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from bucketwheel.pool.foreign_traces import from_csv, from_snapshot
from bucketwheel.pool.placement import PlanKey
from bucketwheel.pool.trace import Lifetimes, Trace
from tests.unit.tiny_allocator import SEGMENT, TinyAllocator

TRAINING = [
    {"name": "torch::unwind::unwind()", "filename": "??", "line": 0},
    {"name": "forward", "filename": "/env/site-packages/torch/nn/modules/linear.py", "line": 125},
    {"name": "forward", "filename": "/code/model.py", "line": 31},
    {"name": "main", "filename": "/code/train.py", "line": 7},
]


def write(path: Path, snapshot: Any, protocol: int | None = None) -> Path:
    path.write_bytes(pickle.dumps(snapshot, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])  # 2 is what torch's C++ code writes
def test_a_snapshot(tmp_path: Path, protocol: int) -> None:
    device = TinyAllocator()
    device.record("segment_alloc", addr=SEGMENT, size=2 << 20, stream=0)
    first = device.alloc(1000, frames=TRAINING)
    second = device.alloc(5000, stream=0x7F0000, frames=TRAINING[:2])
    device.free(first)
    third = device.alloc(700, frames=[])
    device.free_requested(second)
    device.alloc(100)  # not at the address of the second, which is not free yet
    device.record("oom", device_free=1 << 20, size=1 << 40, stream=0)
    device.free_completed(second)
    device.free(third)
    trace = from_snapshot(write(tmp_path / "step.pickle", device.snapshot(), protocol))
    assert [(event.kind, event.key, event.nbytes, event.stream) for event in trace.events] == [
        ("acquire", "block/0", 1000, 0),
        ("acquire", "block/1", 5000, 1),
        ("release", "block/0", 1000, 0),
        ("acquire", "block/2", 700, 0),
        ("release", "block/1", 5000, 1),
        ("acquire", "block/3", 100, 0),
        ("release", "block/2", 700, 0),
    ]
    assert [event.where for event in trace.events if event.kind == "acquire"] == [
        "model.py:31 in forward",
        "??:0 in torch::unwind::unwind()",
        "",
        "",
    ]
    assert (trace.name, trace.align) == ("step.pickle", 512)
    assert trace.lifetimes().intervals["block/1"] == [(1, 4)]
    trace.save(tmp_path / "saved.jsonl")
    assert Trace.load(tmp_path / "saved.jsonl") == trace


def test_what_was_live_at_the_begin(tmp_path: Path) -> None:
    device = TinyAllocator()
    weight, old, older, pending = (device.alloc(512 * number - 12) for number in (1, 2, 3, 4))
    device.free_requested(pending)
    device.entries.clear()  # as a full ring of events does
    device.free_completed(pending)
    device.free(older)
    new = device.alloc(512 * 3)
    assert (weight, older) == (SEGMENT, new)  # the same address
    device.free(old)
    device.free_requested(new)
    found = from_snapshot(write(tmp_path / "step.pickle", device.snapshot())).lifetimes()
    # Of pending, older, old, weight; then of new. Acquires 0 to 3 are of what was live.
    assert list(found.sizes.values()) == [2036, 1524, 1012, 500, 1536]
    assert list(found.intervals.values()) == [[(0, 4)], [(1, 5)], [(2, 7)], [(3, 9)], [(6, 8)]]


def test_a_snapshot_of_the_profiler(tmp_path: Path) -> None:
    """torch makes one of what happened on the CPU. Its blocks are those that our trace says to be live."""
    to_snapshot = getattr(_memory_viz, "_profile_to_snapshot", None)
    if to_snapshot is None:
        pytest.skip("this torch makes no snapshots of profiles")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profile:
        model(torch.randn(8, 64)).square().mean().backward()
    snapshot = to_snapshot(profile)
    trace = from_snapshot(write(tmp_path / "profile.pickle", snapshot))
    released = {event.lease for event in trace.events if event.kind == "release"}
    kept = [event.nbytes for event in trace.events if event.kind == "acquire" and event.lease not in released]
    (segment,) = snapshot["segments"]
    assert sorted(kept) == sorted(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
    assert len(kept) > 6 and len(released) > 6


def test_frees_without_a_request(tmp_path: Path) -> None:
    """``skip_actions`` may leave one kind out."""
    device = TinyAllocator()
    address = device.alloc(600)
    device.free(address)
    device.free(device.alloc(100))
    snapshot = device.snapshot()
    both = from_snapshot(write(tmp_path / "both.pickle", snapshot)).events
    for skipped in ("free_requested", "free_completed"):
        entries = [entry for entry in snapshot["device_traces"][0] if entry["action"] != skipped]
        path = write(tmp_path / "one.pickle", {**snapshot, "device_traces": [entries]})
        assert from_snapshot(path).events == both


def test_devices(tmp_path: Path) -> None:
    device = TinyAllocator(device=1, devices=3)
    kept = device.alloc(512)
    device.entries.clear()
    device.free(device.alloc(600))
    snapshot = device.snapshot()
    path = write(tmp_path / "one.pickle", snapshot)
    assert from_snapshot(path) == from_snapshot(path, 1)
    assert sum(event.kind == "acquire" for event in from_snapshot(path).events) == 2 and kept
    with pytest.raises(ValueError, match=r"one.pickle: the events of device 0: choose one of \[1\] with --device"):
        from_snapshot(path, 0)
    snapshot["device_traces"][2] = snapshot["device_traces"][1]
    path = write(tmp_path / "two.pickle", snapshot)
    with pytest.raises(ValueError, match=r"several devices have events: choose one of \[1, 2\] with --device"):
        from_snapshot(path)
    # The segments of the other device are not of this trace.
    assert sum(event.kind == "acquire" for event in from_snapshot(path, 2).events) == 1
    with pytest.raises(ValueError, match="_record_memory_history.. was not called"):
        from_snapshot(write(tmp_path / "none.pickle", TinyAllocator().snapshot()))


class Hostile:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize("protocol", [2, 5])
def test_nothing_of_a_pickle_is_run(tmp_path: Path, protocol: int) -> None:
    sign = tmp_path / "was run"
    for function, argument in ((os.system, f"touch '{sign}'"), (touch, str(sign))):
        snapshot = {**TinyAllocator().snapshot(), "segments": [Hostile(function, argument)]}
        path = write(tmp_path / "bad.pickle", snapshot, protocol)
        with pytest.raises(ValueError, match=f"{path}: .*it names .*{function.__name__}, which no snapshot holds"):
            from_snapshot(path)
        assert not sign.exists()
        pickle.loads(path.read_bytes())  # it is armed
        sign.unlink()


ALLOC = {"action": "alloc", "addr": 4096, "size": 8, "stream": 0, "frames": []}

# Entries, segments, and the error.
BAD_SNAPSHOTS: dict[str, tuple[Any, Any, str]] = {
    "another value": (None, [], "device_traces is 'None'"),
    "no segments": ([ALLOC], None, "segments is 'None'"),
    "no dict": ([ALLOC, 7], [], "entry 1 of device 0: action is 'None'"),
    "no size": ([{**ALLOC, "size": None}], [], "entry 0 of device 0: size is 'None'"),
    "size": ([{**ALLOC, "size": -1}], [], "entry 0 of device 0: size is -1$"),
    "huge": ([{**ALLOC, "size": 1 << 62}], [], "entry 0 of device 0: size is 46116"),
    "address": ([{**ALLOC, "addr": "x"}], [], "entry 0 of device 0: addr is 'x'"),
    "twice": ([ALLOC, ALLOC], [], "entry 1 .*alloc at 0x1000, where block/0 has not"),
    "frames": ([{**ALLOC, "frames": 1}], [], "entry 0 of device 0: frames is '1'"),
    "frame": ([{**ALLOC, "frames": [{}]}], [], "entry 0 .* filename is 'None'"),
    "segment": ([ALLOC], [{"device": 0}], "segment 0: address is 'None'"),
}


@pytest.mark.parametrize("name", BAD_SNAPSHOTS)
def test_a_bad_snapshot(name: str, tmp_path: Path) -> None:
    entries, segments, message = BAD_SNAPSHOTS[name]
    snapshot = {"device_traces": [entries], "segments": segments}
    path = write(tmp_path / "bad.pickle", [1, 2] if entries is None else snapshot)
    with pytest.raises(ValueError, match=f"^{path}[:,] .*{message}"):
        from_snapshot(path)


def test_a_damaged_pickle(tmp_path: Path) -> None:
    """Wherever it is cut, or a byte differs: an error that names it, or what can be read as a snapshot."""
    device = TinyAllocator()
    device.free(device.alloc(600, frames=TRAINING))
    whole = pickle.dumps(device.snapshot())
    path = tmp_path / "bad.pickle"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^{path}: not the pickle of a memory snapshot: "):
            from_snapshot(path)
    chosen = random.Random(1)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[chosen.randrange(len(whole))] = ord(chosen.choice("(.}{]eusRb\x00\x80"))
        path.write_bytes(damaged)
        try:
            from_snapshot(path)
        except ValueError as error:
            assert str(error).startswith(str(path))


# --- lists of intervals -----------------------------------------------------------------------------------------------


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "intervals.csv"
    path.write_text(text, errors="surrogateescape")
    return path


def test_a_table(tmp_path: Path) -> None:
    now_ns = 1_764_197_000_000_000_000  # since 1970
    path = table(tmp_path, f"key,nbytes,start,stop\nweight/0,4096,5,6\nweight/0,4096,0,2\nscratch,100,1,{now_ns}\n")
    assert from_csv(path) == Lifetimes(
        {"weight/0": 4096, "scratch": 100},
        {"weight/0": [(0, 2), (5, 6)], "scratch": [(1, now_ns)]},
        {"weight/0": PlanKey("weight", 0, 0, ""), "scratch": PlanKey("scratch", 1, 0, "")},
        None,
        now_ns,
    )


def test_a_table_says_what_policies_go_by(tmp_path: Path) -> None:
    text = "\ufeffdtype,unit,key,comment,nbytes,start,stop\r\nbf16,7,weight/0,hm,1,0,2\r\nbf16,7,weight/0,,1,2,3\r\n"
    found = from_csv(table(tmp_path, text + 'fp32,0,"a,""b""",,1,0,1\r\n'))
    assert found.keys == {"weight/0": PlanKey("weight", 7, 0, "bf16"), 'a,"b"': PlanKey('a,"b"', 0, 0, "fp32")}
    found = from_csv(table(tmp_path, "key,nbytes,start,stop,role,position\nweight/0,1,0,2,grad,3\n"))
    assert found.keys == {"weight/0": PlanKey("grad", 0, 3, "")}


def test_no_rows(tmp_path: Path) -> None:
    assert from_csv(table(tmp_path, "key,nbytes,start,stop\n")) == Lifetimes({}, {}, {}, None, 0)


BAD_TABLES = {
    "empty": ("", 1, r"no column key, nbytes, start, stop in \[\]"),
    "columns": ("key,nbytes,begin,stop\n", 1, "no column start in"),
    "short": ("a,1,0,1\nb,1,0\n", 3, "3 values for 4 columns"),
    "long": ("a,1,0,1,5\n", 2, "5 values for 4 columns"),
    "text": ("a,1,0,1\nb,1e9,0,1\n", 3, "nbytes is '1e9', expected a number"),
    "negative": ("a,-1,0,1\n", 2, "nbytes is '-1', expected a number"),
    "long number": (f"a,{'9' * 5000},0,1\n", 2, "nbytes is '9{80}', expected a number"),
    "huge": (f"a,{1 << 50},0,1\n", 2, "1125899906842624 bytes in steps"),
    "empty interval": ("a,1,0,1\nb,1,3,3\n", 3, r"1 bytes in steps \(3, 3\) of key 'b'"),
    "another size": ("a,1,0,1\na,2,3,4\n", 3, "2 bytes and .*; key 'a' had 1 and"),
    "again": ("a,1,0,1\na,1,0,1\n", 3, r"steps \(0, 1\) of key 'a' meet .* of record 2"),
    "meet": ("a,1,5,9\nb,1,0,1\na,1,2,6\n", 2, r"steps \(5, 9\) of key 'a' meet \(2, 6\) of record 4"),
    "a quote": ('a,1,0,1\n"b"c,1,0,1\n', 3, "expected after"),
    "no text": ("\udcff,1,0,1\n", "[12]", "utf-8"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_bad_table(name: str, tmp_path: Path) -> None:
    rows, number, message = BAD_TABLES[name]
    path = table(tmp_path, rows if "key" in rows or not rows else "key,nbytes,start,stop\n" + rows)
    with pytest.raises(ValueError, match=f"^{path}, record {number}: .*{message}"):
        from_csv(path)


def test_the_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/traces/shapes.py writes what `from_csv` reads."""
    from benchmarks.traces import shapes

    monkeypatch.setattr(shapes, "all_cases", lambda: [case := shapes.case_of("alternating", 1, 4)] * bool(case))
    monkeypatch.setattr("sys.argv", ["shapes.py", str(tmp_path)])
    shapes.main()
    (path,) = tmp_path.glob("*.csv")
    found, case = from_csv(path), shapes.case_of("alternating", 1, 4)
    assert found.sizes == case.sizes and found.intervals == {key: sorted(of) for key, of in case.intervals.items()}
    assert found.keys == case.keys
