"""What nvcc makes of the CUDA module: registers and spills of every kernel for three architectures, and the whole
module linked and imported without a GPU. It is built in build/cuda, where what ptxas said of each source is kept too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bucketwheel.native import compile, toolchain
from bucketwheel.native.toolchain import CUDA
from tests.native.ptxas import Kernel, kernels_in
from tests.support.requirements import need_nvcc

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "cuda"
ARCHS = "8.0;9.0;10.0"
TIMEOUT_S = 400.0

# Registers for each thread: what leaves room for 4, 3 and 2 blocks of 256 threads on a multiprocessor of 64 K
# registers.
LIMITS = {"float32 states": 64, "bfloat16 states": 80, "float64 states": 128, "others": 64}
STATES = {"0": "float32 states", "1": "bfloat16 states", "3": "float64 states"}  # by DType
ADAM = re.compile(r"adam_kernel<.*?<\(bucketwheel::DType\)\d, \(bucketwheel::DType\)(\d), ")


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    need_nvcc()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BW_CUDA_ARCH_LIST", ARCHS)
        tools = toolchain.find_cuda_toolchain()
    BUILT.mkdir(parents=True, exist_ok=True)
    for made in BUILT.glob("*.cu.o"):  # by a build that was cut off before its log was read
        if not (BUILT / made.name.replace(".cu.o", ".ptxas")).exists():
            made.unlink()
    recipe = compile.copy_sources(toolchain.read_recipe(ROOT / "csrc", module=CUDA), BUILT)
    compile.compile_module(recipe, tools, BUILT, BUILT / "build.log")
    # The log has what was compiled now; of the others, what ptxas said is kept.
    steps = re.split(r"^\[\d+/\d+\] ", (BUILT / "build.log").read_text(), flags=re.MULTILINE)
    for command, _, said in (step.partition("\n") for step in steps[1:]):
        if source := re.search(r" -c (\S+)\.cu ", command):
            (BUILT / f"{source[1].replace('/', '_')}.ptxas").write_text(said)
    names = [
        source.path.removesuffix(".cu").replace("/", "_") for source in recipe.sources if source.path.endswith(".cu")
    ]
    return [kernel for name in names for kernel in kernels_in((BUILT / f"{name}.ptxas").read_text())]


def kind_of(kernel: Kernel) -> str:
    match = ADAM.search(kernel.name)
    return STATES[match[1]] if match else "others"


@pytest.mark.timeout_s(1500)
def test_every_kernel_is_there_for_every_architecture(kernels: list[Kernel]) -> None:
    by_arch = {arch: {kernel.name for kernel in kernels if kernel.arch == arch} for arch in ("80", "90", "100")}
    assert by_arch["80"] == by_arch["90"] == by_arch["100"]
    assert len(kernels) == 3 * len(by_arch["90"])
    adam = [name for name in by_arch["90"] if ADAM.search(name)]
    # p fp32 (2 state dtypes), bf16 (2 x 3 places of the weight), fp16 (2 x 2), fp64 (1); each with and without amsgrad
    assert len(adam) == 26
    for launched in "adam_scalars sumsq accumulate fold param_sums rank_sums clip copy reduce".split():
        assert any(f"::{launched}_kernel" in name for name in by_arch["90"]), launched


def test_nothing_spills(kernels: list[Kernel]) -> None:
    spilling = [str(kernel) for kernel in kernels if kernel.spill_stores or kernel.spill_loads or kernel.stack]
    assert not spilling, "\n" + "\n".join(spilling)


@pytest.mark.parametrize("kind", LIMITS)
def test_registers(kernels: list[Kernel], kind: str) -> None:
    chosen = [kernel for kernel in kernels if kind_of(kernel) == kind]
    assert chosen
    greedy = [str(kernel) for kernel in chosen if kernel.registers > LIMITS[kind]]
    assert not greedy, "\n" + "\n".join(greedy)


def ptx_of(kernel: str) -> str:
    recipe = toolchain.read_recipe(ROOT / "csrc", module=CUDA)
    tools = toolchain.find_cuda_toolchain()
    command = [tools.nvcc[0], *recipe.nvcc_flags, "-I.", "-arch=compute_90", "-ptx", f"kernels/{kernel}.cu"]
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        subprocess.run([*command, "-o", file.name], cwd=recipe.csrc, check=True, timeout=TIMEOUT_S)
        return Path(file.name).read_text()


# Approximations, flushed denormals, and what ptxas may fuse: an addition or multiplication without its rounding.
INEXACT = re.compile(r"\S*(?:\.approx|\.full|\.ftz)\S*|\b(?:add|sub|mul)\.f(?:32|64)")


OPERATIONS = {
    "adam_cuda": "sqrt.rn.f32 div.rn.f32 fma.rn.f32 sqrt.rn.f64 div.rn.f64 fma.rn.f64 ld.global.cs.v4 st.global.cs.v4",
    "adam_scalars_cuda": "sqrt.rn.f64 div.rn.f64 mul.rn.f64",
    "norm_cuda": "fma.rn.f64 ld.global.v4 ld.global.cs.v4 st.global.v4",
    "norm_fold_cuda": "sqrt.rn.f64 add.rn.f64",
    "pack_cuda": "div.rn.f32 div.rn.f64 ld.global.cs.v4 st.global.v4",
}


@pytest.mark.parametrize("kernel", OPERATIONS)
def test_arithmetic_is_ieee_rounded_and_memory_goes_by_vectors(kernel: str) -> None:
    """What bitwise equality with the CPU rests on, and what the emulation by another compiler cannot show."""
    need_nvcc()
    ptx = ptx_of(kernel)
    assert not (found := INEXACT.findall(ptx)), found
    assert not (missing := [name for name in OPERATIONS[kernel].split() if name not in ptx]), missing


# The package's folder alone: importing the package would import torch. Then asks the table that the capsule holds, by
# ctypes: version, size, is_simulated, error_text, then the calls of cuda_api.h.
ASK = """
import ctypes, json, sys, types
sys.modules["bucketwheel"] = package = types.ModuleType("bucketwheel")
package.__path__ = [sys.argv[1]]
from bucketwheel.native.modules import cuda
module = cuda()
assert "torch" not in sys.modules
api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
address = api.PyCapsule_GetPointer(module.api, b"bucketwheel.cuda_api")
version, size = (ctypes.c_uint32 * 2).from_address(address)
pointers = (ctypes.c_void_p * ((size - 16) // 8)).from_address(address + 16)
error_text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(pointers[0])
error = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(pointers[1])(ctypes.byref(ctypes.c_int()))
print(json.dumps({"version": version, "simulated": ctypes.c_bool.from_address(address + 8).value, "file": module.__file__,
                  "calls": len(pointers) - 1, "filled": all(pointers), "error": error, "text": error_text(error).decode()}))
"""


@pytest.fixture(scope="module")
def answer(kernels: list[Kernel]) -> dict:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BW_")}
    environment = {**kept, "BW_NATIVE_DIR": str(BUILT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", ASK, str(ROOT / "python" / "bucketwheel")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout_s(1500)
def test_the_module_works_without_a_gpu(answer: dict) -> None:
    header = (ROOT / "csrc" / "device" / "cuda_api.h").read_text()
    version = re.search(r"kVersion = (\d+);", header)
    assert version and answer["version"] == int(version[1])
    assert answer["filled"] and not answer["simulated"]
    assert answer["calls"] == len(re.findall(r"^  X\(", header, re.MULTILINE))
    # 100: no device; 35: no driver, or one older than the runtime
    assert answer["error"] in (100, 35) and len(answer["text"]) > 10


def test_the_module_needs_no_cuda_library_and_shows_one_symbol(answer: dict) -> None:
    def lines(*command: str) -> list[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()

    needed = [line.split("[")[1].rstrip("]") for line in lines("readelf", "-d", answer["file"]) if "(NEEDED)" in line]
    assert needed
    assert not [name for name in needed if re.search(r"cuda|nv|torch|c10", name)], needed
    shown = [line.split()[-1] for line in lines("nm", "-D", "--defined-only", answer["file"])]
    assert shown == ["PyInit__cuda"]
