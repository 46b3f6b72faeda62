"""What a native module is built from and with: its list of sources, the C++ compiler, the build key.

nvcc is found by `bucketwheel.native.nvcc`, `bucketwheel.native.compile` compiles, `bucketwheel.native.modules` knows about caches and
locks. None of them imports torch: setup.py uses them to compile at install, before the package or torch can be
imported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bucketwheel._version import __version__
from bucketwheel.errors import BuildError

__all__ = ["CPU", "CUDA", "Module", "Recipe", "Source", "Toolchain", "build_key", "explain", "find_compiler"]
__all__ += ["find_csrc", "find_toolchain", "read_recipe", "say", "sources_digest", "tree"]

_ERROR_LINES = 30


@dataclass(frozen=True)
class Module:
    """One of the two native modules. ``kind`` is its word in ``BW_AOT``, in the cache and in messages."""

    kind: str
    title: str
    sources: str  # its list in csrc/
    elsewhere: tuple[str, ...]  # remedies that need no compiler

    @property
    def name(self) -> str:
        return f"_{self.kind}"

    @property
    def file(self) -> str:
        """The file name of the module for this Python."""
        return self.name + str(sysconfig.get_config_var("EXT_SUFFIX"))

    @property
    def manifest(self) -> str:
        """What lies beside the module and says from what it was built."""
        return f"{self.name}.json"


_ELSEWHERE = "use one built elsewhere: BW_NATIVE_DIR=<folder with {}>, or `BW_AOT={} pip install .`"
CPU = Module("cpu", "native module", "sources.txt", (_ELSEWHERE.format("_cpu*.so", "cpu"),))
CUDA = Module(
    "cuda",
    "CUDA module",
    "sources_cuda.txt",
    (_ELSEWHERE.format("_cpu*.so and _cuda*.so", "cuda"), "keep the tensors on the CPU, which does not need it"),
)


@dataclass(frozen=True)
class Source:
    """One translation unit: its path relative to csrc/ and the flags that only it gets."""

    path: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What a module's list of sources says for this machine."""

    csrc: Path
    sources: tuple[Source, ...]
    flags: tuple[str, ...]  # of the C++ compiler
    link_flags: tuple[str, ...]
    nvcc_flags: tuple[str, ...] = ()
    module: Module = CPU


@dataclass(frozen=True)
class Toolchain:
    """A compiler and the headers it needs. ``identity`` holds everything about them that changes the binary.

    ``nvcc`` compiles .cu files and links; it is empty for a module without them.
    """

    cxx: tuple[str, ...]
    includes: tuple[str, ...]
    identity: str
    nvcc: tuple[str, ...] = ()
    nvcc_identity: str = ""
    note: str = ""  # for the user, when a build starts


def explain(
    what: str,
    *,
    module: Module = CPU,
    command: str = "",
    lines: Sequence[str] = (),
    log: Path | None = None,
    remedies: Sequence[str] = (),
) -> BuildError:
    """A `BuildError` of one screen: what was needed, the command, the compiler's last lines, the log, what to do."""
    text = [f"bucketwheel needs its {module.title}: {what}"]
    if command:
        text.append(f"  command: {command}")
    if lines:
        text.append(f"  ---- last {min(len(lines), _ERROR_LINES)} lines of its output ----")
        text += [f"  {line}" for line in lines[-_ERROR_LINES:]]
        text.append("  ----")
    if log is not None:
        text.append(f"  log: {log}")
    text.append("  What you can do:")
    text += [f"    - {remedy}" for remedy in (*remedies, *module.elsewhere)]
    return BuildError("\n".join(text))


def say(text: str) -> None:
    """Tell the user on stderr what takes long."""
    print(f"[bucketwheel] {text}", file=sys.stderr, flush=True)


# ---- what is built ---------------------------------------------------------------------------------------------------


def find_csrc() -> Path:
    """csrc/ as installed inside the package, else as it lies in the repository."""
    package = Path(__file__).resolve().parents[1]
    for csrc in (package / "_csrc", package.parents[1] / "csrc"):
        if (csrc / "sources.txt").is_file():
            return csrc
    raise explain(f"its sources are neither in {package / '_csrc'} nor in {package.parents[1] / 'csrc'}")


def read_recipe(csrc: Path, machine: str | None = None, module: Module = CPU) -> Recipe:
    """Read a list of sources; the head of csrc/sources.txt describes the format.

    ``machine`` is `platform.machine()` unless given.
    """
    machine = machine or platform.machine()
    sources: list[Source] = []
    seen: set[str] = set()
    common: dict[str, list[str]] = {"flags:": [], "link:": [], "nvcc:": []}
    for number, line in enumerate((csrc / module.sources).read_text().splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] in common:
            common[words[0]] += words[1:]
            continue
        if not (csrc / words[0]).is_file():
            raise ValueError(f"{csrc / module.sources}:{number}: no such source: {words[0]!r}")
        if words[0] in seen:
            raise ValueError(f"{csrc / module.sources}:{number}: listed twice: {words[0]!r}")
        seen.add(words[0])
        only = [word[len("only=") :] for word in words[1:] if word.startswith("only=")]
        if not only or machine in only:
            flags = tuple(word for word in words[1:] if not word.startswith("only="))
            sources.append(Source(words[0], flags))
    flags, link_flags, nvcc_flags = (tuple(common[name]) for name in ("flags:", "link:", "nvcc:"))
    return Recipe(csrc, tuple(sources), flags, link_flags, nvcc_flags, module)


def sources_digest(csrc: Path) -> str:
    """sha256 over the paths and bytes of all files under ``csrc`` and the package version."""
    digest = hashlib.sha256(__version__.encode())
    for path in tree(csrc):
        data = path.read_bytes()
        digest.update(f"\n{path.relative_to(csrc).as_posix()} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def tree(csrc: Path) -> list[Path]:
    """The files under ``csrc`` that count."""
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
    if recipe.nvcc_flags:
        text += [repr(recipe.nvcc_flags), repr(toolchain.nvcc), toolchain.nvcc_identity]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


# ---- with what -------------------------------------------------------------------------------------------------------


def find_toolchain() -> Toolchain:
    """The compiler ($CXX, else c++, g++, clang++) and the headers of Python and pybind11, or a `BuildError`."""
    cxx = find_compiler()
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


def find_compiler() -> tuple[str, ...]:
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
