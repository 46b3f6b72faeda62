"""Streams and events as Python sees them. The rules themselves are tested in tests/native/test_device.cpp."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest

from bucketwheel.errors import DeviceError
from bucketwheel.native import core
from tests.support.forked_code import run_in_child


def test_waiting_leaves_other_python_threads_running() -> None:
    stream = core.Stream("gil")
    stream.pause(0.3)
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not event.query():
            ticks += 1
            time.sleep(0.001)

    event = stream.record()
    thread = threading.Thread(target=tick)
    thread.start()
    event.synchronize()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert ticks > 5


STREAMS_IN_THREADS = """
import sys, threading
from bucketwheel.native import core

def make():
    for _ in range(150):
        core.Stream("short", -1)

def record(stream):
    for _ in range(8000):
        stream.record()

sys.setswitchinterval(1e-5)
kept = [core.Stream("long", -1) for _ in range(2)]
for _ in range(4):
    threads = [threading.Thread(target=make) for _ in range(3)]
    threads += [threading.Thread(target=record, args=[stream]) for stream in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_streams_may_be_made_in_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STREAMS_IN_THREADS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_wrong_arguments_name_themselves() -> None:
    stream = core.Stream("wrong")
    with pytest.raises(ValueError, match="timeout must be at least 0"):
        stream.synchronize(timeout=-1)
    with pytest.raises(TypeError):
        stream.wait(None)
    with pytest.raises(ValueError, match="recorded with timing"):
        stream.record().elapsed_s(stream.record())


def test_a_closed_stream_refuses() -> None:
    stream = core.Stream("shut")
    stream.pause(0.05)
    event = stream.record()
    stream.close()
    assert event.query()
    with pytest.raises(DeviceError, match="stream 'shut' is closed"):
        stream.record()
    stream.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_can_make_its_own() -> None:
    stream = core.Stream("parent")
    stream.pause(0.5)
    event = stream.record()

    def body() -> None:
        nonlocal stream, event
        for call in (stream.record, stream.synchronize, event.query, event.synchronize):
            with pytest.raises(DeviceError, match="belongs to the parent process"):
                call()
        own = core.Stream("child")
        own.pause(0.001)
        assert own.record().synchronize(timeout=30)
        del stream, event, own
        gc.collect()

    run_in_child(body)
    assert event.synchronize(timeout=30)


def test_the_interpreter_ends_with_streams_at_work() -> None:
    # Kept alive past the interpreter's own cleaning up, like a stream that a cache holds.
    code = (
        "import ctypes, sys; from bucketwheel.native import core; s = core.Stream('late'); s.pause(30); s.pause(30); "
    )
    code += "ctypes.pythonapi.Py_IncRef(ctypes.py_object(s)); sys.exit(7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=False)
    assert done.returncode == 7 and "terminate called" not in done.stderr, done.stderr
