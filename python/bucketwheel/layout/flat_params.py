"""Flat parameters: every parameter of one dtype is a view into one buffer of the communicator's pool.

The buffer is cut as `plan.pack` says, so a bucket's parameters are one contiguous range and its all-gather writes
straight into the parameters. The `Parameter` objects stay what they are; only their memory moves. Each gets a storage
of its own, so that saving one saves just that one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.layout.packing import Granularity, Packing, PackItem, Segment, pack
from bucketwheel.layout.precision import Precision
from bucketwheel.pool.pool import Lease, Pool
from bucketwheel.torch_internals import storage_users

_SLAB_SHARE = 4 << 20  # half of a slab of `Pool`
_numbers = itertools.count()


@dataclass(frozen=True)
class ParamInfo:
    """A trainable parameter as the optimizer knows it. ``index`` counts all of them, over all groups and dtypes.

    ``dtype``, ``stride`` and ``device`` are those it was taken with; the parameter may have been given other memory
    since.
    """

    index: int
    name: str
    param: Parameter
    group: int
    granularity: Granularity | None  # None: cut on rows where that costs little
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device
    is_named: bool = True  # else ``name`` says only where it is: ranks cannot be compared by it


def expect_same_memory_kind(info: ParamInfo, shape: torch.Size) -> None:
    """RuntimeError naming the parameter if it is no longer of the dtype, device and shape that it was taken with."""
    param = info.param
    if (param.dtype, param.device, param.shape) != (info.dtype, info.device, shape):
        raise RuntimeError(
            f"parameter {info.name!r} was {info.dtype} {tuple(shape)} on {info.device} when the optimizer was made and is "
            f"{param.dtype} {tuple(param.shape)} on {param.device} now: the model was converted or moved in between; "
            "close() this optimizer and make a new one. In your script convert or move the model first"
        )


def expect_dense(infos: Sequence[ParamInfo]) -> None:
    """ValueError naming the first parameter that is not dense in memory: no order of its dimensions makes it contiguous."""
    for info in infos:
        param = info.param
        # torch gives a copy of a dense tensor its strides, and copies of others other ones.
        if param.numel() and torch.empty_like(param, device="meta").stride() != param.stride():
            raise ValueError(
                f"parameter {info.name!r} (shape {tuple(param.shape)}, strides {param.stride()}) has gaps or "
                "overlaps in memory and cannot be flattened; give it memory of its own, e.g. p.data = p.data.clone()"
            )


def expect_apart(infos: Sequence[ParamInfo], others: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError naming the first parameter that shares memory with another, or with one of ``others``, which have names.

    torch would step that memory once for each. Here every parameter is moved to memory of its own.
    """
    plain: list[tuple[str, Tensor, bool]] = [(info.name, info.param, True) for info in infos]
    plain += [(name, other, False) for name, other in others if is_plain(other)]
    ranges = [(str(t.device), t.data_ptr(), _end_of(t), name, own) for name, t, own in plain if t.numel()]
    reach: dict[tuple[str, bool], tuple[int, str]] = {}  # by device, and of trained ones: how far the ranges so far go
    for device, begin, end, name, own in sorted(ranges, key=lambda one: one[:3]):
        for is_trained in (True, False) if own else (True,):
            far, other = reach.get((device, is_trained), (begin, ""))
            if far > begin:
                raise ValueError(
                    f"{name!r} shares memory with {other!r} but is not the same Parameter, so training would separate "
                    "them. Tie them as one (b.weight = a.weight, not b.weight.data = a.weight.data), or give one "
                    "of them memory of its own (x.data = x.data.clone()), before the optimizer is made"
                )
        reach[device, own] = max(reach.get((device, own), (0, "")), (end, name))


def row_numel(tensor: Tensor) -> int:
    """Elements of a slice of a dense ``tensor``'s outermost dimension in memory, dimensions of one element aside; 1 for
    vectors and scalars."""
    outer = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return max(outer) if tensor.numel() and len(outer) > 1 else 1


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements lie in memory of the CPU or a CUDA device, where its strides say."""
    return type(tensor.data) is Tensor and tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")


def lasting_lease(pool: Pool, key: str, nbytes: int) -> Lease:
    """A lease for the time of a training. If it is large it has memory of its size: in a slab of the pool's it would leave a
    rest that no other fits into."""
    if nbytes > _SLAB_SHARE:
        pool.reserve(nbytes)
    return pool.acquire(key, nbytes)


def _end_of(tensor: Tensor) -> int:
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr() + span * tensor.element_size()


class FlatParams:
    """Moves ``infos``' parameters (dense, of one dtype, on the pool's device) into one lease of ``pool``.

    The order in the buffer is the reverse of the order given: gradients arrive from the last parameter to the first.
    """

    def __init__(self, infos: Sequence[ParamInfo], *, world: int, bucket_numel: int, pool: Pool) -> None:
        self.infos = list(reversed(infos))
        self.dtype = infos[0].param.dtype
        items = [PackItem(info.param.numel(), info.granularity, row_numel(info.param)) for info in self.infos]
        self.packing: Packing = pack(items, world=world, bucket_numel=bucket_numel)
        self._pool = pool
        self._lease_flat()
        self._slots: list[Tensor] = []
        with torch.no_grad():
            for begin, info in zip(self.packing.begins, self.infos, strict=True):
                slot = self._slot_like(info.param, begin)
                slot.copy_(info.param.data)
                info.param.data = slot
                self._slots.append(slot)
        self._places = [slot.data_ptr() for slot in self._slots]

    def _lease_flat(self) -> None:
        key = f"params/{self.dtype}/{next(_numbers)}"  # parameters may outlive their optimizer and keep its lease
        nbytes = self.packing.numel * self.dtype.itemsize
        self._pool.reserve(nbytes)
        self.lease: Lease = self._pool.acquire(key, nbytes)
        self.flat: Tensor = self.lease.tensor(self.dtype, (self.packing.numel,)).zero_()  # the padding

    def _slot_like(self, tensor: Tensor, begin: int) -> Tensor:
        """The elements of the flat buffer from ``begin`` on, with the shape and strides of ``tensor``."""
        piece = self.lease.tensor(self.dtype, (tensor.numel(),), offset_bytes=begin * self.dtype.itemsize)
        return piece.as_strided(tensor.shape, tensor.stride()).data  # without its base, which would count as a holder

    # As `LeasedParams`.

    @property
    def name(self) -> str:
        return self.lease.key

    @property
    def nbytes(self) -> int:
        return self.lease.nbytes

    @property
    def written(self) -> Tensor:
        return self.flat

    def own(self, segment: Segment) -> Tensor:
        return self.flat.narrow(0, segment.flat_begin, segment.numel)

    def wire_dtype(self, precision: Precision) -> torch.dtype:
        return precision.wire_of(self.dtype)

    def given_states(self, precision: Precision) -> dict[str, Tensor]:
        return {}

    def gathers(self, bucket_begin: int, numel: int) -> Tensor | None:
        return self.flat.narrow(0, bucket_begin, numel)

    def expect_bindable(self, moved: Collection[int], *, is_registered: bool) -> bool:
        """RuntimeError naming the first of ``moved`` that cannot come back into the flat buffer: it has another dtype, device
        or shape, and training the buffer would silently do nothing to it. ValueError where it shares another's memory.

        Returns whether it would come back over what others hold (``old = p.data``). RuntimeError where the buffer
        ``is_registered``, or where they hold the memory of another parameter too, which would move away from them.
        """
        for slot, info in zip(self._slots, self.infos, strict=True):
            if info.index in moved:
                expect_same_memory_kind(info, slot.shape)
        expect_apart([info for info in self.infos if info.index >= 0], ())
        held = [info for at, info in enumerate(self.infos) if info.index >= 0 and self._is_held(at)]
        left, stays = (next((i for i in held if (i.index in moved) is is_moved), None) for is_moved in (True, False))
        if left is not None and (stays is not None or is_registered):
            why = (
                f"another tensor uses the memory of {stays.name!r}, which would move too"
                if stays
                else "NCCL has registered that memory (registered=True)"
            )
            raise RuntimeError(
                f"your script gave parameter {left.name!r} new memory (p.data = ...), another tensor still uses the "
                f"earlier memory, and {why}: write values instead (p.data.copy_(new)), keep copies (p.data.clone()), "
                "or delete the other tensor (a p.data, a state_dict(), a graph without its backward)"
            )
        return left is not None

    def _is_held(self, at: int) -> bool:
        """Whether others hold the memory that a parameter has in the flat buffer, or had."""
        slot, place = self._slots[at], self._places[at]
        is_here = self.infos[at].param.data_ptr() == place
        return slot.data_ptr() == place and storage_users(slot) > storage_users(slot.new_empty(0)) + is_here

    def leave(self) -> None:
        """Goes on in another flat buffer, with all parameters but those that have other memory already, and leaves this one to
        those who hold parts of it. The version of the old `flat` shows it."""
        torch.autograd.graph.increment_version(self.flat)
        old, flat, slots, places = self.lease, self.flat, self._slots, self._places
        self._lease_flat()
        self.flat.copy_(flat)
        self._slots = [self._slot_like(slot, at) for slot, at in zip(slots, self.packing.begins, strict=True)]
        self._places = [slot.data_ptr() for slot in self._slots]
        for info, slot, place in zip(self.infos, self._slots, places, strict=True):
            if info.param.data_ptr() == place:
                info.param.data = slot
        old.leave_to_owners()

    def rebind(self, moved: Collection[int]) -> None:
        """Takes back parameters whose memory was replaced (`model.to()`, ``p.data = x``, `share_memory`), with their
        values. The version of `flat` shows it."""
        torch.autograd.graph.increment_version(self.flat)  # slots have versions of their own
        for at, (place, info) in enumerate(zip(self._places, self.infos, strict=True)):
            if info.index in moved:
                slot = self._slots[at]
                if slot.data_ptr() != place:  # `share_memory_` moved the storage itself, which is the slot's too
                    slot = self._slots[at] = self._slot_like(slot, self.packing.begins[at])
                slot.copy_(info.param.data)
                info.param.data = slot

    def renumber(self, infos: Mapping[Tensor, ParamInfo]) -> None:
        """Takes what ``infos`` say of the parameters now. Those that are not there are gone: they have memory of their own
        again and the index -1, and what they had here is padding."""
        for at, info in enumerate(self.infos):
            if info.param not in infos:
                self._let_go(at)
            self.infos[at] = infos.get(info.param) or replace(
                info, index=-1, param=Parameter(torch.empty(0, dtype=info.dtype, device=info.device))
            )

    def _let_go(self, at: int) -> None:
        param, slot = self.infos[at].param, self._slots[at]
        if self.infos[at].index >= 0 and param.data_ptr() == self._places[at]:
            param.data = slot.clone(memory_format=torch.preserve_format)

    def release(self) -> None:
        """Gives every parameter memory of its own again and ends the lease, where nobody else holds a part of its memory."""
        for at in range(len(self.infos)):
            self._let_go(at)
        is_held = any(map(self._is_held, range(len(self.infos))))
        self._slots.clear()
        self._places.clear()
        del self.flat
        (self.lease.leave_to_owners if is_held else self.lease.release)()
