"""How much there is to read: lines of code, without blank lines, comments and docstrings.

    python tests/lines.py           # csrc, python (the generated stub apart) and tests
    python tests/lines.py --files   # and each file
    python tests/lines.py --rooms   # and each room, as BUDGETS of tests/test_layering.py has them
    python tests/lines.py --trip    # the files that one gradient passes, tests/trip.txt

A line of more than 120 columns counts as its length / 120. Tests count all their lines, as `wc -l` does.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 120
NATIVE = {".h", ".cpp", ".cu", ".cuh"}
PYTHON = {".py", ".pyi"}
# What a C++ lexer must tell apart so that no comment is seen in a string, and no string in a comment.
CXX = re.compile(
    r'(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'',
    re.DOTALL,
)
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def native_code(text: str) -> list[str]:
    """The lines that hold code, without their comments."""

    def kept(found: re.Match[str]) -> str:
        return found[0] if found["comment"] is None else re.sub(r"[^\n]", "", found[0])

    # A digit separator (1'000) is no character constant.
    text = re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", "", text)
    return [line for line in CXX.sub(kept, text).splitlines() if line.strip()]


def python_code(text: str) -> list[str]:
    """The lines that hold code, without their comments."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines, ends = text.splitlines(), defaultdict(int)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            for line in range(token.start[0], token.end[0] + 1):
                end = token.end[1] if line == token.end[0] else len(lines[line - 1])
                ends[line] = max(ends[line], end)
    return [
        lines[line - 1][:end]
        for line, end in sorted(ends.items())
        if line not in docstrings and lines[line - 1].strip()
    ]


def code_lines(path: Path) -> float:
    code = (python_code if path.suffix in PYTHON else native_code)(path.read_text())
    return sum(max(1.0, len(line) / COLUMNS) for line in code)


def all_lines(path: Path) -> int:
    return path.read_text().count("\n")


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in NATIVE | PYTHON and "_csrc" not in p.parts)


def rooms() -> dict[str, int]:
    """The lines of each room: a folder of csrc, a folder of the package (what stands beside these is "python")."""
    found: dict[str, float] = defaultdict(float)
    for path in sources("csrc"):
        found[str(path.parent.relative_to(ROOT))] += code_lines(path)
    for path in sources("python"):
        if path.suffix == ".py":
            parts = path.parent.relative_to(ROOT / "python").parts
            found["/".join(("python", *parts[1:]))] += code_lines(path)
    return {room: round(lines) for room, lines in sorted(found.items())}


def tests() -> list[Path]:
    return [p for p in sources("tests") if "__pycache__" not in p.parts]


def trip() -> dict[str, list[Path]]:
    """The stems of tests/trip.txt, each with its files."""
    text = re.sub(r"#.*", "", (ROOT / "tests" / "trip.txt").read_text())
    found = {}
    for stem in text.split():
        files = [path for suffix in sorted(NATIVE | PYTHON) if (path := ROOT / (stem + suffix)).is_file()]
        if not files:
            raise SystemExit(f"tests/trip.txt: no file has the stem {stem}")
        found[stem] = files
    return found


def tell_trip() -> None:
    stems = trip()
    for title, prefix in (("python", "python/"), ("csrc", "csrc/"), ("all", "")):
        files = [path for stem, paths in stems.items() if stem.startswith(prefix) for path in paths]
        count = sum(stem.startswith(prefix) for stem in stems)
        code = round(sum(map(code_lines, files)))
        print(f"trip {title}: {count} stems, {len(files)} files, {sum(map(all_lines, files))} lines, {code} of code")


def main(words: list[str]) -> None:
    if "--trip" in words:
        return tell_trip()
    if "--rooms" in words:
        for room, lines in rooms().items():
            print(f"{lines:7} {room}")
    total = 0.0
    for folder in ("csrc", "python"):
        counts = {path: code_lines(path) for path in sources(folder)}
        stub = sum(counts.pop(path) for path in list(counts) if path.suffix == ".pyi")
        if "--files" in words:
            for path, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"{round(count):7} {path.relative_to(ROOT)}")
        apart = f", {round(stub)} of generated stub apart" if stub else ""
        print(f"{folder}: {round(sum(counts.values()))} lines of code in {len(counts)} files{apart}")
        total += sum(counts.values())
    print(f"csrc + python: {round(total)} lines of code")
    print(f"tests: {sum(map(all_lines, tests()))} lines in {len(tests())} files")


if __name__ == "__main__":
    main(sys.argv[1:])
