"""NCCL without a GPU: the fake of tests/native/fake_nccl, which the native module loads as BW_NCCL_LIB, with its work in
the streams of the simulated CUDA device. In a rank process too: each calls `install`.

>>> script = install()
>>> script.fake_nccl_fail(b"ncclAllGather", 2, 3)     # the second of the next all-gathers returns 3
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bucketwheel.comm import nccl_library
from tests.native.cmake import built
from tests.support import simulated_cuda

LAUNCH = "fake_cuda_launch_host", "fake_cuda_is_captured"
# What the script's functions take; see fake_nccl.h.
ARGUMENTS = {
    "set_launch": [ctypes.c_void_p, ctypes.c_void_p],
    "fail": [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int],
    "hang": [ctypes.c_uint64],
    "hang_call": [ctypes.c_char_p],
    "release": [],
    "async_error": [ctypes.c_int],
    "null_windows": [ctypes.c_int],
    "count_only": [ctypes.c_int],
    "reset": [],
}
COUNTS = ("hanging_calls", "live_comms", "open_groups", "live_windows", "live_bytes", "max_concurrent")


def build(without: str = "") -> Path:
    """The library; ``without``: "_WITHOUT_OPTIONAL" or "_WITHOUT_ALL_GATHER", its name for calls that older ones lack."""
    return built(f"libnccl{without}.so")


def load(path: Path) -> ctypes.CDLL:
    """The library with the types of its script."""
    library = ctypes.CDLL(str(path))
    for name, arguments in ARGUMENTS.items():
        function = getattr(library, f"fake_nccl_{name}")
        function.argtypes, function.restype = arguments, None
    for name in COUNTS:
        function = getattr(library, f"fake_nccl_{name}")
        function.argtypes, function.restype = [], ctypes.c_uint64
    library.fake_nccl_calls.argtypes, library.fake_nccl_calls.restype = [ctypes.c_char_p], ctypes.c_uint64
    library.fake_nccl_last_config.argtypes = [ctypes.c_char_p]
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    return library


@functools.cache
def install() -> ctypes.CDLL:
    """Makes the fake this process's NCCL, and the simulated CUDA device its CUDA; returns the script.

    Before the native module reads its environment. The version is FAKE_NCCL_VERSION's as it is now; later changes by
    the script do not reach what the native module has decided by it.
    """
    path = build()
    os.environ["BW_NCCL_LIB"] = str(path)
    _, device = simulated_cuda.load()
    library = load(path)
    library.fake_nccl_set_launch(*(ctypes.cast(getattr(device, name), ctypes.c_void_p) for name in LAUNCH))
    if (info := nccl_library.info()).path != str(path):
        raise RuntimeError(
            f"too late: the native module uses {info.path} ({info.found}); call simulated_nccl.install() before anything "
            "of bucketwheel is used, in a process of its own"
        )
    return library


@contextmanager
def simulated() -> Iterator[ctypes.CDLL]:
    """Inside, CPU tensors pose as CUDA's and NCCL is the fake, which is as new; yields its script."""
    script = install()
    script.fake_nccl_reset()
    with simulated_cuda.posing():
        yield script


@contextmanager
def counting() -> Iterator[None]:
    """Inside, NCCL and the device check and count what they are called with and do none of it: what a call costs is the
    library's own time. Outputs are left as they are; nothing may be in flight at either end."""
    script, (_, device) = install(), simulated_cuda.load()
    script.fake_nccl_count_only(1)
    device.fake_cuda_drop_work(1)
    try:
        yield
    finally:
        device.fake_cuda_drop_work(0)
        script.fake_nccl_count_only(0)
