"""The placeholder in ``p.grad``: a tensor without memory whose values are sharded over the ranks.

Once a gradient has gone into its bucket, ``p.grad`` holds a `ShardedGrad`. Stock torch code sees a gradient of the right
shape, dtype and device, and what it does to it is answered by the optimizer through `GradOwner`:

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

Two more things cannot be left to torch. A stock optimizer may decay parameters before it first touches a gradient, so a
pre-step hook refuses foreign optimizers before they begin. The reducer of a `DistributedDataParallel` around the model
reads and writes gradients from C++: it is handed zeros, and what it writes back is dropped ([Note: reducer under DDP]).
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from .errors import ShardedGradError

__all__ = ["GradOwner", "ShardedGrad"]

aten = torch.ops.aten


class GradOwner(Protocol):
    """What holds the gradients behind placeholders. A parameter is named by its index, given to `ShardedGrad` by the owner.

    The value of a gradient here is what plain data-parallel training would leave in ``p.grad``: reduced over all ranks.
    Calls take effect in program order: a factor applies to what was accumulated before it and not to what comes after.
    A call that a rank makes alone must not hang: methods marked *collective* are called by all ranks in the same order
    with the same indices, and the owner detects and names a rank that does not. The others are local and never block.
    Tensor arguments are borrowed for the call; what is kept must be copied. Errors pass through to the caller unchanged.
    """

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add this rank's contribution ``grad`` (the parameter's shape and dtype, any strides). Local.

        Called from backward, on whatever thread and stream autograd runs, before the post-accumulate hook of the parameter.
        """

    def norms(self, indices: Sequence[int], ord: float) -> Tensor:
        """Return the norms of order ``ord`` (2, 1, inf, any float) of whole gradients. Collective.

        The result has shape ``[len(indices)]``, a floating dtype at least as precise as the parameters', and their device.
        It is equal on all ranks. Loops ask for one parameter at a time, so compute all at the first call and keep
        them until a gradient changes.
        """

    def scale(self, indices: Sequence[int], factor: float | Tensor) -> None:
        """Multiply gradients by ``factor``. Local; every rank passes the same value.

        ``factor`` is a float, or a private 0-d tensor where reading it would synchronize with a device.
        """

    def unscale(self, indices: Sequence[int], found_inf: Tensor, inv_scale: Tensor) -> None:
        """Multiply by ``inv_scale`` and set ``found_inf`` to 1 if any value on any rank is not finite. Collective.

        Both are fp32 tensors of one element. ``found_inf`` is never reset to 0: it may come in as 1, from other gradients of
        this rank, and goes out equal on all ranks (the largest that came in or was found).
        """

    def clamp(self, indices: Sequence[int], low: float | None, high: float | None) -> None:
        """Limit values to ``[low, high]``; None is no limit, NaN stays NaN. Collective: the values must be reduced first."""

    def zero(self, indices: Sequence[int]) -> None:
        """Make gradients zero. They still exist: the next step updates their parameters. Local."""


class ShardedGrad(Tensor):
    """The gradient of one parameter, without its values. Made once per parameter and put into ``p.grad`` by its owner.

    It has the shape, strides, dtype and device of ``param``, no memory, and a weak reference to ``owner``; once the owner
    is gone every operation but ``repr`` raises `ShardedGradError`. ``p.grad is placeholder`` holds until somebody
    assigns ``p.grad``: in-place operations, ``detach()`` and ``data`` return the same object.
    """

    # Operations reach __torch_dispatch__ only: with __torch_function__ every Python-level call would come twice.
    __torch_function__ = torch._C._disabled_torch_function_impl

    owner_ref: weakref.ref[GradOwner]
    param_index: int
    param_name: str
    reducer_view_ptr: int | None  # [Note: reducer under DDP]

    @staticmethod
    def __new__(cls, param: Tensor, owner: GradOwner, index: int, name: str) -> ShardedGrad:
        self = cls._empty(param)
        self.owner_ref = weakref.ref(owner)
        self.param_index = index
        self.param_name = name
        self.reducer_view_ptr = None
        _register_with_torch()
        return self

    @classmethod
    def _empty(cls, like: Tensor) -> ShardedGrad:
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, layout=like.layout, device=like.device
        )
        # Without this, native code that asks for the address reads from null.
        torch._C._set_throw_on_mutable_data_ptr(self)
        return cast(ShardedGrad, self)

    def _alias(self) -> ShardedGrad:
        alias = ShardedGrad._empty(self)
        alias.__dict__.update(self.__dict__)
        return alias

    @property
    def owner(self) -> GradOwner:
        """The owner; `ShardedGradError` if it is gone."""
        owner = self.owner_ref()
        if owner is None:
            raise ShardedGradError(
                f"the optimizer that held the gradient of {self.param_name!r} is gone; set p.grad = None before going on"
            )
        return owner

    def refusal(self, operation: str) -> ShardedGradError:
        """Return (not raise) the error that says ``operation`` cannot be done on this gradient."""
        hint = next((text for key, text in _HINTS if key in operation), "")
        return ShardedGradError(
            f"{operation} needs the values of the gradient of {self.param_name!r} (shape {tuple(self.shape)}, "
            f"{self.dtype}), which are sharded over the ranks; optimizer.full_grad(p) returns them.{hint}"
        )

    def reject_reducer_view(self, grad: Tensor) -> None:
        """Raise `ShardedGradError` if ``grad``, found in ``p.grad`` instead of this placeholder, was put there by DDP.

        The owner calls this before it takes a plain tensor from ``p.grad`` for a new gradient.
        """
        if self.reducer_view_ptr is not None and grad.data_ptr() == self.reducer_view_ptr and grad.numel():
            raise ShardedGradError(
                f"DistributedDataParallel(gradient_as_bucket_view=True) replaced the gradient of {self.param_name!r}; "
                "use the model without the wrapper, which has nothing left to reduce"
            )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        gone = "" if self.owner_ref() is not None else ", optimizer gone"
        return f"ShardedGrad({self.param_name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{gone})"

    def __format__(self, format_spec: str) -> str:
        if format_spec:
            raise self.refusal("Tensor.__format__")
        return repr(self)

    def detach(self) -> ShardedGrad:  # type: ignore[override]
        """Return the placeholder itself: it is in no graph."""
        return self

    @property
    def data(self) -> ShardedGrad:  # type: ignore[override]
        """The placeholder itself, so that ``p.grad.data.mul_(x)`` works."""
        return self

    @data.setter
    def data(self, value: Tensor) -> NoReturn:
        # torch's own setter would turn this object into a plain tensor that the owner takes for its placeholder.
        raise self.refusal("Tensor.data = value")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is None:
            _refuse(func, args, kwargs or {})
        return answer(func, args, kwargs or {})


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: ShardedGrad, *args: object, **kwargs: object) -> NoReturn:
        raise self.refusal(f"Tensor.{name}")

    return method


# Methods that read memory in C++ without passing the dispatcher, or fail with a message that names no parameter.
for _name in (
    "item tolist numpy data_ptr storage untyped_storage share_memory_ pin_memory __array__ __dlpack__ __deepcopy__ "
    "__reduce_ex__ __bool__ __float__ __int__ __index__ __complex__ __cuda_array_interface__"
).split():
    setattr(ShardedGrad, _name, property(_refusing(_name)) if _name.endswith("interface__") else _refusing(_name))

_HINTS = (
    ("aten.add.Tensor", " If this is backward(create_graph=True): it is not supported with a sharded optimizer."),
    ("aten._to_copy", " To move or convert the model, call optimizer.zero_grad() first."),
    ("Tensor.share_memory_", " To share the model, call optimizer.zero_grad() first."),
    ("aten.copy_", " To replace a gradient, assign a tensor: p.grad = tensor."),
    ("c10d", " It needs no reduction: the optimizer reduces it."),
    (".step", " Step the optimizer that holds it instead, or call its zero_grad() first."),
)


def _refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
    grads = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGrad)]
    raise grads[0].refusal(str(func))


# --- answers: each takes (operator, args, kwargs) as __torch_dispatch__ does -----------------------------------------


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
    return plain, plain_places, list(shares.values())


def _accumulate(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    grad, other = args
    if not isinstance(grad, ShardedGrad) or isinstance(other, ShardedGrad) or not isinstance(other, Tensor):
        _refuse(func, args, kwargs)
    if other.layout != torch.strided:
        raise ShardedGradError(f"sparse gradients are not supported (parameter {grad.param_name!r})")
    if other.shape != grad.shape or not torch.can_cast(other.dtype, grad.dtype):
        _refuse(func, args, kwargs)
    alpha = kwargs.get("alpha", 1)
    if alpha != 1:
        other = other * alpha
    grad.owner.accumulate(grad.param_index, other if other.dtype == grad.dtype else other.to(grad.dtype))
    return grad


def _vector_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    grad, ord, dim, keepdim = (*args, *(2, None, False)[len(args) - 1 :])
    if not isinstance(grad, ShardedGrad) or (dim and len(dim) != max(grad.dim(), 1)) or (keepdim and grad.dim()):
        _refuse(func, args, kwargs)
    norm = grad.owner.norms([grad.param_index], float(ord))
    return norm.to(kwargs.get("dtype") or grad.dtype, copy=True).reshape(())


def _foreach_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, ord = (*args, 2)[:2]
    plain, plain_places, shares = _split(tensors)
    norms: list[Tensor] = list(tensors)
    for place, norm in zip(plain_places, func(plain, ord, **kwargs) if plain else (), strict=True):
        norms[place] = norm
    for owner, indices, places in shares:
        answer = owner.norms(indices, float(ord))
        # One copy for the dtypes seen, so that callers may write to what they get and the owner's stays as it is.
        copies = {
            dtype: answer.to(dtype, copy=True).unbind()
            for dtype in {kwargs.get("dtype") or tensors[place].dtype for place in places}
        }
        for row, place in enumerate(places):
            norms[place] = copies[kwargs.get("dtype") or tensors[place].dtype][row]
    return norms


def _factor(func: Any, args: Sequence[Any], kwargs: dict[str, Any], grad: Tensor, other: Any) -> float | Tensor:
    """The number that ``grad`` is multiplied by in ``func``, read now: the caller may reuse the tensor. Refuses others."""
    divides = "div" in str(func)
    if isinstance(other, Tensor):
        is_number = other.numel() == 1 and other.dim() <= grad.dim() and not other.is_complex()
        if isinstance(other, ShardedGrad) or not is_number:
            _refuse(func, args, kwargs)
        if other.device.type != "cpu":
            private = other.detach().reshape(()).clone()
            return private.reciprocal() if divides else private
        other = other.item()
    elif isinstance(other, complex):
        _refuse(func, args, kwargs)
    if not divides:
        return float(other)
    return 1.0 / other if other else math.copysign(math.inf, other)


def _scale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    grad, other = args
    if not isinstance(grad, ShardedGrad):
        _refuse(func, args, kwargs)
    grad.owner.scale([grad.param_index], _factor(func, args, kwargs, grad, other))
    return grad


def _foreach_scale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    tensors, others = args
    plain, plain_places, shares = _split(tensors)
    if not shares:  # placeholders only among the factors
        _refuse(func, args, kwargs)
    if not isinstance(others, (list, tuple)):
        # The smallest number of dimensions decides whether a one-element tensor of shape [1] may be a factor.
        narrowest = min((tensors[place] for share in shares for place in share.places), key=Tensor.dim)
        factor = _factor(func, args, kwargs, narrowest, others)
        if plain:
            func(plain, others)
        for owner, indices, _ in shares:
            owner.scale(indices, factor)
        return
    # Read and check every factor first, so that a refusal leaves all gradients as they were.
    factors = {
        place: _factor(func, args, kwargs, tensors[place], others[place]) for share in shares for place in share.places
    }
    if plain:
        func(plain, [others[place] for place in plain_places])
    for owner, indices, places in shares:
        for index, place in zip(indices, places, strict=True):
            owner.scale([index], factors[place])


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    tensors, found_inf, inv_scale = args
    plain, _, shares = _split(tensors)
    if plain:
        # First, so that the owners' agreement over the ranks includes what is found here.
        func(plain, found_inf, inv_scale)
    for owner, indices, _ in shares:
        owner.unscale(indices, found_inf, inv_scale)


def _limits(func: Any, bounds: Sequence[Any], kwargs: dict[str, Any]) -> tuple[float | None, float | None]:
    name = str(func)
    low, high = (*bounds, None, None)[:2]
    if "clamp_min" in name:
        return kwargs.get("min", low), None
    if "clamp_max" in name:
        return None, kwargs.get("max", low)
    return kwargs.get("min", low), kwargs.get("max", high)


def _clamp(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    grad = args[0]
    grad.owner.clamp([grad.param_index], *_limits(func, args[1:], kwargs))
    return grad


def _foreach_clamp(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    plain, _, shares = _split(args[0])
    if plain:
        func(plain, *args[1:], **kwargs)
    for owner, indices, _ in shares:
        owner.clamp(indices, *_limits(func, args[1:], kwargs))


def _zero(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    grad = args[0]
    grad.owner.zero([grad.param_index])
    return grad


def _fill(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    grad, value = args
    if not isinstance(grad, ShardedGrad) or isinstance(value, ShardedGrad) or float(value) != 0.0:
        _refuse(func, args, kwargs)
    return _zero(func, args, kwargs)


def _foreach_zero(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    plain, _, shares = _split(args[0])
    if plain:
        func(plain)
    for owner, indices, _ in shares:
        owner.zero(indices)


def _detach(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    return args[0]._alias()  # view operators must return a new object


# [Note: reducer under DDP] Frameworks wrap models in DistributedDataParallel by themselves. After our hook has taken a
# gradient, the reducer copies p.grad into its bucket (mul.out), reduces the bucket and writes it back (copy_), all from
# C++ while a backward runs. This rank's contribution is in our bucket already, so the reducer gets zeros and what it writes
# back is dropped: the gradients stay averaged once. With gradient_as_bucket_view=True it puts its own zeros into p.grad
# afterwards, without telling; the owner finds that out with `reject_reducer_view`. Its communication hooks read p.grad
# with an operation that others use too, and are refused.


@functools.cache
def _warn_of_reducer() -> None:
    warnings.warn(
        "the model is wrapped in DistributedDataParallel, but its gradients are reduced by a bucketwheel optimizer; "
        "the wrapper only costs time, use the model without it",
        stacklevel=2,
    )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _read_by_reducer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    grad, out = args[0], kwargs["out"]
    if not isinstance(grad, ShardedGrad) or isinstance(out, ShardedGrad) or not _in_backward():
        _refuse(func, args, kwargs)
    _warn_of_reducer()
    grad.reducer_view_ptr = out.data_ptr()
    return out.zero_()


def _written_by_reducer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    grad = args[0]
    if not isinstance(grad, ShardedGrad) or grad.reducer_view_ptr is None or not _in_backward():
        _refuse(func, args, kwargs)
    return grad


_ANSWERS: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    aten.add_.Tensor: _accumulate,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten.div_.Tensor: _scale,
    aten.div_.Scalar: _scale,
    aten._foreach_mul_.Scalar: _foreach_scale,
    aten._foreach_mul_.ScalarList: _foreach_scale,
    aten._foreach_mul_.List: _foreach_scale,
    aten._foreach_mul_.Tensor: _foreach_scale,
    aten._foreach_div_.Scalar: _foreach_scale,
    aten._foreach_div_.ScalarList: _foreach_scale,
    aten._foreach_div_.List: _foreach_scale,
    aten._foreach_div_.Tensor: _foreach_scale,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.clamp_.default: _clamp,
    aten.clamp_min_.default: _clamp,
    aten.clamp_max_.default: _clamp,
    aten._foreach_clamp_min_.Scalar: _foreach_clamp,
    aten._foreach_clamp_max_.Scalar: _foreach_clamp,
    aten.zero_.default: _zero,
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: _fill,
    aten._foreach_zero_.default: _foreach_zero,
    aten.detach.default: _detach,
    aten.mul.out: _read_by_reducer,
    aten.copy_.default: _written_by_reducer,
}


# --- what is registered with torch, once, when the first placeholder is made ------------------------------------------


@functools.cache
def _register_with_torch() -> None:
    # torch.nn.utils falls back to one call per gradient for classes that are not in this list. It is private: without it
    # only speed is lost.
    supported = getattr(_foreach_utils, "_foreach_supported_types", None)
    if isinstance(supported, list):
        supported.append(ShardedGrad)
    register_optimizer_step_pre_hook(_refuse_foreign_step)


def _check_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param.grad, ShardedGrad):
                raise param.grad.refusal(f"{type(optimizer).__name__}.step")


def _refuse_foreign_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Raise before ``optimizer`` steps parameters whose gradients it cannot read, unless it sets ``steps_sharded_grads``.

    A closure makes its gradients inside of ``step``, so they are looked at again when it returns.
    """
    if getattr(optimizer, "steps_sharded_grads", False):
        return None
    _check_gradients(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def checked_closure() -> Any:
        loss = closure()
        _check_gradients(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked_closure}
    return (args[0], checked_closure, *args[2:]), kwargs
