"""Agreement: the errors where ranks differ in what they do to their gradients. `window` compares; here is what it says.

All ranks raise, unless a docstring says otherwise.
"""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bucketwheel.comm.replicas import Reducer
from bucketwheel.layout.flat_params import ParamInfo

_NO_INPUTS = (
    "A rank without further inputs must go on calling the optimizer, without a backward, until no rank has inputs "
    'left (docs/several_hosts.md, "Ranks with fewer inputs")'
)
NO_JOIN = f"ShardedAdamW does not support Join: its collectives would wait for ranks that have joined. {_NO_INPUTS}"
# As sharded_adamw.py calls them.
_CHANGES = ("a change of param_groups", "taking in what was frozen", "add_param_group")
REFUSED = "refused"  # what a rank exchanges in the place of a call: the text of its error follows


def raise_different_calls(calls: Sequence[str], payloads: Sequence[bytes]) -> NoReturn:
    """RuntimeError: the ranks made other ``calls``, or one of them was refused. Both by rank."""
    by_rank = f"(by rank: {', '.join(calls)})"
    refusals = [f"rank {rank}: {str(payloads[rank], 'utf-8')}" for rank, call in enumerate(calls) if call == REFUSED]
    if refusals:
        raise RuntimeError(f"{'; '.join(refusals)} {by_rank}")
    remedy = (
        "All ranks must make the same calls (step, clip_grad_norm_, full_grad, torch code that needs gradient values) in the "
        "same order; where they use different parameters, call optimizer.grad_sync() before torch code"
    )
    if any(call.startswith(_CHANGES) for call in calls):
        remedy = (
            "All ranks must make the same changes to param_groups (and to requires_grad of their parameters) between "
            "the same two calls. Make them on all ranks, then go on"
        )
    if "close" in calls:
        remedy = _NO_INPUTS
    if saves := [call for call in calls if call.startswith("bw.checkpoint.")]:
        remedy = f"Call {saves[0].split()[0]} on all ranks, not only `if rank == 0:`"
    if len(saves) == len(calls):
        remedy = "All ranks must make the same call with the same folder"
    raise RuntimeError(f"ranks made different optimizer calls: {', '.join(calls)} (by rank). {remedy}")


@dataclass(frozen=True)
class Facts:
    """What else ranks must have alike when they close a window: ``digest`` (4 bytes) of what ``values`` gives by name."""

    digest: bytes
    values: Callable[[], dict[str, str]]


def raise_different_facts(comm: Reducer, facts: Facts) -> NoReturn:
    """RuntimeError naming the first of ``facts`` that differs, with what the ranks have. Collective."""
    mine = facts.values()
    digests = b"".join(zlib.crc32(f"{name} {value}".encode()).to_bytes(4, "little") for name, value in mine.items())
    everyone = comm.exchange(digests[: comm.max_payload_bytes // 4 * 4])
    at = 0
    while at < max(map(len, everyone)) and len({other[at : at + 4] for other in everyone}) == 1:
        at += 4
    name, value = [*mine.items(), ("later facts", "nothing")][min(at // 4, len(mine))]
    said = [str(other, "utf-8") for other in comm.exchange(f"{name} {value}".encode()[: comm.max_payload_bytes // 2])]
    by_rank = ", ".join(
        f"{text.removeprefix(name).strip()} on rank{'s' * (said.count(text) > 1)} "
        f"{', '.join(str(rank) for rank, other in enumerate(said) if other == text)}"
        for text in dict.fromkeys(said)
    )
    raise RuntimeError(
        f"ranks disagree on {name}: {by_rank}; nothing has been updated. Every rank must set the same value: if it "
        "depends on a loss or a metric, all-reduce that first"
    )


def raise_partly_replaced(infos: Sequence[ParamInfo], indices: Sequence[int]) -> NoReturn:
    raise RuntimeError(
        f"some ranks replaced or dropped the gradients of {_names(infos, indices)} and other ranks did not, or had no "
        "gradients yet; drop gradients on all ranks or on none. If some ranks skip a backward, call "
        "optimizer.grad_sync() on all ranks before optimizer.zero_grad(). To go on now, call zero_grad() on all ranks"
    )


def raise_different_factors(infos: Sequence[ParamInfo], indices: Sequence[int]) -> NoReturn:
    raise RuntimeError(
        f"ranks scaled the gradients of {_names(infos, indices)} differently; scale by the same factor on all ranks. "
        "If ranks use different parameters, call optimizer.grad_sync() first"
    )


def raise_different_questions(
    infos: Sequence[ParamInfo], what: str, counts: Sequence[int], missing: Sequence[int]
) -> NoReturn:
    """``counts``: of how many gradients each rank asked for ``what``. ``missing``: those that this rank did not list."""
    hint = f" This rank asked without a gradient for {_names(infos, missing)}." if missing else ""
    raise RuntimeError(
        f"ranks asked for the {what} of different gradients: {list(counts)} gradients (by rank).{hint} If ranks use "
        "different parameters, call optimizer.grad_sync() first, or optimizer.clip_grad_norm_()"
    )


def refuse(comm: Reducer, text: str, *, is_learnt: bool) -> NoReturn:
    """RuntimeError with ``text`` here, and on every rank that makes a collective call instead. Collective for those.

    ``is_learnt``: the others may not ask again ([Note: static graph]), so the communicator is aborted.
    """
    if is_learnt:
        comm.abort(text)
        raise RuntimeError(text)
    said = text.encode()[: comm.max_payload_bytes // 2].decode(errors="ignore").encode()
    everyone = [other.split(b":", 1)[0] for other in comm.exchange(REFUSED.encode() + b":" + said)]
    raise RuntimeError(f"{text} (by rank: {', '.join(str(other, 'utf-8') for other in everyone)})")


def refuse_private(comm: Reducer, infos: Sequence[ParamInfo], indices: Sequence[int]) -> NoReturn:
    """[Note: static graph] Those without these gradients would never hear of the factor."""
    text = (
        f"static_graph=True: the gradients of {_names(infos, indices)} cannot be scaled before they are reduced, "
        "because some ranks do not have them; call optimizer.grad_sync() first, on all ranks"
    )
    refuse(comm, text, is_learnt=True)


def break_promise(comm: Reducer, info: ParamInfo) -> NoReturn:
    """[Note: static graph] Aborts the communicator: there is no agreement in which the other ranks would be told."""
    text = (
        f"static_graph=True, but the gradients of parameter {info.name!r} on rank {comm.rank} differ from the "
        "first step (missing, new, repeated, or dropped before a step); make the optimizer without static_graph"
    )
    comm.abort(text)
    raise RuntimeError(text)


def _names(infos: Sequence[ParamInfo], indices: Sequence[int]) -> str:
    return ", ".join(repr(infos[i].name) for i in indices[:5]) + (", ..." if len(indices) > 5 else "")


_warning_is_due = threading.Lock()  # acquired, for good, by the thread that warns


def warn_of_late_round() -> None:
    """Once in a process."""
    if _warning_is_due.acquire(blocking=False):
        warnings.warn(
            "a gradient came after its bucket had been reduced, on this rank or another one, so some buckets are "
            "reduced twice in this step, which costs time and memory: run every backward but the last one "
            "before a step inside optimizer.no_sync(), and checkpoint with use_reentrant=False (docs/frameworks.md has the code "
            "for Trainer, Accelerate, Lightning and Fabric)",
            stacklevel=2,
        )
