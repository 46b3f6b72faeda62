"""Public calls: ranks tell each other by their public names which call they are in ([Note: who is missing],
csrc/comm/public_call.h)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["PublicCall", "name_methods"]

_Type = TypeVar("_Type", bound=type)


class PublicCall:
    """``with PublicCall(owner, "bw.checkpoint.save"):`` names the call to the ranks of all communicators of ``owner``, its
    ``_natives``. Of nested ones the outermost counts. Not a generator: `ShardedAdamW.step` has one."""

    __slots__ = ("_name", "_natives")

    def __init__(self, owner: Any, name: str) -> None:
        self._natives: tuple[Any, ...] = owner._natives
        self._name = name

    def __enter__(self) -> None:
        for native in self._natives:
            native.note_call(self._name)

    def __exit__(self, *_: object) -> None:
        for native in self._natives:
            native.note_call(None)


def name_methods(prefix: str, *names: str) -> Callable[[_Type], _Type]:
    """A decorator of classes: the methods ``names`` are public calls of the object."""

    def named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with PublicCall(self, name):
                return method(self, *args, **kwargs)

        return call

    def decorate(cls: _Type) -> _Type:
        for name in names:
            setattr(cls, name, named(getattr(cls, name), prefix + name))
        return cls

    return decorate
