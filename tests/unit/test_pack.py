"""Copies and casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from bucketwheel.native import core
from tests.support.reference import bits, from_bf16, to_bf16
from tests.support.reference_rows import to_fp16
from tests.support.simulated_cuda import Calls, Graph, posing
from tests.support.simulated_streams import checked

CHUNK = 32768


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    core.use_torch_threads(2)
    yield
    core.use_torch_threads(1)


def bf16(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def fp16(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.float16)


def copied(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    core.copy_all([out], [x])
    return out


def test_float16_rounds_to_nearest_even_and_widens_exactly() -> None:
    """Every float16, what lies next to and between any two of them, denormals, and a sample of all floats."""
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    wide = copied(fp16(every), torch.float32)
    assert torch.equal(bits(wide), bits(torch.from_numpy(every.view(np.float16).astype(np.float32))))
    exact = wide.numpy()[np.abs(wide.numpy()) < 65504]
    next_up = np.nextafter(exact.astype(np.float16), np.float16(np.inf)).astype(np.float64)
    middle = (exact.astype(np.float64) + next_up) / 2
    near = [exact, middle.astype(np.float32), np.array([65504, 65519.996, 65520, -65520], np.float32)]
    near += [np.nextafter(x, np.float32(side)) for x in near[:3] for side in (np.inf, -np.inf)]
    upper = np.arange(2**16, dtype=np.uint32) << 16
    near += [(upper | np.uint32(low)).view(np.float32) for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x8000, 0xFFFF)]
    near.append(np.random.default_rng(0).integers(0, 2**32, 2**21, dtype=np.uint32).view(np.float32))
    for x in near:
        got = copied(torch.from_numpy(x), torch.float16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(got, to_fp16(x))


def test_casts_between_16_bits_and_float64_go_through_float32() -> None:
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    assert torch.equal(
        bits(copied(bf16(every), torch.float16)), bits(copied(copied(bf16(every), torch.float32), torch.float16))
    )
    assert torch.equal(bits(copied(fp16(every), torch.bfloat16)), bits(fp16(every).float().bfloat16()))
    for x in (bf16(every), fp16(every)):
        assert torch.equal(bits(copied(x, torch.float64)), bits(x.double()))
    # Rounded twice: to 1 + 2^-8, and from there to even.
    double = torch.tensor([1.0 + 2.0**-8 + 2.0**-40, -1e300, 1e-300], dtype=torch.float64)
    assert copied(double, torch.bfloat16).tolist() == [1.0, -float("inf"), 0.0]
    assert torch.equal(copied(double, torch.float32), double.float())


def test_bfloat16_rounds_to_nearest_even_at_every_pattern() -> None:
    """All 2^16 values of the upper half, with the lower halves where rounding changes its mind."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | np.uint32(lower)).view(np.float32)
        out = copied(torch.from_numpy(x), torch.bfloat16)
        got = out.view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(got, to_bf16(x)), hex(lower)
        assert (got[np.isnan(x)] == 0x7FC0).all()
        finite = torch.isfinite(torch.from_numpy(x))
        assert torch.equal(out[finite], torch.from_numpy(x).bfloat16()[finite])
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    assert np.array_equal(copied(bf16(every), torch.float32).numpy().view(np.uint32), from_bf16(every).view(np.uint32))


SIZES = [0, 1, 7, 8, 9, CHUNK - 1, 0, CHUNK, CHUNK + 1, 5 * CHUNK + 3, 0]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
PAIRS = [(a, a) for a in DTYPES] + [(a, b) for a in FLOATS for b in FLOATS if a != b]


@pytest.mark.parametrize(("to", "source"), PAIRS, ids=lambda d: str(d)[6:])
def test_many_tensors_into_a_bucket_and_back(to: torch.dtype, source: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [(torch.randn(n) * 50).to(source) for n in SIZES]
    bucket = torch.full((sum(SIZES) + len(SIZES) + 1,), 77).to(to)
    slots, begin = [], 1  # one element between slots, which must stay
    for n in SIZES:
        slots.append(bucket[begin : begin + n])
        begin += n + 1
    core.copy_all(slots, [t.reshape(-1, 1) for t in tensors])
    for slot, tensor in zip(slots, tensors, strict=True):
        assert torch.equal(slot, tensor.to(to))
    inside = torch.zeros(bucket.numel(), dtype=torch.bool)
    begin = 1
    for n in SIZES:
        inside[begin : begin + n] = True
        begin += n + 1
    assert (bucket[~inside] == 77).all()
    back = [torch.empty_like(t) for t in tensors]
    core.copy_all(back, slots)
    for a, b in zip(back, tensors, strict=True):
        assert torch.equal(a, b.to(to).to(source))


def test_copy_refuses_and_changes_nothing() -> None:
    ok, x = torch.zeros(4), torch.ones(4)
    for message, to, source in (
        ("item 1: cannot copy int32 to float32", [ok, torch.zeros(4)], [x, x.int()]),
        ("item 1: cannot copy float64 to int64", [ok, torch.zeros(4).long()], [x, x.double()]),
        (r"inputs\[1\]: expected a torch.Tensor, got int", [ok, ok], [x, 3]),
        (r"outputs\[1\]: expected a torch.Tensor, got NoneType", [ok, None], [x, x]),
    ):
        with pytest.raises(TypeError, match=message):
            core.copy_all(to, source)
        assert torch.equal(ok, torch.zeros(4))
    with pytest.raises(TypeError, match="item 1: cannot add int32 to int32"):
        core.copy_all([ok, ok.int()], [x, x.int()], [False, True])
    assert torch.equal(ok, torch.zeros(4))
    core.copy_all([], [])


def test_copies_past_the_cache_are_whole_and_no_longer() -> None:
    """Both ends in the middle of cache lines, source and target in different places of a line, and a last chunk (of 32768
    elements) that ends before the first line begins in it."""
    source = torch.randint(0, 256, (2**20 + 201,), dtype=torch.uint8)
    for begin, numel in ((0, 2**20), (1, 2**20), (63, 2**20 + 136), (64, 2**20 + 65), (20, 2**20 + 3)):
        for further in (0, 1):
            target, expected = torch.zeros_like(source), torch.zeros_like(source)
            read = source[begin + further : begin + further + numel]
            core.copy_all([target[begin : begin + numel]], [read])
            expected[begin : begin + numel] = read
            assert torch.equal(target, expected), (begin, numel, further)


# ---- copies, casts, additions and zeros, on the CPU and on the simulated CUDA device

MAX_ITEMS = 100  # CopyLaunch::kMaxItems
PLACES = {"cpu": nullcontext, "simulated cuda": posing}


def some(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits in the first half; numbers near each other, so that sums round, in the other one."""
    random = torch.Generator().manual_seed(seed)
    if dtype not in FLOATS:
        return torch.randint(-100, 100, (numel,), generator=random).to(dtype)
    any_bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=random).to(torch.uint8).view(dtype)
    return torch.cat([any_bits[: numel // 2], torch.randn(numel - numel // 2, generator=random).to(dtype)])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("source", FLOATS, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("to", FLOATS, ids=lambda d: str(d)[6:])
def test_sums_have_the_bits_of_torchs_add(to: torch.dtype, source: torch.dtype, place: str) -> None:
    start = [some(n, to, n) for n in SIZES]
    inputs = [some(n, source, n + 1) for n in SIZES]
    got = [x.clone() for x in start]
    with PLACES[place]():
        core.copy_all(got, inputs, [True] * len(SIZES))
    for a, before, x in zip(got, start, inputs, strict=True):
        assert torch.equal(bits(a), bits(before.add_(x)))


class Mixed:
    """Items of all kinds in turn, in slots of one buffer whose other bytes stay, between elements of any alignment."""

    def __init__(self, count: int) -> None:
        kinds = [
            (torch.float32, torch.float32, "copy"),
            (torch.bfloat16, torch.float32, "copy"),
            (torch.bfloat16, torch.bfloat16, "add"),
            (torch.float32, torch.float16, "add"),
            (torch.int64, None, "zeros"),
            (torch.bfloat16, None, "zeros"),
            (torch.uint8, torch.uint8, "copy"),
            (torch.float64, None, "nothing"),
        ]
        self.buffer = torch.randint(0, 256, (count * 4096,), dtype=torch.uint8)
        self.expected = self.buffer.clone()
        self.outputs: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor | None] = []
        self.adds: list[bool] = []
        for i in range(count):
            to, source, kind = kinds[i % len(kinds)]
            begin, numel = 4096 * i + i % 3 * to.itemsize + 8, (i * 37) % 400
            end = begin + numel * to.itemsize
            x = None if source is None else some(numel + i % 5, source, i)[i % 5 :]
            slot = self.expected[begin:end].view(to)
            if x is not None and kind == "add":
                slot[:] = self.buffer[begin:end].view(to)[:] = some(numel, to, i + 1)
                slot.add_(x)
            elif kind != "nothing":
                slot.copy_(torch.zeros(()) if x is None else x)
            self.outputs.append(self.buffer[begin:end].view(to))
            self.inputs.append(x)
            self.adds.append(kind in ("add", "nothing"))

    def run(self) -> None:
        core.copy_all(self.outputs, self.inputs, self.adds)

    def expect_done(self) -> None:
        same = self.buffer == self.expected
        for i, out in enumerate(self.outputs):  # NaNs are one
            begin = out.data_ptr() - self.buffer.data_ptr()
            end = begin + out.numel() * out.element_size()
            if out.is_floating_point():
                assert torch.equal(bits(out), bits(self.expected[begin:end].view(out.dtype))), i
                same[begin:end] = True
        assert same.all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", [8, MAX_ITEMS, MAX_ITEMS + 1, 3 * MAX_ITEMS])
def test_one_call_copies_casts_adds_and_zeroes(count: int, place: str) -> None:
    items = Mixed(count)
    with PLACES[place]():
        items.run()
    items.expect_done()


def test_a_call_is_launches_alone_and_in_no_order_with_other_streams() -> None:
    with posing():
        streams = [core.Stream(name, 0) for name in "ab"]
        for count, launches in ((MAX_ITEMS, 1), (MAX_ITEMS + 1, 2)):
            all_items = [Mixed(count) for _ in streams for _ in range(2)]
            calls = Calls()
            for items, stream in zip(all_items, streams * 2, strict=True):
                core.set_posed_stream(stream.cuda_stream)
                items.run()
            core.set_posed_stream(0)
            made = calls.since()
            del made["get_device"]  # which reads a variable of the thread
            assert made == {"launch_copy": launches * len(all_items)}
            for stream in streams:
                stream.synchronize()
            for items in all_items:
                items.expect_done()


@pytest.mark.parametrize("count", [8, MAX_ITEMS + 1])
def test_a_captured_call_keeps_its_items(count: int) -> None:
    items, others = Mixed(count), Mixed(count)
    before = items.buffer.clone()
    with posing() as library:
        with Graph(library) as graph:
            items.run()
        assert torch.equal(items.buffer, before)
        others.run()
        for _ in range(2):
            items.buffer.copy_(before)
            graph.replay()
            items.expect_done()
    others.expect_done()


@pytest.mark.parametrize("kind", ["copy", "add", "zeros"])
@pytest.mark.parametrize("reads", [True, False])
def test_the_check_of_streams_knows_what_a_launch_touches(kind: str, reads: bool) -> None:
    x, y, z = torch.ones(5), torch.zeros(5), torch.zeros(5)
    with posing(), checked(1) as races:
        a, b = core.Stream("a", 0), core.Stream("b", 0)
        core.set_posed_stream(a.cuda_stream)
        core.copy_all([y], [None if kind == "zeros" else x], [kind == "add"])
        core.set_posed_stream(b.cuda_stream)
        core.copy_all([z], [y]) if reads else core.copy_all([x], [z])
        core.set_posed_stream(0)
        a.synchronize()
        b.synchronize()
    assert len(races) == (reads or kind != "zeros"), races
