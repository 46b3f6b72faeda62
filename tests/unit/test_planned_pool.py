"""The pool with plans: traced, planned and strict. The dynamic one: test_pool.py; streams that race: test_races;
steps that keep their places, and regimes: gpu/test_pool_plan.py."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import (
    CrossRankMismatch,
    KeyBusy,
    LeaseLeak,
    PlanDiverged,
    PoolBusy,
    PoolError,
    ReleasedTwice,
    SizeExceedsPlan,
    UnknownKey,
)
from bucketwheel.native import core
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.pool import Lease, Pool
from tests.support.comm_cases import run_local

WEIGHTS = {f"weights/{unit}": 10_000 + 3000 * unit for unit in range(5)}


def train(pool: Pool) -> list[int]:
    """A palindrome: weights forward, then weights again and gradients backward. Returns the addresses in order."""
    addresses = []
    held: dict[str, Lease] = {}

    def take(key: str, nbytes: int) -> None:
        held[key] = pool.acquire(key, nbytes)
        addresses.append(held[key].data_ptr)

    for unit, (key, nbytes) in enumerate(WEIGHTS.items()):
        take(key, nbytes)
        if unit:
            held.pop(f"weights/{unit - 1}").release()
    for unit in range(4, -1, -1):
        key = f"weights/{unit}"
        if key not in held:
            take(key, WEIGHTS[key])
        take(f"grads/{unit}", WEIGHTS[key])
        held.pop(key).release()
        if unit < 4:
            held.pop(f"grads/{unit + 1}").release()
    held.pop("grads/0").release()
    return addresses


def planned(*, strict: bool = False) -> tuple[Pool, Plan]:
    pool = Pool("host")
    with pool.trace("train") as trace:
        train(pool)
    plan = pool.plan(trace)
    pool.trim()
    pool.adopt(plan, strict=strict)
    return pool, plan


def test_a_weight_that_autograd_has_saved_is_read_where_it_is_gathered_again() -> None:
    """Others have its bytes in between; tensors have version counters of their own, so autograd does not object."""
    pool = Pool("host")
    pool.adopt(Plan.of("train", {"w": 256, "other": 256}, {"w": [(0, 1), (2, 3)], "other": [(1, 2)]}))
    values, x = torch.arange(64.0).view(8, 8), torch.ones(3, 8, requires_grad=True)
    lease = pool.acquire("w", 256)
    weight = lease.tensor(torch.float32, (8, 8)).copy_(values)
    y = torch.nn.functional.linear(x, weight)
    version = weight._version
    lease.release()
    with pool.acquire("other", 256) as other:
        assert other.data_ptr == weight.data_ptr()
        other.tensor(torch.float32, 64).fill_(torch.nan)
    with pool.acquire("w", 256) as again:
        again.tensor(torch.float32, (8, 8)).copy_(values)
        assert (again.data_ptr, weight._version) == (weight.data_ptr(), version)
        y.sum().backward()
    assert torch.equal(x.grad, values.sum(0).expand(3, 8))  # type: ignore[arg-type]


def test_a_step_that_leaves_the_plan_is_served_beside_it_and_counted() -> None:
    pool, plan = planned()
    first = train(pool)
    odd = [pool.acquire("weights/0", 10_000), pool.acquire("unknown", 500), pool.acquire("weights/1", 1 << 20)]
    odd += [pool.acquire(f"grads/{unit}", 10_000) for unit in range(5)]  # share bytes, and are never live at once
    ranges = sorted((lease.data_ptr, lease.data_ptr + lease.nbytes) for lease in odd)
    assert all(end <= begin for (_, end), (begin, _) in zip(ranges[:-1], ranges[1:], strict=True))
    stats = pool.stats()
    assert stats.divergences >= 3 and stats.side_live_bytes == stats.side_high_water_bytes > 1 << 20
    assert stats.live_bytes == stats.planned_live_bytes + stats.side_live_bytes
    with pytest.raises(LeaseLeak, match=r"'weights/0' \(10000 bytes\).*'grads/0'"):
        pool.step_end()
    for lease in odd:
        lease.release()
    assert pool.stats().side_live_bytes == 0
    assert train(pool) == first and pool.stats().divergences == stats.divergences
    pool.step_end()
    pool.check()


def test_the_first_divergence_from_a_plan_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    """Issue 44: it was counted and never told. Each adopted plan may warn once; a strict pool raises instead."""
    pool, plan = planned()
    train(pool)
    assert not recwarn
    pool.acquire("unknown", 500).release()
    pool.acquire("weights/0", 1 << 20).release()
    (told,) = recwarn
    assert told.filename == __file__ and "explain()" in str(told.message)
    assert "acquire of key 'unknown' (500 bytes): plan 'train' does not have the key" in str(told.message)
    pool.adopt(plan)
    with pytest.warns(UserWarning, match=r"'weights/0' \(1048576 bytes\): plan 'train' has 10240 bytes for it"):
        pool.acquire("weights/0", 1 << 20).release()
    pool.adopt(Plan.of("turns", {"w": 256, "x": 256}, {"w": [(0, 1)], "x": [(1, 2)]}))
    with (
        pool.acquire("x", 256),
        pytest.warns(UserWarning, match="'w'.* place for it, but another lease uses that: lease 'x'"),
    ):
        pool.acquire("w", 256).release()
    pool.adopt(plan)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="'unknown'"):
        warnings.simplefilter("error")
        pool.acquire("unknown", 500)
    assert pool.stats().live_leases == 0 and len(recwarn) == 1


def test_misuse_of_a_planned_pool_raises_named_errors() -> None:
    pool, _ = planned()
    for held in (pool.acquire("weights/0", 1), pool.acquire("unknown", 1)):  # in its place, and in the side region
        with pytest.raises(KeyBusy, match=f"'{held.key}' .1 bytes.: another lease of the key is live: lease"):
            pool.acquire(held.key, 1)
        held.release()
        with pytest.raises(ReleasedTwice):
            held.release()
    with pytest.raises(ValueError, match="regime 'eval': the pool has the plans 'train'"), pool.regime("eval"):
        pass
    with pytest.raises(PoolError, match=r"no plan: call adopt\(\) first"):
        Pool("host").explain()
    with pytest.raises(PoolError, match="recording a trace already"), pool.trace("a"), pool.trace("b"):
        pass
    with pool.trace("free again"):
        pass
    with pytest.raises(ValueError, match="two plans are called 'twice'"):
        pool.adopt(Plan.of("twice", {}, {}), Plan.of("twice", {}, {}))
    with pytest.raises(ValueError, match=r"key 'w' at \[0, 64\) is empty or not aligned to 512"):
        pool.adopt(Plan.of("other", {"w": 1, "x": 1}, {"w": [(0, 2)], "x": [(1, 2)]}, align=64))
    assert pool.current_regime == "train"
    with pool.regime("train"):  # which is gone at its end
        pool.adopt(Plan.of("other", {}, {}))
    assert pool.current_regime == "other"


def test_a_strict_pool_holds_steps_to_the_plan() -> None:
    pool, plan = planned(strict=True)
    first = train(pool)
    pool.step_end()
    with pytest.raises(UnknownKey, match=r"'unknown' \(1 bytes\): plan 'train' does not have the key"):
        pool.acquire("unknown", 1)
    with pytest.raises(UnknownKey, match="''"):
        pool.empty(3, torch.float32)
    with pytest.raises(SizeExceedsPlan, match=r"'weights/0' \(10241 bytes\): plan 'train' has 10240 bytes for it"):
        pool.acquire("weights/0", 10_241)
    with pytest.raises(
        PlanDiverged, match="'weights/1'.*acquire 0 of step 1: expected 'weights/0'; acquired before: n"
    ):
        pool.acquire("weights/1", 1)
    held = pool.acquire("weights/0", 10_000)
    with pytest.raises(PlanDiverged, match="acquire 1 of step 1: expected 'weights/1'; acquired before: 'weights/0'$"):
        pool.acquire("grads/3", 1)
    held.release()
    with pytest.raises(PlanDiverged, match="the step ended; plan 'train', acquire 1 of step 1: expected 'weights/1'"):
        pool.step_end()
    assert train(pool) == first  # nothing is lost
    with pytest.raises(PlanDiverged, match="acquire 14 of step 2: expected none; acquired before: .*'grads/0'$"):
        pool.acquire("weights/0", 1)
    pool.step_end()
    pool.check()


def test_leases_that_cross_the_begin_of_a_trace_have_their_place_in_the_plan() -> None:
    """A prefetch is acquired at a step's end and released in the next; a key that no step acquires has no place."""
    pool = Pool("host")
    kept = pool.acquire("kept", 1 << 20)
    ahead = pool.acquire("weights/0", 5000)

    def step(ahead: Lease) -> Lease:
        grads = pool.acquire("grads/0", 9000)
        ahead.release()
        grads.release()
        return pool.acquire("weights/0", 5000)

    with pool.trace("train") as trace:
        ahead = step(ahead)
    plan = pool.plan(trace)
    assert (plan.order, plan.outlives, plan.total_bytes) == (("grads/0", "weights/0"), {"weights/0"}, 9216 + 5120)
    pool.adopt(plan, strict=True)
    places = set()
    for _ in range(3):
        ahead = step(ahead)
        pool.step_end()
        places.add(ahead.data_ptr)
    assert len(places) == 1 and pool.stats().divergences == 0
    kept.release()


def test_plans_are_adopted_while_nobody_has_their_places() -> None:
    pool, plan = planned()
    lease = pool.acquire("weights/3", 100)
    with pytest.raises(PoolBusy, match=r"leases of the earlier plans are live: 'weights/3' \(100 bytes\)"):
        pool.adopt(plan)
    lease.release()
    side = pool.acquire("elsewhere", 100)  # is in nobody's way
    pool.adopt(Plan.of("new", {"elsewhere": 5000}, {"elsewhere": [(0, 1)]}))
    assert pool.stats().planned_bytes == 5120
    with pytest.raises(KeyBusy, match="elsewhere"):
        pool.acquire("elsewhere", 1)
    side.release()
    assert pool.acquire("elsewhere", 1).nbytes == 1 and pool.stats().divergences == 1
    pool.check()


def test_leaks_name_the_key_and_where_it_was_acquired() -> None:
    pool, plan = planned()
    lease = pool.acquire("weights/0", 100)
    with pytest.raises(LeaseLeak, match=r"live: 'weights/0' \(100 bytes\)$"):
        pool.step_end()
    lease.release()
    with pool.trace("again") as trace:
        lease = pool.acquire("weights/0", 100)
    with pytest.raises(LeaseLeak, match=r"acquired at test_planned_pool.py:\d+ in test_leaks_name"):
        pool.step_end()
    lease.release()
    poisoned = Pool("host", poison=True)
    tensor = poisoned.empty(3, torch.float32)
    with pytest.raises(LeaseLeak, match=r"'' \(12 bytes, acquired at test_planned_pool.py:"):
        poisoned.expect_no_leases()
    del tensor
    again = pool.plan(trace)
    pool.adopt(again)
    with pool.acquire("weights/0", 100):
        pool.step_end()  # it was live when the trace ended


def test_a_trace_has_streams_uses_and_what_was_live_before() -> None:
    pool, stream, other = Pool("host"), core.Stream("one"), core.Stream("two")
    early = pool.acquire("early", 10)
    with pool.trace("streams") as trace:
        lease = pool.acquire("x", 20, stream)
        lease.use(other)
        early.release()
        lease.release(after=other)
    found = [(event.kind, event.key, event.nbytes, event.stream) for event in trace.events]
    assert found == [
        ("live", "early", 10, -1),
        ("acquire", "x", 20, 0),
        ("use", "x", 20, 1),
        ("release", "early", 10, -1),
        ("release", "x", 20, 2),  # an event, of whatever stream
    ]


def test_ranks_agree_before_they_adopt() -> None:
    _, plan = planned()

    def body(comm: Communicator) -> None:
        pool = Pool("host")
        pool.adopt(plan, comm=comm)
        different = Plan.of("train", {"x": 1 + comm.rank * 512}, {"x": [(0, 1)]})
        with pytest.raises(
            CrossRankMismatch, match="rank 0: plan 'train' of 512 bytes, aligned.*; rank 1: .* of 1024 bytes"
        ):
            pool.adopt(different, comm=comm)
        with pytest.raises(CrossRankMismatch, match="rank 0: strict=False; rank 1: strict=True"):
            pool.adopt(plan, comm=comm, strict=comm.rank == 1)
        held = pool.acquire("weights/0", 1) if comm.rank == 1 else None
        with pytest.raises(PoolBusy, match=r"on ranks \[1\]: end them first"):
            pool.adopt(plan, comm=comm)
        if held is not None:
            held.release()
        train(pool)  # the plan before stays
        assert pool.stats().planned_bytes == plan.total_bytes and pool.stats().divergences == 0

    run_local(2, body)


@pytest.mark.filterwarnings("ignore:the pool has left its plan")
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32))
def test_live_leases_never_overlap(seed: int) -> None:
    """Random calls against a plan made of others: planned, side and unnamed leases, two regimes, poison."""
    chosen = random.Random(seed)
    pool = Pool("host", min_slab_bytes=1 << 16, poison=chosen.random() < 0.5)
    names = [f"k/{number}" for number in range(12)]
    sizes = {name: chosen.choice((0, 1, 512, 3000, chosen.randrange(20_000))) for name in names}
    plans = []
    for regime in ("train", "eval"):
        starts = {name: sorted(chosen.sample(range(40), 4)) for name in names}
        plans.append(Plan.of(regime, sizes, {name: [(at[0], at[1]), (at[2], at[3])] for name, at in starts.items()}))
    pool.adopt(*plans)
    live: dict[str, tuple[Lease, int]] = {}
    places: dict[tuple[str, str], int] = {}
    for number in range(150):
        if live and chosen.random() < 0.5:
            lease, mark = live.pop(chosen.choice(list(live)))
            assert lease.tensor(torch.uint8, lease.nbytes).eq(mark).all()
            lease.release()
            continue
        key = chosen.choice([*names, "", "unknown"])
        if key and key in live:
            continue
        before = pool.stats().planned_acquires
        with pool.regime(regime := chosen.choice(("train", "eval"))):
            lease = pool.acquire(key, sizes.get(key, 700))
        if pool.stats().planned_acquires > before:
            assert places.setdefault((regime, key), lease.data_ptr) == lease.data_ptr
        assert lease.data_ptr % 512 == 0
        lease.tensor(torch.uint8, lease.nbytes).fill_(number % 251)
        live[key or f"unnamed {number}"] = lease, number % 251
        ranges = sorted((held.data_ptr, held.data_ptr + max(held.nbytes, 1)) for held, _ in live.values())
        assert all(end <= begin for (_, end), (begin, _) in zip(ranges[:-1], ranges[1:], strict=True))
        pool.check()
    assert pool.stats().planned_acquires and pool.stats().divergences
