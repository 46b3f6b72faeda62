"""Pools with plans: what they do on real streams. Steps that neither wait nor allocate, bytes that streams take over from
each other, captured leases, regimes, and what a lease costs.

Streams are held up before what the next owner of their bytes must wait for: too early a write or read is another number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bucketwheel.errors import CaptureError
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.pool import Lease, Pool
from tests.gpu.device import DEVICE, Tell

F32 = torch.float32
HOLD_S = 0.02
UNITS = 6
UNIT_BYTES = [4096 * (1 + i % 3) for i in range(UNITS)]
# Of what `Device.free_running` asks torch for.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a")


def turns_of(nbytes: int) -> Plan:
    """Three keys of so many bytes in one place."""
    sizes = dict.fromkeys("abc", nbytes)
    plan = Plan.of("turns", sizes, {key: [(at, at + 1)] for at, key in enumerate("abc")})
    assert plan.total_bytes == nbytes
    return plan


def use(lease: Lease, stream: Any) -> None:
    if not DEVICE.is_simulated:  # whose side streams are the calling thread
        lease.use(stream)


# ---- steps


def step(pool: Pool, streams: list[Any]) -> list[tuple[int, int]]:
    """Parameters are gathered in one stream and used in another, gradients go the other way. The places, in order."""
    comm, compute = streams
    places, grads = [], []
    for unit in range(UNITS):
        with DEVICE.on(comm):
            params = pool.acquire(f"params/{unit}", UNIT_BYTES[unit], comm)
            params.tensor(F32, UNIT_BYTES[unit] // 4).fill_(float(unit))
        use(params, compute)
        with DEVICE.on(compute):
            grad = pool.acquire(f"grads/{unit}", UNIT_BYTES[unit], compute)
            grad.tensor(F32, UNIT_BYTES[unit] // 4).copy_(params.tensor(F32, UNIT_BYTES[unit] // 4))
        params.release(after=compute)
        use(grad, comm)
        grads.append(grad)
        places += [params.place, grad.place]
        if len(grads) == 2:
            grads.pop(0).release(after=comm)
    grads.pop().release(after=comm)
    pool.step_end()
    return places


@pytest.mark.parametrize("strict", [False, True], ids=["planned", "strict"])
def test_1000_steps_keep_their_places_and_call_nobody(strict: bool) -> None:
    pool = Pool("cuda")
    streams = [DEVICE.stream(), DEVICE.stream()]
    with pool.trace("train") as trace:
        step(pool, streams)
    plan = pool.plan(trace)
    pool.adopt(plan, strict=strict)
    assert plan.total_bytes < sum(UNIT_BYTES) < 2 * sum(UNIT_BYTES)
    for _ in range(3):  # with as many events in flight as there may ever be
        for stream in streams:
            with DEVICE.on(stream):
                DEVICE.hold(HOLD_S)
        places = step(pool, streams)
    before = pool.stats()
    with DEVICE.free_running():
        found = {tuple(step(pool, streams)) for _ in range(1000)}
    assert found == {tuple(places)}
    after = pool.stats()
    assert after.planned_acquires - before.planned_acquires == 1000 * 2 * UNITS
    assert after.allocations == before.allocations and after.host_waits == before.host_waits == 0
    assert after.divergences == after.side_high_water_bytes == 0
    assert after.planned_bytes == plan.total_bytes and after.planned_high_water_bytes == plan.load_bytes
    for stream in streams:
        DEVICE.join(stream)
    pool.check()
    pool.expect_no_leases()


# ---- bytes go from stream to stream


@pytest.mark.parametrize(("upstream", "copies"), [("cuda", False), ("torch", False), ("cuda", True)])
def test_streams_take_a_place_over_from_each_other(upstream: str, copies: bool) -> None:
    """Each turn has its key written in one stream and read in another, both held up; the next key has the same bytes.

    ``copies``: they are written by the copy engines too, for some milliseconds, from page-locked memory of the host.
    """
    numel = DEVICE.size(1 << 25 if copies else 1 << 20, 1 << 10)
    zeros = torch.zeros(numel, pin_memory=not DEVICE.is_simulated)
    seen = [torch.empty(numel, device=DEVICE.tensors) for _ in range(9)]
    pool = Pool(upstream)
    pool.adopt(turns_of(4 * numel))
    streams = [DEVICE.stream() for _ in range(3)]
    places, busy = set(), []
    for turn in range(9):
        writer, reader = streams[turn % 3], streams[(turn + 2) % 3]  # the next writer is the third
        with DEVICE.on(writer):
            lease = pool.acquire("abc"[turn % 3], 4 * numel, writer)
            places.add(lease.place)
            DEVICE.hold(HOLD_S)
            if copies:
                lease.tensor(F32, numel).copy_(zeros, non_blocking=True)
                lease.tensor(F32, numel).add_(float(turn))
            else:
                lease.tensor(F32, numel).fill_(float(turn))
        use(lease, reader)
        with DEVICE.on(reader):
            DEVICE.hold(HOLD_S)
            seen[turn].copy_(lease.tensor(F32, numel))
        lease.release(after=reader)
        busy.append(not DEVICE.is_idle(reader))
    for stream in streams:
        DEVICE.join(stream)
    assert 2 * sum(busy) > len(busy), f"streams were idle when they should have been held up: {busy}"
    assert len(places) == 1
    for turn, values in enumerate(seen):
        assert torch.all(DEVICE.get(values) == turn), f"turn {turn}"
    stats = pool.stats()
    assert stats.planned_acquires == 9 and stats.divergences == stats.host_waits == 0
    if not DEVICE.is_simulated:
        assert stats.waits >= 4
    pool.check()


# ---- graphs


def test_replays_use_planned_leases() -> None:
    """Leases of before the capture, and one that is acquired in it. Between replays all are acquired anew."""
    numel = DEVICE.size(1 << 20, 1 << 10)
    sizes = dict.fromkeys(("in", "within", "out"), 4 * numel)
    pool = Pool("cuda")
    pool.adopt(Plan.of("captured", sizes, dict.fromkeys(sizes, [(0, 1)])))
    names = ("in", "out")
    before = {name: pool.acquire(name, 4 * numel) for name in names}
    read, written = (before[name].tensor(F32, numel) for name in names)
    kept: list[Lease] = []

    def work() -> None:
        kept.append(pool.acquire("within", 4 * numel))
        half = kept[-1].tensor(F32, numel)
        half.copy_(read)
        half.mul_(0.5)
        written.copy_(half)
        with pytest.raises(CaptureError):
            kept[-1].release()

    DEVICE.synchronize()
    replay = DEVICE.capture(work)
    places = {lease.key: lease.data_ptr for lease in (*before.values(), *kept)}
    for turn in range(4):
        read.fill_(2.0 * turn)
        replay()
        assert torch.all(DEVICE.get(written) == turn)
        for lease in (*before.values(), *kept):
            lease.release()
        before = {name: pool.acquire(name, 4 * numel) for name in names}
        kept = [pool.acquire("within", 4 * numel)]
        assert {lease.key: lease.data_ptr for lease in (*before.values(), *kept)} == places
        read, written = (before[name].tensor(F32, numel) for name in names)
    for lease in (*before.values(), *kept):
        lease.release()
    pool.check()


# ---- regimes


def test_regimes_share_bytes_and_keep_addresses() -> None:
    """A key of one regime waits for those of the other in its bytes, in whatever stream they were used."""
    numel = DEVICE.size(1 << 20, 1 << 10)
    nbytes = 4 * numel
    train = Plan.of("train", {"a": nbytes, "b": nbytes}, {"a": [(0, 2)], "b": [(1, 2)]})
    evaluation = Plan.of("eval", {"whole": 2 * nbytes}, {"whole": [(0, 1)]})
    pool = Pool("cuda")
    pool.adopt(train, evaluation)
    streams = [DEVICE.stream(), DEVICE.stream()]
    seen, places, busy = [], set(), []
    for turn in range(6):
        with DEVICE.on(streams[0]):
            leases = [pool.acquire(key, nbytes, streams[0]) for key in "ab"]
            DEVICE.hold(HOLD_S)
            for at, lease in enumerate(leases):
                lease.tensor(F32, numel).fill_(float(10 * turn + at))
                seen.append((lease.tensor(F32, numel).clone(), 10 * turn + at))
                lease.release(after=streams[0])
        with pool.regime("eval"), DEVICE.on(streams[1]):
            whole = pool.acquire("whole", 2 * nbytes, streams[1])
            DEVICE.hold(HOLD_S)
            whole.tensor(F32, 2 * numel).fill_(float(10 * turn + 9))
            seen.append((whole.tensor(F32, 2 * numel).clone(), 10 * turn + 9))
            whole.release(after=streams[1])
        busy.append(not DEVICE.is_idle(streams[1]))
        places.add((*(lease.place for lease in leases), whole.place))
        pool.step_end()
    for stream in streams:
        DEVICE.join(stream)
    assert 2 * sum(busy) > len(busy), busy
    assert len(places) == 1
    for values, expected in seen:
        assert torch.all(DEVICE.get(values) == expected), expected
    stats = pool.stats()
    assert stats.planned_bytes == 2 * nbytes and stats.divergences == 0
    pool.check()


# ---- cost


def test_what_a_lease_costs(tell: Tell) -> None:
    """Acquire and release of 1 MiB by the host, beside `torch.empty` of as much and its end. Reported, not judged."""
    nbytes, calls, samples = 1 << 20, DEVICE.size(1000, 20), DEVICE.size(21, 3)
    keys = [f"grads/{i}" for i in range(calls)]
    plan = Plan.of("step", dict.fromkeys(keys, nbytes), {k: [(i, i + 1)] for i, k in enumerate(keys)}, order=keys)
    pools = {mode: Pool("cuda") for mode in ("dynamic", "planned", "strict")}
    for mode in ("planned", "strict"):
        pools[mode].adopt(plan, strict=mode == "strict")

    def lease_all(pool: Pool) -> None:
        for key in keys:
            pool.acquire(key, nbytes).release()
        pool.step_end()

    def torchs() -> None:
        for _ in keys:
            torch.empty(nbytes, dtype=torch.uint8, device=DEVICE.tensors)

    cases: dict[str, Callable[[], None]] = {m: (lambda pool=pool: lease_all(pool)) for m, pool in pools.items()}
    cases["torch"] = torchs
    found: dict[str, list[float]] = {case: [] for case in cases}
    for sample in range(samples + 2):
        for case, call in cases.items():
            DEVICE.synchronize()
            start = time.perf_counter()
            call()
            if sample >= 2:
                found[case].append(1e9 * (time.perf_counter() - start) / calls)
    medians = {f"{case}_ns": round(statistics.median(values)) for case, values in found.items()}
    spread = {f"{case}_worst_ns": round(max(values)) for case, values in found.items()}
    tell("lease", nbytes=nbytes, calls=calls, samples=samples, **medians, **spread)
    assert pools["planned"].stats().planned_acquires == pools["strict"].stats().planned_acquires
