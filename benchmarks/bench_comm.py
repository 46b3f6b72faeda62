"""All-gather and reduce-scatter against gloo and against memcpy, over sizes, ranks and backends, in one job each.

    python benchmarks/bench_comm.py [--quick] [--json PATH] [--worlds 2,4] [--backends shm,c10d] [--plot PATH]

float32. Sizes are those of the full buffer. `pool`: buffers of the communicator's pool; `in place`: the shard is the
rank's own part of the full buffer; `foreign`: torch's own memory, which `shm` sends through staging buffers and `c10d`
as it is. Peer: gloo's all-gather and reduce-scatter of one tensor on the same shapes. A sample is the job's time: from
its first rank's begin to its last one's end, over back-to-back calls, behind one that has filled the cache. Limit: one
memcpy on each rank, all at once and timed alike, that reads and writes as many bytes as the operation must (all-gather:
what is not there already; reduce-scatter: reads the rank's part of every input, writes the shard), so half their sum is
copied; below 1 MiB much of its time is that the ranks do not begin at once. `to a sink`: what the optimizer does, the
shard and the sum of its squares in one pass. Agreement (post, collect) is compared with gloo's all_gather of 8 bytes,
without such a call. `--plot` draws, for each backend and number of ranks, the bytes that must move over the time, by
size, of gloo and of the memcpy of an all-gather too; it needs matplotlib (the extra `demo`).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Rank, Results, Timing, collectives_of_torch, measure, of_job, parse_args, run_ranks

from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.native import core

MIB = 1 << 20
# Bytes of the full buffer, and how many calls make a sample.
SIZES = {
    "64 KiB": (MIB // 16, 100),
    "256 KiB": (MIB // 4, 60),
    "1 MiB": (MIB, 40),
    "4 MiB": (4 * MIB, 12),
    "16 MiB": (16 * MIB, 4),
    "64 MiB": (64 * MIB, 2),
    "256 MiB": (256 * MIB, 1),
}
QUICK = ("1 MiB", "64 MiB")


def copiers(lengths: dict[str, int]) -> dict[str, Callable[[], object]]:
    """By case, a memcpy of so many bytes; all of them in the same two buffers."""
    most = max(lengths.values())
    source, target = torch.ones(most, dtype=torch.uint8), torch.zeros(most, dtype=torch.uint8)

    def copy(length: int) -> int | None:
        return ctypes.memmove(target.data_ptr(), source.data_ptr(), length)

    return {case: functools.partial(copy, length) for case, length in lengths.items()}


def expect_equal(ours: torch.Tensor, theirs: torch.Tensor, case: str) -> None:
    """Whole numbers, small enough that every order of the additions is exact."""
    if not torch.equal(ours, theirs):
        raise RuntimeError(f"{case}: the results differ from gloo's")


def bytes_moved(case: str, size_bytes: int, world: int) -> float:
    """Half of what a rank reads and writes: the length of the memcpy that moves as much."""
    shard = size_bytes / world
    if case.startswith("reduce-scatter"):
        return (size_bytes + shard) / 2
    return size_bytes - shard if "in place" in case else size_bytes


def cases_of(comm: Communicator, name: str, size_bytes: int) -> dict[str, Callable[[], object]]:
    world = comm.size
    numel = size_bytes // 4
    shard_numel = numel // world
    own = slice(comm.rank * shard_numel, (comm.rank + 1) * shard_numel)
    pooled = comm.pool.acquire(f"{name} full", size_bytes).tensor(torch.float32, (numel,))
    in_place = pooled[own]
    part = comm.pool.acquire(f"{name} shard", size_bytes // world).tensor(torch.float32, (shard_numel,))
    foreign, shard = torch.empty(numel), torch.empty(shard_numel)
    gathered, scattered = torch.empty(numel), torch.empty(shard_numel)
    gloo_gather, gloo_scatter = collectives_of_torch()
    values = torch.arange(numel, dtype=torch.int64).remainder_(8191).float() + comm.rank
    for tensor in (pooled, foreign):
        tensor.copy_(values)
    for tensor in (part, shard):
        tensor.copy_(values[own])
    gloo_gather(gathered, shard)
    gloo_scatter(scattered, foreign)
    out = torch.empty(shard_numel)
    summed = torch.zeros(shard_numel)
    sink = core.ShardAccumulator(summed, [(0, shard_numel)])

    def reduce_to_sink() -> None:
        sink.start(False)
        comm._native.reduce_scatter_to_sink(pooled, sink).wait()

    if comm.backend == "shm":
        reduce_to_sink()
        expect_equal(summed, scattered, f"{name} reduce-scatter to a sink")
    for source, result in ((pooled, part), (foreign, out)):
        result.zero_()
        reduce_scatter(result, source, comm).wait()
        expect_equal(result, scattered, f"{name} reduce-scatter")
    part.copy_(values[own])
    for target, source in ((pooled, part), (pooled, in_place), (foreign, shard)):
        target.copy_(values)  # no part of another rank is there yet
        all_gather(target, source, comm).wait()
        expect_equal(target, gathered, f"{name} all-gather")
    ours: dict[str, Callable[[], object]] = {
        "all-gather, pool, in place": lambda: all_gather(pooled, in_place, comm).wait(),
        "all-gather, pool": lambda: all_gather(pooled, part, comm).wait(),
        "all-gather, foreign": lambda: all_gather(foreign, shard, comm).wait(),
        "reduce-scatter, pool": lambda: reduce_scatter(out, pooled, comm).wait(),
        "reduce-scatter, pool, to a sink": reduce_to_sink,
        "reduce-scatter, foreign": lambda: reduce_scatter(out, foreign, comm).wait(),
    }
    if comm.backend != "shm":  # its pool is memory like any other
        ours = {case: call for case, call in ours.items() if "pool" not in case}
    limits = copiers({f"memcpy for {case}": int(bytes_moved(case, size_bytes, world)) for case in ours})
    gloo: dict[str, Callable[[], object]] = {
        "gloo all-gather": lambda: gloo_gather(gathered, shard),
        "gloo reduce-scatter": lambda: gloo_scatter(scattered, foreign),
    }
    return {**ours, **gloo, **limits}


def warm(cases: dict[str, Callable[[], object]], comm: Communicator, case: str) -> None:
    """The case before has left its own bytes in the cache; no rank begins before all are here."""
    cases[case]()
    comm.exchange(b"")


def measure_rank(rank: Rank, backend: str, sizes: list[str], repeats: int) -> dict[str, dict[str, Timing]]:
    warnings.filterwarnings("ignore", category=FutureWarning)
    out = {}
    with Communicator(backend=backend) as comm:
        payload = bytes(8)
        small, smalls = torch.zeros(1, dtype=torch.int64), torch.zeros(comm.size, dtype=torch.int64)
        gloo_gather = collectives_of_torch()[0]
        agreement = {"ours": lambda: comm.exchange(payload), "gloo": lambda: gloo_gather(smalls, small)}
        out["8 bytes"] = measure(agreement, repeats=repeats, inner=100, before=lambda _: comm.exchange(b""))
        for name in sizes:
            size_bytes, inner = SIZES[name]
            cases = cases_of(comm, name, size_bytes)
            out[name] = measure(cases, repeats=repeats, inner=inner, before=functools.partial(warm, cases, comm))
            del cases  # the next ones need the memory
            comm.pool.trim()
    return out


def add_job(results: Results, backend: str, world: int, sizes: list[str], repeats: int) -> None:
    job = f"{backend} {world}"
    by_rank = run_ranks(world, measure_rank, backend, sizes, repeats).values
    agreement = {case: of_job([timings["8 bytes"][case] for timings in by_rank]) for case in ("ours", "gloo")}
    results.add(f"{job}: agreement, 8 bytes", agreement["ours"], peer="gloo all_gather", peer_timing=agreement["gloo"])
    for name in sizes:
        timings = {case: of_job([timings[name][case] for timings in by_rank]) for case in by_rank[0][name]}
        for case in [case for case in timings if not case.startswith(("gloo", "memcpy"))]:
            peer = f"gloo {case.split(',')[0]}"
            results.add(
                f"{job}: {name} {case}",
                timings[case],
                peer=peer,
                peer_timing=timings[peer],
                limit_s=timings[f"memcpy for {case}"].median_s,
                backend=backend,
                world=world,
                operation=case,
                size_bytes=SIZES[name][0],
                gb_per_s=bytes_moved(case, SIZES[name][0], world) / timings[case].median_s / 1e9,
            )


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    jobs = sorted({(line["backend"], line["world"]) for line in lines if "gb_per_s" in line})
    figure, all_axes = pyplot.subplots(1, len(jobs), figsize=(5 * len(jobs), 4), squeeze=False)
    for axes, (backend, world) in zip(all_axes[0], jobs, strict=True):
        mine = [line for line in lines if (line.get("backend"), line.get("world")) == (backend, world)]
        for case in dict.fromkeys(line["operation"] for line in mine):
            of_case = [line for line in mine if line["operation"] == case]
            sizes = [line["size_bytes"] / MIB for line in of_case]
            axes.plot(sizes, [line["gb_per_s"] for line in of_case], marker="o", label=case)
            if case in ("all-gather, foreign", "reduce-scatter, foreign"):
                moved = [bytes_moved(case, line["size_bytes"], world) for line in of_case]
                rates = [size / line["peer_s"] / 1e9 for size, line in zip(moved, of_case, strict=True)]
                axes.plot(sizes, rates, linestyle="--", label=f"gloo {case.split(',')[0]}")
            if case == "all-gather, foreign":
                rates = [size / line["limit_s"] / 1e9 for size, line in zip(moved, of_case, strict=True)]
                axes.plot(sizes, rates, linestyle=":", color="black", label="memcpy")
        axes.set(xscale="log", xlabel="full buffer, MiB", ylabel="GB/s of bytes that must move", ylim=(0, None))
        axes.set_title(f"{backend}, {world} ranks")
        axes.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks (default 2,4; with --quick 2)")
    parser.add_argument("--backends", default="shm,c10d", help="of shm and c10d (default both)")
    parser.add_argument("--plot", metavar="PATH", type=Path, help="draw GB/s by size into PATH")


def main() -> None:
    args = parse_args(__doc__, add_arguments)
    sizes = [name for name in SIZES if name in QUICK or not args.quick]
    results = Results("comm", args.json)
    for world in [2] if args.quick else [int(one) for one in args.worlds.split(",")]:
        for backend in args.backends.split(","):
            add_job(results, backend, world, sizes, 7 if args.quick else 15)
    results.print_table()
    if args.plot is not None:
        plot(results.lines, args.plot)


if __name__ == "__main__":
    main()
