"""Sums of squares: their exact order, their error, and that streaming them changes nothing."""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest
import torch

from bucketwheel.kernels import ops
from bucketwheel.native import core
from tests.support.reference import fma64, fold, sum_squares, sum_squares_in_order

CHUNK = 32768  # kNormChunkNumel
SIZES = [0, 1, 7, 127, 128, 129, 1023, 1024, 1025, 5000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4097]
pytestmark = pytest.mark.usefixtures("restore_threads")


def values(numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 6, (numel,), generator=generator)


@pytest.mark.parametrize("numel", SIZES)
def test_the_order_is_the_one_written_down(numel: int) -> None:
    x = values(numel)
    assert core.sumsq([x]) == [(sum_squares_in_order(x.numpy()), False)]
    for y in (x.bfloat16(), (x / 100).half(), x.double() + 1e-9):
        assert core.sumsq([y]) == [(sum_squares_in_order(y.double().numpy()), False)]


@pytest.mark.parametrize("chunks", [63, 64, 65, 129, 200])
def test_chunks_are_added_by_groups_of_64(chunks: int) -> None:
    """One element in each chunk: the sum of a chunk is its square."""
    each = values(chunks, chunks)
    x = torch.zeros(chunks * CHUNK)
    x[::CHUNK] = each
    squares = [value * value for value in each.double().tolist()]
    assert core.sumsq([x]) == [(fold(squares), False)]
    assert core.fold(squares) == fold(squares)
    singles = [each[i : i + 1] for i in range(chunks)]
    assert ops.l2_norm(singles).item() == math.sqrt(fold(squares))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_company_and_alignment_do_not_change_a_bit(threads: int) -> None:
    tensors = [values(n, seed) for seed, n in enumerate([*SIZES, 7 * CHUNK + 5])]
    expected = [core.sumsq([x])[0] for x in tensors]
    assert core.sumsq([]) == []
    core.use_torch_threads(threads)
    try:
        assert core.sumsq(tensors) == expected
        room = torch.empty(8 * CHUNK)
        for offset in (1, 2, 3, 7):
            shifted = [room[offset : offset + x.numel()].copy_(x) for x in tensors[-1:]]
            assert core.sumsq(shifted) == expected[-1:]
        assert core.sumsq([x for x in tensors for _ in range(300)]) == [e for e in expected for _ in range(300)]
    finally:
        core.use_torch_threads(1)


def test_error_against_the_exact_sum() -> None:
    tensors = [values(n, 9) for n in (1000, 5 * CHUNK + 3, 17)]
    exact = [sum_squares(x) for x in tensors]
    chunks = 8
    for (got, _), want in zip(core.sumsq(tensors), exact, strict=True):
        assert abs(got - want) <= 4e-16 * math.sqrt(chunks) * 40 * want
    assert math.isclose(ops.l2_norm(tensors).item(), math.sqrt(math.fsum(exact)), rel_tol=4e-15)
    per = ops.l2_norm(tensors, per_tensor=True)
    assert per.shape == (3,)
    assert per.dtype == torch.float64
    for got, want in zip(per.tolist(), exact, strict=True):
        assert math.isclose(got, math.sqrt(want), rel_tol=4e-15)


def test_the_root_is_rounded_once() -> None:
    """torch's own root of float64 is not, on the CPU: it is off by the last bit in one case of a hundred."""
    tensors = [values(40, seed) for seed in range(400)]
    sums = [sumsq for sumsq, _ in core.sumsq(tensors)]
    assert ops.l2_norm(tensors, per_tensor=True).tolist() == [math.sqrt(x) for x in sums]
    assert [ops.l2_norm([x]).item() for x in tensors] == [math.sqrt(x) for x in sums]


def test_a_norm_is_where_its_tensors_are() -> None:
    with torch.device("meta"):  # the default of what is made here
        for result in ops.l2_norm([torch.ones(3, device="cpu")], return_nonfinite=True):
            assert result.device.type == "cpu"
        assert ops.l2_norm([torch.ones(3, device="cpu")], per_tensor=True).tolist() == [math.sqrt(3)]


def test_no_overflow_and_no_underflow_of_finite_elements() -> None:
    big = torch.full((100_000,), 1e30)
    largest = torch.full((10,), torch.finfo(torch.float32).max)
    least = torch.full((10,), 1e-45)
    norms, bad = ops.l2_norm([big, largest, least], per_tensor=True, return_nonfinite=True)
    assert not bad.any()
    assert math.isclose(norms[0].item(), float(big[0]) * math.sqrt(100_000), rel_tol=1e-14)
    assert math.isclose(norms[1].item(), float(largest[0]) * math.sqrt(10), rel_tol=1e-14)
    assert math.isclose(norms[2].item(), float(least[0].double()) * math.sqrt(10), rel_tol=1e-14)
    assert torch.set_flush_denormal(True)
    try:
        flushed = ops.l2_norm([least])
    finally:
        torch.set_flush_denormal(False)
    assert flushed == norms[2]


def test_float64_squares_are_rounded_and_may_overflow() -> None:
    differ = 0
    for seed in range(40):
        x = torch.zeros(CHUNK, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        x[:2048:1024] = torch.rand(2, generator=generator, dtype=torch.float64) + 1  # in one lane
        fused = np.zeros(1)
        for value in x[:2048:1024].numpy():
            fused = fma64(value, value, fused)
        expected = sum_squares_in_order(x.numpy())
        assert core.sumsq([x]) == [(expected, False)]
        differ += fused[0] != expected
    assert differ > 5  # an fma, which keeps what the square's rounding cuts off, would show
    huge = torch.tensor([1e200], dtype=torch.float64)
    norm, bad = ops.l2_norm([huge], return_nonfinite=True)
    assert torch.isposinf(norm)
    assert bad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_anywhere_is_seen(value: float, dtype: torch.dtype) -> None:
    numel = 2 * CHUNK + 100
    x = torch.ones(numel, dtype=dtype)
    for place in (0, 1, 1023, 1024, CHUNK - 1, CHUNK, numel - 1):
        x[place] = value
        norms, bad = ops.l2_norm([torch.ones(5), x, torch.ones(0)], per_tensor=True, return_nonfinite=True)
        assert bad.tolist() == [False, True, False]
        assert [bit for _, bit in core.sumsq([torch.ones(5), x, torch.ones(0)])] == [False, True, False]
        assert torch.isnan(norms[1]) if math.isnan(value) else torch.isposinf(norms[1])
        norm, any_bad = ops.l2_norm([torch.ones(5), x], return_nonfinite=True)
        assert any_bad.item() is True
        assert any_bad.shape == norm.shape == ()
        x[place] = 1.0
    assert not ops.l2_norm([x], return_nonfinite=True)[1]


def test_empty_lists_and_layouts() -> None:
    assert ops.l2_norm([]).item() == 0.0
    assert ops.l2_norm([], per_tensor=True).shape == (0,)
    x = torch.randn(4, 6, 2, 2)
    assert ops.l2_norm([x.to(memory_format=torch.channels_last)]).item() == pytest.approx(
        x.double().norm().item(), rel=1e-14
    )
    with pytest.raises(ValueError, match=r"tensors\[1\] has gaps or overlaps itself: shape \[3\], strides \[2\]"):
        ops.l2_norm([x, torch.ones(6)[::2]])
    with pytest.raises(ValueError, match=r"tensors\[0\] has gaps"):
        ops.l2_norm([torch.ones(1).expand(3)])
    with pytest.raises(TypeError, match=r"tensors\[1\] is int64, expected float32, bfloat16, float16 or float64"):
        ops.l2_norm([x, x.long()])
    with pytest.raises(TypeError, match=r"tensors\[0\]: expected a torch.Tensor, got int"):
        ops.l2_norm([3])


def cut(numel: int, block: int) -> list[tuple[int, int]]:
    return [(begin, min(block, numel - begin)) for begin in range(0, numel, block)]


@pytest.mark.parametrize("block", [4096, 40960, 10**6])
@pytest.mark.parametrize("numel", [3 * CHUNK + 5000, 2**18 + 5000])  # the second is large enough to go past the cache
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_shard_filled_by_blocks_has_the_sums_of_its_segments(dtype: torch.dtype, numel: int, block: int) -> None:
    """float64 is added in float64, the others in float32. It is rounded once a pass; squares are of what was stored."""
    # Segments at any offset: one inside a block, one over many, one empty, gaps before, between and after.
    segments = [(3, 50), (50, 50), (51, 51 + CHUNK), (CHUNK + 2000, CHUNK + 2001), (CHUNK + 2001, numel - 77)]
    like = torch.float64 if dtype == torch.float64 else torch.float32
    first = values(numel, 1).to(like) * (1 + 2.0**-40 if dtype == torch.float64 else 1)
    second = values(numel, 2).to(like)
    shard = torch.full((numel,), 1e9, dtype=dtype)
    accumulator = core.ShardAccumulator(shard, segments)

    def fill(source: torch.Tensor, *, add: bool) -> None:
        accumulator.start(add)
        for begin, n in cut(numel, block):
            accumulator.consume(begin, source[begin : begin + n])

    for add, source, expected in (
        (False, first, first.to(dtype)),
        (True, second, (first.to(dtype) + second).to(dtype)),
    ):
        fill(source, add=add)
        assert torch.equal(shard, expected)
        assert accumulator.results() == core.sumsq([expected[a:b] for a, b in segments])
    accumulator.start(False)  # overwrites again, and forgets the sums
    assert accumulator.results() == [(0.0, False)] * len(segments)
    first[60] = float("nan")
    first[0] = float("inf")  # padding: stored, not summed
    fill(first, add=False)
    assert [bad for _, bad in accumulator.results()] == [False, False, True, False, False]
    assert torch.isposinf(shard[0])


def test_a_shard_refuses_bad_segments_and_blocks_out_of_order() -> None:
    shard = torch.zeros(100)
    for segments in ([(-1, 5)], [(5, 4)], [(0, 101)], [(0, 10), (9, 20)], [(20, 30), (0, 10)]):
        with pytest.raises(ValueError, match="segment"):
            core.ShardAccumulator(shard, segments)
    with pytest.raises(TypeError, match="a gradient shard of float16: float32, bfloat16 and float64"):
        core.ShardAccumulator(shard.half(), [])
    accumulator = core.ShardAccumulator(shard, [(0, 100)])
    accumulator.start(False)
    accumulator.consume(0, torch.ones(40))
    for begin, numel in ((0, 10), (41, 10), (40, 61)):
        with pytest.raises(ValueError, match=f"block of {numel} at {begin}, expected at 40 in a shard of 100"):
            accumulator.consume(begin, torch.ones(numel))
    accumulator.consume(40, torch.ones(60))
    assert accumulator.results() == [(100.0, False)]


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    """A sparse mapping: only the pages that are written exist, the rest reads as zero."""
    numel = 2**31 + 3 * CHUNK + 11
    try:
        memory = mmap.mmap(
            -1, numel * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        )
    except OSError as error:
        pytest.skip(f"cannot map {numel * 4} bytes: {error}")
    x = torch.from_numpy(np.frombuffer(memory, dtype=np.float32))
    places = {0: 1.0, 2**31 - 1: 2.0, 2**31: 4.0, 2**31 + CHUNK: 8.0, numel - 1: 16.0}
    for place, value in places.items():
        x[place] = value
    assert core.sumsq([x]) == [(1.0 + 4.0 + 16.0 + 64.0 + 256.0, False)]
    assert core.sumsq([x[1:], x[2**31 + 1 :]]) == [(4.0 + 16.0 + 64.0 + 256.0, False), (64.0 + 256.0, False)]
