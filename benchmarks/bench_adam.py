"""The CPU Adam step and the L2 norm against torch's fused kernels and against a bare sweep over the same memory.

    python benchmarks/bench_adam.py [--quick] [--json PATH] [--threads 1,2]

adam float32: p, g, m, v float32. adam bfloat16: ours p, g bfloat16 with float32 m, v and master; torch's fused kernel knows
only all-bfloat16 (14 bytes an element instead of 28). Both sides count their step tensors up. `table` is the same step
through the prebuilt table that the optimizer keeps. Limit: an in-place sweep that reads and writes the same streams with
next to no arithmetic, on as many threads; only for working sets of at least 32 MiB, where memory is what limits.
norm: sums of squares in double against `torch._foreach_norm` and the norm of the norms.
"""

from __future__ import annotations

import ctypes
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Results, load_native, measure, parse_args

from bucketwheel import ops
from bucketwheel._build import native

SIZES = {f"{n >> 10} K": [n] for n in (4096, 16384, 65536, 262144)} | {
    f"{n >> 20} M": [n] for n in (1 << 20, 1 << 22, 1 << 24)
}
SIZES |= {"1000 x 1 K": [1024] * 1000, "300 x 16 K": [16384] * 300}
QUICK = ("4 K", "64 K", "1 M", "16 M", "1000 x 1 K")
ADAM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
LIMIT_FROM_BYTES = 32 << 20


@dataclass
class Tensors:
    """The tensors of one side: lists of p, g, m, v, masters (empty for float32) and step counts."""

    p: list[torch.Tensor]
    g: list[torch.Tensor]
    m: list[torch.Tensor]
    v: list[torch.Tensor]
    masters: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)

    @staticmethod
    def make(sizes: list[int], dtype: torch.dtype, state_dtype: torch.dtype) -> Tensors:
        generator = torch.Generator().manual_seed(1)

        def random(to: torch.dtype, scale: float) -> list[torch.Tensor]:
            return [(torch.rand(n, generator=generator) * scale - scale / 2).to(to) for n in sizes]

        out = Tensors(random(dtype, 2.0), random(dtype, 0.1), random(state_dtype, 0.1), random(state_dtype, 0.1))
        for v in out.v:
            v.square_()
        if state_dtype != dtype:
            out.masters = [p.float() for p in out.p]
        out.steps = [torch.tensor(10.0) for _ in sizes]
        return out

    @property
    def size_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for xs in (self.p, self.g, self.m, self.v, self.masters) for x in xs)


def step_ours(t: Tensors) -> None:
    ops.adam_step(t.p, t.g, t.m, t.v, t.steps, master_params=t.masters or None, **ADAM)


def step_torch(t: Tensors) -> None:
    torch._foreach_add_(t.steps, 1)
    torch._fused_adamw_(
        t.p, t.g, t.m, t.v, [], t.steps, beta1=0.9, beta2=0.999, amsgrad=False, maximize=False, **ADAM
    )  # fmt: skip


def table_step(t: Tensors) -> Callable[[], None]:
    table = native().AdamTable()
    for i, p in enumerate(t.p):
        table.add(p, t.g[i], t.m[i], t.v[i], t.masters[i] if t.masters else None, 0)
    groups = [native().AdamGroup(ADAM["lr"], 0.9, 0.999, ADAM["eps"], ADAM["weight_decay"])]
    steps = torch.full((len(t.p),), 10, dtype=torch.int64)

    def step() -> None:
        steps.add_(1)
        table.step(groups, steps)

    return step


def sweep(t: Tensors, threads: int) -> Callable[[], None]:
    """One tensor of each role, however many there are on the other sides."""
    function = load_native("adam_sweep.cpp").adam_sweep
    flat = [torch.cat(x) if x else None for x in (t.p, t.g, t.m, t.v, t.masters)]
    pointers = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in flat]
    numel = ctypes.c_int64(sum(p.numel() for p in t.p))

    def run(keep: Any = flat) -> None:
        function(*pointers, numel, ctypes.c_int(threads))

    return run


def check(sizes: list[int]) -> None:
    """Equal to torch's fused kernel in float32; bfloat16 equal to float32 but for rounding."""
    ours, theirs = (Tensors.make(sizes, torch.float32, torch.float32) for _ in range(2))
    before = [p.clone() for p in ours.p]
    for _ in range(3):
        step_ours(ours)
        step_torch(theirs)
    for a, b, p in zip(ours.p, theirs.p, before, strict=True):
        torch.testing.assert_close(a - p, b - p, rtol=1e-4, atol=3e-7)
    narrow = Tensors.make(sizes, torch.bfloat16, torch.float32)
    wide = Tensors(
        [p.clone() for p in narrow.masters], [g.float() for g in narrow.g], *map(clone, (narrow.m, narrow.v))
    )
    wide.steps = clone(narrow.steps)
    for _ in range(3):
        step_ours(narrow)
        step_ours(wide)
    for p, master, w in zip(narrow.p, narrow.masters, wide.p, strict=True):
        assert torch.equal(master, w)
        assert torch.equal(p, w.bfloat16())


def clone(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def bench_adam(results: Results, name: str, sizes: list[int], dtype: torch.dtype, threads: int, quick: bool) -> None:
    ours = Tensors.make(sizes, dtype, torch.float32)
    theirs = Tensors.make(sizes, dtype, dtype)
    cases = {"ours": lambda: step_ours(ours), "torch": lambda: step_torch(theirs), "table": table_step(ours)}
    if ours.size_bytes >= LIMIT_FROM_BYTES:
        cases["sweep"] = sweep(ours, threads)
    times = measure(cases, repeats=9 if quick else 31, min_sample_s=0.002, budget_s=3 if quick else 20)
    numel = sum(sizes)
    label = f"adam {str(dtype)[6:]} {name}, {threads} thread{'s' * (threads > 1)}"
    limit_s = times["sweep"].median_s if "sweep" in times else None
    extra = {"numel": numel, "threads": threads, "peer_dtype": str(dtype)[6:]}
    peer = f"torch._fused_adamw_ ({str(dtype)[6:]} states)"
    results.add(label, times["ours"], peer=peer, peer_timing=times["torch"], limit_s=limit_s, **extra)
    results.add(f"{label}, table", times["table"], peer=peer, peer_timing=times["torch"], limit_s=limit_s, **extra)


def bench_norm(results: Results, name: str, sizes: list[int], threads: int, quick: bool) -> None:
    tensors = Tensors.make(sizes, torch.float32, torch.float32).g
    exact = sum(float(t.double().square().sum()) for t in tensors) ** 0.5  # torch's float32 sums are 6e-4 off at 16 M
    torch.testing.assert_close(ops.l2_norm(tensors).item(), exact, rtol=1e-12, atol=0.0)
    times = measure(
        {
            "ours": lambda: ops.l2_norm(tensors),
            "torch": lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))),
        },
        repeats=9 if quick else 31,
        min_sample_s=0.002,
        budget_s=3 if quick else 20,
    )
    label = f"norm float32 {name}, {threads} thread{'s' * (threads > 1)}"
    results.add(label, times["ours"], peer="torch._foreach_norm", peer_timing=times["torch"], threads=threads)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--threads", default=None, help="thread counts, comma-separated (default: 1 and torch's own)")


def main() -> None:
    args = parse_args(__doc__ or "", add_arguments)
    counts = [int(n) for n in args.threads.split(",")] if args.threads else sorted({1, torch.get_num_threads()})
    results = Results("adam", args.json)
    names = QUICK if args.quick else SIZES
    check([1000, 1, 0, 65536, 16384])
    for threads in counts:
        torch.set_num_threads(threads)
        for name in names:
            for dtype in (torch.float32, torch.bfloat16):
                bench_adam(results, name, SIZES[name], dtype, threads, args.quick)
            if name not in ("16 K", "256 K"):
                bench_norm(results, name, SIZES[name], threads, args.quick)
    results.print_table()


if __name__ == "__main__":
    main()
