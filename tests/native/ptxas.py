"""What `nvcc -Xptxas=-v` says of each kernel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(\S+)' for 'sm_(\w+)'")
_MEMORY = re.compile(r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"ptxas info\s*: Used (\d+) registers")


@dataclass(frozen=True)
class Kernel:
    """Memory in bytes; of the kernel and the functions it calls, whichever needs most."""

    name: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int

    def __str__(self) -> str:
        memory = f"stack {self.stack}, spills {self.spill_stores} + {self.spill_loads}"
        return f"{self.name} for sm_{self.arch}: {self.registers} registers, {memory}"


def kernels_in(output: str) -> list[Kernel]:
    """The kernels in the order of the output, with demangled names."""
    found: list[list] = []
    for line in output.splitlines():
        if match := _ENTRY.match(line):
            found.append([match[1], match[2], -1, -1, -1, -1])
        elif found and (match := _MEMORY.match(line)):
            found[-1][3:] = [max(old, int(new)) for old, new in zip(found[-1][3:], match.groups(), strict=True)]
        elif found and (match := _REGISTERS.match(line)):
            found[-1][2] = int(match[1])
    incomplete = [entry for entry in found if min(entry[2:]) < 0]
    assert not incomplete, f"not understood: {incomplete}"
    names = demangled([entry[0] for entry in found])
    return [Kernel(name, *entry[1:]) for name, entry in zip(names, found, strict=True)]


def demangled(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()
