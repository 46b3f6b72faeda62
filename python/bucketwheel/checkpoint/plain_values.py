"""Plain values: what a checkpoint holds beside the tensors of models and optimizers, as ``torch.load(weights_only=True)`` takes
it. Scalars of numpy become Python's numbers, without numpy."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from io import BytesIO, RawIOBase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.layout.flat_params import is_plain
from bucketwheel.native import core


def _mapped(leaf_of: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``leaf_of`` of each value in dicts, lists and tuples, and of each key."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((_mapped(leaf_of, key), _mapped(leaf_of, inner)) for key, inner in value.items())
    return kind(_mapped(leaf_of, inner) for inner in value) if kind in (list, tuple) else leaf_of(value)


def as_plain(value: Any) -> Any:
    """``value`` with Python's numbers for scalars of numpy, in dicts, lists and tuples."""
    return _mapped(_number, value)


def _number(value: Any) -> Any:
    is_scalar = hasattr(value, "dtype") and getattr(value, "ndim", None) == 0 and not isinstance(value, Tensor)
    return value.item() if is_scalar else value


def expect_loadable(key: str, value: Any) -> None:
    """TypeError that names what a load of ``value`` would refuse."""
    if not _loads(value):
        path, found = _first_refused(key, value)
        kind = f"{type(found).__module__}.{type(found).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{path} is of type {kind}, which torch.load(weights_only=True) refuses: give tensors, numbers, strings and bytes in "
            "lists, tuples and dicts. Convert an array with torch.from_numpy(x), a path with str(x), an object with "
            "vars(x) or x.state_dict()"
        )


def pickled(value: Any) -> BytesIO:
    """As torch.save writes `as_plain`."""
    content = BytesIO()
    torch.save(as_plain(value), content)
    return content


def _loads(value: Any) -> bool:
    """Whether it would be loaded again. Copies no data of tensors."""
    content = BytesIO()
    try:
        torch.save(_mapped(_without_data, value), content)
        content.seek(0)
        torch.load(content, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 (objects raise anything when they are pickled)
        return False
    return True


def _without_data(value: Any) -> Any:
    is_tensor = type(value) in (Tensor, Parameter) and is_plain(value) and not vars(value)
    return None if is_tensor else _number(value)


def _first_refused(path: str, value: Any) -> tuple[str, Any]:
    children = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    for key, inner in children.items() if isinstance(children, Mapping) else ():
        if not _loads(inner):
            return _first_refused(f"{path}[{key!r}]", inner)
    return path, value


class _Sum(RawIOBase):
    """A file that keeps the checksum of what is written to it."""

    crc = 0

    def write(self, data: Any) -> int:
        self.crc = core.crc32c(data, self.crc)
        return len(data)


def _digested(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return _number(value)
    file = _Sum()
    torch.save(value.detach().to("cpu"), file)  # type: ignore[arg-type]
    return file.crc


def digest_of(value: Any) -> str:
    """Of a value that `expect_loadable` takes, so that ranks can compare it. Takes no memory of its size."""
    file = _Sum()
    pickler = pickle.Pickler(file, 4)
    pickler.fast = True  # no references to equal objects, which ranks may have once or twice
    pickler.dump(_mapped(_digested, value))
    return f"{file.crc:08x}"


def is_kept_by_entries(value: Any) -> bool:
    """Whether the entries that torch.distributed.checkpoint makes of dicts and lists, one for each leaf, say what it was. They do
    not of empty dicts, of other mappings and of keys that are no strings."""
    if isinstance(value, Mapping):
        is_plain_dict = type(value) is dict and bool(value) and all(type(key) is str for key in value)
        return is_plain_dict and all(map(is_kept_by_entries, value.values()))
    return not isinstance(value, list) or all(map(is_kept_by_entries, value))
