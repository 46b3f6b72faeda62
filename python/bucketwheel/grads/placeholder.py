"""The placeholder in ``p.grad``: a tensor without memory whose values are sharded over the ranks.

Once a gradient has gone into its bucket, ``p.grad`` holds a `ShardedGrad`. Stock torch code sees a gradient of the
right shape, dtype and device, and what it does to it is answered by the optimizer through `GradOwner`:

=====================================================  ==================================
stock code                                             becomes
=====================================================  ==================================
the next backward; ``p.grad += x``                     ``accumulate``
``clip_grad_norm_``, ``get_total_norm``, ``.norm()``   ``norms``
``clip_grads_with_norm_``, ``p.grad *= x``, ``/= x``   ``scale``
``torch.amp.GradScaler.unscale_`` and ``step``         ``unscale``
``clip_grad_value_``, ``p.grad.clamp_()``              ``clamp``
``zero_grad(set_to_none=False)``, ``p.grad.zero_()``   ``zero``
anything that needs or replaces single values          `ShardedGradError`, nothing changed
=====================================================  ==================================

Norms and clamps are refused during backward: a hook there expects this rank's gradient, as it has it with DDP.

A stock optimizer may decay parameters before it first touches a gradient, so foreign optimizers are refused before they
begin (optim/foreign_steps.py); one whose closure makes the gradients, when it touches the first.
A `DistributedDataParallel` around the model is answered too: [Note: reducer under DDP].
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from bucketwheel.device import CPU, device_index
from bucketwheel.errors import ShardedGradError
from bucketwheel.native import core


class GradOwner(Protocol):
    """What a placeholder asks of the optimizer that holds the gradient, by the index that this gave to `ShardedGrad`.

    The value of a gradient is what plain data-parallel training would leave in ``p.grad``: reduced over all ranks.
    Calls take effect in program order: a factor applies to what was accumulated before it and not to what comes after.
    *Collective* methods are called by all ranks in the same order with the same arguments; the owner detects and names
    a rank that does not. *Local* methods never block. Tensor arguments are borrowed for the call: what is kept must be
    copied. Errors pass through to the caller of the stock operation unchanged.
    """

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add this rank's contribution ``grad`` (the parameter's shape and dtype, any strides). Local.

        Called from backward, on whatever thread and stream autograd runs, just before the parameter's post-accumulate
        hook, which then finds the placeholder in ``p.grad``; or by ``p.grad += x``.
        """

    def norms(self, indices: Sequence[int], ord: float) -> Tensor:
        """Return the norms of order ``ord`` (2, 1, inf, any float) of whole gradients. Collective.

        The result has shape ``[len(indices)]``, a floating dtype at least as precise as the parameters', their device,
        and equal bits on all ranks. Loops ask for one parameter at a time, so compute all at the first call and
        keep them until a gradient changes.
        """

    def scale(self, indices: Sequence[int], factor: float | Tensor) -> None:
        """Multiply gradients by ``factor``, the same on every rank. Local.

        ``factor`` is a float, or a private 0-d tensor where reading it would synchronize with a device. Such a tensor
        must not be exactly 0 while gradients still arrive before the next step: nobody reads it, so what arrives is
        divided by it, to be multiplied with the rest later.
        """

    def unscale(self, indices: Sequence[int], found_inf: Tensor, inv_scale: Tensor) -> None:
        """Multiply by ``inv_scale`` and set ``found_inf`` to 1 if any value on any rank is not finite. Collective.

        Both are fp32 tensors of one element. ``found_inf`` is never reset to 0: it may come in as 1, from other
        gradients of this rank, and goes out equal on all ranks, the largest that came in or was found.
        """

    def clamp(self, indices: Sequence[int], low: float | None, high: float | None) -> None:
        """Limit values to ``[low, high]``; None is no limit, NaN stays NaN. Collective: it needs reduced values."""

    def zero(self, indices: Sequence[int]) -> None:
        """Make gradients zero. They still exist: the next step updates their parameters. Local."""


class ShardedGrad(Tensor):
    """The gradient of one parameter, without its values. Made once per parameter and put into ``p.grad`` by its owner.

    It has the shape, strides, dtype and device of ``param``, no memory, and a weak reference to ``owner``; once the
    owner is gone every operation but ``repr`` raises `ShardedGradError`. ``p.grad is placeholder`` holds until somebody
    assigns ``p.grad``: in-place operations, ``detach()`` and ``data`` return the same object.
    """

    # Operations reach __torch_dispatch__ only: with __torch_function__ every call from Python would come twice.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    owner_ref: weakref.ref[GradOwner]
    param_index: int
    param_name: str
    is_in_reducer: bool  # read, and not written back yet; only `give_to_reducer` makes it True

    @staticmethod
    def __new__(cls, param: Tensor, owner: GradOwner, index: int, name: str) -> ShardedGrad:
        self = cls._empty(param)
        self.owner_ref = weakref.ref(owner)
        self.param_index = index
        self.param_name = name
        self.is_in_reducer = False
        _register_with_torch()
        return self

    @classmethod
    def _empty(cls, like: Tensor) -> ShardedGrad:
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, layout=like.layout, device=like.device
        )
        # Without this, native code that asks for the address reads from null.
        torch._C._set_throw_on_mutable_data_ptr(self)
        return self

    @property
    def owner(self) -> GradOwner:
        """The owner; `ShardedGradError` if it is gone."""
        owner = self.owner_ref()
        if owner is None:
            raise ShardedGradError(
                f"the optimizer that held the gradient of {self.param_name!r} is gone; set p.grad = None to go on"
            )
        return owner

    def refusal(self, operation: str) -> ShardedGradError:
        """Return the error that says ``operation``, a call or the name of a torch operator, cannot be done on this gradient."""
        hint = next((text for key, text in _HINTS if key in operation), "")
        remedy = _IN_BACKWARD if _is_in_backward() and not hint else "; optimizer.full_grad(p) returns them."
        if operation.startswith("aten."):
            name = operation.split(".")[1]
            operation = _CALLS.get(name, name)
        return ShardedGradError(
            f"{operation} needs the values of the gradient of {self.param_name!r} (shape {tuple(self.shape)}, "
            f"{self.dtype}), which are sharded over the ranks{remedy}{hint}"
        )

    def give_to_reducer(self) -> None:
        """A reducer reads this placeholder. From now on the hooks of this process look at `is_in_reducer`."""
        core.Window.expect_reducers()
        self.is_in_reducer = True

    def reject_reducer_view(self, grad: Tensor) -> None:
        """Raise `ShardedGradError` if ``grad``, found in ``p.grad`` instead of this placeholder, is a reducer's.

        The owner calls this before it takes a plain tensor from ``p.grad`` for a new gradient.
        """
        if self.is_in_reducer and grad._is_view():
            raise ShardedGradError(
                f"DistributedDataParallel(gradient_as_bucket_view=True) replaced the gradient of {self.param_name!r}; "
                "use the model without the wrapper: bucketwheel reduces its gradients"
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        gone = "" if self.owner_ref() is not None else ", optimizer gone"
        return f"ShardedGrad({self.param_name!r}, {tuple(self.shape)}, {self.dtype}, device='{self.device}'{gone})"

    def __format__(self, format_spec: str) -> str:
        if format_spec:
            raise self.refusal("Tensor.__format__")
        return repr(self)

    def detach(self) -> ShardedGrad:
        """Return the placeholder itself: it is in no graph."""
        return self

    @property
    def data(self) -> ShardedGrad:
        """The placeholder itself, so that ``p.grad.data.mul_(x)`` works."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's own setter would make a plain tensor of this object, and the owner would take it for its placeholder.
        # Module.to() and the like assign the same object when they change nothing.
        if value is not self:
            raise self.refusal("Tensor.data = value")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(op)
        if answer is not None:
            try:
                return answer(op, *args, **kwargs)
            except _NotAnswered:
                pass
        raise next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGrad)).refusal(str(op))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: ShardedGrad, *args: object, **kwargs: object) -> NoReturn:
        raise self.refusal(f"Tensor.{name}")

    return method


def _untyped_storage(self: ShardedGrad) -> torch.UntypedStorage:
    """Refused, but to who describes a parameter for `torch.compile`, with what is in p.grad: it reads no values."""
    if sys._getframe(1).f_globals.get("__name__") == "torch._subclasses.meta_utils":
        return Tensor.untyped_storage(self)
    raise self.refusal("Tensor.untyped_storage")


# Methods that read memory in C++ without passing the dispatcher, or fail with a message that names no parameter.
for _name in """item tolist numpy data_ptr storage share_memory_ pin_memory __array__ __dlpack__
    __deepcopy__ __reduce_ex__ __bool__ __float__ __int__ __index__ __complex__""".split():
    setattr(ShardedGrad, _name, _refusing(_name))
ShardedGrad.untyped_storage = _untyped_storage  # type: ignore[assignment, method-assign]

_IN_PLACE = " p.grad.mul_(s) and p.grad /= n work in place, at no cost: the next step applies the factor."
_ADD = " p.grad.add_(x, alpha=a) works in place, and adds the mean of x over the ranks."
_HINTS = (
    *((f"aten.{name}.", _IN_PLACE) for name in ("mul", "div", "neg", "clone", "_foreach_mul", "_foreach_div")),
    *((f"aten.{name}", " p.grad.clamp_(low, high) works with two numbers.") for name in ("clamp.", "clamp_.Tensor")),
    ("aten.add.Tensor", f"{_ADD} If this is backward(create_graph=True): sharded gradients do not support it."),
    ("aten.sub.Tensor", _ADD),
    ("aten._to_copy", " To change the model's memory format, call optimizer.zero_grad() first."),
    ("Tensor.share_memory_", " To share the model, call optimizer.zero_grad() first."),
    ("aten.copy_", " To replace a gradient, assign a tensor: p.grad = tensor."),
    ("c10d", " The optimizer reduces it: call no collective on it."),
    (".step", " Call step() of its ShardedAdamW (a wrapper that does so sets steps_sharded_grads = True)."),
)
_IN_BACKWARD = (
    ". Do it after backward. A hook sees this rank's values in p.grad if every backward of the step runs inside "
    "optimizer.no_sync(); without no_sync(), only register_post_accumulate_grad_hook does, in the first backward."
)
_CALLS = {"_to_copy": "to", "_local_scalar_dense": "item"}  # what the caller wrote, by the operator that it becomes


# --- answers: each is called with the operator, then the operator's own arguments -----------------------------------


class _NotAnswered(Exception):
    """Raised by an answer, before it changes anything, for arguments that it cannot answer."""


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _expect_after_backward() -> None:
    """For what is not linear: a hook expects this rank's gradient, as with DDP, and the owner would answer for the mean."""
    if _is_in_backward():
        raise _NotAnswered


class _Share(NamedTuple):
    """The part of a tensor list that one owner answers: its indices, and their places in the list."""

    owner: GradOwner
    indices: list[int]
    places: list[int]


def _split(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int], list[_Share]]:
    """Split a list into plain tensors, their places, and one share per owner in order of first appearance.

    The order is that of the list, so ranks that pass equal lists make the owners' collective calls in the same order.
    """
    plain: list[Tensor] = []
    plain_places: list[int] = []
    shares: dict[int, _Share] = {}
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, ShardedGrad):
            owner = tensor.owner
            share = shares.get(id(owner))
            if share is None:
                share = shares[id(owner)] = _Share(owner, [], [])
            share.indices.append(tensor.param_index)
            share.places.append(place)
        else:
            plain.append(tensor)
            plain_places.append(place)
    if not shares:  # placeholders are among the other arguments only
        raise _NotAnswered
    return plain, plain_places, list(shares.values())


def _accumulate(op: Any, grad: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    if not isinstance(grad, ShardedGrad) or not isinstance(other, Tensor) or isinstance(other, ShardedGrad):
        raise _NotAnswered
    if other.layout != torch.strided:
        raise ShardedGradError(f"the gradient of {grad.param_name!r} is sparse; only dense gradients can be sharded")
    if other.shape != grad.shape or not torch.can_cast(other.dtype, grad.dtype):
        raise _NotAnswered
    if alpha != 1:
        other = other * alpha
    grad.owner.accumulate(grad.param_index, other if other.dtype == grad.dtype else other.to(grad.dtype))
    return grad


def _vector_norm(
    op: Any, grad: ShardedGrad, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    _expect_after_backward()
    if (dim and len(dim) != max(grad.dim(), 1)) or (keepdim and grad.dim()):
        raise _NotAnswered
    return grad.owner.norms([grad.param_index], float(ord)).to(dtype or grad.dtype, copy=True).reshape(())


def _foreach_norm(op: Any, tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    _expect_after_backward()
    plain, plain_places, shares = _split(tensors)
    norms = list(tensors)
    if plain:
        for place, norm in zip(plain_places, op(plain, ord, dtype), strict=True):
            norms[place] = norm
    for owner, indices, places in shares:
        answer = owner.norms(indices, float(ord))
        # One copy per dtype, which callers may write to; torch.nn.utils passes lists of one dtype.
        dtypes = [dtype or tensors[place].dtype for place in places]
        copies = {each: answer.to(each, copy=True).unbind() for each in set(dtypes)}
        for row, place in enumerate(places):
            norms[place] = copies[dtypes[row]][row]
    return norms


def _factor(op: Any, grad: Tensor, other: Any) -> float | Tensor:
    """Return the number that ``op`` multiplies ``grad`` by, read now: the caller may reuse the tensor."""
    divides = "div" in str(op)
    if isinstance(other, Tensor):
        if isinstance(other, ShardedGrad) or other.numel() != 1 or other.dim() > grad.dim():
            raise _NotAnswered
        if device_index(other.device) != CPU:
            private = other.detach().reshape(()).clone()
            return private.reciprocal() if divides else private
        other = other.item()
    if isinstance(other, complex):
        raise _NotAnswered
    if not divides:
        return float(other)
    return 1.0 / other if other else math.copysign(math.inf, other)


def _scale(op: Any, grad: Tensor, other: Any) -> Tensor:
    if not isinstance(grad, ShardedGrad):
        raise _NotAnswered
    grad.owner.scale([grad.param_index], _factor(op, grad, other))
    return grad


def _foreach_scale(op: Any, tensors: Sequence[Tensor], others: Any) -> None:
    plain, plain_places, shares = _split(tensors)
    # Factors are read before anything is scaled, so that a refusal leaves every gradient as it was.
    if not isinstance(others, (list, tuple)):
        factor = _factor(op, min(tensors, key=Tensor.dim), others)
        if plain:
            op(plain, others)
        for owner, indices, _ in shares:
            owner.scale(indices, factor)
        return
    factors = {place: _factor(op, tensors[place], others[place]) for share in shares for place in share.places}
    if plain:
        op(plain, [others[place] for place in plain_places])
    for owner, indices, places in shares:
        for index, place in zip(indices, places, strict=True):
            owner.scale([index], factors[place])


def _unscale(op: Any, tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    plain, _, shares = _split(tensors)
    if plain:
        # First, so that the owners' agreement over the ranks includes what is found here.
        op(plain, found_inf, inv_scale)
    for owner, indices, _ in shares:
        owner.unscale(indices, found_inf, inv_scale)


def _clamp(op: Any, grad: ShardedGrad, min: float | None = None, max: float | None = None) -> Tensor:
    _expect_after_backward()
    grad.owner.clamp([grad.param_index], min, max)
    return grad


def _foreach_clamp(op: Any, tensors: Sequence[Tensor], bound: float) -> None:
    _expect_after_backward()
    plain, _, shares = _split(tensors)
    if plain:
        op(plain, bound)
    for owner, indices, _ in shares:
        owner.clamp(indices, *((None, bound) if "max" in str(op) else (bound, None)))


def _zero(op: Any, grad: ShardedGrad) -> Tensor:
    grad.owner.zero([grad.param_index])
    return grad


def _fill(op: Any, grad: Tensor, value: float | Tensor) -> Tensor:
    if not isinstance(grad, ShardedGrad) or isinstance(value, ShardedGrad) or value != 0:
        raise _NotAnswered
    return _zero(op, grad)


def _foreach_zero(op: Any, tensors: Sequence[Tensor]) -> None:
    plain, _, shares = _split(tensors)
    if plain:
        op(plain)
    for owner, indices, _ in shares:
        owner.zero(indices)


def _detach(op: Any, grad: ShardedGrad) -> Tensor:
    alias = ShardedGrad._empty(grad)  # from C++; view operators must return a new object
    alias.__dict__.update(grad.__dict__)
    return alias


# [Note: reducer under DDP] Frameworks wrap models in DistributedDataParallel by themselves. After our hook has taken a
# gradient, the reducer copies p.grad into its bucket (mul.out), reduces the bucket and writes it back (copy_), all from
# C++ while a backward runs. This rank's contribution is in our bucket already, so the reducer gets zeros and what it
# writes back is dropped: the gradients are averaged once, by us. With gradient_as_bucket_view=True it puts its own
# zeros into p.grad instead, without telling: the placeholder is never written to, and the owner finds a view of the
# reducer's bucket (`reject_reducer_view`). Its communication hooks read p.grad with an operation that others use too,
# and are refused. Native hooks ask for `is_in_reducer` once a reducer has read any placeholder of the process.


@functools.cache
def _warn_of_reducer() -> None:
    warnings.warn(
        "the model is wrapped in DistributedDataParallel, but a bucketwheel optimizer reduces its gradients; "
        "the wrapper only costs time: use the model without the wrapper",
        stacklevel=2,
    )


def _read_by_reducer(op: Any, grad: Tensor, other: Any, *, out: Tensor) -> Tensor:
    if not isinstance(grad, ShardedGrad) or isinstance(out, ShardedGrad) or not _is_in_backward():
        raise _NotAnswered
    _warn_of_reducer()
    grad.give_to_reducer()
    return out.zero_()


def _written_by_reducer(op: Any, grad: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(grad, ShardedGrad) or not grad.is_in_reducer or not _is_in_backward():
        raise _NotAnswered
    grad.is_in_reducer = False
    return grad


_aten = torch.ops.aten
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.add_.Tensor: _accumulate,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    **dict.fromkeys([_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar], _scale),
    **{
        getattr(packet, overload): _foreach_scale
        for packet in (_aten._foreach_mul_, _aten._foreach_div_)
        for overload in ("Tensor", "Scalar", "List", "ScalarList")
    },
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten.clamp_.default: _clamp,
    _aten.clamp_min_.default: _clamp,
    _aten.clamp_max_.default: lambda op, grad, max: _clamp(op, grad, None, max),
    _aten._foreach_clamp_min_.Scalar: _foreach_clamp,
    _aten._foreach_clamp_max_.Scalar: _foreach_clamp,
    _aten.zero_.default: _zero,
    **dict.fromkeys([_aten.fill_.Tensor, _aten.fill_.Scalar], _fill),
    _aten._foreach_zero_.default: _foreach_zero,
    _aten.detach.default: _detach,
    _aten.mul.out: _read_by_reducer,
    _aten.copy_.default: _written_by_reducer,
}


# --- registered with torch once, when the first placeholder is made ---------------------------------------------------


@functools.cache
def _register_with_torch() -> None:
    # For classes not in this private list torch.nn.utils makes one call per gradient: only speed is lost without it.
    supported = getattr(_foreach_utils, "_foreach_supported_types", None)
    if isinstance(supported, list):
        supported.append(ShardedGrad)
