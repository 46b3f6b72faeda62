"""Gathers: parameters on their way back to all ranks.

With ``overlap_param_sync`` the all-gathers of a step run on while the host goes on, in the order in which forward needs
the parameters (`demand_order`). Whoever reads parameters waits first: `absent_param`, `module_hooks`, `Gathers.wait_all`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.device import stream_of
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.native import core
from bucketwheel.residency.absent_param import (
    AbsentParam,
    Arrival,
    arrive,
    forget,
    is_pending,
    make_pending,
    on_unseen_read,
)
from bucketwheel.residency.demand_order import DemandOrder
from bucketwheel.residency.module_hooks import CompileWatch, Prefetch, watch_compilations


class Gathers:
    """The all-gathers of the last step that have not been waited for, of the parameters and buckets of the last `bind`.

    ``overlaps``: they may run on when a step ends.
    """

    def __init__(self, comm: Communicator, *, overlaps: bool) -> None:
        self._comm = comm
        self._device = comm.device
        self._params: list[Parameter] = []
        self._params_of_bucket: Sequence[Collection[int]] = []
        self._overlaps = overlaps
        # Handles of this step, with the bucket; until all have been waited for.
        self.running: list[tuple[core.Handle, int]] = []
        self._order = DemandOrder([])
        self._compiled = CompileWatch()
        self._prefetches: list[Prefetch] = []
        self._thread = threading.get_ident()  # that of the last step
        on_unseen_read(self)
        if overlaps:
            watch_compilations(self)

    def bind(self, infos: Sequence[ParamInfo], params_of_bucket: Sequence[Collection[int]]) -> None:
        """Says which parameters there are, and for every bucket those that it brings. Nothing is running."""
        assert not self.running
        self._params = [info.param for info in infos]
        self._params_of_bucket = params_of_bucket
        self._order = DemandOrder(params_of_bucket)
        for prefetch in self._prefetches:
            prefetch.bind(self._params, self._order)

    def order(self) -> list[int]:
        """The buckets in the order in which the step should bring them. Collective, once a step."""
        if not self._overlaps:
            return self._order.buckets
        return self._order.next_step(self._comm.rank, self._comm.exchange, self._comm.max_payload_bytes)

    def leave_running(self) -> None:
        """The end of a step: what may be on its way is pending from now on, the rest arrives here."""
        if not self._overlaps:
            self.wait_all()
            return
        watch_compilations(self)  # again: torch._dynamo.reset() forgets
        self._thread = threading.get_ident()
        handles: dict[int, list[core.Handle]] = {}
        for gather, bucket in list(self.running):
            for index in self._params_of_bucket[bucket]:
                handles.setdefault(index, []).append(gather)
        now: dict[core.Handle, None] = {}
        for index, brings in handles.items():
            param = self._params[index]
            # Another class may have handlers of its own, which would be lost.
            if type(param) is Parameter and self._compiled.may_be_pending(index):
                make_pending(param, Arrival(brings, stream_of(param.device), partial(self._order.note, index)))
            else:
                now.update(dict.fromkeys(brings))
        core.wait_all(list(now))

    def wait_all(self) -> None:
        """Every parameter is that of the last step afterwards. Where gathers have failed: the error of the first, every
        time that this is asked or a parameter is read, until `detach`."""
        if waited := list(self.running):
            # What a capture that has failed left here never runs.
            captured = core.is_capturing(self._device)
            core.wait_all([gather for gather, _ in waited if captured or not gather.is_captured])
            self._forget(waited)

    def wait_for(self, params: Collection[int]) -> None:
        """The same of these parameters alone."""
        for index in params:
            arrive(self._params[index])

    def _forget(self, gathers: list[tuple[core.Handle, int]]) -> None:
        # One by one: a step in another thread may be adding to the list, another wait be taking out of it.
        for gather in gathers:
            with contextlib.suppress(ValueError):
                self.running.remove(gather)
        for param in self._params if self._overlaps and not self.running else ():
            forget(param)

    @property
    def pending(self) -> list[int]:
        """The parameters that nobody has waited for since the last step."""
        return [index for index, param in enumerate(self._params) if type(param) is AbsentParam and is_pending(param)]

    def wait_for_unseen(self) -> None:
        # Ranks that are threads: a thread may not wait for other ranks' gathers, which wait for it.
        if self._comm.backend != "local" or self._thread == threading.get_ident():
            self.wait_all()

    def before_compilation(self) -> None:
        """[Note: compiled forwards]"""
        if self._comm.backend == "local" and self._thread != threading.get_ident():
            return
        self._compiled.note_compilation(self.pending)
        for prefetch in self._prefetches:
            prefetch.forget_calls()
        self.wait_all()

    def attach(self, model: torch.nn.Module) -> Callable[[], None]:
        """Hooks that wait just before the forwards that use the parameters. Returns a function that takes them off again."""
        if not self._overlaps:
            return lambda: None
        wait_all = weakref.WeakMethod(self.wait_all)
        prefetch = Prefetch(model, self._params, self._order, self._compiled, wait_all)
        self._prefetches.append(prefetch)

        def detach() -> None:
            if prefetch in self._prefetches:
                self.wait_all()
                self._prefetches.remove(prefetch)
                prefetch.remove()

        return detach

    def detach(self) -> None:
        """Takes all hooks off, and lets the parameters be whatever they are, without waiting."""
        for prefetch in self._prefetches:
            prefetch.remove()
        self._prefetches.clear()
        self._forget(list(self.running))
