"""The device that the GPU tests and benchmarks use: a GPU, or with ``BW_GPU_SIMULATE=1`` the one of
tests/support/simulated_cuda.py with the NCCL of tests/support/simulated_nccl.py.

`DEVICE` is the one of this process. All that torch can do on a GPU alone (streams, events, graphs, sync debug mode) is
behind it, so that tests read the same for both; what only a GPU can show asks `DEVICE.need_gpu`. On the simulated
device torch's operations run on the CPU at the call: its current stream is the calling thread, and side streams are
that too.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketwheel.device import install
from bucketwheel.native import core, modules
from tests.support import simulated_nccl
from tests.support.counted_cuda import counted
from tests.support.requirements import unmet
from tests.support.simulated_cuda import Calls, Graph, load, posing

__all__ = ["DEVICE", "Calls", "Device", "SimulatedDevice", "Tell"]

Tell = Callable[..., None]  # the fixture ``tell`` of conftest.py
CYCLES_PER_S = 1.8e9  # of `torch.cuda._sleep`, about


class Device:
    """A GPU."""

    is_simulated = False
    tensors = torch.device("cuda")  # where tensors are

    def size(self, real: int, simulated: int) -> int:
        """A number of elements, tensors or repeats for each device."""
        return simulated if self.is_simulated else real

    def need_gpu(self, what: str) -> None:
        """Skips a test of what the simulated device does not have."""

    def opened(self) -> AbstractContextManager[Any]:
        """Around everything that uses the device."""
        install(counted(modules.cuda().api))
        return nullcontext()

    def cpu(self) -> AbstractContextManager[None]:
        """Inside, what is computed on CPU tensors is computed by the CPU code: for expected values."""
        return nullcontext()

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the device with the same strides."""
        return tensor.detach().to(self.tensors)

    def get(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU; waits for the device."""
        return tensor.detach().cpu()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    # ---- time and order

    def hold(self, seconds: float) -> None:
        """Keeps the current stream busy for about so long; the host goes on."""
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def stream(self) -> Any:
        """A new side stream, which is behind what the current one holds."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def join(self, stream: Any) -> None:
        """The current stream waits for ``stream``."""
        torch.cuda.current_stream().wait_stream(stream)

    def is_idle(self, stream: Any) -> bool:
        return bool(stream.query())

    def mark(self) -> Any:
        """A point in the current stream, for `between_s`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, start: Any, end: Any) -> float:
        """Seconds between two marks; after `synchronize`."""
        return 1e-3 * float(start.elapsed_time(end))

    # ---- what must not happen

    @contextmanager
    def free_running(self) -> Iterator[None]:
        """AssertionError if anything inside blocks the host or allocates, in our calls (counted) or in torch's (refused)."""
        gc.collect()  # the calls of what earlier tests have left behind are not counted
        calls, allocations = Calls(), torch.cuda.memory_stats()["num_device_alloc"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        calls.expect_free_running()
        made = torch.cuda.memory_stats()["num_device_alloc"] - allocations
        assert made == 0, f"torch allocated device memory {made} times"

    def host_alone(self) -> AbstractContextManager[None]:
        """Inside, times of the host have no time of the device in them."""
        return nullcontext()

    # ---- graphs

    def warm_up(self, call: Callable[[], Any], times: int = 3) -> None:
        """Runs ``call`` in a side stream, as torch asks before a capture."""
        stream = self.stream()
        with torch.cuda.stream(stream):
            for _ in range(times):
                call()
        self.join(stream)

    def capture(self, call: Callable[[], Any]) -> Callable[[], None]:
        """The replay of ``call``, which is captured and not run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


class SimulatedDevice(Device):
    is_simulated = True
    tensors = torch.device("cpu")

    def need_gpu(self, what: str) -> None:
        pytest.skip(f"needs a GPU, this one is simulated: {what}")

    @contextmanager
    def opened(self) -> Iterator[None]:
        simulated_nccl.install()  # before anything reads BW_NCCL_LIB
        with posing():
            yield

    @contextmanager
    def cpu(self) -> Iterator[None]:
        poses = core.is_posing()
        core.set_posing(False)
        try:
            yield
        finally:
            core.set_posing(poses)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def get(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def synchronize(self) -> None:
        pass

    def total_bytes(self) -> int:
        return 1 << 40  # of tests/native/fake_cuda

    def free_bytes(self) -> int:
        return self.total_bytes() - int(load()[1].fake_cuda_allocated_bytes())

    def hold(self, seconds: float) -> None:
        pass

    def stream(self) -> Any:
        return None  # the calling thread, for native code too

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def join(self, stream: Any) -> None:
        pass

    def is_idle(self, stream: Any) -> bool:
        return False

    def mark(self) -> Any:
        return time.perf_counter()

    def between_s(self, start: Any, end: Any) -> float:
        return float(end - start)

    @contextmanager
    def free_running(self) -> Iterator[None]:
        gc.collect()
        calls = Calls()
        yield
        calls.expect_free_running()

    def host_alone(self) -> AbstractContextManager[None]:
        """Nothing that the device or NCCL is given is done: results mean nothing."""
        return simulated_nccl.counting()

    def warm_up(self, call: Callable[[], Any], times: int = 3) -> None:
        for _ in range(times):
            call()

    def capture(self, call: Callable[[], Any]) -> Callable[[], None]:
        graph = Graph(load()[1])
        with graph:
            call()
        return graph.replay


def _device() -> Device:
    if torch.cuda.is_available():
        return Device()
    return SimulatedDevice()


DEVICE = _device()


def need_device() -> None:
    """Ends a test where there is neither a GPU nor the wish for a simulated one."""
    if DEVICE.is_simulated and os.environ.get("BW_GPU_SIMULATE") != "1":
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        unmet("gpu", f"torch {torch.__version__}, {built}, sees no CUDA device")
