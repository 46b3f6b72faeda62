"""POLICIES: other ways to place buffers, to compare with `place`.

Each policy is a function with the arguments of `place`, except ``effort``. It returns None if its rule cannot be applied:
``keys`` are not given, or two keys that are live at once would share a buffer.

| policy | rule |
|---|---|
| double_buffer | two alternating buffers for each role, position in the unit and dtype; all keys have one size |
| fixed_pool | units with the most common buckets share N alternating sets of buffers; other keys by best_fit |
| max_pool | all units share N alternating sets of buffers; each buffer is as large as its largest key |
| slot_coloring | for each role and dtype, largest key first, into the slot that wastes least, else into a new one |
| best_fit | each key at its first start, into the smallest range that is free in all its intervals |

N is the smallest number for which no two keys that are live at once share a buffer. fixed_pool and max_pool are the
`FixedPoolAllocator` and `MaxPoolAllocator` of Megatron-FSDP with strict assignments (N = 2 there); slot_coloring is its
experimental `TracePoolAllocator`. best_fit is an online allocator that knows when each key comes back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from bucketwheel.native import core
from bucketwheel.pool.placement import Asked, Interval, Key, Placement, PlanKey, in_canonical_order, placement_at

MANY_LIFETIMES = 2_000  # with more, policies that go by roles take long: they try all pairs of keys

_Slots = dict[Any, list[Key]]


class _Request:
    """The arguments of `place`, checked."""

    def __init__(self, asked: Asked, keys: Mapping[Key, PlanKey] | None) -> None:
        self.asked = asked
        self.sizes = {key: size for key, (size, _) in self.asked.items()}
        self.best_fit = core.place_best_fit(list(self.asked.values()))
        self.of = {key: PlanKey(*keys[key]) for key in self.asked} if keys is not None else {}
        self.units: dict[int, list[Key]] = defaultdict(list)
        for key, of in self.of.items():
            self.units[of.unit].append(key)

    def slots(self, slot_of: Callable[[Key, PlanKey], Any]) -> _Slots:
        """Without the keys that ``slot_of`` has None for."""
        slots: _Slots = defaultdict(list)
        for key, of in self.of.items():
            slots[slot_of(key, of)].append(key)
        slots.pop(None, None)
        return slots

    def take_turns(self, members: Iterable[Key]) -> bool:
        """Whether no two are live at once."""
        spans = sorted(live for key in members for live in self.asked[key][1])
        return all(before[1] <= after[0] for before, after in pairwise(spans))

    def laid_out(self, slots: _Slots) -> dict[Key, int] | None:
        """Slot behind slot, each as large as its largest key, and behind them the keys that are in none, by best fit.

        None if two keys of a slot are live at once.
        """
        if not all(map(self.take_turns, slots.values())):
            return None
        offsets, at = {}, 0
        for members in slots.values():
            offsets.update(dict.fromkeys(members, at))
            at += max(self.sizes[key] for key in members)
        rest = [key for key in self.asked if key not in offsets]
        found = core.place_best_fit([self.asked[key] for key in rest])
        return offsets | {key: at + offset for key, offset in zip(rest, found.offsets, strict=True)}

    def by_turns(self, slot_of: Callable[[int, Key, PlanKey], Any]) -> dict[Key, int] | None:
        """With the smallest number of sets that does, which ``slot_of`` is given first."""
        tries = (self.laid_out(self.slots(partial(slot_of, sets))) for sets in range(1, len(self.units) + 1))
        return next((offsets for offsets in tries if offsets is not None), None)


def _double_buffer(request: _Request) -> dict[Key, int] | None:
    slots = request.slots(lambda _, of: (of.role, of.position, of.dtype, of.unit % 2))
    sizes: dict[Any, set[int]] = defaultdict(set)
    for slot, members in slots.items():
        sizes[slot[:-1]].update(request.sizes[key] for key in members)
    return request.laid_out(slots) if all(len(found) == 1 for found in sizes.values()) else None


def _fixed_pool(request: _Request) -> dict[Key, int] | None:
    shapes = {
        unit: tuple(sorted((request.of[key][0], *request.of[key][2:], request.sizes[key]) for key in members))
        for unit, members in request.units.items()
    }
    usual = Counter(shapes[unit] for unit in sorted(shapes)).most_common(1)[0][0]
    turn = {unit: at for at, unit in enumerate(sorted(unit for unit in shapes if shapes[unit] == usual))}
    return request.by_turns(
        lambda n, key, of: (turn[of.unit] % n, of.role, of.position, of.dtype) if of.unit in turn else None
    )


def _max_pool(request: _Request) -> dict[Key, int] | None:
    turn = {unit: at for at, unit in enumerate(sorted(request.units))}
    rank: dict[Key, int] = {}
    for same in request.slots(lambda _, of: (of.unit, of.role, of.dtype)).values():
        rank.update({key: k for k, key in enumerate(sorted(same, key=lambda key: -request.sizes[key]))})
    return request.by_turns(lambda n, key, of: (turn[of.unit] % n, of.role, of.dtype, rank[key]))


def _slot_coloring(request: _Request) -> dict[Key, int] | None:
    slots: _Slots = {}
    for key in sorted(request.asked, key=lambda key: -request.sizes[key]):
        kind = (request.of[key].role, request.of[key].dtype)
        fitting = [slot for slot in slots if slot[:2] == kind and request.take_turns([*slots[slot], key])]
        slot = min(fitting, key=lambda slot: request.sizes[slots[slot][0]], default=(*kind, len(slots)))
        slots.setdefault(slot, []).append(key)
    return request.laid_out(slots)


def _best_fit(request: _Request) -> dict[Key, int] | None:
    return dict(zip(request.asked, request.best_fit.offsets, strict=True))


def _placed(
    rule: Callable[[_Request], dict[Key, int] | None],
    sizes: Mapping[Key, int],
    intervals: Mapping[Key, Sequence[Interval]],
    *,
    keys: Mapping[Key, PlanKey] | None = None,
    align: int = 512,
) -> Placement | None:
    if keys is None and rule is not _best_fit:
        return None
    request = _Request(in_canonical_order(sizes, intervals, align), keys)
    if (offsets := rule(request) if sizes else {}) is None:
        return None
    return placement_at({key: offsets[key] for key in request.asked}, request.asked, request.best_fit)


_RULES = (_double_buffer, _fixed_pool, _max_pool, _slot_coloring, _best_fit)
POLICIES: dict[str, Callable[..., Placement | None]] = {rule.__name__[1:]: partial(_placed, rule) for rule in _RULES}
"""Functions with the arguments of `place` but ``effort``: other placements, to compare. None if the rule does not apply."""
