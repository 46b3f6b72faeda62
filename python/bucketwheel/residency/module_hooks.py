"""Prefetch: hooks of a model that wait for parameters just before the modules that use them.

Parameters wait for themselves when torch reads them (`absent_param`). The hooks come before that: for code that torch does not
see, for compiled code, and to learn in which order forward needs the parameters.

[Note: compiled forwards] Inside of compiled code there are no hooks and no waits: all that it uses has arrived before it is
entered. A module's hook waits for its own parameters, and for those of modules below it that run inside of compiled code.
Which these are is learnt anew whenever something is compiled. As
long as nobody has called the attached model itself from Python since then (it is compiled as a whole), `step` waits.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from bucketwheel.residency.absent_param import AbsentParam, arrive
from bucketwheel.residency.demand_order import DemandOrder

MAX_COMPILATIONS = 3


class CompileWatch:
    """What compilations tell about parameters: which may be on their way when `step` returns.

    Compiled code that meets a pending parameter is compiled again. That is right once, and may be by chance (other code
    was compiled meanwhile); a parameter to which it has happened ``MAX_COMPILATIONS`` times is read by compiled code that
    no hook precedes, and arrives within `step` from then on.
    """

    def __init__(self) -> None:
        self._has_compiled = False
        self._met: Counter[int] = Counter()
        self._called: set[int] = set()  # parameters of models that Python has called since the last compilation

    def note_compilation(self, pending: Sequence[int]) -> None:
        self._has_compiled = True
        self._met.update(pending)
        self._called.clear()

    def note_call(self, params: Sequence[int]) -> None:
        """Python calls an attached model that has these parameters."""
        self._called.update(params)

    def may_be_pending(self, param: int) -> bool:
        return self._met[param] < MAX_COMPILATIONS and (not self._has_compiled or param in self._called)


class Prefetch:
    """The hooks of one attached model. ``wait_all``: waits for every parameter there is."""

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Parameter],
        order: DemandOrder,
        compiled: CompileWatch,
        wait_all: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self._compiled = compiled
        self._wait_all = wait_all
        self._root = id(model)
        self._model = weakref.ref(model)
        self._hooks: list[RemovableHandle] = []
        self.bind(params, order)

    def bind(self, params: Sequence[Parameter], order: DemandOrder) -> None:
        """Hooks every module that the model has by now, for these parameters."""
        model = self._model()
        self.remove()
        self._params = list(params)
        self._order = order
        if model is None:
            return
        index_of = {id(p): index for index, p in enumerate(params)}
        indices = lambda found: [index_of[id(p)] for p in found if id(p) in index_of]  # noqa: E731
        self._all = indices(model.parameters())
        self._own = {id(m): indices(m.parameters(recurse=False)) for m in model.modules()}
        self._children = {id(m): [id(child) for child in m.children()] for m in model.modules()}
        self._called: set[int] = set()  # modules (by id) whose forward Python has called
        self._duties: dict[int, list[int]] = {}
        self._hooks = self._hook(model)

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        before_forward, before_state_dict = _BeforeForward(self), _BeforeStateDict(self)
        hooks = [module.register_forward_pre_hook(before_forward) for module in model.modules()]
        hooks.append(model.register_state_dict_pre_hook(before_state_dict))
        for hook in hooks:
            weakref.finalize(self, hook.remove).atexit = False
        return hooks

    def wait_all(self) -> None:
        wait_all = self._wait_all()
        if wait_all is not None:
            wait_all()

    def before_forward(self, module: int) -> None:
        if module not in self._own:  # a copy of the model has copies of the hooks
            return
        if module == self._root:
            self._compiled.note_call(self._all)
            self._order.begin_forward()
        was_called = module in self._called
        duty = self._duty(module)
        for index in duty:
            if type(self._params[index]) is AbsentParam:
                arrive(self._params[index])
        if self._order.is_watching:  # of a module that is new it is not known yet whose the rest is
            for index in duty if was_called else self._own[module]:
                self._order.note(index)
        if not was_called:
            self._called.add(module)
            self._duties.clear()

    def _duty(self, module: int) -> list[int]:
        """Parameters that must have arrived when ``module`` begins: its own, and those of modules that no hook precedes."""
        found = self._duties.get(module)
        if found is None:
            seen = {module}
            found = list(self._own[module])
            todo = list(self._children[module])
            while todo:
                child = todo.pop(0)
                if child not in seen and child not in self._called:
                    seen.add(child)
                    found += self._own[child]
                    todo[:0] = self._children[child]
            self._duties[module] = found
        return found

    def forget_calls(self) -> None:
        """Something was compiled: what Python called before may be inside of compiled code now."""
        self._called.clear()
        self._duties.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class ModuleHook:
    """Modules have it, and copies of modules, which share it; saved ones have one that was made with no argument."""

    def __reduce__(self) -> Any:
        return type(self), ()

    def __deepcopy__(self, memo: object) -> Any:
        return self


class _PrefetchHook(ModuleHook):
    """It knows the `Prefetch` weakly."""

    def __init__(self, prefetch: Prefetch | None = None) -> None:
        self._prefetch = (lambda: None) if prefetch is None else weakref.ref(prefetch)


class _BeforeForward(_PrefetchHook):
    def __call__(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():  # before anything else: this much is traced, and leaves nothing behind
            return
        prefetch = self._prefetch()
        if prefetch is not None:
            prefetch.before_forward(id(module))


class _BeforeStateDict(_PrefetchHook):
    def __call__(self, *_: object) -> None:
        prefetch = self._prefetch()
        if prefetch is not None:
            prefetch.wait_all()


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def watch_compilations(watcher: Any) -> None:
    """``watcher.before_compilation()`` is called whenever torch begins to compile a frame. Held weakly; may be repeated."""
    with _lock:
        _watchers.add(watcher)
        dynamo = sys.modules.get("torch._dynamo")  # there as soon as an optimizer has been made
        if dynamo is not None and _begin not in dynamo.callback_handler.start_callbacks:
            dynamo.callback_handler.register_start_callback(_begin)  # torch._dynamo.reset() takes it off


def _begin(*_: object) -> None:
    for watcher in list(_watchers):
        watcher.before_compilation()
