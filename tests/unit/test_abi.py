"""One compiled module serves every torch: it links no library of torch, uses none of its symbols, includes none of its headers.

The audit of the CUDA module runs where nvcc is.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bucketwheel.native import modules
from bucketwheel.native.toolchain import CPU, CUDA, Module
from tests.support.packages import ROOT
from tests.support.requirements import need_nvcc

# What every Linux of glibc has, and the C++ runtime, which torch loads too.
SYSTEM = re.compile(r"(libstdc\+\+|libgcc_s|libm|libc|libdl|librt|libpthread|ld-linux-[\w-]+)\.so\.\d+")
TORCH = re.compile(r"\b(at|c10|torch|caffe2)::|\b(aoti_torch_|torch_library_|THP)\w*")


def output(*command: str | Path) -> str:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def symbols_of_torch(library: Path) -> list[str]:
    names = output("nm", "--dynamic", "--demangle", library).splitlines()
    assert len(names) > 3
    return [name for name in names if TORCH.search(name)]


@pytest.mark.parametrize("module", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_native_module_has_no_symbol_of_torch(module: Module) -> None:
    if module is CUDA:
        need_nvcc()
    library = modules.locate(module)
    assert symbols_of_torch(library) == []
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "--dynamic", library))
    assert needed and [name for name in needed if not SYSTEM.fullmatch(name)] == []


def test_the_audit_finds_a_symbol_of_torch(tmp_path: Path) -> None:
    source, library = tmp_path / "uses.cpp", tmp_path / "uses.so"
    source.write_text(
        "#include <string>\nnamespace at { std::string name(); }\nstd::string call() { return at::name(); }\n"
    )
    output("c++", "-shared", "-fPIC", source, "-o", library)
    assert symbols_of_torch(library)


def test_no_source_names_torch() -> None:
    texts = {path: path.read_text() for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu")}
    assert len(texts) > 100
    uses = re.compile(r"\b(?:at|c10|torch)::|#include [<\"](?:torch|ATen|c10)/")
    assert [path for path, text in texts.items() if uses.search(text)] == []
