"""What we need of torch that it keeps to itself, or does not have in every version."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

# [Note: on the host] All of the package works on the host: `torch.compile` calls it between two graphs, and does not look
# inside, where it would meet native objects and parameters that change their class. But these hooks are called by what
# others compile, and decide by themselves:
_TRACED = {"residency/module_hooks.py", "optim/foreign_steps.py"}

# Without the public function's look at its argument: 0.15 us of every call.
increment_version: Callable[[list[torch.Tensor]], None] = getattr(
    torch._C, "_increment_version", torch.autograd.graph.increment_version
)


def store_of(group: dist.ProcessGroup | None) -> dist.Store:
    """The Store of a process group; None: of the default one. torch has no public name for it."""
    whole: Any = group if group is not None else dist.group.WORLD
    return dist.distributed_c10d._get_process_group_store(whole)


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float | None:
    """Seconds that the collectives of a process group (None: the default one) wait: of its backend for ``device`` if it has
    one, else of another. None where the backend does not tell. `init_process_group` and `new_group` set it; torch has no
    public name that reads it."""
    whole: Any = group if group is not None else dist.group.WORLD
    with contextlib.suppress(AttributeError, RuntimeError):
        devices = whole._device_types
        kind = torch.device(device.type)
        return float(whole._get_backend(kind if kind in devices else devices[0]).options._timeout.total_seconds())
    return None


def another_connection(store: Any) -> dist.Store:
    """To the same Store, where it can have several: nobody's long wait holds up the other. Not every Store is cloned."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return store.clone()
    return store


def after_backward(callback: Callable[[], None]) -> None:
    """Calls it at the end of the backward that has called the caller, behind what others queue in it, such as
    `DistributedDataParallel`, which writes to ``p.grad``; in the streams in which ``backward()`` was called."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def before_join(check: Callable[[Sequence[Any]], None]) -> None:
    """From now on, in the whole process, ``check`` gets what torch's Join is given, where it is entered and enabled. torch tells
    only the things that it is given."""
    enter = Join.__enter__

    def check_and_enter(join: Any) -> Any:
        if getattr(join, "_enable", True):
            check(getattr(join, "_joinables", ()))
        return enter(join)

    Join.__enter__ = check_and_enter  # type: ignore[method-assign]


def override_stale_capture_stream() -> None:
    """From now on autograd, in the whole process, uses the capturing stream where a CUDA graph capture meets a node of another
    stream. A warning where torch is too old."""
    if hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
        torch.autograd.graph.set_override_stale_capture_stream(True)
        return
    warnings.warn(
        f"capturable=True: torch {torch.__version__} has no torch.autograd.graph.set_override_stale_capture_stream. A "
        "capture of backward fails if a node of its graph (also a kept AccumulateGrad) was made in the "
        "default stream: run the eager steps before the capture in a side stream",
        stacklevel=3,
    )


def all_gather(group: Any, everyone: torch.Tensor, mine: torch.Tensor) -> Any:
    """Starts it in a gloo process group, and returns its work. The public names are for groups of torch's registry, and
    those of the group's methods change."""
    return group._allgather_base(everyone, mine)


def set_default_timeout(group: Any, timeout: timedelta) -> None:
    """Of the collectives of a gloo process group. Its public name, `set_timeout`, is newer than the oldest torch."""
    group._set_default_timeout(timeout)


def storage_info(path: str, offset: int, length: int) -> Any:
    """Where stock's FileSystemReader finds an item of a checkpoint: part of its format."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # importing it takes a second

    return _StorageInfo(path, offset, length)


def storage_users(tensor: torch.Tensor) -> int:
    """How many hold the storage of a tensor: itself, views of it, other tensors made of it; and as many as it takes to ask."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def call_of_torch(function: str) -> Any:
    """The variables of a function of `torch.distributed.checkpoint` where it has called the caller; None where it has not.
    torch tells an optimizer and a tensor nothing of what it was asked for."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return None


# Modules of torch whose loading copies tensors by their names and does nothing else, if names and shapes fit.
_COPYING = {f"torch.nn.modules.{name}" for name in ("module", "batchnorm", "instancenorm")}
_COPYING.add("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")


def loads_its_own_way(model: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` of a model may do more than copy tensors by their names: it is the model's own, or a module
    of it has a loading or hooks of its own. torch has no public names for these."""
    calls: list[Any] = [model.load_state_dict]
    for module in model.modules():
        # Each hook has a number of its own.
        hooks = {**module._load_state_dict_pre_hooks, **module._load_state_dict_post_hooks}
        calls += [module._load_from_state_dict, *hooks.values()]
    return not all(getattr(call, "__module__", None) in _COPYING for call in calls)


def fsdp2_groups(module: Any) -> list[Any]:
    """The parameter groups of an `FSDPModule`: what it gathers together, each with its ``device``, ``_all_gather_comm`` and
    ``_reduce_scatter_comm``, which torch sets by public names and does not show. None where its children hold all parameters.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.10


def keep_out_of_graphs() -> None:
    """[Note: on the host] From now on; under ``fullgraph=True`` torch refuses the function by its name. Does nothing before
    torch has loaded its compiler, which takes a second, and an optimizer does.

    `torch.compiler.disable` is public, and costs a microsecond at each call of each function.
    """
    if "torch._dynamo" in sys.modules:
        _keep_out_of_graphs()


@functools.cache
def _keep_out_of_graphs() -> None:
    package = Path(__file__).parent
    for path in package.rglob("*.py"):
        name = path.relative_to(package)
        if name.as_posix() not in _TRACED and not name.stem.startswith("_"):
            torch._dynamo.trace_rules.add(".".join([package.name, *name.with_suffix("").parts]))
