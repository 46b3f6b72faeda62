"""Compare two result files of the benchmarks: `python benchmarks/compare.py OLD NEW`.

Lines match by (bench, case, peer); of several lines with one key the median counts. Where both files have a ratio
against the peer, the change is new ratio / old ratio: a machine that is slower that day is slower for the peer too.
Else it is old time / new time. Below 1 is slower. A change is a regression (or a gain) when it is larger than the
spread of either file. Exit status 1 if there is a regression.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Change", "compare", "read_lines"]

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """One matched case: `speed` = how many times faster the new file is, `tolerance` = the larger spread of the two."""

    key: Key
    measure: str  # "ratio" or "time"
    old: float
    new: float
    tolerance: float

    @property
    def speed(self) -> float:
        return self.new / self.old if self.measure == "ratio" else self.old / self.new

    @property
    def verdict(self) -> str:
        if self.speed < 1 / (1 + self.tolerance):
            return "REGRESSION"
        return "gain" if self.speed > 1 + self.tolerance else "same"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def compare(old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[Change]:
    """The changes of all cases that both files measured, in the order of the old file."""
    before, after = _by_key(old), _by_key(new)
    changes = []
    for key in before:
        if key not in after:
            continue
        for measure, field in (("ratio", "ratio"), ("time", "ours_s")):
            values = [_median(lines, field) for lines in (before[key], after[key])]
            if values[0] and values[1]:
                tolerance = max(_spread(before[key], measure), _spread(after[key], measure))
                changes.append(Change(key, measure, values[0], values[1], tolerance))
                break
    return changes


def _by_key(lines: Iterable[Mapping[str, Any]]) -> dict[Key, list[Mapping[str, Any]]]:
    table: dict[Key, list[Mapping[str, Any]]] = {}
    for line in lines:
        table.setdefault((line["bench"], line["case"], line["peer"] or "-"), []).append(line)
    return table


def _median(lines: list[Mapping[str, Any]], field: str) -> float | None:
    values = [line[field] for line in lines if line[field] is not None]
    return statistics.median(values) if values else None


def _spread(lines: list[Mapping[str, Any]], measure: str) -> float:
    """The spread of the time, and for a ratio the peer's too."""
    fields = ("spread", "peer_spread") if measure == "ratio" else ("spread",)
    return max((_median(lines, field) or 0.0 for field in fields if field in lines[0]), default=0.0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args(arguments)
    changes = compare(read_lines(options.old), read_lines(options.new))
    if not changes:
        print("no case is in both files")
    for change in changes:
        print(
            f"{change.verdict:10s}  x {change.speed:5.2f} of {change.measure}  spread {change.tolerance * 100:3.0f} %  "
            f"{change.old:.4g} -> {change.new:.4g}  {' | '.join(change.key)}"
        )
    return 1 if any(change.verdict == "REGRESSION" for change in changes) else 0


if __name__ == "__main__":
    sys.exit(main())
