"""Finding nvcc, and which architectures a build is for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bucketwheel.errors import BuildError
from bucketwheel.native import nvcc as _nvcc


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BW_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST", "NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("9.0", ["90,code=sm_90"]),
        ("8.0;9.0+PTX", ["80,code=sm_80", "90,code=sm_90", "90,code=compute_90"]),
        ("9.0 8.0", ["80,code=sm_80", "90,code=sm_90"]),
        ("8.0+PTX, 10.0", ["80,code=sm_80", "100,code=sm_100", "100,code=compute_100"]),
        ("9.0a", ["90a,code=sm_90a"]),
        ("sm_90;90;9.0", ["90,code=sm_90"]),
        ("12.0f+PTX", ["120f,code=sm_120f", "120f,code=compute_120f"]),
    ],
)
def test_arch_lists(text: str, flags: list[str]) -> None:
    assert list(_nvcc.parse_archs(text, "X").flags) == [f"-gencode=arch=compute_{flag}" for flag in flags]


@pytest.mark.parametrize("text", ["Hopper", "9", "9.0;", "9.0+ptxas", "9.0b", "all"])
def test_what_is_no_architecture_names_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    with pytest.raises(BuildError, match="TORCH_CUDA_ARCH_LIST='.*is no architecture") as caught:
        _nvcc.choose_archs([])
    assert "BW_CUDA_ARCH_LIST='9.0'" in str(caught.value)


def test_who_chooses_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice() -> str:
        return str(_nvcc.choose_archs([(9, 0), (8, 6), (9, 0)]))

    assert str(_nvcc.choose_archs([])) == "9.0" and "the default" in _nvcc.choose_archs([]).origin
    assert choice() == "8.6;9.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    assert choice() == "8.0+PTX"
    monkeypatch.setenv("BW_CUDA_ARCH_LIST", "10.0")
    assert choice() == "10.0"


@pytest.mark.parametrize(
    ("text", "device", "runs"),
    [
        ("9.0", (9, 0), True),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (9, 0), True),
        ("9.0+PTX", (8, 0), False),
        ("9.0a", (9, 0), True),
        ("9.0a+PTX", (10, 0), False),
        ("10.0a", (10, 3), False),
        ("10.0f", (10, 3), True),
    ],
)
def test_what_runs_where(text: str, device: tuple[int, int], runs: bool) -> None:
    assert _nvcc.covers(_nvcc.parse_archs(text, "X"), device) is runs


def test_devices_are_those_of_the_driver(tmp_path: Path) -> None:
    source = tmp_path / "driver.c"
    source.write_text(
        "int cuInit(unsigned flags) { return 0; }\n"
        "int cuDeviceGetCount(int* count) { *count = 2; return 0; }\n"
        "int cuDeviceGetAttribute(int* value, int number, int device) {\n"
        "  *value = number == 75 ? 8 + device : number == 76 ? 6 * (1 - device) : -1; return 0; }\n"
    )
    library = tmp_path / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    assert _nvcc.visible_devices(str(library)) == [(8, 6), (9, 0)]
    source.write_text("int cuInit(unsigned flags) { return 100; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "none.so", source], check=True, timeout=60)
    assert _nvcc.visible_devices(str(tmp_path / "none.so")) == []
    assert _nvcc.visible_devices(str(tmp_path / "gone.so")) == []


def test_where_nvcc_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("named", "home/bin", "path"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert _nvcc.find_nvcc() == (str(tmp_path / "path" / "nvcc"),)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert _nvcc.find_nvcc() == (str(tmp_path / "home" / "bin" / "nvcc"),)
    monkeypatch.setenv("NVCC", f"{tmp_path}/named/nvcc --threads=2")
    assert _nvcc.find_nvcc() == (f"{tmp_path}/named/nvcc", "--threads=2")
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(BuildError, match="NVCC='no-such-nvcc' names no program"):
        _nvcc.find_nvcc()
    monkeypatch.delenv("NVCC")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="has no bin/nvcc"):
        _nvcc.find_nvcc()


def test_without_nvcc_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvcc.shutil, "which", lambda name: None)
    with pytest.raises(BuildError) as caught:
        _nvcc.find_nvcc()
    message = str(caught.value)
    for remedy in ("CUDA module: nvcc is missing", "CUDA_HOME=", "NVCC=", "BW_AOT=cuda", "BW_NATIVE_DIR", "on the CPU"):
        assert remedy in message
    assert len(message.splitlines()) <= 8


@pytest.mark.parametrize(("cxx", "ccbin"), [("c++", ["-ccbin", "c++"]), ("env c++ -g -O1", ["-ccbin", "c++"])])
def test_the_compiler_is_nvccs_host_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, ccbin: list[str]
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho release 13.0\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("NVCC", str(nvcc))
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("BW_CUDA_ARCH_LIST", "9.0")
    gencode = "-gencode=arch=compute_90,code=sm_90"
    plain = _nvcc.find_cuda_toolchain()
    assert list(plain.nvcc) == [str(nvcc), *ccbin, gencode]
    assert "9.0 (BW_CUDA_ARCH_LIST)" in plain.note
    monkeypatch.setenv("NVCC_CCBIN", "clang++")
    chosen = _nvcc.find_cuda_toolchain()
    assert list(chosen.nvcc) == [str(nvcc), gencode] and chosen.nvcc_identity != plain.nvcc_identity
