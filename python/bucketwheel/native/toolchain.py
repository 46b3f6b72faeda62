"""What a native module is built from and with: its list of sources, the C++ compiler, nvcc, the build key.

nvcc compiles for the GPU architectures of the first of ``BW_CUDA_ARCH_LIST``, ``TORCH_CUDA_ARCH_LIST``, the visible GPUs, "9.0".
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from bucketwheel._version import __version__
from bucketwheel.errors import BuildError

_ERROR_LINES = 30
_ARCH = re.compile(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)(\+PTX)?", re.IGNORECASE)
_DEFAULT_ARCHS = "9.0"
# nvcc reads these itself: they change what it makes.
_NVCC_VARIABLES = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_HEAD_BYTES = 4 << 20  # all of a script and of g++; of a larger program the pages that hold its build id
# How a program was called, which g++ says in front of its version and clang in a line.
_CALLED_BY = re.compile(r"\A\S+ (?=\()|^InstalledDir: .*\n?", re.MULTILINE)
# What an error says where a folder is the reason, for which no compiler would do better, and what to do then.
_OF_FOLDERS = {
    "No space left on device|Disk quota exceeded": "free disk space, or set folders on another disk: BW_CACHE_DIR=... "
    "for the build, TMPDIR=... for the compiler's temporary files",
    "failed to map segment": "set a folder on a file system that is not mounted noexec: BW_NATIVE_DIR=... if you use "
    "it, else BW_CACHE_DIR=...; TMPDIR=... if that has the cache, and at install",
}


@dataclass(frozen=True)
class Module:
    """One of the two native modules."""

    kind: str  # its word in BW_AOT and in the cache
    title: str  # its name in messages
    sources: str  # its list of sources in csrc/
    elsewhere: tuple[str, ...]  # remedies that need no compiler
    usual_time: str = ""  # of a build from nothing, where it has been measured

    @property
    def name(self) -> str:
        return f"_{self.kind}"

    @property
    def file(self) -> str:
        """The file name of the module for this Python."""
        return self.name + str(sysconfig.get_config_var("EXT_SUFFIX"))

    @property
    def manifest(self) -> str:
        """The file beside the module that says what it was built from."""
        return f"{self.name}.json"


_ELSEWHERE = "use a module built elsewhere: BW_NATIVE_DIR=<folder with {}>, or `BW_AOT={} pip install .`"
CPU = Module("cpu", "native module", "sources.txt", (_ELSEWHERE.format("_cpu*.so", "cpu"),), "1 to 3 minutes")
CUDA = Module(
    "cuda",
    "CUDA module",
    "sources_cuda.txt",
    (_ELSEWHERE.format("_cpu*.so and _cuda*.so", "cuda"), "keep the tensors on the CPU, which needs no such module"),
)


@dataclass(frozen=True)
class Source:
    """One source file: its path relative to csrc/ and the flags that only it gets."""

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
    """A compiler and the headers it needs."""

    cxx: tuple[str, ...]
    includes: tuple[str, ...]
    identity: str  # everything about the compiler and the headers that changes the binary
    nvcc: tuple[str, ...] = ()  # compiles .cu files and links; empty for the CPU module
    nvcc_identity: str = ""  # likewise, with the architectures
    archs: ArchList | None = None


def explain(
    what: str,
    *,
    module: Module = CPU,
    command: str = "",
    lines: Sequence[str] = (),
    log: Path | None = None,
    remedies: Sequence[str] = (),
) -> BuildError:
    """A `BuildError` of one screen: what was needed, the command, the last lines of its output, the log, what to do."""
    text = [f"bucketwheel needs its {module.title}: {what}"]
    text += [f"  command: {command}"] if command else []
    if last := [f"  {line}" for line in lines[-_ERROR_LINES:]]:
        text += [f"  ---- last {len(last)} lines of its output ----", *last, "  ----"]
    text += [f"  log: {log}"] if log else []
    text.append("  What you can do:")
    of_folders = [remedy for said, remedy in _OF_FOLDERS.items() if re.search(said, "\n".join([what, *lines]))]
    text += [f"    - {remedy}" for remedy in (*(of_folders or remedies), *module.elsewhere)]
    return BuildError("\n".join(text))


def say(text: str) -> None:
    """Tell the user on stderr why the program pauses."""
    print(f"[bucketwheel] {text}", file=sys.stderr, flush=True)


# ---- what is built ---------------------------------------------------------------------------------------------------


def find_csrc() -> Path:
    """csrc/ inside the installed package, else that of the repository."""
    package = Path(__file__).resolve().parents[1]
    for csrc in (package / "_csrc", package.parents[1] / "csrc"):
        if (csrc / "sources.txt").is_file():
            return csrc
    raise explain(f"its sources are neither in {package / '_csrc'} nor in {package.parents[1] / 'csrc'}")


def read_recipe(csrc: Path, machine: str | None = None, module: Module = CPU) -> Recipe:
    """The module's list of sources for ``machine`` (default: this one). csrc/sources.txt describes the format."""
    machine = machine or platform.machine()
    sources: list[Source] = []
    common: dict[str, list[str]] = {"flags:": [], "link:": [], "nvcc:": []}
    for line in (csrc / module.sources).read_text().splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] in common:
            common[words[0]] += words[1:]
            continue
        only = [word for word in words if word.startswith("only=")]
        if not only or f"only={machine}" in only:
            sources.append(Source(words[0], tuple(word for word in words[1:] if word not in only)))
    flags, link_flags, nvcc_flags = map(tuple, common.values())
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
    """The files under ``csrc``, without hidden files and editors' backups: these must not start a build."""
    found = sorted(path for path in csrc.rglob("*") if path.is_file())
    return [path for path in found if not path.name.endswith("~") and not path.name.startswith((".", "#"))]


def build_key(recipe: Recipe, toolchain: Toolchain) -> str:
    """sha256 of all that the binary depends on. Torch is not part of it: the module includes no torch header."""
    made_from = (sources_digest(recipe.csrc), recipe.sources, recipe.flags, recipe.link_flags, recipe.nvcc_flags)
    return hashlib.sha256(repr((*made_from, toolchain.identity, toolchain.nvcc_identity)).encode()).hexdigest()


# ---- the C++ compiler ------------------------------------------------------------------------------------------------


def find_toolchain() -> Toolchain:
    """The compiler ($CXX, else c++, g++, clang++) and the headers of Python and pybind11, or a `BuildError`."""
    cxx = find_compiler()
    pybind11 = needed("pybind11", "pybind11>=2.13")
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "unknown"
    identity = [identify(cxx), str(sysconfig.get_config_var("SOABI")), str(libc), platform.machine()]
    identity.append(f"pybind11 {pybind11.__version__}")
    return Toolchain(cxx, (*_python_includes(), pybind11.get_include()), "\n".join(identity))


def needed(package: str, requirement: str) -> ModuleType:
    """A Python package that a build needs, or a `BuildError`."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        remedies = [f"pip install {shlex.quote(requirement)}"]
        raise explain(f"{package} is not installed for {sys.executable}", remedies=remedies) from error


def find_compiler() -> tuple[str, ...]:
    remedies = ["install a C++20 compiler (Debian: apt install g++)", "name one: CXX=/path/to/g++"]
    if words := _named("CXX", CPU, remedies):
        return words
    if path := next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None):
        return (path,)
    raise explain("no C++ compiler found (looked for $CXX, c++, g++, clang++ on PATH)", remedies=remedies)


def _named(variable: str, module: Module, remedies: Sequence[str]) -> tuple[str, ...]:
    """The command that an environment variable holds; empty if it is not set."""
    words = tuple(shlex.split(text := os.environ.get(variable, "").strip()))
    if words and shutil.which(words[0]) is None:
        raise explain(f"{variable}={text!r} is not a program", module=module, remedies=remedies)
    return words


def version_of(program: Sequence[str], module: Module) -> str:
    """What the compiler of a module says of itself, or a `BuildError`."""
    argv, remedy = [*program, "--version"], "NVCC=/path/to/nvcc" if module is CUDA else "CXX=g++, with C++20"
    try:
        return _answer(argv, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        what, remedies = f"{program[0]} cannot be run: {error}", [f"choose a working one: {remedy}"]
        raise explain(what, module=module, command=shlex.join(argv), remedies=remedies) from error


def _answer(argv: Sequence[str], *, check: bool) -> str:
    environment = {**os.environ, "LC_ALL": "C"}  # g++ translates what it says
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=check, env=environment).stdout


def identify(command: Sequence[str], module: Module = CPU) -> str:
    """What a compiler is, whatever path, link or name leads to it: its flags, the bytes of its programs, its version and target.

    ``--version`` is not enough: a wrapper that adds flags answers as the compiler behind it, and a cross compiler as the native
    one. Bytes are not enough: ccache and clang are one program that goes by the name of the link to it, as the target tells.
    Compilers that differ in none of these, but in a part that they start (cc1plus), count as one.
    """
    version = _CALLED_BY.sub("", version_of(command, module))
    target = "" if module is CUDA else _answer([*command, "-dumpmachine"], check=False)  # nvcc has no such option
    return "\n".join([shlex.join(_identified(command)), version.strip(), target.strip()])


def _identified(words: Iterable[str]) -> list[str]:
    """The words of a command, with the hash of its bytes for each program."""
    return [word if (path := shutil.which(word)) is None else _bytes_of(path) for word in words]


def _bytes_of(program: str) -> str:
    try:
        with open(program, "rb") as file:
            return f"{hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()[:16]}+{os.fstat(file.fileno()).st_size}"
    except OSError:  # it may be executed, but not read
        return os.path.realpath(program)


def _python_includes() -> tuple[str, ...]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    # Distributions ship the headers apart; `make` puts them into the virtual environment where they are missing.
    private = Path(sys.prefix, "include")
    for folder in (Path(sysconfig.get_paths()["include"]), private / version):
        if (folder / "Python.h").is_file():
            # Debian's pyconfig.h includes <x86_64-linux-gnu/...>, found from the folder above.
            return (str(folder), str(private)) if folder.parent == private else (str(folder),)
    remedies = [f"install Python's headers (Debian: apt install {version}-dev)"]
    raise explain(f"Python.h is not in {sysconfig.get_paths()['include']}", remedies=remedies)


# ---- nvcc and GPU architectures --------------------------------------------------------------------------------------


def find_cuda_toolchain() -> Toolchain:
    """The C++ compiler, and nvcc with it as host compiler, for the chosen architectures. Raises `BuildError`."""
    nvcc, toolchain, archs = find_nvcc(), find_toolchain(), choose_archs()
    settings = {name: _identified(os.environ[name].split()) for name in _NVCC_VARIABLES if os.environ.get(name)}
    identity = "\n".join([identify(nvcc, CUDA), *archs.flags, repr(settings)])
    if "NVCC_CCBIN" not in settings:
        # Of CXX="ccache g++ -g": the compiler.
        nvcc = (*nvcc, "-ccbin", [word for word in toolchain.cxx if not word.startswith("-")][-1])
    return replace(toolchain, nvcc=(*nvcc, *archs.flags), nvcc_identity=identity, archs=archs)


def find_nvcc() -> tuple[str, ...]:
    """$NVCC, $CUDA_HOME/bin/nvcc, nvcc on PATH, /usr/local/cuda/bin/nvcc; or a `BuildError`."""
    remedies = ["install the CUDA toolkit, or set its path: CUDA_HOME=/usr/local/cuda, NVCC=/path/to/nvcc"]
    if words := _named("NVCC", CUDA, remedies):
        return words
    if home := os.environ.get("CUDA_HOME", "").strip():
        path = Path(home, "bin", "nvcc")
        if not os.access(path, os.X_OK):
            raise explain(f"CUDA_HOME={home!r} has no bin/nvcc", module=CUDA, remedies=remedies)
        return (str(path),)
    if found := shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc"):
        return (found,)
    where = "$NVCC, $CUDA_HOME/bin/nvcc, nvcc on PATH, /usr/local/cuda/bin/nvcc"
    raise explain(f"nvcc is missing (looked for {where})", module=CUDA, remedies=remedies)


@dataclass(frozen=True)
class ArchList:
    """What nvcc compiles for."""

    archs: tuple[tuple[int, int, str], ...]  # ascending; "a" or "f": code for this architecture or family only
    has_ptx: bool  # PTX of the highest one too, for newer GPUs
    origin: str  # who chose them, for messages

    @property
    def flags(self) -> tuple[str, ...]:
        digits = [f"{major}{minor}{variant}" for major, minor, variant in self.archs]
        codes = [(one, f"sm_{one}") for one in digits] + [(digits[-1], f"compute_{digits[-1]}")] * self.has_ptx
        return tuple(f"-gencode=arch=compute_{one},code={code}" for one, code in codes)

    def __str__(self) -> str:
        names = [f"{major}.{minor}{variant}" for major, minor, variant in self.archs]
        return ";".join(names) + ("+PTX" if self.has_ptx else "")

    def covers(self, device: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability can run the code."""
        runs = (
            (major, minor) == device or (variant != "a" and major == device[0] and minor < device[1])
            for major, minor, variant in self.archs
        )
        *highest, variant = self.archs[-1]
        return any(runs) or (self.has_ptx and not variant and tuple(highest) <= device)


def parse_archs(text: str, origin: str) -> ArchList:
    """Parse torch's syntax: "8.0;9.0+PTX", "9.0a", separated by semicolons, commas or blanks. PTX is of the highest only."""
    found, has_ptx = set(), False
    for word in re.split(r"[;,\s]+", text.strip()):
        match = _ARCH.fullmatch(word)
        if match is None:
            what = f"{origin}={text!r}: {word!r} is not an architecture"
            raise explain(what, module=CUDA, remedies=["set BW_CUDA_ARCH_LIST='9.0', or '8.0;9.0+PTX'"])
        found.add((int(match[1]), int(match[2]), match[3].lower()))
        has_ptx = has_ptx or match[4] is not None
    return ArchList(tuple(sorted(found)), has_ptx, origin)


def choose_archs(devices: Sequence[tuple[int, int]] | None = None) -> ArchList:
    """The architectures to compile for. ``devices``: compute capabilities (default: those of the visible GPUs)."""
    for name in ("BW_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST"):
        if text := os.environ.get(name, "").strip():
            return parse_archs(text, name)
    if devices := visible_devices() if devices is None else devices:
        return ArchList(tuple(sorted({(*device, "") for device in devices})), False, "the visible GPUs")
    return parse_archs(_DEFAULT_ARCHS, "no GPU is visible: the default, choose with BW_CUDA_ARCH_LIST")


def visible_devices(library: str = "libcuda.so.1") -> list[tuple[int, int]]:
    """The compute capabilities of the visible GPUs, from the driver; none without a driver."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return []
    count, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []

    def attribute(number: int, device: int) -> int:
        return 0 if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    found = [(attribute(75, device), attribute(76, device)) for device in range(count.value)]
    return [device for device in found if device[0] > 0]
