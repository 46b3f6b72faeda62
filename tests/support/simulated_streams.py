"""torch's CUDA streams on the simulated device, checked: any can be the current one, and torch's operations are in it too.

In a check nothing is in order but by streams, events and what the host waits for ([Note: checked streams],
tests/native/fake_cuda/queues.h). One of torch's operations is done at the call, after what is in its stream already, and
the stream is told which bytes it reads and writes. The host does not learn by this that it is done.

>>> with posing(), streams_are_simulated(), checked(seed=1) as races:
...     with torchs_streams():     # in each thread
...         with on(SideStream("side")) as side:
...             loss.backward()
...         current().wait_stream(side)
>>> races  # one line for each pair of places that nothing orders
[]
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketwheel import device, torch_internals
from bucketwheel.comm import handle
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.native import core
from bucketwheel.pool import pool
from bucketwheel.residency import absent_param, gathers
from tests.support.simulated_cuda import READS, load

_PACKAGE = os.path.dirname(device.__file__)
_thread = threading.local()  # `current`: its SideStream; `made`: all that it has made


@contextlib.contextmanager
def checked(seed: int) -> Iterator[list[str]]:
    """Inside, streams are queues in the random order of ``seed``; afterwards the list holds what was not in order."""
    _, library = load()
    races: list[str] = []
    library.fake_cuda_begin_check(seed)
    try:
        yield races
    finally:
        races += library.fake_cuda_end_check().decode().splitlines()


def _note(frame: Any, event: str, called: Any) -> None:
    """Of `sys.setprofile`: the function of bucketwheel that this thread enters, or where it calls the native module."""
    if event == "call":
        if frame.f_code.co_filename.startswith(_PACKAGE):
            _place(frame)
    elif event == "c_call" and getattr(called, "__module__", None) == core.__name__:
        _place(frame)


def _place(frame: Any) -> None:
    """Tells the check the place in the code: the innermost one that is not torch's."""
    while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    _keeping_the_gil().fake_cuda_at(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}".encode())


@functools.cache
def _keeping_the_gil() -> ctypes.PyDLL:
    return ctypes.PyDLL(load()[1]._name)


class SideStream:
    """`torch.cuda.Stream`, as far as bucketwheel and those who use it need one. In a check."""

    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        self.native = core.Stream(name, 0)
        self.cuda_stream = self.native.cuda_stream
        load()[1].fake_cuda_name_stream(self.cuda_stream, name.encode())
        _thread.made.append(self)

    def wait_stream(self, other: SideStream) -> None:
        self.native.wait(other.native.record())

    def synchronize(self) -> None:
        self.native.synchronize()


@contextlib.contextmanager
def streams_are_simulated() -> Iterator[None]:
    """Inside, bucketwheel takes the current `SideStream` of a thread for torch's current stream."""
    torch_internals.keep_out_of_graphs()  # once: it is slow where every call is noted, and ranks would all do it
    with contextlib.ExitStack() as patches:
        for module in (device, gathers, absent_param):
            patches.enter_context(mock.patch.object(module, "stream_of", lambda device: _thread.current))
        unwrapped = lambda stream: getattr(stream, "native", stream)  # noqa: E731
        for module in (handle, absent_param):
            patches.enter_context(mock.patch.object(module, "native_stream", unwrapped))
        patches.enter_context(mock.patch.object(pool, "_zeros", _zeros))
        yield


def _zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    slab = torch.zeros(nbytes, dtype=torch.uint8)
    current().synchronize()
    return slab


def current() -> SideStream:
    stream: SideStream = _thread.current
    return stream


@contextlib.contextmanager
def on(stream: SideStream) -> Iterator[SideStream]:
    """As ``with torch.cuda.stream(stream)``."""
    before = _thread.current
    _set_current(stream)
    try:
        yield stream
    finally:
        _set_current(before)


def _set_current(stream: SideStream | None) -> None:
    _thread.current = stream
    core.set_posed_stream(0 if stream is None else stream.cuda_stream)


@contextlib.contextmanager
def torchs_streams(name: str = "main") -> Iterator[Operations]:
    """Inside, torch's operations of this thread are in its current stream. All its streams are idle afterwards."""
    _thread.made, _thread.current = [], None
    _set_current(SideStream(name))
    sys.setprofile(_note)
    try:
        with Operations() as operations:
            yield operations
    finally:
        sys.setprofile(None)
        for stream in _thread.made:
            stream.synchronize()
        _set_current(None)


class Operations(TorchDispatchMode):
    """Puts torch's operations into the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self._library = load()[1]
        # What they have made, so that no address comes twice: whom torch gives memory to next is not ours to check.
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, ShardedGrad) for leaf in tree_leaves((args, kwargs))):
            with self:  # a mode does not see what happens below itself, and placeholders answer there
                return ShardedGrad.__torch_dispatch__(func, types, args, kwargs)
        aliases = [one.alias_info for one in func._schema.arguments if one.alias_info is not None]
        if aliases and not any(alias.is_write for alias in aliases):
            return func(*args, **kwargs)  # a view
        if func in READS:
            current().synchronize()
        self._library.fake_cuda_drain(current().cuda_stream)
        out = func(*args, **kwargs)
        _place(sys._getframe(1))
        given, written = _tensors((args, kwargs)), []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None:  # written, as above
                written += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
        storages = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = [one for one in _tensors(out) if one.untyped_storage().data_ptr() not in storages]
        self.made += made
        for tensor in given:
            self._access(func, tensor, writes=any(tensor is one for one in written))
        for tensor in made if not str(func).startswith("aten.empty") else ():
            self._access(func, tensor, writes=True)
        return out

    def _access(self, func: Any, tensor: torch.Tensor, *, writes: bool) -> None:
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
        self._library.fake_cuda_access(current().cuda_stream, tensor.data_ptr(), nbytes, writes, str(func).encode())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
