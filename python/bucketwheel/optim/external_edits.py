"""External edits: what others have done to parameters since the optimizer's last step.

They may have written to one (a loaded model, a moving average, clamping), which its version counter shows, or given it
other memory (`model.to()`, ``p.data = x``), which its address shows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn import Parameter

from bucketwheel.layout.flat_params import ParamInfo

__all__ = ["Edits", "ExternalEdits"]

_UNKNOWN = -1  # no version of a tensor


@dataclass(frozen=True)
class Edits:
    """Parameters by index. ``moved``: have other memory. ``followed``: their master weights follow what they are now.
    ``refused``: the first that ``on_external_update="error"`` refuses, or -1."""

    moved: frozenset[int]
    followed: frozenset[int]
    refused: int


_NONE = Edits(frozenset(), frozenset(), -1)


class ExternalEdits:
    """``policy``: the option ``on_external_update``, "resync", "error" or "ignore"."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._params: list[Parameter] = []
        # Versions after our last write. Unknown from the loading of a state to the next step: the model may be loaded later,
        # and that is no edit.
        self._versions: list[int] = []
        self._raised_by_one = b""  # flags: what a step has used that raised versions by just that
        self._pointers: list[int] = []  # where the parameters were when the optimizer took them, or bound them again

    def add(self, infos: Sequence[ParamInfo]) -> None:
        """These are watched too, as they are now."""
        params = [info.param for info in infos]
        self._params += params
        self._versions += [param._version for param in params]
        self._pointers += [param.data_ptr() for param in params]

    def find(self) -> Edits:
        versions = [param._version for param in self._params]
        pointers = [param.data_ptr() for param in self._params]
        if versions == self._versions and pointers == self._pointers:
            return _NONE
        moved = frozenset(i for i, pointer in enumerate(pointers) if pointer != self._pointers[i])
        written = [i for i, version in enumerate(versions) if version != self._versions[i]]
        unknown = [i for i in written if self._versions[i] == _UNKNOWN]
        refused = -1
        if self._policy == "error":
            refused = min({*moved, *written} - ({*unknown} - moved), default=-1)
        followed = unknown if self._policy == "ignore" else [*written, *moved]
        return Edits(moved, frozenset(followed), refused)

    def note_written(self) -> None:
        """The optimizer has written to its parameters, or has taken what others wrote."""
        self._versions = [param._version for param in self._params]

    def note_step(self, edits: Edits, used: bytes) -> None:
        """The optimizer has written once to the parameters ``used`` (flags), and has taken the ``edits`` that `find` gave.

        A step that uses what the last one used raises versions as that did, so they are not read again, which would take as
        long as `find` does; unless parameters share a version counter (chunks of one tensor do).
        """
        raised = list(map(operator.add, self._versions, used))
        if edits is _NONE and used == self._raised_by_one:
            self._versions = raised
        else:
            self.note_written()
            self._raised_by_one = used if self._versions == raised else b""

    def note_bound(self) -> None:
        """The optimizer works on the parameters where they are now."""
        self._pointers = [param.data_ptr() for param in self._params]

    def expect_loaded_model(self) -> None:
        """A state was loaded: masters are compared with the parameters at the next step."""
        self._versions = [_UNKNOWN] * len(self._params)

    @staticmethod
    def refusal(info: ParamInfo, rank: int | None = None) -> RuntimeError:
        """For `Edits.refused`, found on ``rank``; None: there is one process."""
        where, who = ("", "") if rank is None else (f" on rank {rank}", " on all ranks")
        return RuntimeError(
            f"parameter {info.name!r} was modified{where} since the optimizer's last step "
            f"(on_external_update='error'); call optimizer.reload_master_params(){who} if that was meant"
        )
