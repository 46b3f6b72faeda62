"""The section `nccl` of bench_gpu.py: NCCL with one rank.

The host's time for a call of eight tensors against torch's coalescing manager (which is not public, but what torch's own
sharded training uses) on a process group of NCCL; all-gathers and reduce-scatters on two communicators at once; a GPT's
training step over NCCL against the local backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from gpu_systems import GPT_MEDIUM, GPT_TINY, OVER_NCCL, SHARDED, TrainingStep
from gpu_timing import Bench, random
from harness import Timing, collectives_of_torch, rotation

from bucketwheel.comm import nccl_library as which
from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from tests.gpu.device import DEVICE

__all__ = ["nccl"]

COALESCED = 8
NUMEL = 1_000  # of a tensor whose bytes take no time
HOST_REPEATS, CALLS = 40, 20
GPT_REPEATS = 20

Cases = dict[str, Callable[[], object]]


def nccl(bench: Bench) -> None:
    host_cost(bench)
    overlap(bench)
    gpt(bench)


# ---- the host's time for a call


def host_times(bench: Bench, cases: Mapping[str, Callable[[], object]]) -> dict[str, Timing]:
    """Of the calling thread for one call; the device is idle before each sample of `CALLS` calls."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(-3, bench.size(HOST_REPEATS, 4)):
        for name in rotation(list(cases), abs(repeat)):
            DEVICE.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                cases[name]()
            if repeat >= 0:
                samples[name].append((time.perf_counter() - begin) / CALLS)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def our_cases(comm: Communicator, fulls: list[Any], shards: list[Any]) -> Cases:
    gather, reduce = AllGatherRequest(fulls, shards, comm), ReduceScatterRequest(shards, fulls, comm)
    return {
        "all_gather": lambda: all_gather(fulls, shards, comm).wait(),
        "all_gather, prepared": lambda: gather.start().wait(),
        "reduce_scatter": lambda: reduce_scatter(shards, fulls, comm).wait(),
        "reduce_scatter, prepared": lambda: reduce.start().wait(),
    }


def torchs_cases(fulls: list[Any], shards: list[Any]) -> Cases:
    """By the name of ours. Both make the current stream wait."""
    manager = dist.distributed_c10d._coalescing_manager
    gather, scatter = collectives_of_torch()

    def gathers() -> None:
        with manager(async_ops=True) as manages:
            for full, shard in zip(fulls, shards, strict=True):
                gather(full, shard)
        manages.wait()

    def reduces() -> None:
        with manager(async_ops=True) as manages:
            for full, shard in zip(fulls, shards, strict=True):
                scatter(shard, full)
        manages.wait()

    return {"all_gather": gathers, "reduce_scatter": reduces}


def why_not_torch() -> str:
    if DEVICE.is_simulated:
        return "the device is simulated for our calls alone"
    return "" if dist.is_nccl_available() else "torch is built without NCCL"


def host_cost(bench: Bench) -> None:
    """Checked first: both gather and reduce the same."""
    fulls = [random(NUMEL, torch.float32) for _ in range(COALESCED)]
    shards = [random(NUMEL, torch.float32) for _ in range(COALESCED)]
    reason = why_not_torch()
    if not reason:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with Communicator(backend="nccl", device="cuda", name="host cost") as comm:
        ours, theirs = our_cases(comm, fulls, shards), {} if reason else torchs_cases(fulls, shards)
        expect_right(ours, fulls, shards)
        expect_right(theirs, fulls, shards)
        if reason:
            print(f"torch's coalescing manager is left out: {reason}", flush=True)
            for name in ("all_gather", "reduce_scatter"):
                bench.omit(f"host time, {name} of {COALESCED}: torch's coalescing manager", reason)
        timings = host_times(bench, ours | {f"torch {name}": call for name, call in theirs.items()})
        for name in ours:
            peer = timings.get(f"torch {name.split(',')[0]}")
            bench.add(
                f"host time, {name} of {COALESCED}", COALESCED * NUMEL, timings[name], us=round(1e6 * timings[name].median_s, 2),
                peer="torch's coalescing manager" if peer else None, peer_timing=peer,
                version=which.version_text(which.info().version),
            )  # fmt: skip
    if not reason:
        DEVICE.synchronize()
        dist.destroy_process_group()


def expect_right(cases: Cases, fulls: list[Any], shards: list[Any]) -> None:
    for name, call in cases.items():
        sources, targets = (shards, fulls) if name.startswith("all_gather") else (fulls, shards)
        for source, target in zip(sources, targets, strict=True):
            source.normal_()
            target.zero_()
        call()
        if not all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True)):
            raise RuntimeError(f"{name}: one rank must get what it gave")


# ---- two communicators at once


def overlap(bench: Bench) -> None:
    """Together, the time against the sum of both alone, and where the operations began and ended."""
    gathers, reduces = Communicator.pair(device="cuda", name="overlap")
    with gathers, reduces:
        for size_mb in (1, 16, 256):
            numel = bench.size(size_mb << 18, 5_000)
            shard, full = random(numel, torch.float32), random(numel, torch.float32)
            gathered, reduced = torch.empty_like(shard), torch.empty_like(full)

            def gather(shard: Any = shard, gathered: Any = gathered, **more: Any) -> Handle:
                return all_gather(gathered, shard, gathers, **more)

            def reduce(full: Any = full, reduced: Any = reduced, **more: Any) -> Handle:
                return reduce_scatter(reduced, full, reduces, **more)

            def both(gather: Any = gather, reduce: Any = reduce) -> None:
                handles = gather(), reduce()
                for handle in handles:
                    handle.wait()

            alone = {"gather": lambda gather=gather: gather().wait(), "reduce": lambda reduce=reduce: reduce().wait()}
            timings = bench.measure({**alone, "both": both})
            assert torch.equal(gathered, shard) and torch.equal(reduced, full)
            sums_s = [a + b for a, b in zip(timings["gather"].samples_s, timings["reduce"].samples_s, strict=True)]
            alone_ms = {name: float(f"{1e3 * timings[name].median_s:.4g}") for name in alone}
            bench.add(
                f"gather and reduce at once, {size_mb} MB each", numel, timings["both"], size_bytes=16 * numel,
                peer="one after the other", peer_timing=Timing(tuple(sums_s)), alone_ms=alone_ms,
                **intervals(gathers, reduces, gather, reduce),
            )  # fmt: skip


def intervals(
    gathers: Communicator, reduces: Communicator, gather: Callable[..., Handle], reduce: Callable[..., Handle]
) -> dict[str, Any]:
    """From when the stream of each was ready until its operation was over, in ms from the first of the four."""
    DEVICE.synchronize()
    DEVICE.hold(0.005)  # until both are issued
    handles = []
    for comm, issue in ((gathers, gather), (reduces, reduce)):
        handles += [all_gather([], [], comm, timing=True), issue(timing=True)]
    for handle in handles:
        handle.synchronize()
    gather_begin, gather_end, reduce_begin, reduce_end = (handles[0].elapsed_time(one) for one in handles)
    common_ms = min(gather_end, reduce_end) - max(gather_begin, reduce_begin)
    first = min(gather_begin, reduce_begin)
    return {
        "gather_ms": [round(gather_begin - first, 4), round(gather_end - first, 4)],
        "reduce_ms": [round(reduce_begin - first, 4), round(reduce_end - first, 4)],
        "common_ms": round(common_ms, 4),
    }


# ---- a training step


def gpt(bench: Bench) -> None:
    config, batch = (GPT_TINY, 2) if bench.quick else (GPT_MEDIUM, 4)
    systems = {name: TrainingStep(name, "bfloat16", config, batch) for name in (OVER_NCCL, SHARDED)}
    losses = {name: torch.stack([system.train() for _ in range(3)]).float().cpu() for name, system in systems.items()}
    torch.testing.assert_close(losses[OVER_NCCL], losses[SHARDED], rtol=3e-2, atol=3e-2)
    timings = bench.measure({name: system.train for name, system in systems.items()}, repeats=GPT_REPEATS)
    bench.add(
        "GPT-2 medium step, bfloat16, over NCCL", systems[OVER_NCCL].numel, timings[OVER_NCCL], peer="the local backend",
        peer_timing=timings[SHARDED],
    )  # fmt: skip
    for system in systems.values():
        system.close()
