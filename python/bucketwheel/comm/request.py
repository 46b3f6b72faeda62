"""Requests: collectives on fixed buffers, checked once and started any number of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bucketwheel.comm.collectives import (
    PreMulSum,
    by_bytes,
    increment_version,
    listed,
    native_op_of,
    warn_of_many,
    warn_of_rounded_average,
)
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.device import native_stream
from bucketwheel.native import core

__all__ = ["AllGatherRequest", "ReduceScatterRequest"]

Tensors = torch.Tensor | Sequence[torch.Tensor]


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
        warn_of_many(comm, outs)
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
        warn_of_many(comm, outs)
        if op == "avg":
            warn_of_rounded_average(comm, outs)
        super().__init__(core.reduce_scatter_request(comm._native, outs, ins, native_op), outs, comm)
