"""The mutants of `make mutants`: each changes lines that are there."""

from __future__ import annotations

import mutate_cuda_kernels
import mutate_kernels


def test_every_mutant_of_the_cuda_kernels_has_one_line_and_changes_it() -> None:
    for name, (path, text, replacement, test) in mutate_cuda_kernels.MUTANTS.items():
        assert (mutate_cuda_kernels.ROOT / "csrc" / "kernels" / path).read_text().count(text) == 1, f"{name}: in {path}"
        assert text != replacement, name
        kernels = [kernel for kernel in mutate_cuda_kernels.kernels_of(test) if path.endswith(".h") or kernel == path]
        assert kernels, f"{name}: {test} does not run {path}"
    assert len(mutate_cuda_kernels.MUTANTS) >= 20


def test_every_mutant_of_the_kernels_has_its_lines_and_changes_them() -> None:
    for name, (path, text, replacement, tests) in mutate_kernels.MUTANTS.items():
        assert text in (mutate_kernels.ROOT / "csrc" / path).read_text(), f"{name}: in {path}"
        assert text != replacement, name
        assert all((mutate_kernels.ROOT / test).is_file() for test in tests), name
    assert set(mutate_kernels.MUTANTS) >= mutate_kernels.EQUIVALENT
