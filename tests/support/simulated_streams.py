"""torch's CUDA streams on the simulated device: any can be the current one, and torch's operations are in it too.

An operation that writes in place is work of the current stream: its thread does it, after what is in the stream
already, and late if the stream is held up. One that makes a tensor waits for its own stream first, and for no other. So
whatever does not wait for the stream that it has to be behind finds other values.

>>> with posing(), streams_are_simulated():
...     with torchs_streams():     # in each thread
...         with on(SideStream("side")) as side:
...             loss.backward()
...         current().wait_stream(side)
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketwheel import device
from bucketwheel.comm import handle
from bucketwheel.gathers import gathers, pending_param
from bucketwheel.grads import bucket, launch
from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.native import core
from tests.support.simulated_cuda import load

_thread = threading.local()  # `current`: its SideStream; `made`: all that it has made
_tokens = itertools.count(1)
_works: dict[int, Callable[[], object]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _work(token: int) -> None:
    _works.pop(token)()


class SideStream:
    """`torch.cuda.Stream`, as far as bucketwheel and those who use it need one. ``hold_s``: before each of torch's
    operations in place."""

    device = torch.device("cpu")

    def __init__(self, name: str, hold_s: float = 0.0) -> None:
        self.hold_s = hold_s
        self.native = core.Stream(name, 0)
        self.cuda_stream = self.native.cuda_stream
        _thread.made.append(self)

    def wait_stream(self, other: SideStream) -> None:
        self.native.wait(other.native.record())

    def synchronize(self) -> None:
        assert self.native.synchronize(30.0), "the stream has been busy for 30 s"

    def run(self, work: Callable[[], object]) -> None:
        self.native.pause(self.hold_s)
        token = next(_tokens)
        _works[token] = work
        load()[1].fake_cuda_launch_host(ctypes.c_void_p(self.cuda_stream), _work, ctypes.c_void_p(token))


@contextlib.contextmanager
def streams_are_simulated() -> Iterator[None]:
    """Inside, bucketwheel takes the current `SideStream` of a thread for torch's current stream."""
    with contextlib.ExitStack() as patches:
        for module in (bucket, device, gathers, launch, pending_param):
            patches.enter_context(mock.patch.object(module, "stream_of", lambda device: _thread.current))
        unwrapped = lambda stream: getattr(stream, "native", stream)  # noqa: E731
        patches.enter_context(mock.patch.object(handle, "native_stream", unwrapped))
        yield


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
def torchs_streams() -> Iterator[Operations]:
    """Inside, torch's operations of this thread are in its current stream. All its streams are idle afterwards."""
    _thread.made, _thread.current = [], None
    _set_current(SideStream("main"))
    try:
        with Operations() as operations:
            yield operations
    finally:
        for stream in _thread.made:  # its end would wait, with the GIL, for work that needs it
            stream.synchronize()
        _set_current(None)


class Operations(TorchDispatchMode):
    """Puts torch's operations into the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred = 0  # how many were left to a stream's thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, ShardedGrad) for leaf in tree_leaves((args, kwargs))):
            with self:  # a mode does not see what happens below itself, and placeholders answer there
                return ShardedGrad.__torch_dispatch__(func, types, args, kwargs)
        aliases = [one.alias_info for one in func._schema.arguments if one.alias_info is not None]
        if aliases and not any(alias.is_write for alias in aliases):
            return func(*args, **kwargs)  # a view
        if len(aliases) == 1 and func._schema.returns:  # in place
            self.deferred += 1
            _thread.current.run(lambda: _below_autograd(func, args, kwargs))
            return args[0]
        _thread.current.synchronize()
        return func(*args, **kwargs)


def _below_autograd(func: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        func(*args, **kwargs)
