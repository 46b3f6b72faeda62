"""Reduced gradients: the parts of the summed gradients that this rank owns, their norms, and what is pending about them.

The shards hold plain *sums* over the ranks. What everybody sees is ``sum * average * factor``, where ``average`` is
1/world (or 1) and the factor (`GradFactors`) collects clipping, unscaling and manual scaling; both are folded into the
Adam kernel, so scaling a gradient costs no pass over it.

On CUDA sums of squares, norms and factors are device memory, and nothing here waits for the device. What is known of a
parameter is kept by kind, one array for each: a step looks at all parameters, and there may be thousands.
"""

from __future__ import annotations

import array
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm.collectives import join
from bucketwheel.comm.communicator import Communicator
from bucketwheel.device import Uploads, buffer_of, torch_device
from bucketwheel.kernels.adam_rows import GradFactors
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.packing import Packing
from bucketwheel.layout.precision import norm_dtype_of
from bucketwheel.layout.shard_store import ranges_of
from bucketwheel.native import core


def clip_coefficient(max_norm: float, norm: Tensor) -> Tensor:
    """What torch multiplies gradients by to clip them; on the device of ``norm``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@dataclass(frozen=True)
class ShardPiece:
    """One segment of a parameter on this rank. ``row``: the place of its sum of squares, among those of ``accumulator`` on the
    CPU, in ``row_sums`` on CUDA."""

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

    ``row_sums`` (CUDA): float64; reduce-scatters write the sums of squares of
    shard spans there. ``replicate``: the ranks whose shards hold the same sums. A norm adds what the ranks of ``comm`` have;
    what all ranks must agree on (`found_inf`) asks those of ``replicate`` too.
    """

    def __init__(
        self,
        comm: Communicator,
        average: float,
        param_count: int,
        *,
        row_sums: Tensor | None = None,
        replicate: Communicator | None = None,
    ) -> None:
        self.comm = comm
        self.average = average
        self.row_sums = row_sums
        self.table = core.GradTable(comm.device, param_count)
        self.factors = GradFactors(self.table, comm.device)
        self.norm_dtype = torch.float32
        self._replicate = replicate
        self._device = comm.device
        self._is_on_cpu = comm.device < 0
        self._gathers = comm.gathers._native
        self._uploads = Uploads(comm.device)
        self._params: list[_Param] = []
        self._arrival_sums = core.ParamSums() if self._is_on_cpu else None
        self._row_tables: tuple[Tensor, Tensor] | None = None  # CUDA: `_rows_of_params`, if not uploaded in a capture
        # Per parameter, of the whole gradient: the sum of squares, of this version of the table. None until somebody asks.
        self._sums: Tensor | None = None
        self._version = -1
        # CUDA: a window has ended in a capture (on all ranks, while a capture may fail on some before that). Stays.
        self._has_graph = False

    def add_param(self, info: ParamInfo, packing: Packing, packed: int, pieces: list[ShardPiece]) -> None:
        assert info.index == len(self._params)
        self.norm_dtype = norm_dtype_of((self.norm_dtype, info.dtype))
        self._params.append(_Param(info, packing, packed, pieces))
        self.table.set_pieces(info.index, [piece.grad for piece in pieces])
        if self._arrival_sums is not None:
            self._arrival_sums.add([(piece.accumulator, piece.row) for piece in pieces])

    def pieces_of(self, index: int) -> list[ShardPiece]:
        return self._params[index].pieces

    def carry_over(self, old: ReducedGrads, indices: Sequence[int]) -> None:
        """Parameter i takes over the gradient of parameter indices[i] of ``old``. Do not use ``old`` afterwards."""
        self.factors.carry_over(old.factors, indices)

    @property
    def bookkeeping_bytes(self) -> int:
        """Of what is kept for each parameter beside its gradient: flags, factors, sums of squares."""
        sums = sum(kept.nbytes for kept in (self._sums, self.row_sums) if kept is not None)
        return 12 * len(self._params) + self.factors.nbytes + sums

    # --- content: which parameters have a sum in the shards is in `table` --------------------------------------------

    def settle_window(self) -> None:
        """A window has ended."""
        if not self._is_on_cpu:
            self._has_graph = self._has_graph or (self.factors.may_be_replayed and core.is_capturing(self._device))
            self.settle()

    def flush_factor(self, index: int, remaining: float = 1.0) -> None:
        """Multiplies a pending factor into the shards, all but ``remaining``, so that a later window can add to them."""
        if self.factors.is_known(index, remaining):
            return
        for piece in self._params[index].pieces:
            piece.grad.mul_(self.factors[index] / remaining)
        self.table.set_factor(index, remaining)
        self.table.mark_edited(index)

    def clamp(self, index: int, low: float | None, high: float | None) -> None:
        """Limits what everybody sees to [low, high]."""
        for piece in self._params[index].pieces:
            piece.grad.mul_(self.factors[index] * self.average).clamp_(low, high)
        self.table.set_factor(index, 1.0 / self.average)
        self.table.mark_edited(index)

    def settle(self) -> None:
        """What the host knows of factors and edits goes where CUDA graphs read it, if there are any. Between windows, after each
        change."""
        if self.factors.may_be_replayed:
            self.factors.vector()
            self._sum_edited_rows()

    # --- sums over the ranks -----------------------------------------------------------------------------------------

    def _everyone(self, own: Tensor, comm: Communicator | None = None) -> Tensor:
        """[ranks, n]: every rank's ``own`` [n]; of those of ``comm``, or among whom gradients are sharded. Host to host on the
        CPU, an all-gather on CUDA."""
        if not self._is_on_cpu:
            gathers = self._gathers if comm is None else comm.gathers._native
            gathered = own.new_empty(gathers.world, own.numel())
            gathers.all_gather([gathered], [own]).wait()
            return gathered
        return self._everyone_on_cpu(bytes(buffer_of(own)), own.dtype, self.comm if comm is None else comm)

    def _everyone_on_cpu(self, values: bytes, dtype: torch.dtype, comm: Communicator) -> Tensor:
        """`_everyone` of what ``values`` hold."""
        step = core.MAX_PAYLOAD_BYTES // 8 * 8
        rounds = [comm._exchange(values[at : at + step]) for at in range(0, max(len(values), 1), step)]
        joined = bytearray(b"".join(part for of_rank in zip(*rounds, strict=True) for part in of_rank))
        found = torch.frombuffer(joined, dtype=dtype) if joined else self._new(0, dtype=dtype)
        return found.view(len(rounds[0]), len(values) // dtype.itemsize)

    def _over_ranks(self, by_rank: Tensor) -> Tensor:
        """[n]: ``by_rank`` [ranks, n] added in rank order, so all ranks have the same bits."""
        sums = by_rank[0]
        if not self._is_on_cpu and len(by_rank) > 1:
            sums = sums.new_empty(sums.shape)
            core.rank_sums_cuda(self._device, by_rank, sums)
        for other in by_rank[1:] if self._is_on_cpu else ():
            sums = sums + other
        return sums

    def sums_of_squares(self) -> Tensor:
        """Per parameter the sum of squares of the summed gradient, over all ranks; NaN or inf if any element is.
        Collective.

        Kept until a gradient changes. Made on arrival, so nothing is read again.
        """
        if self._version != self.table.version or (self._has_graph and self.factors.are_unsure):
            if self._is_on_cpu:
                everyone = self._everyone_on_cpu(self._sums_on_cpu().tobytes(), torch.float64, self.comm)
            else:
                everyone = self._everyone(self._sums_on_cuda())
            self._sums = self._over_ranks(everyone)  # the ranks' own sums are not kept: world x params
            self._version = self.table.version
        assert self._sums is not None
        return self._sums

    def _sums_on_cpu(self) -> array.array[float]:
        assert self._arrival_sums is not None
        local = array.array("d", self._arrival_sums.sums(self.table.sums))
        for index in self.table.edited(clears=False):
            again = core.sumsq([piece.grad for piece in self._params[index].pieces])
            local[index] = sum(s if not is_bad or not math.isfinite(s) else math.nan for s, is_bad in again)
        return local

    def _sums_on_cuda(self) -> Tensor:
        self._sum_edited_rows()
        held = self._uploads.get("held", torch.uint8, self.table.sums)
        own = self._new(len(self._params))
        core.param_sums_cuda(self._device, self.row_sums, *self._rows_of_params(), held, own)
        return own

    def _new(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=torch_device(self._device))

    def _rows_of_params(self) -> tuple[Tensor, Tensor]:
        """CUDA: where the rows of each parameter are in `row_sums`: offsets [params + 1] into the second, row numbers."""
        if self._row_tables is not None:
            return self._row_tables
        offsets = [0]
        for param in self._params:
            offsets.append(offsets[-1] + len(param.pieces))
        rows = [piece.row for param in self._params for piece in param.pieces]
        tables = (self._uploads.numbers("first_row_of", offsets), self._uploads.numbers("rows_of", rows))
        if not core.is_capturing(self._device):  # in a capture only replays may fill them
            self._row_tables = tables
        return tables

    def _sum_edited_rows(self) -> None:
        """CUDA: makes `row_sums` again for what was edited since its reduce-scatter. Not while reduce-scatters may
        write there."""
        edited = [piece for index in self.table.edited(clears=True) for piece in self._params[index].pieces]
        if edited:
            assert self.row_sums is not None
            again = self._new(len(edited))
            core.sumsq_cuda(self._device, [piece.grad for piece in edited], again)
            self.row_sums.index_copy_(0, self._uploads.numbers("edited", [piece.row for piece in edited]), again)

    # --- norms -------------------------------------------------------------------------------------------------------

    def norms(self, indices: Sequence[int], ord: float) -> Tensor:
        """Norms of order ``ord`` of whole gradients, as everybody sees them: [len(indices)] of `norm_dtype`, on the parameters'
        device. Collective."""
        return self._norms_of_all(ord)[self._places(indices)].to(self.norm_dtype)

    def _places(self, indices: Sequence[int]) -> Tensor:
        if self._is_on_cpu:
            return torch.tensor(indices, dtype=torch.int64, device="cpu")
        return self._uploads.numbers("indices", indices)

    def _norms_of_all(self, ord: float) -> Tensor:
        count = len(self._params)
        if ord == 2.0 and count and not self._is_on_cpu:
            norms = self._new(count)
            self._clip_on_cuda(range(count), None, norms)
            return norms
        if not count:
            return self._new(0)
        if ord == 2.0:
            raw = self.sums_of_squares().sqrt()
        else:
            everyone = self._everyone(torch.stack([self._own_power(index, ord) for index in range(count)]))
            if math.isinf(ord):
                raw = everyone.amax(0) if ord > 0 else everyone.amin(0)
            else:
                raw = self._over_ranks(everyone)
                raw = raw if ord == 0 else raw ** (1.0 / ord)
        factors = self.factors.vector()
        return raw * (factors != 0) if ord == 0 else raw * (factors.abs() * self.average)

    def _own_power(self, index: int, ord: float) -> Tensor:
        """This rank's part of a norm, 0-d: sum of |x|^ord; for ord = 0 the count of non-zeros; for +-inf the largest or
        smallest."""
        param, has_content = self._params[index], self.table.has_sum(index)
        if not has_content or not param.pieces:
            has_part = has_content or not param.info.param.numel()  # other ranks have elements of it, or nobody has any
            return self._new().fill_(math.inf if ord == -math.inf and has_part else 0.0)
        norms = torch.stack([torch.linalg.vector_norm(p.grad, ord, dtype=torch.float64) for p in param.pieces])
        if math.isinf(ord):
            return norms.amax() if ord > 0 else norms.amin()
        return norms.sum() if ord == 0 else (norms**ord).sum()

    def total_norm(self, indices: Sequence[int], ord: float) -> Tensor:
        """The norm of all the gradients in ``indices`` together: 0-d of `norm_dtype`, on the parameters' device. Collective."""
        if not indices:
            return self._new(dtype=self.norm_dtype).zero_()
        if ord != 2.0:
            return torch.linalg.vector_norm(self._norms_of_all(ord)[self._places(indices)], ord).to(self.norm_dtype)
        if not self._is_on_cpu:
            return self._clip_on_cuda(indices, None)
        seen = self.sums_of_squares() * self.factors.vector().square()  # of sums, not of rounded roots
        total = core.fold(self._chosen(indices, seen, 0.0).tolist())
        norm = math.sqrt(total) * self.average if total >= 0 else math.nan
        return torch.tensor(norm, dtype=self.norm_dtype, device="cpu")

    def _chosen(self, indices: Sequence[int], values: Tensor, other: float) -> Tensor:
        """``values`` [params] at ``indices``, ``other`` elsewhere."""
        if len(indices) == len(values):
            return values
        mask = torch.zeros(len(values), dtype=torch.bool, device="cpu")
        mask[self._places(indices)] = True
        return torch.where(mask, values, other)

    def clip(self, indices: Sequence[int], max_norm: float, ord: float) -> Tensor:
        """Clips the norm of all the gradients in ``indices`` together, and returns it as it was. Collective."""
        if ord == 2.0 and indices and not self._is_on_cpu:
            return self._clip_on_cuda(indices, max_norm)
        norm = self.total_norm(indices, ord)
        self.factors.scale(indices, clip_coefficient(max_norm, norm))
        return norm

    def _clip_on_cuda(
        self, indices: Sequence[int], max_norm: float | None, param_norms: Tensor | None = None
    ) -> Tensor:
        """The 2-norm of all in ``indices`` together; their factors times the clip coefficient where ``max_norm`` is given."""
        norm = self._new(1, dtype=self.norm_dtype)
        self.factors.clip(indices, self.sums_of_squares(), self.average, max_norm, norm, param_norms)
        return norm[0]

    def found_inf(self, found: Tensor) -> Tensor:
        """The largest ``found`` of any rank, at least 1 if any value of any gradient is inf or NaN on any rank; 0-d.
        Collective."""
        worst = self._everyone(found.detach().reshape(1)).amax()
        if self._replicate is not None:
            worst = self._everyone(worst.reshape(1), self._replicate).amax()
        sums = self.sums_of_squares()
        # Finite where their squares may not be:
        wide = [
            p.info.index for p in self._params if p.info.dtype == torch.float64 and self.table.has_sum(p.info.index)
        ]
        if wide:
            sums = torch.cat(
                [sums.index_fill(0, self._places(wide), 0.0), self._norms_of_all(math.inf)[self._places(wide)]]
            )
        is_infinite = ~torch.isfinite(sums).all()
        return torch.maximum(worst, is_infinite.to(worst.dtype))

    # --- values ------------------------------------------------------------------------------------------------------

    def full(self, index: int) -> Tensor:
        """The whole gradient as everybody sees it: float32 (float64 for a float64 parameter), the parameter's shape and
        strides. Collective."""
        param = self._params[index]
        info = param.info
        none = torch.empty(0, dtype=norm_dtype_of([info.dtype]), device=info.param.device)
        mine = torch.cat([none, *(piece.grad.to(none.dtype) for piece in param.pieces)])
        flat = join(self.comm, mine, ranges_of(param.packing, param.packed))
        return flat.mul_(self.factors[index] * self.average).as_strided(info.param.shape, info.stride)
