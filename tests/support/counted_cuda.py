"""Counts the calls of a CUDA table, and makes one fail or wait: tests/native/counted_cuda.h around it.

>>> install(counted(module.api))
>>> plan_cuda_fault("malloc_device", countdown=2, error=2)  # the second from here on
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from bucketwheel.native.toolchain import find_compiler

__all__ = ["clear_cuda_faults", "counted", "cuda_calls", "plan_cuda_fault", "wrapped"]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    ROOT / "tests/native/counted_cuda.cpp",
    ROOT / "tests/native/counted_cuda.h",
    ROOT / "csrc/device/cuda_api.h",
]
CAPSULE = b"bucketwheel.cuda_api"


def build() -> Path:
    """The library, compiled where its sources changed."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    built = ROOT / "build" / f"counted_cuda-{digest}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/native'}"]
        command = [*find_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", *includes, str(SOURCES[0])]
        subprocess.run([*command, "-o", str(unfinished)], check=True, timeout=120)
        unfinished.rename(built)
    return built


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.counted_cuda_name.argtypes, library.counted_cuda_name.restype = [ctypes.c_size_t], ctypes.c_char_p
    library.counted_cuda_calls.argtypes, library.counted_cuda_calls.restype = [ctypes.c_size_t], ctypes.c_uint64
    library.counted_cuda_plan.argtypes = [ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_int64]
    return library


@functools.cache
def _names() -> dict[str, int]:
    names: dict[str, int] = {}
    while (name := _library().counted_cuda_name(len(names))) is not None:
        names[name.decode()] = len(names)
    return names


def counted(api: Any) -> Any:
    """The capsule of a table around that of ``api``."""
    return wrapped(_library().counted_cuda, api)


def wrapped(wrap: Any, api: Any) -> Any:
    """The capsule of the table that the C function ``wrap`` makes around that of ``api``."""
    wrap.argtypes, wrap.restype = [ctypes.c_void_p], ctypes.c_void_p
    get, new = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
    return new(wrap(get(api, CAPSULE)), CAPSULE, None)


def cuda_calls() -> dict[str, int]:
    """How many were made in this process, by name."""
    return {name: _library().counted_cuda_calls(number) for name, number in _names().items()}


def plan_cuda_fault(call: str, countdown: int = 1, error: int = 0, delay_us: int = 0) -> None:
    """The ``countdown``-th of the next calls of ``call`` returns ``error`` and is not made; 0: it is, after a pause."""
    _library().counted_cuda_plan(_names()[call], countdown, error, delay_us)


def clear_cuda_faults() -> None:
    _library().counted_cuda_clear()
