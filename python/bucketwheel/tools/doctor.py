"""``bucketwheel doctor``: what the native modules need, what of it is there, and what to do about the rest.

Exit status: 0 the modules work; 1 they work, with warnings; 2 the native module cannot be had, torch is too old, or a module
named by ``--build`` cannot be built.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from bucketwheel._version import __version__
from bucketwheel.errors import BuildError, DeviceError
from bucketwheel.native import cache, compile, env, modules, toolchain
from bucketwheel.native.toolchain import CPU, CUDA, Module

_VARIABLES = ("BW_", "CUDA_", "CXX", "LD_", "NCCL_", "NVCC", "OMP_", "PYTORCH_", "TORCH_", "XDG_CACHE_HOME")
_DLPACK = "__dlpack_c_exchange_api__"  # by which torch 2.10 and later hand over tensors without a call of Python

Gpu = tuple[str, tuple[int, int]]  # its name and capability


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "build this native module now: cpu needs a C++20 compiler, cuda nvcc too; may be given twice, for both"
    parser.add_argument("--build", action="append", choices=[CPU.kind, CUDA.kind], default=[], help=text)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")


def main(options: argparse.Namespace) -> int:
    facts, errors, concerns = examine(options.build)
    status = 2 if errors else 1 if concerns else 0
    if options.json:
        print(json.dumps({"status": status, "errors": errors, "warnings": concerns, **facts}))
        return status
    lines = [f"{name:12} {text}" for name, text in facts.items()]
    lines += [f"\nwarning: {text}" for text in concerns] + [f"\nbroken: {text}" for text in errors]
    print("\n".join([*lines, "", ("all well", "works, with warnings", "broken")[status]]))
    return status


def examine(build: Sequence[str] = ()) -> tuple[dict[str, str], list[str], list[str]]:
    """Facts by name, what is broken, and what to be warned of. Builds the modules of these kinds first."""
    environment = ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES))
    import torch  # in functions, for --help comes without it; and now: bucketwheel.comm sets a variable of NCCL

    from bucketwheel.comm import nccl_library

    gpus = _gpus()
    errors: list[str] = []
    concerns: list[str] = []
    cuda = f"CUDA {torch.version.cuda}, NCCL {nccl_library.version_of_torch()}"
    facts = {
        "bucketwheel": f"{__version__} ({Path(__file__).parents[1]})",
        "Python": f"{sys.version.split()[0]} ({sys.executable})",
        "system": platform.platform(),
        "torch": f"{torch.__version__}, {cuda if torch.version.cuda else 'without CUDA'}",
        "GPUs": ", ".join(f"{name} ({major}.{minor})" for name, (major, minor) in gpus) or "none",
        "environment": environment or "none of " + "..., ".join(_VARIABLES) + " is set",
    }

    def look(name: str, at: Callable[[], str], problems: list[str] | None, before: str = "") -> None:
        """``problems``: where an error belongs; None where nothing here needs it."""
        try:
            facts[name] = at()
        except (BuildError, DeviceError, ImportError, ValueError) as error:  # ValueError: an environment variable
            why = str(error).splitlines()[0].partition(": ")[2] or str(error)
            facts[name] = "none, and not needed here" if problems is None else f"missing: {why}"
            if problems is not None:
                problems.append(f"{before}{error}")

    if not hasattr(torch.Tensor, _DLPACK):
        errors.append(f"torch {torch.__version__} has no DLPack exchange API: install torch 2.10 or later")
    if gpus and torch.version.cuda is None:
        concerns.append(f"there are GPUs, but torch {torch.__version__} is built without CUDA")
    elif gpus and not torch.cuda.is_available():
        why = "the driver may be too old for it, or CUDA_VISIBLE_DEVICES hides them"
        concerns.append(f"there are GPUs, but torch sees none: {why}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        look("compiler", lambda: _with_version(toolchain.find_compiler(), CPU), [])
        look("ninja", compile.find_ninja, [])
        look("pybind11", lambda: metadata.version("pybind11"), [])
        look("cache", _cache, concerns)
        look("CPU module", lambda: _module(CPU, build, gpus), errors)
        of_gpus = errors if "cuda" in build else concerns if gpus else None
        look("nvcc", lambda: _with_version(toolchain.find_nvcc(), CUDA), None if of_gpus is None else [])
        before = "there are GPUs, but: " if of_gpus is concerns else ""
        look("CUDA module", lambda: _module(CUDA, build, gpus), of_gpus, before)
        if facts["CPU module"].endswith(")"):  # it is there, and NCCL is found by it
            needs_nccl = (gpus and torch.version.cuda) or env.text("BW_NCCL_LIB")
            look("NCCL", _nccl, concerns if needs_nccl else None)
    concerns += dict.fromkeys(str(one.message) for one in caught)
    unknown = sorted(name for name in os.environ if name.startswith("BW_") and name not in env.KNOWN)
    concerns += [
        f"{name} is set, but bucketwheel has no such variable: docs/environment.md lists all of them"
        for name in unknown
    ]
    return facts, errors, concerns


def _gpus() -> list[Gpu]:
    """The devices as torch sees them, else as the driver does."""
    import torch

    if torch.cuda.is_available():
        seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [(one.name, (one.major, one.minor)) for one in seen]
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    listed = re.findall(r"^(.+), (\d+)\.(\d+)$", text, re.MULTILINE)
    return [(name, (int(major), int(minor))) for name, major, minor in listed]


def _module(module: Module, build: Sequence[str], gpus: Sequence[Gpu]) -> str:
    """Where it is. Raises `BuildError` if it cannot be had."""
    if module.kind in build:
        modules.locate(module)
    found = modules.find(module)
    if module is CUDA:
        archs = found.toolchain and found.toolchain.archs
        text = str(archs or (cache.read_manifest(found.path.parent, CUDA).get("archs", "") if found.path else ""))
        for name, (major, minor) in gpus:
            if text and not toolchain.parse_archs(text, "archs").covers((major, minor)):
                what = f"the CUDA module is for GPU architectures {text}, which do not run on {name} ({major}.{minor})"
                warnings.warn(f"{what}: set BW_CUDA_ARCH_LIST", stacklevel=1)
    if found.path is not None:
        modules.try_import(module, found.path)
        return f"{found.origin} ({found.path})"
    if not env.flag("BW_JIT", default=True):
        raise BuildError(f"the {module.title} is not built yet, and BW_JIT=0 forbids building it")
    compile.find_ninja()
    _cache()
    return "not built yet"


def _with_version(command: Sequence[str], module: Module) -> str:
    lines = toolchain.version_of(command, module).splitlines()
    told = (line for line in lines if module is CPU or "release" in line)  # nvcc's first lines have no version
    return f"{' '.join(command)}: {next(told, 'no version')}"


def _cache() -> str:
    folder = cache.cache_dir()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(prefix="new-", dir=above).cleanup()
    except OSError as error:
        raise BuildError(
            f"the cache folder {folder} cannot be written ({error}): set BW_CACHE_DIR to another"
        ) from error
    if cache.is_network(folder):
        what = f"the cache folder {folder} is on a network file system"
        warnings.warn(f"{what}: set BW_CACHE_DIR to a local one", stacklevel=1)
    return str(folder)


def _nccl() -> str:
    from bucketwheel.comm import nccl_library

    info = nccl_library.info()
    return f"{nccl_library.version_text(info.version)}, {info.found} ({info.path})"
