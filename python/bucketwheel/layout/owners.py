"""Owners: which live engine of an optimizer has a communicator, and trains a parameter: one at a time."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from bucketwheel.layout.flat_params import ParamInfo

_owners = WeakIdKeyDictionary()  # by communicator and by parameter: a weak reference to the engine


def owner_of(thing: Any) -> Any:
    """The live engine that has it, or None."""
    owner = _owners.get(thing)
    return None if owner is None else owner()


def named(infos: Sequence[ParamInfo]) -> list[tuple[Any, str]]:
    return [(info.param, f"parameter {info.name!r}") for info in infos]


def expect_free(things: Sequence[tuple[Any, str]], but: Collection[Any] = ()) -> None:
    """ValueError if a live optimizer (``but`` these) has one of the communicators or parameters ``things``, which have names.

    Nothing would order the collectives of two optimizers, and each would move the parameters to its own memory.
    """
    for thing, name in things:
        if (owner := owner_of(thing)) is not None and owner not in but:
            raise ValueError(f"{name} belongs to another optimizer; give each its own, or close() that optimizer")


def claim(things: Sequence[tuple[Any, str]], engine: Any) -> None:
    expect_free(things)
    for thing, _ in things:
        _owners[thing] = weakref.ref(engine)


def release(things: Sequence[tuple[Any, str]], engine: Any) -> None:
    """Those that ``engine`` has are free again."""
    for thing, _ in things:
        if owner_of(thing) is engine:
            del _owners[thing]
