"""What every benchmark shares: interleaved timing, JSON-lines results and the machine's limits; ranks come from
ranks.py.

A benchmark checks that the systems agree, measures them interleaved in one process or job, and writes one JSON line per
case and peer. A sample is a wall time in seconds; a result is the median of its samples with
spread = (75th - 25th percentile) / median. Ratios are always peer / ours, so more than 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranks import Memory, Rank, RankRun, pss, run_ranks

__all__ = [
    "Memory",
    "Rank",
    "RankRun",
    "Results",
    "Timing",
    "command",
    "commit",
    "keep_freed_memory",
    "load_native",
    "machine",
    "measure",
    "memcpy_s",
    "of_job",
    "on_threads",
    "parse_args",
    "pss",
    "rotation",
    "run_ranks",
    "slowest",
]

HERE = Path(__file__).resolve().parent
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


def parse_args(description: str, configure: Callable[[argparse.ArgumentParser], None] | None = None) -> Any:
    """The command line of every benchmark: `--quick` (at most 60 s) and `--json PATH`, plus what `configure` adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats, at most 60 s")
    parser.add_argument("--json", metavar="PATH", type=Path, help="append one JSON line per result to PATH")
    if configure is not None:
        configure(parser)
    return parser.parse_args()


def collectives_of_torch() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The all-gather and reduce-scatter of one tensor, by the names that the installed torch does not warn about."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return gather, scatter


# ---------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Timing:
    """Samples of one callable, in seconds per call, in the order they were taken."""

    samples_s: tuple[float, ...]
    begins_s: tuple[float, ...] = ()  # when each began, by the clock that the processes of a host share
    calls: int = 1  # in each sample

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """(75th - 25th percentile) / |median|; 0 for a single sample."""
        if len(self.samples_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return (high - low) / abs(self.median_s) if self.median_s else math.inf

    def minus(self, other: Timing) -> Timing:
        """Paired differences: sample i of this minus sample i of `other`."""
        return Timing(tuple(a - b for a, b in zip(self.samples_s, other.samples_s, strict=True)))


def slowest(timings: Sequence[Timing]) -> Timing:
    """The job's samples from the ranks' samples: a step of a job ends when its last rank ends."""
    return Timing(tuple(max(row) for row in zip(*(t.samples_s for t in timings), strict=True)))


def of_job(timings: Sequence[Timing]) -> Timing:
    """The job's samples from the ranks' samples: each from the begin of its first rank to the end of its last one. Where
    ranks outnumber cores, what a rank waits for a core before it begins counts too."""
    samples = []
    for rows in zip(*(zip(t.begins_s, t.samples_s, strict=True) for t in timings), strict=True):
        begin_s = min(begin for begin, _ in rows)
        end_s = max(begin + sample * timings[0].calls for begin, sample in rows)
        samples.append((end_s - begin_s) / timings[0].calls)
    return Timing(tuple(samples))


def rotation(names: Sequence[str], repeat: int) -> list[str]:
    """The order in which repeat number `repeat` runs the cases.

    Over 2 * len(names) repeats each case comes at each place equally often, and after its neighbour as often as before
    it.
    """
    shift = repeat % len(names)
    order = [*names[shift:], *names[:shift]]
    return order if repeat // len(names) % 2 == 0 else order[::-1]


def measure(
    cases: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 15,
    warmup: int = 2,
    min_sample_s: float = 0.0,
    inner: int = 1,
    budget_s: float = math.inf,
    before: Callable[[str], object] | None = None,
) -> dict[str, Timing]:
    """Time the callables interleaved: every repeat runs each case once, in rotated order.

    `inner` calls make one sample (their mean); `min_sample_s` raises it per case until a sample lasts that long.
    `before(name)` runs untimed before each sample: put a barrier or the preparation of inputs there. It runs once per
    sample, so a case that consumes its input needs `inner=1`. `budget_s` ends the repeats early, after at least 3.

    In a job of several ranks, all ranks must make the same calls: leave `min_sample_s` and `budget_s` alone there.
    """
    prepare = before or (lambda name: None)
    calls = {name: inner for name in cases}
    for _ in range(max(1, warmup)):
        for name, call in cases.items():
            prepare(name)
            _, elapsed = _timed(call, calls[name])
            if elapsed * 1.2 < min_sample_s:
                calls[name] = min(1_000_000, math.ceil(calls[name] * min_sample_s / max(elapsed, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in cases}
    begins: dict[str, list[float]] = {name: [] for name in cases}
    deadline = time.perf_counter() + budget_s
    for repeat in range(repeats):
        for name in rotation(list(cases), repeat):
            prepare(name)
            begin, elapsed = _timed(cases[name], calls[name])
            begins[name].append(begin)
            samples[name].append(elapsed / calls[name])
        if repeat >= 2 and time.perf_counter() > deadline:
            break
    return {name: Timing(tuple(samples[name]), tuple(begins[name]), calls[name]) for name in cases}


def _timed(call: Callable[[], object], count: int) -> tuple[float, float]:
    """When it began, and the seconds it took."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return begin, time.perf_counter() - begin


# --------------------------------------------------------------------------------------------------------- results


def commit() -> str:
    """The checked-out commit, with "-dirty" when tracked files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(HERE), *words], check=True, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """CPU model, cores, memory, torch version and its thread count, in one line."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu}, {cores} cores, {memory_gib:.0f} GiB, torch {torch.__version__}, {torch.get_num_threads()} threads"


def command() -> str:
    """What ran, as a user types it; the files it writes are left out."""
    words = ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    rest = iter(sys.argv[1:])
    for word in rest:
        if word in ("--json", "--plot"):
            next(rest, None)
        elif not word.startswith(("--json=", "--plot=")):
            words.append(word)
    return shlex.join(words)


@dataclass
class Results:
    """Collects the lines of one benchmark, appends them to `path` as they come, prints them as a table at the end."""

    bench: str
    path: Path | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    commit: str = field(default_factory=commit)
    command: str = field(default_factory=command)
    machine: str = field(default_factory=machine)

    def add(
        self,
        case: str,
        ours: Timing | None,
        *,
        peer: str | None = None,
        peer_timing: Timing | None = None,
        limit_s: float | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Add one line. `limit_s` is the time the machine's limit allows for the same work, measured in the same run.

        Values that were not measured are null. `extra` (bytes, memory, peer notes) is stored as it is.
        """
        ours_s = ours.median_s if ours else None
        peer_s = peer_timing.median_s if peer_timing else None
        line = {
            "bench": self.bench,
            "case": case,
            "ours_s": ours_s,
            "peer": peer,
            "peer_s": peer_s,
            "ratio": peer_s / ours_s if peer_s is not None and ours_s else None,
            "limit_s": limit_s,
            "of_limit": limit_s / ours_s if limit_s is not None and ours_s else None,
            "spread": ours.spread if ours else None,
            "peer_spread": peer_timing.spread if peer_timing else None,
            "samples": len(ours.samples_s) if ours else None,
            "commit": self.commit,
            "command": self.command,
            "machine": self.machine,
            **extra,
        }
        self.lines.append(line)
        if self.path is not None:
            with self.path.open("a") as out:
                out.write(json.dumps(line) + "\n")
        return line

    def print_table(self) -> None:
        """The lines as text: times in ms, `x peer` = ratio, `of limit` in percent."""
        head = ("case", "ours ms", "spread", "peer", "peer ms", "x peer", "limit ms", "of limit")
        rows = [head, *(_table_row(line) for line in self.lines)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        print(f"{self.bench}: commit {self.commit}, {self.machine}")
        for row in rows:
            cells = (
                c.ljust(w) if i in (0, 3) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            print("  " + "  ".join(cells).rstrip())
        sys.stdout.flush()


def _table_row(line: Mapping[str, Any]) -> tuple[str, ...]:
    def show(value: float | None, scale: float, digits: int, unit: str = "") -> str:
        return "-" if value is None else f"{value * scale:.{digits}f}{unit}"

    return (
        line["case"],
        show(line["ours_s"], 1e3, 3),
        show(line["spread"], 100, 0, " %"),
        line["peer"] or "-",
        show(line["peer_s"], 1e3, 3),
        show(line["ratio"], 1, 2),
        show(line["limit_s"], 1e3, 3),
        show(line["of_limit"], 100, 0, " %"),
    )


# ---------------------------------------------------------------------------------------------------------- limits


def load_native(name: str) -> ctypes.CDLL:
    """Compile benchmarks/<name> (one C++ file, for this machine's CPU) and load it; compiled again only when it
    changed.

    ctypes releases the interpreter lock during calls, so two threads may run two calls at once.
    """
    flags = ["-std=c++20", "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math"]
    flags += ["-shared", "-fPIC", "-pthread", "-fopenmp"]
    source = HERE / name
    key = hashlib.sha256(source.read_bytes() + " ".join(flags).encode() + platform.node().encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"bw-bench-{os.getuid()}-{key}" / f"{source.stem}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *flags, str(source), "-o", str(draft)], check=True)
        draft.replace(library)  # atomic: ranks that compile at once each publish the same bytes
    return ctypes.CDLL(str(library))


def memcpy_s(size_bytes: int, *, threads: int = 1, repeats: int = 9) -> float:
    """Median seconds to copy `size_bytes` with memcpy, split over `threads` threads that run at once."""
    source = (ctypes.c_char * size_bytes)()
    target = (ctypes.c_char * size_bytes)()
    ctypes.memset(source, 1, size_bytes)
    part = size_bytes // threads

    def copy(index: int) -> None:
        offset = index * part
        length = part if index < threads - 1 else size_bytes - offset
        ctypes.memmove(ctypes.addressof(target) + offset, ctypes.addressof(source) + offset, length)

    return measure({"memcpy": lambda: on_threads(copy, threads)}, repeats=repeats, min_sample_s=0.002)[
        "memcpy"
    ].median_s


def keep_freed_memory() -> None:
    """Makes glibc keep the top of its heap when that is freed. Otherwise it may go back to the system and be taken anew at
    the next step, page fault by page fault: 20 ms for the gradients of the GPT, or none, as its neighbours lie."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most it takes
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def on_threads(call: Callable[[int], object], threads: int) -> None:
    """Run call(0) .. call(threads - 1) at once and wait for all; the calling thread runs the first."""
    others = [threading.Thread(target=call, args=(index,)) for index in range(1, threads)]
    for thread in others:
        thread.start()
    call(0)
    for thread in others:
        thread.join()
