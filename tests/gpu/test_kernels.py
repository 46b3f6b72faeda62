"""CUDA kernels and CPU kernels give the same bits: the whole dtype matrix, every size and alignment, long lists, huge tensors."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels import ops
from bucketwheel.native import core
from bucketwheel.testing import run_threads
from tests.gpu.device import DEVICE
from tests.support.adam_cases import KINDS, assert_same, ids, make, run_op, run_table
from tests.support.counted_cuda import cuda_calls
from tests.support.reference import Adam, bits
from tests.support.reference_rows import Rounding, Row

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
NORM_CHUNK = 32768
SIZES = [0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 257, 1025, 8191, 8192, 8193]
SMALL_SIZES = [0, 1, 7, 8, 9, 300]

pytestmark = pytest.mark.filterwarnings("ignore:bfloat16 exp_avg_sq")


def sizes() -> list[int]:
    return SMALL_SIZES if DEVICE.is_simulated else SIZES


def moved(tensor: Tensor, offset: int) -> Tensor:
    """A copy on the device that begins ``offset`` elements into its memory."""
    memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=DEVICE.tensors)
    view = memory[offset:]
    view.copy_(tensor)
    return view


def on_device(row: Row, offset: int = 0) -> Row:
    """``offset``: of every tensor (then the kernel peels a head); -1: another one of each (then it goes one by one)."""
    places = range(7) if offset < 0 else [offset] * 7
    return Row(*(None if x is None else moved(x, place) for x, place in zip(row.tensors(), places, strict=True)))


def on_cpu(row: Row) -> Row:
    return Row(*(None if x is None else DEVICE.get(x) for x in row.tensors()))


def digest(tensors: Sequence[Tensor | None]) -> int:
    """A hash of the bits of tensors of any device."""
    value = 0
    for tensor in tensors:
        if tensor is not None:
            raw = DEVICE.get(tensor) if tensor.dtype == torch.int16 else bits(DEVICE.get(tensor))
            value = zlib.crc32(raw.numpy().tobytes(), value)
    return value


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_adam_has_the_bits_of_the_cpu_in_every_configuration(kind: tuple[Any, ...]) -> None:
    """p x weight x g x state x amsgrad x decoupled x maximize x rounding, two steps each."""
    places = [0, 1, 3, -1]
    made = {amsgrad: [make(kind, n, amsgrad, seed=i) for i, n in enumerate(sizes())] for amsgrad in (False, True)}
    flags = [*itertools.product((False, True), repeat=4)][:: DEVICE.size(1, 3)]  # a third has each flag both ways
    for amsgrad, decoupled, maximize, stochastic in flags:
        rows = [row.clone() for row in made[amsgrad]]
        theirs = [on_device(row, places[i % len(places)]) for i, row in enumerate(rows)]
        before = digest(rows[-1].tensors())
        for step in (2, 3):
            args = Adam(
                step=step,
                lr=1e-2,
                weight_decay=0.1,
                grad_scale=0.37,
                beta2=0.99,
                decoupled=decoupled,
                maximize=maximize,
            )
            resync = amsgrad != maximize  # p beside a master was written to
            rounding = Rounding(stochastic, seed=2**40 + 5, param=7, resync=resync)
            run_op(theirs, args, rounding)
            with DEVICE.cpu():
                run_op(rows, args, rounding)
        assert digest(rows[-1].tensors()) != before
        for ours, other in zip(rows, theirs, strict=True):
            what = (amsgrad, decoupled, maximize, stochastic, ours.p.numel())
            assert_same(on_cpu(other), ours, what)


@pytest.mark.parametrize("kind", [KINDS[0], ("master", BF16, BF16, F32), ("remainder", BF16, BF16, BF16)], ids=ids)
def test_large_tensors(kind: tuple[Any, ...]) -> None:
    """More chunks than the grid has blocks."""
    for offset, copies in ((0, DEVICE.size(20, 2)), (5, 1)):
        part = make(kind, DEVICE.size(1_000_003, 20_001), amsgrad=False)
        row = Row(*(None if x is None else x.repeat(copies) for x in part.tensors()))
        theirs = on_device(row, offset)
        args = Adam(step=5, lr=1e-2, weight_decay=0.1)
        run_op([theirs], args)
        with DEVICE.cpu():
            run_op([row], args)
        assert digest(theirs.tensors()) == digest(row.tensors())


@pytest.mark.parametrize(("count", "numel"), [(3_000, 1_000), (10_000, 64)])
def test_many_tensors(count: int, numel: int) -> None:
    """In one call, with a step count of their own each."""
    count = DEVICE.size(count, count // 30)
    kind = ("master", BF16, BF16, F32)
    whole = make(kind, count * numel, amsgrad=False)
    theirs = on_device(whole)
    steps = [1 + i % 5 for i in range(count)]

    def step(row: Row) -> None:
        parts = [row.slice(i * numel, (i + 1) * numel) for i in range(count)]
        lists = [[part.tensors()[k] for part in parts] for k in (0, 1, 2, 3, 5)]
        ops.adam_step(*lists[:4], steps, lr=1e-2, weight_decay=0.1, master_params=lists[4])

    calls = cuda_calls()["launch_adam"]
    step(theirs)
    assert cuda_calls()["launch_adam"] - calls <= 2
    with DEVICE.cpu():
        step(whole)
    assert_same(on_cpu(theirs), whole)


# ---- norms, copies, sums over ranks


def wide(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = 8 * torch.rand(numel, generator=generator) - 4
    return (torch.randn(numel, generator=generator) * 10**exponent).to(dtype)


def norm_tensors(dtype: torch.dtype) -> list[Tensor]:
    edges = [NORM_CHUNK - 1, NORM_CHUNK, NORM_CHUNK + 1, *([] if DEVICE.is_simulated else [64 * NORM_CHUNK + 77])]
    return [wide(numel, dtype, seed) for seed, numel in enumerate([*sizes(), *edges])]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_norms_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    tensors = norm_tensors(dtype)
    theirs = [moved(tensor, i % 9) for i, tensor in enumerate(tensors)]
    for per_tensor in (False, True):
        got = ops.l2_norm(theirs, per_tensor=per_tensor)
        with DEVICE.cpu():
            expected = ops.l2_norm(tensors, per_tensor=per_tensor)
        assert got.device.type == DEVICE.tensors.type
        assert torch.equal(DEVICE.get(got), expected)
    exact = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()
    torch.testing.assert_close(DEVICE.get(ops.l2_norm(theirs)), exact, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_norms_show_what_is_not_finite(dtype: torch.dtype, value: float) -> None:
    tensors = [moved(wide(numel, dtype, numel), 0) for numel in (100, 40_001, 100)]
    for place in (0, 1023, NORM_CHUNK, 40_000):
        spoiled = [tensors[0], tensors[1].clone(), tensors[2]]
        spoiled[1][place] = value
        norms, bad = ops.l2_norm(spoiled, per_tensor=True, return_nonfinite=True)
        assert DEVICE.get(bad).tolist() == [False, True, False]
        assert math.isnan(norms[1]) if math.isnan(value) else float(norms[1]) == math.inf
        assert DEVICE.get(ops.l2_norm(spoiled, return_nonfinite=True)[1])


@pytest.mark.parametrize("to", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_copies_have_the_bits_of_the_cpu(dtype: torch.dtype, to: torch.dtype) -> None:
    inputs = [wide(numel, dtype, numel) for numel in [*sizes(), DEVICE.size(3_000_001, 20_001)]]
    for offset in (0, 1, 3):
        got = [moved(torch.full((x.numel(),), math.nan, dtype=to), offset) for x in inputs]
        core.copy_all(got, [moved(x, 2 * offset % 5) for x in inputs])
        expected = [torch.empty(x.numel(), dtype=to) for x in inputs]
        with DEVICE.cpu():
            core.copy_all(expected, inputs)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(bits(DEVICE.get(a)), bits(b)), (offset, b.numel())


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sums_over_ranks_have_the_bits_of_the_cpu(world: int, dtype: torch.dtype, op: str) -> None:
    def reduced(device: str | None) -> list[list[Tensor]]:
        places = LocalWorld(world)

        def body(rank: int, _: int) -> list[Tensor]:
            with Communicator(places.rank(rank), timeout_s=20, device=device) as comm:
                inputs = [wide(numel * world, dtype, 100 * rank + numel) for numel in sizes()]
                if device is not None:
                    inputs = [moved(x, i % 9) for i, x in enumerate(inputs)]
                outputs = [torch.full((n,), math.nan, dtype=dtype, device=inputs[0].device) for n in sizes()]
                bw.reduce_scatter(outputs, inputs, comm, op=op).wait()
                return [x.cpu() for x in outputs]

        return run_threads(body, world)

    with DEVICE.cpu():
        expected = reduced(None)
    got = reduced("cuda")
    for a, b in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
        assert torch.equal(bits(a), bits(b))


# ---- beyond 2^31 elements: N10 of the optimizer's test rows

HUGE = 2**31 + 1000


def test_a_norm_of_more_than_2_to_the_31_elements() -> None:
    DEVICE.need_gpu("memory")
    huge = torch.empty(HUGE, dtype=BF16, device=DEVICE.tensors).normal_()
    assert torch.equal(DEVICE.get(ops.l2_norm([huge])), ops.l2_norm([DEVICE.get(huge)]))
    huge[-1] = math.nan
    assert math.isnan(ops.l2_norm([huge]))


def test_adam_on_more_than_2_to_the_31_elements() -> None:
    """Compared at both ends, around 2^31 and at random places with the CPU's bits for those places of the parameter."""
    DEVICE.need_gpu("memory")
    generator = torch.Generator(device=DEVICE.tensors).manual_seed(1)
    new = lambda: torch.empty(HUGE, dtype=BF16, device=DEVICE.tensors).normal_(generator=generator)  # noqa: E731
    whole = Row(new(), new(), new(), new().abs_())
    around = [0, 2**31 - 2048, HUGE - 4096, *torch.randint(0, HUGE - 4096, (29,)).tolist()]
    parts = [on_cpu(whole.slice(begin, begin + 4096)) for begin in around]
    args, rounding = Adam(step=3, lr=1e-2, weight_decay=0.1), Rounding(seed=5, param=0)
    run_op([whole], args, rounding)
    run_table([(part, 0, begin) for part, begin in zip(parts, around, strict=True)], args, rounding)
    for part, begin in zip(parts, around, strict=True):
        assert_same(on_cpu(whole.slice(begin, begin + 4096)), part, begin)
