"""Hooks: gradients on their way from autograd into buckets and shards. Carries out what the schedule decides
(csrc/plan/schedule.h).

A post-accumulate hook takes each gradient out of ``p.grad`` into its bucket and leaves a placeholder there (`grad`).
Most of them are done with in native code: [Note: quick arrival], csrc/bindings/arrivals_py.h.
Inside `no_sync` plain tensors stay in ``p.grad``. At its end they are *kept* aside, unreduced, behind placeholders, so
that stock code never takes them for whole gradients; they go into their buckets with the next gradient or when the
window ends.

[Note: what the placeholder in p.grad means] After any call here ``p.grad`` is one of: None (no gradient; whatever the
shards hold is void), the parameter's placeholder (its gradient is in the buckets or shards), or a plain tensor (a new
gradient that is not in any bucket yet, which *replaces* what the buckets hold, because somebody assigned it).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from bucketwheel.comm.replicas import Reducer
from bucketwheel.device import CPU
from bucketwheel.grads.agreement import GradAgreement, warn_of_late_round
from bucketwheel.grads.bucket import GradBucket, stream_of
from bucketwheel.grads.bucket_slots import BucketSlots
from bucketwheel.grads.graph_capture import Captures
from bucketwheel.grads.launch import Launcher
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.grads.reduced import ReducedGrads
from bucketwheel.grads.unfrozen import add_hook
from bucketwheel.layout.flat_params import ParamInfo, expect_gradient_of, in_memory_order
from bucketwheel.native import core

if TYPE_CHECKING:
    from bucketwheel.grads.placeholder_owner import GradOwner

__all__ = ["GradWindow"]

_NONE, _PLACEHOLDER, _PLAIN = range(3)  # what native Arrivals.look finds in p.grad
_IS_HELD = bytes([False, True, True]).ljust(256, b"\0")
_IS_PLACEHOLDER = bytes([False, True, False]).ljust(256, b"\0")


class GradWindow:
    """One rank's gradients: hooks, window, agreement. Thread-safe (backward may run anywhere). Its subclass `answers.GradSync`
    answers for the placeholders.

    Several backwards may run at once if they reach different parameters. torch runs the hooks of a parameter outside of
    the lock under which it adds to ``p.grad``, so of two backwards that reach the same one a gradient could be lost.
    """

    def __init__(
        self,
        comm: Reducer,
        infos: Sequence[ParamInfo],
        buckets: Sequence[GradBucket],
        reduced: ReducedGrads,
        *,
        slots: BucketSlots | None,
        overlap: bool,
        max_inflight: int,
        is_static: bool = False,
        is_capturable: bool = False,
    ) -> None:
        self.comm = comm
        self.infos = list(infos)
        self.buckets = list(buckets)
        self.reduced = reduced
        self.held = bytes(len(self.infos))  # flags, agreed when the last window closed
        self._params = [info.param for info in self.infos]
        self._overlap = overlap
        self._is_open = False  # this rank has prepared its shards for the window's sums
        self.captures = Captures(comm.device, is_capturable=is_capturable)
        self._no_sync_depth = 0
        self._kept: dict[int, Tensor] = {}  # from `no_sync`: the gradient is here and nowhere else
        self._lock = threading.RLock()
        buckets_of: list[list[int]] = [[] for _ in self.infos]
        for bucket in self.buckets:
            for index in bucket.parts:
                buckets_of[index].append(bucket.index)
        self._schedule = core.Schedule(buckets_of, len(self.buckets), is_static)
        self._placeholders = [
            ShardedGrad(info.param, cast("GradOwner", self), info.index, info.name) for info in self.infos
        ]
        self._arrivals = core.Arrivals(self._schedule, len(self.buckets), weakref.ref(self))
        for param, placeholder, holding in zip(self._params, self._placeholders, buckets_of, strict=True):
            parts = [self.buckets[b].parts[placeholder.param_index] for b in holding]
            self._arrivals.add_param(
                param,
                placeholder,
                [(b, p.begin, p.param_begin, p.numel) for b, p in zip(holding, parts, strict=True)],
            )
        self.launcher = Launcher(comm, self.buckets, self._arrivals, slots=slots, max_inflight=max_inflight)
        self._agreement = GradAgreement(comm, self.infos, self._schedule, self.captures)
        self._hooks = [add_hook(param, self._arrivals.hook(index)) for index, param in enumerate(self._params)]
        for drop in (*(hook.remove for hook in self._hooks), self._arrivals.disable):  # a hook may outlive the buckets
            weakref.finalize(self, drop).atexit = False

    # --- arrival -----------------------------------------------------------------------------------------------------

    def on_gradient(self, index: int, param: Tensor) -> None:
        """The post-accumulate hook, where it was not done with quickly: ``param.grad`` holds this parameter's gradient."""
        grad = param.grad
        assert grad is not None
        with self._lock, torch.no_grad():
            self._kept.pop(index, None)  # replaced
            self._arrive(index, grad, add=False, launch=self._overlap)
            param.grad = self._placeholders[index]

    def accumulate(self, index: int, grad: Tensor) -> None:
        with self._lock, torch.no_grad():
            kept = self._kept.pop(index, None)
            grad = grad if kept is None else kept.add_(grad)
            self._arrive(index, grad, add=True, launch=self._overlap and not self._no_sync_depth)

    def _arrive(self, index: int, grad: Tensor, *, add: bool, launch: bool) -> None:
        info = self.infos[index]
        self._expect_plain(info, grad)
        flat = in_memory_order(grad, info)
        was_open = self._is_open
        if was_open:
            self.captures.goes_on()
        else:
            self._open_window(None if add else index)
        has_older = self._schedule.has_stored(index) or (was_open and self.reduced.has_content(index))
        if self.reduced.has_factor(index):
            if add:  # the factor will be applied to the sum of both
                wide = flat if flat.dtype == torch.float64 else flat.float()  # 16 bits would overflow
                flat = wide / self.reduced.visible_factor(index)
            else:
                self.reduced.reset_factor(index)
        stores, launches = self._schedule.gradient(index, has_older and not add, launch)
        if self._schedule.is_deviation(index):
            self._agreement.break_promise(index)
        self.launcher.carry_out(stores, launches, flat)

    def launch_ready(self) -> None:
        """Gradients that were done with quickly have filled a bucket."""
        with self._lock, torch.no_grad():
            for launch in self._schedule.ready():
                self.launcher.launch(launch)

    def _expect_plain(self, info: ParamInfo, grad: Tensor) -> None:
        self._placeholders[info.index].reject_reducer_view(grad)
        expect_gradient_of(info, grad)

    def _open_window(self, arriving: int | None, remaining: Sequence[float] | None = None) -> None:
        """Prepares the shards for new sums: what was taken away goes, pending factors are applied (all but ``remaining``)."""
        found = self._arrivals.look(self._params)
        others = 0 if self._no_sync_depth else found.count(_PLAIN) - (arriving is not None)
        found = found.translate(_IS_PLACEHOLDER)
        self.captures.begin(self._schedule.is_learnt, any(found), others > 0)
        if self.captures.has_window:
            self.launcher.begin_captured()
        self._is_open = True
        self.launcher.prepared_in = stream_of(self.infos[0].device) if self.infos else None
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
        for bucket in self.buckets:
            bucket.accumulates = any(content) and any(content[i] for i in bucket.parts)
            for i in bucket.parts if bucket.accumulates else ():
                if not content[i]:
                    self.reduced.zero(i)
        if self.comm.device == CPU and not self._kept and not self.reduced.factors():
            self._arrivals.enable(content, self._overlap)

    def start(self, indices: Sequence[int]) -> None:
        """Nothing more will come for these: takes what `no_sync` has kept of them, and launches what is complete. Local."""
        self.expect_outside_no_sync("grad_sync(parameters)")
        with self._lock, torch.no_grad():
            if self._is_open:
                self.captures.goes_on()
            for index in indices:
                kept = self._kept.pop(index, None)
                if kept is not None and self.infos[index].param.grad is self._placeholders[index]:
                    self._arrive(index, kept, add=True, launch=True)
            for launch in self._schedule.complete(indices):
                self.launcher.launch(launch)

    # --- the end of a window -----------------------------------------------------------------------------------------

    def close(self, why: str) -> Any:
        """Ends the window: afterwards the shards hold the sums of everything, on all ranks alike. Collective.

        Without new gradients anywhere it costs one exchange between the hosts. RuntimeError on every rank, and the
        window stays open, if ranks close it for different reasons ``why`` (one calls `step`, another
        `clip_grad_norm_`), or disagree on what a gradient is (one replaced or scaled it, another did not).
        """
        with self._lock, torch.no_grad():
            if why == "close":
                self._forget_capture()
            is_captured = self._ask(why)
            found = self._sweep()
            for launch in self._schedule.flush():
                self.launcher.launch(launch)
            agreement = self._agree(why, found)
            if is_captured:
                self._agreement.expect_all_captured(why)
            first, late = self._schedule.close(agreement)
            if agreement.is_dirty:
                if not self._is_open:
                    remaining = memoryview(agreement.factors).cast("d") if agreement.factors else None
                    self._open_window(None, remaining)
                self.reduced.set_factors(agreement.factors)
                self.launcher.inflight.begin_close()
                for launch in first:
                    self.launcher.launch(launch)
                self.launcher.inflight.wait()
                self.reduced.mark_reduced()
                for index in agreement.void:
                    self.reduced.zero(index)
                for launch in late:
                    self.launcher.launch(launch)
                self.launcher.inflight.wait()
                self._is_open = False
                self._arrivals.disable()
                if is_captured:
                    self.launcher.end_captured()
                self.launcher.inflight.end_window(agreement.is_complete or not self._overlap)
            self.captures.end()
            self._settle(agreement.held, found)
            if late:  # last of all: it may be made an error
                warn_of_late_round()
            return agreement

    def _ask(self, what: str) -> bool:
        """Whether the call ``what`` is captured in a CUDA graph. CaptureError if it may not be, or would read gradients from
        outside of the graph."""
        is_captured = self.captures.ask(what, self._is_open)
        if is_captured and not self._is_open:
            found = self._arrivals.look(self._params)
            self.captures.expect_own_grads(any(found), _PLAIN in found)
        return is_captured

    def _sweep(self) -> bytes:
        """Takes gradients that no hook took: kept from `no_sync`, or assigned by hand. Flags: whether p.grad is a placeholder."""
        found: bytes = self._arrivals.look(self._params)
        if not self._kept and _PLAIN not in found:
            return found.translate(_IS_HELD)
        for index, what in enumerate(found):
            kept = self._kept.pop(index, None)
            if what == _PLACEHOLDER:
                if kept is not None:
                    self._arrive(index, kept, add=True, launch=self._overlap)
            elif what == _PLAIN:
                grad = self._params[index].grad
                assert grad is not None
                self._arrive(index, grad, add=False, launch=self._overlap)
                self._params[index].grad = self._placeholders[index]
        return found.translate(_IS_HELD)

    def _agree(self, why: str, held: bytes) -> Any:
        for drop in self._schedule.drops(held):
            self.buckets[drop.bucket].drop(drop.param)
        older = self.reduced.older()
        if not all(held):
            older = bytes(map(min, older, held))
        return self._agreement.agree(why, held, older, self.reduced.factors())

    def _settle(self, held: bytes, before: bytes) -> None:
        """Makes ``p.grad`` say what all ranks now hold. ``before``: flags of what had a placeholder."""
        self.held = held
        self.reduced.set_content(held)
        if held != before:
            for param, is_held, had, placeholder in zip(self._params, held, before, self._placeholders, strict=True):
                if is_held and not had:
                    param.grad = placeholder

    def zero_grad(self) -> None:
        """Drops every gradient. Local."""
        with self._lock:
            self._forget_capture()
            self._kept.clear()
            self._schedule.discard()
            for bucket in self.buckets:
                bucket.drop_late()
            for param in self._params:
                param.grad = None
            if self._is_open:
                self.reduced.reset_all_factors()

    def _forget_capture(self) -> None:
        """Drops the window of a capture that has failed, or ended before it: nothing of it has run. On all ranks or none."""
        if self.captures.forget():
            self._kept.clear()
            if self._is_open:
                self._schedule.forget_window()
                self.launcher.forget_captured()
                self._is_open = False
            for param in self._params:
                param.grad = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._lock:
            if not self._no_sync_depth:
                self._ask("no_sync")
            self._no_sync_depth += 1
            self._arrivals.ignore(True)
            if self._no_sync_depth == 1:
                for index, grad in self._kept.items():  # so that autograd adds to it by itself
                    if self.infos[index].param.grad is self._placeholders[index]:
                        self.infos[index].param.grad = grad
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
            if self._is_open and (self._schedule.has_stored(i) or self.reduced.has_content(i)):
                self._arrive(i, grad, add=False, launch=False)
            else:
                if self.reduced.has_content(i):
                    self.reduced.forget(i)  # replaced
                self._kept[i] = grad
                self.captures.keep()
                self._arrivals.disable()
            info.param.grad = self._placeholders[i]

    def refuse(self, text: str) -> NoReturn:
        """RuntimeError with ``text``, and one on every other rank. Collective for those that are not refused."""
        with self._lock:
            self._agreement.refuse(text)

    def expect_outside_no_sync(self, what: str) -> None:
        if self._no_sync_depth:
            raise RuntimeError(f"{what} inside no_sync(), whose gradients are not to be reduced yet: leave that first")

    def carry_over(self, held: bytes) -> None:
        """The shards hold gradients of the first parameters: flags."""
        held = held.ljust(len(self._params), b"\0")
        for param, is_held, placeholder in zip(self._params, held, self._placeholders, strict=True):
            if is_held:
                param.grad = placeholder
        self.held = held

    def remove(self) -> None:
        """Takes the hooks off and the placeholders out of ``p.grad``; gives the memory of buckets back."""
        self._arrivals.disable()
        for hook in self._hooks:
            hook.remove()
        for info, placeholder in zip(self.infos, self._placeholders, strict=True):
            if info.param.grad is placeholder:
                info.param.grad = None
        self.launcher.release()
