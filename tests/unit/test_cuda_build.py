"""Finding and building the CUDA module: what is its own, beside test_build.py. A false nvcc runs the C++ compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tiny_tree import LOAD, LOAD_CUDA, TinyTree


@pytest.fixture
def tree(tmp_path: Path) -> TinyTree:
    tree = TinyTree(tmp_path)
    tree.add_cuda()
    return tree


def compiles(tree: TinyTree) -> list[str]:
    """What nvcc was called for."""
    words = [line.split() for line in tree.nvcc_calls()]
    return [line[line.index("-c") + 1] if "-c" in line else "link" for line in words]


def test_the_modules_are_built_once_and_do_not_need_each_other(tree: TinyTree) -> None:
    out, err = tree.run(LOAD_CUDA)
    assert out == "142"
    assert "building the CUDA module for GPU architectures 9.0 (BW_CUDA_ARCH_LIST) (once;" in err
    assert compiles(tree) == ["kernels/answer.cu", "link"] and tree.compiled() == ["bindings/cuda.cpp"]
    assert all("-gencode=arch=compute_90,code=sm_90" in call for call in tree.nvcc_calls())
    (log,) = tree.cache.glob("builds/*/build.log")
    assert "Used 8 registers" in log.read_text()
    assert tree.entries() == [] and len(tree.entries("cuda")) == 1
    assert tree.run(LOAD)[0] == "42"
    assert tree.run(LOAD_CUDA, BW_JIT="0") == ("142", "") and len(compiles(tree)) == 2


def test_another_nvcc_or_architecture_gives_another_entry(tree: TinyTree) -> None:
    tree.run(LOAD_CUDA)
    (tree.root / "nvcc_release").write_text("13.1\n")
    tree.run(LOAD_CUDA)
    tree.run(LOAD_CUDA, BW_CUDA_ARCH_LIST="8.0;9.0")
    tree.run(LOAD_CUDA, BW_CUDA_ARCH_LIST=None, TORCH_CUDA_ARCH_LIST="9.0+PTX")
    assert len(tree.entries("cuda")) == 4
    assert tree.run(LOAD_CUDA, BW_CUDA_ARCH_LIST="9.0,8.0") == ("142", "")


def test_compiled_at_install(tree: TinyTree) -> None:
    native = tree.root / "python" / "bucketwheel" / "_native"
    code = "from pathlib import Path; from bucketwheel.native.modules import build_into\n"
    code += "from bucketwheel.native.toolchain import CPU, CUDA\n"
    tree.run(code + f"build_into(Path({str(native)!r}), (CPU, CUDA))")
    changes = {"PATH": "/nowhere", "CXX": None, "NVCC": None, "BW_JIT": "0"}
    assert tree.run(LOAD, **changes) == ("42", "") and tree.run(LOAD_CUDA, **changes) == ("142", "")
    assert tree.entries() == tree.entries("cuda") == []


def test_without_nvcc_the_cpu_module_works(tree: TinyTree) -> None:
    tree.nvcc.unlink()
    code = "import shutil; which = shutil.which\n"
    code += "shutil.which = lambda name: None if name.endswith('nvcc') else which(name)\n"
    message = tree.error(code + LOAD + "; modules.cuda()")
    assert "CUDA module: nvcc is missing" in message and len(tree.entries()) == 1
    for remedy in ("CUDA_HOME=", "NVCC=", "BW_NATIVE_DIR=", "BW_AOT=cuda", "on the CPU"):
        assert remedy in message
    assert "BW_AOT=cuda" in tree.error(LOAD_CUDA, BW_JIT="0")


def test_a_compile_error_shows_the_error_and_not_ptxas(tree: TinyTree) -> None:
    chatter = "echo 'ptxas info    : Used 8'; echo '    0 bytes stack frame, 0 bytes spill'"
    script = tree.nvcc.read_text().replace("exec c++", "c++").rstrip()
    tree.nvcc.write_text(f"{script}\nstatus=$?\nfor i in $(seq 40); do {chatter}; done\nexit $status\n")
    tree.write("kernels/answer.cu", "#error not on this GPU\n")
    message = tree.error(LOAD_CUDA)
    assert "CUDA module: compiling kernels_answer.cu.o failed" in message and "not on this GPU" in message
    assert "ptxas info" not in message and "spill" not in message
    assert "BW_CUDA_ARCH_LIST=" in message and "CXX=" in message and "BW_NATIVE_DIR" in message
    assert tree.entries("cuda") == []
