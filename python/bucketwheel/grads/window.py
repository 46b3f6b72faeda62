"""Window: gradients on their way from autograd into buckets and shards, and what stock code asks of them.

A post-accumulate hook takes each gradient out of ``p.grad`` into its bucket and leaves a placeholder there
(`placeholder`). It is the last hook of its parameter: others may edit the gradient. Most gradients are handled in native
code: [Note: quick arrival], csrc/bindings/schedule_py.h. What goes where, and which bucket is reduced when, is decided by
the native schedule (csrc/plan/schedule.h) and carried out here and in `launch`.

Inside `no_sync` plain tensors stay in ``p.grad``. At its end they are *kept* aside, unreduced, behind placeholders, so
that stock code never takes them for whole gradients; they go into their buckets with the next gradient or when the
window ends.

[Note: what the placeholder in p.grad means] After any call here ``p.grad`` is one of: None (no gradient; whatever the
shards hold is void), the parameter's placeholder (its gradient is in the buckets or shards), or a plain tensor (a new
gradient that is not in any bucket yet, which *replaces* what the buckets hold, because somebody assigned it).
"""

from __future__ import annotations

import contextlib
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from bucketwheel.comm.replicas import Reducer
from bucketwheel.grads import agreement
from bucketwheel.grads.bucket import GradBucket, expect_gradient_of, in_memory_order
from bucketwheel.grads.graph_capture import Captures, WindowState
from bucketwheel.grads.launch import Launcher
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.grads.reduced import ReducedGrads
from bucketwheel.grads.unfrozen import add_hook, run_last
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.native import core
from bucketwheel.pool.slots import Slots

_NONE, _PLACEHOLDER, _PLAIN = range(3)  # what native Arrivals.look finds in p.grad
_IS_HELD = bytes([False, True, True]).ljust(256, b"\0")
_IS_PLACEHOLDER = bytes([False, True, False]).ljust(256, b"\0")

_NEED_GRADIENTS = ("step", "norm", "norms", "grad_sync")  # what a step of a static graph does once it has its gradients


class GradWindow:
    """One rank's gradients: hooks, the sync window, and what ranks agree on at its end. Implements `GradOwner`.

    Thread-safe, as backward may run anywhere. Several backwards may run at once if they reach different parameters: torch
    runs the hooks of a parameter outside of the lock under which it adds to ``p.grad``, so of two that reach the same one
    a gradient could be lost.
    """

    def __init__(
        self,
        comm: Reducer,
        infos: Sequence[ParamInfo],
        buckets: Sequence[GradBucket],
        reduced: ReducedGrads,
        *,
        slots: Slots,
        overlap: bool,
        max_inflight: int,
        is_static: bool = False,
        is_capturable: bool = False,
    ) -> None:
        self.comm = comm
        self.infos = list(infos)
        self.buckets = list(buckets)
        self.reduced = reduced
        self._is_on_cpu = comm.device < 0
        self.params = [info.param for info in self.infos]
        self._overlap = overlap
        self._lock = threading.RLock()
        # Flags: which parameters have a gradient on any rank. Agreed by each `close`, until the next.
        self.held = bytes(len(self.infos))
        self._state = WindowState.CLOSED
        self.captures = Captures(comm.device, is_capturable=is_capturable)
        self._no_sync_depth = 0
        # Whether a step has used all gradients that there are: True from the end of a step until the next gradient arrives.
        self.is_used = False
        # What `no_sync` has left, by parameter: the gradient is here and nowhere else. An entry goes into its bucket with
        # the next gradient or at the close, goes back to p.grad if `no_sync` is entered again, or is dropped by `zero_grad`.
        self._kept: dict[int, Tensor] = {}
        self._schedule = core.Schedule(self._buckets_of_params(), len(self.buckets), is_static)
        self._placeholders = [ShardedGrad(info.param, self, info.index, info.name) for info in self.infos]
        self._arrivals = self._make_arrivals()
        self.launcher = Launcher(comm, self.buckets, self._arrivals, slots=slots, max_inflight=max_inflight)
        self._hooks = [add_hook(param, self._arrivals.hook(index)) for index, param in enumerate(self.params)]
        for drop in (*(hook.remove for hook in self._hooks), self._arrivals.disable):  # a hook may outlive the buckets
            weakref.finalize(self, drop).atexit = False

    def _buckets_of_params(self) -> list[list[int]]:
        buckets_of: list[list[int]] = [[] for _ in self.infos]
        for bucket in self.buckets:
            for index in bucket.parts:
                buckets_of[index].append(bucket.index)
        return buckets_of

    def _make_arrivals(self) -> Any:
        arrivals = core.Arrivals(self._schedule, len(self.buckets), weakref.ref(self))
        for index, holding in enumerate(self._buckets_of_params()):
            parts = [(b, self.buckets[b].parts[index]) for b in holding]
            places = [(b, part.begin, part.param_begin, part.numel) for b, part in parts]
            arrivals.add_param(self.params[index], self._placeholders[index], places)
        return arrivals

    @property
    def _is_open(self) -> bool:
        """Whether this rank has prepared its shards for the window's sums."""
        return self._state is not WindowState.CLOSED

    # --- arrival -----------------------------------------------------------------------------------------------------

    def on_gradient(self, index: int, param: Tensor) -> None:
        """The post-accumulate hook, where native code did not handle it: ``param.grad`` holds this parameter's gradient."""
        grad = param.grad
        assert grad is not None
        with self._lock, torch.no_grad():
            self._kept.pop(index, None)  # replaced
            self._arrive(index, grad, add=False, launch=self._overlap)
            param.grad = self._placeholders[index]

    def run_last(self, index: int, param: Tensor) -> None:
        """Native code has found hooks of the parameter that were registered after ours."""
        run_last(self._hooks[index], param)

    def accumulate(self, index: int, grad: Tensor) -> None:
        with self._lock, torch.no_grad():
            kept = self._kept.pop(index, None)
            grad = grad if kept is None else kept.add_(grad)
            self._arrive(index, grad, add=True, launch=self._overlap and not self._no_sync_depth)

    def _arrive(self, index: int, grad: Tensor, *, add: bool, launch: bool) -> None:
        """Puts a gradient into its buckets: added to what the window has of the parameter, or in its place."""
        info = self.infos[index]
        self._expect_plain(info, grad)
        self.is_used = False
        flat = in_memory_order(grad, info)
        was_open = self._is_open
        if was_open:
            self._is_captured("gradients")
        else:
            self._open_window(None if add else index)
        has_older = self._schedule.has_stored(index) or (was_open and self.reduced.has_content(index))
        if self.reduced.factors.has(index):
            if add:  # the factor will be applied to the sum of both
                wide = flat if flat.dtype == torch.float64 else flat.float()  # 16 bits would overflow
                flat = wide / self.reduced.factors[index]
            else:
                self.reduced.factors.set(index)
        stores, launches = self._schedule.gradient(index, has_older and not add, launch)
        if self._schedule.is_deviation(index):
            agreement.break_promise(self.comm, info)
        self.launcher.carry_out(stores, launches, flat)

    def launch_ready(self) -> None:
        """Gradients that native code handled have filled a bucket."""
        with self._lock, torch.no_grad():
            for launch in self._schedule.ready():
                self.launcher.launch(launch)

    def _expect_plain(self, info: ParamInfo, grad: Tensor) -> None:
        placeholder = self._placeholders[info.index]
        if placeholder.is_in_reducer:
            placeholder.reject_reducer_view(grad)
        expect_gradient_of(info, grad)

    def _open_window(self, arriving: int | None, remaining: Sequence[float] | None = None) -> None:
        """Prepares the shards for new sums: drops what p.grad no longer stands for, applies pending factors (all but
        ``remaining``)."""
        found = self._arrivals.look(self.params)
        others = 0 if self._no_sync_depth else found.count(_PLAIN) - (arriving is not None)
        found = found.translate(_IS_PLACEHOLDER)
        state = WindowState.EAGER
        if not self._is_on_cpu:
            is_learnt = self._schedule.is_learnt
            state = self.captures.begin(is_learnt=is_learnt, has_grads=any(found), has_plain=others > 0)
        if self.infos:
            self.launcher.begin_window(self.infos[0].device, is_captured=state is WindowState.CAPTURED)
        self._state = state
        self._prepare_shards(found, arriving, remaining)
        content = self.reduced.content
        if self._is_on_cpu and not self._kept and not self.reduced.factors.known:
            self._arrivals.enable(content, self._overlap)

    def _prepare_shards(self, found: bytes, arriving: int | None, remaining: Sequence[float] | None) -> None:
        """``found``: flags of what p.grad has a placeholder of."""
        if not any(found):
            self.reduced.forget_all()
        for index, has_content in enumerate(self.reduced.content):
            if not has_content:
                continue
            if index == arriving or not found[index]:
                self.reduced.forget(index)
            else:
                self.reduced.flush_factor(index, 1.0 if remaining is None else remaining[index])
        content = self.reduced.content
        has_any = any(content)
        for bucket in self.buckets:
            bucket.accumulates = has_any and any(content[i] for i in bucket.parts)
            for i in bucket.parts if bucket.accumulates else ():
                if not content[i]:
                    self.reduced.zero(i)

    def start(self, indices: Sequence[int]) -> None:
        """Nothing more will come for these: takes what `no_sync` has kept of them, and launches what is complete. Local."""
        self.expect_outside_no_sync("grad_sync(parameters)")
        with self._lock, torch.no_grad():
            if self._is_open:
                self._is_captured("grad_sync(parameters)")
            for index in indices:
                kept = self._kept.pop(index, None)
                if kept is not None and self.params[index].grad is self._placeholders[index]:
                    self._arrive(index, kept, add=True, launch=True)
            for launch in self._schedule.complete(indices):
                self.launcher.launch(launch)

    # --- the end of a window -----------------------------------------------------------------------------------------

    def close(self, why: str, facts: agreement.Facts | None = None, *, is_the_last: bool = False) -> Any:
        """Ends the window: afterwards the shards hold the sums of everything, on all ranks alike. Collective.

        Returns what the ranks agreed on (the native ``WindowVerdict``). Without new gradients anywhere it costs one exchange
        between the hosts. RuntimeError on every rank, and the window stays open, if ranks close it for different reasons
        ``why`` (one calls `step`, another `clip_grad_norm_`), or disagree on what a gradient is (one replaced or scaled it,
        another did not) or, if they agree on anything ([Note: static graph]), on ``facts``.
        ``is_the_last``: another object takes over, so no promise of a static graph is kept.
        """
        with self._lock, torch.no_grad():
            is_captured = self._expect_own_grads(why)
            found = self._sweep()  # 1. what no hook took
            for launch in self._schedule.flush():  # 2. what is left of the first round, if this rank has gradients
                self.launcher.launch(launch)
            agreed = self._agree(why, found, facts, is_the_last)  # 3. with the other ranks
            if is_captured:
                self._expect_all_captured(why)
            first, late = self._schedule.close(agreed)
            if agreed.is_dirty:
                self._reduce(agreed, first, late)  # 4. the rest of the first round, and the late round
            self._settle(agreed.held, found)  # 5. p.grad says what there is
            if late:  # last of all: it may be made an error
                agreement.warn_of_late_round()
            return agreed

    def _is_captured(self, what: str) -> bool:
        """Whether the call ``what`` is captured in a CUDA graph. CaptureError if it may not be."""
        return not self._is_on_cpu and self.captures.ask(what, self._state)

    def _expect_own_grads(self, what: str) -> bool:
        """`_is_captured`. CaptureError if the captured call would read gradients from outside of the graph."""
        is_captured = self._is_captured(what)
        if is_captured and not self._is_open:
            found = self._arrivals.look(self.params)
            self.captures.expect_own_grads(any(found), _PLAIN in found)
        return is_captured

    def _sweep(self) -> bytes:
        """Takes gradients that no hook took: kept from `no_sync`, or assigned by hand. Flags: whether p.grad is a
        placeholder."""
        found: bytes = self._arrivals.look(self.params)
        if not self._kept and _PLAIN not in found:
            return found.translate(_IS_HELD)
        for index, what in enumerate(found):
            kept = self._kept.pop(index, None)
            if what == _PLACEHOLDER:
                if kept is not None:
                    self._arrive(index, kept, add=True, launch=self._overlap)
            elif what == _PLAIN:
                grad = self.params[index].grad
                assert grad is not None
                self._arrive(index, grad, add=False, launch=self._overlap)
                self.params[index].grad = self._placeholders[index]
        return found.translate(_IS_HELD)

    def _agree(self, why: str, held: bytes, facts: agreement.Facts | None, is_the_last: bool) -> Any:
        """What all ranks know at the end of a window. RuntimeError on every rank as `close` says, or on the rank that breaks the
        promise of a static graph."""
        for drop in self._schedule.drops(held):
            self.buckets[drop.bucket].drop(drop.param)
        older = self.reduced.older()
        if not all(held):
            older = bytes(map(min, older, held))
        factors = self.reduced.factors.known
        if self._schedule.is_learnt and not is_the_last:
            self._expect_promise_kept(why, held)
            agreed = self._schedule.assume(held, older, factors)
        else:
            notes = self._schedule.notes(held, older, factors)
            agreed = self._schedule.agree(self._exchange(why, notes, facts))
        if agreed.conflicts:
            agreement.raise_partly_replaced(self.infos, agreed.conflicts)
        if agreed.scaled_apart:
            agreement.raise_different_factors(self.infos, agreed.scaled_apart)
        return agreed

    def _exchange(self, why: str, payload: bytes, facts: agreement.Facts | None = None) -> list[bytes]:
        """Everyone's payloads by rank. RuntimeError on every rank unless all exchange for the same reason, with the same
        ``facts``."""
        digest = b"" if facts is None else facts.digest
        everyone = [
            other.split(b":", 1)
            for other in self.comm.exchange(why.replace(":", "_").encode() + b":" + digest + payload)
        ]
        payloads = [other[1] for other in everyone]
        if any(other[0] != everyone[0][0] for other in everyone):
            agreement.raise_different_calls([str(other[0], "utf-8") for other in everyone], payloads)
        if facts is None:
            return payloads
        if any(not other.startswith(digest) for other in payloads):
            agreement.raise_different_facts(self.comm, facts)
        return [other[len(digest) :] for other in payloads]

    def _expect_promise_kept(self, why: str, held: bytes) -> None:
        """[Note: static graph] Without any gradient nobody needs the window to close: no rank has anything to reduce."""
        is_needed = self._schedule.is_dirty or why in _NEED_GRADIENTS or why.startswith("unscale")
        deviating = self._schedule.find_deviation(held) if is_needed else -1
        if deviating >= 0:
            if not any(held):
                self.captures.expect_no_replay(why)
            agreement.break_promise(self.comm, self.infos[deviating])

    def _expect_all_captured(self, why: str) -> None:
        """RuntimeError, or `CommTimeout`, unless all ranks capture the call ``why`` in a CUDA graph: a replay would wait for
        those that do not."""
        self._exchange(f"captured {why}", b"")

    def _reduce(self, agreed: Any, first: Sequence[Any], late: Sequence[Any]) -> None:
        """Launches what is left of the window, on all ranks the same, and waits for all of it."""
        if not self._is_open:
            self._open_window(None, memoryview(agreed.factors).cast("d") if agreed.factors else None)
        self.reduced.factors.known = agreed.factors
        reductions = self.launcher.reductions
        reductions.begin_close()
        for launch in first:
            self.launcher.launch(launch)
        reductions.wait()
        self.reduced.mark_reduced()
        for index in agreed.void:
            self.reduced.zero(index)
        for launch in late:
            self.launcher.launch(launch)
        reductions.wait()
        self._arrivals.disable()
        if self._state is WindowState.CAPTURED:
            self.launcher.end_captured()
        reductions.end_window(is_complete=agreed.is_complete or not self._overlap)
        self._state = WindowState.CLOSED

    def _settle(self, held: bytes, before: bytes) -> None:
        """Makes ``p.grad`` say what all ranks now hold. ``before``: flags of what had a placeholder."""
        if not self._is_on_cpu:
            self.captures.end()
        self.held = held
        self.reduced.set_content(held)
        if held != before:
            for param, is_held, had, placeholder in zip(self.params, held, before, self._placeholders, strict=True):
                if is_held and not had:
                    param.grad = placeholder

    def discard(self) -> None:
        """Ends the window for good, and whatever is in it, without asking whether the ranks agree on that. Collective.

        What some have launched the others launch too, so that the communicators can go on. RuntimeError on every rank if some
        make another call. With a static graph nothing is asked: a rank that has dropped gradients aborts the communicator.
        """
        with self._lock, torch.no_grad():
            self._forget_capture()
            self._is_captured("close")
            if self._schedule.is_learnt and self._schedule.is_dirty:
                held = self._arrivals.look(self.params).translate(_IS_HELD)
                if (
                    deviating := self._schedule.find_deviation(held)
                ) >= 0:  # others may never launch what is launched here
                    name = self.infos[deviating].name
                    self.comm.abort(f"static_graph=True: closed after gradients of parameter {name!r} had been dropped")
                    return
            for launch in self._schedule.flush():
                self.launcher.launch(launch)
            if self._schedule.is_learnt:
                agreed = self._schedule.assume(b"")
            else:
                agreed = self._schedule.agree(self._exchange("close", self._schedule.notes(b"")))
            first, _ = self._schedule.close(agreed)
            if agreed.is_dirty:
                self._reduce(agreed, first, ())

    # --- windows that end otherwise, and gradients that are not reduced yet ------------------------------------------

    def zero_grad(self) -> None:
        """Drops every gradient. Local."""
        with self._lock:
            self._forget_capture()
            self._kept.clear()
            self._schedule.discard()
            for bucket in self.buckets:
                bucket.drop_memory(late_only=True)
            for param in self.params:
                param.grad = None
            if self._is_open:
                self.reduced.factors.reset_all()

    def _forget_capture(self) -> None:
        """Drops the window of a capture that has failed, or ended before it: nothing of it has run. On all ranks or none."""
        if self._is_on_cpu or not self.captures.forget():
            return
        self._kept.clear()
        if self._is_open:
            self._schedule.forget_window()
            self.launcher.forget_captured()
            self._state = WindowState.CLOSED
        for param in self.params:
            param.grad = None

    def first_pending(self) -> ParamInfo | None:
        """The first parameter whose gradient no step has used. Local."""
        found = zip(self.infos, self._arrivals.look(self.params), strict=True)
        return next((info for info, what in found if what == _PLAIN or (what and not self.is_used)), None)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._lock:
            if not self._no_sync_depth:
                self._expect_own_grads("no_sync")
            self._no_sync_depth += 1
            self._arrivals.ignore(True)
            if self._no_sync_depth == 1:
                for index, grad in self._kept.items():  # so that autograd adds to it by itself
                    if self.params[index].grad is self._placeholders[index]:
                        self.params[index].grad = grad
                self._kept.clear()
        try:
            yield
        finally:  # an exception too leaves gradients of this rank alone, which stock code must not take for whole ones
            with self._lock, torch.no_grad():
                self._no_sync_depth -= 1
                if not self._no_sync_depth:
                    self._arrivals.ignore(False)
                    self._keep()

    def _keep(self) -> None:
        """Puts placeholders where `no_sync` has left plain gradients."""
        for info in self.infos:
            i, grad = info.index, info.param.grad
            if grad is None or grad is self._placeholders[i]:
                continue
            self._expect_plain(info, grad)
            self.is_used = False
            has_older = self.reduced.has_content(i)
            if self._is_open and (has_older or self._schedule.has_stored(i)):
                self._arrive(i, grad, add=False, launch=False)
            else:
                if has_older:
                    self.reduced.forget(i)  # replaced
                self._kept[i] = grad
                if not self._is_on_cpu:
                    self.captures.keep()
                self._arrivals.disable()
            info.param.grad = self._placeholders[i]

    @property
    def is_in_no_sync(self) -> bool:
        return self._no_sync_depth > 0

    def expect_outside_no_sync(self, what: str) -> None:
        if self._no_sync_depth:
            raise RuntimeError(f"{what} inside no_sync(), whose gradients are not to be reduced yet: leave that first")

    def refuse(self, text: str) -> NoReturn:
        """RuntimeError with ``text``, and one on every other rank. Collective for those that are not refused."""
        with self._lock:
            agreement.refuse(self.comm, text, is_learnt=self._schedule.is_learnt)

    def expect_done_by_all(self, what: str, error: Exception | None) -> None:
        """Raises ``error``, on the other ranks ValueError with its text, if ``what`` has failed on any. Collective."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        with self._lock, core.PublicCall(self.comm._natives, what.partition(" ")[0]):
            everyone = self._exchange(what, text.encode()[: self.comm.max_payload_bytes // 2])
        if error is not None:
            raise error
        for rank, other in enumerate(everyone):
            if other:
                raise ValueError(
                    f"{what} has failed on rank {rank}, so no rank has done it: {str(other, 'utf-8', 'ignore')}"
                )

    # --- what stock code asks of placeholders (`GradOwner`) ----------------------------------------------------------

    def _close_for(self, what: str, indices: Sequence[int]) -> None:
        """Closes the window. RuntimeError on every rank unless all ask for ``what`` of the same gradients.

        Code that asks for one gradient after the other made its list before it began: where lists differ, the first
        question is the time to say so, for the last ones have no counterpart on some ranks.
        """
        agreed = self.close(what)
        asked = struct.pack(f"<{len(indices)}q", *indices)
        everyone = self._exchange(what, asked)
        if any(other != asked for other in everyone) or (agreed.is_uneven and len(indices) == 1):
            missing = [i for i, is_held in enumerate(agreed.held) if is_held and i not in set(indices)]
            agreement.raise_different_questions(self.infos, what, [len(other) // 8 for other in everyone], missing)

    def norms(self, indices: Sequence[int], ord: float) -> Tensor:
        with self._lock, core.PublicCall(self.comm._natives, "clip_grad_norm_ or another norm of gradients"):
            self._close_for("norms", indices)
            return self.reduced.norms(indices, ord)

    def scale(self, indices: Sequence[int], factor: float | Tensor) -> None:
        """A factor on the device that is exactly 0 is not supported while gradients still arrive (`GradOwner.scale`)."""
        with self._lock:
            if not isinstance(factor, Tensor) or self._is_on_cpu:
                factor = float(factor)
            is_captured = self._expect_own_grads("scaling gradients")
            content = self.reduced.content
            private = [i for i in indices if self._schedule.is_private(i) and not content[i] and i not in self._kept]
            if private:
                agreement.refuse_private(self.comm, self.infos, private)
            for index in indices:
                if index in self._kept:
                    self._kept[index].mul_(factor)
            rest = [i for i in indices if i not in self._kept]
            self._arrivals.disable()  # until the window ends, what arrives is to be divided by the factor
            is_zero = not isinstance(factor, Tensor) and factor == 0.0
            if is_zero and self._is_open:
                self.zero(rest)  # what comes later cannot be divided by a pending 0
                return
            self.reduced.factors.scale(rest, factor)
            for index in rest if is_zero else ():  # multiplied now: inf * 0 is NaN, as torch has it
                self.reduced.flush_factor(index)
            if not self._is_open:
                if is_captured and not isinstance(factor, Tensor):
                    self._expect_all_captured(f"scale by {factor}")  # in a graph nobody will compare it
                self.reduced.settle()

    def unscale(self, indices: Sequence[int], found_inf: Tensor, inv_scale: Tensor) -> None:
        """Every gradient of the same dtypes that any rank has, whether this rank could list it or not.

        The scaler makes one call per dtype.
        """
        dtypes = {self.infos[i].dtype for i in indices}
        self.captures.refuse_scaler()
        with self._lock, core.PublicCall(self.comm._natives, "GradScaler.unscale_"):
            self.close(f"unscale {' and '.join(sorted(map(str, dtypes)))}")
            held = [i for i, is_held in enumerate(self.held) if is_held and self.infos[i].dtype in dtypes]
            found_inf.copy_(self.reduced.found_inf(found_inf))
            self.reduced.factors.scale(held, inv_scale)

    def clamp(self, indices: Sequence[int], low: float | None, high: float | None) -> None:
        with self._lock, torch.no_grad(), core.PublicCall(self.comm._natives, "clip_grad_value_"):
            self._close_for("clamp", indices)
            for index in indices:
                self.reduced.clamp(index, low, high)
            self.reduced.settle()

    def zero(self, indices: Sequence[int]) -> None:
        with self._lock, torch.no_grad():
            for index in indices:
                if index in self._kept:
                    self._kept[index].zero_()
                elif self._is_open:
                    self._arrive(index, torch.zeros_like(self.params[index]), add=False, launch=False)
                else:
                    self.reduced.replace_by_zero(index)
            if not self._is_open:
                self.reduced.settle()

    def full(self, index: int) -> Tensor | None:
        """The whole gradient of a parameter, None where no rank has one. Collective."""
        with self._lock, torch.no_grad():
            self.close(f"full_grad of {self.infos[index].name!r}")
            return self.reduced.full(index) if self.held[index] else None

    # --- the life of the optimizer -----------------------------------------------------------------------------------

    def carry_over(self, held: bytes, is_used: bool) -> None:
        """The shards hold gradients of the first parameters: flags."""
        self.is_used = is_used
        held = held.ljust(len(self.params), b"\0")
        for param, is_held, placeholder in zip(self.params, held, self._placeholders, strict=True):
            if is_held:
                param.grad = placeholder
        self.held = held

    def remove(self) -> None:
        """Takes the hooks off and the placeholders out of ``p.grad``; gives the memory of buckets back."""
        self._arrivals.disable()
        for hook in self._hooks:
            hook.remove()
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            if param.grad is placeholder:
                param.grad = None
        self.launcher.release()
