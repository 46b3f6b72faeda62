"""benchmarks/: the arithmetic, the order of the samples, and what compare.py flags."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compare  # noqa: E402
import harness  # noqa: E402
from harness import Timing  # noqa: E402


def test_median_and_spread() -> None:
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert timing.median_s == 3.0
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Timing((1.0, 2.0)).median_s == 1.5
    assert Timing((7.0,)).spread == 0.0
    assert Timing((-4.0, -2.0, -3.0)).spread == pytest.approx(
        1 / 3
    )  # an overhead may be negative: its sign is no spread
    assert Timing((10.0, 30.0)).minus(Timing((9.0, 10.0))).samples_s == (1.0, 20.0)


def test_slowest_rank_counts_sample_by_sample() -> None:
    assert harness.slowest([Timing((1.0, 5.0)), Timing((2.0, 3.0))]).samples_s == (2.0, 5.0)


def test_a_job_lasts_from_its_first_begin_to_its_last_end() -> None:
    early = Timing((1.0, 2.0), begins_s=(10.0, 20.0), calls=2)  # ends at 12 and 24
    late = Timing((1.0, 1.0), begins_s=(12.0, 21.0), calls=2)  # waited for the core; ends at 14 and 23
    assert harness.of_job([early, late]).samples_s == (2.0, 2.0)
    timing = harness.measure({"x": lambda: None}, repeats=3, inner=4)["x"]
    assert timing.calls == 4
    assert sorted(timing.begins_s) == list(timing.begins_s)
    assert len(timing.begins_s) == 3
    assert harness.of_job([timing]).samples_s == pytest.approx(timing.samples_s)


def test_rotation_gives_every_case_every_place_and_every_neighbour() -> None:
    orders = ["".join(harness.rotation("abc", repeat)) for repeat in range(6)]
    assert orders == ["abc", "bca", "cab", "cba", "acb", "bac"]
    assert "".join(harness.rotation("abc", 6)) == orders[0]
    for first, second in itertools.permutations("abc", 2):
        assert sum(first + second in order for order in orders) == 2


def test_measure_interleaves_and_prepares_each_sample() -> None:
    log: list[str] = []
    cases = {name: (lambda name=name: log.append(name)) for name in "ab"}
    timings = harness.measure(cases, repeats=3, warmup=1, inner=2, before=lambda name: log.append(f"before {name}"))
    a, b = ["before a", "a", "a"], ["before b", "b", "b"]
    assert log == [*a, *b, *a, *b, *b, *a, *b, *a]
    assert {name: len(t.samples_s) for name, t in timings.items()} == {"a": 3, "b": 3}


# ------------------------------------------------------------------------------------------------------ compare.py


def line(case: str, ours_s: float | None, peer_s: float | None, spread: float = 0.05) -> dict[str, object]:
    ratio = peer_s / ours_s if ours_s and peer_s else None
    return {
        "bench": "b",
        "case": case,
        "peer": "torch" if peer_s else None,
        "ours_s": ours_s,
        "peer_s": peer_s,
        "ratio": ratio,
        "spread": spread,
        "peer_spread": 0.02,
    }


def verdicts(old: list[dict[str, object]], new: list[dict[str, object]]) -> list[tuple[str, str]]:
    return [(change.key[1], change.verdict) for change in compare.compare(old, new)]


def test_compare_flags_what_is_larger_than_the_spread() -> None:
    old = [line("slower", 1.0, 2.0), line("within", 1.0, 2.0), line("faster", 1.0, 2.0), line("gone", 1.0, 2.0)]
    new = [line("slower", 1.2, 2.0), line("within", 1.04, 2.0), line("faster", 0.8, 2.0), line("added", 1.0, 2.0)]
    assert verdicts(old, new) == [("slower", "REGRESSION"), ("within", "same"), ("faster", "gain")]


def test_compare_uses_ratios_where_there_are_peers_and_times_elsewhere() -> None:
    slow_day = compare.compare([line("x", 1.0, 2.0)], [line("x", 1.5, 3.0)])
    assert [(c.measure, c.verdict) for c in slow_day] == [("ratio", "same")]
    alone = compare.compare([line("x", 1.0, None)], [line("x", 1.5, None)])
    assert [(c.measure, c.verdict, c.speed) for c in alone] == [("time", "REGRESSION", pytest.approx(1 / 1.5))]


def test_compare_takes_the_larger_spread_and_the_median_of_repeated_lines() -> None:
    assert verdicts([line("x", 1.0, 2.0, spread=0.3)], [line("x", 1.2, 2.0)]) == [("x", "same")]
    old = [line("x", ours_s, 2.0) for ours_s in (1.0, 1.0, 9.0)]
    assert verdicts(old, [line("x", 1.0, 2.0)]) == [("x", "same")]
