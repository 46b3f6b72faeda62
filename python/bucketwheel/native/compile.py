"""One compile: ninja makes the sources of a recipe into one shared object. Knows nothing of caches and locks.

[Note: kept build folder]
A build folder has a copy of csrc/, build.ninja, the objects and ninja's records. ninja compiles a unit if its command changed or
a file that it read is newer than its object. The times of the user's files do not tell that: a package manager or git may bring
back an older file with its time. So ninja sees the copy, in which a file is written if its bytes changed, else left alone.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from bucketwheel.native import env
from bucketwheel.native.toolchain import CUDA, Module, Recipe, Source, Toolchain, explain, read_recipe, tree

_UNIT_SOURCES = 7
_GRACE_S = 10.0  # from SIGTERM to SIGKILL
# What ninja says of each run and ptxas of each kernel, whatever went wrong.
_CHATTER = re.compile(r"ninja: build stopped|\[\d+/\d+\] |ptxas info|\s+\d+ bytes stack frame, ")
_REMEDY = "a compiler with C++20 is needed (g++ >= 11, clang++ >= 14): choose one with CXX=..."
_CUDA_REMEDY = (
    "nvcc must know the architectures and the C++ compiler: choose by BW_CUDA_ARCH_LIST=9.0, NVCC=..., CXX=..."
)
_RULES = """builddir = ..
rule compile
  command = $cmd -MMD -MF $out.d
  depfile = $out.d
  deps = gcc
rule link
  command = $cmd
"""
# If the builder dies, even by SIGKILL, ninja gets SIGTERM and ends its compilers: nothing of a dead builder writes into
# the build folder of the next one. 1 is PR_SET_PDEATHSIG.
_RUN = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)}); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def compile_module(recipe: Recipe, toolchain: Toolchain, folder: Path, log: Path) -> Path:
    """Compile and link `copy_sources`' copy; returns the module's path. ``log`` gets all output. Raises `BuildError`."""
    module = f"../{recipe.module.file}"
    lines, commands = [_RULES], {}  # by what they make; all are run in csrc/
    for unit in units(recipe):
        out = f"../{unit[-1].path.replace('/', '_')}.o"
        commands[out] = shlex.join(command(recipe, toolchain, *unit, out=Path(out)))
        lines += [
            f"build {out}: compile {' '.join(source.path for source in unit)}",
            f"  cmd = {commands[out].replace('$', '$$')}",
        ]
    objects = list(commands)
    linker = toolchain.nvcc or toolchain.cxx
    commands[module] = shlex.join([*linker, "-o", module, *objects, *recipe.link_flags])
    lines += [f"build {module}: link {' '.join(objects)}", f"  cmd = {commands[module].replace('$', '$$')}", ""]
    (folder / "build.ninja").write_text("\n".join(lines))

    # ninja starts commands in the order of the targets that it is given; the list of sources has slow ones first.
    argv = [find_ninja(), "-f", "../build.ninja", f"-j{len(os.sched_getaffinity(0))}", *commands]
    is_done, output = _run(argv, folder / "csrc", recipe.module)
    log.write_text("\n".join([*commands.values(), "", output]))
    if is_done:
        return folder / recipe.module.file
    reported = re.findall(r"^FAILED: .*?(\S+)\s*$", output, re.MULTILINE)
    failed = next((out for out in reported if out in commands), "")
    verb = "linking" if failed == module else "compiling"
    raise explain(
        f"{verb} {failed.removeprefix('../')} failed" if failed else "ninja failed",
        module=recipe.module,
        command=f"cd {shlex.quote(str(folder / 'csrc'))} && {commands.get(failed, shlex.join(argv))}",
        lines=[line for line in output.splitlines() if not _CHATTER.match(line)],
        log=log,
        remedies=[_REMEDY, *([_CUDA_REMEDY] if recipe.module is CUDA else [])],
    )


def units(recipe: Recipe) -> list[tuple[Source, ...]]:
    """Which sources compile as one: neighbours in the list, of one folder and without flags of their own; at most 7.

    They include the same headers, and reading those takes longer than compiling the sources.
    """

    def group(source: Source) -> str:
        folder = os.path.dirname(source.path)
        return folder if folder and source.path.endswith(".cpp") and not source.flags else source.path

    groups = [tuple(group) for _, group in itertools.groupby(recipe.sources, group)]
    return [group[at : at + _UNIT_SOURCES] for group in groups for at in range(0, len(group), _UNIT_SOURCES)]


def command(recipe: Recipe, toolchain: Toolchain, *unit: Source, out: Path) -> tuple[str, ...]:
    """The compile of one unit, to be run in csrc/: paths are relative, so __FILE__ does not depend on where that is."""
    *others, source = unit
    if source.path.endswith(".cu"):
        head = (*toolchain.nvcc, *recipe.nvcc_flags, *source.flags, "-I.")
    else:
        includes = (word for folder in toolchain.includes for word in ("-isystem", folder))
        before = (word for other in others for word in ("-include", other.path))
        head = (*toolchain.cxx, *recipe.flags, *source.flags, "-I.", *includes, *before)
    return (*head, "-c", source.path, "-o", str(out))


def copy_sources(recipe: Recipe, folder: Path) -> Recipe:
    """Update the build folder's copy of csrc/ and read its list of sources: [Note: kept build folder]."""
    csrc, copy = recipe.csrc, folder / "csrc"
    copy.mkdir(exist_ok=True)
    wanted = [path.relative_to(csrc) for path in tree(csrc)]
    for path in tree(copy):
        if path.relative_to(copy) not in wanted:
            path.unlink()
    for name in wanted:
        data, target = (csrc / name).read_bytes(), copy / name
        if not target.is_file() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return read_recipe(copy, module=recipe.module)


def find_ninja() -> str:
    """ninja on PATH, else that of the package ninja, or a `BuildError`."""
    if path := shutil.which("ninja"):
        return path
    try:
        import ninja
    except ImportError as error:
        raise explain(f"ninja is not installed for {sys.executable}", remedies=["pip install ninja"]) from error
    return os.path.join(ninja.BIN_DIR, "ninja")


def _run(argv: list[str], cwd: Path, module: Module) -> tuple[bool, str]:
    """Run ninja; whether it succeeded, and its output. It has a session of its own: only this process ends it."""
    timeout_s = env.build_timeout_s()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(os.getpid()), *argv],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:  # for one, sys.executable is empty where Python is embedded
        remedy = f"have it built by an ordinary Python: python -m bucketwheel doctor --build {module.kind}"
        raise explain(f"ninja cannot be started: {error}", module=module, remedies=[remedy]) from error
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
            return process.returncode == 0, output
        except BaseException as error:  # too late, or Ctrl-C
            os.killpg(process.pid, signal.SIGTERM)  # only on this does ninja end its compilers, each a group of its own
            try:
                output, _ = process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return False, f"{output}\nstopped after {timeout_s:.0f} s (BW_BUILD_TIMEOUT)\n"
