"""One compile: ninja makes the sources of a recipe into one shared object. Knows nothing of caches and locks.

[Note: kept build folder]
A build folder has a copy of csrc/, build.ninja, the objects and ninja's records. ninja compiles a unit if its command changed or
a file that it read is newer than its object. The times of the user's files do not tell that: a package manager or git may bring
back an older file with its time. So ninja sees the copy, in which a file is written if its bytes changed, else left alone.

[Note: a builder that is killed] ninja goes on without it, and so do its compilers: a rank that lives for seconds would
never get a long compile done otherwise. They hold the lock of the build folder, which is what they inherit, so the next
builder comes when they are through, finds their objects and links. Their output goes to a file: nobody reads a pipe.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

from bucketwheel.native import env
from bucketwheel.native.progress import Progress
from bucketwheel.native.toolchain import CUDA, Recipe, Source, Toolchain, explain, needed, read_recipe, tree

_UNIT_SOURCES = 7
_LOOK_S = 0.2  # between two looks at how far ninja is
_GRACE_S = 10.0  # from SIGTERM to SIGKILL
# What ninja says of each run and ptxas of each kernel, whatever went wrong.
_CHATTER = re.compile(r"ninja: build stopped|\[\d+/\d+\] |ptxas info|\s+\d+ bytes stack frame, ")
_REMEDY = "a compiler with C++20 is needed (g++ >= 11, clang++ >= 14): choose one with CXX=..."
_CUDA_REMEDY = "nvcc must support the architectures and the C++ compiler: set BW_CUDA_ARCH_LIST=9.0, NVCC=..., CXX=..."
_NINJA_REMEDY = "pip install ninja, into an environment on a file system that is not mounted noexec"
_RULES = """builddir = ..
rule compile
  command = $cmd -MMD -MF $out.d
  depfile = $out.d
  deps = gcc
rule link
  command = $cmd
"""


def compile_module(recipe: Recipe, toolchain: Toolchain, folder: Path, log: Path, lock: int | None = None) -> Path:
    """Compile and link `copy_sources`' copy; returns the module's path. ``log`` gets all output. Raises `BuildError`.

    ``lock``: the file descriptor of the lock of ``folder``, [Note: a builder that is killed]. None: nobody else uses it.
    """
    module = f"../{recipe.module.file}"
    commands, made_of = {}, {}  # by what they make; all are run in csrc/
    for unit in units(recipe):
        out = f"../{unit[-1].path.replace('/', '_')}.o"
        commands[out] = shlex.join(command(recipe, toolchain, *unit, out=Path(out)))
        made_of[out] = f"compile {' '.join(source.path for source in unit)}"
    made_of[module] = f"link {' '.join(commands)}"
    commands[module] = shlex.join([*(toolchain.nvcc or toolchain.cxx), "-o", module, *commands, *recipe.link_flags])
    rules = [f"build {out}: {made_of[out]}\n  cmd = {text.replace('$', '$$')}\n" for out, text in commands.items()]
    (folder / "build.ninja").write_text("".join([_RULES, *rules]))

    # ninja starts commands in the order of the targets that it is given; the list of sources has slow ones first.
    argv = [find_ninja(), "-f", "../build.ninja", f"-j{len(os.sched_getaffinity(0))}", *commands]
    log.write_text("\n".join([*commands.values(), "", ""]))
    progress = Progress(recipe.module, log, folder)
    is_done, output = _run(argv, folder / "csrc", log, [] if lock is None else [lock], progress)
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
        remedies=[_REMEDY] + [_CUDA_REMEDY] * (recipe.module is CUDA),
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
    return os.path.join(needed("ninja", "ninja").BIN_DIR, "ninja")


def _run(argv: list[str], cwd: Path, log: Path, inherited: list[int], progress: Progress) -> tuple[bool, str]:
    """Run ninja; whether it succeeded, and its output, which is added to ``log``. It has a session of its own: Ctrl-C
    reaches this process only."""
    timeout_s, begin, start = env.build_timeout_s(), log.stat().st_size, time.monotonic()
    with log.open("a") as file:
        known = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C in Popen would leave ninja behind
        try:
            process = subprocess.Popen(
                argv, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=inherited
            )
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, known)
            raise explain(f"ninja cannot be started: {error}", remedies=[_NINJA_REMEDY]) from error
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, known)
            while process.poll() is None:
                if (left_s := start + timeout_s - time.monotonic()) <= 0:
                    raise subprocess.TimeoutExpired(argv, timeout_s)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(_LOOK_S, left_s))
                progress.show()
        except BaseException as error:  # too late, or Ctrl-C
            os.killpg(process.pid, signal.SIGTERM)  # only on this does ninja end its compilers, each a group of its own
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            file.write(f"\nstopped after {timeout_s:.0f} s (BW_BUILD_TIMEOUT)\n")
    return process.returncode == 0, log.read_bytes()[begin:].decode(errors="replace")
