"""What a lease of the pool costs the thread that takes it and gives it back, and how small a plan makes an arena.

    python benchmarks/bench_pool.py [--quick] [--json PATH] [--part leases | placements]

Leases: a call is an acquire and its release of 1 MiB that the pool has, of 250 keys in turn, so no driver is called; a sample is
the mean of 1,000 of them. `native`: in C++, `pool_leases.cpp`; the limit is 300 ns, and 150 ns with a plan. `Python`:
through `bucketwheel.Pool`. `alone`: nothing else is live; `live`: 1,000 other leases are, with as many holes between
them; `fenced`: the next one takes the memory in a stream, behind the event that the last one was released with, which is
done; `traced`: while a trace is recorded; `planned`, `strict`: each key has its place. Peer: `torch.empty` of as many
bytes and its end, in Python.

Placements: `place` and the policies on the steps of traces/shapes.py and on random keys, as a table of arenas. It fails where
an arena exceeds 1.1 x its bound (the median: 1.03 x the load), where a policy is better, and where planning 240 keys takes
more than 1 s or 5,000 more than 10 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in map(str, (ROOT, ROOT / "tests", ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402
from harness import Results, Timing, measure, parse_args  # noqa: E402
from traces import shapes  # noqa: E402

import bucketwheel as bw  # noqa: E402
from bucketwheel.pool.placement import place  # noqa: E402
from bucketwheel.pool.policies import POLICIES  # noqa: E402
from tests.native.cmake import built  # noqa: E402

LEASES, LEASE_BYTES, STANDING = 1000, 1 << 20, 1000
KEYS = [f"grads/{number % 250}" for number in range(LEASES)]
NATIVE_LIMIT_S = {"planned": 150e-9, "strict": 150e-9}  # 300 ns for others


def in_native_code(samples: int) -> dict[str, Timing]:
    """Each sample in a process of its own: for a tenth of a second at a time, all may take 1.7 times as long, as where
    another machine's work is on the same core."""
    command = [str(built("pool_leases")), "1", str(LEASES)]
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(samples):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        for line in done.stdout.splitlines():
            case, seconds = line.split()
            found[case].append(float(seconds))
    return {case: Timing(tuple(values)) for case, values in found.items()}


def pool_with_plan(*, strict: bool) -> bw.Pool:
    pool = bw.Pool("host")
    with pool.trace("step") as trace:
        take(pool)
    pool.adopt(pool.plan(trace), strict=strict)
    return pool


def take(pool: bw.Pool) -> None:
    for key in KEYS:
        pool.acquire(key, LEASE_BYTES).release()
    pool.step_end()


def torch_memory() -> None:
    for _ in KEYS:
        torch.empty(LEASE_BYTES, dtype=torch.uint8)


def check(pool: bw.Pool) -> None:
    """The second time it takes no memory, waits for nothing and leaves nothing."""
    take(pool)
    before = pool.stats()
    take(pool)
    after = pool.stats()
    was = (before.live_leases, before.allocations, before.host_waits, before.divergences, before.acquires + LEASES)
    if was != (after.live_leases, after.allocations, after.host_waits, after.divergences, after.acquires):
        raise RuntimeError(f"{LEASES} leases, one after the other, took the pool from {before} to {after}")


def in_python(repeats: int) -> dict[str, Timing]:
    pools = {name: bw.Pool("host") for name in ("alone", "live", "traced")}
    pools |= {"planned": pool_with_plan(strict=False), "strict": pool_with_plan(strict=True)}
    both = [pools["live"].acquire("", 4096 * (1 + i % 7)) for i in range(2 * STANDING)]
    for lease in both[1::2]:
        lease.release()
    with pools["traced"].trace("leases"):
        for pool in pools.values():
            check(pool)
        cases: dict[str, Callable[[], object]] = {name: partial(take, pool) for name, pool in pools.items()}
        timings = measure({**cases, "torch": torch_memory}, repeats=repeats)
    return {case: Timing(tuple(sample / LEASES for sample in found.samples_s)) for case, found in timings.items()}


def add_leases(results: Results, repeats: int) -> None:
    for case, timing in in_native_code(4 * repeats).items():
        results.add(f"native, {case}", timing, limit_s=NATIVE_LIMIT_S.get(case, 300e-9))
    timings = in_python(repeats)
    peer = timings.pop("torch")
    for case, timing in timings.items():
        results.add(f"Python, {case}", timing, peer="torch.empty", peer_timing=peer, limit_s=2e-6)
    for line in results.lines:  # the table shows milliseconds
        print(f"{line['case']}: {line['ours_s'] * 1e9:.0f} ns, spread {line['spread'] * 100:.0f} %")


def add_placement(results: Results, name: str, request: tuple[Any, ...], limit_s: float, repeats: int) -> None:
    """Adds the line of one case: ``request`` is the sizes, the intervals and the keys or None."""
    sizes, intervals, keys = request
    timing = measure({"": lambda: place(sizes, intervals)}, repeats=repeats, warmup=1)[""]
    found = place(sizes, intervals)
    others = {policy: rule(sizes, intervals, keys=keys) for policy, rule in POLICIES.items()}
    results.add(
        name,
        timing,
        limit_s=limit_s,
        load_bytes=found.load_bytes,
        bound_bytes=found.bound_bytes,
        total_bytes=found.total_bytes,
        policies={policy: one.total_bytes for policy, one in others.items() if one is not None},
    )


def broken_promises(lines: Sequence[dict[str, Any]]) -> list[str]:
    broken = [f"{line['case']}: {line['ours_s']:.2f} s" for line in lines if line["ours_s"] > line["limit_s"]]
    for line in lines:
        case, total, best = line["case"], line["total_bytes"], min(line["policies"].values())
        if total > best:
            broken.append(f"{case}: a policy takes {best:,} bytes, place {total:,}")
        if total > 1.1 * line["bound_bytes"]:
            broken.append(f"{case}: {total / line['bound_bytes']:.3f} x the bound")
    median = statistics.median(line["total_bytes"] / line["load_bytes"] for line in lines)
    return [*broken, f"the median is {median:.3f} x the load"] if median > 1.03 else broken


def placement_row(line: dict[str, Any]) -> str:
    def share(total: int | None) -> str:
        return "-" if total is None else f"{total / line['load_bytes']:.3f}"

    proven = "yes" if line["total_bytes"] == line["bound_bytes"] else f"bound {share(line['bound_bytes'])}"
    cells = [line["case"], f"{line['load_bytes'] / 2**30:.2f}", share(line["total_bytes"]), proven]
    cells += [share(line["policies"].get(policy)) for policy in POLICIES]
    return "| " + " | ".join([*cells, f"{line['ours_s'] * 1e3:.0f}"]) + " |"


def add_placements(results: Results, repeats: int) -> None:
    for case in shapes.all_cases():
        add_placement(results, case.name, (case.sizes, case.intervals, case.keys), 1, repeats)
    for count, limit_s in ((240, 1), (5000, 10)):
        add_placement(results, f"{count} random keys", (*shapes.random_keys(count), None), limit_s, min(repeats, 3))
    lines = [line for line in results.lines if "load_bytes" in line]
    head = ["case", "load, GiB", "place", "proven", *POLICIES, "ms"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    print(*map(placement_row, lines), sep="\n")
    if broken := broken_promises(lines):
        raise SystemExit("\n".join(broken))


def main() -> None:
    args = parse_args(
        __doc__, lambda parser: parser.add_argument("--part", choices=("leases", "placements"), help="default: both")
    )
    results = Results("pool", args.json)
    if args.part != "placements":
        add_leases(results, repeats=7 if args.quick else 31)
        results.print_table()
    if args.part != "leases":
        add_placements(results, repeats=3 if args.quick else 7)


if __name__ == "__main__":
    main()
