"""The shape of the sources: who may include or import whom, how long files are, and what may stand where.

The tables below are the agreed dependencies and sizes; a new folder or module enters its table in the same change.
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.lines import rooms

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "bucketwheel"

# csrc/<room> may include itself and these, and includes each. A file belongs to the innermost room.
MAY_INCLUDE = {
    "base": set(),
    "device": {"base"},
    "plan": {"base"},
    "kernels": {"base", "device"},
    "pool": {"base", "device"},
    "comm": {"base", "device", "kernels", "pool", "comm/peers"},
    "comm/peers": {"base", "device", "comm"},
    "comm/host": {"base", "device", "kernels", "pool", "comm", "comm/peers"},
    "comm/nccl": {"base", "device", "kernels", "pool", "comm", "comm/peers"},
    "comm/c10d": {"base", "comm", "comm/peers"},
    "window": {"base", "device", "plan", "kernels", "pool", "comm", "comm/peers"},
}
MAY_INCLUDE["bindings"] = set(MAY_INCLUDE)

# python/bucketwheel/<room> may import itself and these, and imports each; the modules beside the rooms are rooms too.
MAY_IMPORT = {
    "_version": set(),
    "errors": set(),
    "native": {"_version", "errors"},
    "torch_internals": set(),
    "device": {"errors", "native"},
    "pool": {"errors", "native", "torch_internals", "device"},
    "comm": {"_version", "errors", "native", "torch_internals", "device", "pool"},
    "kernels": {"errors", "native", "device", "comm"},
    "layout": {"errors", "torch_internals", "pool"},
    "grads": {"errors", "native", "torch_internals", "device", "pool", "comm", "kernels", "layout"},
    "checkpoint": {"errors", "native", "torch_internals", "device", "comm", "layout"},
    "residency": {"errors", "native", "device", "comm", "layout"},
    "shard": {"errors", "native", "torch_internals", "device", "pool", "comm", "layout", "checkpoint", "residency"},
    "optim": {
        "_version",
        "errors",
        "native",
        "torch_internals",
        "device",
        "pool",
        "comm",
        "kernels",
        "layout",
        "grads",
        "checkpoint",
        "residency",
    },
    "tools": {"_version", "errors", "native", "pool", "comm", "checkpoint"},
    "testing": set(),
    "__init__": {"_version", "errors", "pool", "comm", "kernels", "layout", "checkpoint", "shard", "optim"},
    "__main__": {"_version"},  # and tools, by the name of the command
}

# Lines of code (tests/lines.py --rooms) that a room may have. It goes down with the room. A change that raises it says in its
# message what the room gained.
BUDGETS = {
    "csrc/base": 771,
    "csrc/bindings": 3662,
    "csrc/comm": 1285,
    "csrc/comm/c10d": 457,
    "csrc/comm/host": 1874,
    "csrc/comm/nccl": 1682,
    "csrc/comm/peers": 732,
    "csrc/device": 1187,
    "csrc/kernels": 3665,
    "csrc/plan": 1183,
    "csrc/pool": 1503,
    "csrc/window": 1376,
    "python": 592,
    "python/checkpoint": 2849,
    "python/comm": 2047,
    "python/residency": 535,
    "python/shard": 811,
    "python/grads": 1255,
    "python/kernels": 444,
    "python/layout": 831,
    "python/native": 785,
    "python/optim": 2882,
    "python/pool": 981,
    "python/tools": 601,
}
MAX_FACE_NAMES = 8
# Decided in pure code: values in, values out, nothing of torch and nothing native.
PURE = {"_version", "errors", "layout.packing", "layout.row_cuts", "checkpoint.boxes", "residency.demand_order"}
PURE |= {"tools.flight", "pool.trace", "pool.foreign_traces"}
PURE |= {f"native.{path.stem}" for path in (PACKAGE / "native").glob("*.py")}

MAX_LINES = 700
MAX_FUNCTION_LINES = 66  # about 60, without signature and docstring

PLATFORM = re.compile(
    r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*\b(__x86_64__|__i386__|__aarch64__|__arm__|__linux__|__APPLE__|_WIN32|"
    r"__CUDA\w*|__NVCC__|__AVX\w*|__SSE\w*|__FMA__|__GNUC__|__clang__|_MSC_VER)\b",
    re.MULTILINE,
)
PLATFORM_SUFFIXES = ("_cpu", "_cuda", "_sim", "_avx2", "_avx512", "_isa")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
# Folders of one machine, which mean nothing to a reader on another one.
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:work|root|tmp/w|home/\w+|opt/\w+)/\w")
NATIVE = {".h", ".cpp", ".cu"}
TEXT = NATIVE | {".py", ".pyi", ".md", ".toml", ".txt", ".yaml", ".cmake", ".jsonl", ""}


def native_files() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in NATIVE)


def texts() -> Iterator[Path]:
    """The text files of the repository, without hidden folders and what tools leave behind."""
    left_behind = {"build", "dist", "out", "__pycache__", "results"}
    for folder, folders, files in os.walk(ROOT):
        kept = [name for name in folders if name not in left_behind and not name.endswith(".egg-info")]
        folders[:] = [name for name in kept if not name.startswith(".") or name == ".ci"]
        yield from (Path(folder, name) for name in files if Path(name).suffix in TEXT and name != ".git")


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


# ---- C++ -------------------------------------------------------------------------------------------------------------


def unused_in(permissions: dict[str, set[str]], used: dict[str, set[str]]) -> list[tuple[str, set[str]]]:
    """A permission that nobody uses is a door that somebody will use."""
    return [(room, unused) for room, allowed in permissions.items() if (unused := allowed - used[room])]


def test_includes_go_one_way() -> None:
    problems = []
    used: dict[str, set[str]] = defaultdict(set)
    for path in native_files():
        folder = str(path.parent.relative_to(CSRC))
        assert folder in MAY_INCLUDE, f"{folder} has no place in MAY_INCLUDE"
        for quote, name in INCLUDE.findall(path.read_text()):
            if quote == '"':
                target = os.path.dirname(name)
                if not (CSRC / name).is_file():
                    problems.append(f"{path}: {name!r} is not a path from csrc/")
                elif target != folder and target not in MAY_INCLUDE[folder]:
                    problems.append(f"{path}: {folder} may not include {target} ({name})")
                used[folder].add(target)
    problems += [
        f"MAY_INCLUDE: {room} includes nothing of {sorted(unused)}" for room, unused in unused_in(MAY_INCLUDE, used)
    ]
    report(problems)


def test_names_of_a_folder_do_not_clash() -> None:
    """Sources of a folder are compiled several in one unit, which ones depends on how many there are."""
    problems = []
    for folder in sorted({path.parent for path in CSRC.rglob("*.cpp")}):
        seen: dict[str, Path] = {}
        for path in sorted(folder.glob("*.cpp")):
            for name in re.findall(r"^constexpr [\w:<>]+ (k\w+)", path.read_text(), re.MULTILINE):
                if name in seen:
                    problems.append(f"{path}: {name} is in {seen[name].name} too")
                seen[name] = path
    report(problems)


def test_python_stays_in_bindings_and_torch_outside() -> None:
    problems = []
    for path in native_files():
        for _, name in INCLUDE.findall(path.read_text()):
            if re.match(r"(torch|ATen|c10|caffe2)/", name):
                problems.append(f"{path}: {name}: native code knows no torch header")
            if (name == "Python.h" or name.startswith("pybind11/")) and path.relative_to(CSRC).parts[0] != "bindings":
                problems.append(f"{path}: {name}: only bindings know Python")
    report(problems)


STATIC_OBJECT = re.compile(r"\b(?:static|thread_local)\s+(?:(?:const|inline|thread_local)\s+)*py::\w+\s+(\w+)\s*[=;{]")


def test_no_python_object_is_freed_after_python() -> None:
    """A static one would be: its destructor runs when the process ends, which Python 3.12 does not survive."""
    hits = [(path, hit[1]) for path in native_files() for hit in STATIC_OBJECT.finditer(path.read_text())]
    report([f"{path}: {name} is static and an object of Python" for path, name in hits])


def test_platform_ifdefs_are_in_one_file() -> None:
    problems = []
    for path in native_files():
        if path == CSRC / "base" / "platform.h" or path.stem.endswith(PLATFORM_SUFFIXES):
            continue
        text = path.read_text()
        for found in PLATFORM.finditer(text):
            problems.append(f"{path}:{line_of(text, found.start())}: {found[1]} belongs into base/platform.h")
    report(problems)


def test_environment_is_read_in_one_place() -> None:
    readers = [path for path in native_files() if re.search(r"\b(secure_)?getenv\b", path.read_text())]
    report([f"{path}: reads the environment" for path in readers if path.parent.name != "base" or path.stem != "env"])


def test_headers_have_a_guard_and_the_namespace() -> None:
    problems = []
    for path in native_files():
        text = path.read_text()
        if path.suffix == ".h" and "#pragma once" not in text:
            problems.append(f"{path}: no #pragma once")
        if re.search(r"^using namespace", text, re.MULTILINE) and path.suffix == ".h":
            problems.append(f"{path}: `using namespace` in a header")
    report(problems)


def first_include(path: Path) -> str:
    found = INCLUDE.search(path.read_text())
    return found[2] if found else ""


def test_a_source_includes_its_own_header_first() -> None:
    """So every build shows that this header compiles alone; cmake/ compiles the other ones."""
    pairs = [(path, path.with_suffix(".h")) for path in native_files() if path.suffix in {".cpp", ".cu"}]
    wrong = [cpp for cpp, header in pairs if header.is_file() and first_include(cpp) != str(header.relative_to(CSRC))]
    report([f"{path}: its first include is {first_include(path)!r}" for path in wrong])


# ---- Python ----------------------------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Every module by its name in the package: "comm.handle"; a face by its room's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imported(path: Path) -> set[str]:
    """The modules of the package that the file imports anywhere, but for type checking only."""
    known, names = modules(), set()

    def add(module: str, alias: str = "") -> None:
        full = f"{module}.{alias}".removeprefix("bucketwheel").removeprefix(".").rstrip(".")
        short = module.removeprefix("bucketwheel").removeprefix(".")
        if full in known or short:
            names.add(full if full in known else short)
        elif alias not in ("_cpu", "_cuda"):
            names.add("__init__")

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "bucketwheel":
                    add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            if (node.module or "").split(".")[0] == "bucketwheel":
                for alias in node.names:
                    add(node.module or "", alias.name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return names


def test_imports_go_one_way() -> None:
    graph = {name: imported(path) for name, path in modules().items()}
    rooms = {name.split(".")[0] for name in graph}
    report([f"{room} has no row in MAY_IMPORT" for room in sorted(rooms - set(MAY_IMPORT))])
    report([f"MAY_IMPORT has {room}, which is not there" for room in sorted(set(MAY_IMPORT) - rooms)])
    problems = []
    used: dict[str, set[str]] = defaultdict(set)
    for name, needs in graph.items():
        room = name.split(".")[0]
        for need in sorted(needs):
            used[room].add(need.split(".")[0])
            if need not in graph:
                problems.append(f"{name} imports {need}, which is unknown")
            elif need.split(".")[0] not in {room, *MAY_IMPORT[room]}:
                problems.append(f"{name} may not import {need}: MAY_IMPORT[{room!r}] does not have that room")
    problems += [
        f"MAY_IMPORT: {room} imports nothing of {sorted(unused)}" for room, unused in unused_in(MAY_IMPORT, used)
    ]
    report(problems)

    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a circle: {' -> '.join([*above, name])}"
        if name not in done:
            for need in graph.get(name, ()):
                walk(need, (*above, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_what_decides_is_pure() -> None:
    problems = []
    for module in sorted(PURE):
        path = modules()[module if not module.endswith("__init__") else module.rpartition(".")[0]]
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "torch" for name in names):
                problems.append(f"{path}:{node.lineno}: imports torch")
        if not module.startswith("native.") and any(need.startswith("native") for need in imported(path)):
            problems.append(f"{path}: needs the native module")
    report(problems)


def test_rooms_have_a_face() -> None:
    """At most ten lines that say what a room is for, what it may use and where to start; at most eight names."""
    problems = []
    for face in sorted(PACKAGE.glob("*/__init__.py")):
        tree = ast.parse(face.read_text())
        says = (ast.get_docstring(tree) or "").count("\n") + 1
        names = [name for node in tree.body if isinstance(node, ast.Assign) for name in ast.literal_eval(node.value)]
        if not 2 <= says <= 10:
            problems.append(f"{face}: {says} lines of docstring")
        if len(names) > MAX_FACE_NAMES:
            problems.append(f"{face}: {len(names)} names")
    report(problems)


def test_init_only_re_exports() -> None:
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    report(
        [f"__init__.py:{node.lineno}: defines" for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    )


def test_rooms_keep_their_budgets() -> None:
    lines = rooms()
    report([f"{room} has no row in BUDGETS" for room in lines if room not in BUDGETS])
    report([f"BUDGETS has {room}, which is not there" for room in BUDGETS if room not in lines])
    over = [(room, count) for room, count in lines.items() if count > BUDGETS[room]]
    report(
        [f"{room}: {count} lines of code, its budget is {BUDGETS[room]}: take something away" for room, count in over]
    )


# ---- all files -------------------------------------------------------------------------------------------------------


def test_files_and_functions_are_short() -> None:
    problems = []
    for path in texts():
        if path.suffix not in NATIVE | {".py"}:
            continue
        text = path.read_text()
        if (lines := text.count("\n")) > MAX_LINES:
            problems.append(f"{path}: {lines} lines; look for the second concept")
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    body = node.body[1:] if ast.get_docstring(node) else node.body
                    length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                    if length > MAX_FUNCTION_LINES:
                        problems.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    report(problems)


def test_no_paths_of_one_machine() -> None:
    problems = []
    for path in texts():
        text = path.read_text(errors="replace")
        problems += [f"{path}:{line_of(text, found.start())}: {found[0]}" for found in MACHINE_PATH.finditer(text)]
    report(problems)


def test_the_package_needs_no_numpy() -> None:
    """`device.buffer_of` shows memory as bytes; torch's collectives of objects use numpy. (issue 44)"""
    problems = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            is_object = re.fullmatch(r"(all_)?(gather|scatter|broadcast)_object(_list)?|from_numpy|numpy", name)
            if is_object or any(one.split(".")[0] == "numpy" for one in [module, *names]):
                problems.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    report(problems)


FACTORIES = set(
    """arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand randint randn randperm range
    scalar_tensor tensor zeros""".split()
)


def test_factories_name_dtype_and_device():
    """Else they would follow torch.set_default_dtype, torch.set_default_device and ``with torch.device(...)``."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path.stem != "testing" else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}:
                named = {keyword.arg for keyword in node.keywords}  # None: **options
                assert named >= {"dtype", "device"} or None in named, f"{path}:{node.lineno}: {ast.unparse(node)}"
