"""Checkpoints that any number of ranks saves and any number of ranks loads, and snapshots in host memory.

Uses `comm`, `layout` and below. An optimizer is passed as an argument and never imported. Start with `boxes.py`, pure code: the
elements of a parameter that a rank owns, as boxes of the parameter's shape. `tensor_shard.py` is the tensor in
`optimizer.state_dict()`. Code that needs `torch.distributed.checkpoint`, whose import takes a second, is imported on first
use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bucketwheel.checkpoint.tensor_shard import TensorShard

if TYPE_CHECKING:
    from bucketwheel.checkpoint.loading import load
    from bucketwheel.checkpoint.reader import Reader
    from bucketwheel.checkpoint.safetensors_export import save_safetensors
    from bucketwheel.checkpoint.saving import async_save, save
    from bucketwheel.checkpoint.writer import Writer

__all__ = ["Reader", "TensorShard", "Writer", "async_save", "load", "save", "save_safetensors"]

# What is imported when it is asked for, and from where.
_LATER: dict[str, str] = {
    "Reader": "reader",
    "Writer": "writer",
    "async_save": "saving",
    "load": "loading",
    "save": "saving",
    "save_safetensors": "safetensors_export",
}


def __dir__() -> list[str]:
    return sorted(__all__)


# Hidden from type checkers, which would take every unknown name for Any.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
