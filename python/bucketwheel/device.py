"""Devices: which one a tensor is on, torch's streams as native ones, and what to do when a GPU has no memory left.

In native code a device is a number: the index of a CUDA device, -1 for the CPU.
"""

from __future__ import annotations

import array
import ctypes
import gc
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.errors import Error
from bucketwheel.native import core, modules

CPU = -1

_guard = threading.Lock()
# Whatever caches device memory and can give it back: has `trim() -> int` (bytes) and `device`.
_caches: weakref.WeakSet[Any] = weakref.WeakSet()


def index_of(tensor: Tensor) -> int:
    """The native number of the tensor's device. Loads (at the first CUDA tensor: builds) the CUDA module."""
    if tensor.is_cpu:
        return 0 if core.is_posing() else CPU
    if not tensor.is_cuda:
        raise ValueError(f"a tensor on {tensor.device}: cpu and cuda are supported")
    _load_cuda()
    return int(tensor.device.index)


def device_named(device: torch.device | str | int) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}, expected a torch.device, its name, or an index") from None


def device_index(device: torch.device | str | int | None) -> int:
    """The native number of a device named as torch names it; None is the CPU, ``"cuda"`` the current device."""
    if device is None:
        return CPU
    named = device_named(device)
    if named.type == "cpu":
        return 0 if core.is_posing() else CPU
    if named.type != "cuda":
        raise ValueError(f"device {str(named)!r}: cpu and cuda are supported")
    if core.is_posing():
        return 0
    _load_cuda()
    return torch.cuda.current_device() if named.index is None else named.index


def torch_device(index: int) -> torch.device:
    """The other way round."""
    return torch.device("cpu") if index == CPU or core.is_posing() else torch.device("cuda", index)


def _load_cuda() -> None:
    """Raises `BuildError` where the CUDA module is missing and cannot be built."""
    if not core.has_cuda():
        with _guard:
            if not core.has_cuda():
                install(modules.cuda().api)


def install(api: Any) -> None:
    """Makes ``api`` the table of CUDA calls."""
    core.install_cuda(api)
    core.set_cuda_reclaim(reclaim_memory)


def native_stream(stream: Any) -> Any:
    """A `torch.cuda.Stream` as a native stream; native ones and None as they are."""
    if isinstance(stream, torch.cuda.Stream):
        _load_cuda()
        return core.borrow_stream(stream.cuda_stream, stream.device.index)
    return stream


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """torch's current stream of a CUDA device; None elsewhere, where the calling thread is the only one."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def buffer_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU as bytes, writable; valid while the tensor lives. Unlike
    ``Tensor.numpy()`` it needs no numpy, which torch does not require."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def upload(to: Tensor, values: bytes) -> None:
    """Writes ``values`` into the contiguous tensor ``to``, in the current stream; never blocks."""
    core.upload(to, values)


class Uploads:
    """Small tensors on a CUDA device that say what the host knows; uploaded when they change, never waited for."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._known: dict[str, tuple[bytes, Tensor]] = {}
        self._captured: list[Tensor] = []

    def get(self, name: str, dtype: torch.dtype, values: bytes) -> Tensor:
        """``values`` as a tensor [n]; the one of the last call for ``name`` if they are the same."""
        is_captured = core.is_capturing(self._index)
        found = self._known.get(name)
        if found is None or found[0] != values:
            tensor = torch.empty(len(values) // dtype.itemsize, dtype=dtype, device=torch_device(self._index))
            upload(tensor, values)
            found = (values, tensor)
            if not is_captured:  # then it is written by replays
                self._known[name] = found
        if is_captured:
            self._captured.append(found[1])  # replays need it as long as the graph lives
        return found[1]

    def mask(self, name: str, count: int, indices: Iterable[int]) -> Tensor:
        """uint8 [count]: 1 at ``indices``."""
        flags = bytearray(count)
        for index in indices:
            flags[index] = 1
        return self.get(name, torch.uint8, bytes(flags))

    def numbers(self, name: str, values: Sequence[int]) -> Tensor:
        """int64 [n]."""
        return self.get(name, torch.int64, array.array("q", values).tobytes())


def keep_as_cache(cache: Any) -> None:
    """``cache.trim()`` will be called when its device has no memory left."""
    with _guard:
        _caches.add(cache)


def reclaim_memory(index: int) -> str:
    """Gives back the memory that caches hold on a CUDA device, ours and torch's; says how much, for messages.

    A cache that fails to is named in the text: the caller is about to report that there is no memory.
    """
    gc.collect()
    with _guard:
        caches = list(_caches)
    given, failures = 0, ""
    for cache in caches:
        if cache.device == index:
            try:
                given += cache.trim()
            except Error as error:
                failures += f" (one pool failed: {error})"
    ours = f"pools gave back {given} bytes{failures}"
    if core.is_posing():
        return ours
    before = torch.cuda.memory_reserved(index)
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved(index)
    return (
        f"{ours} and torch {before - after}; torch holds {after} bytes, "
        f"{torch.cuda.memory_allocated(index)} of them in tensors"
    )
