"""Owners: which engine has a communicator and trains a parameter. One at a time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.utils.weak import WeakTensorKeyDictionary

from bucketwheel.comm.communicator import Communicator
from bucketwheel.layout.flat_params import ParamInfo

__all__ = ["give_back", "take"]

_engine_of_comm: weakref.WeakKeyDictionary[Communicator, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_engine_of_param: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _is_taken(by: weakref.ref[Any] | None) -> bool:
    return by is not None and by() is not None


def take(comms: Sequence[Communicator], infos: Sequence[ParamInfo], engine: Any) -> None:
    """ValueError if a live optimizer has one of the communicators or a parameter.

    Nothing would order the collectives of two optimizers, and each would move the parameters to its own memory.
    """
    for comm in comms:
        if _is_taken(_engine_of_comm.get(comm)):
            raise ValueError(
                f"communicator {comm.name!r} belongs to another optimizer; give each its own, or close() that one"
            )
    for info in infos:
        if _is_taken(_engine_of_param.get(info.param)):
            raise ValueError(f"parameter {info.name!r} is trained by another ShardedAdamW; close() that one first")
    for comm in comms:
        _engine_of_comm[comm] = weakref.ref(engine)
    for info in infos:
        _engine_of_param[info.param] = weakref.ref(engine)


def give_back(comms: Sequence[Communicator], infos: Sequence[ParamInfo]) -> None:
    for comm in comms:
        _engine_of_comm.pop(comm, None)
    for info in infos:
        _engine_of_param.pop(info.param, None)
