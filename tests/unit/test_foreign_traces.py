"""Traces from memory snapshots of torch and from lists of intervals, and what is wrong with bad ones."""

from __future__ import annotations

import pickle
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


def test_one_kind_of_free_may_be_left_out_and_one_device_is_chosen(tmp_path: Path) -> None:
    """``skip_actions`` leaves events out."""
    device = TinyAllocator(device=1, devices=3)
    device.free(device.alloc(600))
    device.free(device.alloc(100))
    snapshot = device.snapshot()
    path = write(tmp_path / "step.pickle", snapshot)
    both = from_snapshot(path).events
    assert from_snapshot(path, 1).events == both and len(both) == 4
    for skipped in ("free_requested", "free_completed"):
        entries = [entry for entry in device.entries if entry["action"] != skipped]
        write(path, {**snapshot, "device_traces": [[], entries]})
        assert from_snapshot(path).events == both
    write(path, {**snapshot, "device_traces": [[], device.entries, device.entries]})
    with pytest.raises(ValueError, match=r"several devices have events: choose one of \[1, 2\] with --device"):
        from_snapshot(path)
    with pytest.raises(ValueError, match="_record_memory_history.. was not called"):
        from_snapshot(write(path, TinyAllocator().snapshot()))


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [2, 5])
def test_nothing_of_a_pickle_is_run(tmp_path: Path, protocol: int) -> None:
    sign = tmp_path / "was run"
    path = write(tmp_path / "bad.pickle", {**TinyAllocator().snapshot(), "segments": [Hostile(sign)]}, protocol)
    with pytest.raises(ValueError, match=f"{path}: .*it names .*, which a snapshot cannot contain"):
        from_snapshot(path)
    assert not sign.exists()
    pickle.loads(path.read_bytes())  # it is armed
    assert sign.exists()


ALLOC = {"action": "alloc", "addr": 4096, "size": 8, "stream": 0, "frames": []}


@pytest.mark.parametrize(
    ("entries", "segments", "message"),
    [
        (None, [], "device_traces is 'None'"),
        ([ALLOC, 7], [], "entry 1 of device 0: action is 'None'"),
        ([{**ALLOC, "size": -1}], [], "entry 0 of device 0: size is -1$"),
        ([{**ALLOC, "size": 1 << 62}], [], "entry 0 of device 0: size is 46116"),
        ([ALLOC, ALLOC], [], "entry 1 .*alloc at 0x1000, but block/0 there is not freed"),
        ([{**ALLOC, "frames": [{}]}], [], "entry 0 .* filename is 'None'"),
        ([ALLOC], [{"device": 0}], "segment 0: address is 'None'"),
    ],
)
def test_a_bad_snapshot(entries: Any, segments: Any, message: str, tmp_path: Path) -> None:
    snapshot = {"device_traces": [entries], "segments": segments}
    path = write(tmp_path / "bad.pickle", [1, 2] if entries is None else snapshot)
    with pytest.raises(ValueError, match=f"^{path}[:,] .*{message}"):
        from_snapshot(path)


def test_a_damaged_pickle(tmp_path: Path) -> None:
    whole = pickle.dumps(TinyAllocator().snapshot())
    path = tmp_path / "bad.pickle"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^{path}: not the pickle of a memory snapshot: "):
            from_snapshot(path)


# --- lists of intervals -----------------------------------------------------------------------------------------------


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "intervals.csv"
    path.write_text(text, errors="surrogateescape")
    return path


def test_a_table_with_what_policies_go_by(tmp_path: Path) -> None:
    now_ns = 1_764_197_000_000_000_000  # since 1970
    text = "\ufeffdtype,unit,key,comment,nbytes,start,stop\r\nbf16,7,weight/0,hm,1,5,6\r\nbf16,7,weight/0,,1,2,3\r\n"
    text += f'fp32,0,"a,""b""",,9,0,{now_ns}\r\n'
    assert from_csv(table(tmp_path, text)) == Lifetimes(
        {"weight/0": 1, 'a,"b"': 9},
        {"weight/0": [(2, 3), (5, 6)], 'a,"b"': [(0, now_ns)]},
        {"weight/0": PlanKey("weight", 7, 0, "bf16"), 'a,"b"': PlanKey('a,"b"', 0, 0, "fp32")},
        now_ns,
    )
    found = from_csv(table(tmp_path, "key,nbytes,start,stop\nweight/0,1,0,2\nx,1,0,2\n"))
    assert found.keys == {"weight/0": PlanKey("weight", 0, 0, ""), "x": PlanKey("x", 1, 0, "")}
    found = from_csv(table(tmp_path, "key,nbytes,start,stop,role,position\nweight/0,1,0,2,grad,3\n"))
    assert found.keys == {"weight/0": PlanKey("grad", 0, 3, "")}


@pytest.mark.parametrize(
    ("rows", "number", "message"),
    [
        ("", 1, r"no column key, nbytes, start, stop in \[\]"),
        ("a,1,0,1\nb,1,0\n", 3, "3 values for 4 columns"),
        ("a,1,0,1\nb,1e9,0,1\n", 3, "nbytes is '1e9', expected a number"),
        (f"a,{'9' * 5000},0,1\n", 2, "nbytes is '9{80}', expected a number"),
        (f"a,{1 << 50},0,1\n", 2, "1125899906842624 bytes in steps"),
        ("a,1,0,1\nb,1,3,3\n", 3, r"1 bytes in steps \(3, 3\) of key 'b'"),
        ("a,1,0,1\na,2,3,4\n", 3, "2 bytes and .*; key 'a' had 1 and"),
        ("a,1,5,9\nb,1,0,1\na,1,2,6\n", 2, r"steps \(5, 9\) of key 'a' overlap \(2, 6\) of record 4"),
        ('a,1,0,1\n"b"c,1,0,1\n', 3, "expected after"),
        ("\udcff,1,0,1\n", "[12]", "utf-8"),
    ],
)
def test_a_bad_table(rows: str, number: int | str, message: str, tmp_path: Path) -> None:
    path = table(tmp_path, "key,nbytes,start,stop\n" + rows if rows else "")
    with pytest.raises(ValueError, match=f"^{path}, record {number}: .*{message}"):
        from_csv(path)
