"""The memory formula by hand: windows whose peak can be counted on fingers."""

from __future__ import annotations

from bucketwheel.optim.memory import (
    BucketMemory,
    BucketSize,
    SpaceSize,
    arrivals_in_order,
    expected_memory,
    lease_bytes,
    partial_sum_bytes,
    slab_bytes,
    slot_bytes,
    wire_bytes,
)

# Bucket 0 has the last two parameters and a part of 2, bucket 1 another part of it, bucket 2 the rest.
BUCKETS = [BucketSize(1000, [4, 3, 2]), BucketSize(512, [2]), BucketSize(100, [2, 1, 0])]


def played(arrivals: list[int], limit: int = 2, late: list[int] | None = None, **options: object) -> BucketMemory:
    window = BucketMemory(BUCKETS, limit, **options)  # type: ignore[arg-type]
    for param in arrivals:
        window.gradient(param)
    window.close(late or [])
    assert window.count == 0
    return window


def test_in_order_the_limit_holds() -> None:
    assert arrivals_in_order(BUCKETS) == [4, 3, 2, 1, 0]
    peaks = [played([4, 3, 2, 1, 0], limit).peak_bytes for limit in (1, 2, 3, 4)]
    assert peaks == [1000, 1512, 1612, 1612]
    assert played([4, 3, 2, 1, 0], 2).peak_leased_bytes == 1024 + 512
    assert [played([4, 3, 2, 1, 0], limit).peak_count for limit in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert played([4, 3, 2, 1, 0]).peak_gathering == 1


def test_out_of_order_and_without_overlap_everything_gathers() -> None:
    assert played([0, 1, 2, 3, 4], 1).peak_bytes == 1612
    assert played([4, 3, 2, 1, 0], 1, overlap=False).peak_bytes == 1612


def test_what_nobody_waits_for_is_launched_at_once() -> None:
    assert played([2, 1, 0], 1, used=[2, 1, 0]).peak_bytes == 1000
    assert played([2, 1, 0], 1).peak_bytes == 1612


def test_a_window_without_gradients_launches_one_after_the_other() -> None:
    assert [played([], limit).peak_bytes for limit in (1, 2, 3)] == [1000, 1512, 1612]
    assert played([], 2, slots=2).peak_bytes == 0


def test_late_gradients_have_memory_beside_what_is_in_flight() -> None:
    """3 comes again after bucket 0 has gone: its late memory stays until the window ends, behind all first rounds."""
    window = BucketMemory(BUCKETS, 2)
    for param in (4, 3, 2, 3):
        window.gradient(param)
    assert window.late == {0} and window.count == 3 and window.peak_gathering == 2
    window.close()
    assert window.peak_bytes == 512 + 100 + 1000
    assert played([4, 3, 2, 1, 0, 3], 1).peak_bytes == 1000
    assert played([4, 3, 3, 2, 1, 0], 2, due={3: 2}).peak_bytes == 1512  # waited for: not late
    assert played([4, 3, 2, 1, 0], 1, [0, 1]).peak_bytes == 1000  # another rank's
    assert played([4, 3, 2, 1, 0], 3, [0, 1]).peak_bytes == 1612


def test_with_slots_only_what_is_too_early_takes_memory() -> None:
    assert played([4, 3, 2, 1, 0], slots=2).peak_bytes == 0
    assert played([0, 1, 2, 3, 4], slots=2).peak_bytes == 100  # bucket 2 comes when bucket 0 has not gone
    assert played([0, 1, 2, 3, 4], slots=1).peak_bytes == 612
    assert played([4, 3, 2, 1, 0, 4], slots=2).peak_bytes == 1000  # late


def test_pools_round() -> None:
    assert [lease_bytes(n) for n in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    mib = 1 << 20
    assert slab_bytes([]) == 0 and slab_bytes([1] * 16384) == 8 * mib and slab_bytes([1] * 16385) == 16 * mib
    assert slab_bytes([9 * mib + 1]) == 9 * mib + 4096
    assert slab_bytes([6 * mib, 5 * mib, 2 * mib, 3 * mib]) == 16 * mib


def test_sizes_that_are_there_all_the_time() -> None:
    spaces = [SpaceSize(100, 10, 2, 4, {"exp_avg": 4, "remainder": 2}), SpaceSize(20, 0, 4, 4, {"exp_avg": 2})]
    assert expected_memory(spaces, 2) == {
        "params": 280,
        "params_padding": 20,
        "grads": 240,
        "states": 320,
        "exp_avg": 220,
        "remainder": 100,
    }
    assert partial_sum_bytes([(100, 4), (101, 8)], 2, 3) == 3 * 1024 and partial_sum_bytes([], 2, 3) == 0
    assert slot_bytes([600, 100, 300, 700], 2) == 1024 + 1024 and slot_bytes([600], 4) == 1024
    assert wire_bytes(400, 200, 0, 4, 1) == 450 and wire_bytes(400, 200, 90, 2, 3) == 300 + 120
    assert wire_bytes(400, 200, 0, 1, 1) == 0
