"""Grad agreement: what ranks tell each other about their gradients, host to host, and the errors where they differ."""

from __future__ import annotations

import struct
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from bucketwheel.comm.replicas import Reducer
from bucketwheel.grads.graph_capture import Captures
from bucketwheel.layout.flat_params import ParamInfo

__all__ = ["GradAgreement", "warn_of_late_round"]

_NEED_GRADIENTS = ("step", "norm", "norms", "grad_sync")  # what a step of a static graph does once it has its gradients


class GradAgreement:
    """One rank's side. ``schedule``: the native one, which makes and reads the notes. Every method is collective."""

    def __init__(self, comm: Reducer, infos: Sequence[ParamInfo], schedule: Any, captures: Captures) -> None:
        self._captures = captures
        self._comm = comm
        self._infos = infos
        self._schedule = schedule

    def _exchange(self, why: str, payload: bytes) -> list[bytes]:
        """Everyone's payloads by rank. RuntimeError on every rank unless all exchange for the same reason."""
        everyone = [other.split(b":", 1) for other in self._comm.exchange(why.encode() + b":" + payload)]
        reasons = [str(other[0], "utf-8") for other in everyone]
        if len(set(reasons)) > 1:
            refusals = [f"rank {rank}: {str(o[1], 'utf-8')}" for rank, o in enumerate(everyone) if o[0] == b"refused"]
            if refusals:
                raise RuntimeError(f"{'; '.join(refusals)} (by rank: {', '.join(reasons)})")
            raise RuntimeError(
                f"ranks did different things with their gradients: {', '.join(reasons)} (by rank). All ranks must call step, "
                "clip_grad_norm_ and stock code that needs whole gradients in the same order; where they use different parameters, "
                "call optimizer.grad_sync() before stock code"
            )
        return [other[1] for other in everyone]

    def agree(self, why: str, held: bytes, older: bytes, factors: bytes) -> Any:
        """What all ranks know at the end of a window: the native ``Agreement``. ``why``: what ends it.

        RuntimeError on every rank if ranks end it for different reasons or differ in what they did to a gradient; on
        the rank that breaks the promise of a static graph.
        """
        if self._schedule.is_learnt:
            # Without any gradient nobody needs the window to close: there is nothing to reduce on any rank.
            is_needed = self._schedule.is_dirty or why in _NEED_GRADIENTS or why.startswith("unscale")
            deviating = self._schedule.find_deviation(held) if is_needed else -1
            if deviating >= 0:
                if not any(held):
                    self._captures.expect_no_replay(why)
                self.break_promise(deviating)
            agreement = self._schedule.assume(held, older, factors)
        else:
            notes = self._schedule.notes(held, older, factors)
            agreement = self._schedule.agree(self._exchange(why, notes))
        if agreement.conflicts:
            raise RuntimeError(
                f"some ranks replaced or dropped the gradients of {self._names(agreement.conflicts)} and others did not, or had "
                "none to drop yet; drop gradients on all ranks with optimizer.zero_grad(), or on none, and call optimizer.grad_sync() "
                "before that where some ranks skip backward"
            )
        if agreement.scaled_apart:
            raise RuntimeError(
                f"ranks scaled the gradients of {self._names(agreement.scaled_apart)} differently; scale by the same factor on all "
                "ranks, after optimizer.grad_sync() where ranks use different parameters"
            )
        return agreement

    def expect_all_captured(self, why: str) -> None:
        """RuntimeError, or `CommTimeout`, unless all ranks capture the call ``why`` in a CUDA graph: a replay would wait for those
        that do not."""
        self._exchange(f"captured {why}", b"")

    def expect_same_question(self, what: str, indices: Sequence[int], agreement: Any) -> None:
        """RuntimeError on every rank unless all ask for ``what`` of the same gradients, right after ``agreement``.

        Code that asks for one gradient after the other made its list before it began: where lists differ, the first
        question is the time to say so, for the last ones have no counterpart on some ranks.
        """
        asked = struct.pack(f"<{len(indices)}q", *indices)
        everyone = self._exchange(what, asked)
        if any(other != asked for other in everyone) or (agreement.is_uneven and len(indices) == 1):
            missing = [i for i, is_held in enumerate(agreement.held) if is_held and i not in set(indices)]
            hint = f" This rank had no gradient for {self._names(missing)} when it asked." if missing else ""
            raise RuntimeError(
                f"ranks asked for the {what} of different gradients, {[len(o) // 8 for o in everyone]} of them.{hint} "
                "Where ranks use different parameters call optimizer.grad_sync() first, or optimizer.clip_grad_norm_()"
            )

    def refuse(self, text: str) -> NoReturn:
        """Raises RuntimeError here, and on every rank that goes on to a collective call instead."""
        if self._schedule.is_learnt:  # the others may not ask again
            self._comm.abort(text)
            raise RuntimeError(text)
        said = text.encode()[: self._comm.max_payload_bytes // 2].decode(errors="ignore").encode()
        everyone = [other.split(b":", 1)[0] for other in self._comm.exchange(b"refused:" + said)]
        raise RuntimeError(f"{text} (by rank: {', '.join(str(other, 'utf-8') for other in everyone)})")

    def refuse_private(self, what: str, indices: Sequence[int]) -> NoReturn:
        """RuntimeError on all ranks: [Note: static graph] those without these gradients would never hear of it."""
        self.refuse(
            f"static_graph=True: cannot {what} the gradients of {self._names(indices)}, which some ranks do not have, before they are "
            "reduced; call optimizer.grad_sync() first, on all ranks"
        )

    def break_promise(self, index: int) -> NoReturn:
        """[Note: static graph] There is no agreement in which the other ranks would be told, so they are told at once."""
        text = (
            f"static_graph=True, but the gradients of parameter {self._infos[index].name!r} on rank {self._comm.rank} are not those "
            "of the first step (missing, new, more of them, or dropped before a step); make the optimizer without static_graph"
        )
        self._comm.abort(text)
        raise RuntimeError(text)

    def _names(self, indices: Sequence[int]) -> str:
        return ", ".join(repr(self._infos[i].name) for i in indices[:5]) + (", ..." if len(indices) > 5 else "")


_is_untold = threading.Lock()  # taken by the one who tells of a late round


def warn_of_late_round() -> None:
    """Once in a process, whatever thread comes first."""
    if _is_untold.acquire(blocking=False):
        warnings.warn(
            "a gradient came after its bucket had been reduced, here or on another rank, so some buckets are reduced a second time "
            "when the window closes, which costs time and memory: run every backward but the last one before a step inside "
            "optimizer.no_sync(), and checkpoint with use_reentrant=False",
            stacklevel=2,
        )
