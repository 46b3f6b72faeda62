"""The CUDA code without a GPU: `_cuda` compiled by g++ against tests/native/fake_cuda, and CPU tensors that pose as
CUDA tensors.

The kernels' sources run block by block on the CPU, streams are threads with random delays, the default stream is the
calling thread (as torch's CPU operations are). What passes here has the right numbers, the right order between streams
and the right number of calls; what only a GPU shows is in tests/gpu.

>>> with posing():
...     ops.adam_step(...)     # takes its CUDA path, bitwise equal to the CPU's
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketwheel.device import install
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.native import core
from tests.native.cmake import built
from tests.support.counted_cuda import clear_cuda_faults, counted, cuda_calls, wrapped

# What the training path must not do: wait for the device, copy while the host waits, or allocate.
BLOCKING = ("stream_synchronize", "event_synchronize", "memcpy_blocking", "free_device")
ALLOCATING = ("malloc_device", "malloc_host", "stream_create", "event_create")


def build() -> Path:
    """The simulated module."""
    return built("_cuda_sim.so")


@functools.cache
def load() -> tuple[ModuleType, ctypes.CDLL]:
    """The simulated module, installed in the native one, and its test functions."""
    path = str(build())
    loader = importlib.machinery.ExtensionFileLoader("_cuda", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_cuda", loader))
    loader.exec_module(module)
    library = ctypes.CDLL(path)
    install(counted(wrapped(library.fake_cuda_declared, module.api)))
    library.fake_cuda_end_capture.restype = ctypes.c_void_p
    library.fake_cuda_capture_mark.restype = ctypes.c_size_t
    library.fake_cuda_capture_error.restype = ctypes.c_char_p
    library.fake_cuda_begin_replay.argtypes = library.fake_cuda_end_replay.argtypes = [ctypes.c_void_p]
    library.fake_cuda_replay_to.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.fake_cuda_free_graph.argtypes = [ctypes.c_void_p]
    library.fake_cuda_allocated_bytes.restype = ctypes.c_size_t
    library.fake_cuda_drop_work.argtypes = [ctypes.c_int]
    library.fake_cuda_set_capacity.argtypes = [ctypes.c_size_t]
    library.fake_cuda_set_delays.argtypes = [ctypes.c_uint64]
    library.fake_cuda_begin_check.argtypes = [ctypes.c_uint64]
    library.fake_cuda_end_check.restype = ctypes.c_char_p
    library.fake_cuda_at.argtypes = [ctypes.c_char_p]
    library.fake_cuda_name_stream.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.fake_cuda_drain.argtypes = [ctypes.c_void_p]
    library.fake_cuda_access.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    return module, library


@contextmanager
def posing(*, delays: int = 1) -> Iterator[ctypes.CDLL]:
    """Inside, CPU tensors are tensors of cuda:0. ``delays``: the seed of random pauses in streams, 0: none."""
    _, library = load()
    library.fake_cuda_set_delays(delays)
    core.set_posing(True)
    try:
        yield library
    finally:
        clear_cuda_faults()
        gc.collect()  # what still holds device memory goes while tensors pose
        core.set_posing(False)


class Calls:
    """Counts CUDA calls from its making on."""

    def __init__(self) -> None:
        self._before = cuda_calls()

    def since(self) -> dict[str, int]:
        now: dict[str, int] = cuda_calls()
        return {name: now[name] - self._before[name] for name in now if now[name] != self._before[name]}

    def expect_free_running(self, *, may_get_ahead: bool = False) -> None:
        """Fails if anything blocked the host or allocated.

        ``may_get_ahead``: the host may get further ahead of the device than it has been, as it may with operations of
        NCCL. Each that is in flight keeps its events, so more of them are made (and, later, used again).
        """
        allowed = ("event_create",) if may_get_ahead else ()
        forbidden = set(BLOCKING + ALLOCATING) - set(allowed)
        found = {name: count for name, count in self.since().items() if name in forbidden}
        assert not found, f"blocking or allocating CUDA calls: {found}"


_aten = torch.ops.aten
READS = (_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default)  # the last two below autograd


class HostReads(TorchDispatchMode):
    """Inside, notes who asks for the value of a tensor, for which the host would wait: the file and line of each caller."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            caller = sys._getframe(1)
            while "torch/_" in caller.f_code.co_filename:  # what torch wraps around this method
                caller = caller.f_back
            self.callers.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        if any(isinstance(leaf, ShardedGrad) for leaf in tree_leaves((args, kwargs))):
            with self:  # a mode does not see what happens below itself, and placeholders answer there
                return ShardedGrad.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class Graph(TorchDispatchMode):
    """A captured piece of work of the default stream: our calls, and torch's operations on the tensors that pose.

    As with a `torch.cuda.CUDAGraph` capturing changes no tensor that is there already, what is allocated meanwhile
    stays, and a replay does all again in the same memory. RuntimeError where a value is asked for, and at the end with
    what CUDA says of a capture that it ends without a graph. A replay does the work of other streams as late as it may.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library
        self._graph: Any = None
        # Where in the capture, the function, its arguments, what it returned.
        self._operations: list[tuple[int, Any, Any, Any, Any]] = []

    def __enter__(self) -> Graph:
        self._library.fake_cuda_begin_capture()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._graph = self._library.fake_cuda_end_capture()
        if self._graph is None and error[0] is None:
            raise RuntimeError(f"CUDA error: {self._library.fake_cuda_capture_error().decode()}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if any(isinstance(leaf, ShardedGrad) for leaf in tree_leaves((args, kwargs))):
            super().__enter__()  # placeholders answer below the mode, and what they do is captured
            try:
                return ShardedGrad.__torch_dispatch__(func, types, args, kwargs)
            finally:
                super().__exit__(None, None, None)
        written = _written(func, args, kwargs)
        out = func(*args, **kwargs) if written is None else written
        self._operations.append((self._library.fake_cuda_capture_mark(), func, args, kwargs, out))
        return out

    def replay(self) -> None:
        self._library.fake_cuda_begin_replay(self._graph)
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for position, func, args, kwargs, out in self._operations:
                self._library.fake_cuda_replay_to(self._graph, position)
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=False):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        self._library.fake_cuda_end_replay(self._graph)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that changes its arguments returns, without running it; None for one that does not."""
    if not func._schema.is_mutable:
        return None
    places = [
        i for i, one in enumerate(func._schema.arguments) if one.alias_info is not None and one.alias_info.is_write
    ]
    changed = [args[i] if i < len(args) else kwargs[func._schema.arguments[i].name] for i in places]
    if not func._schema.returns:
        return ()
    return changed[0] if len(func._schema.returns) == 1 else tuple(changed)
