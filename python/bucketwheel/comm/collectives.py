"""Collectives on plain tensor lists: coalesced all-gather and reduce-scatter that return handles; requests are
collectives on fixed buffers.

Arguments are checked before anything is enqueued, and what is raised names the offending index.
"""

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
            `PreMulSum`. Or torch's ``ReduceOp.SUM``, ``AVG`` or ``PREMUL_SUM``; `ValueError` for others.
    """
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
        """Run the operation once more. Arguments, ordering and the errors of the communicator are those of
        `all_gather`; the tensors are not looked at again. Starting counts as a call: all ranks start the same requests
        in the same order. It may be started again before it is over.
        """
        events = natives_of(after) if after else []
        handle = self._native.start(None if stream is None else native_stream(stream), events, not not timing)
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
        native = _native_of(comm)
        outs, ins = listed(outputs, "outputs"), listed(inputs, "inputs")
        try:
            request = core.make_request(native, outs, ins)
        except TypeError:
            request = core.make_request(native, *by_bytes(outs, ins))
        super().__init__(request, outs, comm)


class ReduceScatterRequest(_Request):
    """A `reduce_scatter` of these tensors, to be started any number of times; otherwise as `AllGatherRequest`."""

    __slots__ = ()

    def __init__(self, outputs: Tensors, inputs: Tensors, comm: Communicator, *, op: Any = "sum") -> None:
        native = _native_of(comm)
        outs, ins = listed(outputs, "outputs"), listed(inputs, "inputs")
        native_op = native_op_of(op)
        if native_op == "avg":
            warn_of_rounded_average(comm, outs)
        request = core.make_request(native, outs, ins, native_op)
        super().__init__(request, outs, comm)
