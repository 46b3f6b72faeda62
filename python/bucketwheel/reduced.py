"""Reduced gradients: the parts of the summed gradients that this rank owns, and what is known and pending about them.

The shards hold plain *sums* over the ranks. What everybody sees is ``sum * average * factor``, where ``average`` is
1/world (or 1) and ``factor`` collects clipping, unscaling and manual scaling; both are folded into the Adam kernel
(D7), so scaling a gradient costs no pass over it.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._build import native
from .comm import Communicator
from .flat import ParamInfo
from .plan import Packing
from .precision import norm_dtype_of

__all__ = ["ReducedGrads", "ShardPiece"]


@dataclass(frozen=True)
class ShardPiece:
    """One segment of a parameter on this rank. ``row``: its place among the segments of ``accumulator``."""

    grad: Tensor  # 1-D: a view into the gradient shard
    accumulator: Any
    row: int


@dataclass
class _State:
    info: ParamInfo
    packing: Packing
    packed: int  # index in the packing
    pieces: list[ShardPiece] = field(default_factory=list)
    has_content: bool = False
    is_zeroed: bool = False  # the content is zeros, by a local decision
    factor: float = 1.0
    is_edited: bool = False  # since its last reduce-scatter: the sums of squares made on arrival no longer hold


class ReducedGrads:
    """The gradients of all parameters after reduction. Methods marked collective are called by all ranks in one order."""

    def __init__(self, comm: Communicator, average: float) -> None:
        self.comm = comm
        self.average = average
        self._states: list[_State] = []
        self._sums: list[float] | None = None
        self.norm_dtype = torch.float32

    def add_param(self, info: ParamInfo, packing: Packing, packed: int, pieces: list[ShardPiece]) -> None:
        assert info.index == len(self._states)
        self.norm_dtype = norm_dtype_of((self.norm_dtype, info.dtype))
        self._states.append(_State(info, packing, packed, pieces))

    # --- content -----------------------------------------------------------------------------------------------------

    def has_content(self, index: int) -> bool:
        """Whether the shards hold a gradient of an earlier window."""
        return self._states[index].has_content

    def set_content(self, held: Sequence[bool]) -> None:
        """A window closed: exactly the parameters ``held`` have a gradient."""
        for index, (state, is_held) in enumerate(zip(self._states, held, strict=True)):
            state.has_content = is_held
            state.is_zeroed = False
            if not is_held:
                self.reset_factor(index)

    def has_older(self, index: int) -> bool:
        """Whether values of an earlier window still count: nobody has dropped or zeroed them here."""
        return self._states[index].has_content and not self._states[index].is_zeroed

    def replace_by_zero(self, index: int) -> None:
        """Makes a gradient of an earlier window zero, with whatever was pending for it."""
        self.zero(index)
        self._states[index].is_zeroed = True
        self.reset_factor(index)

    def zero(self, index: int) -> None:
        """Zeroes what the shards hold of a parameter."""
        for piece in self._states[index].pieces:
            piece.grad.zero_()
        self.mark_edited([index])

    def forget(self, index: int) -> None:
        """Drops a parameter's gradient. The shards keep its numbers; a window that adds to them zeroes them first."""
        self.forget_sums()
        self.reset_factor(index)
        self._states[index].has_content = False

    def forget_sums(self) -> None:
        """What was computed from the values no longer holds."""
        self._sums = None

    def flush_factor(self, index: int, remaining: float = 1.0) -> None:
        """Multiplies a pending factor into the shards, all but ``remaining``, so that a later window can add to them."""
        state = self._states[index]
        if state.factor != remaining:
            for piece in state.pieces:
                piece.grad.mul_(state.factor / remaining)
            state.factor = remaining
            self.mark_edited([index])

    def mark_edited(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._states[index].is_edited = True
        self.forget_sums()

    def mark_reduced(self) -> None:
        """Every bucket has been reduced: its accumulator's sums of squares hold again."""
        for state in self._states:
            state.is_edited = False
        self.forget_sums()

    # --- factors -----------------------------------------------------------------------------------------------------

    def has_factor(self, index: int) -> bool:
        """Whether something is to be multiplied into a gradient beside the average."""
        return self._states[index].factor != 1.0

    def visible_factor(self, index: int) -> float | Tensor:
        """What makes of the numbers in the shards what everybody sees, but for the average."""
        return self._states[index].factor

    def factors(self) -> list[float]:
        """What the host knows of the factors: what ranks compare."""
        return [state.factor for state in self._states]

    def set_factor(self, index: int, factor: float) -> None:
        """Says what is pending of what the host knows, without applying what was."""
        self._states[index].factor = factor

    def reset_factor(self, index: int) -> None:
        """Nothing is pending any more."""
        self._states[index].factor = 1.0

    def scale(self, indices: Iterable[int], factor: float | Tensor) -> None:
        known = float(factor)
        for index in indices:
            self._states[index].factor *= known

    def pending_factors(self) -> Sequence[float] | Tensor:
        """What the Adam kernel multiplies the sums by, beside the average."""
        return self.factors()

    # --- values ------------------------------------------------------------------------------------------------------

    def sums_of_squares(self) -> list[float]:
        """Per parameter the sum of squares of the summed gradient, over all ranks; NaN or inf if any element is.
        Collective.

        Kept until a gradient changes. Made on arrival, so nothing is read again; added in rank order, so all ranks have
        the same bits.
        """
        if self._sums is None:
            self._sums = self._added_over_ranks([self._local_sum(state) for state in self._states])
        return self._sums

    def _local_sum(self, state: _State) -> float:
        if not state.has_content or not state.pieces:
            return 0.0
        if state.is_edited:
            rows = native().sumsq([piece.grad for piece in state.pieces])
        else:
            rows = [piece.accumulator.results()[piece.row] for piece in state.pieces]
        return sum(sumsq if not is_bad or not math.isfinite(sumsq) else math.nan for sumsq, is_bad in rows)

    def _exchange(self, values: Sequence[float]) -> list[array.array[float]]:
        """Everyone's values, by rank."""
        step = self.comm.max_payload_bytes // 8
        out = [array.array("d") for _ in range(self.comm.size)]
        for begin in range(0, max(len(values), 1), step):
            payloads = self.comm.exchange(array.array("d", values[begin : begin + step]).tobytes())
            for own, payload in zip(out, payloads, strict=True):
                own.frombytes(payload)
        return out

    def _added_over_ranks(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._exchange(values), strict=True)]

    def norms(self, indices: Sequence[int], ord: float) -> list[float]:
        """Norms of order ``ord`` of whole gradients, as everybody sees them. Collective."""
        if ord == 2.0:
            raw = self.sums_of_squares()
            root: Callable[[float], float] = lambda s: math.sqrt(s) if s >= 0 else math.nan  # noqa: E731
        elif math.isinf(ord):
            pick = max if ord > 0 else min
            columns = zip(*self._exchange([self._local_power(s, ord) for s in self._states]), strict=True)
            raw = [math.nan if any(map(math.isnan, column)) else pick(column) for column in columns]
            root = float
        else:
            raw = self._added_over_ranks([self._local_power(s, ord) for s in self._states])
            root = float if ord == 0 else lambda s: s ** (1.0 / ord) if s > 0 else 0.0 if s == 0 else math.nan  # noqa: E731
        scale = (lambda f: f != 0) if ord == 0 else (lambda f: abs(f) * self.average)
        return [root(raw[i]) * scale(self._states[i].factor) for i in indices]

    def _local_power(self, state: _State, ord: float) -> float:
        """This rank's part of a norm: sum of |x|^ord; for ord = 0 the count of non-zeros; for +-inf the largest or smallest."""
        empty = math.inf if ord == -math.inf else 0.0
        if not state.has_content:
            return 0.0 if state.info.param.numel() else empty
        norms = [float(torch.linalg.vector_norm(p.grad, ord, dtype=torch.float64)) for p in state.pieces]
        if math.isinf(ord):
            if any(map(math.isnan, norms)):
                return math.nan
            return (max if ord > 0 else min)([empty, *norms])
        return sum(norm if ord == 0 else norm**ord for norm in norms)

    def total_norm(self, indices: Sequence[int], ord: float) -> float:
        """The norm of all the gradients in ``indices`` together. Collective."""
        norms = self.norms(indices, ord)
        if not norms:
            return 0.0
        if math.isinf(ord):
            return math.nan if any(map(math.isnan, norms)) else (max if ord > 0 else min)(norms)
        if ord == 0:
            return float(sum(norm != 0 for norm in norms))
        if ord == 2.0:  # from the sums, not from rounded roots
            sums = self.sums_of_squares()
            chosen = set(indices)
            total = native().fold([sums[i] * s.factor**2 if i in chosen else 0.0 for i, s in enumerate(self._states)])
            return math.sqrt(total) * self.average if total >= 0 else math.nan
        return sum(norm**ord for norm in norms) ** (1.0 / ord)

    def norm_tensor(self, indices: Sequence[int], ord: float) -> Tensor:
        """`norms`, of `norm_dtype`, on the parameters' device. Collective."""
        return torch.tensor(self.norms(indices, ord), dtype=self.norm_dtype)

    def total_norm_tensor(self, indices: Sequence[int], ord: float) -> Tensor:
        """`total_norm`, of `norm_dtype` and 0-d, on the parameters' device. Collective."""
        return torch.tensor(self.total_norm(indices, ord), dtype=self.norm_dtype)

    def clip(self, indices: Sequence[int], max_norm: float, ord: float) -> Tensor:
        """Clips the norm of all the gradients in ``indices`` together, and returns it as it was. Collective."""
        norm = self.total_norm_tensor(indices, ord)
        self.scale(indices, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def found_inf(self, found: Tensor) -> Tensor:
        """The largest ``found`` of any rank, at least 1 if any value of any gradient is inf or NaN on any rank; 0-d. Collective."""
        everyone = max(values[0] for values in self._exchange([float(found)]))
        has_nonfinite = not all(map(math.isfinite, self.sums_of_squares()))
        return torch.tensor(max(everyone, float(has_nonfinite)), dtype=found.dtype)

    def clamp(self, index: int, low: float | None, high: float | None) -> None:
        """Limits what everybody sees to [low, high]."""
        state = self._states[index]
        for piece in state.pieces:
            piece.grad.mul_(self.visible_factor(index) * self.average).clamp_(low, high)
        self.reset_factor(index)
        state.factor = 1.0 / self.average
        self.mark_edited([index])

    def full(self, index: int) -> Tensor:
        """The whole gradient as everybody sees it: float32 (float64 for a float64 parameter), the parameter's shape and
        strides. Collective."""
        state = self._states[index]
        info, packing, world = state.info, state.packing, self.comm.size
        owned = [packing.owned(state.packed, rank) for rank in range(world)]
        longest = max(sum(s.numel for s in segments) for segments in owned)
        dtype = torch.float64 if info.dtype == torch.float64 else torch.float32
        mine = torch.zeros(longest, dtype=dtype, device=info.param.device)
        if state.pieces:
            local = torch.cat([piece.grad for piece in state.pieces])
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
