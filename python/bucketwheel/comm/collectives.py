"""Collectives on plain tensor lists: coalesced all-gather and reduce-scatter that return handles; requests are
collectives on fixed buffers.

Arguments are checked before anything is enqueued, and what is raised names the offending index.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.device import native_stream
from bucketwheel.native import core

# Without the public function's look at its argument: 0.15 us of every call.
increment_version: Callable[[list[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", torch.autograd.graph.increment_version
)

__all__ = ["AllGatherRequest", "PreMulSum", "ReduceScatterRequest", "all_gather", "reduce_scatter"]

_NATIVE_DTYPES = frozenset(
    {
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
Tensors = torch.Tensor | Sequence[torch.Tensor]
_HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class PreMulSum:
    """The reduction ``factor * (sum of the inputs)``, for the ``op`` of `reduce_scatter`; the factor is the same on all
    ranks.

    The backends ``shm``, ``local`` and ``c10d`` multiply the float32 sum by the factor rounded to float32 (float64 for
    float64 tensors), before the one rounding to the tensors' dtype. NCCL multiplies each input first, in the tensors'
    dtype.

    Raises:
        ValueError: the factor is not finite.
        TypeError: it is not a number of Python's or numpy's.
    """

    factor: float

    def __post_init__(self) -> None:
        if not isinstance(self.factor, numbers.Real):
            raise TypeError(f"the factor of PreMulSum is {self.factor!r}, expected a number")
        if not math.isfinite(self.factor):
            raise ValueError(f"the factor of PreMulSum is {self.factor!r}, expected a finite number")


def all_gather(
    outputs: Tensors,
    inputs: Tensors,
    comm: Communicator,
    *,
    stream: Any = None,
    after: Sequence[Handle] = (),
    timing: bool = False,
) -> Handle:
    """Gather every rank's ``inputs[i]`` into ``outputs[i]``, rank r's elements from ``r * inputs[i].numel()`` on.

    Lists are one operation, whatever their length; a single tensor is one too. The operation runs beside the caller:
    the outputs may be read, and the inputs changed, when the handle says that it is over. It starts when the caller's
    work so far is done (CPU: at once). Inputs in ``comm.pool`` are read by the peers where they are; others are
    copied through staging buffers first.

    Args:
        outputs: contiguous tensors of any dtype on the communicator's device; ``world * inputs[i].numel()`` elements,
            whatever the shape.
        inputs: contiguous tensors of the same dtypes. ``inputs[i]`` may be this rank's own part of ``outputs[i]``
            (in place); nothing else may overlap.
        stream: a native stream to run on; None: the communicator's own. Operations of one communicator run in the
            order of the calls on any stream. Not on the local CUDA backend, whose ranks share one.
        after: handles of operations (of any communicator) that must be over first.
        timing: allow `Handle.elapsed_time`.

    Raises:
        ValueError: lengths, element counts, devices, layouts or overlaps as above are wrong. Nothing was enqueued.
        TypeError: dtypes differ, or not a tensor. Nothing was enqueued.
        CommError: the communicator had failed (the error it failed with) or is closed.
    """
    outs = outputs if type(outputs) is list else listed(outputs)
    ins = inputs if type(inputs) is list else listed(inputs)
    events = [handle._native for handle in after] if after else []
    native_or_none = None if stream is None else native_stream(stream)
    try:
        handle = comm._native.all_gather(outs, ins, native_or_none, events, timing)
    except TypeError:
        handle = comm._native.all_gather(*by_bytes(outs, ins), native_or_none, events, timing)
    increment_version(outs)
    return Handle(handle, comm)


def reduce_scatter(
    outputs: Tensors,
    inputs: Tensors,
    comm: Communicator,
    *,
    op: str | PreMulSum = "sum",
    stream: Any = None,
    after: Sequence[Handle] = (),
    timing: bool = False,
) -> Handle:
    """Sum every rank's ``inputs[i]`` and give rank r the elements from ``r * outputs[i].numel()`` on, in
    ``outputs[i]``.

    Sums are taken in rank order in float32 (float64 for float64 tensors) and rounded once to the tensors' dtype, so the
    result is the same bits in every run, on CPU and CUDA, for pool memory or not. Only on the backend ``"nccl"`` order
    and rounding are NCCL's. Lists, streams, ordering and errors are as in `all_gather`.

    Args:
        outputs: contiguous tensors, float32, bfloat16, float16 or float64, on the communicator's device; on the CPU also
            int64, int32, int16, int8 and uint8, whose sums wrap around.
        inputs: contiguous tensors of the same dtypes with ``world * outputs[i].numel()`` elements. ``outputs[i]``
            may be this rank's own part of ``inputs[i]`` (in place); nothing else may overlap.
        op: ``"sum"``, the only one of integers; ``"avg"``: the sum divided by the world size before the rounding; or a
            `PreMulSum`.
    """
    outs = outputs if type(outputs) is list else listed(outputs)
    ins = inputs if type(inputs) is list else listed(inputs)
    native_op = "sum" if op == "sum" else native_op_of(op)
    if op == "avg":
        warn_of_rounded_average(comm, outs)
    events = [handle._native for handle in after] if after else []
    native_or_none = None if stream is None else native_stream(stream)
    handle = comm._native.reduce_scatter(outs, ins, native_op, native_or_none, events, timing)
    increment_version(outs)
    return Handle(handle, comm)


def listed(tensors: Tensors) -> list[torch.Tensor]:
    """A list as it is: to be read only."""
    if isinstance(tensors, list):
        return tensors
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def native_op_of(op: str | PreMulSum) -> str | float:
    if isinstance(op, PreMulSum):
        return float(op.factor)
    if not isinstance(op, str):
        raise TypeError(f"op is {op!r}, expected 'sum', 'avg' or a PreMulSum")
    return op


def by_bytes(outputs: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """The same lists with tensors of dtypes that native code does not know as bytes: gathering does not look at values."""
    for index, (output, given) in enumerate(zip(outputs, inputs, strict=False)):
        if isinstance(output, torch.Tensor) and isinstance(given, torch.Tensor) and output.dtype != given.dtype:
            raise TypeError(f"outputs[{index}] is {output.dtype}, inputs[{index}] is {given.dtype}")
    return [_bytes_of(tensor) for tensor in outputs], [_bytes_of(tensor) for tensor in inputs]


def _bytes_of(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype in _NATIVE_DTYPES or not tensor.is_contiguous():
        return tensor
    return tensor.detach().view(-1).view(torch.uint8)


# ---- requests: checked once, started any number of times ----------------------------------------------------------------


class _Request:
    __slots__ = ("_comm", "_native", "_outputs")

    def __init__(self, native_request: Any, outputs: list[torch.Tensor], comm: Communicator) -> None:
        self._native = native_request
        self._outputs = list(outputs)
        self._comm = comm

    def start(self, *, stream: Any = None, after: Sequence[Handle] = (), timing: bool = False) -> Handle:
        """Run the operation once more. Arguments, ordering and the errors of the communicator are those of
        `all_gather`; the tensors are not looked at again. Starting counts as a call: all ranks start the same requests
        in the same order. It may be started again before it is over.
        """
        events = [one._native for one in after] if after else []
        handle = self._native.start(None if stream is None else native_stream(stream), events, timing)
        increment_version(self._outputs)
        return Handle(handle, self._comm)


class AllGatherRequest(_Request):
    """An `all_gather` of these tensors, to be started any number of times.

    Everything is checked here, and raises as `all_gather` does; making a request is not collective. The request keeps
    the memory that the tensors have now, and reads and writes nothing else: a tensor that is given other memory later
    (``.data = ...``, ``set_``) is not followed. Their storages must not be resized.
    """

    __slots__ = ()

    def __init__(self, outputs: Tensors, inputs: Tensors, comm: Communicator) -> None:
        outs, ins = listed(outputs), listed(inputs)
        try:
            request = core.all_gather_request(comm._native, outs, ins)
        except TypeError:
            request = core.all_gather_request(comm._native, *by_bytes(outs, ins))
        super().__init__(request, outs, comm)


class ReduceScatterRequest(_Request):
    """A `reduce_scatter` of these tensors, to be started any number of times; otherwise as `AllGatherRequest`."""

    __slots__ = ()

    def __init__(self, outputs: Tensors, inputs: Tensors, comm: Communicator, *, op: str | PreMulSum = "sum") -> None:
        outs, ins = listed(outputs), listed(inputs)
        native_op = native_op_of(op)
        if op == "avg":
            warn_of_rounded_average(comm, outs)
        super().__init__(core.reduce_scatter_request(comm._native, outs, ins, native_op), outs, comm)


_has_warned = False


def warn_of_rounded_average(comm: Communicator, tensors: Sequence[Any]) -> None:
    """Once in a process."""
    global _has_warned
    is_exact = comm.size & (comm.size - 1) == 0
    if is_exact or comm.backend != "nccl" or _has_warned:
        return
    rounded = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)} & _HALF_DTYPES
    if rounded:
        warnings.warn(
            f"op='avg' of {' and '.join(sorted(map(str, rounded)))} on {comm.size} ranks: NCCL multiplies by 1/{comm.size} "
            "rounded to that dtype, so that all averages are off by the same factor, up to 0.2 %. op='sum' is not",
            stacklevel=3,
        )
        _has_warned = True
