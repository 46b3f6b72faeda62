"""Operations on plain tensor lists, for research code: the kernels, and the collectives of `collectives`.

Every function checks all its arguments before it changes anything, and names the offending index in what it raises.
"""

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
    """One Adam step over lists of tensors of one device, in place and in one native call.

    For each tensor, with t its step and g = ``grad_scale`` * grad (-g to ``maximize``)::

        p = p * (1 - lr * weight_decay)             or, not decoupled: g = g + weight_decay * p
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)

    with the largest v so far in place of v in the last line where ``max_exp_avg_sqs`` holds it (amsgrad). Computed in
    float32, and in float64 for float64 parameters.

    AdamW is Algorithm 2 of Loshchilov & Hutter, "Decoupled Weight Decay Regularization". docs/numerics.md gives the
    exact order of operations. The result is bitwise the same for any number of threads, division into tensors,
    alignment and processor, CPU or GPU (NaN payloads excepted).

    On CUDA everything runs in torch's current stream and nothing waits for the device. ``lr``, ``grad_scale``, ``noop``
    and ``steps`` that are CUDA tensors are read when the step runs, so also anew in every replay of a CUDA graph.

    Args:
        params: float32, bfloat16, float16 or float64. Any shape; non-overlapping and dense.
        grads: float32, bfloat16 or float16; float64 for a float64 parameter. Read only: they are not scaled in place.
        exp_avgs, exp_avg_sqs: m and v, both float32 or both bfloat16; float64 for a float64 parameter.
        steps: the step being taken, counted from 1, as one int or one for each tensor; or tensors of one element
            (float32 or int64) that hold the steps taken so far and are advanced by one, as in ``torch.optim``.
            A tensor listed several times advances once.
        grad_scale: factor of every gradient, rounded to float32 (but for float64): 1 / world size, 1 / loss scale, a
            clip coefficient.
        noop: one element of any dtype; if it is not zero (NaN is not), nothing changes, the steps included.
        max_exp_avg_sqs: for each parameter the running maximum of v (amsgrad), of v's dtype, or None.
        master_params: for each bfloat16 or float16 parameter its float32 master, or None. The master is updated and
            the parameter becomes its value rounded to nearest even.
        remainders: for each bfloat16 parameter the 16 bits that it lacks to a float32 master, as int16, or None. The
            two are updated together, and the parameter is the master rounded to nearest (halves away from zero). Zeros
            where there is only a bfloat16 weight yet. docs/numerics.md gives the format.
        state_rounding: of a bfloat16 v; m is rounded to nearest even. A v that is rounded to nearest does not decay at
            all where 1 - beta2 < 2**-8, which is warned about once.
            A bfloat16 parameter with neither master nor remainder is rounded to nearest even, and so ignores updates
            smaller than half its last place.
        seed, param_ids: what the random bits of stochastic rounding depend on, beside the step and the element's place
            in its parameter (in memory order). ``param_ids`` (default: the index in the list) names the parameters.

        on_external_update: "ignore": the old value of a parameter with a master is not read. "resync": where it is not what
            the master rounds to, it takes the master's place, element by element.

    All tensors of one index have the same shape and the same strides. Lists may be empty, and so may tensors.

    Raises:
        ValueError: lengths, shapes or strides differ, a tensor has gaps or overlaps itself or another of its index,
            tensors are on different devices, or a step is below 1. Nothing has changed.
        TypeError: a dtype outside those above, or not a tensor. Nothing has changed.
    """
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
    """The L2 norm of a list of tensors of one device taken as one vector, or of each of them.

    Squares are added in double and in a fixed order, so the result does not overflow for finite elements and is bitwise
    the same in every run, for any number of threads and on any processor. It does depend on how the elements are
    divided into tensors and, in the last bit, on their order in memory.

    Args:
        tensors: float32, bfloat16, float16 or float64, of any shapes, non-overlapping and dense. May be empty, list and
            tensors. Squares of float64 elements are rounded to double, and overflow to infinity from 1.3e154 on.
        per_tensor: return a norm for each tensor.
        return_nonfinite: return also whether there is an infinity or a NaN, or a sum of float64 squares has overflowed.

    Returns:
        A float64 tensor of shape [] (or [len(tensors)]) on the tensors' device (for no tensors: the CPU); nothing waits
        for the device. With ``return_nonfinite`` also a bool tensor of the same shape. As in torch, an infinite element
        gives infinity, and a NaN gives NaN.

    Raises:
        ValueError: a tensor has gaps or overlaps itself, or tensors are on different devices.
        TypeError: another dtype, or not a tensor.
    """
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
            raise ValueError("steps on the cpu cannot follow a noop that is on the device: put them on the device too")
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
