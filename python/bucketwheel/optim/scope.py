"""Scope: what has memory in common with other ranks belongs to one place in the code, whose end closes it."""

from __future__ import annotations

import contextlib
from typing import NoReturn, TypeVar

__all__ = ["Scope"]

_Scope = TypeVar("_Scope", bound="Scope")


class Scope:
    """Closed by a ``with`` statement, and neither copied nor pickled."""

    def close(self) -> None:
        """Gives back what it has."""
        raise AssertionError(f"{type(self).__name__} does not say how it is closed")

    def _abort(self, reason: str) -> None:
        """Fails what the ranks have in common, on all of them. Never blocks."""
        raise AssertionError(f"{type(self).__name__} does not say how it is aborted")

    def __enter__(self: _Scope) -> _Scope:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """`close`. With an exception on its way the other ranks may never come to that, so they are told, and what it says
        is not hidden."""
        if kind is None:
            self.close()
            return
        self._abort(f"{kind.__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # of the communicator, or of gradients that were left half done
            self.close()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied: its memory is shared with other ranks. Use state_dict()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its memory is shared with other ranks. Save state_dict()"
        )
