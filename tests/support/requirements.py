"""What a test needs beyond Python, torch and a C++ compiler; and which cases need more time than they are worth each day.

A test whose need is not met is skipped, with the reason; where the environment variable ``BW_REQUIRE`` names the need
(``BW_REQUIRE=nvcc,gpu``) it fails instead, so that a machine meant to run it cannot leave it out unnoticed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

NEEDS = ("nvcc", "gpu", "nccl", "aarch64", "valgrind", "root", "netns")


def required() -> set[str]:
    names = set(filter(None, os.environ.get("BW_REQUIRE", "").split(",")))
    if unknown := names - set(NEEDS):
        raise ValueError(f"BW_REQUIRE names {sorted(unknown)}; known are {', '.join(NEEDS)}")
    return names


def unmet(need: str, reason: str) -> NoReturn:
    """End the test: ``need`` is not there, because of ``reason``."""
    assert need in NEEDS, need
    if need in required():
        pytest.fail(f"BW_REQUIRE={os.environ['BW_REQUIRE']}: needs {need}: {reason}", pytrace=False)
    pytest.skip(f"needs {need}: {reason}")


def need_nvcc() -> None:
    from bucketwheel.errors import BuildError
    from bucketwheel.native import toolchain

    try:
        toolchain.version_of(toolchain.find_nvcc(), toolchain.CUDA)
    except BuildError as error:
        unmet("nvcc", str(error).splitlines()[0])


def need_nccl() -> Path:
    """The folder of the package nvidia-nccl-cu13, with include/nccl.h and lib/libnccl.so.2."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "nccl"
        if (folder / "include" / "nccl.h").is_file() and (folder / "lib" / "libnccl.so.2").is_file():
            return folder
    unmet("nccl", "the package nvidia-nccl-cu13 is not installed")


def need_aarch64() -> list[str]:
    """What to put in front of a program for aarch64 to run it here."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        unmet(
            "aarch64", "no aarch64-linux-gnu-g++ or qemu-aarch64 (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
        )
    asked = [compiler, "-print-file-name=libc.so.6"]
    libc = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return [emulator, "-L", str(Path(libc).resolve().parents[1])]


def need_valgrind() -> str:
    return shutil.which("valgrind") or unmet("valgrind", "it is not installed (Debian: apt install valgrind libc6-dbg)")


def need_root() -> None:
    if os.geteuid() != 0:
        unmet("root", "only root can act as another user or give files away")


def slow_case(*values: Any) -> Any:
    """A case of ``pytest.mark.parametrize`` for `make test-all`: what it adds to the others is seldom anything."""
    return pytest.param(*values, marks=pytest.mark.slow)
