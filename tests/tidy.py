"""Runs clang-tidy over the C++ of csrc/ and of the native tests, as .clang-tidy says, on all cores.

    python tests/tidy.py [WORD ...]     only where the path of a source contains one of the words

build/tidy/compile_commands.json, which editors read too, has each source with the flags that it is built with. Sources
that were clean are left out until they, a header, their flags, .clang-tidy or the tool change. CUDA's sources (.cu) are
not looked at: without CUDA's headers they are no C++. The headers that they share with the CPU are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC, NATIVE, OUT = ROOT / "csrc", ROOT / "tests" / "native", ROOT / "build" / "tidy"
sys.path.insert(0, str(ROOT / "python"))

from bucketwheel.native import compile, toolchain  # noqa: E402

CONFIGS = (ROOT / ".clang-tidy", NATIVE / ".clang-tidy")
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Unit:
    """Sources that are read at once, as they are compiled at once, and the compile of each without its name."""

    paths: tuple[Path, ...]
    argv: tuple[str, ...]


def find_tool() -> str | None:
    """clang-tidy beside this Python, where `make` installs it, else on PATH."""
    return shutil.which("clang-tidy", path=sysconfig.get_path("scripts")) or shutil.which("clang-tidy")


def units() -> list[Unit]:
    recipe, tools = toolchain.read_recipe(CSRC), toolchain.find_toolchain()
    system = [word for folder in tools.includes for word in ("-isystem", folder)]
    start = [*tools.cxx, *recipe.flags, f"-I{CSRC}", *system]
    of_tests = [f"-I{NATIVE}", f"-I{NATIVE / 'fake_cuda'}", "-Wno-unknown-pragmas"]
    built = [
        Unit(tuple(CSRC / source.path for source in unit), (*start, *unit[0].flags)) for unit in compile.units(recipe)
    ]
    cuda = toolchain.read_recipe(CSRC, module=toolchain.CUDA)
    plain = [source for source in cuda.sources if source.path.endswith(".cpp")]
    flags = [*tools.cxx, *cuda.flags, f"-I{CSRC}", *system]
    built += [Unit((CSRC / source.path,), (*flags, *source.flags)) for source in plain]
    return [*built, *(Unit((path,), (*start, *of_tests)) for path in sorted(NATIVE.rglob("*.cpp")))]


def write_compiles(of: list[Unit]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    entries = [
        {"directory": str(ROOT), "file": str(path), "arguments": [*unit.argv, "-c", str(path)]}
        for unit in of
        for path in unit.paths
    ]
    (OUT / "compile_commands.json").write_text(json.dumps(entries, indent=1) + "\n")


def stamp(version: str, unit: Unit) -> Path:
    """The file that says of a unit, as it is now, that it is clean."""
    digest = hashlib.sha256(repr((version, unit)).encode())
    seen = {included for path in unit.paths for included in compile.closure(CSRC, str(path))}
    for path in sorted(seen.union(CONFIGS, NATIVE.rglob("*.h"))):
        digest.update(path.read_bytes())
    return OUT / f"{unit.paths[-1].parent.name}_{unit.paths[-1].stem}-{digest.hexdigest()[:16]}.clean"


def findings(tool: str, version: str, unit: Unit) -> str:
    """What clang-tidy says about a unit; nothing if it is clean."""
    clean = stamp(version, unit)
    if clean.exists():
        return ""
    *others, last = map(str, unit.paths)
    before = [f"--extra-arg={word}" for other in others for word in ("-include", other)]
    argv = [tool, "--quiet", "-p", str(OUT), *before, last]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode == 0 and not done.stdout.strip():
        clean.touch()
        return ""
    return done.stdout + done.stderr


def main(words: list[str]) -> int:
    tool = find_tool()
    if tool is None:
        print("clang-tidy is not installed (pip install clang-tidy)", file=sys.stderr)
        return 2
    version = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    everything = units()
    write_compiles(everything)
    chosen = [unit for unit in everything if not words or any(word in str(unit.paths) for word in words)]
    unclean = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for text in pool.map(lambda unit: findings(tool, version, unit), chosen):
            unclean += bool(text)
            print(text, end="", flush=True)
    print(f"clang-tidy: {len(chosen) - unclean} of {len(chosen)} units are clean")
    return 1 if unclean else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
