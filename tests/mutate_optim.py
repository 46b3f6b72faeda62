"""Do the tests notice a broken optimizer? Breaks one place at a time in grads/, optim/ and residency/, and runs tests on it.

    python tests/mutate_optim.py [--seed 0] [--count 180] [TEST ...]

Mutants are of the syntax tree: a condition is negated, a statement dropped, an operator or a constant exchanged, a
function left at once. The seed chooses them. Survivors are printed; one need not be a gap: its change may be seen by
nobody. Tests: the optimizer's, unless some are named. Hours for all; minutes for a sample.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.mutate_kernels import ROOT, copied_tree, is_caught

PACKAGE = Path("python/bucketwheel")
FOLDERS = ("grads", "optim", "residency")
TESTS = ["tests/conformance/optimizer", "tests/unit/test_placeholder.py"]
TESTS += ["tests/stock/test_stock.py", "tests/stock/test_ddp_wrapper.py"]
PAIRS = [(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)]
PAIRS += [(ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Div, ast.Mod)]
OPERATORS: dict[type, type] = {**dict(PAIRS), **{b: a for a, b in PAIRS}}  # type: ignore[type-var]


@dataclass(frozen=True)
class Mutant:
    path: str  # below python/bucketwheel
    begin: int  # of the text that is replaced, in the file
    end: int
    text: str
    line: int

    def applied_to(self, source: str) -> str:
        return source[: self.begin] + self.text + source[self.end :]


def changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | str]]:
    """The old node and the new one, or its text."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    is_said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Yield)
    is_name = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple)
    if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and not is_said and not is_name:
        yield node, "pass"
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        yield node, type(node)(**{**vars(node), "op": OPERATORS[type(node.op)]()})
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield node, type(node)(**{**vars(node), "ops": [OPERATORS[type(node.ops[0])](), *node.ops[1:]]})
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.FunctionDef):
        first = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if len(first) > 1:
            yield first[0], "return None"


def without_annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Nothing computes with them, nor with types' own tests and the texts of errors."""
    for name, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            is_said = name in ("annotation", "returns") or isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert)
            if isinstance(node, ast.AST) and not is_said:
                yield node
                yield from without_annotations(node)


def mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_text()
    begins = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    assert len(source) == len(source.encode()), f"{path}: not ASCII"
    for node in without_annotations(ast.parse(source)):
        for old, new in changes_of(node):
            begin = begins[old.lineno - 1] + old.col_offset  # type: ignore[attr-defined]
            end = begins[old.end_lineno - 1] + old.end_col_offset  # type: ignore[attr-defined]
            text = new if isinstance(new, str) else f"({ast.unparse(new)})"
            yield Mutant(str(path.relative_to(ROOT / PACKAGE)), begin, end, text, old.lineno)  # type: ignore[attr-defined]


def sample(count: int, seed: int) -> list[Mutant]:
    files = [path for folder in FOLDERS for path in sorted((ROOT / PACKAGE / folder).glob("*.py"))]
    return random.Random(seed).sample([mutant for path in files for mutant in mutants_of(path)], count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=180)
    parser.add_argument("tests", nargs="*", default=TESTS)
    given = parser.parse_args()
    survivors, tests = 0, ["-m", "not slow", *given.tests]
    with copied_tree() as tree:
        for number, mutant in enumerate(sample(given.count, given.seed)):
            file = tree / PACKAGE / mutant.path
            if number == 0 and is_caught(tree, tests, file, file.read_text()):
                sys.exit("the tests fail without a mutant")
            if not is_caught(tree, tests, file, mutant.applied_to(file.read_text())):
                survivors += 1
                print(f"survives {mutant.path}:{mutant.line}: {mutant.text[:80]!r}", flush=True)
    print(f"{given.count - survivors} of {given.count} caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
