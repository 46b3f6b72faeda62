"""Ranks for benchmarks: start a job of fresh processes, collect its answers, sample its memory from outside.

Memory is the proportional set size: a page shared by k processes counts 1/k in each, so the sum over the ranks is true.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Memory", "Rank", "RankRun", "pss", "run_ranks"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Memory:
    """Proportional set size in bytes: a page shared by k processes counts 1/k in each, so the sum over ranks is true.

    What of the total is neither anonymous nor shared memory is files (shared libraries) and depends on how many processes
    of the machine map the same ones.
    """

    total_bytes: int = 0
    anon_bytes: int = 0
    shmem_bytes: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.total_bytes + other.total_bytes,
            self.anon_bytes + other.anon_bytes,
            self.shmem_bytes + other.shmem_bytes,
        )


def pss(pid: int | str = "self") -> Memory:
    """The proportional set size of one process now, from /proc/<pid>/smaps_rollup."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            fields[words[0].rstrip(":")] = int(words[1]) * 1024
    return Memory(fields["Pss"], fields["Pss_Anon"], fields["Pss_Shmem"])


class _PeakSampler:
    """Samples the sum over the ranks' memory while `window` is set; runs in the parent, so the ranks are not slowed by it."""

    def __init__(self, pids: Sequence[int], window: Any, interval_s: float) -> None:
        self.peak = Memory()
        self.samples = 0
        self._pids, self._window, self._interval_s = pids, window, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            if not self._window.is_set():
                continue
            try:
                now = sum((pss(pid) for pid in self._pids), Memory())
            except (OSError, KeyError):  # a rank has just ended
                continue
            self.samples += 1
            if now.total_bytes > self.peak.total_bytes:
                self.peak = now

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)


@dataclass(frozen=True)
class Rank:
    """What a rank's function gets as its first argument. The process group (gloo, 127.0.0.1) is up."""

    rank: int
    world: int
    window: Any

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    @contextlib.contextmanager
    def memory_window(self) -> Iterator[None]:
        """Memory is sampled from the first rank's entry until the last rank's exit; all ranks must enter."""
        self.barrier()
        self.window.set()
        try:
            yield
            self.barrier()
        finally:
            self.window.clear()


@dataclass(frozen=True)
class RankRun:
    """Results of one job: the functions' return values by rank, and the peak memory summed over the ranks in the window."""

    values: list[Any]
    peak: Memory
    memory_samples: int


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    threads: int = 1,
    timeout_s: float = 600.0,
    sample_every_s: float = 0.004,
) -> RankRun:
    """Run `function(rank: Rank, *args)` in `world` fresh processes with gloo on 127.0.0.1; return what they return.

    `function` must be importable (module level) and its results picklable. A rank that raises, or a job that outlives
    `timeout_s`, ends all ranks and raises RuntimeError with the rank's traceback.
    """
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    window, answers = context.Event(), context.Queue()
    with tempfile.TemporaryDirectory(prefix="bw-bench-") as folder:
        job = (window, answers, f"file://{folder}/store", threads, function, args)
        processes = [context.Process(target=_rank_main, args=(rank, world, *job), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        sampler = _PeakSampler([p.pid for p in processes], window, sample_every_s)
        try:
            values = _collect(processes, answers, time.monotonic() + timeout_s)
            for process in processes:
                process.join(timeout=30)
        finally:
            sampler.close()
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join(timeout=10)
    return RankRun(values, sampler.peak, sampler.samples)


def _collect(processes: Sequence[Any], answers: Any, deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        try:
            rank, error, value = answers.get(timeout=0.5)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if r not in values and p.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(f"rank {dead[0]} died with exit code {processes[dead[0]].exitcode}") from None
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(processes))) - set(values))
                raise RuntimeError(f"ranks {missing} did not finish in time") from None
            continue
        if error is not None:
            raise RuntimeError(f"rank {rank} failed:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(len(processes))]


def _rank_main(
    rank: int, world: int, window: Any, answers: Any, store: str, threads: int, function: Callable[..., Any], args: Any
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted benchmark leaves no rank behind
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        value = function(Rank(rank, world, window), *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
        raise
    answers.put((rank, None, value))
