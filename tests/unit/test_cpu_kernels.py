"""Every instruction set passes the tests of the kernels, in a process of its own: the choice is made once per process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bucketwheel.native import core
from tests.support.requirements import slow_case

ROOT = Path(__file__).resolve().parents[2]
ISAS = [slow_case("plain"), "avx2", "avx512"]  # test_bits.cpp has plain ones in the default run
# The comparisons with slow versions, without what threads, steps and arguments are about.
TESTS = ["test_adam_matrix.py::test_every_configuration_bit_for_bit"]
TESTS += ["test_adam_matrix.py::test_every_size_and_every_place_in_the_parameter"]
TESTS += [
    "test_adam.py::test_every_operation_is_where_the_formula_says",
    "test_crc32c.py",
    "test_float16.py",
    "test_norm.py",
    "test_pack.py",
]


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_gives_the_bits_of_the_slow_versions(isa: str) -> None:
    if isa == core.cpu_isa():
        pytest.skip("that of this process, whose tests they are")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"tests/unit/{test}" for test in TESTS)],
        cwd=ROOT,
        env={**os.environ, "BW_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if "this processor runs" in done.stdout + done.stderr:
        pytest.skip(f"this processor does not run {isa}")
    assert done.returncode == 0, done.stdout[-3000:]


def test_an_unknown_instruction_set_is_refused_before_threads_start() -> None:
    code = "import torch; from bucketwheel.kernels import ops; ops.l2_norm([torch.ones(3_000_000)])"
    env = {**os.environ, "BW_CPU_ISA": "avx1024", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "ValueError: environment variable BW_CPU_ISA='avx1024': expected 'plain', 'avx2' or 'avx512'" in done.stderr
