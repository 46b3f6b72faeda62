"""What operations keep alive: dropped by threads that do not have the GIL, and gone when it is said to be."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from bucketwheel.comm.collectives import AllGatherRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.native import core

HOLD_S, PAUSE_S = 0.4, 0.05
Tensors = list[torch.Tensor]


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with Communicator(backend="local") as made:
        yield made


def tensors() -> tuple[Tensors, Tensors]:
    return [torch.empty(1000) for _ in range(8)], [torch.ones(1000) for _ in range(8)]


def start_broadcast(outs: Tensors, ins: Tensors, comm: Communicator) -> Handle:
    return comm.broadcast(ins[0], 0)


def start_request(outs: Tensors, ins: Tensors, comm: Communicator) -> Handle:
    return AllGatherRequest(outs, ins, comm).start()


def start_reduction_to_a_sink(outs: Tensors, ins: Tensors, comm: Communicator) -> Handle:
    """Nobody but the operation has the sink."""
    return Handle(comm._native.reduce_scatter_to_sink(ins[0], core.ShardAccumulator(outs[0], [(0, 1000)])), comm)


OPERATIONS: list[Callable[[Tensors, Tensors, Communicator], Handle]] = [
    all_gather,
    reduce_scatter,
    start_broadcast,
    start_reduction_to_a_sink,
    start_request,
]


def test_operations_end_while_the_caller_keeps_the_gil(comm: Communicator) -> None:
    switch_s = sys.getswitchinterval()
    begin = all_gather([], [], comm, timing=True)
    sys.setswitchinterval(100)
    try:
        comm.stream.pause(PAUSE_S)  # so that all of them end during the loop
        for _ in range(3):
            for start in OPERATIONS:
                start(*tensors(), comm)
        last = all_gather(*tensors(), comm, timing=True)
        until = time.perf_counter() + HOLD_S
        while time.perf_counter() < until:
            pass
    finally:
        sys.setswitchinterval(switch_s)
    last.synchronize()
    assert 1e3 * PAUSE_S < begin.elapsed_time(last) < 1e3 * HOLD_S / 2


@pytest.mark.parametrize("start", OPERATIONS[:-1], ids=lambda start: start.__name__)
def test_tensors_are_gone_when_the_wait_returns(comm: Communicator, start: Callable[..., Handle]) -> None:
    outs, ins = tensors()
    comm.stream.pause(PAUSE_S)
    handle = start(outs, ins, comm)
    kept = weakref.ref(ins[0])
    del outs, ins
    assert kept() is not None
    handle.synchronize()
    assert kept() is None


def test_what_a_tensor_takes_along_may_call_us(comm: Communicator) -> None:
    """Dropping one runs any Python code, with operations of its own among it."""
    seen: list[float] = []

    def at_end() -> None:
        out = torch.empty(1000)
        all_gather(out, torch.full((1000,), 3.0), comm).synchronize()
        seen.append(float(out[0]))

    outs, ins = tensors()
    comm.stream.pause(PAUSE_S)
    handle = all_gather(outs, ins, comm)
    weakref.finalize(ins[3], at_end)
    weakref.finalize(outs[3], at_end)
    del outs, ins
    handle.synchronize()
    assert seen == [3.0, 3.0]
