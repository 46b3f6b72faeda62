"""Gather: parameters on their way back to all ranks, and what ranks must agree on before the first step.

With ``overlap_param_sync`` the all-gathers of a step run on while the host goes on. Whoever reads parameters waits
first: `Gathers.wait_all`, or the forward-pre-hooks of `Gathers.attach`.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .comm import Communicator
from .flat import ParamInfo
from .grid import GRID_MARK, Grid
from .handle import Handle
from .plan import Packing

__all__ = ["Gathers", "broadcast_flat", "expect_equal_layout", "expect_equal_packings", "expect_equal_places"]


def expect_equal_layout(
    comm: Communicator | Grid, infos: Sequence[ParamInfo], groups: Sequence[str], options: object
) -> None:
    """RuntimeError on every rank, naming the first difference, unless all ranks were given the same. Collective."""
    lines = [f"the optimizer's options: {options}"]
    lines += [f"parameter group {g}: {text}" for g, text in enumerate(groups)]
    lines += [
        f"parameter {info.index}: {info.name!r} {tuple(info.param.shape)}, strides {info.stride}, {info.dtype}, group {info.group}, "
        f"granularity {info.granularity}"
        for info in infos
    ]
    counts = struct.pack("<qq", len(groups), len(infos))
    digests = [hashlib.sha256(line.encode()).digest()[:8] for line in lines]
    payload = counts + b"".join(digests[: (comm.max_payload_bytes - len(counts)) // 8])
    everyone = comm.exchange(payload)
    if all(other == payload for other in everyone):
        return
    if any(other.startswith(GRID_MARK) for other in everyone):
        raise RuntimeError("some ranks of the process_group pass a replicate_group and this one does not")
    numbers = [struct.unpack_from("<qq", other) for other in everyone]
    if len(set(numbers)) > 1:
        raise RuntimeError(
            f"ranks disagree on the numbers of parameter groups and trainable parameters: {numbers} by rank"
        )
    at = len(counts)
    while len({other[at : at + 8] for other in everyone}) == 1:
        at += 8
    raise RuntimeError(
        f"ranks disagree on {lines[(at - len(counts)) // 8]} (here on rank {comm.rank}); every rank must pass the same parameters "
        "in the same order, with the same options"
    )


def expect_equal_packings(comm: Communicator | Grid, packings: Sequence[Packing]) -> None:
    """RuntimeError on every rank unless all ranks have packed alike: equal inputs must give equal packings. Collective."""
    digests = comm.exchange(" ".join(packing.digest() for packing in packings).encode())
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"ranks packed the same parameters differently (digests {[d[:8].decode() for d in digests]} by rank); do all of them "
            "run the same version of bucketwheel?"
        )


def expect_equal_places(comm: Communicator, places: Sequence[tuple[int, int]]) -> None:
    """RuntimeError on every rank unless registered memory lies at the same ``places`` (`Lease.place`) on all. Collective.

    NCCL adds a rank's own offset to the begin of its peers' windows, so it would read something else.
    """
    digests = comm.exchange(hashlib.sha256(repr(list(places)).encode()).digest())
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"ranks have the optimizer's registered memory at other places, on rank {comm.rank} at {list(places)} (slab, offset): "
            "all must make the same acquires of the communicators' pools, in one order, before the optimizer is made, and close() "
            "the one before it"
        )


def broadcast_flat(comm: Communicator | Grid, flat: Tensor) -> None:
    """Makes ``flat`` on every rank what it is on rank 0. Collective."""
    comm.broadcast_into(flat, 0).wait()


class Gathers:
    """The all-gathers of the last step that have not been waited for."""

    def __init__(self, comm: Communicator, infos: Sequence[ParamInfo]) -> None:
        self._comm = comm
        self._infos = list(infos)
        self._running: list[tuple[Handle, frozenset[int]]] = []
        self._hooks: list[RemovableHandle] = []
        self._has_run: set[int] = set()  # modules (by id) whose forward has been seen

    def start(self, full: Tensor, own: Tensor, params: Iterable[int]) -> None:
        self._running.append((self._comm.all_gather_into(full, own), frozenset(params)))

    def wait_all(self) -> None:
        running, self._running = self._running, []
        for handle, _ in running:
            handle.wait()

    def wait_for(self, params: AbstractSet[int]) -> None:
        """Waits for the gathers that bring ``params``."""
        later = []
        for handle, brings in self._running:
            if brings.isdisjoint(params):
                later.append((handle, brings))
            else:
                handle.wait()
        self._running = later

    def attach(self, model: torch.nn.Module) -> Callable[[], None]:
        """Waits for parameters just before the forward that uses them. Returns a function that takes the hooks off
        again.

        A module's forward-pre-hook waits for the parameters that it owns, and for those of other modules that its
        forward uses (`F.linear(x, self.embedding.weight)`): the model's first forward in training and in evaluation is
        watched for them. Parameters of modules whose forward has not been seen are waited for when the model's own
        forward begins, and so is everything before anything reads ``model.state_dict()``.
        """
        self_ref = weakref.ref(self)  # the model may outlive the optimizer
        index_of = {id(info.param): info.index for info in self._infos}
        used_by = {
            id(module): {index_of[id(p)] for p in module.parameters(recurse=False) if id(p) in index_of}
            for module in model.modules()
        }
        watched: set[bool] = set()
        model_id = id(model)

        def before_forward(module: torch.nn.Module, _: object) -> None:
            gathers = self_ref()
            if gathers is None:
                return
            is_whole = id(module) == model_id
            if is_whole and module.training not in watched:
                watched.add(module.training)
                gathers.wait_all()
                _WatchUses(module, index_of, used_by)
            if gathers._running:
                mine = used_by.get(id(module), set())
                if is_whole:
                    mine = mine.union(*(params for key, params in used_by.items() if key not in gathers._has_run))
                if mine:
                    gathers.wait_for(mine)
            gathers._has_run.add(id(module))

        def before_state_dict(*_: object) -> None:
            gathers = self_ref()
            if gathers is not None:
                gathers.wait_all()

        hooks = [module.register_forward_pre_hook(before_forward) for module in model.modules()]
        hooks.append(model.register_state_dict_pre_hook(before_state_dict))
        self._hooks += hooks
        for hook in hooks:
            weakref.finalize(self, hook.remove).atexit = False

        def detach() -> None:
            self.wait_all()
            for hook in hooks:
                hook.remove()

        return detach

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _WatchUses(TorchFunctionMode):
    """Adds to ``used_by`` the parameters that each module's own forward gives to torch functions.

    Made just before a forward of ``model``; ends with it, also when it raises.
    """

    def __init__(self, model: torch.nn.Module, index_of: Mapping[int, int], used_by: Mapping[int, set[int]]) -> None:
        super().__init__()
        self._index_of = index_of
        self._used_by = used_by
        self._running = [id(model)]  # its pre-hooks are being called
        self._hooks = []
        for module in model.modules():
            if module is not model:
                self._hooks.append(module.register_forward_pre_hook(self._enter))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._hooks.append(model.register_forward_hook(self._end, always_call=True))
        self.__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = {self._index_of[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._index_of}
        self._used_by[self._running[-1]].update(found)
        return func(*args, **kwargs)

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        self._running.append(id(module))

    def _leave(self, *_: object) -> None:
        self._running.pop()

    def _end(self, *_: object) -> None:
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
