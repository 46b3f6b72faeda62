"""``bucketwheel plan TRACE``: the memory of a recorded step as `Pool.plan` places it, and as others do.

TRACE is what `Trace.save` wrote, a memory snapshot of torch.cuda or a table of intervals (CSV); its content tells
which. Exit status: 0; 1 if TRACE cannot be read, or ``--policy`` has no placement. `read` looks, `replay` places,
`facts` and `render` tell, `tetris.drawn` draws.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketwheel.tools import tetris

if TYPE_CHECKING:  # doctor also runs where these cannot be imported
    from bucketwheel.pool.placement import Placement
    from bucketwheel.pool.plan import Plan
    from bucketwheel.pool.trace import Lifetimes

_LISTED_KEYS = 20
_POLICIES = "place, double_buffer, fixed_pool, max_pool, slot_coloring, best_fit"  # for --help, which imports no torch


@dataclass(frozen=True)
class Replay:
    """What `place` and the policies make of a trace."""

    lifetimes: Lifetimes
    plan: Plan
    results: dict[str, tuple[Placement | str, float]]  # by policy: a placement or why there is none, and milliseconds

    def placement(self, policy: str) -> Placement:
        """ValueError if the policy has none."""
        found = self.results.get(policy, (f"unknown; there are {', '.join(self.results)}", 0.0))[0]
        if isinstance(found, str):
            raise ValueError(f"policy {policy!r}: {found}")
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSONL of a pool, pickle of torch, or CSV")
    text = f"also list the offsets of this policy, and draw it beside ours, which is place: {_POLICIES}"
    parser.add_argument("--policy", default="", metavar="NAME", help=text)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw offsets over the events of the trace")
    parser.add_argument("--json", action="store_true", help="one object of JSON instead of text, sizes in bytes")
    parser.add_argument(
        "--slack", action="append", default=[], metavar="ROLE=N", help="reserve a key for N more acquires of its role"
    )
    parser.add_argument("--align", type=int, help="alignment of offsets in bytes; default: the trace's, or 512")
    parser.add_argument("--effort", type=int, default=20_000, help="how many places the search may try")
    parser.add_argument("--device", type=int, help="index of the device, for a snapshot of several devices")


def main(options: argparse.Namespace) -> int:
    try:
        if options.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'bucketwheel[plot]'")
        name, lifetimes, align, where = read(options.trace, options.device, _slack(options.slack))
        found = replay(name, lifetimes, align if options.align is None else options.align, options.effort)
        told = facts(found, options.policy)
        if options.plot:
            tetris.drawn(found, options.policy or "place").savefig(options.plot, dpi=150)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(told) if options.json else render(told, where))
    return 0


def _slack(options: list[str]) -> dict[str, int]:
    found = {}
    for option in options:
        role, _, count = option.rpartition("=")
        if not role or not count.isdecimal():
            raise ValueError(f"--slack is {option!r}, expected ROLE=N")
        found[role] = int(count)
    return found


def read(
    path: Path, device: int | None = None, slack: Mapping[str, int] | None = None
) -> tuple[str, Lifetimes, int, dict[str, str]]:
    """Of the trace in a file the name, the lifetimes (whose ``keys`` are None for a snapshot), the alignment, and by key the
    place in the code of the last acquire. ValueError naming file and record for a bad one."""
    from bucketwheel.pool import foreign_traces
    from bucketwheel.pool.trace import Trace

    first = foreign_traces.first_byte(path)
    if first not in (b"\x80", b"{"):  # of a pickle since protocol 2, and of JSON
        found = foreign_traces.from_csv(path)
        return path.name, found.with_slack(slack) if slack else found, 512, {}
    trace = Trace.load(path) if first == b"{" else foreign_traces.from_snapshot(path, device)
    found = trace.lifetimes(slack)
    where = {event.key: event.where for event in trace.events if event.where and event.key}
    return trace.name, found if first == b"{" else replace(found, keys=None), trace.align, where


def replay(name: str, found: Lifetimes, align: int, effort: int = 20_000) -> Replay:
    from bucketwheel.pool.plan import Plan
    from bucketwheel.pool.policies import MANY_LIFETIMES, POLICIES

    clock = time.perf_counter
    lifetimes = sum(map(len, found.intervals.values()))
    began = clock()
    plan = Plan.of(name, found.sizes, found.intervals, keys=found.keys, align=align, effort=effort)
    results: dict[str, tuple[Placement | str, float]] = {"place": (plan.placement, 1e3 * (clock() - began))}
    keys, why = found.keys, "cannot hold these sizes" if found.keys else "needs roles"
    if keys and lifetimes > MANY_LIFETIMES:
        keys, why = None, f"not tried for more than {MANY_LIFETIMES:,} lifetimes"
    for policy, rule in POLICIES.items():
        began = clock()
        placement = rule(plan.sizes, plan.intervals, keys=keys, align=align)
        results[policy] = placement or why, 1e3 * (clock() - began)
    return Replay(found, plan, results)


def facts(replay: Replay, policy: str = "") -> dict[str, Any]:
    """All that is to be told, as values that JSON can hold; with the offsets of ``policy``."""
    plan, lifetimes = replay.plan, replay.lifetimes
    event, keys = plan.peak()
    rows: dict[str, Any] = {}
    for name, (found, ms) in replay.results.items():
        if isinstance(found, str):
            rows[name] = {"none": found}
            continue
        rows[name] = {
            "total_bytes": found.total_bytes,
            "over_load": found.total_bytes / plan.load_bytes - 1 if plan.load_bytes else 0.0,
            "saved_bytes": found.total_bytes - plan.total_bytes,
            "proven_optimal": found.proven_optimal,
            "ms": round(ms, 2),
        }
    told = {
        "trace": plan.name,
        "keys": len(lifetimes.sizes),
        "lifetimes": sum(map(len, lifetimes.intervals.values())),
        "events": lifetimes.steps,
        "align": plan.align,
        "load_bytes": plan.load_bytes,
        "unnamed_bytes": lifetimes.unnamed_bytes,
        "peak": {"event": event, "keys": {key: lifetimes.sizes[key] for key in keys}},
        "policies": rows,
    }
    if policy:
        told["offsets"] = dict(sorted(replay.placement(policy).offsets.items(), key=lambda item: item[1]))
    return told


def render(told: Mapping[str, Any], where: Mapping[str, str]) -> str:
    lines = [
        f"{told['trace']}: {told['keys']:,} keys, {told['lifetimes']:,} lifetimes, {told['events']:,} events",
        f"at least {mib(told['load_bytes'])} MiB: the load, of offsets that are multiples of {told['align']} bytes",
    ]
    if told["unnamed_bytes"]:
        lines.append(f"and at most {mib(told['unnamed_bytes'])} MiB at once of unnamed leases, which no plan places")
    lines += ["", f"{'policy':14} {'MiB':>12} {'over load':>10} {'saved MiB':>12} {'proven':>7} {'ms':>10}"]
    for name, row in told["policies"].items():
        if "none" in row:
            lines.append(f"{name:14} {row['none']}")
            continue
        proven = "yes" if row["proven_optimal"] else ""
        lines.append(
            f"{name:14} {mib(row['total_bytes']):>12} {100 * row['over_load']:>8.1f} % {mib(row['saved_bytes']):>12} "
            f"{proven:>7} {row['ms']:>10.1f}"
        )
    keys = told["peak"]["keys"]
    lines += ["", f"at event {told['peak']['event']:,} most memory is live, {len(keys):,} keys, in MiB:"]
    for key, nbytes in list(keys.items())[:_LISTED_KEYS]:
        lines.append(f"{mib(nbytes):>12}  {key}  {where.get(key, '')}".rstrip())
    if len(keys) > _LISTED_KEYS:
        lines.append(f"{mib(sum(list(keys.values())[_LISTED_KEYS:])):>12}  in {len(keys) - _LISTED_KEYS:,} more")
    if "offsets" in told:
        lines += ["", f"{'offset, MiB':>12}  key", *(f"{mib(at):>12}  {key}" for key, at in told["offsets"].items())]
    return "\n".join(lines)


def mib(nbytes: int) -> str:
    """To a hundredth; of less than one, to half a KiB."""
    return f"{nbytes / 2**20:,.{4 if 0 < abs(nbytes) < 2**20 else 2}f}"
