"""What `make` installs beside the torch that it has just installed: that torch stays, and so does the NCCL that it requires.

    python tests/beside_torch.py OUT           # writes the constraints for pip into OUT, prints the extras to ask for
    python tests/beside_torch.py OUT --check   # fails where torch is another one than OUT says

pip would rather take another torch than go without a version that is asked for. constraints.txt names an NCCL for torches
that bring none; CUDA builds of torch require one of their own, each exactly one version, and the packages for CUDA 12 and 13
put it into the same file.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

PINS = Path(__file__).resolve().parents[1] / "constraints.txt"
EXTRAS = ("demo", "docs", "lint", "test")
NCCL = "nvidia-nccl-"


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def brings_nccl() -> bool:
    """Whether the installed torch requires an NCCL on this platform: if so, pip has installed that too."""
    installed = {name_of(found.metadata["Name"] or "") for found in metadata.distributions()}
    named = {name_of(requirement) for requirement in metadata.requires("torch") or ()}
    return any(name.startswith(NCCL) for name in named & installed)


def constraints(pins: str, torch: str, *, has_nccl: bool) -> str:
    """The pins, but of torch its version and of NCCL none where torch has one."""
    kept = [line for line in pins.splitlines() if line and not line.startswith("#")]
    kept = [line for line in kept if name_of(line) != "torch" and not (has_nccl and name_of(line).startswith(NCCL))]
    return "\n".join([f"torch=={torch}", *kept, ""])


def main(out: Path, *, is_check: bool) -> None:
    torch = metadata.version("torch")
    if is_check:
        held = out.read_text().partition("\n")[0]
        if held != f"torch=={torch}":
            sys.exit(f"{held} was to be kept, and pip has replaced it by {torch}")
        return
    has_nccl = brings_nccl()
    out.write_text(constraints(PINS.read_text(), torch, has_nccl=has_nccl))
    print(",".join(EXTRAS if has_nccl else (*EXTRAS, "nccl")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_check="--check" in sys.argv[2:])
