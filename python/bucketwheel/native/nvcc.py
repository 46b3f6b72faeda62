"""nvcc, and the GPU architectures to compile for.

Architectures are taken from the first of ``BW_CUDA_ARCH_LIST``, ``TORCH_CUDA_ARCH_LIST``, the visible GPUs, "9.0".
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bucketwheel.native.toolchain import CUDA, Toolchain, explain, find_toolchain

__all__ = [
    "Arch",
    "ArchList",
    "archs_of",
    "choose_archs",
    "covers",
    "find_cuda_toolchain",
    "find_nvcc",
    "nvcc_version",
    "parse_archs",
]
__all__ += ["visible_devices"]

_ARCH = re.compile(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)(\+PTX)?", re.IGNORECASE)
_DEFAULT = "9.0"
# Read by nvcc itself: they change what it makes.
_VARIABLES = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


@dataclass(frozen=True, order=True)
class Arch:
    """A compute capability; ``variant``: "a" or "f" for code with features of this one or this family only."""

    major: int
    minor: int
    variant: str = ""

    @property
    def digits(self) -> str:
        return f"{self.major}{self.minor}{self.variant}"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.variant}"


@dataclass(frozen=True)
class ArchList:
    """For what to compile, ascending; whether PTX goes along, for GPUs newer than the highest; and who said so."""

    archs: tuple[Arch, ...]
    has_ptx: bool
    origin: str

    @property
    def flags(self) -> tuple[str, ...]:
        flags = [f"-gencode=arch=compute_{arch.digits},code=sm_{arch.digits}" for arch in self.archs]
        if self.has_ptx:
            digits = self.archs[-1].digits
            flags.append(f"-gencode=arch=compute_{digits},code=compute_{digits}")
        return tuple(flags)

    def __str__(self) -> str:
        return ";".join(map(str, self.archs)) + ("+PTX" if self.has_ptx else "")


def parse_archs(text: str, origin: str) -> ArchList:
    """Torch's syntax: "8.0;9.0+PTX", "9.0a", or with blanks or commas between. PTX is made for the highest only."""
    found = set()
    has_ptx = False
    for word in re.split(r"[;,\s]+", text.strip()):
        match = _ARCH.fullmatch(word)
        if match is None:
            raise explain(
                f"{origin}={text!r}: {word!r} is no architecture",
                module=CUDA,
                remedies=["write BW_CUDA_ARCH_LIST='9.0', or '8.0;9.0+PTX'"],
            )
        found.add(Arch(int(match[1]), int(match[2]), match[3].lower()))
        has_ptx = has_ptx or match[4] is not None
    return ArchList(tuple(sorted(found)), has_ptx, origin)


def choose_archs(devices: Sequence[tuple[int, int]] | None = None) -> ArchList:
    """``devices``: compute capabilities; those of the visible GPUs unless given."""
    for name in ("BW_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST"):
        if text := os.environ.get(name, "").strip():
            return parse_archs(text, name)
    if devices is None:
        devices = visible_devices()
    if devices:
        archs = sorted({Arch(major, minor) for major, minor in devices})
        return ArchList(tuple(archs), False, "the visible GPUs")
    return parse_archs(_DEFAULT, "no GPU is visible: the default, choose with BW_CUDA_ARCH_LIST")


def archs_of(nvcc: Sequence[str]) -> ArchList | None:
    """What an nvcc command compiles for, by its -gencode flags."""
    codes = re.findall(r"code=(sm|compute)_(\d+)(\d)([af]?)", " ".join(nvcc))
    archs = {Arch(int(major), int(minor), variant) for _, major, minor, variant in codes}
    has_ptx = any(kind == "compute" for kind, *_ in codes)
    return ArchList(tuple(sorted(archs)), has_ptx, "its build") if archs else None


def covers(archs: ArchList, device: tuple[int, int]) -> bool:
    """Whether a GPU can run code compiled for ``archs``."""
    major, minor = device
    for arch in archs.archs:
        runs = (
            (arch.major, arch.minor) == device if arch.variant == "a" else arch.major == major and arch.minor <= minor
        )
        if runs:
            return True
    highest = archs.archs[-1]
    return archs.has_ptx and not highest.variant and (highest.major, highest.minor) <= device


def visible_devices(library: str = "libcuda.so.1") -> list[tuple[int, int]]:
    """The compute capabilities of the GPUs this process may use, from the driver; none without a driver."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return []
    count, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []

    def attribute(number: int, device: int) -> int:
        status = driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value if status == 0 else 0

    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    found = [(attribute(75, device), attribute(76, device)) for device in range(count.value)]
    return [device for device in found if device[0] > 0]


# ---- nvcc ------------------------------------------------------------------------------------------------------------


def find_nvcc() -> tuple[str, ...]:
    """$NVCC, $CUDA_HOME/bin/nvcc, nvcc on PATH, /usr/local/cuda/bin/nvcc; or a `BuildError`."""
    remedies = ["install the CUDA toolkit, or name it: CUDA_HOME=/usr/local/cuda, NVCC=/path/to/nvcc"]
    if named := os.environ.get("NVCC", "").strip():
        words = shlex.split(named)
        if shutil.which(words[0]) is None:
            raise explain(f"NVCC={named!r} names no program", module=CUDA, remedies=remedies)
        return tuple(words)
    if home := os.environ.get("CUDA_HOME", "").strip():
        path = Path(home, "bin", "nvcc")
        if not os.access(path, os.X_OK):
            raise explain(f"CUDA_HOME={home!r} has no bin/nvcc", module=CUDA, remedies=remedies)
        return (str(path),)
    if found := shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc"):
        return (found,)
    raise explain(
        "nvcc is missing (looked for $NVCC, $CUDA_HOME/bin/nvcc, nvcc on PATH, /usr/local/cuda/bin/nvcc)",
        module=CUDA,
        remedies=remedies,
    )


def nvcc_version(nvcc: tuple[str, ...]) -> str:
    """What it says of itself, or a `BuildError`."""
    try:
        return subprocess.run([*nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise explain(
            f"nvcc does not answer: {error}",
            module=CUDA,
            command=shlex.join([*nvcc, "--version"]),
            remedies=["name a working one: NVCC=/path/to/nvcc"],
        ) from error


def find_cuda_toolchain() -> Toolchain:
    """The C++ compiler, and nvcc with it as host compiler, for the chosen architectures. Raises `BuildError`."""
    nvcc = find_nvcc()
    version = nvcc_version(nvcc)
    toolchain = find_toolchain()
    archs = choose_archs()
    settings = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    if "NVCC_CCBIN" not in settings:
        # Of CXX="ccache g++ -g": the compiler.
        program = [word for word in toolchain.cxx if not word.startswith("-")][-1]
        nvcc = (*nvcc, "-ccbin", program)
    return replace(
        toolchain,
        nvcc=(*nvcc, *archs.flags),
        nvcc_identity="\n".join([version, repr(settings)]),
        note=f" for GPU architectures {archs} ({archs.origin})",
    )
