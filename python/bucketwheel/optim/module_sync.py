"""sync_module: gives all ranks rank 0's frozen parameters and buffers, as DistributedDataParallel does.

[Note: when buffers are broadcast] Buffers are broadcast before the first forward, and before each forward that follows a
forward with gradients outside of `no_sync`, as in DDP. So ranks that run the same number of training forwards make the same
number of broadcasts, whatever evaluations they run in between, and begin each of these forwards with rank 0's buffers. Rank 0
does not wait for the other ranks and does not synchronize the device, so it may evaluate alone while they wait for it (with
replicas it waits for its shard group). Its broadcast waits for them, at most for the time limit. Forwards of
`copy.deepcopy(model)` do not broadcast."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bucketwheel.comm.backends import LocalRank
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.group_comms import communicators_for
from bucketwheel.comm.replicas import Reducer, reducer_of
from bucketwheel.device import torch_device
from bucketwheel.layout.flat_params import is_plain
from bucketwheel.native import core
from bucketwheel.optim.rank_checks import bytes_of, expect_equal_lines
from bucketwheel.optim.sharded_engine import engine_of
from bucketwheel.residency.absent_param import sharded
from bucketwheel.residency.module_hooks import ModuleHook

_CHUNK_BYTES = 64 * 2**20  # of a broadcast, which has as much memory of its own; or one tensor


def sync_module(
    model: nn.Module,
    buffers: str = "once",
    *,
    process_group: dist.ProcessGroup | Communicator | LocalRank | None = None,
    replicate_group: dist.ProcessGroup | Communicator | None = None,
) -> ModuleSync:
    """Gives all ranks rank 0's frozen parameters and buffers, as ``DistributedDataParallel(model)`` does. Collective.

    Parameters that no `ShardedAdamW` trains yet are synchronized too; `ShardedAdamW` and `shard` have synchronized theirs. Call
    it before or after `shard`, and before or after you make the optimizer. Names in the model's
    ``_ddp_params_and_buffers_to_ignore`` are skipped. Without other ranks the call does nothing. Tensors may have any dtype and
    memory format, and buffers may be persistent or not.

    With ``buffers="forward"`` rank 0's buffers are also broadcast before the first forward of ``model``, and before each
    forward that follows a forward with gradients outside of `no_sync`. All ranks must run the same number of training
    forwards. Rank 0 may evaluate alone, for less than the time limit. Forwards of ``copy.deepcopy(model)`` do not broadcast.

    Args:
        model: The model. Its parameters and buffers have the same names, shapes and dtypes on all ranks.
        buffers: ``"once"`` synchronizes buffers now. ``"forward"`` synchronizes them now and in forwards, by a hook, which is
            DDP's default; use it for buffers that forwards write, such as statistics of BatchNorm. ``"none"`` synchronizes
            parameters only.
        process_group: The ranks, as ``process_group`` of `ShardedAdamW`. If the ranks are threads of a `LocalWorld`, pass
            their `Communicator`. `sync_module` makes communicators of its own over these ranks.
        replicate_group: As ``replicate_group`` of `ShardedAdamW`. With replicas, rank 0 is the first rank of all groups.

    Returns:
        An object whose `ModuleSync.close` ends the broadcasts in forwards.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``buffers`` is wrong, or a parameter or buffer has no plain memory (a meta or sparse tensor, a tensor
            subclass) or overlaps itself (``expand``). Nothing has been written.
        RuntimeError: Ranks have different parameters or buffers. Raised on all ranks; nothing has been written."""
    return ModuleSync(model, buffers, process_group, replicate_group)


class ModuleSync(contextlib.AbstractContextManager["ModuleSync"]):
    """The result of `sync_module`. `close`, or the end of a ``with`` block, ends the broadcasts in forwards."""

    def __init__(self, model: nn.Module, buffers: str, process_group: Any = None, replicate_group: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"sync_module: model is a {type(model).__name__}, expected a torch.nn.Module")
        if buffers not in ("once", "forward", "none"):
            raise ValueError(f"sync_module: buffers must be 'once', 'forward' or 'none', got {buffers!r}")
        self._model = weakref.ref(model)  # the model has the hook, which has this
        self._is_due = True  # [Note: when buffers are broadcast]
        self._hook: Any = None
        self._reducer: Reducer | None = None
        self._comms = _own_communicators(model, process_group, replicate_group)
        if not self._comms:
            return
        try:
            self._reducer = reducer_of(self._comms[0], self._comms[1] if len(self._comms) > 1 else None)
            untrained = [(name, param) for name, param in _params_of(model) if not (engine_of(param) or sharded(param))]
            held = [*untrained, *(_buffers_of(model) if buffers != "none" else ())]
            _expect_equal(self._reducer, held)
            tensors = [tensor for _, tensor in held]
            self._broadcast(tensors, is_first=True)
            torch.autograd.graph.increment_version(tensors)
        except BaseException:
            self.close()
            raise
        if buffers == "forward":  # before all other hooks: they may read buffers
            self._hook = model.register_forward_pre_hook(_BeforeForward(self.before_forward), prepend=True)
        else:
            self.close()

    def before_forward(self, module: nn.Module) -> None:
        """Broadcasts rank 0's buffers if this forward needs them. Collective. The hook of the model calls it."""
        if self._reducer is None or module is not self._model():  # a copy of the model has the hook too
            return
        if self._is_due:  # DDP raises no versions here either: backward of a forward before may need the buffer
            with core.PublicCall(self._reducer._natives, "forward of a model with sync_module"):
                self._broadcast([buffer for _, buffer in _buffers_of(module)])
        self._is_due = torch.is_grad_enabled() and not _is_accumulating(module)

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor], *, is_first: bool = False) -> None:
        """Without telling autograd. The first time there is a lot, and the host waits, so that it has memory once."""
        assert self._reducer is not None
        device = torch_device(self._reducer.device)
        for chunk in _chunks(tensors):
            if self._reducer.rank == 0:
                packed = torch.cat([bytes_of(tensor).to(device) for tensor in chunk])
            else:
                packed = torch.empty(sum(tensor.nbytes for tensor in chunk), dtype=torch.uint8, device=device)
            handle = self._reducer.broadcast(packed)
            if is_first:
                handle.synchronize()
            if self._reducer.rank == 0:
                continue  # the operation owns what it reads
            handle.wait()
            pieces = packed.split([tensor.nbytes for tensor in chunk])
            values = [piece.view(one.dtype).view(one.shape) for piece, one in zip(pieces, chunk, strict=True)]
            torch._foreach_copy_([tensor.data for tensor in chunk], values)

    def close(self) -> None:
        """Removes the hook from the model and closes the communicators. All ranks call it, at any time.

        Further calls do nothing."""
        if self._hook is not None:
            self._hook.remove()
        if self._reducer is not None:
            self._reducer._release()
        self._reducer = None
        with contextlib.ExitStack() as stack:
            for comm in self._comms:
                stack.callback(comm.close)

    def __exit__(self, *_: object) -> None:
        self.close()


class _BeforeForward(ModuleHook):
    """``run`` is called before forwards with the module. Never compiled: it breaks the graph, on all ranks alike."""

    def __init__(self, run: Callable[[nn.Module], None] | None = None) -> None:
        why = "sync_module broadcasts buffers here; with fullgraph=True call it on the result of torch.compile(model)"
        self._run = None if run is None else torch.compiler.disable(run, reason=why)

    def __call__(self, module: nn.Module, _: object) -> None:
        if self._run is not None:
            self._run(module)


def _own_communicators(model: nn.Module, process_group: Any, replicate_group: Any) -> list[Communicator]:
    """As the optimizer makes them; those that are given are split, for their operations may be in any order with ours."""
    devices = [tensor.device for _, tensor in [*_params_of(model), *_buffers_of(model)]]
    device = next((one for one in devices if one.type == "cuda"), torch.device("cpu"))
    found: list[Communicator] = []
    with contextlib.ExitStack() as stack:
        for comm in communicators_for(process_group, replicate_group, device, None, "sync_module"):
            is_given = comm in (process_group, replicate_group)
            own = comm if comm is None or not is_given else comm.gathers.split(0, comm.rank, name="sync_module")
            if own is not None:
                stack.callback(own.close, 0.0)
                found.append(own)
        stack.pop_all()
    return found


def _params_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the parameters that DDP would make equal on all ranks, by name."""
    return _not_ignored(model, model.named_parameters())


def _buffers_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the buffers that DDP would make equal on all ranks, persistent or not, by name."""
    return _not_ignored(model, model.named_buffers())


def _not_ignored(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return [(name, tensor) for name, tensor in tensors if name not in ignored]


def _is_accumulating(model: nn.Module) -> bool:
    """Whether the optimizer that trains the model is inside of `no_sync`."""
    engine = next(filter(None, (engine_of(param) for param in model.parameters() if param.requires_grad)), None)
    return engine is not None and engine.grads.is_in_no_sync


def _expect_equal(reducer: Reducer, held: Sequence[tuple[str, Tensor]]) -> None:
    """RuntimeError on all ranks unless they have the same parameters and buffers, ValueError for one that cannot be written."""
    lines = [
        f"{name!r}: {tuple(one.shape)}, {one.dtype}, {one.layout} {type(one.data).__name__} on {one.device.type}{_overlap(one)}"
        for name, one in held
    ]
    expect_equal_lines(reducer, lines)
    for (_, tensor), line in zip(held, lines, strict=True):
        if not is_plain(tensor):
            raise ValueError(f"sync_module: {line} has no plain memory, so rank 0 cannot broadcast to it")
        if _overlap(tensor):
            raise ValueError(f"sync_module: {line} cannot be written to; replace it by a copy, x.clone()")


def _overlap(tensor: Tensor) -> str:
    """Of a tensor that was expanded: torch copies nothing into it."""
    if tensor.layout != torch.strided or not tensor.numel():
        return ""
    is_expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return ", whose elements overlap in memory" if is_expanded else ""


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In the same order on all ranks, and so that each is aligned in what is packed: the widest elements first."""
    chunk: list[Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda one: -one.element_size()):
        if size and size + tensor.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if size:
        yield chunk
