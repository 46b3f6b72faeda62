"""The mutants of the CUDA kernels: each has its line (always), and none survives (slow)."""

from __future__ import annotations

import subprocess
import sys

import mutate_cuda_kernels as mutate
import pytest

TIMEOUT_S = 3000


def test_every_mutant_has_one_line_and_changes_it() -> None:
    for name, (path, text, replacement, test) in mutate.MUTANTS.items():
        assert (mutate.ROOT / "csrc" / "kernels" / path).read_text().count(text) == 1, f"{name}: in {path}"
        assert text != replacement, name
        kernels = [kernel for kernel in mutate.kernels_of(test) if path.endswith(".h") or kernel == path]
        assert kernels, f"{name}: {test} does not run {path}"
    assert len(mutate.MUTANTS) >= 20


@pytest.mark.slow
@pytest.mark.timeout_s(TIMEOUT_S + 60)
def test_every_mutant_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, mutate.__file__], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert f"{len(mutate.MUTANTS)} mutants, all killed" in done.stdout
