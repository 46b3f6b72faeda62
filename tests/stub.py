"""The stub of the native module, python/bucketwheel/native/core.pyi, from what pybind11 says of each binding.

    python tests/stub.py      # writes it

tests/unit/test_stub.py compares the two.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

STUB = Path(__file__).resolve().parents[1] / "python" / "bucketwheel" / "native" / "core.pyi"
HEAD = '''"""What the CPU module binds (csrc/bindings). Written by `python tests/stub.py`. ``Final``: cannot be assigned to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final
'''
# What is of every class, or of none in particular.
_NOT_OURS = {"__doc__", "__module__", "_pybind11_conduit_v1_", "__name__", "__qualname__", "__dict__", "__weakref__"}


def written(module: ModuleType) -> str:
    """The stub, not formatted."""
    lines = [HEAD]
    bound = sorted((item for item in vars(module).items() if not item[0].startswith("_")), key=lambda item: item[0])
    for name, value in bound:
        if isinstance(value, type):
            bases = [base.__name__ for base in value.__bases__ if base.__module__ == module.__name__]
            lines.append(f"class {name}{'(' + ', '.join(bases) + ')' if bases else ''}:")
            lines += [f"    {line}" for line in _members(value)] or ["    ..."]
        elif callable(value):
            lines.append(_definition(value.__doc__, is_method=False))
        else:
            lines.append(f"{name}: {type(value).__name__}")
    return "\n".join([*lines, ""])


def _members(bound: type) -> Iterator[str]:
    for name, value in vars(bound).items():
        if name in _NOT_OURS or type(value).__name__ == "wrapper_descriptor":  # object's: made by nobody
            continue
        if value is None:
            yield f"{name}: ClassVar[None]  # type: ignore[assignment]"
        elif isinstance(value, property):
            result = _parsed(f"{name}{(value.fget.__doc__ or '').splitlines()[0]}").returns
            kind = _python_type(ast.unparse(result) if result else "object")
            yield f"{name}: {kind if value.fset else f'Final[{kind}]'}"
        elif isinstance(value, staticmethod):
            yield f"@staticmethod\n    {_definition(value.__func__.__doc__, is_method=False)}"
        else:
            yield _definition(value.__doc__, is_method=True)


def _parsed(signature: str) -> ast.FunctionDef:
    """One line of pybind11's: ``name(self: module.Class, index: int = 0) -> str``."""
    (function,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function


def _definition(doc: str | None, *, is_method: bool) -> str:
    assert doc and "Overloaded function" not in doc, f"no single signature: {doc}"
    function = _parsed(doc.splitlines()[0])
    arguments = function.args
    for argument, default in _with_defaults(arguments):
        annotation = _python_type(ast.unparse(argument.annotation) if argument.annotation else "object", taken=True)
        if isinstance(default, ast.Constant) and default.value is None and annotation != "Any":
            annotation += "" if "None" in annotation else " | None"
        argument.annotation = ast.parse(annotation, mode="eval").body
    if is_method:
        arguments.args[0].annotation = None
    elif all(re.fullmatch(r"arg\d+", argument.arg) for argument in arguments.args):  # bound without names
        arguments.posonlyargs, arguments.args = arguments.args, []
    if function.name == "__eq__":
        arguments.args[1] = ast.arg("other", ast.Name("object"))
    result = "None" if function.name == "__init__" else ast.unparse(function.returns or ast.Constant(None))
    return f"def {function.name}({ast.unparse(arguments)}) -> {_python_type(result)}: ..."


def _with_defaults(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*([None] * (len(plain) - len(arguments.defaults))), *arguments.defaults]
    return [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]


def _python_type(text: str, *, taken: bool = False) -> str:
    """A type as pybind11 writes it, as a caller thinks of it. ``taken``: of an argument."""
    text = re.sub(r"typing\.Annotated\[(.*?), 'FixedSize\(\d+\)'\]", r"\1", text)
    text = re.sub(r"typing\.Supports(Int|Float) \| typing\.SupportsIndex", lambda found: found[1].lower(), text)
    text = re.sub(r"bucketwheel\._cpu\.|collections\.abc\.", "", text)
    text = re.sub(r"\bobject\b|typing_extensions\.CapsuleType|\bcapsule\b", "Any", text)
    text = re.sub(r"\b(Sequence|list)\b(?!\[)", r"\1[Any]", text)
    text = re.sub(r"\bdict\b(?!\[)", "dict[Any, Any]", text)
    text = re.sub(r"\bCallable\b(?!\[)", "Callable[..., Any]", text)
    # A std::string is made from either.
    return re.sub(r"(?<!Mapping\[)\bstr\b", "str | bytes", text) if taken else text


# ---- comparing -------------------------------------------------------------------------------------------------------


def names_in(stub: str) -> dict[str, str]:
    """All that a stub declares: ``Class.method`` -> its declaration, types and all, as `ast` writes it."""
    found: dict[str, str] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = f"class {', '.join(map(ast.unparse, node.bases))}"
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = ast.unparse(node)
            elif isinstance(node, ast.AnnAssign):
                found[prefix + ast.unparse(node.target)] = ast.unparse(node)

    visit(ast.parse(stub).body, "")
    return found


def differences(stub: str, module: ModuleType) -> list[str]:
    """Where a stub and the module differ, in either direction."""
    declared, bound = names_in(stub), names_in(written(module))
    return [
        f"{name}: the stub says {declared.get(name)}, the module {bound.get(name)}"
        for name in sorted({*declared, *bound})
        if declared.get(name) != bound.get(name)
    ]


if __name__ == "__main__":
    from bucketwheel.native.modules import native

    STUB.write_text(written(native()))
