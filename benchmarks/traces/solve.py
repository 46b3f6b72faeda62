"""Whether the keys of a case of shapes.py fit into so many bytes, by a constraint solver: one thread of CP-SAT.

    pip install ortools
    python benchmarks/traces/solve.py SHAPE DEPTH GRAD_BYTES TOTAL_BYTES [--steps FIRST LAST] [--limit-s 900]

With --steps only the keys that are live in one of these steps: what they need, all need.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from math import gcd

from ortools.sat.python import cp_model
from shapes import Interval, case_of

ALIGN = 512


def meet(a: list[Interval], b: list[Interval]) -> bool:
    return any(start < other[1] and other[0] < stop for start, stop in a for other in b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("depth", type=int)
    parser.add_argument("grad_bytes", type=int)
    parser.add_argument("total_bytes", type=int)
    parser.add_argument("--steps", type=int, nargs=2, metavar=("FIRST", "LAST"))
    parser.add_argument("--limit-s", type=float, default=900)
    args = parser.parse_args()
    case = case_of(args.shape, args.depth, args.grad_bytes)
    live = case.intervals
    keys = [key for key in live if not args.steps or meet(live[key], [(args.steps[0], args.steps[1] + 1)])]
    sizes = {key: -(-case.sizes[key] // ALIGN) * ALIGN for key in keys}

    unit = gcd(*sizes.values())  # in the smallest arena each offset is a sum of sizes
    model = cp_model.CpModel()
    offsets = {key: model.new_int_var(0, (args.total_bytes - size) // unit, "") for key, size in sizes.items()}
    for a, b in combinations(keys, 2):
        if meet(live[a], live[b]):
            is_below = model.new_bool_var("")
            model.add(offsets[a] + sizes[a] // unit <= offsets[b]).only_enforce_if(is_below)
            model.add(offsets[b] + sizes[b] // unit <= offsets[a]).only_enforce_if(~is_below)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = args.limit_s
    solver.parameters.num_workers = 1
    answer = {cp_model.INFEASIBLE: "do not fit", cp_model.UNKNOWN: "nothing found"}.get(solver.solve(model), "fit")
    print(f"{case.name}: {len(keys)} keys, {args.total_bytes:,} bytes: {answer} ({solver.wall_time:.0f} s)")


if __name__ == "__main__":
    main()
