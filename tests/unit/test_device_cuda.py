"""The CUDA device over its table, simulated: streams, events, uploads, capture; and calls that are counted, fail and are late."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bucketwheel.device import CPU, device_index, index_of, upload
from bucketwheel.errors import CaptureError, DeviceError
from bucketwheel.native import core
from tests.support.counted_cuda import plan_cuda_fault
from tests.support.simulated_cuda import Calls, Graph, posing


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    with posing(delays=3) as library:
        yield library


def held_back(stream: Any, seconds: float = 0.05) -> Any:
    """An event that completes after a pause in ``stream``."""
    stream.pause(seconds)
    return stream.record()


def test_where_tensors_are() -> None:
    assert index_of(torch.zeros(1)) == 0
    assert device_index("cuda") == device_index("cpu") == 0  # posing
    core.set_posing(False)
    assert index_of(torch.zeros(1)) == device_index(None) == CPU
    core.set_posing(True)
    with pytest.raises(ValueError, match="cpu and cuda are supported"):
        index_of(torch.zeros(1, device="meta"))


def test_events_complete_in_order_and_carry_times() -> None:
    stream = core.Stream("work", 0)
    first = stream.record(timing=True)
    stream.pause(0.02)
    last = stream.record(timing=True)
    assert not last.query()
    assert last.synchronize(10.0)
    assert last.query() and first.query()
    assert 0.015 < last.elapsed_s(first) < 5.0
    with pytest.raises(ValueError, match="timing"):
        stream.record().elapsed_s(first)


def test_events_are_recycled() -> None:
    stream = core.Stream("work", 0)
    for _ in range(3):
        stream.record().synchronize()
    calls = Calls()
    for _ in range(50):
        stream.record().synchronize()
    assert "event_create" not in calls.since()
    assert calls.since()["event_record"] == 50


def test_an_event_outlives_its_stream_and_a_closed_stream_refuses() -> None:
    stream = core.Stream("work", 0)
    event = held_back(stream, 0.02)
    stream.close()
    stream.close()
    assert event.synchronize(10.0)
    with pytest.raises(DeviceError, match="'work' is closed"):
        stream.record()


def test_uploads_take_the_bytes_at_once_and_stop_allocating() -> None:
    to = torch.zeros(1000, dtype=torch.int64)
    for start in range(4):
        upload(to, torch.arange(start, start + 1000).numpy().tobytes())
    calls = Calls()
    for start in range(20):
        upload(to, torch.arange(start, start + 1000).numpy().tobytes())
        assert int(to[0]) == start
    calls.expect_free_running()
    assert calls.since()["memcpy_async"] == 20
    with pytest.raises(ValueError, match="8000 bytes|of 16 bytes"):
        upload(to, b"0123456789abcdef")


def test_uploads_in_a_captured_graph_are_repeated_by_replays(library: Any) -> None:
    to = torch.zeros(8, dtype=torch.uint8)
    graph = Graph(library)
    with graph:
        upload(to, b"captured")
    assert bytes(to.tolist()) == bytes(8), "capturing must not run anything"
    for _ in range(3):
        upload(to, b"whatever")  # takes other staging memory
        graph.replay()
        assert bytes(to.tolist()) == b"captured"


def test_captured_events_have_no_completion_outside(library: Any) -> None:
    current = core.current_stream(0)
    with Graph(library):
        event = current.record()
    for ask in (event.query, event.synchronize):
        with pytest.raises(CaptureError, match="no completion outside the graph"):
            ask()


def test_a_captured_stream_waits_for_nothing_outside(library: Any) -> None:
    """Not even for what is over, with which CUDA would end the capture; what is not over is an error of ours, which leaves
    it."""
    current, other = core.current_stream(0), core.Stream("other", 0)
    over = other.record()
    assert over.synchronize(10.0)
    other.pause(0.2)
    running = other.record()
    calls = Calls()
    with Graph(library):
        current.wait(over)
        with pytest.raises(CaptureError, match="is not done: synchronize before the capture"):
            current.wait(running)
        assert "stream_wait_event" not in calls.since()
        other.wait(current.record())
        inside = other.record()
        current.wait(inside)
        assert calls.since()["stream_wait_event"] == 2
    with pytest.raises(RuntimeError, match="due to a previous error during capture"), Graph(library):
        with pytest.raises(DeviceError, match="dependency created on uncaptured work"):
            current.wait(inside)  # of another graph


def test_calls_that_fail_say_which_and_why() -> None:
    stream = core.Stream("work", 0)
    plan_cuda_fault("event_record", countdown=2, error=400)
    stream.record()
    with pytest.raises(DeviceError, match="CUDA call event_record failed: invalid resource handle \\(400\\)"):
        stream.record()
    assert stream.record().synchronize(10.0), "one fault is one failure"


def test_devices_that_are_not_there_are_named() -> None:
    with pytest.raises(DeviceError, match="cuda:3 does not exist: there are 1 CUDA devices"):
        core.Stream("work", 3)


def test_a_table_of_another_version_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="not a CUDA table|incompatible"):
        core.install_cuda(object())


ENDING = """
import ctypes
from tests.support.simulated_cuda import load
from bucketwheel.native import core

module, _ = load()
api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
name = b"bucketwheel.cuda_api"
abort = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p)
table = api.PyCapsule_New(api.PyCapsule_GetPointer(module.api, name), name, abort)
core.install_cuda(table)
core.install_cuda(table)
print("installed", flush=True)
"""


def test_the_table_is_not_freed_when_the_process_ends() -> None:
    """It is used to the very end, and after the interpreter has ended nothing of Python may be freed."""
    ended = subprocess.run([sys.executable, "-c", ENDING], check=False, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ("installed\n", 0), ended.stderr
