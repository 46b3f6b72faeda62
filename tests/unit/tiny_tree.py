"""A repository of one C++ file and the real build code: its native module has one number, ``answer``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "bucketwheel"

MODULE = """
#include <Python.h>
#include "base/answer.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__cpu() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", ANSWER);
  return module;
}
"""
SOURCES = """
flags: -std=c++20 -O0 -fPIC
link: -shared
bindings/module.cpp
base/second.cpp  # after the slow one
"""
# Waiters report at once, so that a test knows when they wait.
WAIT = "from bucketwheel import _build; _build._REPORT_S = 0.0; print(_build.native().answer, flush=True)"
LOAD = "from bucketwheel import _build; print(_build.native().answer, flush=True)"


class TinyTree:
    """Child processes run in an environment of their own: no cache, compiler or switch of the caller reaches them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.csrc = root / "csrc"
        self.cache = root / "cache"
        self.calls = root / "compiler_calls"
        package = root / "python" / "bucketwheel"
        package.mkdir(parents=True)
        for name in ("_build.py", "_toolchain.py", "_version.py", "errors.py"):
            shutil.copy(PACKAGE / name, package)
        (package / "__init__.py").touch()
        self.write("bindings/module.cpp", MODULE)
        self.write("base/answer.h", "#define ANSWER 42\n")
        self.write("base/second.cpp", "int second() { return 2; }\n")
        self.write("sources.txt", SOURCES)
        self.compiler = root / "counting-c++"
        self.gate = root / "gate"
        self.make_compiler()

    def write(self, path: str, text: str) -> None:
        (self.csrc / path).parent.mkdir(parents=True, exist_ok=True)
        (self.csrc / path).write_text(text)

    def make_compiler(self, before: str = "") -> None:
        """$CXX of the children: writes down each call, runs the shell line ``before``, then the real compiler."""
        version = 'case " $* " in *" --version "*) exec c++ "$@";; esac'
        script = self.root / "script"
        script.write_text(f'#!/bin/sh\n{version}\necho "$*" >> {self.calls}\n{before}\nexec c++ "$@"\n')
        script.chmod(0o755)
        script.replace(self.compiler)  # shells that run the old one keep it

    def hold_compiler(self) -> None:
        """Compilers started from now on wait for `release_compiler`."""
        self.make_compiler(before=f"while [ ! -e {self.gate} ]; do sleep 0.05; done")

    def release_compiler(self) -> None:
        self.gate.touch()

    def compiled(self) -> list[str]:
        """The sources compiled so far, in order; linking is 'link'."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        words = [line.split() for line in lines]
        return [line[line.index("-c") + 1] if "-c" in line else "link" for line in words]

    def entries(self) -> list[Path]:
        return sorted(self.cache.glob("bucketwheel_cpu-*"))

    def environment(self, **changes: str | None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BW_", "CXX", "PYTHONPATH"))}
        wanted: dict[str, str | None] = {
            "PYTHONPATH": str(self.root / "python"),
            "BW_CACHE_DIR": str(self.cache),
            "CXX": str(self.compiler),
            **changes,
        }
        return {**kept, **{name: value for name, value in wanted.items() if value is not None}}

    def start(self, code: str = LOAD, **changes: str | None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=self.environment(**changes),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str = LOAD, **changes: str | None) -> tuple[str, str]:
        """stdout and stderr of a process that must end well."""
        process = self.start(code, **changes)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out.strip(), err

    def error(self, code: str = LOAD, **changes: str | None) -> str:
        """The message of the BuildError that ends a process."""
        process = self.start(code, **changes)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1, (out, err)
        _, found, message = err.partition("bucketwheel.errors.BuildError: ")
        assert found, err
        return message
