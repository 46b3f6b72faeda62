"""The CPU Adam step and the L2 norm against torch's fused kernels and against a bare sweep over the same memory.

    python benchmarks/bench_adam.py [--quick] [--json PATH] [--threads 1,2] [--kinds float32,...]

Rows of adam, by what is float32 and what bfloat16:
float32 (A): p, g, m, v float32; also with amsgrad. bfloat16 (C): p, g bfloat16 with float32 m, v and master, which is
compared with p; bfloat16-ignore: without comparing (on_external_update="ignore"). remainder
(E): p, g bfloat16 with 16 bits more, float32 m, v. bf16-states (G): p, g float32, m, v bfloat16. all-bfloat16 (H):
everything, v rounded stochastically; all-bfloat16-nearest: v to nearest, which is what torch does in bfloat16. float16:
as C. float64: everything.
torch's fused kernel has one dtype for all, that of p: it moves 14 bytes an element in 16 bits, where C moves 30, and it
has no stochastic rounding. Both sides count their step tensors up. `table` is the same step through the prebuilt table
that the optimizer keeps. Limit: an in-place sweep that reads and writes the same streams with next to no arithmetic, on
as many threads; only for working sets of at least 32 MiB, where memory is what limits.

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

from bucketwheel.kernels import ops
from bucketwheel.native import core

SIZES = {f"{n >> 10} K": [n] for n in (4096, 16384, 65536, 262144)} | {
    f"{n >> 20} M": [n] for n in (1 << 20, 1 << 22, 1 << 24)
}
SIZES |= {"1000 x 1 K": [1024] * 1000, "300 x 16 K": [16384] * 300}
QUICK = ("4 K", "64 K", "1 M", "16 M", "1000 x 1 K")
ADAM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
LIMIT_FROM_BYTES = 32 << 20


@dataclass(frozen=True)
class Kind:
    """What a configuration keeps in which dtype; ``weight``: where the precise weight is."""

    dtype: torch.dtype
    state_dtype: torch.dtype
    weight: str = "param"
    rounding: str = "stochastic"
    amsgrad: bool = False
    on_external_update: str = "resync"


F32, BF16 = torch.float32, torch.bfloat16
KINDS = {
    "float32": Kind(F32, F32),
    "bfloat16": Kind(BF16, F32, "master"),
    "bfloat16-ignore": Kind(BF16, F32, "master", on_external_update="ignore"),
    "remainder": Kind(BF16, F32, "remainder"),
    "bf16-states": Kind(F32, BF16),
    "all-bfloat16": Kind(BF16, BF16),
    "all-bfloat16-nearest": Kind(BF16, BF16, rounding="nearest"),
    "float32-amsgrad": Kind(F32, F32, amsgrad=True),
    "float16": Kind(torch.float16, F32, "master"),
    "float64": Kind(torch.float64, torch.float64),
}


@dataclass
class Tensors:
    """The tensors of one side: lists of p, g, m, v, masters, remainders, maxima (empty without) and step counts."""

    p: list[torch.Tensor]
    g: list[torch.Tensor]
    m: list[torch.Tensor]
    v: list[torch.Tensor]
    masters: list[torch.Tensor] = field(default_factory=list)
    remainders: list[torch.Tensor] = field(default_factory=list)
    vmaxs: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)

    @staticmethod
    def make(sizes: list[int], kind: Kind) -> Tensors:
        generator = torch.Generator().manual_seed(1)

        def random(to: torch.dtype, scale: float) -> list[torch.Tensor]:
            return [(torch.rand(n, generator=generator) * scale - scale / 2).to(to) for n in sizes]

        state = kind.state_dtype
        out = Tensors(random(kind.dtype, 2.0), random(kind.dtype, 0.1), random(state, 0.1), random(state, 0.1))
        for v in out.v:
            v.square_()
        if kind.weight == "master":
            out.masters = [p.float() for p in out.p]
        elif kind.weight == "remainder":
            out.remainders = [torch.zeros(n, dtype=torch.int16) for n in sizes]
        if kind.amsgrad:
            out.vmaxs = clone(out.v)
        out.steps = [torch.tensor(10.0) for _ in sizes]
        return out

    @property
    def size_bytes(self) -> int:
        lists = (self.p, self.g, self.m, self.v, self.masters, self.remainders, self.vmaxs)
        return sum(x.numel() * x.element_size() for xs in lists for x in xs)


def step_ours(t: Tensors, kind: Kind) -> None:
    ops.adam_step(
        t.p, t.g, t.m, t.v, t.steps, max_exp_avg_sqs=t.vmaxs or None, master_params=t.masters or None,
        remainders=t.remainders or None, state_rounding=kind.rounding, on_external_update=kind.on_external_update,
        **ADAM
    )  # fmt: skip


def step_torch(t: Tensors) -> None:
    torch._foreach_add_(t.steps, 1)
    torch._fused_adamw_(
        t.p, t.g, t.m, t.v, t.vmaxs, t.steps, beta1=0.9, beta2=0.999, amsgrad=bool(t.vmaxs), maximize=False, **ADAM
    )  # fmt: skip


def table_step(t: Tensors, kind: Kind) -> Callable[[], None]:
    table = core.AdamTable()
    for i, p in enumerate(t.p):
        remainder = t.remainders[i] if t.remainders else None
        master, vmax = t.masters[i] if t.masters else None, t.vmaxs[i] if t.vmaxs else None
        table.add(p, t.g[i], t.m[i], t.v[i], master, 0, max_exp_avg_sq=vmax, remainder=remainder, param=i)
    groups = [core.AdamGroup(ADAM["lr"], 0.9, 0.999, ADAM["eps"], ADAM["weight_decay"])]
    steps = torch.full((len(t.p),), 10, dtype=torch.int64)
    options = core.AdamOptions(stochastic=kind.rounding == "stochastic", resync=kind.on_external_update == "resync")
    arguments = core.AdamArguments(steps, options=options)

    def step() -> None:
        steps.add_(1)
        table.step(groups, arguments)

    return step


class Stream(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("data", "element_bytes", "reads", "writes")]


def sweep(t: Tensors, kind: Kind, threads: int) -> Callable[[], None]:
    """One tensor of each role, however many there are on the other sides."""
    function = load_native("adam_sweep.cpp").adam_sweep
    function.argtypes = [ctypes.POINTER(Stream), ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    roles = [(t.p, not t.masters or kind.on_external_update == "resync", True), (t.g, True, False)]
    roles += [(x, True, True) for x in (t.m, t.v, t.masters, t.remainders, t.vmaxs)]
    flat = [(torch.cat(tensors), reads, writes) for tensors, reads, writes in roles if tensors]
    streams = [Stream(x.data_ptr(), x.element_size(), reads, writes) for x, reads, writes in flat]
    array, numel = (Stream * len(streams))(*streams), sum(p.numel() for p in t.p)

    def run(keep: Any = flat) -> None:
        function(array, len(streams), numel, threads)

    return run


def check(sizes: list[int], kind: Kind) -> None:
    """One step of every kind, by both ways, which give the same bits, against torch's fused kernel on the same values in
    float32 (float64: in float64): equal but for what the kind's own dtypes round away.
    """
    ours, kept = (Tensors.make(sizes, kind) for _ in range(2))
    wide = torch.promote_types(kind.dtype, torch.float32)
    lists = (ours.masters or ours.p, ours.g, ours.m, ours.v)
    theirs = Tensors(*([x.to(wide, copy=True) for x in tensors] for tensors in lists))
    theirs.vmaxs, theirs.steps = clone(ours.vmaxs), clone(ours.steps)
    before = clone(theirs.p)
    step_ours(ours, kind)
    table_step(kept, kind)()
    step_torch(theirs)
    for name in ("p", "m", "v", "masters", "remainders", "vmaxs"):
        for a, b in zip(getattr(ours, name), getattr(kept, name), strict=True):
            if not torch.equal(a, b):
                raise RuntimeError(f"{kind}: {name} of adam_step and of the table differ")
    for a, b, p in zip(ours.masters or ours.p, theirs.p, before, strict=True):
        if a.dtype == wide:
            torch.testing.assert_close(a - p, b - p, rtol=1e-4, atol=3e-7)
    for name in ("p", "m", "v", "vmaxs"):
        for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            digit = torch.finfo(a.dtype)
            rtol, atol = max(digit.eps, 1e-12 if wide != F32 else 1e-5), max(1e-12, digit.eps * digit.smallest_normal)
            torch.testing.assert_close(a.to(wide), b, rtol=rtol, atol=atol)


def clone(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def bench_adam(results: Results, name: str, sizes: list[int], kind_name: str, threads: int, quick: bool) -> None:
    kind = KINDS[kind_name]
    ours, kept = (Tensors.make(sizes, kind) for _ in range(2))
    theirs = Tensors.make(sizes, Kind(kind.dtype, kind.dtype, amsgrad=kind.amsgrad))
    cases = {
        "ours": lambda: step_ours(ours, kind),
        "torch": lambda: step_torch(theirs),
        "table": table_step(kept, kind),
    }
    if ours.size_bytes >= LIMIT_FROM_BYTES:
        cases["sweep"] = sweep(kept, kind, threads)
    times = measure(cases, repeats=9 if quick else 31, min_sample_s=0.002, budget_s=3 if quick else 20)
    numel = sum(sizes)
    label = f"adam {kind_name} {name}, {threads} thread{'s' * (threads > 1)}"
    limit_s = times["sweep"].median_s if "sweep" in times else None
    peer_dtype = str(kind.dtype)[6:]
    extra = {"numel": numel, "threads": threads, "peer_dtype": peer_dtype}
    peer = f"torch._fused_adamw_ ({peer_dtype} states)"
    results.add(label, times["ours"], peer=peer, peer_timing=times["torch"], limit_s=limit_s, **extra)
    results.add(f"{label}, table", times["table"], peer=peer, peer_timing=times["torch"], limit_s=limit_s, **extra)


def bench_norm(results: Results, name: str, sizes: list[int], threads: int, quick: bool) -> None:
    tensors = Tensors.make(sizes, KINDS["float32"]).g
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
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help=f"rows of adam, comma-separated, of {', '.join(KINDS)}"
    )


def main() -> None:
    args = parse_args(__doc__ or "", add_arguments)
    counts = [int(n) for n in args.threads.split(",")] if args.threads else sorted({1, torch.get_num_threads()})
    results = Results("adam", args.json)
    names = QUICK if args.quick else SIZES
    for kind in args.kinds.split(","):
        check([1000, 1, 0, 65536, 16384], KINDS[kind])
    for threads in counts:
        torch.set_num_threads(threads)
        for name in names:
            for kind in args.kinds.split(","):
                bench_adam(results, name, SIZES[name], kind, threads, args.quick)
            if name not in ("16 K", "256 K"):
                bench_norm(results, name, SIZES[name], threads, args.quick)
    results.print_table()


if __name__ == "__main__":
    main()
