"""Do the tests notice a broken optimizer? Breaks one place at a time in grads/, optim/ and gathers/, and runs tests on it.

    python tests/mutate_optim.py [--seed 0] [--count 180] [--folder grads] [--jobs 2] [--limit 900] [--label new] [TEST ...]

Mutants are of the syntax tree: a condition is negated, a statement dropped, an operator or a constant exchanged, a
function left at once. Which ones, the seed says; so two runs with one seed compare two sets of tests, by ``--label``.
Each is one line of build/mutants_optim.jsonl, and a run goes on where one with the same label has stopped. What is
printed last is how many were caught, folder by folder, and where the survivors are. A survivor need not be a gap:
what it changed may be seen by nobody. Tests: the optimizer's, unless some are named. Hours for all; minutes for a sample.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("python/bucketwheel")
FOLDERS = ("grads", "optim", "gathers")
TESTS = ["tests/conformance/optimizer", "tests/unit/test_placeholder.py"]
TESTS += ["tests/stock/test_stock.py", "tests/stock/test_ddp_wrapper.py"]
PAIRS = [(ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)]
PAIRS += [(ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Div, ast.Mod)]
OPERATORS: dict[type, type] = {**dict(PAIRS), **{b: a for a, b in PAIRS}}  # type: ignore[type-var]


@dataclass(frozen=True)
class Mutant:
    path: str  # below python/bucketwheel
    kind: str
    begin: int  # of the text that is replaced, in the file
    end: int
    text: str
    line: int

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]

    def applied_to(self, source: str) -> str:
        return source[: self.begin] + self.text + source[self.end :]

    def key(self, label: str) -> tuple[str, ...]:
        return label, self.path, str(self.begin), self.text


def changes_of(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST | str]]:
    """(kind, what is replaced, by what)."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "negated", node.test, ast.UnaryOp(ast.Not(), node.test)
    is_said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Yield)
    is_name = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple)
    if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and not is_said and not is_name:
        yield "dropped", node, "pass"
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        yield "exchanged", node, type(node)(**{**vars(node), "op": OPERATORS[type(node.op)]()})
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield "exchanged", node, type(node)(**{**vars(node), "ops": [OPERATORS[type(node.ops[0])](), *node.ops[1:]]})
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "flipped", node, ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "off by one", node, ast.Constant(node.value + 1)
    if isinstance(node, ast.FunctionDef):
        first = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if len(first) > 1:
            yield "left at once", first[0], "return None"


def without_annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Nothing computes with them, nor with types' own tests and what is said in errors."""
    for name, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            is_said = name in ("annotation", "returns") or isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert)
            if isinstance(node, ast.AST) and not is_said:
                yield node
                yield from without_annotations(node)


def mutants_of(path: Path) -> list[Mutant]:
    source = path.read_text()
    begins = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    assert len(source) == len(source.encode()), f"{path}: not ASCII"
    found = []
    for node in without_annotations(ast.parse(source)):
        for kind, old, new in changes_of(node):
            begin = begins[old.lineno - 1] + old.col_offset  # type: ignore[attr-defined]
            end = begins[old.end_lineno - 1] + old.end_col_offset  # type: ignore[attr-defined]
            text = new if isinstance(new, str) else f"({ast.unparse(new)})"
            name = str(path.relative_to(ROOT / PACKAGE))
            found.append(Mutant(name, kind, begin, end, text, old.lineno))  # type: ignore[attr-defined]
    return found


def sample(folders: list[str], count: int, seed: int) -> list[Mutant]:
    """As many of each folder as it is large."""
    every = {
        folder: [m for p in sorted((ROOT / PACKAGE / folder).glob("*.py")) for m in mutants_of(p)] for folder in FOLDERS
    }
    total = sum(map(len, every.values()))
    chosen = {f: random.Random(f"{seed} {f}").sample(every[f], max(1, count * len(every[f]) // total)) for f in FOLDERS}
    return [mutant for folder in folders for mutant in chosen[folder]]


def run_tests(tree: Path, tests: list[str], limit_s: float) -> tuple[str, str]:
    """(outcome, the last line that pytest said)."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "--no-header",
        *tests,
    ]
    env = {**os.environ, "PYTHONPATH": f"{tree / 'python'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said = process.communicate(timeout=limit_s)[0].strip().splitlines() or [""]
        return ("survived" if process.returncode == 0 else "caught"), said[-1][:200]
    except subprocess.TimeoutExpired:
        return "caught", f"not over after {limit_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # ranks are in sessions of their own, and end with it
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=180)
    parser.add_argument("--folder", choices=FOLDERS, action="append")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--limit", type=float, default=900.0)  # seconds for the tests of one mutant
    parser.add_argument("--label", default="new")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants_optim.jsonl")
    parser.add_argument("tests", nargs="*", default=TESTS)
    given = parser.parse_args()
    given.out.parent.mkdir(exist_ok=True)
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    mutants = sample(given.folder or list(FOLDERS), given.count, given.seed)
    done = {(one["label"], one["path"], str(one["begin"]), one["text"]): one for one in known}
    left = iter([mutant for mutant in mutants if mutant.key(given.label) not in done])  # of all workers
    writing = threading.Lock()

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="bw-mutants-") as folder:
            tree = Path(folder) / "tree"
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("__pycache__", "build", ".*"))
            first, said = run_tests(tree, given.tests, 10 * given.limit)  # builds what tests need, too
            if first != "survived":
                raise RuntimeError(f"the tests fail without a mutant: {said}")
            for mutant in left:
                file = tree / PACKAGE / mutant.path
                source = file.read_text()
                file.write_text(mutant.applied_to(source))
                outcome, said = run_tests(tree, given.tests, given.limit)
                file.write_text(source)
                entry = {"label": given.label, **asdict(mutant), "outcome": outcome, "said": said}
                with writing:
                    done[mutant.key(given.label)] = entry
                    print(f"{outcome:9}{mutant.path}:{mutant.line} {mutant.kind}: {said}", flush=True)
                    with given.out.open("a") as out:
                        out.write(json.dumps(entry) + "\n")

    threads = [threading.Thread(target=work) for _ in range(given.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for folder in given.folder or FOLDERS:
        entries = [done[m.key(given.label)] for m in mutants if m.folder == folder]
        survivors = [entry for entry in entries if entry["outcome"] == "survived"]
        print(f"{folder}: {len(entries) - len(survivors)} of {len(entries)} caught")
        for entry in survivors:
            print(f"  survived: {entry['path']}:{entry['line']} {entry['kind']}: {entry['text'][:80]!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
