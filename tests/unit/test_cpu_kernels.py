"""Every instruction set computes the same bits, in processes of their own: the choice is made once per process."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

ISAS = ["plain", "avx2", "avx512"]


def expect_large_copies(generator: torch.Generator) -> None:
    """Of sizes that go past the cache: both ends in the middle of lines, source and target in different places of a
    line, and a last chunk (of 32768 elements) that ends before the first line begins in it. Compares the bytes."""
    from bucketwheel.native import core

    source = torch.randint(0, 256, (2**20 + 201,), dtype=torch.uint8, generator=generator)
    for begin, numel in ((0, 2**20), (1, 2**20), (63, 2**20 + 136), (64, 2**20 + 65), (20, 2**20 + 3)):
        for further in (0, 1):
            target, expected = torch.zeros_like(source), torch.zeros_like(source)
            read = source[begin + further : begin + further + numel]
            core.copy_all([target[begin : begin + numel]], [read])
            expected[begin : begin + numel] = read
            assert torch.equal(target, expected), (begin, numel, further)


def digests() -> dict[str, str]:
    """What the kernels of this process make of fixed inputs, by kernel. Runs in the child."""
    from bucketwheel.kernels import ops
    from bucketwheel.native import core
    from tests.support.reference import bits

    generator = torch.Generator().manual_seed(11)
    numel = 3 * 8192 + 77

    def wide() -> torch.Tensor:
        magnitude = 10.0 ** (torch.rand(numel, generator=generator) * 45 - 30)
        x = torch.randn(numel, generator=generator) * magnitude
        x[::101] = 0.0
        x[1::997] = float("nan")
        x[2::997] = float("inf")
        x[3::101] = 1e-42
        return x

    out = {"isa": core.cpu_isa()}

    def note(name: str, *tensors: torch.Tensor) -> None:
        out[name] = hashlib.sha256(b"".join(bits(x).numpy().tobytes() for x in tensors)).hexdigest()

    for p_dtype in (torch.float32, torch.bfloat16):
        for g_dtype in (torch.float32, torch.bfloat16):
            for decoupled in (True, False):
                p, g, m, v = wide(), wide().to(g_dtype), wide(), wide().abs()
                master = [wide()] if p_dtype == torch.bfloat16 else None
                p = p.to(p_dtype)
                for t in (1, 2, 3):
                    ops.adam_step(
                        [p], [g], [m], [v], t, lr=1e-2, weight_decay=0.1, grad_scale=0.3, master_params=master,
                        decoupled=decoupled,
                    )  # fmt: skip
                note(f"adam {p_dtype} {g_dtype} {decoupled}", p, m, v, *(master or []))
    note_matrix(note, wide, numel)
    finite = torch.nan_to_num(wide(), 0.0, 1.0, 1.0)
    sums = core.sumsq([finite, finite.bfloat16(), wide(), finite.half(), finite.double() * (1 + 2.0**-40)])
    out["sumsq"] = repr([(s.hex(), bad) for s, bad in sums])
    shard = torch.zeros(numel)
    accumulator = core.ShardAccumulator(shard, [(5, 20000)])
    for add in (False, True):
        accumulator.start(add)
        for begin in range(0, numel, 4096):
            accumulator.consume(begin, finite[begin : begin + 4096])
    note("shard", shard)
    out["shard sums"] = repr(accumulator.results())
    narrow, back = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel)
    core.copy_all([narrow, back], [wide(), finite.bfloat16()])
    note("casts", narrow, back)
    expect_large_copies(generator)
    half, double = torch.empty(numel, dtype=torch.float16), torch.empty(numel, dtype=torch.float64)
    core.copy_all([half, double], [wide(), finite.half()])
    note("float16 casts", half, double)
    for world in range(1, 7):
        ranks = [wide() for _ in range(world)]
        core.reduce_sum(back, ranks)
        note(f"sum of {world}", back)
        core.reduce_sum(narrow, [x.bfloat16() for x in ranks])
        core.reduce_sum(back, [x.bfloat16() for x in ranks])
        note(f"bfloat16 sum of {world}", narrow, back)
        core.reduce_sum(half, [x.half() for x in ranks])
        core.reduce_sum(double, [x.double() for x in ranks])
        note(f"float16 and float64 sum of {world}", half, double)
    return out


def note_matrix(note: Callable[..., None], wide: Callable[[], torch.Tensor], numel: int) -> None:
    """The rows that go through stages, through pairs, or are float64."""
    from bucketwheel.kernels import ops

    bf16, f64 = torch.bfloat16, torch.float64
    kinds = [
        (p, g, s) for p in (bf16, torch.float16, torch.float32) for g in (bf16, torch.float16) for s in (bf16, None)
    ]
    for p_dtype, g_dtype, s_dtype in [*kinds, (f64, f64, f64)]:
        for extra in ("none", "remainders", "max_exp_avg_sqs", "nearest"):
            if extra == "remainders" and p_dtype != bf16:
                continue
            state = s_dtype or torch.float32
            p, g, m, v = wide().to(p_dtype), wide().to(g_dtype), wide().to(state), wide().abs().to(state)
            more = {"remainders": wide().half().view(torch.int16), "max_exp_avg_sqs": wide().abs().to(state)}
            given = {extra: [more[extra]]} if extra in more else {}
            for decoupled in (True, False):
                ops.adam_step(
                    [p], [g], [m], [v], 2, lr=1e-2, weight_decay=0.1, grad_scale=0.3, decoupled=decoupled, seed=3,
                    betas=(0.9, 0.99), state_rounding="nearest" if extra == "nearest" else "stochastic",
                    param_rounding="stochastic" if extra in ("none", "remainders") else "nearest", **given,
                )  # fmt: skip
            note(f"adam {p_dtype} {g_dtype} {state} {extra}", p, m, v, *(x[0].float() for x in given.values()))


@functools.cache
def digests_of(isa: str) -> dict[str, str] | str:
    """The child's digests, or what it said when it failed."""
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "BW_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("isa", ISAS[1:])
def test_same_bits_as_the_plain_kernels(isa: str) -> None:
    plain, other = digests_of("plain"), digests_of(isa)
    if isinstance(other, str) and "this processor runs" in other:
        pytest.skip(other.strip().splitlines()[-1])
    assert isinstance(plain, dict), plain
    assert isinstance(other, dict), other
    assert (plain.pop("isa", "plain"), other.pop("isa", isa)) == ("plain", isa)
    assert len(plain) > 60
    assert other == plain


def test_an_unknown_instruction_set_is_refused() -> None:
    message = digests_of("avx1024")
    assert isinstance(message, str)
    assert "BW_CPU_ISA='avx1024': expected 'plain', 'avx2' or 'avx512'" in message


LARGE = """
import torch
from bucketwheel.kernels import ops
from bucketwheel.native import core
x = torch.ones(3_000_000)
{call}
"""


@pytest.mark.parametrize("call", ["ops.l2_norm([x])", "core.copy_all([x.bfloat16()], [x])"])
def test_an_unknown_instruction_set_is_refused_before_threads_start(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE.format(call=call)],
        env={**os.environ, "BW_CPU_ISA": "avx1024", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError: environment variable BW_CPU_ISA='avx1024': expected" in done.stderr


if __name__ == "__main__":
    json.dump(digests(), sys.stdout)
