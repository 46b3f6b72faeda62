"""How a saved state names parameters: by their numbers, as torch counts them, and by ``param_names`` beside these."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from bucketwheel.checkpoint.plain_values import as_plain

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "module")  # which torch's get_state_dict leaves out of names

_Groups = Sequence[dict[str, Any]]


def numbers_of(param_groups: Sequence[dict[str, Any]]) -> dict[Tensor, int]:
    """Through all groups, frozen ones counted."""
    numbers: dict[Tensor, int] = {}
    for i, p in enumerate(p for group in param_groups for p in group["params"]):
        numbers.setdefault(p, i)
    return numbers


def numbered_groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``param_groups`` with numbers in the place of parameters, and Python's numbers in that of numpy's."""
    number = numbers_of(param_groups)
    own = [{key: as_plain(value) for key, value in group.items() if key != "params"} for group in param_groups]
    return [{**of, "params": [number[p] for p in group["params"]]} for of, group in zip(own, param_groups, strict=True)]


def _names_of(group: dict[str, Any]) -> list[Any]:
    """Of a group's parameters: ``params`` themselves, or ``param_names``; else as many None."""
    params = list(group["params"])
    names = params if all(isinstance(p, str) for p in params) else list(group.get("param_names") or ())
    return names if len(names) == len(params) else [None] * len(params)


def follow_names(theirs: _Groups, ours: _Groups, *, strict: bool = True) -> list[dict[str, Any]]:
    """The loaded groups ``theirs`` in the order of ``ours``, each with its parameters in our order.

    What wrappers add to names does not count. Returns ``theirs`` where a parameter has no name, or several have one. Where a
    group has other names than all of ``theirs``: ValueError with the first, or ``theirs`` if not ``strict``.
    """
    saved, wanted = ([_names_of(group) for group in groups] for groups in (theirs, ours))
    if len(theirs) != len(ours) or not (_are_names(saved) and _are_names(wanted)):
        return list(theirs)
    saved, wanted = _alike(saved, wanted)
    places = {frozenset(names): i for i, names in enumerate(saved)}
    found = []
    for g, names in enumerate(wanted):
        i = places.get(frozenset(names)) if names or saved[g] else g  # several groups may have no parameters
        if i is None and strict:
            raise ValueError(_other_names(g, names, saved))
        if i is None:
            return list(theirs)
        of_name = dict(zip(saved[i], theirs[i]["params"], strict=True))
        found.append({**theirs[i], "params": [of_name[name] for name in names], "param_names": _names_of(ours[g])})
    return found


def _are_names(groups: Sequence[Sequence[Any]]) -> bool:
    names = list(chain(*groups))
    return len(set(names)) == len(names) and all(isinstance(name, str) and name for name in names)


def _alike(saved: list[list[str]], ours: list[list[str]]) -> list[list[list[str]]]:
    """Both without what wrappers add to names, if they differ by that."""
    sides = [saved, ours]
    if set(chain(*saved)) == set(chain(*ours)):
        return sides
    bare = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in chain(*saved, *ours)}
    plain = [[[bare[name] for name in group] for group in side] for side in sides]
    a, b = (list(chain(*side)) for side in plain)
    cuts = prefix_of(a, b), prefix_of(b, a)
    plain = [[[n.removeprefix(cut) for n in group] for group in side] for side, cut in zip(plain, cuts, strict=True)]
    return plain if all(map(_are_names, plain)) else sides


def prefix_of(names: Collection[str], others: Collection[str]) -> str:
    """The common prefix of all ``names``, with its dot, if one of ``others`` is one of them without it; else ""."""
    first = next(iter(names), "")
    prefixes = (first.removesuffix(other) for other in others if first.endswith(f".{other}"))
    return next((prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)), "")


def _other_names(g: int, names: Sequence[str], saved: Sequence[Sequence[str]]) -> str:
    """Says which is the first name that our group ``g`` and the nearest of the loaded ones do not share."""
    nearest = max(saved, key=lambda group: len({*group} & {*names}))
    ours = [name for name in names if name not in nearest]
    where, first = ("this group", ours[0]) if ours else ("the loaded group", next(n for n in nearest if n not in names))
    return (
        f"parameter group {g} differs from the most similar loaded group: {first!r} is only in {where}. Group "
        "parameters as in the save, or delete 'param_names' from all of optimizer.param_groups to match by position"
    )
