"""Window plan: which buckets of a sync window have memory at the same time, if gradients come in order, and where each lies.

Pure: known before the first gradient, and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bucketwheel.grads.bucket import GradBucket
from bucketwheel.pool.placement import Interval
from bucketwheel.pool.plan import Plan


def plan_window(
    buckets: Sequence[GradBucket], *, limit: int, overlap: bool, arrivals: Sequence[int] | None = None
) -> Plan:
    """For ``buckets`` in the order of their launches. The gradient of parameter i is the ``arrivals[i]``-th that comes."""
    params_of = [bucket.params if arrivals is None else [-arrivals[i] for i in bucket.params] for bucket in buckets]
    intervals = intervals_in_order(params_of, limit=limit, overlap=overlap)
    return Plan.of_turns("grads", [bucket.nbytes for bucket in buckets], intervals)


def intervals_in_order(params_of: Sequence[Collection[int]], *, limit: int, overlap: bool) -> list[Interval]:
    """Of each bucket, from when to when it has memory, where gradients come from the last parameter to the first. A step is
    the opening of a bucket, by its first gradient.

    A bucket is launched when its last gradient has come and those before it are launched; without ``overlap`` at the window's
    end. It keeps its memory until a bucket opens when ``limit`` have been launched from it on: whether it has been read then
    is not asked, memory goes on in program order.
    """
    buckets_of: dict[int, list[int]] = {}
    for bucket, params in enumerate(params_of):
        for param in params:
            buckets_of.setdefault(param, []).append(bucket)
    missing = [len(params) for params in params_of]
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    launched = 0
    for param in sorted(buckets_of, reverse=True):
        for bucket in buckets_of[param]:
            if bucket not in begins:
                ends.update({older: len(begins) for older in range(len(ends), launched - limit + 1)})
                begins[bucket] = len(begins)
            missing[bucket] -= 1
            while overlap and launched < len(missing) and not missing[launched]:
                launched += 1
    return [(begins[bucket], ends.get(bucket, len(begins))) for bucket in range(len(missing))]
