"""Schedule: which gradient goes where and which bucket is reduced when. Pure: events in, actions out.

A *sync window* lasts from the first gradient until the gradients are asked for (`step`, `clip_grad_norm_`,
`grad_sync`). In it every rank launches every bucket exactly once, in index order, whatever order its gradients arrive
in:

1. During backward a bucket is launched when all gradients expected in it have arrived and every bucket before it has
gone. 2. When the window closes the ranks compare notes (`notes`, `agree`); what is left is launched, with zeros for
what is missing. 3. A gradient that came after its bucket had gone was kept in *late* memory. If any rank has late
gradients of a bucket, all
   ranks reduce that bucket once more: the *late round*.

So the sequence of collectives depends on agreed facts alone. [Note: one sequence on every rank]

What is expected is agreed too: the parameters that any rank used in one of the last few windows. A parameter that
nobody uses therefore holds nothing up, and one that returns goes through the late round once.

A gradient that *replaces* one of the same window (`zero_grad()`, `p.grad = None` or a tensor assigned by hand, and then
another backward) makes the first round void for its parameter, wherever its bucket is: the owner of the shard drops
that sum and the replacement goes through the late round. Ranks must agree on replacing: some of them alone cannot.

Gradients are scaled by a factor that is applied later (`reduced`), so ranks agree on factors as well: [Note: whose
factor].
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Agreement", "Drop", "Launch", "Schedule", "Store"]

_MEMORY_WINDOWS = 4  # how long an unused parameter is still waited for
_STORED, _VOID, _HELD, _OLDER = 1, 2, 4, 8


@dataclass(frozen=True)
class Store:
    """Write (or add) the part of a parameter's gradient that lies in ``bucket``. Late memory begins as zeros."""

    param: int
    bucket: int
    late: bool
    add: bool


@dataclass(frozen=True)
class Drop:
    """Zero the part of a parameter in ``bucket``'s late memory: its gradient was taken away."""

    param: int
    bucket: int


@dataclass(frozen=True)
class Launch:
    """Reduce ``bucket``. ``absent``: its parameters that this rank has nothing for (zeros)."""

    bucket: int
    absent: tuple[int, ...] = ()
    late: bool = False


@dataclass(frozen=True)
class Agreement:
    """What all ranks know when a window closes.

    ``is_dirty``: some rank has new gradients. ``held``: parameters with a gradient on any rank. ``void``: parameters
        whose
    first round is dropped. ``late``: buckets with a late round. ``conflicts``: parameters that some ranks replaced or
        dropped
    and others did not, which has no meaning and is an error on every rank, as is ``scaled_apart``: parameters that
        ranks scaled
    differently. ``factors``: what each gradient is still to be multiplied by. ``is_uneven``: a parameter of ``held``
    had no gradient on some rank, which could not list it.
    """

    is_dirty: bool
    held: list[bool]
    void: list[int]
    late: list[int]
    conflicts: list[int]
    scaled_apart: list[int]
    factors: list[float]
    is_uneven: bool


class Schedule:
    """The state of one rank. ``buckets_of[param]``: the buckets that hold the parameter, ascending."""

    def __init__(self, buckets_of: Sequence[Sequence[int]], bucket_count: int) -> None:
        self._buckets_of = [tuple(buckets) for buckets in buckets_of]
        self._params_of: list[list[int]] = [[] for _ in range(bucket_count)]
        for param, buckets in enumerate(self._buckets_of):
            for bucket in buckets:
                self._params_of[bucket].append(param)
        self._window = 0
        self._last_held = [0] * len(self._buckets_of)
        self._reset()

    def _reset(self) -> None:
        count = len(self._buckets_of)
        oldest = self._window - _MEMORY_WINDOWS
        self._expected = [last >= oldest for last in self._last_held]
        self._missing = [sum(self._expected[p] for p in params) for params in self._params_of]
        self._stored = [False] * count
        self._absent = [True] * count  # nothing in first-round memory
        self._counted = [False] * count
        self._void = [False] * count
        self._late = [False] * len(self._params_of)
        self._is_late = [False] * count  # in late memory
        self._next = 0
        self.is_dirty = False

    def gradient(self, param: int, *, replaces: bool = False, launch: bool = True) -> list[Store | Launch]:
        """A gradient of ``param`` has arrived, on top of what it has or, if it ``replaces`` that, instead of it.

        ``launch=False`` (inside ``no_sync``): keep it, reduce nothing, and go on expecting another one.
        """
        actions: list[Store | Launch] = []
        self.is_dirty = True
        if replaces:
            self._void[param] = True
        for b in self._buckets_of[param]:
            if self._void[param] or b < self._next:
                self._late[b] = self._is_late[param] = True
                actions.append(Store(param, b, late=True, add=not replaces))
            else:
                actions.append(Store(param, b, late=False, add=self._stored[param]))
        self._absent[param] = self._absent[param] and self._void[param]
        self._stored[param] = True
        if launch:
            self._count(param)
            actions += self._launches(lambda b: self._missing[b] == 0)
        return actions

    def complete(self, params: Sequence[int]) -> list[Launch]:
        """Nothing more will come for ``params`` in this window. None without a gradient on this rank: others may have
        none either, and then nobody launches."""
        if not self.is_dirty:
            return []
        for param in params:
            self._count(param)
        return self._launches(lambda b: self._missing[b] == 0)

    def discard(self) -> None:
        """All gradients were dropped (`zero_grad`): in an open window the first round is void for every parameter.

        The caller drops its late memory.
        """
        if self.is_dirty:
            self._void = [True] * len(self._void)
            self._late = [False] * len(self._late)
            self._is_late = [False] * len(self._is_late)

    def drops(self, held: Sequence[bool]) -> list[Drop]:
        """Before `notes`: what must leave late memory, because ``p.grad`` was set to None after it arrived."""
        return [
            Drop(param, b)
            for param, is_late in enumerate(self._is_late)
            if is_late and not held[param]
            for b in self._buckets_of[param]
            if self._late[b]
        ]

    def has_stored(self, param: int) -> bool:
        """Whether this rank has put a gradient of ``param`` into this window."""
        return self._stored[param]

    def _count(self, param: int) -> None:
        if self._expected[param] and not self._counted[param]:
            self._counted[param] = True
            for b in self._buckets_of[param]:
                self._missing[b] -= 1

    def _launches(self, is_ready) -> list[Launch]:  # type: ignore[no-untyped-def]
        found = []
        while self._next < len(self._params_of) and is_ready(self._next):
            b = self._next
            found.append(Launch(b, tuple(p for p in self._params_of[b] if self._absent[p])))
            self._next += 1
        return found

    def notes(self, held: Sequence[bool], older: Sequence[bool] = (), factors: Sequence[float] = ()) -> bytes:
        """This rank's part of the agreement.

        ``held[param]``: the parameter has a gradient now (`p.grad is not None`); one that arrived and is held no longer
        (`p.grad = None` since) is void. ``older[param]``: what earlier windows left of it still counts (none by
        default). ``factors[param]``: what its gradient is still to be multiplied by (1 by default).
        """
        flags = bytearray([self.is_dirty])
        for param, (is_held, has_older) in enumerate(zip(held, older or [False] * len(held), strict=True)):
            is_void = self._void[param] or (self._stored[param] and not is_held)
            has_older = has_older and not is_void
            flags.append(self._stored[param] * _STORED | is_void * _VOID | is_held * _HELD | has_older * _OLDER)
        flags += bytes(self._late)
        return bytes(flags) + (array("d", factors).tobytes() if any(factor != 1.0 for factor in factors) else b"")

    def agree(self, notes: Sequence[bytes]) -> Agreement:
        """The facts that follow from all ranks' `notes`; the same on every rank."""
        count = len(self._buckets_of)
        held, void, conflicts = [], [], []
        is_uneven = False
        for param in range(count):
            flags = [note[1 + param] for note in notes]
            held.append(any(f & _HELD for f in flags))
            is_uneven = is_uneven or (held[-1] and not all(f & _HELD for f in flags))
            is_void = any(f & _VOID for f in flags)
            stays = is_void and any(f & _STORED and not f & _VOID for f in flags)
            if stays or len({f & _OLDER for f in flags}) > 1:
                conflicts.append(param)
            elif is_void:
                void.append(param)
        late = [b for b in range(len(self._params_of)) if any(note[1 + count + b] for note in notes)]
        factors, scaled_apart = self._agree_on_factors(notes)
        return Agreement(any(note[0] for note in notes), held, void, late, conflicts, scaled_apart, factors, is_uneven)

    def _agree_on_factors(self, notes: Sequence[bytes]) -> tuple[list[float], list[int]]:
        """[Note: whose factor] The agreed factor of every parameter, and the parameters that were scaled differently.

        In a window with new gradients a rank that put one in, or has older ones beside those of others, says what is
        still to be multiplied: its contributions are divided by that already. They must all say the same. A rank that
        has no part in the parameter, or none in the window at all, takes over their factor; to what it has it applies
        the rest of its own.
        """
        count = len(self._buckets_of)
        tails = [note[1 + count + len(self._params_of) :] for note in notes]
        everyone = [list(array("d", tail)) or [1.0] * count for tail in tails]
        if all(tail == tails[0] for tail in tails):
            return everyone[0], []
        is_dirty = any(note[0] for note in notes)
        factors, scaled_apart = [], []
        for param in range(count):
            said = {
                own[param].hex(): own[param]  # by its digits: NaN equals NaN
                for note, own in zip(notes, everyone, strict=True)
                if bool(note[0]) == is_dirty and note[1 + param] & _HELD and note[1 + param] & (_STORED | _OLDER)
            }
            factors.append(next(iter(said.values()), 1.0))
            if len(said) > 1:
                scaled_apart.append(param)
        return factors, scaled_apart

    def close(self, agreement: Agreement) -> tuple[list[Launch], list[Launch]]:
        """The launches that end the window, first round and late round; then a new window begins."""
        first: list[Launch] = []
        late: list[Launch] = []
        if agreement.is_dirty:
            first = self._launches(lambda b: True)
            late = [Launch(b, late=True) for b in agreement.late]
            self._window += 1
            for param, is_held in enumerate(agreement.held):
                if is_held:
                    self._last_held[param] = self._window
            self._reset()
        return first, late
