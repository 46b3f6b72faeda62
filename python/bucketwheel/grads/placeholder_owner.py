"""What a placeholder in ``p.grad`` (`bucketwheel.grads.placeholder`) asks of the optimizer that holds the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["GradOwner"]


class GradOwner(Protocol):
    """What holds the gradients behind placeholders; it names a parameter by the index that it gave to `ShardedGrad`.

    The value of a gradient is what plain data-parallel training would leave in ``p.grad``: reduced over all ranks.
    Calls take effect in program order: a factor applies to what was accumulated before it and not to what comes after.
    *Collective* methods are called by all ranks in the same order with the same arguments; the owner detects and names
    a rank that does not. *Local* methods never block. Tensor arguments are borrowed for the call: what is kept must be
    copied. Errors pass through to the caller of the stock operation unchanged.
    """

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add this rank's contribution ``grad`` (the parameter's shape and dtype, any strides). Local.

        Called from backward, on whatever thread and stream autograd runs, just before the parameter's post-accumulate
        hook, which then finds the placeholder in ``p.grad``; or by ``p.grad += x``.
        """

    def norms(self, indices: Sequence[int], ord: float) -> Tensor:
        """Return the norms of order ``ord`` (2, 1, inf, any float) of whole gradients. Collective.

        The result has shape ``[len(indices)]``, a floating dtype at least as precise as the parameters', their device,
        and equal bits on all ranks. Loops ask for one parameter at a time, so compute all at the first call and
        keep them until a gradient changes.
        """

    def scale(self, indices: Sequence[int], factor: float | Tensor) -> None:
        """Multiply gradients by ``factor``, the same on every rank. Local.

        ``factor`` is a float, or a private 0-d tensor where reading it would synchronize with a device. Such a tensor
        must not be exactly 0 while gradients still arrive before the next step: nobody reads it, so what arrives is
        divided by it, to be multiplied with the rest later.
        """

    def unscale(self, indices: Sequence[int], found_inf: Tensor, inv_scale: Tensor) -> None:
        """Multiply by ``inv_scale`` and set ``found_inf`` to 1 if any value on any rank is not finite. Collective.

        Both are fp32 tensors of one element. ``found_inf`` is never reset to 0: it may come in as 1, from other
        gradients of this rank, and goes out equal on all ranks, the largest that came in or was found.
        """

    def clamp(self, indices: Sequence[int], low: float | None, high: float | None) -> None:
        """Limit values to ``[low, high]``; None is no limit, NaN stays NaN. Collective: it needs reduced values."""

    def zero(self, indices: Sequence[int]) -> None:
        """Make gradients zero. They still exist: the next step updates their parameters. Local."""
