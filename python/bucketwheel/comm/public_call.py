"""Public calls: methods whose names the ranks tell each other. [Note: who is missing], csrc/comm/public_call.h."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from bucketwheel.native import core

_Type = TypeVar("_Type", bound=type)


def name_methods(prefix: str, *names: str) -> Callable[[_Type], _Type]:
    """A decorator of classes: the methods ``names`` are public calls of the object, to the ranks of its ``_natives``."""

    def named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with core.PublicCall(self._natives, name):
                return method(self, *args, **kwargs)

        return call

    def decorate(cls: _Type) -> _Type:
        for name in names:
            setattr(cls, name, named(getattr(cls, name), prefix + name))
        return cls

    return decorate
