"""What stock code asks of placeholders in ``p.grad`` (`grad`), answered out of the window and the shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bucketwheel.device import CPU
from bucketwheel.grads.window import GradWindow

__all__ = ["GradSync"]


class GradSync(GradWindow):
    """The gradients of one rank, with what stock code does to them. Implements `grad.GradOwner`."""

    def _close_for(self, what: str, indices: Sequence[int]) -> None:
        """Closes the window and verifies that all ranks ask for the same gradients."""
        self._agreement.expect_same_question(what, indices, self.close(what))

    def norms(self, indices: Sequence[int], ord: float) -> Tensor:
        with self._lock:
            self._close_for("norms", indices)
            return self.reduced.norm_tensor(indices, ord)

    def scale(self, indices: Sequence[int], factor: float | Tensor) -> None:
        """A factor on the device that is exactly 0 is not supported while gradients still arrive (`GradOwner.scale`)."""
        with self._lock:
            if not isinstance(factor, Tensor) or self.comm.device == CPU:
                factor = float(factor)
            is_captured = self._ask("scaling gradients")
            content = self.reduced.content
            unknown = [i for i in indices if self._schedule.is_private(i) and not content[i] and i not in self._kept]
            if unknown:
                self._agreement.refuse_private("scale", unknown)
            for index in indices:
                if index in self._kept:
                    self._kept[index].mul_(factor)
            rest = [i for i in indices if i not in self._kept]
            self._arrivals.disable()  # until the window ends, what arrives is to be divided by the factor
            is_zero = not isinstance(factor, Tensor) and factor == 0.0
            if is_zero and self._is_open:
                self.zero(rest)  # what comes later cannot be divided by a pending 0
                return
            self.reduced.scale(rest, factor)
            for index in rest if is_zero else ():  # multiplied now: inf * 0 is NaN, as torch has it
                self.reduced.flush_factor(index)
            if not self._is_open:
                if is_captured and not isinstance(factor, Tensor):
                    self._agreement.expect_all_captured(f"scale by {factor}")  # in a graph nobody will compare it
                self.reduced.settle()

    def unscale(self, indices: Sequence[int], found_inf: Tensor, inv_scale: Tensor) -> None:
        """Every gradient of the same dtypes that any rank has, whether this rank could list it or not.

        The scaler makes one call per dtype.
        """
        dtypes = {self.infos[i].dtype for i in indices}
        self.captures.refuse_scaler()
        why = f"unscale {' and '.join(sorted(map(str, dtypes)))}"
        with self._lock:
            self.close(why)
            held = [i for i, is_held in enumerate(self.held) if is_held and self.infos[i].dtype in dtypes]
            found_inf.copy_(self.reduced.found_inf(found_inf))
            self.reduced.scale(held, inv_scale)

    def clamp(self, indices: Sequence[int], low: float | None, high: float | None) -> None:
        with self._lock, torch.no_grad():
            self._close_for("clamp", indices)
            for index in indices:
                self.reduced.clamp(index, low, high)
            self.reduced.settle()

    def zero(self, indices: Sequence[int]) -> None:
        with self._lock, torch.no_grad():
            for index in indices:
                if index in self._kept:
                    self._kept[index].zero_()
                elif self._is_open:
                    self._arrive(index, torch.zeros_like(self.infos[index].param), add=False, launch=False)
                else:
                    self.reduced.replace_by_zero(index)
            if not self._is_open:
                self.reduced.settle()

    def full(self, index: int) -> Tensor | None:
        """The whole gradient of a parameter, None where no rank has one. Collective."""
        with self._lock, torch.no_grad():
            self.close(f"full_grad of {self.infos[index].name!r}")
            return self.reduced.full(index) if self.held[index] else None
