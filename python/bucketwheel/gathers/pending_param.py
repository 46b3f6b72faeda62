"""Pending: parameters whose gather may still be running. Whatever reads one waits first.

[Note: pending parameters] While its gather runs a parameter is a `PendingParameter`: the same object with another class,
whose ``__torch_function__`` torch calls before it does anything with the parameter. It waits, gives the parameter its own
class back and goes on; what does not look at values (shape, ``grad``, ``requires_grad``, hooks) does not wait. So a forward
that knows nothing of this, an evaluation, a moving average, ``print`` and ``copy.deepcopy`` see the values of the last step.

Not seen is what reads memory behind torch's Python functions: C++ extensions that take tensors by pybind11, TorchScript,
`torch.func.grad` and ``jvp`` of parameters as they are, handlers of tensor subclasses that switch such handlers off, and
aliases made before the step. The forward-pre-hooks of `module_hooks` cover what happens inside of modules; for the rest there is
`param_sync`. Compiled code is guarded by the class: where it meets a pending parameter it is compiled again, and before
that everything is waited for (`module_hooks` sees to it that this does not go on at every step).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.device import native_stream, stream_of
from bucketwheel.native import core

_ATTRIBUTE = "_bucketwheel_arrival"
_GRAD: Any = Tensor.__dict__.get("grad", torch._C.TensorBase.grad)


class Arrival(NamedTuple):
    """What stands between a parameter and its values; it hangs on the parameter, and goes when it has arrived."""

    handles: Sequence[core.Handle]
    stream: torch.cuda.Stream | None  # in which the step was taken; later code in it counts on the new values
    tell: Callable[[], object]  # called when torch has read the parameter, rather than a hook waited for it


_unseen_readers: weakref.WeakSet[Any] = weakref.WeakSet()


def on_unseen_read(waiter: Any) -> None:
    """``waiter.wait_for_unseen()`` is called when something pending is read and it cannot be seen what. Held weakly."""
    _unseen_readers.add(waiter)


def wait_for_unseen() -> None:
    for waiter in list(_unseen_readers):
        waiter.wait_for_unseen()


def make_pending(param: Parameter, arrival: Arrival) -> None:
    """``param``, which is a `Parameter` and of no other class, waits from now on for ``arrival`` before it is read."""
    assert type(param) is Parameter
    setattr(param, _ATTRIBUTE, arrival)
    param.__class__ = PendingParameter


def arrive(param: Tensor, *, is_read: bool = False) -> None:
    """Waits for the gathers of a pending parameter, which is an ordinary one afterwards. Any thread may call it.

    CUDA: the current stream waits, and the one in which the step was taken. Where a gather has failed its error is raised,
    by everyone who asks.
    """
    arrival: Arrival | None = param.__dict__.get(_ATTRIBUTE)
    if arrival is not None:
        stream = arrival.stream
        for handle in arrival.handles:
            handle.wait()
            if stream is not None and stream != stream_of(stream.device):
                handle.wait(native_stream(stream))
        if is_read:
            arrival.tell()
    forget(param)


def forget(param: Tensor) -> None:
    """Gives a pending parameter its own class back without waiting."""
    if type(param) is PendingParameter:
        param.__class__ = Parameter  # type: ignore[assignment]
    param.__dict__.pop(_ATTRIBUTE, None)


def _arrive_in(value: Any) -> bool:
    """Waits for the pending parameters in arguments of a torch function; whether there was one."""
    if type(value) is PendingParameter:
        arrive(value, is_read=True)
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any([_arrive_in(one) for one in value])  # all of them, not up to the first
    return False


class PendingParameter(Parameter):
    """A parameter as long as its gather runs: [Note: pending parameters]. Calling the class makes an ordinary one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # for type(param)(...), as libraries copy parameters
        return Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SEES_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not _arrive_in([args, kwargs]):
            wait_for_unseen()
        return func(*args, **kwargs)

    # torch has these look at type(self) or at memory without asking __torch_function__.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        arrive(self, is_read=True)
        return self.__deepcopy__(memo)  # that of its own class now

    def __reduce_ex__(self, protocol: Any) -> Any:
        arrive(self, is_read=True)
        return self.__reduce_ex__(protocol)

    def _get_grad(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _GRAD.__get__(self)

    def _set_grad(self, grad: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, grad)

    def _del_grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    grad = property(_get_grad, _set_grad, _del_grad)  # zero_grad asks for it: five times faster than __torch_function__


def _members(kind: str, names: str) -> list[Any]:
    return [getattr(getattr(Tensor, name), kind) if kind else getattr(Tensor, name) for name in names.split()]


# What may be asked of a parameter whose values are on their way. Anything else waits.
_SEES_NO_VALUES = frozenset(
    _members(
        "__get__",
        "requires_grad shape dtype device layout ndim itemsize nbytes is_leaf grad_fn _version is_cuda is_sparse "
        "is_meta retains_grad output_nr _backward_hooks _post_accumulate_grad_hooks grad",
    )
    + _members("__set__", "requires_grad grad _backward_hooks _post_accumulate_grad_hooks")
    + _members("__delete__", "grad")
    + _members(
        "",
        "numel nelement stride element_size is_floating_point requires_grad_ register_hook "
        "register_post_accumulate_grad_hook",
    )
    + [torch.is_floating_point, torch.numel]
)
