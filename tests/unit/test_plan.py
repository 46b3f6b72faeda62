"""Plans as values: what they say, and how ranks compare them. Placements: test_placement.py."""

from __future__ import annotations

import dataclasses

import pytest

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import BudgetTooSmall, CrossRankMismatch
from bucketwheel.pool.placement import PlanKey
from bucketwheel.pool.plan import Plan, expect_equal_plans
from tests.support.comm_cases import run_local

SIZES = {"w/0": 4000, "w/1": 9000, "g/0": 600, "empty": 0}
INTERVALS = {"w/0": [(0, 2), (6, 8)], "w/1": [(1, 6)], "g/0": [(7, 9)], "empty": [(0, 9)]}
KEYS = {key: PlanKey(key[0], number, 0, "bf16") for number, key in enumerate(SIZES)}


def plan_of(name: str = "train", sizes: dict[str, int] = SIZES, **options: object) -> Plan:
    order = ["empty", "w/0", "w/1", "w/0", "g/0"]
    return Plan.of(name, sizes, INTERVALS, order=order, outlives=["empty"], **options)  # type: ignore[arg-type]


def test_a_plan_says_what_it_takes_and_why() -> None:
    plan = plan_of(keys=KEYS)
    assert (plan.total_bytes, plan.load_bytes, plan.gap) == (4096 + 9216 + 512, 13824, 0.0)
    assert plan.peak() == (1, ["w/1", "w/0", "empty"])
    assert Plan.of("one step", {"a": 8, "b": 1}, {"a": [(0, 3)], "b": [(1, 2)]}).peak() == (1, ["a", "b"])
    text = plan.explain()
    assert (
        "13,824 bytes for 4 keys and 5 lifetimes; the load is 13,824, the gap 0.0 %" in text
        and "proven optimal" in text
    )
    assert "at step 1 13,824 bytes are live: 'w/1' (9,000 bytes), 'w/0' (4,000 bytes), 'empty' (1 bytes)" in text
    assert f"memory for each key: {4096 + 9216 + 1024 + 512:,} bytes, 1,024 more" in text
    for policy in ("max_pool", "slot_coloring", "best_fit"):
        assert f"{policy}: " in text


def test_a_budget_that_is_too_small_names_the_peak() -> None:
    assert plan_of(max_bytes=13824).total_bytes == 13824
    with pytest.raises(
        BudgetTooSmall, match=r"needs 13,824 bytes, but max_bytes is 13,823; at step 1 .* 'w/1' \(9,000"
    ):
        plan_of(max_bytes=13823)


def test_fingerprints_differ_where_anything_that_ranks_share_differs() -> None:
    plan = plan_of()
    others = [
        plan_of("eval"),
        plan_of(sizes={**SIZES, "g/0": 601}),
        dataclasses.replace(plan, order=plan.order[:-1]),
        dataclasses.replace(
            plan, placement=dataclasses.replace(plan.placement, offsets={**plan.placement.offsets, "g/0": 512})
        ),
    ]
    assert len({each.fingerprint for each in [plan, *others]}) == 5
    shuffled = Plan.of(
        "train", dict(reversed(SIZES.items())), INTERVALS, order=plan.order, outlives=["empty"], keys=KEYS
    )
    assert shuffled.fingerprint == plan.fingerprint


@pytest.mark.parametrize("odd", range(3))
def test_ranks_name_the_first_difference_of_their_plans(odd: int) -> None:
    plan = plan_of()
    changed = dataclasses.replace(plan, order=(*plan.order[:-1], "w/1"))
    shorter = dataclasses.replace(plan, order=plan.order[:-1])

    def body(comm: Communicator) -> None:
        expect_equal_plans([plan], comm)
        expect_equal_plans([plan, plan_of("eval")], comm)
        for other, own in ((changed, "acquire 4 of key 'w/1'"), (shorter, "key 'empty' outlives the step")):
            mine = other if comm.rank == odd else plan
            named = "; ".join(f"rank {rank}: {own if rank == odd else 'acquire 4 of key .g/0.'}" for rank in range(3))
            with pytest.raises(CrossRankMismatch, match=f"the first difference: {named}$"):
                expect_equal_plans([mine], comm)
        with pytest.raises(
            CrossRankMismatch, match="plan 'train' of 13824 bytes, aligned to 512; .*plan 'eval' of 13824 bytes"
        ):
            expect_equal_plans([plan_of("eval" if comm.rank == 2 else "train")], comm)
        assert comm.exchange(b"usable") == [b"usable"] * 3

    run_local(3, body)
