"""Plan: the place of each key of a pool in a step, computed from a trace or from lifetimes. The same on every rank.

>>> plan = Plan.of("train", {"a": 4096, "b": 4096}, {"a": [(0, 1)], "b": [(1, 2)]})
>>> plan.total_bytes, plan.load_bytes, plan.gap
(4096, 4096, 0.0)
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from bucketwheel.errors import BudgetTooSmall, CrossRankMismatch
from bucketwheel.pool.placement import Interval, Placement, PlanKey, aligned, place
from bucketwheel.pool.policies import MANY_LIFETIMES, POLICIES

_LISTED = 12


@dataclass(frozen=True)
class Plan:
    """A place for each key of a pool. `Pool.plan` makes it from a trace, and `Pool.adopt` puts it into effect.

    All methods are local. Plans of equal arguments are equal on every rank.

    Attributes:
        name: The name of the plan, and of its regime.
        sizes: Bytes of each key.
        intervals: For each key, the half-open intervals ``(start, stop)`` of steps in which it is live.
        order: The keys in the order in which a step acquires them, which a strict pool requires. Empty allows any order.
        placement: The offsets.
        align: Alignment of the offsets in bytes.
        outlives: Keys that may be live when a step ends.
        keys: Role, unit, position and dtype of each key, for `explain`; not compared."""

    name: str
    sizes: dict[str, int]
    intervals: dict[str, Sequence[Interval]]
    order: tuple[str, ...]
    placement: Placement
    align: int = 512
    outlives: frozenset[str] = frozenset()
    keys: Mapping[str, PlanKey] | None = field(default=None, compare=False)  # for `explain`

    @classmethod
    def of(
        cls,
        name: str,
        sizes: Mapping[str, int],
        intervals: Mapping[str, Sequence[Interval]],
        *,
        keys: Mapping[str, PlanKey] | None = None,
        order: Iterable[str] = (),
        outlives: Iterable[str] = (),
        align: int = 512,
        effort: int = 20_000,
        max_bytes: int | None = None,
    ) -> Plan:
        """Makes a plan from sizes and intervals. Local; the result depends only on the arguments.

        Args:
            name: Name of the plan and of its regime.
            sizes: Bytes of each key. A key of 0 bytes gets an address of its own.
            intervals: As in `place`.
            keys: Role, unit, position and dtype of each key, for `explain`.
            order: The keys in the order in which a step acquires them. Empty allows any order.
            outlives: Keys that may be live when a step ends.
            align: Alignment of the offsets in bytes.
            effort: As in `place`.
            max_bytes: The most bytes that the plan may need.

        Raises:
            BudgetTooSmall: The plan needs more than ``max_bytes``. The message names the keys that are live at the peak.
            ValueError: As in `place`.
            TypeError: As in `place`."""
        sizes = {key: max(size, 1) for key, size in sizes.items()}
        found = place(sizes, intervals, align=align, effort=effort)
        plan = cls(name, sizes, dict(intervals), tuple(order), found, align, frozenset(outlives), keys)
        if max_bytes is not None and found.total_bytes > max_bytes:
            needs = f"needs {found.total_bytes:,} bytes, but max_bytes is {max_bytes:,}"
            raise BudgetTooSmall(f"plan {name!r} {needs}; {plan._peak_text()}")
        return plan

    @classmethod
    def of_turns(cls, name: str, sizes: Sequence[int], intervals: Sequence[Interval]) -> Plan:
        """Makes a plan for buffers with the keys ``name/0``, ``name/1``, ... Local.

        Args:
            name: Name of the plan, and role of the keys.
            sizes: Bytes of each buffer.
            intervals: For each buffer, the half-open interval of steps in which it is in use.

        Examples:
            >>> plan = Plan.of_turns("turns", [4096, 8192, 4096], [(0, 2), (1, 3), (2, 3)])
            >>> plan.total_bytes, plan.placement.offsets["turns/0"] == plan.placement.offsets["turns/2"]
            (12288, True)"""
        keys = [f"{name}/{number}" for number in range(len(sizes))]
        return cls.of(name, dict(zip(keys, sizes, strict=True)), {k: [i] for k, i in zip(keys, intervals, strict=True)})

    @property
    def total_bytes(self) -> int:
        """Size of the arena."""
        return self.placement.total_bytes

    @property
    def load_bytes(self) -> int:
        """The most bytes that are live in one step, with sizes rounded up to the alignment. No plan is smaller."""
        return self.placement.load_bytes

    @property
    def gap(self) -> float:
        """The difference of total and load, as a fraction of the load."""
        return self.total_bytes / self.load_bytes - 1 if self.load_bytes else 0.0

    @property
    def fingerprint(self) -> str:
        """A hash of `rows`, 32 hexadecimal digits. Equal plans have equal fingerprints."""
        return hashlib.sha256("\n".join(self.rows()).encode()).hexdigest()[:32]

    def rows(self) -> list[str]:
        """Returns the texts that ranks compare: one for the plan, and one for each key and each acquire. Local."""
        places = [f"key {key!r} at {self.placement.offsets[key]} of {self.sizes[key]} bytes" for key in self.sizes]
        outlives = [f"key {key!r} outlives the step" for key in sorted(self.outlives)]
        acquires = (f"acquire {number} of key {key!r}" for number, key in enumerate(self.order))
        head = f"plan {self.name!r} of {self.total_bytes} bytes, aligned to {self.align}"
        return [head, *sorted(places), *acquires, *outlives]

    def peak(self) -> tuple[int, list[str]]:
        """Returns the first step in which most bytes are live, and the keys that are live then, the largest first. Local."""
        changes: Counter[int] = Counter()
        for key, found in self.intervals.items():
            size = aligned(self.sizes[key], self.align)
            for start, stop in found:
                changes[start] += size
                changes[stop] -= size
        steps = sorted(changes)
        live = list(accumulate(changes[step] for step in steps))
        at = steps[live.index(max(live))] if steps else 0
        keys = [key for key, found in self.intervals.items() if any(start <= at < stop for start, stop in found)]
        return at, sorted(keys, key=lambda key: -self.sizes[key])

    def _peak_text(self) -> str:
        step, keys = self.peak()
        listed = ", ".join(f"{key!r} ({self.sizes[key]:,} bytes)" for key in keys[:_LISTED])
        more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
        return f"at step {step} {self.load_bytes:,} bytes are live: {listed}{more}"

    def explain(self) -> str:
        """Returns the total, the load, the keys that are live at the peak, and the totals of other policies, as text. Local."""
        count = sum(map(len, self.intervals.values()))
        lines = [
            f"plan {self.name!r}: {self.total_bytes:,} bytes for {len(self.sizes)} keys and {count} lifetimes; "
            f"the load is {self.load_bytes:,}, the gap {100 * self.gap:.1f} %"
            + (", proven optimal" if self.placement.proven_optimal else ""),
            self._peak_text(),
        ]
        separate = sum(aligned(size, self.align) for size in self.sizes.values())
        totals = {"memory for each key": separate}
        keys = self.keys if count <= MANY_LIFETIMES else None
        for name, policy in POLICIES.items():
            if found := policy(self.sizes, self.intervals, keys=keys, align=self.align):
                totals[name] = found.total_bytes
        lines += [f"{name}: {total:,} bytes, {total - self.total_bytes:,} more" for name, total in totals.items()]
        return "\n".join(lines)

    def to_native(self) -> tuple[str, list[tuple[str, int, int, bool]], list[int], int, int]:
        """Returns the plan in the form that the native pool adopts. Local."""
        offsets = self.placement.offsets
        keys = [
            (key, offsets[key], aligned(size, self.align), key in self.outlives) for key, size in self.sizes.items()
        ]
        numbers = {key: number for number, key in enumerate(self.sizes)}
        return self.name, keys, [numbers[key] for key in self.order], self.total_bytes, self.load_bytes


def expect_equal_plans(plans: Sequence[Plan], comm: Any, *also: str) -> None:
    """`CrossRankMismatch` on all ranks, naming the first difference, unless all have equal plans, and equal texts
    ``also``. Collective, host to host, of the communicator ``comm``.
    """
    rows = [*(row for plan in plans for row in plan.rows()), *also]
    # Of the first 0, 1, 2, ... rows.
    hashes = list(accumulate(rows, lambda before, row: hashlib.sha256(before + row.encode()).digest(), initial=b""))
    if len(set(comm.exchange(hashes[-1]))) == 1:
        return
    most = max(int.from_bytes(told, "little") for told in comm.exchange(len(rows).to_bytes(8, "little")))

    def is_different(count: int) -> bool:
        return len(set(comm.exchange(hashes[min(count, len(rows))]))) > 1

    same = bisect_left(range(1, most), True, key=is_different)  # so many rows are equal
    own = rows[same] if same < len(rows) else "nothing"
    texts = [told.decode() for told in comm.exchange(own.encode())]
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
    raise CrossRankMismatch(f"ranks have different plans, but must have equal ones; the first difference: {told}")
