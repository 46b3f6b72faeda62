"""Collectives on lists of tensors, all_gather and reduce_scatter, and requests: collectives on fixed tensors.

Arguments are checked before anything is enqueued. Errors name the index of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bucketwheel.comm.arguments import (
    PreMulSum,
    Tensors,
    as_moved,
    listed,
    native_op_of,
    natives_of,
    warn_of_rounded_average,
)
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.device import native_stream
from bucketwheel.native import core
from bucketwheel.torch_internals import increment_version

__all__ = ["AllGatherRequest", "PreMulSum", "ReduceScatterRequest", "all_gather", "join", "reduce_scatter"]


def all_gather(
    outputs: Tensors,
    inputs: Tensors,
    comm: Communicator,
    *,
    stream: Any = None,
    after: Sequence[Handle] = (),
    timing: bool = False,
) -> Handle:
    """Gathers ``inputs[i]`` of all ranks into ``outputs[i]``. Collective.

    The elements of rank r begin at element ``r * inputs[i].numel()``. A list is one operation, whatever its length. The
    operation runs beside the caller: read outputs and change inputs only after you have waited for the handle. It starts after
    the caller's earlier work: on CUDA, the work in torch's current stream. Inputs in ``comm.pool`` are read by the other ranks
    directly; other inputs are copied through staging buffers first.

    Args:
        outputs: A tensor or a list of tensors: contiguous, of any dtype and shape, on the communicator's device, with ``world
            * inputs[i].numel()`` elements.
        inputs: Contiguous tensors of the same dtypes. ``inputs[i]`` may be this rank's part of ``outputs[i]`` (in place).
            Tensors must not overlap otherwise.
        comm: The communicator.
        stream: A native stream or a `torch.cuda.Stream` to run in. None means the communicator's stream. Operations of one
            communicator run in the order of the calls, in any stream. The local backend on CUDA does not take a stream.
        after: Handles of operations, of any communicators, that must be over first.
        timing: Allow `Handle.elapsed_time`.

    Returns:
        The handle of the operation.

    Raises:
        ValueError: Lengths, numbers of elements, devices, memory formats or overlaps are wrong. Nothing has been enqueued.
        TypeError: Dtypes differ, or an element is not a tensor. Nothing has been enqueued.
        CommError: The communicator has failed (its error is raised again) or is closed."""
    native = _native_of(comm)
    outs = outputs if type(outputs) is list else listed(outputs, "outputs")
    ins = inputs if type(inputs) is list else listed(inputs, "inputs")
    events = natives_of(after) if after else []
    native_or_none = None if stream is None else native_stream(stream)
    try:
        handle = native.all_gather(outs, ins, native_or_none, events, not not timing)
    except TypeError:
        handle = native.all_gather(*by_bytes(outs, ins), native_or_none, events, not not timing)
    increment_version(outs)
    return Handle(handle, comm)


def join(comm: Communicator, part: torch.Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """The whole of what each rank has a ``part`` of, both 1-D. ``ranges``: by rank, where its elements belong. Collective."""
    sizes = [sum(end - begin for begin, end in of_rank) for of_rank in ranges]
    longest = max(sizes)
    mine = part.new_zeros(longest)
    mine[: part.numel()] = part
    gathered = mine.new_empty(len(ranges) * longest)
    comm._all_gather_into(gathered, mine).wait()
    whole = mine.new_empty(sum(sizes))
    for rank, of_rank in enumerate(ranges):
        at = rank * longest
        for begin, end in of_rank:
            whole[begin:end] = gathered[at : at + end - begin]
            at += end - begin
    return whole


def reduce_scatter(
    outputs: Tensors,
    inputs: Tensors,
    comm: Communicator,
    *,
    op: Any = "sum",
    stream: Any = None,
    after: Sequence[Handle] = (),
    timing: bool = False,
) -> Handle:
    """Sums ``inputs[i]`` of all ranks and writes this rank's part of the sum to ``outputs[i]``. Collective.

    The part of rank r begins at element ``r * outputs[i].numel()``. Sums are computed in rank order in float32 (float64 for
    float64 tensors) and rounded once to the tensors' dtype. The result has the same bits in every run, on the CPU and on CUDA,
    inside and outside of the pool. With the backend ``"nccl"``, NCCL chooses order and rounding. Lists, streams, ordering and
    errors are those of `all_gather`.

    Args:
        outputs: A tensor or a list of tensors: contiguous, float32, bfloat16, float16 or float64, on the communicator's
            device. On the CPU also int64, int32, int16, int8 and uint8, whose sums wrap around.
        inputs: Contiguous tensors of the same dtypes with ``world * outputs[i].numel()`` elements. ``outputs[i]`` may be this
            rank's part of ``inputs[i]`` (in place). Tensors must not overlap otherwise.
        comm: The communicator.
        op: ``"sum"``, ``"avg"`` (the sum is divided by the world size before it is rounded) or a `PreMulSum`. torch's
            ``ReduceOp.SUM``, ``AVG`` and ``PREMUL_SUM`` mean the same. Integers allow ``"sum"`` only.
        stream: As in `all_gather`.
        after: As in `all_gather`.
        timing: As in `all_gather`.

    Returns:
        The handle of the operation.

    Raises:
        ValueError: As in `all_gather`, or another ``op``.
        TypeError: As in `all_gather`, or ``op`` is not a reduction.
        CommError: The communicator has failed (its error is raised again) or is closed."""
    native = _native_of(comm)
    outs = outputs if type(outputs) is list else listed(outputs, "outputs")
    ins = inputs if type(inputs) is list else listed(inputs, "inputs")
    native_op = "sum" if op == "sum" else native_op_of(op)
    if native_op == "avg":
        warn_of_rounded_average(comm, outs)
    events = natives_of(after) if after else []
    native_or_none = None if stream is None else native_stream(stream)
    handle = native.reduce_scatter(outs, ins, native_op, native_or_none, events, not not timing)
    increment_version(outs)
    return Handle(handle, comm)


def by_bytes(outputs: list[Any], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """The same lists with tensors of dtypes that native code does not know as bytes: gathering does not look at values."""
    for index, (output, given) in enumerate(zip(outputs, inputs, strict=False)):
        if isinstance(output, torch.Tensor) and isinstance(given, torch.Tensor) and output.dtype != given.dtype:
            raise TypeError(f"outputs[{index}] is {output.dtype}, inputs[{index}] is {given.dtype}")
    return (
        [as_moved(tensor, f"outputs[{index}]") for index, tensor in enumerate(outputs)],
        [as_moved(tensor, f"inputs[{index}]") for index, tensor in enumerate(inputs)],
    )


def _native_of(comm: Communicator) -> Any:
    if not isinstance(comm, Communicator):
        kind = f"{type(comm).__module__}.{type(comm).__qualname__}"
        raise TypeError(f"comm is a {kind}, expected a bucketwheel.Communicator, which Communicator(group) makes")
    return comm._native


# ---- requests: checked once, started any number of times ----------------------------------------------------------------


class _Request:
    __slots__ = ("_comm", "_native", "_outputs")

    def __init__(self, native_request: Any, outputs: list[torch.Tensor], comm: Communicator) -> None:
        self._native = native_request
        self._outputs = list(outputs)
        self._comm = comm

    def start(self, *, stream: Any = None, after: Sequence[Handle] = (), timing: bool = False) -> Handle:
        """Runs the operation once more, and returns its handle. Collective: all ranks start the same requests in the same order.

        Arguments, ordering and errors of the communicator are those of `all_gather`. The tensors are not checked again. You
        may start a request again before it is over."""
        events = natives_of(after) if after else []
        handle = self._native.start(None if stream is None else native_stream(stream), events, not not timing)
        increment_version(self._outputs)
        return Handle(handle, self._comm)


class AllGatherRequest(_Request):
    """An `all_gather` of fixed tensors, which you can start any number of times. Making a request is local.

    ``request.start(stream=None, after=(), timing=False)`` runs the operation and returns a `Handle`, as `all_gather` does. It
    is collective: all ranks start the same requests in the same order. You may start a request again before it is over.

    The constructor checks the tensors and raises as `all_gather` does; `start` does not check them again. The request keeps
    the memory that the tensors have when it is made. Do not resize their storages. If a tensor gets other memory later
    (``.data = ...``, ``set_``), the request still uses the former memory.

    Args:
        outputs: As in `all_gather`.
        inputs: As in `all_gather`.
        comm: The communicator."""

    __slots__ = ()

    def __init__(self, outputs: Tensors, inputs: Tensors, comm: Communicator) -> None:
        native = _native_of(comm)
        outs, ins = listed(outputs, "outputs"), listed(inputs, "inputs")
        try:
            request = core.make_request(native, outs, ins)
        except TypeError:
            request = core.make_request(native, *by_bytes(outs, ins))
        super().__init__(request, outs, comm)


class ReduceScatterRequest(_Request):
    """A `reduce_scatter` of fixed tensors, which you can start any number of times, as `AllGatherRequest`. Making it is local.

    Args:
        outputs: As in `reduce_scatter`.
        inputs: As in `reduce_scatter`.
        comm: The communicator.
        op: As in `reduce_scatter`."""

    __slots__ = ()

    def __init__(self, outputs: Tensors, inputs: Tensors, comm: Communicator, *, op: Any = "sum") -> None:
        native = _native_of(comm)
        outs, ins = listed(outputs, "outputs"), listed(inputs, "inputs")
        native_op = native_op_of(op)
        if native_op == "avg":
            warn_of_rounded_average(comm, outs)
        request = core.make_request(native, outs, ins, native_op)
        super().__init__(request, outs, comm)
