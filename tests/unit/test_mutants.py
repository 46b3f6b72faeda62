"""The mutants of `make mutants`: each changes lines that are there."""

from __future__ import annotations

import ast

from tests import mutate_cuda_kernels, mutate_kernels, mutate_optim


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


def test_mutants_of_the_optimizer_are_python_and_the_same_for_a_seed() -> None:
    mutants = mutate_optim.sample(list(mutate_optim.FOLDERS), 180, 0)
    assert len(set(mutants)) >= 150 and mutants == mutate_optim.sample(list(mutate_optim.FOLDERS), 180, 0)
    for mutant in mutants:
        source = (mutate_optim.ROOT / mutate_optim.PACKAGE / mutant.path).read_text()
        assert ast.dump(ast.parse(mutant.applied_to(source))) != ast.dump(ast.parse(source)), mutant
