"""POLICIES: each lays buffers out by its rule, never below the load and never better than `place`."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bucketwheel.pool.placement import PlanKey, place
from bucketwheel.pool.policies import POLICIES
from tests.unit.test_placement import Intervals, Sizes, assert_holds, problems

Keys = dict[Hashable, PlanKey]


@st.composite
def described_problems(draw: st.DrawFn) -> tuple[Sizes, Intervals, Keys]:
    sizes, intervals = draw(problems(most=16, steps=24))
    if draw(st.booleans()):  # few sizes, as models have them
        sizes = {key: 512 * (1 + size % 4) for key, size in sizes.items()}
    role, dtype = st.sampled_from(["weight", "grad"]), st.sampled_from(["bf16", "fp32"])
    keys = {key: PlanKey(draw(role), draw(st.integers(0, 5)), draw(st.integers(0, 1)), draw(dtype)) for key in sizes}
    return sizes, intervals, keys


def chain(sizes: list[int], stay: int = 2) -> tuple[Sizes, Intervals, Keys]:
    """A bucket of each unit, that stays for so many steps, one unit a step."""
    keys = {f"weight/{unit}": PlanKey("weight", unit, 0, "bf16") for unit in range(len(sizes))}
    return dict(zip(keys, sizes, strict=True)), {key: [(of.unit, of.unit + stay)] for key, of in keys.items()}, keys


@settings(max_examples=300)
@given(described_problems())
@example(chain([512, 1024, 512, 1024]))
@example(chain([512] * 6, stay=3))
def test_no_policy_is_better_than_place(problem: Any) -> None:
    sizes, intervals, keys = problem
    ours = place(sizes, intervals, keys=keys)
    for name, policy in POLICIES.items():
        found = policy(sizes, intervals, keys=keys)
        if found is not None:
            assert_holds(found, sizes, intervals, 512)
            assert ours.total_bytes <= found.total_bytes, name
            assert found.load_bytes == ours.load_bytes


@given(described_problems(), st.randoms(use_true_random=False))
def test_policies_do_not_depend_on_the_order_of_dicts(problem: Any, chosen: random.Random) -> None:
    sizes, intervals, keys = problem
    order = list(sizes)
    chosen.shuffle(order)
    moved = {key: sizes[key] for key in order}, {key: intervals[key] for key in sorted(sizes, key=repr)}
    for name, policy in POLICIES.items():
        assert policy(*moved, keys={key: keys[key] for key in order}) == policy(sizes, intervals, keys=keys), name


def totals(sizes: Sizes, intervals: Intervals, keys: Keys | None) -> dict[str, int | None]:
    found = {name: policy(sizes, intervals, keys=keys, align=1) for name, policy in POLICIES.items()}
    return {name: one if one is None else one.total_bytes for name, one in found.items()}


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        # Two live at once, of one size: all take two buffers.
        (chain([4] * 6), dict.fromkeys(POLICIES, 8)),
        # Three live at once: two buffers do not do.
        (chain([4] * 6, stay=3), {**dict.fromkeys(POLICIES, 12), "double_buffer": None}),
        # A large unit among equal ones: fixed_pool adds it to its two, max_pool enlarges every second buffer.
        (
            chain([4, 4, 10, 4, 4, 4]),
            {"double_buffer": None, "fixed_pool": 18, "max_pool": 14, "slot_coloring": 14, "best_fit": 18},
        ),
        # Small after large: a slot of 10 is all that is free for a key of 4, and 6 of it are lost.
        (
            ({"a": 10, "b": 4, "c": 6}, {"a": [(0, 1)], "b": [(1, 2)], "c": [(1, 2)]}, None),
            {**dict.fromkeys(POLICIES, None), "best_fit": 10},
        ),
    ],
    ids=["even", "three", "odd", "no keys"],
)
def test_totals_by_rule(problem: Any, expected: dict[str, int | None]) -> None:
    assert totals(*problem) == expected


def test_a_slot_serves_one_role_and_dtype() -> None:
    sizes: Sizes = {"w": 8, "g": 8, "h": 8}
    intervals: Intervals = {"w": [(0, 1)], "g": [(1, 2)], "h": [(2, 3)]}
    keys: Keys = {
        key: PlanKey(role, 0, 0, dtype)
        for key, role, dtype in [("w", "weight", "bf16"), ("g", "grad", "bf16"), ("h", "grad", "fp32")]
    }
    assert totals(sizes, intervals, keys) == {**dict.fromkeys(POLICIES, 24), "best_fit": 8}


def test_max_pool_pairs_buckets_by_their_rank() -> None:
    sizes: Sizes = {
        (unit, position): size
        for unit, both in enumerate([(9, 2), (3, 8), (7, 1)])
        for position, size in enumerate(both)
    }
    intervals: Intervals = {key: [(key[0], key[0] + 1)] for key in sizes}
    keys: Keys = {key: PlanKey("weight", *key, "bf16") for key in sizes}
    assert totals(sizes, intervals, keys)["max_pool"] == 9 + 3


def test_best_fit_takes_the_smallest_range_that_is_free_each_time() -> None:
    sizes: Sizes = {"wide": 6, "wall": 1, "narrow": 4, "lid": 1, "twice": 4}
    intervals: Intervals = {
        "wide": [(0, 5)],
        "wall": [(1, 9)],
        "narrow": [(2, 5)],
        "lid": [(3, 9)],
        "twice": [(5, 6), (7, 8)],
    }
    best_fit = POLICIES["best_fit"]
    found = best_fit(sizes, intervals, align=1)
    assert found is not None
    assert found.offsets["twice"] == found.offsets["narrow"] == 7
    sizes["late"], intervals["late"] = 4, [(5, 7)]  # at its first start it has what "twice" would take
    again = best_fit(sizes, intervals, align=1)
    assert again is not None
    assert {again.offsets["late"], again.offsets["twice"]} == {0, 7}
    assert again.total_bytes == 12
