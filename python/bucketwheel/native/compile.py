"""One parallel compile: the sources of a recipe become one shared object, by ninja or by threads.

Knows nothing of caches but a store of objects by content, and nothing of locks: that is `bucketwheel.native.modules`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bucketwheel.native import trust
from bucketwheel.native.toolchain import CUDA, Module, Recipe, Source, Toolchain, explain, tree

__all__ = ["closure", "command", "compile_module", "find_ninja", "object_key", "store", "units", "writing"]

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(["<]?)([^">\n]*)', re.MULTILINE)
# Said about every kernel, whatever else went wrong.
_CHATTER = re.compile(r"ptxas info|\s+\d+ bytes stack frame, ")
_UNIT_SOURCES = 7
_Result = TypeVar("_Result")
_PAUSE_S = 0.01
_GRACE_S = 10.0  # from asking a process to end until it is made to
_REMEDY = "a compiler with C++20 is needed (g++ >= 11, clang++ >= 14): choose one with CXX=..."
_CUDA_REMEDIES = [
    "nvcc must know the architectures and the C++ compiler: choose with BW_CUDA_ARCH_LIST=9.0, NVCC=..., CXX=...",
]


@dataclass(frozen=True)
class _Step:
    out: str
    argv: tuple[str, ...]
    cwd: Path

    def shell(self) -> str:
        return f"cd {shlex.quote(str(self.cwd))} && {shlex.join(self.argv)}"


def compile_module(
    recipe: Recipe, toolchain: Toolchain, work: Path, *, objects: Path | None, log: Path, timeout_s: float = 600.0
) -> Path:
    """Compile and link in the empty private folder ``work``; returns the module's path there.

    ``objects`` is a store of object files by content that is read and filled (an edit of one source then compiles
    its unit only), or None. ``log`` gets the commands and all output. Raises `BuildError`.
    """
    steps: list[_Step] = []
    stored: dict[str, Path] = {}  # object in work -> its place in the store
    linked: list[str] = []
    for unit in units(recipe):
        out = unit[0].path.replace("/", "_") + ".o"
        if objects is not None:
            place = objects / f"{object_key(recipe, toolchain, *unit)}.o"
            if _is_stored(place):
                linked.append(str(place))
                continue
            stored[out] = place
        steps.append(_Step(out, command(recipe, toolchain, *unit, out=work / out), recipe.csrc))
        linked.append(str(work / out))
    module = work / recipe.module.file
    linker = toolchain.nvcc or toolchain.cxx
    link = _Step(module.name, (*linker, "-o", str(module), *linked, *recipe.link_flags), work)
    try:
        _run(steps, link, work, log, timeout_s, recipe.module)
    finally:
        for out, place in stored.items():
            if (work / out).is_file():
                store(work / out, place)
    return module


def _is_stored(place: Path) -> bool:
    """Whether the store has an object that may be linked. Its use is remembered, but not where it is another user's."""
    if not place.is_file() or trust.why_not(place) is not None:
        return False
    with suppress(OSError):
        os.utime(place)
    return place.is_file()  # somebody may have removed it meanwhile


def units(recipe: Recipe) -> list[tuple[Source, ...]]:
    """What compiles as one: neighbours in the list, of one folder and without flags of their own; at most 7.

    They include the same headers, and reading those takes longer than compiling the sources.
    """
    found: list[tuple[Source, ...]] = []
    for source in recipe.sources:
        last = found[-1] if found else ()
        if 0 < len(last) < _UNIT_SOURCES and _fit(last[0], source):
            found[-1] = (*last, source)
        else:
            found.append((source,))
    return found


def _fit(first: Source, second: Source) -> bool:
    folder = os.path.dirname(first.path)
    is_plain = all(source.path.endswith(".cpp") and not source.flags for source in (first, second))
    return is_plain and folder != "" and folder == os.path.dirname(second.path)


def command(recipe: Recipe, toolchain: Toolchain, *unit: Source, out: Path) -> tuple[str, ...]:
    """The compile of one unit, to be run in csrc/.

    Its paths are relative, so that __FILE__ and the store do not depend on where the tree lies.
    """
    *others, source = unit
    if source.path.endswith(".cu"):
        head = (*toolchain.nvcc, *recipe.nvcc_flags, *source.flags, "-I.")
    else:
        includes = (word for folder in toolchain.includes for word in ("-isystem", folder))
        before = (word for other in others for word in ("-include", other.path))
        head = (*toolchain.cxx, *recipe.flags, *source.flags, "-I.", *includes, *before)
    return (*head, "-c", source.path, "-o", str(out))


def object_key(recipe: Recipe, toolchain: Toolchain, *unit: Source) -> str:
    """The name, without .o, under which the store keeps an object: sha256 of all that it depends on."""
    made_by: tuple[object, ...] = (toolchain.identity, recipe.flags)
    if unit[0].path.endswith(".cu"):
        made_by = (toolchain.identity, toolchain.nvcc, toolchain.nvcc_identity, recipe.nvcc_flags)
    digest = hashlib.sha256(repr((*made_by, *unit)).encode())
    for path in (path for source in unit for path in closure(recipe.csrc, source.path)):
        digest.update(f"\n{path.relative_to(recipe.csrc)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def closure(csrc: Path, source: str) -> list[Path]:
    """The files of csrc/ that ``source`` includes, itself first; conditional ones count too."""
    found = [csrc / source]
    for path in found:
        for quote, name in _INCLUDE.findall(path.read_bytes()):
            if not quote:  # a macro names the file: nothing is known, so everything counts
                return tree(csrc)
            for candidate in (path.parent / name.decode(), csrc / name.decode()):
                candidate = Path(os.path.normpath(candidate))
                if candidate.is_file():
                    if candidate not in found:
                        found.append(candidate)
                    break
    return found


def store(path: Path, place: Path) -> None:
    """Put an object into the store, all at once."""
    # Hosts that share the store have processes of equal numbers.
    private = place.with_name(f"{place.name}.{uuid.uuid4().hex[:12]}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, private)
        trust.close_to_others(private)
        with open(private, "rb") as file:
            os.fsync(file.fileno())
        os.replace(private, place)
    except OSError:
        private.unlink(missing_ok=True)  # the store is an economy: a full disk shows where the module is published


def _run(steps: list[_Step], link: _Step, work: Path, log: Path, timeout_s: float, module: Module) -> None:
    ninja = find_ninja()
    if ninja is not None:
        with writing(work, module):
            _write_ninja(steps, link, work)
        failed, output = _run_ninja(ninja, steps, link, work, timeout_s)
    else:
        failed, output = _run_threads(steps, link, timeout_s)
    commands = "".join(f"{step.shell()}\n" for step in [*steps, link])
    with writing(log.parent, module):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{commands}\n{output}\n")
    if failed is not None:
        raise explain(
            f"{'linking' if failed is link else 'compiling'} {failed.out} failed",
            module=module,
            command=failed.shell(),
            lines=[line for line in output.splitlines() if not _CHATTER.match(line)],
            log=log,
            remedies=[_REMEDY, *(_CUDA_REMEDIES if module is CUDA else ())],
        )


@contextmanager
def writing(folder: Path, module: Module) -> Iterator[None]:
    """What fails in here is told as a failure to write into ``folder``: a `BuildError`."""
    try:
        yield
    except OSError as error:
        remedies = ["make room there, or name another folder: BW_CACHE_DIR=..."]
        raise explain(f"{folder} cannot be written: {error}", module=module, remedies=remedies) from error


def find_ninja() -> str | None:
    if path := shutil.which("ninja"):
        return path
    try:
        import ninja
    except ImportError:
        return None
    path = os.path.join(ninja.BIN_DIR, "ninja")
    return path if os.access(path, os.X_OK) else None


def _jobs() -> int:
    return len(os.sched_getaffinity(0))


def _write_ninja(steps: list[_Step], link: _Step, work: Path) -> None:
    lines = ["rule sh", "  command = $cmd"]
    for step, needs in [(step, "") for step in steps] + [(link, " ".join(step.out for step in steps))]:
        lines += [f"build {step.out}: sh {needs}", f"  cmd = {step.shell().replace('$', '$$')}"]
    (work / "build.ninja").write_text("\n".join(lines) + "\n")


def _run_ninja(ninja: str, steps: list[_Step], link: _Step, work: Path, timeout_s: float) -> tuple[_Step | None, str]:
    # sources are listed slow ones first, and ninja starts edges in the order of the targets it is given
    argv = [ninja, "-C", str(work), f"-j{_jobs()}", *(step.out for step in steps), link.out]
    calls = _Calls(timeout_s)
    ((done, output),) = _in_threads(calls, [lambda: calls.run(argv, work)])
    if done:
        return None, output
    names = {step.out: step for step in [*steps, link]}
    reported = re.findall(r"^FAILED: .*?(\S+)\s*$", output, re.MULTILINE)
    failed = next((names[out] for out in reported if out in names), link)
    return failed, "\n".join(line for line in output.splitlines() if not line.startswith("ninja: "))


def _run_threads(steps: list[_Step], link: _Step, timeout_s: float) -> tuple[_Step | None, str]:
    output: list[str] = []
    failed: list[_Step] = []
    calls = _Calls(timeout_s)

    def compile_one(step: _Step) -> None:
        if not failed:
            done, text = calls.run(step.argv, step.cwd)
            output.append(text)
            if not done:
                failed.append(step)

    _in_threads(calls, [functools.partial(compile_one, step) for step in steps])
    _in_threads(calls, [lambda: compile_one(link)])
    return (failed[0] if failed else None), "".join(output)


def _in_threads(calls: _Calls, work: list[Callable[[], _Result]]) -> list[_Result]:
    """Ctrl-C is for the thread that waits here, at any time: what the others start is not lost between its start and where
    ``calls`` knows of it."""
    pool = ThreadPoolExecutor(_jobs())
    running: list[Future[_Result]] = []
    try:
        for one in work:
            running.append(pool.submit(one))
        while wait(running, timeout=0.1).not_done:
            pass  # a signal that comes just before an endless wait would be heard after it
        return [one.result() for one in running]
    except BaseException:  # the pool may not know all of its threads
        calls.end()
        raise
    finally:
        pool.shutdown()


class _Calls:
    """The processes of one build, and one time limit for all of them.

    Each has a session of its own: a time-out or Ctrl-C must end the compilers too, or they would run on and keep the
    pipe open.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._guard = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_ended = False

    def run(self, argv: Sequence[str], cwd: Path) -> tuple[bool, str]:
        """Whether the command ended well, and its output."""
        with self._guard:
            if self._is_ended:
                return False, ""
            try:
                process = _start(argv, cwd)
            except OSError as error:
                return False, f"{argv[0]} cannot be started: {error}\n"
            self._running.add(process)
        with process:
            try:
                output, _ = process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False, f"{_end(process)}\nstopped after {self._timeout_s:.0f} s (BW_BUILD_TIMEOUT)\n"
            finally:
                with self._guard:
                    self._running.remove(process)
        return process.returncode == 0, output

    def end(self) -> None:
        """End all that run, whose outputs other threads wait for; start no more."""
        try:
            self._signal_all(signal.SIGTERM)
            until = time.monotonic() + _GRACE_S
            while self._running and time.monotonic() < until:
                time.sleep(_PAUSE_S)
        finally:  # a second Ctrl-C ends the waiting
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        with self._guard:
            self._is_ended = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


def _start(argv: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> str:
    """End a process and what it started; returns its output. ninja ends its compilers, each a group, on SIGTERM only."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=_GRACE_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]
