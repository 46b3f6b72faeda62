"""Reduced gradients: the parts of the summed gradients that this rank owns, and what is known and pending about them.

The shards hold plain *sums* over the ranks. What everybody sees is ``sum * average * factor``, where ``average`` is
1/world (or 1) and ``factor`` collects clipping, unscaling and manual scaling; both are folded into the Adam kernel
(D7), so scaling a gradient costs no pass over it.

What is known of a parameter is kept by kind, one array for each: a step looks at all parameters, and there may be
thousands.
"""

from __future__ import annotations

import array
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.packing import Packing
from bucketwheel.layout.precision import norm_dtype_of
from bucketwheel.native import core

__all__ = ["ReducedGrads", "ShardPiece", "clip_coefficient"]


def clip_coefficient(max_norm: float, norm: Tensor) -> Tensor:
    """What torch multiplies gradients by to clip them; on the device of ``norm``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@dataclass(frozen=True)
class ShardPiece:
    """One segment of a parameter on this rank. ``row``: its place among the segments of ``accumulator``."""

    grad: Tensor  # 1-D: a view into the gradient shard
    accumulator: Any
    row: int


@dataclass(frozen=True)
class _Param:
    info: ParamInfo
    packing: Packing
    packed: int  # index in the packing
    pieces: list[ShardPiece] = field(default_factory=list)


class ReducedGrads:
    """The gradients of all parameters after reduction. Methods marked collective are called by all ranks in one order.

    Flags are bytes, one for each parameter.
    """

    def __init__(self, comm: Communicator, average: float, replicate: Communicator | None = None) -> None:
        """``replicate``: to the ranks whose shards hold the same sums. Norms need only ``comm``; what ranks say of
        themselves is asked of both."""
        self.comm = comm
        self.average = average
        self.replicate = replicate
        self.norm_dtype = torch.float32
        self._params: list[_Param] = []
        self._content = bytearray()  # the shards hold a gradient of an earlier window
        self._zeroed = bytearray()  # the content is zeros, by a local decision
        self._edited = bytearray()  # since its last reduce-scatter: the sums of squares made on arrival no longer hold
        self._factors = array.array("d")
        self._ones = b""
        self._arrival_sums = core.ParamSums() if comm.device < 0 else None
        self._sums: Tensor | None = None

    def add_param(self, info: ParamInfo, packing: Packing, packed: int, pieces: list[ShardPiece]) -> None:
        assert info.index == len(self._params)
        self.norm_dtype = norm_dtype_of((self.norm_dtype, info.dtype))
        self._params.append(_Param(info, packing, packed, pieces))
        self._content.append(False)
        self._zeroed.append(False)
        self._edited.append(False)
        self._factors.append(1.0)
        self._ones += array.array("d", [1.0]).tobytes()
        if self._arrival_sums is not None:
            self._arrival_sums.add([(piece.accumulator, piece.row) for piece in pieces])

    def carry_over(self, old: ReducedGrads) -> None:
        """The shards of the first parameters are those of ``old``, which is of no use afterwards."""
        count = len(old._params)
        self._content[:count] = old._content
        self._zeroed[:count] = old._zeroed
        self._factors[:count] = old._factors
        self.mark_edited(range(count))  # the accumulators that have summed are gone

    @property
    def bookkeeping_bytes(self) -> int:
        """Of what is kept for each parameter beside its gradient: flags and factors, and the sums of squares if they are known."""
        sums = 0 if self._sums is None else self._sums.nbytes
        return 3 * len(self._content) + len(self._factors) * self._factors.itemsize + sums

    # --- content -----------------------------------------------------------------------------------------------------

    @property
    def content(self) -> bytes:
        """Flags: `has_content`."""
        return bytes(self._content)

    def has_content(self, index: int) -> bool:
        """Whether the shards hold a gradient of an earlier window."""
        return bool(self._content[index])

    def set_content(self, held: bytes) -> None:
        """A window closed: exactly the parameters ``held`` have a gradient."""
        self._content[:] = held
        self._zeroed[:] = bytes(len(held))
        if not all(held):
            for index, is_held in enumerate(held):
                if not is_held:
                    self.reset_factor(index)

    def older(self) -> bytes:
        """Flags: whether values of an earlier window still count, for nobody has dropped or zeroed them here."""
        if not any(self._zeroed):
            return bytes(self._content)
        return bytes(has and not is_zeroed for has, is_zeroed in zip(self._content, self._zeroed, strict=True))

    def replace_by_zero(self, index: int) -> None:
        """Makes a gradient of an earlier window zero, with whatever was pending for it."""
        self.zero(index)
        self._zeroed[index] = True
        self.reset_factor(index)

    def zero(self, index: int) -> None:
        """Zeroes what the shards hold of a parameter."""
        for piece in self._params[index].pieces:
            piece.grad.zero_()
        self.mark_edited([index])

    def forget(self, index: int) -> None:
        """Drops a parameter's gradient. The shards keep its numbers; a window that adds to them zeroes them first."""
        self.forget_sums()
        self.reset_factor(index)
        self._content[index] = False

    def forget_all(self) -> None:
        self.forget_sums()
        self.reset_all_factors()
        self._content[:] = bytes(len(self._content))

    def forget_sums(self) -> None:
        """What was computed from the values no longer holds."""
        self._sums = None

    def flush_factor(self, index: int, remaining: float = 1.0) -> None:
        """Multiplies a pending factor into the shards, all but ``remaining``, so that a later window can add to them."""
        factor = self._factors[index]
        if factor != remaining:
            for piece in self._params[index].pieces:
                piece.grad.mul_(factor / remaining)
            self._factors[index] = remaining
            self.mark_edited([index])

    def mark_edited(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._edited[index] = True
        self.forget_sums()

    def mark_reduced(self) -> None:
        """Every bucket has been reduced: its accumulator's sums of squares hold again."""
        self._edited[:] = bytes(len(self._edited))
        self.forget_sums()

    # --- factors -----------------------------------------------------------------------------------------------------

    def has_factor(self, index: int) -> bool:
        """Whether something is to be multiplied into a gradient beside the average."""
        return self._factors[index] != 1.0

    def visible_factor(self, index: int) -> float | Tensor:
        """What makes of the numbers in the shards what everybody sees, but for the average."""
        return self._factors[index]

    def factors(self) -> bytes:
        """What the host knows of the factors, which is what ranks compare: doubles; empty if all are 1."""
        known = self._factors.tobytes()
        return b"" if known == self._ones else known

    def set_factors(self, factors: bytes) -> None:
        """Says what is pending of what the host knows, without applying what was."""
        self._factors = array.array("d", factors or self._ones)

    def reset_factor(self, index: int) -> None:
        """Nothing is pending any more."""
        self._factors[index] = 1.0

    def reset_all_factors(self) -> None:
        self._factors = array.array("d", self._ones)

    def scale(self, indices: Iterable[int], factor: float | Tensor) -> None:
        known, factors = float(factor), self._factors
        for index in indices:
            factors[index] *= known

    def settle(self) -> None:
        """What the host knows of factors and edits goes where CUDA graphs read it, if there are any. Between windows, after each
        change."""

    def pending_factors(self) -> Tensor:
        """What the Adam kernel multiplies the sums by, beside the average: float64, one a parameter."""
        return self._vector(self._factors)

    # --- values ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _vector(values: array.array[float] | bytes) -> Tensor:
        """A copy of doubles as a tensor."""
        own = bytearray(values)
        return torch.frombuffer(own, dtype=torch.float64) if own else torch.empty(0, dtype=torch.float64)

    def _chosen(self, indices: Sequence[int]) -> Tensor:
        mask = torch.zeros(len(self._params), dtype=torch.bool)
        mask[torch.tensor(indices, dtype=torch.int64)] = True
        return mask

    def sums_of_squares(self) -> Tensor:
        """Per parameter the sum of squares of the summed gradient, over all ranks; NaN or inf if any element is.
        Collective.

        Kept until a gradient changes. Made on arrival, so nothing is read again; added in rank order, so all ranks have
        the same bits.
        """
        if self._sums is None:
            self._sums = self._added_over_ranks(self._local_sums())
        return self._sums

    def _local_sums(self) -> bytes:
        assert self._arrival_sums is not None
        sums: bytes = self._arrival_sums.sums(bytes(self._content))
        if not any(self._edited):
            return sums
        local = array.array("d", sums)
        for index, param in enumerate(self._params):
            if self._edited[index] and self._content[index]:
                again = core.sumsq([piece.grad for piece in param.pieces])
                local[index] = sum(s if not is_bad or not math.isfinite(s) else math.nan for s, is_bad in again)
        return local.tobytes()

    def _exchange(self, values: bytes) -> list[Tensor]:
        """Everyone's doubles, by rank."""
        step = self.comm.max_payload_bytes // 8 * 8
        rounds = [self.comm.exchange(values[at : at + step]) for at in range(0, max(len(values), 1), step)]
        return [self._vector(b"".join(payloads)) for payloads in zip(*rounds, strict=True)]

    def _added_over_ranks(self, values: bytes) -> Tensor:
        first, *others = self._exchange(values)
        for other in others:
            first += other
        return first

    def norms(self, indices: Sequence[int], ord: float) -> Tensor:
        """Norms of order ``ord`` of whole gradients, as everybody sees them: float64. Collective."""
        factors = self.pending_factors()
        if ord == 2.0:
            raw = self.sums_of_squares().sqrt()
        else:
            local = array.array("d", [self._local_power(index, ord) for index in range(len(self._params))]).tobytes()
            if math.isinf(ord):
                everyone = torch.stack(self._exchange(local))
                raw = everyone.amax(0) if ord > 0 else everyone.amin(0)
            else:
                raw = self._added_over_ranks(local)
                raw = raw if ord == 0 else raw.pow_(1.0 / ord)
        seen = raw * (factors != 0) if ord == 0 else raw * (factors.abs() * self.average)
        return seen[torch.tensor(indices, dtype=torch.int64)]

    def _local_power(self, index: int, ord: float) -> float:
        """This rank's part of a norm: sum of |x|^ord; for ord = 0 the count of non-zeros; for +-inf the largest or smallest."""
        empty = math.inf if ord == -math.inf else 0.0
        param = self._params[index]
        if not self._content[index]:
            return 0.0 if param.info.param.numel() else empty
        norms = [float(torch.linalg.vector_norm(p.grad, ord, dtype=torch.float64)) for p in param.pieces]
        if math.isinf(ord):
            if any(map(math.isnan, norms)):
                return math.nan
            return (max if ord > 0 else min)([empty, *norms])
        return sum(norm if ord == 0 else norm**ord for norm in norms)

    def total_norm(self, indices: Sequence[int], ord: float) -> float:
        """The norm of all the gradients in ``indices`` together. Collective."""
        if not indices:
            return 0.0
        if ord == 2.0:  # from the sums, not from rounded roots
            seen = self.sums_of_squares() * self.pending_factors().square()
            chosen = torch.where(self._chosen(indices), seen, 0.0)
            return math.sqrt(total) * self.average if (total := core.fold(chosen.tolist())) >= 0 else math.nan
        norms = self.norms(indices, ord)
        if math.isinf(ord):
            return float(norms.amax() if ord > 0 else norms.amin())
        if ord == 0:
            return float((norms != 0).sum())
        return float(sum(norm**ord for norm in norms.tolist())) ** (1.0 / ord)

    def norm_tensor(self, indices: Sequence[int], ord: float) -> Tensor:
        """`norms`, of `norm_dtype`, on the parameters' device. Collective."""
        return self.norms(indices, ord).to(self.norm_dtype)

    def total_norm_tensor(self, indices: Sequence[int], ord: float) -> Tensor:
        """`total_norm`, of `norm_dtype` and 0-d, on the parameters' device. Collective."""
        return torch.tensor(self.total_norm(indices, ord), dtype=self.norm_dtype)

    def clip(self, indices: Sequence[int], max_norm: float, ord: float) -> Tensor:
        """Clips the norm of all the gradients in ``indices`` together, and returns it as it was. Collective."""
        norm = self.total_norm_tensor(indices, ord)
        self.scale(indices, clip_coefficient(max_norm, norm))
        return norm

    def found_inf(self, found: Tensor) -> Tensor:
        """The largest ``found`` of any rank, at least 1 if any value of any gradient is inf or NaN on any rank; 0-d. Collective."""
        others = torch.stack(self._exchange(array.array("d", [float(found)]).tobytes())).amax()
        if self.replicate is not None:
            of_replicas = self.replicate.exchange(array.array("d", [float(others)]).tobytes())
            others = torch.stack([self._vector(found) for found in of_replicas]).amax()
        wide = self._wide()
        is_finite = bool(torch.isfinite(self.sums_of_squares().masked_fill(self._chosen(wide), 0.0)).all())
        if wide:
            is_finite &= bool(torch.isfinite(self.norm_tensor(wide, math.inf)).all())
        return torch.clamp(others, min=float(not is_finite)).to(found.dtype)

    def _wide(self) -> list[int]:
        """Parameters whose gradients are finite where their squares may not be."""
        pairs = zip(self._params, self._content, strict=True)
        return [p.info.index for p, has_content in pairs if has_content and p.info.dtype == torch.float64]

    def clamp(self, index: int, low: float | None, high: float | None) -> None:
        """Limits what everybody sees to [low, high]."""
        for piece in self._params[index].pieces:
            piece.grad.mul_(self.visible_factor(index) * self.average).clamp_(low, high)
        self.reset_factor(index)
        self._factors[index] = 1.0 / self.average
        self.mark_edited([index])

    def full(self, index: int) -> Tensor:
        """The whole gradient as everybody sees it: float32 (float64 for a float64 parameter), the parameter's shape and
        strides. Collective."""
        param = self._params[index]
        info, packing, world = param.info, param.packing, self.comm.size
        owned = [packing.owned(param.packed, rank) for rank in range(world)]
        longest = max(sum(s.numel for s in segments) for segments in owned)
        dtype = torch.float64 if info.dtype == torch.float64 else torch.float32
        mine = torch.zeros(longest, dtype=dtype, device=info.param.device)
        if param.pieces:
            local = torch.cat([piece.grad for piece in param.pieces])
            mine[: local.numel()] = local
        gathered = mine.new_empty(world * longest)
        self.comm.all_gather_into(gathered, mine).wait()
        flat = mine.new_empty(info.param.numel())
        for rank, segments in enumerate(owned):
            at = rank * longest
            for s in segments:
                flat[s.param_begin : s.param_begin + s.numel] = gathered[at : at + s.numel]
                at += s.numel
        return flat.mul_(self.visible_factor(index) * self.average).as_strided(info.param.shape, info.stride)
