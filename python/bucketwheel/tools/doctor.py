"""``python -m bucketwheel doctor``: what the native modules need, what of it is there, and what to do about the rest.

Exit status: 0 what was asked for works; 1 it works, with warnings; 2 the native module cannot be had, torch is too old,
or a module named by ``--build`` cannot be built. `facts` looks, `judge` decides, `render` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bucketwheel._version import __version__
from bucketwheel.comm import nccl_library
from bucketwheel.errors import BuildError, DeviceError
from bucketwheel.native import cache as _cache
from bucketwheel.native import compile, env, modules, toolchain
from bucketwheel.native.toolchain import CPU, CUDA, Module

__all__ = ["add_arguments", "facts", "judge", "main", "render"]

_MODULES = {module.kind: module for module in (CPU, CUDA)}
_VARIABLES = (
    *("BW_", "CXX", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVCC", "TORCH_CUDA_ARCH_LIST"),
    *("NCCL_", "XDG_CACHE_HOME"),
)

# The attribute by which torch 2.10 and later hand over tensors without a call of Python.
_DLPACK = "__dlpack_c_exchange_api__"

Facts = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--build", action="append", choices=[*_MODULES], default=[], help="build it now; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")


def main(options: argparse.Namespace) -> int:
    found = facts(options.build)
    errors, concerns = judge(found, options.build)
    found = {"status": 2 if errors else 1 if concerns else 0, "errors": errors, "warnings": concerns, **found}
    print(json.dumps(found) if options.json else render(found))
    return int(found["status"])


def facts(build: Sequence[str] = ()) -> Facts:
    """All that is to be known, as values that JSON can hold. Builds the modules of these kinds first."""
    states = {kind: _state(module, is_built=kind in build) for kind, module in _MODULES.items()}
    found: Facts = {
        "bucketwheel": {"version": __version__, "path": str(Path(__file__).parents[1])},
        "python": {
            "version": sys.version.split()[0],
            "path": sys.executable,
            "soabi": sysconfig.get_config_var("SOABI"),
        },
        "torch": {
            "version": str(torch.__version__),
            "cuda": torch.version.cuda,
            "dlpack": hasattr(torch.Tensor, _DLPACK),
        },
        "tools": _tools(),
        "gpus": _gpus(),
        "modules": states,
        "nccl": _nccl_facts(states["cpu"]),
        "cache": _cache_facts(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }
    _excuse(found, build)
    return found


# ---- looking ---------------------------------------------------------------------------------------------------------


def _tools() -> dict[str, str]:
    """What each tool says of itself, or "missing: ..." with the reason."""

    def version(argv: Sequence[str], module: Module) -> str:
        line = re.search(r".*\d\.\d.*", toolchain.version_of(argv, module))
        return f"{line[0] if line else 'unknown version'} ({' '.join(argv)})"

    looks: dict[str, Callable[[], str]] = {
        "compiler": lambda: version(toolchain.find_compiler(), CPU),
        "nvcc": lambda: version(toolchain.find_nvcc(), CUDA),
        "ninja": compile.find_ninja,
        "pybind11": lambda: metadata.version("pybind11"),
    }
    found = {}
    for name, look in looks.items():
        try:
            found[name] = look()
        except (BuildError, ImportError) as error:
            found[name] = f"missing: {str(error).splitlines()[0].partition(': ')[2] or error}"
    return found


def _gpus() -> Facts:
    """The devices as torch sees them, else as the driver does; neither is needed for anything on the CPU."""
    if torch.cuda.is_available():
        seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        devices = [{"name": one.name, "capability": [one.major, one.minor]} for one in seen]
        return {"torch_sees_them": True, "devices": devices}
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        text = ""
    listed = re.findall(r"^(.+), (\d+)\.(\d+)$", text, re.MULTILINE)
    devices = [{"name": name, "capability": [int(major), int(minor)]} for name, major, minor in listed]
    return {"torch_sees_them": False, "devices": devices}


def _state(module: Module, *, is_built: bool) -> Facts:
    """``state``: named, installed, cached or missing, as in `modules.Found`, or unavailable, with the ``error``."""
    state: Facts = {"state": "unavailable"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if is_built:
                modules.locate(module)
            found = modules.find(module)
            state = {"state": found.origin, "path": str(found.path or found.entry)}
            if module is CUDA:
                archs = found.toolchain and found.toolchain.archs
                manifest = _cache.read_manifest(found.path.parent, CUDA) if found.path else {}
                state["archs"] = str(archs) if archs else manifest.get("archs")
            if found.path is not None:
                modules.try_import(module, found.path)
        except (BuildError, ValueError) as error:  # ValueError: an environment variable
            state["error"] = str(error)
    if caught:
        state["warning"] = str(caught[0].message)
    return state


def _nccl_facts(core: Facts) -> Facts:
    """The NCCL that would be used, torch's version of it, and an ``error`` where there is none that can be used."""
    torchs = nccl_library.version_of_torch()
    if "error" in core or core["state"] == "missing":
        return {"torch": torchs, "unknown": "until the native module is built"}
    try:
        info = nccl_library.info()
        return {"torch": torchs, **asdict(info), "version": nccl_library.version_text(info.version)}
    except (DeviceError, ValueError) as error:
        return {"torch": torchs, "error": str(error)}


def _cache_facts() -> Facts:
    try:
        folder = _cache.cache_dir()
    except BuildError as error:
        return {"path": None, "error": str(error)}
    above = next(path for path in (folder, *folder.parents) if path.exists())
    return {
        "path": str(folder),
        "writable": above.is_dir() and os.access(above, os.W_OK),
        "network": _cache.is_network(folder),
        "entries": [path.parent.name for path in sorted(folder.glob("c*-*/_c*.json"))],
    }


def _excuse(found: Facts, asked: Sequence[str]) -> None:
    """Where no GPU is to be used, what only GPUs need may be missing: the reason would read as a fault."""
    if "error" in found["nccl"] and not _needs_nccl(found):
        found["nccl"] = {"torch": found["nccl"]["torch"], "found": "none, and not needed here"}
    if found["tools"]["nvcc"].startswith("missing") and not found["gpus"]["devices"] and "cuda" not in asked:
        found["tools"]["nvcc"] = "none, and not needed here"
        if "error" in found["modules"]["cuda"]:
            found["modules"]["cuda"]["state"] = "unavailable, and not needed here"


def _needs_nccl(found: Facts) -> bool:
    has_gpus = bool(found["gpus"]["devices"]) and found["torch"]["cuda"] is not None
    return has_gpus or "BW_NCCL_LIB" in found["environment"]


# ---- judging ---------------------------------------------------------------------------------------------------------


def judge(found: Facts, asked: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """What is broken, and what to be warned of."""
    errors: list[str] = []
    concerns: list[str] = []
    if not found["torch"]["dlpack"]:
        errors.append(f"torch {found['torch']['version']} has no DLPack exchange API: install torch 2.10 or later")
    devices = found["gpus"]["devices"]
    for kind, module in found["modules"].items():
        is_needed = kind == "cpu" or kind in asked
        if "error" in module:
            if is_needed:
                errors.append(module["error"])
            elif devices:
                concerns.append(f"there are GPUs, but: {module['error']}")
        elif module["state"] == "missing" and is_needed and (why := _unbuildable(found)):
            errors.append(f"the {_MODULES[kind].title} is not built yet, and {why}")
        if "warning" in module:
            concerns.append(module["warning"])
    concerns += _about_cache(found["cache"])
    if devices and found["torch"]["cuda"] is None:
        concerns.append(f"there are GPUs, but torch {found['torch']['version']} is built without CUDA")
    elif devices and not found["gpus"]["torch_sees_them"]:
        why = "is the driver too old for it? is CUDA_VISIBLE_DEVICES set?"
        concerns.append(f"there are GPUs, but torch sees none: {why}")
    if _needs_nccl(found) and "error" in found["nccl"]:
        concerns.append(found["nccl"]["error"])
    unknown = [name for name in found["environment"] if name.startswith("BW_") and name not in env.KNOWN]
    concerns += [f"{name} is set, which bucketwheel does not know: docs/building.md has all names" for name in unknown]
    concerns += _not_covered(devices, found["modules"]["cuda"].get("archs"))
    return errors, concerns


def _about_cache(cache: Facts) -> list[str]:
    if "error" in cache:
        return [cache["error"]]
    if not cache["writable"]:
        return [f"the cache folder {cache['path']} cannot be written: name another with BW_CACHE_DIR"]
    if cache["network"]:
        return [f"the cache folder {cache['path']} is on a network file system: BW_CACHE_DIR names a local one"]
    return []


def _unbuildable(found: Facts) -> str:
    if found["environment"].get("BW_JIT") == "0":
        return "BW_JIT=0 forbids building it"
    if found["tools"]["ninja"].startswith("missing"):
        return "ninja is not installed: pip install ninja"
    cache = found["cache"]
    return "" if "error" not in cache and cache["writable"] else "the cache cannot be written"


def _not_covered(devices: list[dict[str, Any]], text: str | None) -> list[str]:
    if text is None:
        return []
    archs = toolchain.parse_archs(text, "archs")
    wrong = [device for device in devices if not archs.covers(tuple(device["capability"]))]
    return [
        f"the CUDA module is for GPU architectures {text}, which do not run on {device['name']} "
        f"({device['capability'][0]}.{device['capability'][1]}): set BW_CUDA_ARCH_LIST"
        for device in wrong
    ]


# ---- printing --------------------------------------------------------------------------------------------------------


def render(found: Facts) -> str:
    """The facts as text for a person, problems last."""
    lines = []
    for section, facts in found.items():
        if isinstance(facts, dict):
            lines += [section, *(f"    {name:12} {_text(value)}" for name, value in facts.items())]
    lines += [f"\nwarning: {text}" for text in found["warnings"]] + [f"\nbroken: {text}" for text in found["errors"]]
    return "\n".join([*lines, "", ("all well", "works, with warnings", "broken")[found["status"]]])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items() if name != "error")
    return "; ".join(map(_text, value)) if isinstance(value, list) else str(value)
