"""Window: what a sync window means in Python: `no_sync`, agreement between ranks, and what stock code asks of gradients.

Hooks, buckets and launches are native (csrc/window/window.h, csrc/bindings/window_py.h). A post-accumulate hook takes each
gradient out of ``p.grad`` into its bucket and leaves a placeholder there (`placeholder`). It is the last hook of its
parameter: others may edit the gradient.

Inside `no_sync` plain tensors stay in ``p.grad``. At its end they are *deferred*: kept aside, unreduced, behind
placeholders, so that stock code never takes them for whole gradients; they go into their buckets with the next gradient or
when the window ends.

[Note: what the placeholder in p.grad means] After any call here ``p.grad`` is one of: None (no gradient; whatever the
shards hold is void), the parameter's placeholder (its gradient is in the buckets or shards, or deferred), or a plain tensor
(a new gradient that is not in any bucket yet, which *replaces* what the buckets hold, because somebody assigned it).
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from bucketwheel.comm.replicas import Reducer
from bucketwheel.grads import agreement
from bucketwheel.grads.bucket import GradBucket, expect_gradient_of, in_memory_order
from bucketwheel.grads.graph_capture import Captures
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.grads.reduced import ReducedGrads
from bucketwheel.grads.unfrozen import add_hook, run_last
from bucketwheel.grads.window_plan import plan_window
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.native import core
from bucketwheel.pool.pool import Pool

_PLAIN = 2  # what native `look` finds in p.grad; 0: nothing, 1: the placeholder
_IS_HELD = bytes([False, True, True]).ljust(256, b"\0")

_NEED_GRADIENTS = ("step", "norm", "norms", "grad_sync")  # what a step of a static graph does once it has its gradients


class GradWindow:
    """One rank's gradients: the sync window, and what ranks agree on at its end. Implements `GradOwner`.

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
        overlap: bool,
        max_inflight: int,
        is_static: bool = False,
        is_capturable: bool = False,
        arrivals: Sequence[int] | None = None,
    ) -> None:
        self.comm = comm
        self.infos = list(infos)
        self.reduced = reduced
        self.params = [info.param for info in self.infos]
        self.side_pool = Pool(device=infos[0].device) if infos and comm.is_registered else comm.pool
        self.plan = plan_window(buckets, limit=max_inflight, overlap=overlap, arrivals=arrivals)
        # Flags: which parameters have a gradient on any rank. Agreed by each `close`, until the next.
        self.held = bytes(len(self.infos))
        self.captures = Captures(comm.device, is_capturable=is_capturable)
        self.before_close: Sequence[Callable[[], None]] = ()  # called before the ranks agree on a window
        self._is_on_cpu = comm.device < 0
        self._overlap = overlap
        self._no_sync_depth = 0
        self._placeholders = [ShardedGrad(info.param, self, info.index, info.name) for info in self.infos]
        comms, tie, defers, takes_turns = comm._reducers()
        plans = [
            self.plan.to_native(),
            comm._plan_sums([(b.shard_numel, b.dtype) for b in buckets], max_inflight).to_native(),
        ]
        flags = [overlap, is_static, comm.is_registered, is_capturable, defers, takes_turns]
        # Also the gate of all calls: `with self._native:`.
        self._native = core.Window(
            comms,
            tie,
            self.side_pool._native,
            [bucket.to_native() for bucket in buckets],
            reduced.table,
            plans,
            max_inflight,
            flags,
            weakref.ref(self),
            list(zip(self.params, self._placeholders, strict=True)),
        )
        self._hooks = [add_hook(param, self._native.hook(index)) for index, param in enumerate(self.params)]
        # Hooks before accumulation, from the first repeat on: [Note: hooks], csrc/bindings/window_py.h.
        self._before: list[Any] = []
        self._has_repeats = False
        for hook in self._hooks:
            weakref.finalize(self, hook.remove).atexit = False

    # --- what native code asks ---------------------------------------------------------------------------------------

    def run_last(self, index: int, param: Tensor) -> None:
        """There are hooks of the parameter that were registered after ours."""
        run_last(self._hooks[index], param)

    def expect_plain(self, index: int, grad: Tensor) -> None:
        """RuntimeError naming the parameter if ``grad`` cannot be its gradient."""
        if self._placeholders[index].is_in_reducer:
            self._placeholders[index].reject_reducer_view(grad)
        expect_gradient_of(self.infos[index], grad)

    def as_plain(self, index: int, grad: Tensor) -> Tensor:
        """As one dimension, in the order of the parameter's place in flat memory. Errors as `expect_plain`."""
        self.expect_plain(index, grad)
        with torch.no_grad():
            return in_memory_order(grad, self.infos[index])

    def unscaled(self, index: int, grad: Tensor) -> Tensor:
        """Divided by the factor that is pending for the parameter."""
        with torch.no_grad():
            flat = in_memory_order(grad, self.infos[index])
            wide = flat if flat.dtype == torch.float64 else flat.float()  # 16 bits would overflow
            return wide / self.reduced.factors[index]

    def break_promise(self, index: int) -> NoReturn:
        agreement.break_promise(self.comm, self.infos[index])

    def begin_window(self, has_grads: bool, has_plain: bool) -> bool:
        """Whether the window that opens is captured. CaptureError if it may not be."""
        return self.captures.begin(is_learnt=self._native.is_learnt, has_grads=has_grads, has_plain=has_plain)

    def expect_same_capture(self) -> None:
        """CaptureError: the window is part of another capture than the current stream, or of none."""
        self._is_captured("gradients")

    def flush_factor(self, index: int, remaining: float) -> None:
        with torch.no_grad():
            self.reduced.flush_factor(index, remaining)

    def reset_factors(self) -> None:
        self.reduced.factors.reset_all()

    # --- the end of a window -----------------------------------------------------------------------------------------

    def start(self, indices: Sequence[int]) -> None:
        """These parameters get no more gradients in this window: takes their deferred ones, launches full buckets. Local."""
        self.expect_outside_no_sync("grad_sync(parameters)")
        with self._native, torch.no_grad():
            if self._native.is_open:
                self._is_captured("grad_sync(parameters)")
            self._native.start(indices)

    def close(self, why: str, facts: agreement.Facts | None = None, *, is_the_last: bool = False) -> Any:
        """Ends the window: afterwards the shards hold the sums of everything, on all ranks alike. Collective.

        Returns what the ranks agreed on (the native ``WindowVerdict``). Without new gradients anywhere it costs one exchange
        between the hosts. RuntimeError on every rank, and the window stays open, if ranks close it for different reasons
        ``why`` (one calls `step`, another `clip_grad_norm_`), or disagree on what a gradient is (one replaced or scaled it,
        another did not) or, if they agree on anything ([Note: static graph]), on ``facts``.
        ``is_the_last``: another object takes over, so no promise of a static graph is kept.
        """
        for call in self.before_close:
            call()
        with self._native, torch.no_grad():
            is_captured = self._expect_own_grads(why)
            found = self._native.sweep()  # 1. what no hook took
            self._native.flush(found)  # 2. what is left of the first round, if this rank has gradients
            agreed = self._agree(why, found, facts, is_the_last)  # 3. with the other ranks
            if is_captured:
                self._expect_all_captured(why)
            has_late = self._native.close(agreed, found)  # 4. what is left of all ranks; p.grad says what there is
            if not self._is_on_cpu:
                self.captures.end()
            self.held = agreed.held
            self.reduced.settle_window()
            self._expect_repeats()
            if has_late:  # last of all: it may be made an error
                agreement.warn_of_late_round()
            return agreed

    def _is_captured(self, what: str) -> bool:
        """Whether the call ``what`` is captured in a CUDA graph. CaptureError if it may not be."""
        return not self._is_on_cpu and self.captures.ask(what, is_open=self._native.is_open)

    def _expect_own_grads(self, what: str) -> bool:
        """`_is_captured`. CaptureError if the captured call would read gradients from outside of the graph."""
        is_captured = self._is_captured(what)
        if is_captured and not self._native.is_open:
            found = self._native.look()
            self.captures.expect_own_grads(any(found), _PLAIN in found)
        return is_captured

    def _agree(self, why: str, held: bytes, facts: agreement.Facts | None, is_the_last: bool) -> Any:
        """What all ranks know at the end of a window. RuntimeError on every rank as `close` says, or on the rank that breaks the
        promise of a static graph."""
        if self._native.is_learnt and not is_the_last:
            self._expect_promise_kept(why, held)
            agreed = self._native.assume(held)
        else:
            agreed = self._native.agree(self._exchange(why, self._native.notes(held), facts))
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
            for other in self.comm._exchange(why.replace(":", "_").encode() + b":" + digest + payload)
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
        is_needed = self._native.is_dirty or why in _NEED_GRADIENTS or why.startswith("unscale")
        deviating = self._native.find_deviation(held) if is_needed else -1
        if deviating >= 0:
            if not any(held):
                self.captures.expect_no_replay(why)
            self.break_promise(deviating)

    def _expect_all_captured(self, why: str) -> None:
        """RuntimeError, or `CommTimeout`, unless all ranks capture the call ``why`` in a CUDA graph: a replay would wait for
        those that do not."""
        self._exchange(f"captured {why}", b"")

    def _expect_repeats(self) -> None:
        """Outside of backward: torch must not be calling the hooks of a parameter that gets another."""
        if self._has_repeats and not self._before:
            for index, param in enumerate(self.params):
                self._before.append(add_hook(param, self._native.hook(index, before=True), before=True))
                weakref.finalize(self, self._before[-1].remove).atexit = False

    def discard(self) -> None:
        """Ends the window for good, and whatever is in it, without asking whether the ranks agree on that. Collective.

        What some have launched the others launch too, so that the communicators can go on. RuntimeError on every rank if some
        make another call. With a static graph nothing is asked: a rank that has dropped gradients aborts the communicator.
        """
        for call in self.before_close:
            call()
        with self._native, torch.no_grad():
            self._forget_capture()
            self._is_captured("close")
            native = self._native
            if native.is_learnt and native.is_dirty:
                deviating = native.find_deviation(native.look().translate(_IS_HELD))
                if deviating >= 0:  # others may never launch what is launched here
                    name = self.infos[deviating].name
                    self.comm.abort(f"static_graph=True: closed after the gradients of {name!r} had been dropped")
                    return
            native.flush(bytes(len(self.infos)))
            if native.is_learnt:
                agreed = native.assume(b"")
            else:
                agreed = native.agree(self._exchange("close", native.notes(b"")))
            native.close(agreed, None)

    # --- windows that end otherwise, and gradients that are not reduced yet ------------------------------------------

    def zero_grad(self) -> None:
        """Drops every gradient. Local."""
        with self._native:
            self._forget_capture()
            is_open = self._native.is_open
            self._native.zero_grad()
            if is_open:
                self.reduced.factors.reset_all()

    def _forget_capture(self) -> None:
        """Drops the window of a capture that has failed, or ended before it: nothing of it has run. On all ranks or none."""
        if not self._is_on_cpu and self.captures.forget():
            self._native.forget_captured()

    @property
    def is_used(self) -> bool:
        """Whether a step has used all gradients that there are: from the end of a step until the next gradient arrives."""
        return bool(self._native.is_used)

    @is_used.setter
    def is_used(self, value: bool) -> None:
        self._native.is_used = value

    def first_pending(self) -> ParamInfo | None:
        """The first parameter whose gradient no step has used. Local."""
        found = zip(self.infos, self._native.look(), strict=True)
        return next((info for info, what in found if what == _PLAIN or (what and not self.is_used)), None)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with self._native:
            if not self._no_sync_depth:
                self._expect_own_grads("no_sync")
                self._native.undefer()
            self._no_sync_depth += 1
            self._native.ignore(True)
        try:
            yield
        finally:  # an exception too leaves gradients of this rank alone, which stock code must not take for whole ones
            with self._native, torch.no_grad():
                self._no_sync_depth -= 1
                if not self._no_sync_depth:
                    self._native.ignore(False)
                    if self._native.defer():
                        self._has_repeats = True
                        self._expect_repeats()
                        if not self._is_on_cpu:
                            self.captures.keep()

    @property
    def is_in_no_sync(self) -> bool:
        return self._no_sync_depth > 0

    def expect_outside_no_sync(self, what: str) -> None:
        if self._no_sync_depth:
            raise RuntimeError(f"{what} inside no_sync(), which keeps gradients unreduced: leave no_sync() first")

    def refuse(self, text: str) -> NoReturn:
        """RuntimeError with ``text``, and one on every other rank. Collective for those that are not refused."""
        with self._native:
            agreement.refuse(self.comm, text, is_learnt=self._native.is_learnt)

    def expect_done_by_all(self, what: str, error: Exception | None) -> None:
        """Raises ``error``, on the other ranks ValueError with its text, if ``what`` has failed on any. Collective."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        with self._native, core.PublicCall(self.comm._natives, what.partition(" ")[0]):
            everyone = self._exchange(what, text.encode()[: self.comm.max_payload_bytes // 2])
        if error is not None:
            raise error
        for rank, other in enumerate(everyone):
            if other:
                raise ValueError(
                    f"{what} has failed on rank {rank} and was cancelled on all ranks: {str(other, 'utf-8', 'ignore')}"
                )

    # --- what stock code asks of placeholders (`GradOwner`) ----------------------------------------------------------

    def accumulate(self, index: int, grad: Tensor) -> None:
        with self._native, torch.no_grad():
            self._has_repeats = True
            self.expect_same_capture()  # before the deferred one goes
            deferred = self._native.take_deferred(index)
            grad = grad if deferred is None else deferred.add_(grad)
            self._native.give(index, grad, True, self._overlap and not self._no_sync_depth)

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
        with self._native, core.PublicCall(self.comm._natives, "clip_grad_norm_ or another norm of gradients"):
            self._close_for("norms", indices)
            return self.reduced.norms(indices, ord)

    def scale(self, indices: Sequence[int], factor: float | Tensor) -> None:
        """A factor on the device that is exactly 0 is not supported while gradients still arrive (`GradOwner.scale`)."""
        with self._native:
            if not isinstance(factor, Tensor) or self._is_on_cpu:
                factor = float(factor)
            is_captured = self._expect_own_grads("scaling gradients")
            native, sums = self._native, self.reduced.table.sums
            deferred = {i for i in indices if native.deferred(i) is not None} if native.has_deferred else set()
            rest, is_open = [i for i in indices if i not in deferred], native.is_open
            private = [i for i in rest if native.is_private(i) and not sums[i]]
            if private:
                agreement.refuse_private(self.comm, self.infos, private)
            for index in deferred:
                native.deferred(index).mul_(factor)
            is_zero = not isinstance(factor, Tensor) and factor == 0.0
            if is_zero and is_open:
                self.zero(rest)  # what comes later cannot be divided by a pending 0
                return
            self.reduced.factors.scale(rest, factor)
            for index in rest if is_zero else ():  # multiplied now: inf * 0 is NaN, as torch has it
                self.reduced.flush_factor(index)
            if not is_open:
                if is_captured and not isinstance(factor, Tensor):
                    self._expect_all_captured(f"scale by {factor}")  # in a graph nobody will compare it
                self.reduced.settle()

    def unscale(self, indices: Sequence[int], found_inf: Tensor, inv_scale: Tensor) -> None:
        """Every gradient of the same dtypes that any rank has, whether this rank could list it or not.

        The scaler makes one call per dtype.
        """
        dtypes = {self.infos[i].dtype for i in indices}
        self.captures.refuse_scaler()
        with self._native, core.PublicCall(self.comm._natives, "GradScaler.unscale_"):
            self.close(f"unscale {' and '.join(sorted(map(str, dtypes)))}")
            held = [i for i, is_held in enumerate(self.held) if is_held and self.infos[i].dtype in dtypes]
            found_inf.copy_(self.reduced.found_inf(found_inf))
            self.reduced.factors.scale(held, inv_scale)

    def clamp(self, indices: Sequence[int], low: float | None, high: float | None) -> None:
        with self._native, torch.no_grad(), core.PublicCall(self.comm._natives, "clip_grad_value_"):
            self._close_for("clamp", indices)
            for index in indices:
                self.reduced.clamp(index, low, high)
            self.reduced.settle()

    def zero(self, indices: Sequence[int]) -> None:
        with self._native, torch.no_grad():
            is_open = self._native.is_open
            for index in indices:
                if (deferred := self._native.deferred(index)) is not None:
                    deferred.zero_()
                elif is_open:
                    self._native.give(index, torch.zeros_like(self.params[index]), False, False)
                else:
                    self._native.replace_by_zero(index)
            if not is_open:
                self.reduced.settle()

    def full(self, index: int) -> Tensor | None:
        """The whole gradient of a parameter, None where no rank has one. Collective."""
        with self._native, torch.no_grad():
            self.close(f"full_grad of {self.infos[index].name!r}")
            return self.reduced.full(index) if self.held[index] else None

    # --- the life of the optimizer -----------------------------------------------------------------------------------

    @property
    def place(self) -> Any:
        """(slab, offset) of the memory of buckets in the communicator's pool; None without any."""
        return self._native.place

    def memory(self) -> dict[str, int]:
        """Bytes of buckets: by plan, now and at the most so far, and of these on the side; of gradients that buckets hold by
        references; of partial sums."""
        return dict(self._native.memory())

    def carry_over(self, held: bytes, is_used: bool) -> None:
        """The shards hold gradients of the first parameters: flags."""
        self.is_used = is_used
        self._native.put_placeholders(held)
        self.held = held.ljust(len(self.params), b"\0")

    def remove(self) -> None:
        """Takes the hooks off and the placeholders out of ``p.grad``; gives the memory of buckets back."""
        for hook in (*self._hooks, *self._before):
            hook.remove()
        with self._native:
            self._native.release()
