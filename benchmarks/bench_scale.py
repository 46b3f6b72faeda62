"""What a rank computes and keeps to shard 7 billion parameters over thousands of ranks.

    python benchmarks/bench_scale.py [--quick] [--json PATH]

The parameters of Llama 2 7B (291, 6.74 billion elements, bfloat16), buckets of 32 MiB, as by default on GPUs. For the first, a
middle and the last rank of each world: `plan`, the packing, its digest and the rank's buckets (`pack`, `rank_buckets`),
pure Python; `tables`, what the engine makes of it: gradient buckets with their accumulators, rows of the Adam kernel, views of
the states, the forward order; `state`, the rank's parameters, gradient sums, moments and masters, zeroed (18 bytes an element;
up to 1 GiB). No parameter has memory: rows point into a buffer of the rank's share, which nothing reads. Bookkeeping is what is
kept of plan and tables: bytes of Python objects (tracemalloc) and of native ones (malloc), counted apart from the states.

Fails if plan, tables and state take more than 2 s on a rank at the largest world, or if a rank's bookkeeping is more than 1.5
times that of 8 ranks. Not in it: communication (`docs/memory.md`).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import tracemalloc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in map(str, (ROOT, ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402
from harness import Results, Timing, parse_args  # noqa: E402
from torch import Tensor  # noqa: E402

from bucketwheel.grads.bucket import GradBucket, Part  # noqa: E402
from bucketwheel.kernels.adam_rows import AdamRows  # noqa: E402
from bucketwheel.layout.packing import Packing, PackItem, RankBucket, pack, rank_buckets  # noqa: E402
from bucketwheel.native import core  # noqa: E402
from bucketwheel.residency.demand_order import DemandOrder  # noqa: E402

WORLDS = (8, 64, 512, 4096)
BUCKET_BYTES, ELEMENT_BYTES = 32 << 20, 2
STATE_BYTES = 18  # gradient sum, two moments and a master, fp32, and the parameter
LIMIT_S = 2.0
LIMIT_GROWTH = 1.5
LAYERS, WIDTH, INNER, VOCABULARY = 32, 4096, 11008, 32000


def llama_7b() -> list[PackItem]:
    """The parameters in the order in which the model registers them, with row cuts where they do, as by default."""
    square, wide = PackItem(WIDTH * WIDTH, None, WIDTH), PackItem(INNER * WIDTH, None, WIDTH)
    embedding, vector = PackItem(VOCABULARY * WIDTH, None, WIDTH), PackItem(WIDTH, None)
    layer = [square] * 4 + [wide] * 2 + [PackItem(WIDTH * INNER, None, INNER)] + [vector] * 2
    return [embedding, *layer * LAYERS, vector, embedding]


@dataclass
class Shares:
    """Memory of one rank, in shard space."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor


@dataclass
class Kept:
    """What a rank keeps beside its shares."""

    packing: Packing
    buckets: list[GradBucket]
    rows: AdamRows
    states: list[dict[str, Tensor]]
    order: DemandOrder
    segments: int


def make_shares(numel: int, make: Any) -> Shares:
    return Shares(make(numel, dtype=torch.bfloat16), *(make(numel, dtype=torch.float32) for _ in range(4)))


def make_plan(params: list[PackItem], world: int, rank: int) -> tuple[Packing, list[RankBucket]]:
    packing = pack(params[::-1], world=world, bucket_numel=BUCKET_BYTES // ELEMENT_BYTES)
    return packing, rank_buckets([packing], [list(reversed(range(len(params))))], rank)


def make_tables(packing: Packing, plans: list[RankBucket], shares: Shares, steps: Tensor, rank: int) -> Kept:
    """As `ShardedEngine` does, with its parts."""
    rows, buckets, count = AdamRows(steps), [], len(packing.items)
    for number, plan in enumerate(plans):
        bucket = plan.bucket
        shard = shares.grad.narrow(0, bucket.shard_begin, bucket.shard_numel)
        ranges = [
            (s.shard_begin - bucket.shard_begin, s.shard_begin - bucket.shard_begin + s.numel) for s in plan.segments
        ]
        accumulator = core.ShardAccumulator(shard, ranges)
        parts = [Part(count - 1 - f.param, f.bucket_begin, f.param_begin, f.numel) for f in plan.parts]
        numel = packing.world * bucket.shard_numel
        buckets.append(GradBucket(number, numel, torch.bfloat16, parts, accumulator, bucket.shard_numel))
        for s in plan.segments:
            kept = {"exp_avg": shares.exp_avg, "exp_avg_sq": shares.exp_avg_sq, "master_param": shares.master}
            state = {name: memory.narrow(0, s.shard_begin, s.numel) for name, memory in kept.items()}
            param, grad = (memory.narrow(0, s.shard_begin, s.numel) for memory in (shares.param, shares.grad))
            rows.add(count - 1 - s.param, 0, param, grad, state, param_begin=s.param_begin)
    states = []
    for param in reversed(range(count)):
        owned = packing.owned(param, rank)
        begin, numel = (owned[0].shard_begin if owned else 0), sum(s.numel for s in owned)
        views = (("exp_avg", shares.exp_avg), ("exp_avg_sq", shares.exp_avg_sq), ("master_param", shares.master))
        states.append({name: memory.narrow(0, begin, numel) for name, memory in views})
    order = DemandOrder([list(bucket.parts) for bucket in buckets])
    return Kept(packing, buckets, rows, states, order, sum(len(plan.segments) for plan in plans))


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def malloc_bytes() -> int | None:
    """Bytes that this process has from malloc; None where the C library does not tell (glibc before 2.33, others)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def seconds(call: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def measure_rank(params: list[PackItem], world: int, rank: int, repeats: int) -> dict[str, Any]:
    """Samples of the three parts, in seconds, and what a rank keeps."""
    shard_numel = make_plan(params, world, rank)[0].shard_numel
    shares = make_shares(shard_numel, torch.empty)  # not written to, so it takes address space only
    steps = torch.zeros(len(params), dtype=torch.int64)
    fits = shard_numel * STATE_BYTES <= 1 << 30
    samples: dict[str, list[float]] = {"plan": [], "tables": [], "state": []}
    for _ in range(repeats):
        plan_s, (packing, plans) = seconds(lambda: make_plan(params, world, rank))
        tables_s, kept = seconds(partial(make_tables, packing, plans, shares, steps, rank))
        samples["plan"].append(plan_s)
        samples["tables"].append(tables_s)
        if fits:
            samples["state"].append(seconds(lambda: make_shares(shard_numel, torch.zeros))[0])
    sizes = {
        "params": len(params),
        "buckets": len(kept.buckets),
        "segments": kept.segments,
        "shard_numel": shard_numel,
        "padding": packing.padding,
    }
    del packing, plans, kept

    def build() -> Kept:
        return make_tables(*make_plan(params, world, rank), shares, steps, rank)

    gc.collect()
    before = malloc_bytes()
    kept = build()
    gc.collect()
    after = malloc_bytes()
    native_bytes = None if before is None or after is None else max(0, after - before)
    del kept
    gc.collect()
    tracemalloc.start()
    kept = build()
    gc.collect()
    python_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    bytes_kept = {"python_bytes": python_bytes, "python_peak_bytes": peak_bytes, "native_bytes": native_bytes}
    return {"samples": samples, **sizes, **bytes_kept}


def main() -> int:
    args = parse_args(__doc__)
    results = Results("scale", args.json)
    params = llama_7b()
    assert len(params) == 291 and sum(param.numel for param in params) == 6_738_415_616
    worlds = (WORLDS[0], WORLDS[-1]) if args.quick else WORLDS
    repeats = 3 if args.quick else 7
    measure_rank(params[:10], 8, 0, 1)  # builds and loads the native module
    failures: list[str] = []
    kept: dict[int, int] = {}
    rows: list[str] = []
    for world in worlds:
        for rank in (0, world // 2, world - 1):
            found = measure_rank(params, world, rank, repeats)
            samples = found.pop("samples")
            total = Timing(tuple(map(sum, zip(*(s for s in samples.values() if s), strict=True))))
            for part, values in samples.items():
                if values:
                    results.add(f"world {world}, rank {rank}: {part}", Timing(tuple(values)))
            results.add(f"world {world}, rank {rank}: all", total, world=world, rank=rank, **found)
            if world == worlds[-1] and total.median_s > LIMIT_S:
                failures.append(f"rank {rank} of {world} took {total.median_s:.2f} s, at most {LIMIT_S}")
            bookkeeping = found["python_bytes"] + (found["native_bytes"] or 0)
            kept[world] = max(kept.get(world, 0), bookkeeping)
            native_kib = "-" if found["native_bytes"] is None else f"{found['native_bytes'] / 1024:.0f}"
            rows.append(
                f"  {world:5}  {rank:5}  {found['buckets']:7}  {found['segments']:8}  {found['shard_numel']:11}  "
                f"{found['python_bytes'] / 1024:10.0f}  {found['python_peak_bytes'] / 1024:8.0f}  {native_kib:>10}"
            )
    for world in worlds[1:]:
        if kept[world] > LIMIT_GROWTH * kept[worlds[0]]:
            failures.append(f"{kept[world]} bytes kept by a rank of {world}, {kept[worlds[0]]} at {worlds[0]}")
    results.print_table()
    print("  world   rank  buckets  segments  owned numel  Python KiB  peak KiB  native KiB")
    print("\n".join(rows))
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
