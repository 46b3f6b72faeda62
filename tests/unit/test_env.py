"""Every BW_* variable that the code reads: known, documented, and refused with its name where its value means nothing."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bucketwheel import ShardedAdamW
from bucketwheel.errors import BuildError
from bucketwheel.native import cache, env, modules, toolchain
from bucketwheel.native.toolchain import CPU
from bucketwheel.testing import RankFailed
from tests.support.optim_twins import run_local

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"BW_[A-Z][A-Z_]*")
TESTS_OWN = {"BW_GPU_RANKS", "BW_GPU_SIMULATE", "BW_REQUIRE", "BW_TEST_EMULATOR"}


def strings(path: Path) -> set[str]:
    """The strings of a Python file that are names of variables and nothing else; of env.py, without its list."""
    tree = ast.parse(path.read_text())
    tops = [node for node in tree.body if isinstance(node, ast.FunctionDef)] if path.stem == "env" else [tree]
    nodes = [node for top in tops for node in ast.walk(top)]
    found = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in found if NAME.fullmatch(text)}


def read_by_python() -> set[str]:
    files = [*sorted((ROOT / "python" / "bucketwheel").rglob("*.py")), ROOT / "setup.py", ROOT / "build_backend.py"]
    return set().union(*(strings(path) for path in files))


def read_by_the_core() -> set[str]:
    """test_layering.py sees to it that no other file of csrc/ reads the environment."""
    return set(re.findall(r'"(BW_[A-Z_]+)"', (ROOT / "csrc" / "base" / "env.cpp").read_text()))


def test_all_that_is_read_is_known_and_nothing_else() -> None:
    assert len(read_by_the_core()) >= 6 and "BW_JIT" in read_by_python()
    assert read_by_python() | read_by_the_core() == env.KNOWN - TESTS_OWN


def test_all_that_is_read_is_documented() -> None:
    rows = re.findall(r"^\| ([^|]*) \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE)
    assert set(NAME.findall(" ".join(rows))) == env.KNOWN - TESTS_OWN
    assert set(NAME.findall((ROOT / "docs" / "developers" / "testing.md").read_text())) >= TESTS_OWN


# ---- bad values ------------------------------------------------------------------------------------------------------


def read_aot() -> None:
    """setup.py, up to where it would call setuptools."""
    stubs = {"setuptools": ("Distribution", "setup"), "setuptools.command": ()}
    stubs |= {f"setuptools.command.{name}": (name,) for name in ("build", "build_py")}
    with pytest.MonkeyPatch.context() as patch:
        for name, has in stubs.items():
            module = types.ModuleType(name)
            vars(module).update({one: type(one, (), {"__init__": lambda *_, **__: None}) for one in has})
            patch.setitem(sys.modules, name, module)
        runpy.run_path(str(ROOT / "setup.py"))


def make_optimizer() -> None:
    params = [torch.nn.Parameter(torch.zeros(4))]
    run_local(2, lambda comm: ShardedAdamW(params, 0.1, process_group=comm))


# Name: a bad value, what is allowed, and what reads it.
BY_PYTHON: dict[str, tuple[str, str, Callable[[], object]]] = {
    "BW_AOT": ("gpu", "'cpu' can be compiled, or 'cuda'", read_aot),
    "BW_BUILD_TIMEOUT": ("nan", "a number of seconds above 0", env.build_timeout_s),
    "BW_CACHE_DIR": (__file__, "it is not a folder", cache.cache_dir),
    "BW_COMM_CHECK": ("true", "expected 0 or 1", lambda: env.flag("BW_COMM_CHECK")),
    "BW_CUDA_ARCH_LIST": ("Hopper", "set BW_CUDA_ARCH_LIST='9.0'", lambda: toolchain.choose_archs([])),
    "BW_DEBUG": ("on", "expected 0 or 1", make_optimizer),
    "BW_JIT": ("no", "expected 0 or 1", lambda: modules.locate(CPU)),
    "BW_NATIVE_DIR": ("/nowhere", "has no _cpu.", lambda: modules.locate(CPU)),
}


@pytest.mark.parametrize("name", BY_PYTHON)
def test_bad_values_that_python_reads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bad, says, read = BY_PYTHON[name]
    monkeypatch.setenv(name, bad)
    with pytest.raises((ValueError, BuildError, SystemExit, RankFailed)) as caught:
        read()
    message = str(caught.value)
    assert name in message and bad in message and says in message, message


def test_no_bad_value_goes_untried_and_empty_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(BY_PYTHON) == read_by_python() - read_by_the_core()
    assert set(BY_THE_CORE) == read_by_the_core()
    for name in ("BW_X", "BW_BUILD_TIMEOUT"):
        monkeypatch.setenv(name, " ")
    assert (env.flag("BW_X"), env.flag("BW_X", default=True), env.build_timeout_s()) == (False, True, 600)


FLAG = "expected 0 or 1"
SEED = "expected a whole number of at most 18 digits"
BY_THE_CORE = {
    "BW_CPU_ISA": (("avx1024", "AVX2"), "expected 'plain', 'avx2' or 'avx512'"),
    "BW_HOST_STREAM": (("threads", "0"), "expected 'thread' or 'inline'"),
    "BW_HOST_STREAM_FUZZ": (("-1", "x", "1" * 19), SEED),
    "BW_NCCL_LIB": (("libnccl.so.2",), "expected an absolute path"),
    "BW_POOL_POISON": (("yes", "2"), FLAG),
    "BW_TRACE_DIR": (("/dev/null/rings", "/proc/self/rings", "/dev/null"), "expected a folder that can be made"),
}
# What a bad value has said is not kept: the next one is read again.
TRY = """
import json, os, sys
from bucketwheel import Pool
found = []
for name, values in json.loads(sys.argv[1]).items():
    for value in values:
        os.environ[name] = value
        try:
            Pool()
            found.append([name, value, "nothing"])
        except ValueError as error:
            found.append([name, value, str(error)])
    del os.environ[name]
os.environ["BW_TRACE_DIR"] = sys.argv[2]
Pool()
print(json.dumps(found))
"""


def test_bad_values_that_the_core_reads(tmp_path: Path) -> None:
    given = json.dumps({name: values for name, (values, _) in BY_THE_CORE.items()})
    rings = tmp_path / "to" / "be" / "made"
    done = subprocess.run(
        [sys.executable, "-c", TRY, given, str(rings)],
        env={name: value for name, value in os.environ.items() if not name.startswith("BW_") or name == "BW_CACHE_DIR"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == sum(len(values) for values, _ in BY_THE_CORE.values())
    for name, value, message in found:
        assert f"environment variable {name}='{value}': {BY_THE_CORE[name][1]}" in message, message
    assert rings.is_dir()
