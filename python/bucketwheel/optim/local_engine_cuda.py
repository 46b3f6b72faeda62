"""Local on CUDA: `local` with norms, clip factors and step counts on the device, so that nothing waits for it.

Every call may be captured in a CUDA graph (``capturable=True``); the replays measure, clip and step anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.device import Uploads, device_index, index_of
from bucketwheel.errors import CaptureError
from bucketwheel.grads.reduced import clip_coefficient
from bucketwheel.kernels.adam_rows_cuda import AdamRowsCuda
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.precision import Precision
from bucketwheel.native import core
from bucketwheel.optim.local_engine import LocalEngine, widened

__all__ = ["LocalEngineCuda"]


class LocalEngineCuda(LocalEngine):
    """Parameters of one CUDA device."""

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        *,
        device: torch.device,
        precision: Precision,
        is_static: bool = False,
        is_capturable: bool = False,
        on_external_update: str = "resync",
    ) -> None:
        self._is_capturable = is_capturable
        self._device = device_index(device)
        self._torch_device = device
        # The clip factor of each gradient, where `_clips` says that it was clipped; else 1, or left over.
        self._factors = torch.ones(0, dtype=torch.float64, device=device)
        self._sums_table = core.SumsqCudaTable(self._device)
        self._uploads = Uploads(self._device)
        super().__init__(infos, precision=precision, is_static=is_static, on_external_update=on_external_update)

    def add(self, infos: Sequence[ParamInfo], groups: Sequence[str] = (), why: str = "") -> None:
        super().add(infos, groups, why)
        self._factors = torch.cat([self._factors, self._factors.new_ones(len(infos))])

    def _new_rows(self) -> AdamRowsCuda:
        return AdamRowsCuda(self.steps, self._device, amsgrad=self.precision.amsgrad)

    def _drop_stale_clips(self) -> bool:
        """Factors of gradients that are no longer there become 1. False: none is there, and all are to be taken for 1.

        They are set to 1 by the work that reads them next, so that a captured clip begins with that in every replay.
        """
        valid = {i for i in self._clips if self._is_clipped(self.infos[i], self.infos[i].param.grad)}
        if 0 < len(valid) < len(self._clips):
            mask = self._uploads.mask("valid", len(self.infos), valid).bool()
            self._factors.copy_(torch.where(mask, self._factors, 1.0))
        self._clips = {i: self._clips[i] for i in valid}
        return bool(valid)

    def _begin_capture(self) -> None:
        """A clip that is captured starts from gradients that nobody has clipped: each replay brings new ones."""
        if core.is_capturing(self._device):
            self._clips.clear()

    def step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        if not self._is_capturable and core.is_capturing(self._device):
            raise CaptureError(
                "step under CUDA graph capture needs an optimizer made with capturable=True and static_graph=True"
            )
        super().step(param_groups)
        self._begin_capture()  # what was captured has clipped nothing yet

    def _pending_factors(self) -> Tensor | None:
        if not self._clips:
            return None
        if any(not self._is_clipped(self.infos[i], self.infos[i].param.grad) for i in self._clips):
            self._drop_stale_clips()
        return self._factors if self._clips else None

    # --- norms -------------------------------------------------------------------------------------------------------

    def _held(self, indices: Iterable[int] | None) -> list[int]:
        chosen = range(len(self.infos)) if indices is None else indices
        return [i for i in chosen if self.infos[i].param.grad is not None]

    def _sums(self, held: Sequence[int]) -> Tensor:
        """[parameters], float64: the sums of squares of the gradients of ``held``, 0 for the others."""
        grads = [self._grad(self.infos[i]) for i in held]
        sums = torch.empty(len(held), dtype=torch.float64, device=self._torch_device)
        core.sumsq_cuda(self._device, grads, sums, None, self._sums_table)
        if len(held) == len(self.infos):
            return sums
        places = self._uploads.numbers("held", held)
        return torch.zeros_like(self._factors).index_copy_(0, places, sums)

    def _measure(self, held: Sequence[int], max_norm: float | None) -> Tensor:
        """The 2-norm of ``held`` together; their factors times the clip coefficient where ``max_norm`` is given."""
        has_clips = self._drop_stale_clips()
        norm = torch.empty(1, dtype=self.norm_dtype, device=self._torch_device)
        chosen = self._uploads.mask("chosen", len(self.infos), held)
        core.clip_cuda(self._device, self._sums(held), self._factors, chosen, 1.0, max_norm, norm, resets=not has_clips)
        return norm[0]

    def total_norm(self, indices: Sequence[int] | None, ord: float) -> Tensor:
        held = self._held(indices)
        if not held:
            return torch.zeros((), dtype=self.norm_dtype, device=self._torch_device)
        if ord == 2.0:
            return self._measure(held, None)
        if not self._drop_stale_clips():
            self._factors.fill_(1.0)
        norms = []
        for i in held:
            grad = self.infos[i].param.grad
            assert grad is not None
            if grad.numel():
                norms.append(torch.linalg.vector_norm(grad, ord, dtype=torch.float64) * self._factors[i])
        if not norms:
            return torch.zeros((), dtype=self.norm_dtype, device=self._torch_device)
        return torch.linalg.vector_norm(torch.stack(norms), ord).to(self.norm_dtype)

    def clip(self, indices: Sequence[int] | None, max_norm: float, ord: float) -> Tensor:
        self._begin_capture()
        held = self._held(indices)
        if held and ord == 2.0:
            norm = self._measure(held, max_norm)
        else:
            norm = self.total_norm(indices, ord)
            self._multiply(held, clip_coefficient(max_norm, norm))
        self._note_clipped(held)
        return norm

    def clip_with(self, indices: Sequence[int] | None, coefficient: Tensor) -> None:
        self._begin_capture()
        held = self._held(indices)
        if not self._drop_stale_clips():
            self._factors.fill_(1.0)
        self._multiply(held, coefficient)
        self._note_clipped(held)

    def _multiply(self, held: Sequence[int], coefficient: Tensor) -> None:
        """Factors that are all valid; ``coefficient`` is on the device, or on the host, which nothing has to wait for."""
        chosen = self._uploads.mask("chosen", len(self.infos), held).bool()
        if index_of(coefficient) != self._device:
            coefficient = self._factors.new_full((), float(coefficient))
        self._factors.mul_(torch.where(chosen, coefficient.to(torch.float64), 1.0))

    def _note_clipped(self, held: Sequence[int]) -> None:
        for i in held:
            grad = self.infos[i].param.grad
            assert grad is not None
            self._clips[i] = (grad, grad._version, 1.0)

    def full_grad(self, index: int) -> Tensor | None:
        grad = self.infos[index].param.grad
        if grad is None:
            return None
        is_clipped = self._is_clipped(self.infos[index], grad)
        wide = widened(grad, self.infos[index].dtype)
        # The factor in its dtype: with a 0-d gradient a float64 one would make the product float64.
        return wide * (self._factors[index].to(wide.dtype) if is_clipped else 1.0)
