"""Reduced gradients on CUDA: what `reduced` is on the CPU, with everything that depends on values kept on the device.

Sums of squares, norms and factors are device memory; nothing here waits for the device. A factor that is a tensor (a
clip coefficient, a loss scale) is multiplied into `_on_device`, one float64 a parameter, which the Adam kernel reads; one
that is a number stays on the host, where ranks compare it, until the device needs it (`_absorb`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.device import Uploads, torch_device
from bucketwheel.grads.graph_capture import capture_id, is_capturing
from bucketwheel.grads.reduced import ReducedGrads
from bucketwheel.native import core

__all__ = ["ReducedGradsCuda"]


class ReducedGradsCuda(ReducedGrads):
    """The gradients of ``param_count`` parameters. ``row_sums``: float64; reduce-scatters write the sums of squares of
    shard spans there, and `ShardPiece.row` is the place of a piece's."""

    def __init__(
        self,
        comm: Communicator,
        average: float,
        param_count: int,
        row_sums: Tensor,
        replicate: Communicator | None = None,
    ) -> None:
        super().__init__(comm, average, replicate)
        self._device = comm.device
        self.torch_device = torch_device(comm.device)
        self.row_sums = row_sums
        self._on_device = self._new(param_count).fill_(1.0)
        self._scaled: set[int] = set()  # parameters whose entry in _on_device may differ from 1
        self._to_reset: set[int] = set()  # those whose entry is left over: to become 1 before _on_device is used
        self._rows: tuple[Tensor, Tensor] | None = None
        self._uploads = Uploads(self._device)
        # Perhaps, since there has been a capture: the host does not know what the device holds. [Note: captured windows]
        self._is_replayed = False
        self._known_in = 0  # the capture in which all factors have become 1: in the rest of that it does
        # A window has ended in a capture: on all ranks, while a capture may fail on some before that.
        self._has_graph = False

    def _new(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def carry_over(self, old: ReducedGrads) -> None:
        assert isinstance(old, ReducedGradsCuda)
        super().carry_over(old)
        self._on_device[: len(old._params)].copy_(old._on_device)
        self._scaled, self._to_reset = old._scaled, old._to_reset

    @property
    def bookkeeping_bytes(self) -> int:
        """And, on the device, factors and the sums of squares of spans."""
        return super().bookkeeping_bytes + self._on_device.nbytes + self.row_sums.nbytes

    # --- factors -----------------------------------------------------------------------------------------------------

    def has_factor(self, index: int) -> bool:
        return index in self._scaled or super().has_factor(index)

    def visible_factor(self, index: int) -> float | Tensor:
        known = super().visible_factor(index)
        return self._on_device[index] * known if self._is_on_device(index) else known

    def _is_on_device(self, index: int) -> bool:
        """Whether the entry in `_on_device` counts, and may not be 1."""
        return index in self._scaled or (index not in self._to_reset and self._is_unsure())

    def _is_unsure(self) -> bool:
        """Whether a replay may have changed what the host knows."""
        return self._is_replayed and (self._known_in == 0 or capture_id(self._device) != self._known_in)

    def reset_factor(self, index: int) -> None:
        super().reset_factor(index)
        if self._is_on_device(index):
            self._scaled.discard(index)
            self._to_reset.add(index)

    def set_content(self, held: bytes) -> None:
        super().set_content(held)
        self._has_graph = self._has_graph or (self._is_replayed and is_capturing(self._device))
        self.settle()

    def settle(self) -> None:
        if self._is_replayed:
            self._absorb()
            self._sum_edited()

    def reset_all_factors(self) -> None:
        super().reset_all_factors()
        self._known_in = capture_id(self._device)
        self._is_replayed = self._is_replayed or self._known_in != 0
        if self._is_replayed:
            self._on_device.fill_(1.0)
            self._to_reset.clear()
        else:
            self._to_reset |= self._scaled
        self._scaled.clear()

    def _apply_resets(self) -> None:
        """All at once: one operation, however many parameters were clipped."""
        if not self._to_reset:
            return
        if self._scaled or self._is_replayed:
            mask = self._uploads.mask("reset", len(self._params), self._to_reset).bool()
            self._on_device.copy_(torch.where(mask, 1.0, self._on_device))
        else:
            self._on_device.fill_(1.0)
        self._to_reset.clear()

    def scale(self, indices: Iterable[int], factor: float | Tensor) -> None:
        if not isinstance(factor, Tensor):
            super().scale(indices, factor)
            return
        self._apply_resets()
        chosen = list(indices)
        factor = factor.detach().to(torch.float64).reshape(())
        if len(chosen) == len(self._params):
            self._on_device.mul_(factor)
        else:
            self._on_device.mul_(
                torch.where(self._uploads.mask("scale", len(self._params), chosen).bool(), factor, 1.0)
            )
        self._scaled.update(chosen)

    def flush_factor(self, index: int, remaining: float = 1.0) -> None:
        if not self._is_on_device(index):
            super().flush_factor(index, remaining)
            return
        for piece in self._params[index].pieces:
            piece.grad.mul_(self._on_device[index] * (self._factors[index] / remaining))
        self.reset_factor(index)
        self._factors[index] = remaining
        self.mark_edited([index])

    def _absorb(self) -> None:
        """Moves the factors that the host knows to the device. Where ranks compare what the host knows, at collective calls
        only."""
        self._apply_resets()
        known = self.factors()
        if not known:
            return
        self._on_device.mul_(self._uploads.get("factors", torch.float64, known))
        self._scaled.update(index for index, factor in enumerate(self._factors) if factor != 1.0)
        self.set_factors(b"")

    def pending_factors(self) -> Tensor:
        self._absorb()
        return self._on_device

    # --- values ------------------------------------------------------------------------------------------------------

    def _row_tables(self) -> tuple[Tensor, Tensor]:
        """Where the rows of each parameter are in `row_sums`: offsets [params + 1] into the second, row numbers."""
        if self._rows is None:
            rows = [piece.row for param in self._params for piece in param.pieces]
            offsets = [0]
            for param in self._params:
                offsets.append(offsets[-1] + len(param.pieces))
            tables = (self._uploads.numbers("first_row_of", offsets), self._uploads.numbers("rows_of", rows))
            if is_capturing(self._device):
                return tables  # perhaps uploaded by each replay alone
            self._rows = tables
        return self._rows

    def _sum_edited(self) -> None:
        """Makes `row_sums` again for what was edited since its reduce-scatter. Not while reduce-scatters may write there."""
        flags = zip(self._edited, self._content, self._params, strict=True)
        edited = [piece for is_edited, has, param in flags if is_edited and has for piece in param.pieces]
        self._edited[:] = bytes(len(self._edited))
        if edited:
            again = self._new(len(edited))
            core.sumsq_cuda(self._device, [piece.grad for piece in edited], again)
            rows = self._uploads.numbers("edited", [piece.row for piece in edited])
            self.row_sums.index_copy_(0, rows, again)

    def sums_of_squares(self) -> Tensor:
        # What the ranks say goes as soon as it is added up: what is kept does not grow with the world.
        if self._sums is None or (self._has_graph and self._is_unsure()):
            self._sum_edited()
            has_content = (i for i, has in enumerate(self._content) if has)
            held = self._uploads.mask("held", len(self._params), has_content)
            own = self._new(len(self._params))
            core.param_sums_cuda(self._device, self.row_sums, *self._row_tables(), held, own)
            self._sums = self._added(self._gather(own))
        return self._sums

    def _added(self, by_rank: Tensor) -> Tensor:
        """[params]: ``by_rank``, [world, params], added in rank order."""
        if len(by_rank) == 1:
            return by_rank[0]
        sums = self._new(by_rank.shape[1])
        core.rank_sums_cuda(self._device, by_rank, sums)
        return sums

    def _gather(self, own: Tensor, comm: Communicator | None = None) -> Tensor:
        """[ranks, numel]: every rank's ``own``; of those of ``comm``, or among whom gradients are sharded."""
        comm = self.comm if comm is None else comm
        gathered = self._new(comm.size, own.numel(), dtype=own.dtype)
        comm.all_gather_into(gathered, own).wait()
        return gathered

    def _clip(self, indices: Sequence[int], max_norm: float | None, param_norms: Tensor | None = None) -> Tensor:
        """The norm of all in ``indices`` together; their factors times the clip coefficient where ``max_norm`` is given."""
        self._absorb()
        norm = self._new(1, dtype=self.norm_dtype)
        core.clip_cuda(
            self._device,
            self.sums_of_squares(),
            self._on_device,
            self._uploads.mask("chosen", len(self._params), indices),
            self.average,
            max_norm,
            norm,
            param_norms,
        )
        return norm[0]

    def norm_tensor(self, indices: Sequence[int], ord: float) -> Tensor:
        if not self._params:
            return self._new(0, dtype=self.norm_dtype)
        if ord == 2.0:
            norms = self._new(len(self._params))
            self._clip(range(len(self._params)), None, norms)
        else:
            norms = self._other_norms(ord)
        return norms.index_select(0, self._uploads.numbers("indices", indices)).to(self.norm_dtype)

    def _other_norms(self, ord: float) -> Tensor:
        """Norms of an order other than 2, of every parameter."""
        self._absorb()
        everyone = self._gather(torch.stack([self._power_on_device(i, ord) for i in range(len(self._params))]))
        if math.isinf(ord):
            raw = everyone.amax(0) if ord > 0 else everyone.amin(0)
        else:
            raw = everyone[0]
            for other in everyone[1:]:
                raw = raw + other
            raw = raw if ord == 0 else raw ** (1.0 / ord)
        return raw * (self._on_device != 0) if ord == 0 else raw * self._on_device.abs() * self.average

    def _power_on_device(self, index: int, ord: float) -> Tensor:
        """`ReducedGrads._local_power` as a 0-d tensor."""
        param, has_content = self._params[index], bool(self._content[index])
        if not has_content or not param.pieces:
            no_part = math.inf if ord == -math.inf and (has_content or not param.info.param.numel()) else 0.0
            return self._new().fill_(no_part)
        norms = torch.stack([torch.linalg.vector_norm(p.grad, ord, dtype=torch.float64) for p in param.pieces])
        if math.isinf(ord):
            return norms.amax() if ord > 0 else norms.amin()
        return norms.sum() if ord == 0 else (norms**ord).sum()

    def total_norm_tensor(self, indices: Sequence[int], ord: float) -> Tensor:
        if not indices:
            return self._new(dtype=self.norm_dtype).zero_()
        if ord == 2.0:
            return self._clip(indices, None)
        return torch.linalg.vector_norm(self.norm_tensor(indices, ord), ord)

    def clip(self, indices: Sequence[int], max_norm: float, ord: float) -> Tensor:
        if not indices or ord != 2.0:
            return super().clip(indices, max_norm, ord)
        norm = self._clip(indices, max_norm)
        self._scaled.update(indices)
        return norm

    def found_inf(self, found: Tensor) -> Tensor:
        """1 where any value of any gradient is inf or NaN on any rank or any rank's ``found`` is not 0; 0-d. Collective."""
        others = self._gather(found.reshape(1)).amax()
        if self.replicate is not None:
            others = self._gather(others.reshape(1), self.replicate).amax()
        wide = self._wide()
        narrow_sums = self.sums_of_squares()
        if wide:
            narrow_sums = narrow_sums.masked_fill(self._uploads.mask("wide", len(self._params), wide).bool(), 0.0)
        is_finite = torch.isfinite(narrow_sums).all()
        if wide:
            is_finite = is_finite & torch.isfinite(self.norm_tensor(wide, math.inf)).all()
        return torch.maximum(others, (~is_finite).to(found.dtype))
