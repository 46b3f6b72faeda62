"""``python -m bucketwheel doctor``: what the native modules need, what of it is there, and what to do about the rest.

Exit status: 0 what was asked for works; 1 it works, with warnings; 2 the native module cannot be had, torch is too old,
or a module named by ``--build`` cannot be built. `facts` looks, `judge` decides, `render` prints.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bucketwheel._version import __version__
from bucketwheel.comm import nccl_library
from bucketwheel.errors import BuildError, DeviceError
from bucketwheel.native import cache as _cache
from bucketwheel.native import compile, env, toolchain
from bucketwheel.native import modules as _build
from bucketwheel.native import nvcc as _nvcc
from bucketwheel.native.toolchain import CPU, CUDA, Module

__all__ = ["add_arguments", "facts", "judge", "main", "render"]

_MODULES = {module.kind: module for module in (CPU, CUDA)}
_VARIABLES = (
    *("BW_", "CXX", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVCC", "TORCH_CUDA_ARCH_LIST"),
    *("NCCL_", "XDG_CACHE_HOME"),
)

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
    built = {kind: _built(_MODULES[kind]) for kind in build}
    modules = {kind: {**_state(module), **built.get(kind, {})} for kind, module in _MODULES.items()}
    return {
        "bucketwheel": {"version": __version__, "path": str(Path(__file__).parent)},
        "python": {
            "version": sys.version.split()[0],
            "path": sys.executable,
            "soabi": sysconfig.get_config_var("SOABI"),
        },
        "torch": {"version": str(torch.__version__), "cuda": torch.version.cuda, "dlpack": _dlpack_version()},
        "tools": _tools(),
        "gpus": _gpus(),
        "modules": modules,
        "nccl": _nccl_facts(modules["cpu"]),
        "cache": _cache_facts(),
        "environment": _environment(),
    }


def _environment() -> dict[str, str]:
    """As it was found: bucketwheel has set what it sets where nobody had."""
    ours = set() if nccl_library.launch_order_found is not None else {nccl_library.LAUNCH_ORDER}
    return {name: os.environ[name] for name in sorted(os.environ.keys() - ours) if name.startswith(_VARIABLES)}


# ---- looking ---------------------------------------------------------------------------------------------------------


def _dlpack_version() -> str | None:
    """The version of torch's DLPack C exchange API: two integers at the head of the struct in the capsule."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    try:
        address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    except (TypeError, ValueError):
        return None
    major, minor = (ctypes.c_uint32 * 2).from_address(address)
    return f"{major}.{minor}"


def _tools() -> dict[str, str | None]:
    """What each tool says of itself; "missing: ..." with the reason where it is not there."""

    def first_line(*argv: str) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip().splitlines()[0]

    def compiler() -> str:
        cxx = toolchain.find_compiler()
        return f"{first_line(*cxx, '--version')} ({' '.join(cxx)})"

    def nvcc() -> str:
        argv = _nvcc.find_nvcc()
        release = re.search(r"release .*", _nvcc.nvcc_version(argv))
        return f"{release[0] if release else 'unknown release'} ({' '.join(argv)})"

    def ninja() -> str:
        path = compile.find_ninja()
        return f"{first_line(path, '--version')} ({path})" if path else "missing: threads compile instead"

    def pybind11() -> str:
        import pybind11

        return f"{pybind11.__version__} ({pybind11.get_include()})"

    found: dict[str, str | None] = {}
    for name, look in (("compiler", compiler), ("nvcc", nvcc), ("ninja", ninja), ("pybind11", pybind11)):
        try:
            found[name] = look()
        except (BuildError, ImportError, OSError, subprocess.SubprocessError, IndexError) as error:
            found[name] = f"missing: {str(error).splitlines()[0].partition(': ')[2] or error}"
    return found


def _gpus() -> dict[str, Any]:
    """The devices as torch sees them, else as the driver does; neither is needed for anything on the CPU."""
    devices, driver = _nvidia_smi()
    if torch.cuda.is_available():
        devices = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = [properties.major, properties.minor]
            devices.append({"name": properties.name, "capability": capability, "gib": _gib(properties.total_memory)})
    return {"devices": devices, "driver": driver, "torch_sees_them": torch.cuda.is_available()}


def _gib(size_bytes: float) -> float:
    return round(size_bytes / 2**30, 1)


def _nvidia_smi() -> tuple[list[dict[str, Any]], str | None]:
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return [], None
    devices, driver = [], None
    for line in lines:
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and re.fullmatch(r"\d+\.\d+", words[1]) and re.fullmatch(r"\d+", words[2]):
            name, capability, mib, driver = words
            major, minor = capability.split(".")
            devices.append({"name": name, "capability": [int(major), int(minor)], "gib": _gib(int(mib) * 2**20)})
    return devices, driver


def _built(module: Module) -> dict[str, Any]:
    start = time.monotonic()
    try:
        _build.locate(module)
    except (BuildError, ValueError) as error:  # ValueError: an environment variable
        return {"error": str(error)}
    return {"seconds": round(time.monotonic() - start, 2)}


def _state(module: Module) -> dict[str, Any]:
    """``state``: named, installed, cached or missing, as `_build.Found` has it, or unavailable, with the ``error``."""
    state: dict[str, Any] = {"state": "unavailable"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = _build.find(module)
            state = {"state": found.origin, "path": str(found.path or found.entry)}
            if module is CUDA:
                state["archs"] = _archs(found)
            if found.path is not None:
                _build.try_import(module, found.path)
        except (BuildError, ValueError) as error:
            state["error"] = str(error)
    if caught:
        state["warning"] = str(caught[0].message)
    return state


def _archs(found: _build.Found) -> str | None:
    nvcc = found.toolchain.nvcc if found.toolchain else ()
    if not nvcc and found.path:
        nvcc = _cache.read_manifest(found.path.parent, CUDA).get("nvcc", ())
    archs = _nvcc.archs_of(nvcc)
    return str(archs) if archs else None


def _nccl_facts(core: dict[str, Any]) -> dict[str, Any]:
    """The NCCL that would be used, torch's version of it, and an ``error`` where there is none that can be used."""
    torchs = nccl_library.version_of_torch()
    if "error" in core or core["state"] == "missing":
        return {"torch": torchs, "unknown": "until the native module is built"}
    try:
        return {"torch": torchs, **asdict(nccl_library.info())}
    except (DeviceError, ValueError) as error:
        return {"torch": torchs, "error": str(error)}


def _cache_facts() -> dict[str, Any]:
    try:
        folder = _cache.cache_dir()
    except BuildError as error:
        return {"path": None, "error": str(error)}
    above = folder
    while not above.exists() and above != above.parent:
        above = above.parent
    entries = [path for path in sorted(folder.glob("bucketwheel_*")) if path.is_dir()]
    locks = sorted((folder / "locks").glob("*"))
    return {
        "path": str(folder),
        "writable": above.is_dir() and os.access(above, os.W_OK),
        "network": _cache.is_network(folder),
        "entries": {entry.name: sum(path.stat().st_size for path in entry.glob("*")) for entry in entries},
        "builders": {lock.name: _cache.holder(lock) for lock in locks if _cache.is_held(lock)},
    }


# ---- judging ---------------------------------------------------------------------------------------------------------


def judge(found: Facts, asked: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """What is broken, and what to be warned of."""
    errors: list[str] = []
    concerns: list[str] = []
    if found["torch"]["dlpack"] is None:
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
    cache = found["cache"]
    if "error" in cache:
        concerns.append(cache["error"])
    elif not cache["writable"]:
        concerns.append(f"the cache folder {cache['path']} cannot be written: name another with BW_CACHE_DIR")
    elif cache["network"]:
        concerns.append(f"the cache folder {cache['path']} is on a network file system: BW_CACHE_DIR names a local one")
    if devices and found["torch"]["cuda"] is None:
        concerns.append(f"there are GPUs, but torch {found['torch']['version']} is built without CUDA")
    elif devices and not found["gpus"]["torch_sees_them"]:
        concerns.append(
            "there are GPUs, but torch sees none: is the driver too old for it? is CUDA_VISIBLE_DEVICES set?"
        )
    is_nccl_needed = "BW_NCCL_LIB" in found["environment"] or (devices and found["torch"]["cuda"] is not None)
    if is_nccl_needed and "error" in found["nccl"]:
        concerns.append(found["nccl"]["error"])
    unknown = [name for name in found["environment"] if name.startswith("BW_") and name not in env.KNOWN]
    concerns += [f"{name} is set, which bucketwheel does not know: docs/building.md has all names" for name in unknown]
    concerns += _not_covered(devices, found["modules"]["cuda"].get("archs"))
    return errors, concerns


def _unbuildable(found: Facts) -> str:
    if found["environment"].get("BW_JIT") == "0":
        return "BW_JIT=0 forbids building it"
    cache = found["cache"]
    return "" if "error" not in cache and cache["writable"] else "the cache cannot be written"


def _not_covered(devices: list[dict[str, Any]], text: str | None) -> list[str]:
    if text is None:
        return []
    archs = _nvcc.parse_archs(text, "archs")
    wrong = [device for device in devices if not _nvcc.covers(archs, tuple(device["capability"]))]
    return [
        f"the CUDA module is for GPU architectures {text}, which do not run on {device['name']} "
        f"({device['capability'][0]}.{device['capability'][1]}): set BW_CUDA_ARCH_LIST"
        for device in wrong
    ]


# ---- printing --------------------------------------------------------------------------------------------------------


def render(found: Facts) -> str:
    """The facts as text for a person, problems last."""
    torch_facts, cache = found["torch"], found["cache"]
    rows = [
        ("bucketwheel", f"{found['bucketwheel']['version']} ({found['bucketwheel']['path']})"),
        ("python", f"{found['python']['version']}, {found['python']['soabi']} ({found['python']['path']})"),
        ("torch", f"{torch_facts['version']}, CUDA {torch_facts['cuda']}, DLPack API {torch_facts['dlpack']}"),
        *found["tools"].items(),
        ("driver", found["gpus"]["driver"] or "none"),
    ]
    for device in found["gpus"]["devices"]:
        major, minor = device["capability"]
        rows.append(("gpu", f"{device['name']}, {device['gib']} GiB, compute capability {major}.{minor}"))
    for kind, module in found["modules"].items():
        text = " ".join(filter(None, [module["state"], module.get("path")]))
        text += f", for {module['archs']}" if module.get("archs") else ""
        text += f", ready after {module['seconds']} s" if "seconds" in module else ""
        rows.append((f"_{kind}", text))
    rows += _nccl_rows(found["nccl"])
    if cache["path"]:
        size = sum(cache["entries"].values()) / 2**20
        notes = "" if cache["writable"] else ", cannot be written"
        notes += ", on a network file system" if cache["network"] else ""
        rows.append(("cache", f"{cache['path']}: {len(cache['entries'])} entries, {size:.0f} MiB{notes}"))
        rows += [("building", f"{lock}: {holder}") for lock, holder in cache["builders"].items()]
    rows += [("environment", f"{name}={value}") for name, value in found["environment"].items()]
    lines = [f"{name:12} {text}" for name, text in rows]
    lines += [f"\nwarning: {text}" for text in found["warnings"]] + [f"\nbroken: {text}" for text in found["errors"]]
    return "\n".join([*lines, "", ("all well", "works, with warnings", "broken")[found["status"]]])


def _nccl_rows(facts: Facts) -> list[tuple[str, str]]:
    versus = f"torch has {facts['torch']}" if facts["torch"] else "torch has none"
    if "version" not in facts:
        return [("nccl", f"{facts.get('error') or 'unknown ' + facts['unknown']} ({versus})")]
    gates = [name if there else f"no {name}" for name, there in facts["features"].items()]
    text = f"{nccl_library.version_text(facts['version'])} ({facts['path']}, {facts['found']}; {versus})"
    return [("nccl", text), ("", ", ".join(gates))]
