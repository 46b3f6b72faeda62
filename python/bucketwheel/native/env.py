"""The environment variables BW_* that Python reads; csrc/base/env.h has those of the native core.

What a variable cannot mean is a ``ValueError`` that names it, what it holds and what it may hold. Empty is unset.
"""

from __future__ import annotations

import math
import os

_PYTHON = "BW_AOT BW_BUILD_TIMEOUT BW_CACHE_DIR BW_COMM_CHECK BW_CUDA_ARCH_LIST BW_DEBUG BW_JIT BW_NATIVE_DIR"
_NATIVE = "BW_CPU_ISA BW_HOST_STREAM BW_HOST_STREAM_FUZZ BW_NCCL_LIB BW_POOL_POISON BW_TRACE_DIR"  # csrc/base/env.cpp
_TESTS = "BW_GPU_RANKS BW_GPU_SIMULATE BW_REQUIRE BW_TEST_EMULATOR"
KNOWN = frozenset(f"{_PYTHON} {_NATIVE} {_TESTS}".split())


def bad_value(name: str, value: str, allowed: str) -> ValueError:
    return ValueError(f"environment variable {name}={value!r}: expected {allowed}")


def text(name: str) -> str:
    return os.environ.get(name, "").strip()


def flag(name: str, *, default: bool = False) -> bool:
    value = text(name)
    if value not in ("", "0", "1"):
        raise bad_value(name, value, "0 or 1")
    return value == "1" if value else default


def build_timeout_s() -> float:
    """The limit for one build, and for waiting for one."""
    value = text("BW_BUILD_TIMEOUT")
    try:
        number = float(value or 600)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise bad_value("BW_BUILD_TIMEOUT", value, "a number of seconds above 0")
    return number
