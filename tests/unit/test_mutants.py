"""The mutants of `make mutants`: each changes lines that are there."""

from __future__ import annotations

import ast

from tests import mutate_kernels, mutate_optim


def test_every_mutant_has_its_lines_and_tests() -> None:
    for path, tests, mutants in mutate_kernels.MUTANTS:
        (file,) = (mutate_kernels.ROOT / "csrc").rglob(path)
        source = file.read_text()
        assert all((mutate_kernels.ROOT / test.partition("::")[0]).is_file() for test in tests), path
        for name, text, replacement in mutants:
            assert text in source and text != replacement, f"{path}: {name}"
    chosen = mutate_optim.sample(40, 0)
    assert chosen == mutate_optim.sample(40, 0)
    for mutant in chosen:
        source = (mutate_optim.ROOT / mutate_optim.PACKAGE / mutant.path).read_text()
        assert ast.dump(ast.parse(mutant.applied_to(source))) != ast.dump(ast.parse(source)), mutant
