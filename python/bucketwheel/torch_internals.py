"""What we need of torch that it keeps to itself, or does not have in every version."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather", "another_connection", "module_behind", "set_default_timeout", "store_of", "timeout_of"]


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


def all_gather(group: Any, everyone: torch.Tensor, mine: torch.Tensor) -> Any:
    """Starts it in a gloo process group, and returns its work. The public names are for groups of torch's registry, and
    those of the group's methods change."""
    return group._allgather_base(everyone, mine)


def set_default_timeout(group: Any, timeout: timedelta) -> None:
    """Of the collectives of a gloo process group. Its public name, `set_timeout`, is newer than the oldest torch."""
    group._set_default_timeout(timeout)


def module_behind(params: Any) -> torch.nn.Module | None:
    """The module whose parameters an iterator yields that has not begun: what ``parameters()`` or ``named_parameters()``
    returned, also inside of `filter` or of a generator expression. None where that cannot be told, as of a list."""
    while params is not None:
        if isinstance(params, filter):
            params = params.__reduce__()[1][1]
            continue
        frame = getattr(params, "gi_frame", None)
        seen = {} if frame is None else frame.f_locals
        if isinstance(seen.get("self"), torch.nn.Module):
            return seen["self"]
        params = seen.get(".0")
    return None
