"""Absent: parameters whose values are not here. Reading one waits for its gather, or raises.

There are two kinds: *pending* ones, of which a gather runs, and *sharded* ones (`bucketwheel.shard`), of which no gather
runs: these have no memory, and whatever needs their values raises `ShardedParamError`.

[Note: pending parameters] While its gather runs a parameter is an `AbsentParam`: the same object with another class,
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
from bucketwheel.errors import ShardedParamError
from bucketwheel.native import core

_ATTRIBUTE = "_bucketwheel_arrival"
_SHARDED = "_bucketwheel_sharded"
_GRAD: Any = Tensor.__dict__.get("grad", torch._C.TensorBase.grad)


class Arrival(NamedTuple):
    """What stands between a parameter and its values; it hangs on the parameter, and goes when it has arrived."""

    handles: Sequence[core.Handle]
    stream: torch.cuda.Stream | None  # in which the step was taken; later code in it counts on the new values
    tell: Callable[[], object]  # called when torch has read the parameter, rather than a hook waited for it


class Sharded(NamedTuple):
    """What a sharded parameter says while it is absent; it hangs on the parameter for good."""

    name: str
    detached: Callable[[Tensor], Tensor]  # what ``detach()`` of the parameter is: this rank's part
    write: Callable[[Tensor, Tensor], None]  # ``param.copy_(values)``

    def refusal(self, what: str) -> ShardedParamError:
        return ShardedParamError(
            f"{what} needs parameter {self.name!r}, which is sharded over the ranks and not gathered now: access it "
            "inside `with model.full_params():`, or during the forward of its unit; move and convert the model before bw.shard; "
            "train it with bw.ShardedAdamW, or with an optimizer of torch over bw.local_shards(model)"
        )


def sharded(param: Tensor) -> Sharded | None:
    """Of a parameter that `bucketwheel.shard` has sharded, gathered or not."""
    found: Sharded | None = param.__dict__.get(_SHARDED)
    return found


def make_sharded(param: Parameter, says: Sharded, memoryless: Tensor) -> None:
    """``param`` has no values from now on, until native code gives it some."""
    setattr(param, _SHARDED, says)
    param.data = memoryless
    param.__class__ = AbsentParam


class _Memoryless(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:  # where `.data` is set in inference mode
            return True
        raise ShardedParamError(f"{func} needs a parameter that is not gathered")


def memoryless(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this kind without memory: to be ``param.data``."""
    make: Any = Tensor._make_wrapper_subclass
    found: Tensor = make(_Memoryless, tuple(shape), strides=tuple(stride), dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(found)  # else native code that asks for the address reads from null
    return found


_unseen_readers: weakref.WeakSet[Any] = weakref.WeakSet()


def on_unseen_read(waiter: Any) -> None:
    """``waiter.wait_for_unseen()`` is called when something pending is read and it cannot be seen what. Held weakly."""
    _unseen_readers.add(waiter)


def wait_for_unseen() -> None:
    for waiter in list(_unseen_readers):
        waiter.wait_for_unseen()


def is_pending(param: Tensor) -> bool:
    return _ATTRIBUTE in param.__dict__


def make_pending(param: Parameter, arrival: Arrival) -> None:
    """``param``, which is a `Parameter` and of no other class, waits from now on for ``arrival`` before it is read."""
    assert type(param) is Parameter
    setattr(param, _ATTRIBUTE, arrival)
    param.__class__ = AbsentParam


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
    if type(param) is AbsentParam and is_pending(param):
        param.__class__ = Parameter  # type: ignore[assignment]
    param.__dict__.pop(_ATTRIBUTE, None)


def _arrive_in(value: Any) -> bool:
    """Waits for the pending parameters in arguments of a torch function; whether there was one."""
    if type(value) is AbsentParam:
        if not is_pending(value):
            raise value.__dict__[_SHARDED].refusal("the values")
        arrive(value, is_read=True)
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any([_arrive_in(one) for one in value])  # all of them, not up to the first
    return False


class AbsentParam(Parameter):
    """A parameter while its values are not here: pending or sharded. Calling the class makes an ordinary one."""

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
        first = args[0] if args else None
        if type(first) is AbsentParam and not is_pending(first):
            says: Sharded = first.__dict__[_SHARDED]
            if func is Tensor.detach:
                return says.detached(first)
            if func is Tensor.copy_ and len(args) > 1:
                says.write(first, args[1])
                return first
            if func in _CONVERSIONS and _changes_nothing(first, func, args[1:], kwargs):
                return first
            if func == _SET_DATA and args[1] is first:
                return None
            name = getattr(func, "__name__", str(func))
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            raise says.refusal(attribute if name in ("__get__", "__set__") and attribute else name)
        if not _arrive_in([args, kwargs]):
            wait_for_unseen()
        return func(*args, **kwargs)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        if is_pending(self):
            return super().__repr__(**options)
        name = self.__dict__[_SHARDED].name
        return f"Parameter {name!r}, {tuple(self.shape)}, {self.dtype}, sharded and not gathered"

    # torch has these look at type(self) or at memory without asking __torch_function__.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _arrive_in(self)
        return self.__deepcopy__(memo)  # that of its own class now

    def __reduce_ex__(self, protocol: Any) -> Any:
        _arrive_in(self)
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


def _changes_nothing(param: Tensor, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a conversion, as of ``model.to(device)``, leaves the parameter as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        device, dtype = param.device, param.dtype
    if func is Tensor.to:
        asked, to, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    else:
        name = "cuda" if func is Tensor.cuda else "cpu"
        asked, to, layout = torch.device(args[0] if args and func is Tensor.cuda else name), None, None
    is_there = asked is None or (asked.type == device.type and asked.index in (None, device.index))
    return is_there and to in (None, dtype) and layout is None


def _members(kind: str, names: str) -> list[Any]:
    return [getattr(getattr(Tensor, name), kind) if kind else getattr(Tensor, name) for name in names.split()]


_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_CONVERSIONS = (Tensor.to, Tensor.cpu, Tensor.cuda)
# What may be asked of a parameter whose values are on their way. Anything else waits.
_SEES_NO_VALUES = frozenset(
    _members(
        "__get__",
        "requires_grad shape dtype device layout ndim grad_dtype itemsize nbytes is_leaf grad_fn _version is_cuda is_sparse "
        "is_meta is_cpu is_quantized is_nested is_mkldnn retains_grad output_nr _backward_hooks _post_accumulate_grad_hooks grad",
    )
    + _members("__set__", "requires_grad grad _backward_hooks _post_accumulate_grad_hooks")
    + _members("__delete__", "grad")
    + _members(
        "",
        "__len__ is_complex is_signed is_inference is_conj is_neg numel nelement stride size dim ndimension element_size is_contiguous is_floating_point requires_grad_ register_hook "
        "register_post_accumulate_grad_hook",
    )
    + [torch.is_floating_point, torch.numel, torch._has_compatible_shallow_copy_type]
)
