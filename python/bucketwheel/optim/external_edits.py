"""External edits: what others have done to parameters since the optimizer's last step.

They may have given one other memory (`model.to()`, ``p.data = x``), which its address shows, or written to it (a loaded
model, a moving average, clamping), which its version counter shows. Writes through ``p.data``, numpy and collectives
raise no version: "error" does not see them, and beside a master the kernel takes them as for "resync" (`AdamRows`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.leased_params import home_of
from bucketwheel.native import core


@dataclass(frozen=True)
class Edits:
    """Parameters by index. ``moved``: have other memory. ``refused``: the first that ``on_external_update="error"`` refuses,
    or -1. ``follows``: "ignore" takes them for their masters all the same, once, since the model may have been loaded after
    the states."""

    moved: frozenset[int]
    refused: int
    follows: bool


class ExternalEdits:
    """``policy``: the option ``on_external_update``, "resync", "error" or "ignore"."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._params: list[Parameter] = []
        # uint64: where the parameters were when the optimizer took them, or bound them again.
        self._addresses = b""
        self._versions: list[int] = []  # after our last write; for "error", which alone asks
        # From the loading of a state to the next step: the model may be loaded later, and that is no edit.
        self._is_loaded = False

    def add(self, infos: Sequence[ParamInfo]) -> None:
        """These are watched too, as they are now."""
        # Sharded ones come and go, and have no memory where others could write.
        nothing = Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))
        params = [nothing if home_of(info.param) is not None else info.param for info in infos]
        self._params += params
        self._versions += [param._version for param in params]
        self._addresses += core.addresses(params)

    @property
    def resync(self) -> bool:
        """Whether the kernel takes what was written to a parameter for its master."""
        return self._policy != "ignore"

    def keep(self, indices: Sequence[int]) -> None:
        """These are the first from now on, and the others are not watched."""
        self._params = [self._params[i] for i in indices]
        self._versions = [self._versions[i] for i in indices]
        self._addresses = b"".join(self._addresses[8 * i : 8 * i + 8] for i in indices)

    def find(self) -> Edits:
        now, moved = core.addresses(self._params), frozenset[int]()
        if now != self._addresses:
            before = memoryview(self._addresses).cast("Q")
            moved = frozenset(i for i, address in enumerate(memoryview(now).cast("Q")) if address != before[i])
        refused = -1
        if self._policy == "error":
            versions = [] if self._is_loaded else [param._version for param in self._params]
            written = [i for i, version in enumerate(versions) if version != self._versions[i]]
            refused = min([*moved, *written], default=-1)
        return Edits(moved, refused, self._policy == "ignore" and self._is_loaded)

    def note_written(self) -> None:
        """The optimizer has written to its parameters, or has taken what others wrote."""
        self._is_loaded = False
        if self._policy == "error":
            self._versions = [param._version for param in self._params]

    def note_bound(self, but: Collection[int] = ()) -> None:
        """The optimizer works on the parameters where they are now. Those of ``but`` count as moved until the next call."""
        now = bytearray(core.addresses(self._params))
        for i in but:
            now[8 * i : 8 * i + 8] = b"\xff" * 8
        self._addresses = bytes(now)

    def expect_loaded_model(self) -> None:
        """A state was loaded, so the model may be loaded too: until the next step that is no edit, whatever ``policy`` is."""
        self._is_loaded = True

    @staticmethod
    def refusal(info: ParamInfo, rank: int | None = None) -> RuntimeError:
        """For a refused parameter, found on ``rank``; None: there is one process."""
        where, who = ("", "") if rank is None else (f" on rank {rank}", " on all ranks")
        return RuntimeError(
            f"parameter {info.name!r} was modified{where} since the optimizer's last step "
            f"(on_external_update='error'); call optimizer.reload_master_params(){who} if that was meant"
        )
