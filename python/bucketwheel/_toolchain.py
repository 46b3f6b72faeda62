"""From csrc/ to one shared object: the list of sources, the compiler, the build key, one parallel compile.

Nothing here knows about caches or locks (that is `bucketwheel._build`), and nothing imports torch: setup.py uses these
functions to compile at install, before the package or torch can be imported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bucketwheel._version import __version__
from bucketwheel.errors import BuildError

__all__ = ["Recipe", "Source", "Toolchain", "build_key", "compile_module", "explain", "find_csrc", "find_toolchain"]
__all__ += ["module_file", "read_recipe", "sources_digest"]

_ERROR_LINES = 30
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(["<]?)([^">\n]*)', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One translation unit: its path relative to csrc/ and the flags that only it gets."""

    path: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What csrc/sources.txt says for this machine."""

    csrc: Path
    sources: tuple[Source, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]


@dataclass(frozen=True)
class Toolchain:
    """A compiler and the headers it needs. ``identity`` holds everything about them that changes the binary."""

    cxx: tuple[str, ...]
    includes: tuple[str, ...]
    identity: str


def explain(
    what: str, *, command: str = "", lines: Sequence[str] = (), log: Path | None = None, remedies: Sequence[str] = ()
) -> BuildError:
    """A `BuildError` of one screen: what was needed, the command, the compiler's last lines, the log, what to do."""
    text = [f"bucketwheel needs its native module: {what}"]
    if command:
        text.append(f"  command: {command}")
    if lines:
        text.append(f"  ---- last {min(len(lines), _ERROR_LINES)} lines of its output ----")
        text += [f"  {line}" for line in lines[-_ERROR_LINES:]]
        text.append("  ----")
    if log is not None:
        text.append(f"  log: {log}")
    text.append("  What you can do:")
    text += [f"    - {remedy}" for remedy in remedies]
    text.append("    - use one built elsewhere: BW_NATIVE_DIR=<folder with _cpu*.so>, or `BW_AOT=cpu pip install .`")
    return BuildError("\n".join(text))


# ---- what is built ---------------------------------------------------------------------------------------------------


def find_csrc() -> Path:
    """csrc/ as installed inside the package, else as it lies in the repository."""
    package = Path(__file__).resolve().parent
    for csrc in (package / "_csrc", package.parents[1] / "csrc"):
        if (csrc / "sources.txt").is_file():
            return csrc
    raise explain(f"its sources are neither in {package / '_csrc'} nor in {package.parents[1] / 'csrc'}")


def module_file() -> str:
    """The file name of the native module for this Python."""
    return "_cpu" + str(sysconfig.get_config_var("EXT_SUFFIX"))


def read_recipe(csrc: Path, machine: str | None = None) -> Recipe:
    """Read csrc/sources.txt, whose head describes the format. ``machine`` is `platform.machine()` unless given."""
    machine = machine or platform.machine()
    sources: list[Source] = []
    common: dict[str, list[str]] = {"flags:": [], "link:": []}
    for number, line in enumerate((csrc / "sources.txt").read_text().splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] in common:
            common[words[0]] += words[1:]
            continue
        if not (csrc / words[0]).is_file():
            raise ValueError(f"{csrc / 'sources.txt'}:{number}: no such source: {words[0]!r}")
        only = [word[len("only=") :] for word in words[1:] if word.startswith("only=")]
        if not only or machine in only:
            flags = tuple(word for word in words[1:] if not word.startswith("only="))
            sources.append(Source(words[0], flags))
    return Recipe(csrc, tuple(sources), tuple(common["flags:"]), tuple(common["link:"]))


def sources_digest(csrc: Path) -> str:
    """sha256 over the paths and bytes of all files under ``csrc`` and the package version."""
    digest = hashlib.sha256(__version__.encode())
    for path in _tree(csrc):
        data = path.read_bytes()
        digest.update(f"\n{path.relative_to(csrc).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _tree(csrc: Path) -> list[Path]:
    # Hidden files and editors' backups must not start a build.
    return sorted(
        path
        for path in csrc.rglob("*")
        if path.is_file() and not path.name.endswith("~") and not path.name.startswith((".", "#"))
    )


def build_key(recipe: Recipe, toolchain: Toolchain) -> str:
    """sha256 of all that the binary depends on. Torch is not part of it: the module knows no torch header."""
    text = [sources_digest(recipe.csrc), toolchain.identity, repr(recipe.sources)]
    text += [repr(recipe.flags), repr(recipe.link_flags)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


# ---- with what -------------------------------------------------------------------------------------------------------


def find_toolchain() -> Toolchain:
    """The compiler ($CXX, else c++, g++, clang++) and the headers of Python and pybind11, or a `BuildError`."""
    cxx = _find_compiler()
    try:
        version = subprocess.run([*cxx, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise explain(
            f"the compiler does not answer: {error}",
            command=shlex.join([*cxx, "--version"]),
            remedies=["name a working C++20 compiler: CXX=g++"],
        ) from error
    try:
        import pybind11
    except ImportError as error:
        raise explain(
            f"pybind11 is not installed for {sys.executable}", remedies=["pip install 'pybind11>=2.13'"]
        ) from error
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "unknown"
    identity = [shlex.join(cxx), version, str(sysconfig.get_config_var("SOABI")), str(libc), platform.machine()]
    identity.append(f"pybind11 {pybind11.__version__}")
    return Toolchain(cxx, (*_python_includes(), pybind11.get_include()), "\n".join(identity))


def _find_compiler() -> tuple[str, ...]:
    remedies = ["install a C++20 compiler (Debian: apt install g++)", "name one: CXX=/path/to/g++"]
    if named := os.environ.get("CXX", "").strip():
        words = shlex.split(named)
        if shutil.which(words[0]) is None:
            raise explain(f"CXX={named!r} names no program", remedies=remedies)
        return tuple(words)
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return (path,)
    raise explain("no C++ compiler found (looked for $CXX, c++, g++, clang++ on PATH)", remedies=remedies)


def _python_includes() -> tuple[str, ...]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Distributions ship the headers apart; `make` puts them into the virtual environment where they are missing.
    private = Path(sys.prefix, "include")
    for folder in (Path(sysconfig.get_paths()["include"]), private / version):
        if (folder / "Python.h").is_file():
            # Debian's pyconfig.h includes <x86_64-linux-gnu/...>, found from the folder above.
            return (str(folder), str(private)) if folder.parent == private else (str(folder),)
    raise explain(
        f"Python.h is not in {sysconfig.get_paths()['include']}",
        remedies=[f"install Python's headers (Debian: apt install {version}-dev)"],
    )


# ---- one compile -----------------------------------------------------------------------------------------------------


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
    that source only), or None. ``log`` gets the commands and all output. Raises `BuildError`.
    """
    steps: list[_Step] = []
    stored: dict[str, Path] = {}  # object in work -> its place in the store
    linked: list[str] = []
    # Compiles run in csrc/ with relative paths, so that __FILE__ and the store do not depend on where the tree lies.
    includes = ["-I."] + [word for folder in toolchain.includes for word in ("-isystem", folder)]
    for source in recipe.sources:
        out = source.path.replace("/", "_") + ".o"
        flags = (*recipe.flags, *source.flags)
        if objects is not None:
            place = objects / f"{_object_key(recipe, toolchain, source)}.o"
            if place.is_file():
                os.utime(place)
                linked.append(str(place))
                continue
            stored[out] = place
        argv = (*toolchain.cxx, *flags, *includes, "-c", source.path, "-o", str(work / out))
        steps.append(_Step(out, argv, recipe.csrc))
        linked.append(str(work / out))
    module = work / module_file()
    link = _Step(module.name, (*toolchain.cxx, "-o", str(module), *linked, *recipe.link_flags), work)
    try:
        _run(steps, link, work, log, timeout_s)
    finally:
        for out, place in stored.items():
            if (work / out).is_file():
                _store(work / out, place)
    return module


def _object_key(recipe: Recipe, toolchain: Toolchain, source: Source) -> str:
    digest = hashlib.sha256(repr((toolchain.identity, recipe.flags, source)).encode())
    for path in _closure(recipe.csrc, source.path):
        digest.update(f"\n{path.relative_to(recipe.csrc)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _closure(csrc: Path, source: str) -> list[Path]:
    """The files of csrc/ that ``source`` includes, itself first; conditional ones count too."""
    found = [csrc / source]
    for path in found:
        for quote, name in _INCLUDE.findall(path.read_bytes()):
            if not quote:  # a macro names the file: nothing is known, so everything counts
                return _tree(csrc)
            for candidate in (path.parent / name.decode(), csrc / name.decode()):
                candidate = Path(os.path.normpath(candidate))
                if candidate.is_file():
                    if candidate not in found:
                        found.append(candidate)
                    break
    return found


def _store(path: Path, place: Path) -> None:
    private = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, private)
        with open(private, "rb") as file:
            os.fsync(file.fileno())
        os.replace(private, place)
    except OSError:
        private.unlink(missing_ok=True)  # the store is an economy: a full disk shows where the module is published


def _run(steps: list[_Step], link: _Step, work: Path, log: Path, timeout_s: float) -> None:
    ninja = _find_ninja()
    if ninja is not None:
        failed, output = _run_ninja(ninja, steps, link, work, timeout_s)
    else:
        failed, output = _run_threads(steps, link, timeout_s)
    commands = "".join(f"{step.shell()}\n" for step in [*steps, link])
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"{commands}\n{output}\n")
    if failed is not None:
        raise explain(
            f"{'linking' if failed is link else 'compiling'} {failed.out} failed",
            command=failed.shell(),
            lines=output.splitlines(),
            log=log,
            remedies=["a compiler with C++20 is needed (g++ >= 11, clang++ >= 14): choose one with CXX=..."],
        )


def _find_ninja() -> str | None:
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


def _run_ninja(ninja: str, steps: list[_Step], link: _Step, work: Path, timeout_s: float) -> tuple[_Step | None, str]:
    lines = ["rule sh", "  command = $cmd"]
    for step, needs in [(step, "") for step in steps] + [(link, " ".join(step.out for step in steps))]:
        lines += [f"build {step.out}: sh {needs}", f"  cmd = {step.shell().replace('$', '$$')}"]
    (work / "build.ninja").write_text("\n".join(lines) + "\n")
    # sources are listed slow ones first, and ninja starts edges in the order of the targets it is given
    argv = [ninja, "-C", str(work), f"-j{_jobs()}", *(step.out for step in steps), link.out]
    done, output = _call(argv, work, timeout_s)
    if done:
        return None, output
    names = {step.out: step for step in [*steps, link]}
    reported = re.findall(r"^FAILED: .*?(\S+)\s*$", output, re.MULTILINE)
    failed = next((names[out] for out in reported if out in names), link)
    return failed, "\n".join(line for line in output.splitlines() if not line.startswith("ninja: "))


def _run_threads(steps: list[_Step], link: _Step, timeout_s: float) -> tuple[_Step | None, str]:
    output: list[str] = []
    failed: list[_Step] = []

    def compile_one(step: _Step) -> None:
        if not failed:
            done, text = _call(step.argv, step.cwd, timeout_s)
            output.append(text)
            if not done:
                failed.append(step)

    with ThreadPoolExecutor(_jobs()) as pool:
        list(pool.map(compile_one, steps))
    if not failed:
        compile_one(link)
    return (failed[0] if failed else None), "".join(output)


def _call(argv: Sequence[str], cwd: Path, timeout_s: float) -> tuple[bool, str]:
    # A session of its own: a time-out or Ctrl-C must end the compilers too, or they would run on and keep the pipe open.
    with subprocess.Popen(
        argv,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False, f"{_end(process)}\nstopped after {timeout_s:.0f} s (BW_BUILD_TIMEOUT)\n"
        except BaseException:
            _end(process)
            raise
    return process.returncode == 0, output


def _end(process: subprocess.Popen[str]) -> str:
    """End a process and what it started; returns its output. ninja ends its compilers, each a group, on SIGTERM only."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]
