"""Checkpoints: states that are saved anywhere and loaded anywhere.

Uses `layout` and below; it gets an optimizer as an argument and never imports one. Start with `boxes.py`, pure: what a rank
owns of a parameter, as boxes of its shape; `tensor_shard.py` is what `optimizer.state_dict()` holds. What needs
`torch.distributed.checkpoint`, whose import takes a second, is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bucketwheel.checkpoint.tensor_shard import TensorShard

if TYPE_CHECKING:  # what `_LATER` has, with its types
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


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return __all__
