"""Finding and building the native module: once for everybody, whatever dies, with an error that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.tiny_tree import LOAD, WAIT, TinyTree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> TinyTree:
    return TinyTree(tmp_path)


def wait_until(condition, what: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


# ---- once ------------------------------------------------------------------------------------------------------------


def test_second_process_finds_the_first_ones_module(tree: TinyTree) -> None:
    out, err = tree.run()
    assert out == "42" and "building the native module" in err
    assert sorted(tree.compiled()) == ["base/second.cpp", "bindings/module.cpp", "link"]
    out, err = tree.run()
    assert (out, err) == ("42", "")
    assert len(tree.compiled()) == 3


def test_eight_processes_at_once_build_once(tree: TinyTree) -> None:
    tree.make_compiler(before="sleep 0.5")
    children = [tree.start() for _ in range(8)]
    results = [child.communicate(timeout=60) for child in children]
    assert [out for out, _ in results] == ["42\n"] * 8
    assert len(tree.compiled()) == 3
    assert sum("building the native module" in err for _, err in results) == 1
    assert list((tree.cache / "tmp").iterdir()) == []


def start_waiter(tree: TinyTree, builder: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """A process that waits for ``builder`` now, because it said so."""
    waiter = tree.start(WAIT)
    assert waiter.stderr is not None
    assert f"being built by process {builder.pid} on " in waiter.stderr.readline()
    return waiter


def test_waiters_share_the_failure_instead_of_repeating_it(tree: TinyTree) -> None:
    tree.write("bindings/module.cpp", "#error not today\n")
    tree.hold_compiler()
    builder = tree.start()
    wait_until(tree.compiled, "the first compile")
    waiters = [start_waiter(tree, builder) for _ in range(3)]
    tree.release_compiler()
    messages = [child.communicate(timeout=60)[1] for child in (builder, *waiters)]
    assert all("not today" in message for message in messages)
    assert tree.compiled().count("bindings/module.cpp") == 1
    tree.error()  # a process that comes later tries again
    assert tree.compiled().count("bindings/module.cpp") == 2


def test_native_is_kept_in_the_process(tree: TinyTree) -> None:
    code = "import sys, bucketwheel; from bucketwheel.native.modules import native; first = native()\n"
    code += "assert native() is first is sys.modules['bucketwheel._cpu'] is bucketwheel._cpu; print('same')"
    assert tree.run(code)[0] == "same"


# ---- whatever dies ---------------------------------------------------------------------------------------------------


def test_a_killed_builder_blocks_nobody(tree: TinyTree) -> None:
    tree.hold_compiler()
    builder = tree.start()
    wait_until(tree.compiled, "the first compile")
    waiter = start_waiter(tree, builder)
    assert len(list((tree.cache / "tmp").iterdir())) == 1
    tree.make_compiler()  # the key stays: neither its path nor its version changes
    builder.send_signal(signal.SIGKILL)
    builder.communicate(timeout=30)
    try:
        # The dead builder's compilers still hang: the waiter waits for them neither.
        out, err = waiter.communicate(timeout=60)
        assert out == "42\n", err
        assert list((tree.cache / "tmp").iterdir()) == []
    finally:
        tree.release_compiler()


def test_the_folder_of_a_living_builder_stays(tree: TinyTree) -> None:
    code = "from pathlib import Path; from bucketwheel.native import cache as _cache\n"
    code += "cache = Path('cache'); (cache / 'tmp').mkdir(parents=True)\n"
    code += "with _cache.private_folder(cache) as mine:\n"
    code += "    _cache.prune(cache); assert (mine / 'alive').exists()\n"
    code += "assert not mine.exists(); print('ok')"
    assert tree.run(code)[0] == "ok"


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "no manifest", "no module"])
def test_a_damaged_entry_is_built_again(tree: TinyTree, damage: str) -> None:
    tree.run()
    (entry,) = tree.entries()
    (module,) = entry.glob("_cpu*.so")
    data = module.read_bytes()
    if damage == "truncated":
        module.write_bytes(data[: len(data) // 2])
    elif damage == "other bytes":
        module.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "no manifest":
        (entry / "_cpu.json").unlink()
    else:
        module.unlink()
    out, err = tree.run()
    assert out == "42" and "building" in err
    assert tree.run() == ("42", "")
    assert tree.entries() == [entry]


def test_a_module_that_crashes_does_not_take_the_caller_with_it(tree: TinyTree) -> None:
    crash = "\n#include <csignal>\nstruct Crash { Crash() { std::raise(SIGSEGV); } } crash;\n"
    tree.write("base/second.cpp", crash)
    message = tree.error()
    assert "ended with status -11" in message
    assert tree.entries() == []


def test_a_missing_symbol_is_found_before_publishing(tree: TinyTree) -> None:
    tree.write("base/second.cpp", "void gone(); struct Call { Call() { gone(); } } call;\n")
    message = tree.error()
    assert "the process that imported it ended with status 1" in message and "undefined symbol" in message
    assert tree.entries() == []


# ---- the key ---------------------------------------------------------------------------------------------------------


def test_an_edited_header_gives_another_entry_and_compiles_only_its_users(tree: TinyTree) -> None:
    tree.run()
    tree.write("base/answer.h", "#define ANSWER 43\n")
    assert tree.run()[0] == "43"
    assert tree.compiled()[3:] == ["bindings/module.cpp", "link"]
    tree.write("base/answer.h", "#define ANSWER 42\n")
    assert tree.run() == ("42", "")
    assert len(tree.entries()) == 2


@pytest.mark.parametrize(
    "edit", [("-O0", "-O1"), ("second.cpp", "second.cpp -DSECOND"), ("-shared", "-shared -Wl,-O1")]
)
def test_a_changed_flag_gives_another_entry(tree: TinyTree, edit: tuple[str, str]) -> None:
    tree.run()
    tree.write("sources.txt", (tree.csrc / "sources.txt").read_text().replace(*edit))
    tree.run()
    assert len(tree.entries()) == 2


def test_another_compiler_gives_another_entry(tree: TinyTree) -> None:
    tree.run()
    tree.run(CXX=f"{tree.compiler} -DX")
    assert len(tree.entries()) == 2


def test_backups_and_hidden_files_are_no_part_of_the_key(tree: TinyTree) -> None:
    tree.run()
    tree.write("base/answer.h~", "old")
    tree.write("base/.answer.h.swp", "open in an editor")
    assert tree.run() == ("42", "")


# ---- where it looks --------------------------------------------------------------------------------------------------


def test_native_dir_comes_first_and_needs_no_compiler(tree: TinyTree) -> None:
    tree.run()
    (entry,) = tree.entries()
    tree.write("base/answer.h", "#define ANSWER 43\n")
    assert tree.run(BW_NATIVE_DIR=str(entry), PATH="/nowhere", CXX=None) == ("42", "")
    message = tree.error(BW_NATIVE_DIR=str(tree.root))
    assert "BW_NATIVE_DIR" in message and "has no _cpu" in message


def test_a_module_compiled_at_install_is_used_only_with_its_sources(tree: TinyTree) -> None:
    native = tree.root / "python" / "bucketwheel" / "_native"
    tree.run(
        f"from pathlib import Path; from bucketwheel.native import modules as _build; _build.build_into(Path({str(native)!r}))"
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
    assert tree.compiled() == []
    tree.run()
    assert tree.run(BW_JIT="0") == ("42", "")
    message = tree.error(BW_JIT="0", PATH="/nowhere", CXX=None)
    assert "have here what the cache was filled with" in message and "unset BW_JIT" not in message


def test_a_cache_that_cannot_be_written_serves_what_it_has(tree: TinyTree) -> None:
    # Files where folders must be made stand for a read-only file system: permissions do not stop root.
    tree.run()
    for folder in ("locks", "tmp"):
        shutil.rmtree(tree.cache / folder)
        (tree.cache / folder).touch()
    assert tree.run() == ("42", "")
    tree.write("base/answer.h", "#define ANSWER 43\n")
    message = tree.error()
    assert f"the cache folder {tree.cache} cannot be used" in message and "BW_CACHE_DIR=" in message
    assert len(tree.compiled()) == 3


def test_an_unwritable_home_falls_back_to_a_folder_of_our_own(tree: TinyTree) -> None:
    temporary = tree.root / "temporary"
    temporary.mkdir()
    changes = {"BW_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": "/dev/null", "TMPDIR": str(temporary)}
    assert tree.run(**changes)[0] == "42"
    (folder,) = temporary.iterdir()
    assert folder.name == f"bucketwheel-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert f"others may write into {folder} (mode 0777)" in tree.error(**changes)


def test_a_network_home_is_not_used(tree: TinyTree, monkeypatch: pytest.MonkeyPatch) -> None:
    from bucketwheel.native import cache

    mounts = "/dev/sda / ext4 rw 0 0\nserver:/users /users nfs4 rw 0 0\nx /users/me/local\\040disk xfs rw 0 0\n"
    monkeypatch.setattr(cache.Path, "read_text", lambda *_, **__: mounts)
    assert cache.is_network(Path("/users/me/.cache"))
    assert not cache.is_network(Path("/users/me/local disk/cache"))
    assert not cache.is_network(Path("/usersgroup"))
    for kind in ("wekafs", "fuse.glusterfs", "fuse.ceph", "panfs", "virtiofs", "smbfs"):
        mounts = f"/dev/sda / ext4 rw 0 0\nserver:/users /users {kind} rw 0 0\n"
        assert cache.is_network(Path("/users/me/.cache")), kind


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ninja", [True, False])
def test_a_compile_error_is_one_screen(tree: TinyTree, ninja: bool) -> None:
    errors = "".join(f"#error number {n:03d}\n" for n in range(50))
    tree.write("base/second.cpp", errors)
    hide, changes = without(tree, ninja)
    message = tree.error(hide + LOAD, **changes)
    assert "compiling base_second.cpp.o failed" in message
    assert "-c base/second.cpp" in message
    assert "number 049" in message and "number 000" not in message
    (log,) = [Path(line.split("log: ")[1]) for line in message.splitlines() if "log: " in line]
    assert "number 000" in log.read_text() and "-c base/second.cpp" in log.read_text()
    assert "CXX=" in message and "BW_NATIVE_DIR" in message
    assert len(message.splitlines()) <= 45
    assert list((tree.cache / "tmp").iterdir()) == [] and tree.entries() == []


def without(tree: TinyTree, ninja: bool) -> tuple[str, dict[str, str]]:
    """Code and changes of the environment that hide ninja, unless it is wanted."""
    return ("", {}) if ninja else ("import sys; sys.modules['ninja'] = None\n", {"PATH": without_ninja(tree)})


def without_ninja(tree: TinyTree) -> str:
    """A PATH with what a compile needs and without ninja."""
    folder = tree.root / "bin"
    folder.mkdir()
    for name in ("sh", "c++", "as", "ld", "sleep"):
        found = subprocess.run(["/bin/sh", "-c", f"command -v {name}"], capture_output=True, text=True, check=True)
        (folder / name).symlink_to(found.stdout.strip())
    return str(folder)


def test_without_ninja_threads_build(tree: TinyTree) -> None:
    hide, changes = without(tree, ninja=False)
    out, _ = tree.run(hide + LOAD, **changes)
    assert out == "42"
    (log,) = (tree.cache / "logs").iterdir()
    assert "ninja: " not in log.read_text()


def test_no_compiler(tree: TinyTree) -> None:
    message = tree.error(CXX=None, PATH="/nowhere")
    assert "no C++ compiler found" in message and "apt install g++" in message and "CXX=" in message
    message = tree.error(CXX="no-such-c++ -O1")
    assert "CXX='no-such-c++ -O1' names no program" in message


def test_no_pybind11(tree: TinyTree) -> None:
    message = tree.error("import sys; sys.modules['pybind11'] = None\n" + LOAD)
    assert "pybind11 is not installed for" in message and "pip install 'pybind11" in message


def test_no_python_headers(tree: TinyTree) -> None:
    code = "import sysconfig\npaths = sysconfig.get_paths()\n"
    code += "sysconfig.get_paths = lambda: {**paths, 'include': '/nowhere'}\n" + LOAD
    message = tree.error(code)
    assert "Python.h is not in /nowhere" in message
    assert f"apt install python3.{sys.version_info.minor}-dev" in message


def test_waiting_has_an_end_and_says_for_whom(tree: TinyTree) -> None:
    tree.hold_compiler()
    builder = tree.start()
    wait_until(tree.compiled, "the first compile")
    message = tree.error(BW_BUILD_TIMEOUT="1")
    assert re.search(r"waited \d+ s \(BW_BUILD_TIMEOUT\)", message)
    assert f"process {builder.pid} on " in message and str(tree.cache / "locks") in message
    waiter = start_waiter(tree, builder)
    tree.release_compiler()
    assert [child.communicate(timeout=60)[0] for child in (builder, waiter)] == ["42\n"] * 2
    assert len(tree.compiled()) == 3


# ---- the real package ------------------------------------------------------------------------------------------------


def test_import_compiles_nothing_and_loads_no_native_module() -> None:
    # torch first, and a class: what torch does with it when it is imported is not ours.
    code = "import sys, subprocess, torch\nclass Refused(subprocess.Popen):\n"
    code += "    def __init__(self, *command, **_): raise AssertionError(f'{command} was started')\n"
    code += "subprocess.Popen = Refused\nimport bucketwheel\n"
    code += "print(any(name.startswith('bucketwheel._cpu') for name in sys.modules), bucketwheel.__version__)"
    environment = {**os.environ, "PATH": "/nowhere", "BW_CACHE_DIR": "/dev/null/none"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert out.split() == ["False", "0.1.0"]


@pytest.mark.slow
@pytest.mark.timeout_s(200)
def test_pip_install_of_a_source_tree(tmp_path: Path) -> None:
    """Needs the package index. Wheels, and what they hold compiled, are in test_packages.py."""
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "build_backend.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("csrc", "python"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BW_", "PYTHONPATH"))}
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target), str(source)]
    subprocess.run(command, env=environment, check=True, timeout=150)
    package = target / "bucketwheel"
    assert (package / "_csrc" / "sources.txt").read_text() == (ROOT / "csrc" / "sources.txt").read_text()
    assert not (package / "_native").exists()
