"""Finding and building the native module: once for everybody, whatever dies, with an error that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bucketwheel.native import cache
from tests.support.requirements import need_root
from tests.unit.tiny_tree import LOAD, MODULE, WAIT, TinyTree

ROOT = Path(__file__).resolve().parents[2]
STRANGER = 12345  # no account of this machine


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[TinyTree]:
    tree = TinyTree(tmp_path)
    yield tree
    tree.release_compiler()  # whatever has failed: nothing may hang on


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def start_waiter(tree: TinyTree, builder: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """A process that waits for ``builder`` now, because it said so."""
    waiter = tree.start(WAIT)
    assert waiter.stderr is not None
    assert f"being built by process {builder.pid} on " in waiter.stderr.readline()
    return waiter


def processes_of(tree: TinyTree) -> list[str]:
    """Compilers and ninjas of this tree that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            folder = os.readlink(path.parent / "cwd")
        except OSError:
            continue
        if str(tree.compiler) in command or folder.startswith(str(tree.cache)):
            found.append(command)
    return found


# ---- once ------------------------------------------------------------------------------------------------------------


def test_eight_processes_at_once_build_once_and_later_ones_find_it(tree: TinyTree) -> None:
    tree.make_compiler(before="sleep 0.5")
    children = [tree.start("import sys; sys.modules['torch'] = None\n" + LOAD) for _ in range(8)]  # it needs no torch
    results = [child.communicate(timeout=60) for child in children]
    assert [out for out, _ in results] == ["42\n"] * 8
    assert sorted(tree.compiled()) == ["base/second.cpp", "bindings/module.cpp", "link"]
    assert sum("building the native module" in err for _, err in results) == 1
    code = "import sys, bucketwheel; from bucketwheel.native.modules import native; first = native()\n"
    code += "assert native() is first is sys.modules['bucketwheel._cpu'] is bucketwheel._cpu; print('same')"
    assert tree.run(code) == ("same", "")
    assert len(tree.compiled()) == 3


def test_waiters_share_the_failure_instead_of_repeating_it(tree: TinyTree) -> None:
    tree.write("bindings/module.cpp", "#error not today\n")
    tree.hold_compiler()
    builder = tree.start()
    wait_until(tree.compiled, "the first compile")
    waiters = [start_waiter(tree, builder) for _ in range(2)]
    tree.release_compiler()
    messages = [child.communicate(timeout=60)[1] for child in (builder, *waiters)]
    assert all("not today" in message for message in messages)
    assert tree.compiled().count("bindings/module.cpp") == 1
    tree.error()  # a process that comes later tries again
    assert tree.compiled().count("bindings/module.cpp") == 2


def test_waiting_has_an_end_and_says_for_whom(tree: TinyTree) -> None:
    tree.hold_compiler()
    builder = tree.start()
    wait_until(tree.compiled, "the first compile")
    message = tree.error(BW_BUILD_TIMEOUT="1")
    assert "waited 1 s (BW_BUILD_TIMEOUT) for another build: " in message
    assert f"process {builder.pid} on " in message and str(tree.cache / "builds") in message
    waiter = start_waiter(tree, builder)
    tree.release_compiler()
    assert [child.communicate(timeout=60)[0] for child in (builder, waiter)] == ["42\n"] * 2
    assert len(tree.compiled()) == 3


def texts_of(file: int) -> Callable[[], str]:
    """What comes out of it until now; never waits."""
    os.set_blocking(file, False)
    text = bytearray()

    def read() -> str:
        with suppress(OSError):  # nothing new, or the end
            text.extend(os.read(file, 4096))
        return text.decode()

    return read


def test_the_builder_and_who_waits_tell_how_far_it_is(tree: TinyTree) -> None:
    """issue 44: 171 s without a word"""
    tree.make_compiler(before=f'case "$*" in *" -c bindings"*) while [ ! -e {tree.gate} ]; do sleep 0.05; done;; esac')
    builder = tree.start(WAIT)
    wait_until(tree.compiled, "the first compile")
    waiter = tree.start(WAIT)
    own = r"native module, being built: 1 of 3 files in \d+ s \(usually 1 to 3 minutes\)"
    others = own.replace("built", f"built by process {builder.pid} on .*, since [0-9:]+")
    for process, says in ((builder, own), (waiter, others)):
        read = texts_of(process.stderr.fileno())
        wait_until(lambda read=read, says=says: re.search(says, read()), says)
    tree.release_compiler()
    assert [process.communicate(timeout=60)[0] for process in (builder, waiter)] == ["42\n"] * 2


# ---- whatever dies ---------------------------------------------------------------------------------------------------


def test_what_a_killed_builder_has_begun_is_finished_for_the_next_one(tree: TinyTree) -> None:
    """Ranks that live shorter than a compile takes come to their module too."""
    tree.hold_compiler()
    builder = tree.start()
    wait_until(tree.compiled, "the first compile")
    builder.send_signal(signal.SIGKILL)
    builder.communicate(timeout=30)
    waiter = start_waiter(tree, builder)
    waiter.send_signal(signal.SIGKILL)
    waiter.communicate(timeout=30)
    message = tree.error(BW_BUILD_TIMEOUT="1")
    assert (
        f"process {builder.pid} on " in message
        and "which has ended" in message
        and "if neither runs, remove " in message
    )
    last = start_waiter(tree, builder)
    tree.release_compiler()
    out, err = last.communicate(timeout=60)
    assert out == "42\n", err
    assert sorted(tree.compiled()) == ["base/second.cpp", "bindings/module.cpp", "link"]
    wait_until(lambda: not processes_of(tree), "ninja and its compilers have ended")


@pytest.mark.parametrize("ending", ["time limit", "Ctrl-C"])
def test_a_build_that_is_ended_leaves_no_compiler(tree: TinyTree, ending: str) -> None:
    tree.hold_compiler()
    if ending == "time limit":
        assert "stopped after 2 s (BW_BUILD_TIMEOUT)" in tree.error(BW_BUILD_TIMEOUT="2")
    else:
        builder = tree.start("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + LOAD)
        wait_until(tree.compiled, "the first compile")
        builder.send_signal(signal.SIGINT)
        _, err = builder.communicate(timeout=30)
        assert err.rstrip().endswith("KeyboardInterrupt"), err
    wait_until(lambda: not processes_of(tree), "no compiler is left")
    tree.release_compiler()
    assert tree.run()[0] == "42"


@pytest.mark.parametrize("damage", ["other bytes", "no manifest"])
def test_a_damaged_entry_is_built_again(tree: TinyTree, damage: str) -> None:
    tree.run()
    (entry,) = tree.entries()
    (module,) = entry.glob("_cpu*.so")
    data = module.read_bytes()
    if damage == "no manifest":
        (entry / "_cpu.json").write_text("[]")
    else:
        module.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    out, err = tree.run()
    assert out == "42" and "building" in err
    assert tree.run() == ("42", "")
    assert tree.entries() == [entry]


def test_a_module_that_cannot_be_imported_is_not_published(tree: TinyTree) -> None:
    tree.write("base/second.cpp", "#include <csignal>\nstruct Crash { Crash() { std::raise(SIGSEGV); } } crash;\n")
    assert "ended with status -11" in tree.error()
    tree.write("base/second.cpp", "void gone(); struct Call { Call() { gone(); } } call;\n")
    message = tree.error()
    assert "the process that imported it ended with status 1" in message and "undefined symbol" in message
    assert tree.entries() == []


# ---- what is compiled again ------------------------------------------------------------------------------------------


def test_an_edited_header_gives_another_entry_and_compiles_only_its_users(tree: TinyTree) -> None:
    tree.run()
    tree.write("base/answer.h", "#define ANSWER 43\n")
    os.utime(tree.csrc / "base" / "answer.h", (1e9, 1e9))  # as a package manager or `git stash` may bring it
    assert tree.run()[0] == "43"
    assert tree.compiled()[3:] == ["bindings/module.cpp", "link"]
    tree.write("base/answer.h", "#define ANSWER 42\n")
    tree.write("base/answer.h~", "backups and hidden files are no part of the key")
    tree.write("base/.answer.h.swp", "open in an editor")
    assert tree.run() == ("42", "")
    assert len(tree.entries()) == 2


def test_the_same_compiler_by_another_path_finds_the_module(tree: TinyTree) -> None:
    tree.run()
    link = tree.root / "bin" / "tiny-c++"
    link.parent.mkdir()
    link.symlink_to(tree.compiler)
    assert tree.run(CXX=str(link)) == ("42", "") == tree.run(CXX="tiny-c++", PATH=f"{link.parent}:{os.environ['PATH']}")
    assert tree.run(CXX=f"{link} -O1")[0] == "42" and len(tree.entries()) == 2
    tree.make_compiler(before="true")  # another one with the same --version
    assert tree.run()[0] == "42" and len(tree.entries()) == 3
    assert len(list((tree.cache / "builds").glob("*/build.ninja"))) == 3


# ---- where it looks --------------------------------------------------------------------------------------------------


def test_native_dir_comes_first_and_needs_no_compiler(tree: TinyTree) -> None:
    tree.run()
    (entry,) = tree.entries()
    tree.write("base/answer.h", "#define ANSWER 43\n")
    assert tree.run(BW_NATIVE_DIR=str(entry), PATH="/nowhere", CXX=None) == ("42", "")
    message = tree.error(BW_NATIVE_DIR=str(tree.root))
    assert "BW_NATIVE_DIR" in message and "has no _cpu" in message
    (tree.root / "_cpu.cpython-39-x86_64-linux-gnu.so").touch()
    message = tree.error(BW_NATIVE_DIR=str(tree.root))
    assert "it has _cpu.cpython-39-x86_64-linux-gnu.so, for another Python" in message
    (tree.root / "_cpu.so").write_bytes(b"\x7fELF, of another machine")
    message = tree.error(BW_NATIVE_DIR=str(tree.root))
    assert "_cpu.so cannot be loaded" in message and "unset BW_NATIVE_DIR" in message and "remove" not in message


def test_a_module_compiled_at_install_is_used_only_with_its_sources(tree: TinyTree) -> None:
    native = tree.root / "python" / "bucketwheel" / "_native"
    tree.run(
        f"from pathlib import Path; from bucketwheel.native import modules; modules.build_into(Path({str(native)!r}))"
    )
    assert tree.run(PATH="/nowhere", CXX=None, BW_JIT="0") == ("42", "")
    assert tree.entries() == []
    tree.write("base/answer.h", "#define ANSWER 43\n")
    out, err = tree.run()
    assert out == "43" and "compiled at install from other sources" in err


def test_jit_off(tree: TinyTree) -> None:
    message = tree.error(BW_JIT="0")
    assert "BW_JIT=0 forbids building" in message
    assert str(tree.cache) in message and "BW_NATIVE_DIR" in message and "BW_AOT=cpu" in message
    tree.run()
    assert tree.run(BW_JIT="0") == ("42", "")
    message = tree.error(BW_JIT="0", PATH="/nowhere", CXX=None)
    assert "use the compiler, Python and pybind11 that filled the cache" in message and "unset BW_JIT" not in message
    (entry,) = tree.entries()
    entry.rename(entry.with_name(entry.name.replace("cpython-3", "cpython-9")))  # another Python's
    assert f"the cache has no {entry}" in tree.error(BW_JIT="0")


def test_a_cache_that_cannot_be_written_serves_what_it_has(tree: TinyTree) -> None:
    # A file where a folder must be made stands for a read-only file system: permissions do not stop root.
    tree.run()
    shutil.rmtree(tree.cache / "builds")
    (tree.cache / "builds").touch()
    assert tree.run() == ("42", "")
    tree.write("base/answer.h", "#define ANSWER 43\n")
    message = tree.error()
    assert f"the cache folder {tree.cache} cannot be used" in message and "BW_CACHE_DIR=" in message


def test_an_unwritable_home_falls_back_to_a_folder_of_our_own(tree: TinyTree) -> None:
    temporary = tree.root / "temporary"
    temporary.mkdir()
    assert tree.run(BW_CACHE_DIR=None, XDG_CACHE_HOME=None, HOME="/dev/null", TMPDIR=str(temporary))[0] == "42"
    assert (temporary / f"bucketwheel-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_network_home_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nserver:/users /users {} rw 0 0\nx /users/me/local\\040disk xfs rw 0 0\n"
    for kind in ("nfs4", "wekafs", "fuse.glusterfs", "fuse.ceph", "panfs", "virtiofs", "smbfs"):
        monkeypatch.setattr(cache.Path, "read_text", lambda *_, kind=kind, **__: mounts.format(kind))
        assert cache.is_network(Path("/users/me/.cache")), kind
        assert not cache.is_network(Path("/users/me/local disk/cache")) and not cache.is_network(Path("/usersgroup"))


# ---- who may write there ---------------------------------------------------------------------------------------------


def test_a_folder_that_others_may_write_to_is_refused(tree: TinyTree, mode: int = 0o757) -> None:
    assert tree.run("import os; os.umask(0)\n" + LOAD)[0] == "42"
    (entry,) = tree.entries()
    (module,) = entry.glob("*.so")
    assert tree.cache.stat().st_mode & 0o777 == 0o700 and not (entry.stat().st_mode | module.stat().st_mode) & 0o022
    assert tree.run(BW_NATIVE_DIR=str(entry)) == ("42", "")
    for path, changes in ((tree.cache, {}), (entry, {"BW_NATIVE_DIR": str(entry)})):
        path.chmod(mode)
        message = tree.error(**changes)
        assert f"{path} is not used, because other users can write to it (mode {mode:04o})" in message
        assert "chmod -R go-w" in message and "BW_CACHE_DIR=" in message and "only read" in message


def test_another_users_folder_is_refused_and_roots_may_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_root()
    os.chown(tmp_path, STRANGER, STRANGER)
    with pytest.raises(cache.BuildError, match=f"it belongs to another user, {STRANGER}"):
        cache.expect_trusted(tmp_path)
    os.chown(tmp_path, 0, 0)
    monkeypatch.setattr(cache.os, "geteuid", lambda: STRANGER)
    cache.expect_trusted(tmp_path)
    cache.expect_trusted(tmp_path / "to" / "be" / "made")


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_compile_error_is_one_screen(tree: TinyTree) -> None:
    tree.write("base/second.cpp", "".join(f"#error number {n:03d}\n" for n in range(50)))
    message = tree.error()
    assert "compiling base_second.cpp.o failed" in message
    assert "-c base/second.cpp" in message
    assert "number 049" in message and "number 000" not in message
    (log,) = [Path(line.split("log: ")[1]) for line in message.splitlines() if "log: " in line]
    assert "number 000" in log.read_text() and "-c base/second.cpp" in log.read_text()
    assert "CXX=" in message and "BW_NATIVE_DIR" in message
    assert len(message.splitlines()) <= 45
    assert tree.entries() == []


NO_NINJA = "import shutil, sys; sys.modules['ninja'] = None\nwhich = shutil.which\n"
NO_NINJA += "shutil.which = lambda name: None if name == 'ninja' else which(name)\n"
EMBEDDED = "import sys; sys.executable = ''\n"
NO_HEADERS = (
    "import sysconfig; paths = sysconfig.get_paths(); sysconfig.get_paths = lambda: {**paths, 'include': '/no'}\n"
)


@pytest.mark.parametrize(
    ("before", "changes", "says"),
    [
        ("", {"CXX": None, "PATH": "/nowhere"}, ("no C++ compiler found", "apt install g++", "CXX=")),
        ("", {"CXX": "no-such-c++ -O1"}, ("CXX='no-such-c++ -O1' is not a program",)),
        ("", {"CXX": "false"}, ("false cannot be run", "CXX=g++")),
        ("import sys; sys.modules['pybind11'] = None\n", {}, ("pybind11 is not installed", "pip install 'pybind11")),
        (NO_NINJA, {}, ("ninja is not installed", "pip install ninja")),
        (NO_HEADERS, {}, ("Python.h is not in /no", f"apt install python3.{sys.version_info.minor}-dev")),
        (EMBEDDED, {}, ("could not be started", "doctor --build cpu")),
    ],
)
def test_what_is_missing_is_named(tree: TinyTree, before: str, changes: dict[str, str], says: tuple[str, ...]) -> None:
    message = tree.error(before + LOAD, **changes)
    assert all(text in message for text in says) and "BW_NATIVE_DIR=" in message, message


NO_ROOM = "/tmp/cc79QVum.s: Fatal error: can't fill 256 bytes in section .data of x.o: 'No space left on device'"
NO_EXEC = "_cpu.so: failed to map segment from shared object"


@pytest.mark.parametrize("where", ["compiler", "import"])
def test_a_folder_is_named_where_no_compiler_would_do_better(tree: TinyTree, where: str) -> None:
    """A full disk and a folder that is mounted noexec (issue 44)."""
    if where == "compiler":
        tree.make_compiler(before=f'echo "{NO_ROOM}" >&2; exit 1')
    else:
        raised = f'PyErr_SetString(PyExc_ImportError, "{NO_EXEC}"); return nullptr;'
        tree.write("bindings/module.cpp", MODULE.replace("PyObject* module = ", raised + "PyObject* module = "))
    message = tree.error()
    assert "BW_CACHE_DIR=..." in message and "TMPDIR=..." in message
    assert "CXX" not in message.partition("What you can do:")[2]


# ---- the real package ------------------------------------------------------------------------------------------------


def test_import_compiles_nothing_and_loads_no_native_module() -> None:
    # torch first, and a class: what torch does with it when it is imported is not ours.
    code = "import sys, subprocess, torch\nclass Refused(subprocess.Popen):\n"
    code += "    def __init__(self, *command, **_): raise AssertionError(f'{command} was started')\n"
    code += "subprocess.Popen = Refused\nimport bucketwheel\n"
    code += "print(any(name.startswith('bucketwheel._cpu') for name in sys.modules), bucketwheel.__version__)"
    environment = {**os.environ, "PATH": "/nowhere", "BW_CACHE_DIR": "/dev/null/none"}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.split() == ["False", "0.1.0"]
