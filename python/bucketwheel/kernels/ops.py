"""Operations on plain lists of tensors: the Adam step, the L2 norm, and the collectives of `comm`.

Each function checks all its arguments before it changes anything. Its errors name the index of the tensor."""

from __future__ import annotations

import array
import functools
import math
import numbers
import operator
import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch.autograd.graph import increment_version

from bucketwheel.comm.collectives import PreMulSum, all_gather, reduce_scatter
from bucketwheel.device import CPU, index_of, torch_device, upload
from bucketwheel.errors import expect_number
from bucketwheel.native import core
from bucketwheel.native.modules import native

__all__ = ["PreMulSum", "adam_step", "all_gather", "l2_norm", "reduce_scatter"]


def adam_step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: int | Sequence[int | torch.Tensor],
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: float | torch.Tensor = 1.0,
    noop: torch.Tensor | None = None,
    max_exp_avg_sqs: Sequence[torch.Tensor | None] | None = None,
    master_params: Sequence[torch.Tensor | None] | None = None,
    remainders: Sequence[torch.Tensor | None] | None = None,
    decoupled: bool = True,
    maximize: bool = False,
    state_rounding: Literal["stochastic", "nearest"] = "stochastic",
    seed: int = 0,
    param_ids: Sequence[int] | None = None,
    on_external_update: Literal["ignore", "resync"] = "ignore",
) -> None:
    """Takes one Adam step over lists of tensors on one device, in place and in one native call. Local.

    For each tensor, ``t`` is its step and ``g`` is ``grad_scale * grad``, or ``-grad_scale * grad`` with ``maximize``. A step
    does this in float32, and in float64 for float64 parameters:

        p = p * (1 - lr * weight_decay)                    if decoupled
        g = g + weight_decay * p                           if not decoupled
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)

    With ``max_exp_avg_sqs`` (amsgrad) the last line uses the largest ``v`` so far. AdamW is Algorithm 2 of Loshchilov and
    Hutter, "Decoupled Weight Decay Regularization". docs/numerics.md has the exact order of operations. The result has the
    same bits for any number of threads, any division into tensors, any alignment and any processor, CPU or GPU, except for NaN
    payloads.

    On CUDA all work runs in torch's current stream, and the host does not wait for the device. The step reads values of
    ``lr``, ``grad_scale``, ``noop`` and ``steps`` that are CUDA tensors when it runs, and again in each replay of a CUDA
    graph.

    All tensors of one index have the same shape and the same strides. Lists and tensors may be empty.

    Args:
        params: Parameters of any shape, non-overlapping and dense. Dtypes float32, bfloat16, float16 or float64.
        grads: Gradients, read only. Dtypes float32, bfloat16 or float16; float64 for a float64 parameter.
        exp_avgs: The first moments ``m``. Dtypes float32 or bfloat16; float64 for a float64 parameter.
        exp_avg_sqs: The second moments ``v``, of the same dtype as ``m``.
        steps: The number of this step, which counts from 1: one int, or one int for each tensor. Or one tensor of one element
            for each (float32 or int64) with the number of steps taken so far, as in ``torch.optim``. The step adds one to each
            of these tensors. A tensor that is in the list several times advances once.
        lr: The learning rate.
        betas: The coefficients ``(beta1, beta2)`` of the moments.
        eps: The number that is added to the denominator.
        weight_decay: The weight decay coefficient.
        grad_scale: A factor of all gradients, rounded to float32 except for float64 parameters: 1 / world size, 1 / loss
            scale, or a clip coefficient.
        noop: A tensor of one element, of any dtype. If it is not zero (NaN is not zero), nothing changes, including ``steps``.
        max_exp_avg_sqs: For each parameter the largest ``v`` so far (amsgrad), of the dtype of ``v``, or None. A bfloat16
            tensor is rounded to nearest even.
        master_params: For each bfloat16 or float16 parameter its float32 master, or None. The step updates the master, and the
            parameter becomes the master rounded to nearest even.
        remainders: For each bfloat16 parameter the 16 bits that it lacks to a float32 master, as int16, or None. The step
            updates both together. The parameter is the master rounded to nearest (halves away from zero). Begin with zeros if
            there is only a bfloat16 weight. docs/numerics.md has the format. A parameter cannot have both a master and a
            remainder. A bfloat16 parameter with neither is rounded to nearest even, so it ignores updates smaller than half
            its last place.
        decoupled: True decays weights as AdamW. False adds weight decay to the gradient (L2), as Adam.
        maximize: Maximize the objective.
        state_rounding: How a bfloat16 ``v`` is rounded: ``"stochastic"``, or ``"nearest"`` (even). A bfloat16 ``m`` is always
            rounded to nearest even. With ``"nearest"``, ``v`` does not decay at all if ``1 - beta2 < 2**-8``; the function
            warns once for each such beta2.
        seed: The seed of stochastic rounding, from 0 to ``2**64 - 1``. Random bits depend on the seed, the parameter's number,
            the step, and the place of the element in its parameter (in memory order).
        param_ids: For each parameter its number for stochastic rounding, from 0 to ``2**30 - 1``. None means its index in the
            list.
        on_external_update: With ``"ignore"``, the step does not read the old value of a parameter that has a master. With
            ``"resync"``, an element that differs from its rounded master replaces the master.

    Raises:
        ValueError: Lengths, shapes or strides differ, a tensor has gaps or shares memory with itself or with another tensor of
            its index, tensors are on different devices, a step is below 1, or ``steps`` has CPU tensors and ``noop`` is a CUDA
            tensor. Nothing has changed.
        TypeError: A dtype that is not listed above, or an argument that is not a tensor. Nothing has changed."""
    module = native()
    device = _device_of(params)
    if state_rounding not in ("stochastic", "nearest"):
        raise ValueError(f"state_rounding is {state_rounding!r}, expected 'stochastic' or 'nearest'")
    stochastic = state_rounding == "stochastic"
    if on_external_update not in ("ignore", "resync"):
        raise ValueError(f"on_external_update is {on_external_update!r}, expected 'ignore' or 'resync'")
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise ValueError(f"betas is {betas!r}, expected two numbers") from None
    # Whether the host knows now what it says; else the device does when the step runs.
    if noop is not None and not isinstance(noop, torch.Tensor):
        raise TypeError(f"noop is {noop!r}, expected a tensor of one element")
    is_noop_here = noop is not None and (device == CPU or index_of(noop) == CPU)
    skip = is_noop_here and bool(noop.item() != 0)  # type: ignore[union-attr]
    optional = (max_exp_avg_sqs, master_params, remainders)
    lists = (params, grads, exp_avgs, exp_avg_sqs, *optional)
    try:
        if not stochastic and 1 - beta2 < 2**-8 and any(v.dtype == torch.bfloat16 for v in exp_avg_sqs):
            _warn_of_nearest(beta2)
        resync = on_external_update == "resync"
        options = _native_options(decoupled, maximize, stochastic, operator.index(seed), skip, resync)
        if device == CPU:  # by position throughout: for small tensors the call is what takes the time
            module.use_torch_threads(torch.get_num_threads())
            try:
                group = _native_group(lr, beta1, beta2, eps, weight_decay)
            except TypeError:  # tensors, or no numbers at all
                group = _new_group(lr, beta1, beta2, eps, weight_decay)
            module.adam_step(lists, steps, group, grad_scale, param_ids, options)
        elif not skip:
            rest, flag = (beta1, beta2, eps, weight_decay), None if is_noop_here else noop
            _adam_step_cuda(device, lists, steps, lr, rest, grad_scale, flag, param_ids, options)
    except (TypeError, ValueError) as error:
        expect_number(grad_scale, "grad_scale")
        _expect_lists(params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
        if any(word in str(error) for word in ("incompatible", "unhashable", "as an integer")):
            _expect_choices(param_ids, seed, decoupled=decoupled, maximize=maximize)
        raise
    if skip:
        return
    written = [*params, *exp_avgs, *exp_avg_sqs]
    for given in (*optional, () if isinstance(steps, int) else steps):
        written += [one for one in (() if given is None else given) if isinstance(one, torch.Tensor)]
    increment_version(written)


# For small tensors the call is what takes the time, and most calls repeat these.
@functools.lru_cache(maxsize=64)
def _native_group(*hyper: float) -> core.AdamGroup:
    if not all(isinstance(value, numbers.Real) for value in hyper):  # a tensor may change and stay the same key
        raise TypeError(hyper)
    return core.AdamGroup(*map(float, hyper))


def _new_group(*hyper: Any) -> core.AdamGroup:
    for name, value in zip(("lr", "betas[0]", "betas[1]", "eps", "weight_decay"), hyper, strict=True):
        expect_number(value, name)
    return core.AdamGroup(*map(float, hyper))


@functools.lru_cache(maxsize=64)
def _native_options(*choices: Any) -> core.AdamOptions:
    return core.AdamOptions(*choices)


# Of what the native call does not take it says only that it does not, after printing every tensor.
def _expect_lists(**lists: Any) -> None:
    for name, tensors in lists.items():
        if not isinstance(tensors, Sequence) or isinstance(tensors, str):
            raise TypeError(f"{name} is a {type(tensors).__name__}, expected a list of tensors")


def _expect_choices(param_ids: Any, seed: Any, **flags: Any) -> None:
    if not hasattr(seed, "__index__") or not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed!r}, expected an int from 0 to 2**64 - 1")
    ids: Sequence[Any] = param_ids if isinstance(param_ids, Sequence) else () if param_ids is None else (None,)
    if not all(hasattr(i, "__index__") and 0 <= i < 2**30 for i in ids):
        raise ValueError(f"param_ids is {param_ids!r}, expected ints from 0 to 2**30 - 1")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, expected a bool")


@functools.cache  # each beta2 once; but not where the warning is an error: nothing has been done then
def _warn_of_nearest(beta2: float) -> None:
    warnings.warn(
        f"bfloat16 exp_avg_sq rounded to nearest never decays at beta2={beta2}: a step takes off less than half its "
        "last place. Use state_rounding='stochastic', or float32 states",
        stacklevel=3,
    )


@overload
def l2_norm(
    tensors: Sequence[torch.Tensor], *, per_tensor: bool = False, return_nonfinite: Literal[False] = False
) -> torch.Tensor: ...
@overload
def l2_norm(
    tensors: Sequence[torch.Tensor], *, per_tensor: bool = False, return_nonfinite: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...
def l2_norm(
    tensors: Sequence[torch.Tensor], *, per_tensor: bool = False, return_nonfinite: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the L2 norm of tensors on one device, as one vector or one norm for each tensor. Local.

    Squares are added in float64 and in a fixed order. So the sum does not overflow for finite elements, except of float64
    tensors, and has the same bits in every run, for any number of threads and on any processor. The result depends on the
    division of elements into tensors and, in the last bit, on the order of elements in memory.

    Args:
        tensors: Tensors of any shape, non-overlapping and dense. Dtypes float32, bfloat16, float16 or float64. The list and
            the tensors may be empty. Squares of float64 elements overflow to infinity from 1.3e154 on.
        per_tensor: Return one norm for each tensor.
        return_nonfinite: Also return whether an element is infinite or NaN, or a sum of float64 squares has overflowed.

    Returns:
        A float64 tensor of shape [], or [len(tensors)] with ``per_tensor``, on the tensors' device (the CPU for an empty
            list). The host does not wait for the device. With ``return_nonfinite``, the tensor and a bool tensor of the same
            shape. As in torch, an infinite element gives infinity and a NaN gives NaN.

    Raises:
        ValueError: A tensor has gaps or overlaps itself, or tensors are on different devices.
        TypeError: A dtype that is not listed above, or an argument that is not a tensor."""
    device = _device_of(tensors)
    if device != CPU:
        like: Any = {"dtype": torch.float64, "device": torch_device(device)}
        each, total = torch.empty(len(tensors), **like), torch.zeros(1, **like)
        core.sumsq_cuda(device, tensors, each, total)
        squared = each if per_tensor else total[0]
        norm = squared.sqrt()
        return (norm, ~torch.isfinite(squared)) if return_nonfinite else norm
    core.use_torch_threads(torch.get_num_threads())
    sums = [sumsq for sumsq, _ in core.sumsq(tensors)]
    like = {"dtype": torch.float64, "device": "cpu"}  # whatever torch.set_default_device() says
    if per_tensor:
        norm = torch.tensor([math.sqrt(x) for x in sums], **like)
    else:
        norm = torch.scalar_tensor(math.sqrt(core.fold(sums)), **like)
    return (norm, ~torch.isfinite(norm)) if return_nonfinite else norm


# --- CUDA: everything is enqueued in torch's current stream, and nothing waits for the device ------------------------


def _device_of(tensors: Sequence[Any]) -> int:
    """The native device of the first tensor of a list; the CPU's for an empty list, and for what native code will refuse:
    no tensor, no list."""
    try:
        first = tensors[0] if len(tensors) else None
    except (TypeError, LookupError):
        return CPU
    return index_of(first) if isinstance(first, torch.Tensor) else CPU


def _adam_step_cuda(
    device: int,
    lists: Sequence[Sequence[torch.Tensor | None] | None],
    steps: int | Sequence[int | torch.Tensor],
    lr: float | torch.Tensor,
    hyper: tuple[float, float, float, float],
    grad_scale: float | torch.Tensor,
    noop: torch.Tensor | None,
    param_ids: Sequence[int] | None,
    options: core.AdamOptions,
) -> None:
    """`adam_step` on one CUDA device. ``lists``: parameters, gradients, m, v, and the optional ones in its order. ``hyper``:
    betas, eps and weight decay. ``noop`` is on a device."""
    params = lists[0]
    assert params is not None
    count = _StepCounts(steps, len(params), device)
    if noop is not None:
        if count.on_host:
            raise ValueError("steps on the cpu cannot follow noop, which is on the device: put steps on the device too")
        noop = (noop != 0).to(torch.float32).reshape(1)
    factors, average = None, 1.0
    if isinstance(grad_scale, torch.Tensor):
        factor = grad_scale.detach().to(torch_device(device), torch.float64).reshape(1)
        factors = factor.expand(len(params)).contiguous()
    else:
        average = grad_scale
    read_late = None  # the learning rate, when the step runs
    if isinstance(lr, torch.Tensor) and index_of(lr) == device:
        read_late = [lr.detach().to(torch.float32).reshape(1)]
    group = _new_group(0.0 if read_late else lr, *hyper)
    arguments = core.AdamArguments(count.taken, average, options, factors=factors, noop=noop, lr=read_late)
    core.adam_step_cuda(device, lists, group, param_ids, arguments)
    count.advance(noop)


class _StepCounts:
    """The steps of one call: ``taken``, int64 on the device, holds the steps taken so far; the kernel counts it up."""

    def __init__(self, steps: int | Sequence[int | torch.Tensor], count: int, device: int) -> None:
        self.on_host: list[torch.Tensor] = []
        self._on_device: dict[int, torch.Tensor] = {}  # by index
        options: Any = {"dtype": torch.int64, "device": torch_device(device)}
        if isinstance(steps, int):
            if steps < 1:
                raise ValueError(f"steps is {steps}: steps count from 1")
            self.taken = torch.full((count,), steps - 1, **options)
            return
        if len(steps) != count:
            raise ValueError(f"steps has {len(steps)} tensors, params has {count}")
        known = array.array("q", [0] * count)
        for index, step in enumerate(steps):
            if isinstance(step, torch.Tensor):
                if step.numel() != 1 or step.dtype not in (torch.float32, torch.int64):
                    raise ValueError(
                        f"steps[{index}] is {step.dtype} {tuple(step.shape)}, expected one float32 or int64"
                    )
                if index_of(step) == device:
                    self._on_device[index] = step
                    continue
                self.on_host.append(step)
            known[index] = int(step) if isinstance(step, torch.Tensor) else step - 1
            if known[index] < 0:
                raise ValueError(f"steps[{index}] is {step}: steps count from 1")
        if len(self._on_device) == count > 0:
            self.taken = torch.stack([step.detach().reshape(()) for step in self._on_device.values()]).to(torch.int64)
            return
        self.taken = torch.empty(count, **options)
        upload(self.taken, known.tobytes())
        for place, step in self._on_device.items():
            self.taken[place].copy_(step.detach().reshape(()))

    def advance(self, noop: torch.Tensor | None) -> None:
        """Counts the caller's tensors up, each once, unless ``noop`` is not zero when this runs."""
        with torch.no_grad():
            for step in {id(step): step for step in self.on_host}.values():
                step += 1
            unique = list({id(step): step for step in self._on_device.values()}.values())
            if noop is not None:
                counts = {dtype: (1 - noop).to(dtype).reshape(()) for dtype in {step.dtype for step in unique}}
                for step in unique:
                    step.add_(counts[step.dtype])
            elif unique:
                torch._foreach_add_(unique, 1)
