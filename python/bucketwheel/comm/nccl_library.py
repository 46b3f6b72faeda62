"""Which NCCL the process uses. The search is csrc/comm/nccl/api.h's; this module tells it where Python packages are."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from bucketwheel.native.modules import native


@dataclass(frozen=True)
class NcclInfo:
    """``version``: 22809 is 2.28.9. ``found``: "BW_NCCL_LIB", "loaded already" (by torch, or another component of the
    process), "a Python package" or "the system". ``features``: what this version has, by name."""

    path: str
    found: str
    version: int
    features: dict[str, bool]


def folders() -> list[str]:
    """The folders of installed packages that may hold libnccl.so.2: nvidia-nccl-cu13's, and of others that share its
    namespace."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    found = [Path(place, "nccl", "lib") for place in places]
    return [str(folder) for folder in found if folder.is_dir()]


@functools.cache
def _native() -> ModuleType:
    """The native module, which knows from here on where to look for NCCL."""
    module = native()
    module.set_nccl_folders(folders())
    return module


def info() -> NcclInfo:
    """Loads NCCL if that has not been done. `DeviceError` where there is none that can be used."""
    return NcclInfo(**_native().nccl_info())


def unique_id() -> bytes:
    """128 bytes that one rank makes and all ranks of a new communicator start from."""
    made: bytes = _native().nccl_unique_id()
    return made


def version_text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def version_of_torch() -> str | None:
    """The version of the NCCL that torch is built with; None for a torch without."""
    return ".".join(map(str, torch.cuda.nccl.version()[:3])) if hasattr(torch._C, "_nccl_version") else None
