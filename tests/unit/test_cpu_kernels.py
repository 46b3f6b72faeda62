"""Every instruction set computes the same bits, in processes of their own: the choice is made once per process."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch

ISAS = ["plain", "avx2", "avx512"]


def digests() -> dict[str, str]:
    """What the kernels of this process make of fixed inputs, by kernel. Runs in the child."""
    from reference import bits

    from bucketwheel import ops
    from bucketwheel._build import native

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

    out = {"isa": native().cpu_isa()}

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
    finite = torch.nan_to_num(wide(), 0.0, 1.0, 1.0)
    sums = native().sumsq([finite, finite.bfloat16(), wide()])
    out["sumsq"] = repr([(s.hex(), bad) for s, bad in sums])
    shard = torch.zeros(numel)
    accumulator = native().ShardAccumulator(shard, [(5, 20000)])
    for add in (False, True):
        accumulator.start(add)
        for begin in range(0, numel, 4096):
            accumulator.consume(begin, finite[begin : begin + 4096])
    note("shard", shard)
    out["shard sums"] = repr(accumulator.results())
    narrow, back = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel)
    native().copy_all([narrow, back], [wide(), finite.bfloat16()])
    note("casts", narrow, back)
    for world in range(1, 7):
        ranks = [wide() for _ in range(world)]
        native().reduce_sum(back, ranks)
        note(f"sum of {world}", back)
        native().reduce_sum(narrow, [x.bfloat16() for x in ranks])
        native().reduce_sum(back, [x.bfloat16() for x in ranks])
        note(f"bfloat16 sum of {world}", narrow, back)
    return out


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
    assert len(plain) > 20
    assert other == plain


def test_an_unknown_instruction_set_is_refused() -> None:
    message = digests_of("avx1024")
    assert isinstance(message, str)
    assert "BW_CPU_ISA='avx1024': expected 'plain', 'avx2' or 'avx512'" in message


if __name__ == "__main__":
    json.dump(digests(), sys.stdout)
