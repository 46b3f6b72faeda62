"""What a lease of the pool costs the thread that takes it and gives it back.

    python benchmarks/bench_pool.py [--quick] [--json PATH]

A call is an acquire and its release of 1 MiB that the pool has, with a key of its own, so no driver is called; a sample is
the mean of 1,000 of them. `native`: in C++, `pool_leases.cpp`; the limit is 300 ns. `Python`: through `bucketwheel.Pool`;
the limit is 2 us. `alone`: nothing else is live; `live`: 1,000 other leases are, with as many holes between them;
`fenced`: the next one takes the memory in a stream, behind the event that the last one was released with, which is
done. Peer: `torch.empty` of as many bytes and its end, in Python.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in map(str, (ROOT, ROOT / "tests", ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402
from harness import Results, Timing, measure, parse_args  # noqa: E402

import bucketwheel as bw  # noqa: E402
from tests.native.cmake import built  # noqa: E402

LEASES, LEASE_BYTES, STANDING = 1000, 1 << 20, 1000
NATIVE_LIMIT_S, PYTHON_LIMIT_S = 300e-9, 2e-6


def in_native_code(samples: int) -> dict[str, Timing]:
    command = [str(built("pool_leases")), str(samples), str(LEASES)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found: dict[str, list[float]] = defaultdict(list)
    for line in done.stdout.splitlines():
        case, seconds = line.split()
        found[case].append(float(seconds))
    return {case: Timing(tuple(values)) for case, values in found.items()}


def python_cases() -> dict[str, Callable[[], object]]:
    pool, crowded = bw.Pool("host"), bw.Pool("host")
    both = [crowded.acquire("", 4096 * (1 + i % 7)) for i in range(2 * STANDING)]
    standing = both[::2]
    for lease in both[1::2]:
        lease.release()
    keys = [f"grads/{i}" for i in range(LEASES)]

    def take(taken: bw.Pool) -> None:
        for key in keys:
            taken.acquire(key, LEASE_BYTES).release()

    def torch_memory() -> None:
        for _ in keys:
            torch.empty(LEASE_BYTES, dtype=torch.uint8)

    def check(taken: bw.Pool, live: int) -> None:
        before = taken.stats()
        take(taken)
        after = taken.stats()
        if after.live_leases != live or after.slabs != before.slabs or after.acquires - before.acquires != LEASES:
            raise RuntimeError(f"{LEASES} leases, one after the other, took the pool from {before} to {after}")

    take(pool), take(crowded)
    check(pool, 0), check(crowded, len(standing))
    return {"alone": lambda: take(pool), "live": lambda: take(crowded), "torch": torch_memory}


def main() -> None:
    args = parse_args(__doc__)
    repeats = 7 if args.quick else 31
    results = Results("pool", args.json)
    for case, timing in in_native_code(repeats).items():
        results.add(f"native, {case}", timing, limit_s=NATIVE_LIMIT_S)
    timings = {
        case: Timing(tuple(sample / LEASES for sample in timing.samples_s))
        for case, timing in measure(python_cases(), repeats=repeats).items()
    }
    for case in ("alone", "live"):
        results.add(
            f"Python, {case}",
            timings[case],
            peer="torch.empty",
            peer_timing=timings["torch"],
            limit_s=PYTHON_LIMIT_S,
        )
    for line in results.lines:  # the table shows milliseconds
        print(f"{line['case']}: {line['ours_s'] * 1e9:.0f} ns, spread {line['spread'] * 100:.0f} %")
    results.print_table()


if __name__ == "__main__":
    main()
