"""What a coalesced call of eight tensors costs the calling thread, on every backend but `c10d`, against gloo's coalescing manager.

    python benchmarks/bench_calls.py [--quick] [--json PATH]

float32, 256 elements a shard. Only the calls are timed, each by itself, until it returns; a sample is the mean of 20, so
that what a call does for others, as freeing what they used, counts too. Operations are waited for outside of that: after
each call, so that it finds its stream idle and wakes a thread, which may take the processor from it; or, `stream busy`,
after all of them, while the stream is held up, as it is where gradients follow each other. `local`: one rank, and two
ranks of one thread; `shm`: two processes, and a sample is the slower one's; `nccl`: one rank, over the fake NCCL and the
CUDA table of the tests, which check and count calls and do nothing; `simulated device`: the same where they do it, in
other threads, so that their own time is in it. `prepared` is a request's start. Parts of a call, to see what takes the
time: `empty lists`, what does not depend on the tensors; `native`, without what Python adds; `versions`, telling
autograd. Peer: torch's all-gather and reduce-scatter of one tensor under torch's `_coalescing_manager(async_ops=True)`,
on gloo, in processes of their own. The goal is 5 us. Printed last, and no line of the results: a round of agreement
between two ranks that do not share a host.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in map(str, (ROOT, ROOT / "tests", ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import Rank, Results, Timing, collectives_of_torch, parse_args, rotation, run_ranks, slowest  # noqa: E402

from bucketwheel.comm import shm  # noqa: E402
from bucketwheel.comm.backends import LocalWorld  # noqa: E402
from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest  # noqa: E402
from bucketwheel.comm.communicator import Communicator  # noqa: E402
from bucketwheel.kernels.ops import all_gather, reduce_scatter  # noqa: E402
from bucketwheel.testing import run_threads  # noqa: E402
from tests.support import simulated_cuda, simulated_nccl  # noqa: E402

COALESCED, NUMEL = 8, 256
CALLS, WARM_UP = 20, 3
LIMIT_S = 5e-6
HOLD_S = 0.004  # of a stream that is busy: longer than all calls of a sample
BUSY = ", stream busy"
CASES = ("all_gather", "all_gather, prepared", "reduce_scatter", "reduce_scatter, prepared")
PARTS = ("empty lists", "native", "versions")

Case = Callable[[], Any]  # what it returns is waited for by calling it


class Tensors:
    """In the communicator's pool: nothing is copied through staging buffers."""

    def __init__(self, comm: Communicator) -> None:
        new = lambda numel: comm.pool.acquire("", 4 * numel).tensor(torch.float32, (numel,)).fill_(1.0)  # noqa: E731
        self.fulls = [new(comm.size * NUMEL) for _ in range(COALESCED)]
        self.shards = [new(NUMEL) for _ in range(COALESCED)]


def cases_of(comm: Communicator) -> dict[str, Case]:
    tensors = Tensors(comm)
    fulls, shards = tensors.fulls, tensors.shards
    gather, reduce = AllGatherRequest(fulls, shards, comm), ReduceScatterRequest(shards, fulls, comm)
    native = comm._native.all_gather
    nothing = lambda: None  # noqa: E731
    told = lambda _: nothing  # noqa: E731
    return {
        "all_gather": lambda: all_gather(fulls, shards, comm).synchronize,
        "all_gather, prepared": lambda: gather.start().synchronize,
        "reduce_scatter": lambda: reduce_scatter(shards, fulls, comm).synchronize,
        "reduce_scatter, prepared": lambda: reduce.start().synchronize,
        "empty lists": lambda: all_gather([], [], comm).synchronize,
        "native": lambda: native(fulls, shards, None, [], False).synchronize,
        "versions": lambda: told(torch.autograd.graph.increment_version(fulls)),
    }


def gloo_cases() -> dict[str, Case]:
    manager = dist.distributed_c10d._coalescing_manager
    gather, scatter = collectives_of_torch()
    world = dist.get_world_size()
    fulls = [torch.ones(world * NUMEL) for _ in range(COALESCED)]
    shards = [torch.ones(NUMEL) for _ in range(COALESCED)]

    def gathers() -> Any:
        with manager(async_ops=True) as manages:
            for full, shard in zip(fulls, shards, strict=True):
                gather(full, shard)
        return manages.wait

    def reduces() -> Any:
        with manager(async_ops=True) as manages:
            for full, shard in zip(fulls, shards, strict=True):
                scatter(shard, full)
        return manages.wait

    return {"gloo all_gather": gathers, "gloo reduce_scatter": reduces}


def measure_calls(cases: Mapping[str, Case], repeats: int, comm: Communicator) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name + state: [] for name in cases for state in ("", BUSY)}
    for repeat in range(WARM_UP + repeats):
        for name in rotation(list(samples), repeat):
            case, is_busy = cases[name.removesuffix(BUSY)], name.endswith(BUSY)
            if is_busy:
                comm.stream.pause(HOLD_S)
                time.sleep(HOLD_S / 10)  # until its thread is in there
            times, waits = [], []
            for _ in range(CALLS):
                begin = time.perf_counter()
                wait = case()
                times.append(time.perf_counter() - begin)
                waits.append(wait) if is_busy else wait()
            for wait in waits:
                wait()
            if repeat >= WARM_UP:
                samples[name].append(statistics.fmean(times))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def expect_right(comm: Communicator) -> None:
    tensors = Tensors(comm)
    all_gather(tensors.fulls, tensors.shards, comm).synchronize()
    reduce_scatter(tensors.shards, tensors.fulls, comm).synchronize()
    for shard in tensors.shards:
        if not torch.equal(shard, torch.full((NUMEL,), float(comm.size))):
            raise RuntimeError(f"{comm.backend}: ones must add up to the number of ranks")


# ---- each in a process of its own


def on_shm(rank: Rank, repeats: int) -> dict[str, Timing]:
    with Communicator(backend="shm") as comm:
        expect_right(comm)
        return measure_calls(cases_of(comm), repeats, comm)


def on_gloo(rank: Rank, repeats: int) -> dict[str, Timing]:
    warnings.filterwarnings("ignore", category=FutureWarning)
    with Communicator(backend="shm") as comm:  # its stream is what is held up
        return measure_calls(gloo_cases(), repeats, comm)


def on_local(rank: Rank, repeats: int) -> dict[str, Timing]:
    with Communicator(backend="local") as comm:
        expect_right(comm)
        return measure_calls(cases_of(comm), repeats, comm)


def on_local_pair(rank: Rank, repeats: int) -> dict[str, Timing]:
    """One thread issues for both ranks, and the call of the second is timed: nothing else runs in Python meanwhile."""
    world = LocalWorld(2)
    both = run_threads(lambda rank, _: Communicator(world.rank(rank)), 2)
    run_threads(lambda rank, _: expect_right(both[rank]), 2)
    firsts, seconds = (cases_of(comm) for comm in both)

    def paired(name: str) -> Case:
        def call() -> Any:
            wait = seconds[name]()
            return lambda: (firsts[name]()(), wait())

        return call

    timings = measure_calls({name: paired(name) for name in seconds}, repeats, both[1])
    for comm in both:
        comm.close()
    return timings


def on_agreement(rank: Rank, repeats: int) -> Timing:
    """Of ranks that do not share a host, by gloo: one round of 100 bytes."""

    def not_one_host(*_: Any) -> Any:
        raise shm.NotOneHost("")

    simulated_nccl.install()
    with mock.patch.object(shm, "connect", not_one_host), simulated_cuda.posing(delays=0):
        with Communicator(backend="nccl", device="cuda") as comm:
            samples = []
            for _ in range(WARM_UP + repeats):
                begin = time.perf_counter()
                comm.exchange(bytes(100))
                samples.append(time.perf_counter() - begin)
            return Timing(tuple(samples[WARM_UP:]))


def on_nccl(rank: Rank, repeats: int) -> dict[str, Timing]:
    simulated_nccl.install()
    with simulated_cuda.posing(delays=0), Communicator(backend="nccl", device="cuda") as comm:
        expect_right(comm)
        with simulated_nccl.counting():
            return measure_calls(cases_of(comm), repeats, comm)


def on_simulated_device(rank: Rank, repeats: int) -> dict[str, Timing]:
    simulated_nccl.install()
    with simulated_cuda.posing(delays=0), Communicator(backend="nccl", device="cuda") as comm:
        expect_right(comm)
        return measure_calls(cases_of(comm), repeats, comm)


BACKENDS: dict[str, tuple[int, Callable[..., Any]]] = {
    "shm, 2 ranks": (2, on_shm),
    "local, 1 rank": (1, on_local),
    "local, 2 ranks": (1, on_local_pair),
    "nccl (fake), 1 rank": (1, on_nccl),
    "nccl (fake, simulated device), 1 rank": (1, on_simulated_device),
}


def main() -> None:
    args = parse_args(__doc__)
    results = Results("calls", args.json)
    simulated_cuda.build()
    simulated_nccl.build()
    repeats = 15 if args.quick else 60

    def measured(world: int, function: Callable[..., Any]) -> dict[str, Timing]:
        by_rank = run_ranks(world, function, repeats).values
        return {case: slowest([one[case] for one in by_rank]) for case in by_rank[0]}

    gloo = measured(2, on_gloo)
    for backend, (world, function) in BACKENDS.items():
        timings = measured(world, function)
        for case in [case + state for case in (*CASES, *PARTS) for state in ("", BUSY)]:
            peer = f"gloo {case.split(',')[0]}" if case.removesuffix(BUSY) in CASES else None
            ours = timings[case]
            line = results.add(
                f"{backend}: {case}", ours, peer=peer, peer_timing=gloo[peer] if peer else None,
                limit_s=LIMIT_S if peer else None, us=round(1e6 * ours.median_s, 2),
            )  # fmt: skip
            beside = f"{1e6 * line['peer_s']:8.1f} us on {peer}" if peer else ""
            print(
                f"{line['case']:60}{line['us']:8.2f} us, spread {100 * line['spread']:3.0f} % {beside}".rstrip(),
                flush=True,
            )
    round_ = slowest(run_ranks(2, on_agreement, 100).values)
    print(f"{'agreement between hosts, 2 ranks: a round of 100 bytes':60}{1e6 * round_.median_s:8.2f} us", flush=True)


if __name__ == "__main__":
    main()
