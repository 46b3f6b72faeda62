"""A repository of one C++ file and the real build code: its native module has one number, ``answer``.

With `add_cuda` it has a CUDA module too, whose .cu file a false nvcc hands to the C++ compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "bucketwheel"

# tools/doctor.py and __main__.py need torch, the others do not.
REAL = [f"native/{name}.py" for name in ("modules", "cache", "compile", "env", "progress", "toolchain")]
REAL += ["_version.py", "errors.py", "comm/nccl_library.py", "__main__.py"]
REAL += ["tools/cache.py", "tools/doctor.py"]

MODULE = """
#include <Python.h>
#include "base/answer.h"
static PyObject* set_nccl_folders(PyObject*, PyObject*) { Py_RETURN_NONE; }
static PyObject* nccl_info(PyObject*, PyObject*) {
  return Py_BuildValue("{s:s,s:s,s:i,s:{s:O,s:O}}", "path", "/tiny/libnccl.so.2", "found", "the system", "version", 22809,
                       "features", "windows", Py_True, "symmetric_avg", Py_False);
}
static PyMethodDef methods[] = {{"set_nccl_folders", set_nccl_folders, METH_O, nullptr},
                                {"nccl_info", nccl_info, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
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
CUDA_MODULE = """
#include <Python.h>
int answer();
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__cuda() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", answer());
  return module;
}
"""
CUDA_SOURCES = """
nvcc: -std=c++20 -O0 -Xptxas=-v -Xcompiler=-fPIC
flags: -std=c++20 -O0 -fPIC
link: -shared -cudart=static -cudadevrt=none
kernels/answer.cu
bindings/cuda.cpp
"""
# Does with g++ what nvcc would do, and leaves out what only nvcc knows.
FALSE_NVCC = """#!/bin/sh
case " $* " in *" --version "*) echo "nvcc: release $(cat {root}/nvcc_release)"; exit;; esac
echo "$*" >> {root}/nvcc_calls
for word; do
  shift
  case "$word" in
    -ccbin) skip=1; continue;;
    -gencode=*|-cudart=*|-cudadevrt=*|-Xptxas=*) continue;;
    -Xcompiler=*) word="${{word#-Xcompiler=}}";;
    *.cu) set -- "$@" -x c++;;
  esac
  if [ -n "$skip" ]; then skip=; else set -- "$@" "$word"; fi
done
echo "ptxas info    : Used 8 registers"
exec c++ "$@"
"""
LOAD = "from bucketwheel.native import modules; print(modules.native().answer, flush=True)"
LOAD_CUDA = LOAD.replace("native()", "cuda()")
# Waiters report soon, so that a test knows when they wait.
WAIT = "from bucketwheel.native import progress; progress.REPORT_S = 0.1; " + LOAD


class TinyTree:
    """Child processes run in an environment of their own: no cache, compiler or switch of the caller reaches them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.csrc = root / "csrc"
        self.cache = root / "cache"
        self.calls = root / "compiler_calls"
        package = root / "python" / "bucketwheel"
        package.mkdir(parents=True)
        for name in REAL:
            (package / name).parent.mkdir(exist_ok=True)
            shutil.copy(PACKAGE / name, package / name)
            (package / name).parent.joinpath("__init__.py").touch()
        self.write("bindings/module.cpp", MODULE)
        self.write("base/answer.h", "#define ANSWER 42\n")
        self.write("base/second.cpp", "int second() { return 2; }\n")
        self.write("sources.txt", SOURCES)
        self.compiler = root / "counting-c++"
        self.gate = root / "gate"
        self.nvcc = root / "false-nvcc"
        self.make_compiler()

    def write(self, path: str, text: str) -> None:
        (self.csrc / path).parent.mkdir(parents=True, exist_ok=True)
        (self.csrc / path).write_text(text)

    def add_cuda(self) -> None:
        self.write("bindings/cuda.cpp", CUDA_MODULE)
        self.write("kernels/answer.cu", '#include "base/answer.h"\nint answer() { return ANSWER + 100; }\n')
        self.write("sources_cuda.txt", CUDA_SOURCES)
        (self.root / "nvcc_release").write_text("13.0\n")
        self.nvcc.write_text(FALSE_NVCC.format(root=self.root))
        self.nvcc.chmod(0o755)

    def nvcc_calls(self) -> list[str]:
        path = self.root / "nvcc_calls"
        return path.read_text().splitlines() if path.exists() else []

    def make_compiler(self, before: str = "") -> None:
        """$CXX of the children: writes down each call, runs the shell line ``before``, then the real compiler."""
        version = 'case " $* " in *" --version "*|*" -dumpmachine "*) exec c++ "$@";; esac'
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
        """The sources that $CXX compiled so far, in order; linking is 'link'."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        words = [line.split() for line in lines]
        return [line[line.index("-c") + 1] if "-c" in line else "link" for line in words]

    def entries(self, kind: str = "cpu") -> list[Path]:
        return sorted(self.cache.glob(f"{kind}-*"))

    def environment(self, **changes: str | None) -> dict[str, str]:
        ours = ("BW_", "CXX", "PYTHONPATH", "NVCC", "CUDA", "TORCH_CUDA")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        wanted: dict[str, str | None] = {
            "PYTHONPATH": str(self.root / "python"),
            "BW_CACHE_DIR": str(self.cache),
            "CXX": str(self.compiler),
            "NVCC": str(self.nvcc) if self.nvcc.exists() else None,
            "BW_CUDA_ARCH_LIST": "9.0",
            **changes,
        }
        return {**kept, **{name: value for name, value in wanted.items() if value is not None}}

    def start(self, code: str = LOAD, stderr: int = subprocess.PIPE, **changes: str | None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env=self.environment(**changes),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=stderr,
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
