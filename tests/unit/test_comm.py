"""Communicators without ranks that matter: what is refused, warned of, and outlives them."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from bucketwheel.comm import arguments
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import PreMulSum, all_gather, reduce_scatter
from tests.support.comm_cases import check_usable, run_local

F32, BF16 = torch.float32, torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BASE = zeros(64)
OVERLAP = r"tensor pair {}: the {} overlaps the output"

# What is wrong, beside what tests/conformance/collectives/requests.py has of every backend: outputs and inputs of an
# all_gather in a world of 2 on rank 0, and what the ValueError names.
BAD_GATHERS = {
    "input in another rank's part": (BASE[:4], BASE[2:4], OVERLAP.format(0, "input")),
    "input half in its own part": (BASE[:4], BASE[1:3], OVERLAP.format(0, "input")),
    "outputs overlap": ([BASE[:4], BASE[3:7]], [zeros(2), zeros(2)], OVERLAP.format(1, "output") + " of tensor pair 0"),
    "input in another output": ([zeros(4), BASE[:4]], [BASE[3:5], zeros(2)], OVERLAP.format(0, "input")),
    "gaps in the output": (zeros(4, 4)[:, ::2], zeros(4), r"outputs\[0\] is not contiguous: shape \[4, 2\], strides"),
}
BAD_REDUCTIONS = {
    "output in another rank's part": (BASE[2:4], BASE[:4], OVERLAP.format(0, "input")),
    "output half in its own part": (BASE[1:3], BASE[:4], OVERLAP.format(0, "input")),
    "outputs overlap": ([BASE[:2], BASE[1:3]], [zeros(4), zeros(4)], OVERLAP.format(1, "output")),
    "input not divisible": (zeros(2), zeros(5), r"shape \[5\], expected world \(2\) x the 2 elements of outputs\[0\]"),
}


@pytest.mark.parametrize(
    ("calls", "outputs", "inputs", "message"),
    [
        *(((all_gather, AllGatherRequest), *case) for case in BAD_GATHERS.values()),
        *(((reduce_scatter, ReduceScatterRequest), *case) for case in BAD_REDUCTIONS.values()),
    ],
    ids=[*BAD_GATHERS, *BAD_REDUCTIONS],
)
def test_what_is_refused(calls, outputs, inputs, message):
    def body(comm: Communicator) -> None:
        for call in calls if comm.rank == 0 else ():
            with pytest.raises(ValueError, match=message):
                call(outputs, inputs, comm)
        check_usable(comm)

    run_local(2, body)


def test_other_devices_and_dtypes_of_as_many_bytes_are_refused():
    with Communicator() as comm:
        for inputs, message in (
            (torch.zeros(2, device="meta"), r"inputs\[0\] has no strided memory"),
            (zeros(2, dtype=torch.int32), r"outputs\[0\] is torch.float32, inputs\[0\] is torch.int32"),
        ):
            with pytest.raises(TypeError, match=message):
                all_gather(zeros(2), inputs, comm)


def test_pre_mul_sum_takes_a_finite_number():
    assert PreMulSum(2) == PreMulSum(2.0) != PreMulSum(0.5)
    with Communicator() as comm:
        out = zeros(3)
        reduce_scatter(out, torch.full((3,), 3.0), comm, op=PreMulSum(np.float32(0.5))).wait()
        assert out.tolist() == [1.5] * 3
    for factor in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"the factor of PreMulSum is {factor}"):
            PreMulSum(factor)


class CalledNccl(Communicator):
    """Says that it is of the backend nccl and of six ranks; there is one, of the backend local."""

    backend = property(lambda self: "nccl")  # type: ignore[assignment]
    size = 6  # type: ignore[assignment]


@pytest.fixture
def called_nccl(monkeypatch):
    monkeypatch.setattr(arguments, "_has_warned", False)
    with CalledNccl() as comm:
        yield comm


@pytest.mark.parametrize("is_call", [True, False])
def test_averages_of_16_bits_on_nccl_are_warned_of_once(called_nccl, is_call, recwarn):
    def call(outs, ins, op="sum"):
        if is_call:
            reduce_scatter(outs, ins, called_nccl, op=op)
        else:
            ReduceScatterRequest(outs, ins, called_nccl, op=op).start()

    half, whole = zeros(3, dtype=BF16), zeros(3)
    call(whole, whole.clone(), "avg")
    call(half, half.clone())
    call(half, half.clone(), PreMulSum(0.5))
    assert not recwarn
    with pytest.warns(UserWarning, match=r"op='avg' of torch.bfloat16 on 6 ranks: .* 1/6 .* up to 0.2 %") as caught:
        call([whole, half], [whole.clone(), half.clone()], "avg")
    assert caught[0].filename == __file__ and len(caught) == 1
    call(half, half.clone(), "avg")
    assert not recwarn


def test_inputs_may_overlap_each_other():
    with Communicator() as comm:
        shared = torch.arange(6.0)
        outputs = [zeros(4), zeros(4)]
        all_gather(outputs, [shared[:4], shared[2:]], comm).wait()
        assert [out.tolist() for out in outputs] == [[0, 1, 2, 3], [2, 3, 4, 5]]


def test_rejected_arguments_of_communicator():
    with pytest.raises(ValueError, match="backend must be .* got 'mpi'"):
        Communicator(backend="mpi")
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        Communicator(timeout_s=0)
    with pytest.raises(ValueError, match="'shm' takes a process group"):
        Communicator(LocalWorld(1).rank(0), backend="shm")
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        LocalWorld(0)
    world = LocalWorld(2)
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        world.rank(2)
    with Communicator(world.rank(0)), pytest.raises(ValueError, match="rank 0 has joined already"):
        Communicator(world.rank(0))


WITHOUT_NVCC = """
import os, threading
from unittest import mock
from bucketwheel import Communicator, errors
from bucketwheel.native import modules, toolchain

modules.native()
which = toolchain.shutil.which
what_is_there = lambda: [threading.enumerate(), len(os.listdir("/proc/self/task")), os.listdir("/proc/self/fd")]
before = what_is_there()
with mock.patch.object(toolchain.shutil, "which", lambda name: None if name.endswith("nvcc") else which(name)):
    for make in (lambda: Communicator(device="cuda"), lambda: Communicator.pair()):
        try:
            make()
        except errors.BuildError as error:
            print(error, end="\\n---")
            error.__traceback__ = None
assert what_is_there() == before, (what_is_there(), before)
"""


def test_a_communicator_on_cuda_without_nvcc():
    """Whatever was compiled before: the CUDA module is known by its compiler."""
    hidden = ("NVCC", "CUDA_HOME", "BW_NATIVE_DIR", "BW_JIT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NVCC], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    for message in done.stdout.split("---")[:2]:
        for text in ("nvcc is missing", "CUDA_HOME=", "NVCC=", "BW_NATIVE_DIR=", "BW_AOT=cuda", "on the CPU"):
            assert text in message
