"""benchmarks/: the order of the samples, their arithmetic, and what compare.py flags."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare  # noqa: E402
import harness  # noqa: E402
from harness import Timing  # noqa: E402


def test_samples_are_interleaved_and_each_case_has_every_neighbour() -> None:
    orders = ["".join(harness.rotation("abc", repeat)) for repeat in range(6)]
    for first, second in itertools.permutations("abc", 2):
        assert sum(first + second in order for order in orders) == 2
    log: list[str] = []
    cases = {name: (lambda name=name: log.append(name)) for name in "ab"}
    timings = harness.measure(cases, repeats=3, warmup=1, inner=2, before=lambda name: log.append(f"before {name}"))
    a, b = ["before a", "a", "a"], ["before b", "b", "b"]
    assert log == [*a, *b, *a, *b, *b, *a, *b, *a]
    assert {name: len(t.samples_s) for name, t in timings.items()} == {"a": 3, "b": 3}
    early = Timing((1.0, 2.0), begins_s=(10.0, 20.0), calls=2)  # ends at 12 and 24
    late = Timing((1.0, 1.0), begins_s=(12.0, 21.0), calls=2)  # waited for the core; ends at 14 and 23
    assert harness.of_job([early, late]).samples_s == (2.0, 2.0)
    assert Timing((5.0, 1.0, 3.0, 2.0, 4.0)).spread == pytest.approx((4.0 - 2.0) / 3.0)


def line(ours_s: float, peer_s: float | None, spread: float = 0.05) -> dict[str, object]:
    ratio = peer_s / ours_s if peer_s else None
    both = {"bench": "b", "case": "x", "peer": "torch" if peer_s else None, "peer_spread": 0.02}
    return {**both, "ours_s": ours_s, "peer_s": peer_s, "ratio": ratio, "spread": spread}


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([line(1.0, 2.0)], [line(1.2, 2.0)], "REGRESSION"),
        ([line(1.0, 2.0)], [line(1.04, 2.0)], "same"),
        ([line(1.0, 2.0)], [line(0.8, 2.0)], "gain"),
        ([line(1.0, 2.0)], [line(1.5, 3.0)], "same"),  # a slow day: the ratio counts
        ([line(1.0, None)], [line(1.5, None)], "REGRESSION"),
        ([line(1.0, 2.0, spread=0.3)], [line(1.2, 2.0)], "same"),
        ([line(s, 2.0) for s in (1.0, 1.0, 9.0)], [line(1.0, 2.0)], "same"),  # the median of repeated lines
    ],
)
def test_compare(old: list[dict[str, object]], new: list[dict[str, object]], verdict: str) -> None:
    assert [change.verdict for change in compare.compare(old, new)] == [verdict]
