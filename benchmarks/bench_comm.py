"""All-gather and reduce-scatter of 2 ranks against gloo and against memcpy, in one job.

    python benchmarks/bench_comm.py [--quick] [--json PATH]

float32. Sizes are those of the full buffer. `pool`: buffers of the communicator's pool; `in place`: the shard is the
rank's own part of the full buffer; `foreign`: torch's own memory, which goes through the staging buffers. Peer:
gloo's all_gather_into_tensor and reduce_scatter_tensor on the same shapes. A sample is the job's time: that of its
slowest rank, over back-to-back calls. Limit: one memcpy on each rank, both at once, that reads and writes as many
bytes as the operation must (all-gather: what is not there already; reduce-scatter: reads the rank's part of every
input, writes the shard), so half their sum is copied. Agreement (post, collect) is compared with gloo's all_gather of
8 bytes.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Rank, Results, Timing, measure, parse_args, run_ranks, slowest

from bucketwheel.comm import Communicator
from bucketwheel.ops import all_gather, reduce_scatter

WORLD = 2
SIZES = {"64 KiB": (64 << 10, 100), "1 MiB": (1 << 20, 40), "8 MiB": (8 << 20, 8), "64 MiB": (64 << 20, 2)}
QUICK = ("1 MiB", "64 MiB")


def copier(size_bytes: int) -> Callable[[], object]:
    source, target = torch.ones(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)
    pointers = target.data_ptr(), source.data_ptr(), size_bytes
    return lambda keep=(source, target): ctypes.memmove(*pointers)


def gloo_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return gather, scatter


def expect_equal(ours: torch.Tensor, theirs: torch.Tensor, case: str) -> None:
    if not torch.equal(ours, theirs):
        raise RuntimeError(f"{case}: the results differ from gloo's")


def cases_of(comm: Communicator, name: str, size_bytes: int) -> dict[str, Callable[[], object]]:
    numel = size_bytes // 4
    shard_numel = numel // WORLD
    own = slice(comm.rank * shard_numel, (comm.rank + 1) * shard_numel)
    pooled = comm.pool.acquire(f"{name} full", size_bytes).tensor(torch.float32, (numel,))
    part = comm.pool.acquire(f"{name} shard", size_bytes // WORLD).tensor(torch.float32, (shard_numel,))
    foreign, shard = torch.empty(numel), torch.empty(shard_numel)
    gathered, scattered = torch.empty(numel), torch.empty(shard_numel)
    gloo_gather, gloo_scatter = gloo_functions()
    values = torch.arange(numel, dtype=torch.float32) + comm.rank
    for tensor in (pooled, foreign):
        tensor.copy_(values)
    for tensor in (part, shard):
        tensor.copy_(values[own])
    gloo_gather(gathered, shard)
    gloo_scatter(scattered, foreign)
    out = torch.empty(shard_numel)
    for source, result in ((pooled, part), (foreign, out)):
        reduce_scatter(result, source, comm).wait()
        expect_equal(result, scattered, f"{name} reduce-scatter")
    part.copy_(values[own])
    for target, source in ((pooled, part), (pooled, pooled[own]), (foreign, shard)):
        all_gather(target, source, comm).wait()
        expect_equal(target, gathered, f"{name} all-gather")
    cases: dict[str, Callable[[], object]] = {
        "all-gather, pool, in place": lambda: all_gather(pooled, pooled[own], comm).wait(),
        "all-gather, pool": lambda: all_gather(pooled, part, comm).wait(),
        "all-gather, foreign": lambda: all_gather(foreign, shard, comm).wait(),
        "reduce-scatter, pool": lambda: reduce_scatter(out, pooled, comm).wait(),
        "reduce-scatter, foreign": lambda: reduce_scatter(out, foreign, comm).wait(),
        "gloo all-gather": lambda: gloo_gather(gathered, shard),
        "gloo reduce-scatter": lambda: gloo_scatter(scattered, foreign),
        "memcpy half": copier(size_bytes // WORLD),
        "memcpy whole": copier(size_bytes),
        "memcpy three quarters": copier((WORLD + 1) * size_bytes // WORLD // 2),
    }
    return cases


LIMITS = {
    "all-gather, pool, in place": "memcpy half",
    "all-gather, pool": "memcpy whole",
    "all-gather, foreign": "memcpy whole",
    "reduce-scatter, pool": "memcpy three quarters",
    "reduce-scatter, foreign": "memcpy three quarters",
}


def measure_rank(rank: Rank, sizes: list[str], repeats: int) -> dict[str, dict[str, Timing]]:
    warnings.filterwarnings("ignore", category=FutureWarning)
    out = {}
    with Communicator(backend="shm") as comm:
        payload = bytes(8)
        small, smalls = torch.zeros(1, dtype=torch.int64), torch.zeros(WORLD, dtype=torch.int64)
        gloo_gather = gloo_functions()[0]
        agreement = {"ours": lambda: comm.exchange(payload), "gloo": lambda: gloo_gather(smalls, small)}
        out["8 bytes"] = measure(agreement, repeats=repeats, inner=200, before=lambda _: comm.exchange(b""))
        for name in sizes:
            size_bytes, inner = SIZES[name]
            cases = cases_of(comm, name, size_bytes)
            out[name] = measure(cases, repeats=repeats, inner=inner, before=lambda _: comm.exchange(b""))
    return out


def main() -> None:
    args = parse_args(__doc__)
    sizes = [name for name in SIZES if name in QUICK or not args.quick]
    results = Results("comm", args.json)
    by_rank = run_ranks(WORLD, measure_rank, sizes, 7 if args.quick else 15).values
    agreement = {case: slowest([timings["8 bytes"][case] for timings in by_rank]) for case in ("ours", "gloo")}
    results.add("agreement, 8 bytes", agreement["ours"], peer="gloo all_gather", peer_timing=agreement["gloo"])
    for name in sizes:
        timings = {case: slowest([timings[name][case] for timings in by_rank]) for case in by_rank[0][name]}
        for case, limit in LIMITS.items():
            peer = f"gloo {case.split(',')[0]}"
            results.add(
                f"{name} {case}",
                timings[case],
                peer=peer,
                peer_timing=timings[peer],
                limit_s=timings[limit].median_s,
                size_bytes=SIZES[name][0],
                world=WORLD,
            )
    results.print_table()


if __name__ == "__main__":
    main()
