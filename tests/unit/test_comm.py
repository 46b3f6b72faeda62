"""Bad arguments: the named error, nothing enqueued, and a communicator that works afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bucketwheel.comm import collectives
from bucketwheel.comm import communicator as comm_module
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ClosedError
from bucketwheel.kernels.ops import PreMulSum, all_gather, reduce_scatter
from tests.support.comm_cases import check_usable, run_local

F32, BF16 = torch.float32, torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def memory(numel: int) -> torch.Tensor:
    return torch.zeros(numel)


BASE = memory(64)

# What is wrong: (outputs, inputs) of an all_gather in a world of 2 on rank 0, the error, and what its message names.
BAD_GATHERS = {
    "fewer outputs": ([zeros(4)], [zeros(2), zeros(2)], ValueError, r"outputs has 1 tensors, inputs has 2"),
    "output too short": (
        [zeros(4), zeros(3)],
        [zeros(2), zeros(1, 2)],
        ValueError,
        r"outputs\[1\] has shape \[3\], expected world \(2\) x the 2 elements of inputs\[1\], shape \[1, 2\]",
    ),
    "output too long": (zeros(8), zeros(3), ValueError, r"outputs\[0\] has shape \[8\].*shape \[3\]"),
    "other dtype": (
        zeros(4),
        zeros(2, dtype=BF16),
        TypeError,
        r"outputs\[0\] is torch.float32, inputs\[0\] is torch.bfloat16",
    ),
    "same bytes, other dtype": (zeros(4, dtype=torch.int8), zeros(2, dtype=torch.bool), TypeError, r"outputs\[0\]"),
    "gaps in the output": (
        zeros(4, 4)[:, ::2],
        zeros(4),
        ValueError,
        r"outputs\[0\] is not contiguous: shape \[4, 2\], strides \[4, 2\]",
    ),
    "gaps in the input": (zeros(4), zeros(4)[::2], ValueError, r"inputs\[0\] is not contiguous"),
    "not a tensor": ([zeros(4)], [[1.0, 2.0]], TypeError, r"inputs\[0\]: expected a torch.Tensor, got list"),
    "other device": (
        zeros(4),
        torch.zeros(2, device="meta"),
        TypeError,
        r"inputs\[0\] has no strided memory",
    ),
    "input in another rank's part": (BASE[:4], BASE[2:4], ValueError, r"segment 0: the input overlaps the output"),
    "input half in its own part": (BASE[:4], BASE[1:3], ValueError, r"segment 0: the input overlaps the output"),
    "outputs overlap": (
        [BASE[:4], BASE[3:7]],
        [zeros(2), zeros(2)],
        ValueError,
        r"segment 1: the output overlaps the output of segment 0",
    ),
    "same output twice": ([BASE[:4], BASE[:4]], [zeros(2), zeros(2)], ValueError, r"the output overlaps the output"),
    "input in another output": (
        [zeros(4), BASE[:4]],
        [BASE[3:5], zeros(2)],
        ValueError,
        r"segment 0: the input overlaps the output of segment 1",
    ),
}

# The same for a reduce_scatter: (outputs, inputs, op, ...).
BAD_REDUCTIONS = {
    "fewer inputs": ([zeros(2), zeros(2)], [zeros(4)], "sum", ValueError, r"inputs has 1 tensors, outputs has 2"),
    "input not divisible": (
        zeros(2),
        zeros(5),
        "sum",
        ValueError,
        r"inputs\[0\] has shape \[5\], expected world \(2\) x the 2 elements of outputs\[0\]",
    ),
    "other dtype": (zeros(2), zeros(4, dtype=BF16), "sum", TypeError, r"inputs\[0\] is bfloat16, expected float32"),
    "average of integers": (
        zeros(2, dtype=torch.int64),
        zeros(4, dtype=torch.int64),
        "avg",
        ValueError,
        r"op 'avg' of int64 is not supported: of integers only 'sum' is",
    ),
    "unknown dtype": (zeros(2, dtype=torch.bool), zeros(4, dtype=torch.bool), "sum", TypeError, r"unsupported dtype"),
    "unsupported op": (zeros(2), zeros(4), "max", ValueError, r"op 'max' is not supported: 'sum', 'avg' and PreM"),
    "a bare factor": (zeros(2), zeros(4), 0.5, TypeError, r"op is 0.5, expected 'sum', 'avg' or a PreMulSum"),
    "gaps in the output": (zeros(4)[::2], zeros(4), "sum", ValueError, r"outputs\[0\] is not contiguous"),
    "output in another rank's part": (
        BASE[2:4],
        BASE[:4],
        "sum",
        ValueError,
        r"segment 0: the input overlaps the output",
    ),
    "output half in its own part": (
        BASE[1:3],
        BASE[:4],
        "sum",
        ValueError,
        r"segment 0: the input overlaps the output",
    ),
    "outputs overlap": (
        [BASE[:2], BASE[1:3]],
        [zeros(4), zeros(4)],
        "sum",
        ValueError,
        r"the output overlaps the output",
    ),
}


def rejects_gather(comm: Communicator, outputs, inputs, error, message) -> None:
    if comm.rank == 0:
        for call in (all_gather, AllGatherRequest):
            with pytest.raises(error, match=message):
                call(outputs, inputs, comm)
    check_usable(comm)


def rejects_reduction(comm: Communicator, outputs, inputs, op, error, message) -> None:
    if comm.rank == 0:
        for call in (reduce_scatter, ReduceScatterRequest):
            with pytest.raises(error, match=message):
                call(outputs, inputs, comm, op=op)
    check_usable(comm)


@pytest.mark.parametrize("case", BAD_GATHERS)
def test_all_gather_rejects(case):
    run_local(2, rejects_gather, *BAD_GATHERS[case])


@pytest.mark.parametrize("case", BAD_REDUCTIONS)
def test_reduce_scatter_rejects(case):
    run_local(2, rejects_reduction, *BAD_REDUCTIONS[case])


def test_pre_mul_sum_takes_a_finite_number():
    assert PreMulSum(2) == PreMulSum(2.0) != PreMulSum(0.5)
    with Communicator() as comm:
        out = zeros(3)
        reduce_scatter(out, torch.full((3,), 3.0), comm, op=PreMulSum(np.float32(0.5))).wait()
        assert out.tolist() == [1.5] * 3
    for factor in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"the factor of PreMulSum is {factor}"):
            PreMulSum(factor)
    for wrong in ("2", None, torch.tensor(2.0)):
        with pytest.raises(TypeError, match="the factor of PreMulSum is .*, expected a number"):
            PreMulSum(wrong)  # type: ignore[arg-type]


class CalledNccl(Communicator):
    """Says that it is of the backend nccl and of six ranks; there is one, of the backend local."""

    backend = property(lambda self: "nccl")  # type: ignore[assignment]
    size = 6  # type: ignore[assignment]


@pytest.fixture
def called_nccl(monkeypatch):
    monkeypatch.setattr(collectives, "_has_warned", False)
    with CalledNccl() as comm:
        yield comm


REDUCTIONS = {
    "call": reduce_scatter,
    "request": lambda outs, ins, comm, op="sum": ReduceScatterRequest(outs, ins, comm, op=op).start(),
}


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_averages_of_16_bits_on_nccl_are_warned_of_once(called_nccl, kind, recwarn):
    half, whole = zeros(3, dtype=BF16), zeros(3)
    call = REDUCTIONS[kind]
    call(whole, whole.clone(), called_nccl, op="avg")
    call(half, half.clone(), called_nccl)
    call(half, half.clone(), called_nccl, op=PreMulSum(0.5))
    CalledNccl.size = 8
    call(half, half.clone(), called_nccl, op="avg")
    CalledNccl.size = 6
    assert not recwarn
    with pytest.warns(UserWarning, match=r"op='avg' of torch.bfloat16 on 6 ranks: .* 1/6 .* up to 0.2 %") as caught:
        call([whole, half], [whole.clone(), half.clone()], called_nccl, op="avg")
    assert caught[0].filename == __file__ and len(caught) == 1
    call(half, half.clone(), called_nccl, op="avg")
    assert not recwarn


def test_a_warning_that_is_an_error_enqueues_nothing(called_nccl):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="op='avg'"):
                reduce_scatter(zeros(3, dtype=BF16), zeros(3, dtype=BF16), called_nccl, op="avg")
    assert all_gather(zeros(1), zeros(1), called_nccl).seq == 1


def test_inputs_may_overlap_each_other():
    with Communicator() as comm:
        shared = torch.arange(6.0)
        outputs = [zeros(4), zeros(4)]
        all_gather(outputs, [shared[:4], shared[2:]], comm).wait()
        assert [out.tolist() for out in outputs] == [[0, 1, 2, 3], [2, 3, 4, 5]]


def test_rejected_outputs_are_not_touched():
    with Communicator() as comm:
        good, bad = torch.full((2,), 7.0), zeros(3)
        with pytest.raises(ValueError, match=r"outputs\[1\]"):
            all_gather([good, bad], [zeros(2), zeros(2)], comm)
        assert good.tolist() == [7, 7] and good._version == 0


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


def test_closed():
    comm = Communicator(name="over")
    handle = all_gather(out := zeros(2), torch.ones(2), comm)
    comm.close()
    assert handle.query() and out.tolist() == [1, 1]
    for call in (lambda: all_gather(out, out, comm), lambda: comm.post(b""), comm.collect):
        with pytest.raises(
            ClosedError, match=r"^\[bucketwheel rank 0/1 comm 'over' seq 1\] the communicator is closed"
        ):
            call()
    comm.abort("too late")
    comm.close()


def test_the_pool_outlives_the_communicator():
    comm = Communicator()
    lease = comm.pool.acquire("kept", 64)
    values = lease.tensor(F32, (16,)).fill_(3)
    comm.close()
    del comm
    assert values.sum() == 48
    lease.release()


WITHOUT_NVCC = """
import os, sys, threading
from unittest import mock
from bucketwheel import Communicator, errors
from bucketwheel.comm import communicator
from bucketwheel.native import cache, modules, toolchain

modules.native()
which = toolchain.shutil.which
what_is_there = lambda: [
    sorted(threading.enumerate(), key=id), len(os.listdir("/proc/self/task")), os.listdir("/proc/self/fd"),
    sorted(cache.cache_dir().iterdir()), list(communicator._open_communicators),
]
before = what_is_there()
makings = [
    lambda: Communicator(device="cuda", backend="nccl"),
    lambda: Communicator(device="cuda"),
    lambda: Communicator.pair(),
]
with mock.patch.object(toolchain.shutil, "which", lambda name: None if name.endswith("nvcc") else which(name)):
    for make in makings:
        try:
            make()
        except errors.BuildError as error:
            print(error, end="\\n---")
            error.__traceback__ = None
assert what_is_there() == before, (what_is_there(), before)
with Communicator(backend="shm") as comm:
    assert comm.exchange(b"fine") == [b"fine"]
"""


def test_a_communicator_on_cuda_without_nvcc():
    """Whatever was compiled before: the CUDA module is known by its compiler."""
    hidden = ("NVCC", "CUDA_HOME", "BW_NATIVE_DIR", "BW_JIT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NVCC], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    messages = done.stdout.split("---")[:-1]
    assert len(messages) == 3
    for message in messages:
        assert "CUDA module: nvcc is missing" in message
        for remedy in ("CUDA_HOME=", "NVCC=", "BW_NATIVE_DIR=", "BW_AOT=cuda", "on the CPU"):
            assert remedy in message


def test_ctrl_c_at_the_end_of_the_process_leaves_no_communicator_open(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Open:
        def __init__(self, name: str, ends: list[type[BaseException]]) -> None:
            self.name, self.ends = name, ends

        def close(self, timeout: float) -> None:
            calls.append((self.name, timeout == 0.0))
            if self.ends:
                raise self.ends.pop()

    monkeypatch.setattr(
        comm_module, "_open_communicators", {2: Open("second", []), 1: Open("first", [KeyboardInterrupt])}
    )
    monkeypatch.setattr(comm_module, "core", SimpleNamespace(stop_freeing=lambda: calls.append("stop_freeing")))
    with pytest.raises(KeyboardInterrupt):
        comm_module._close_all()
    assert calls == [("first", False), ("first", True), ("second", True), "stop_freeing"]
