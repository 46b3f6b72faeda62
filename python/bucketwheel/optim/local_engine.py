"""Local: the fused AdamW of one process. No communication, no flat memory; ``p.grad`` stays a plain tensor.

Clipping is folded into the step here too: `clip` only measures, and `step` multiplies. A gradient that was clipped must
not change in between; that is checked by its version counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bucketwheel.grads.reduced import clip_coefficient
from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.kernels.ops import l2_norm
from bucketwheel.layout.flat_params import ParamInfo, expect_dense, expect_same_memory_kind
from bucketwheel.layout.masters import follow_param, take_param
from bucketwheel.layout.precision import Precision, norm_dtype_of
from bucketwheel.optim import report

__all__ = ["LocalEngine"]

_UNKNOWN_VERSION = -1


class LocalEngine:
    """States shaped like the parameters, one row of the kernel for each."""

    world = 1

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        *,
        precision: Precision,
        is_static: bool = False,
        on_external_update: str = "resync",
    ) -> None:
        self.precision = precision
        self._is_static = is_static
        self._on_external_update = on_external_update
        self._clips: dict[int, tuple[Tensor, int, float]] = {}  # gradient, its version when clipped, factor
        self.infos: list[ParamInfo] = []
        self.states: list[dict[str, Tensor]] = []
        self._versions: list[int] = []
        self.steps = torch.zeros(0, dtype=torch.int64)
        self.add(infos)

    def add(self, infos: Sequence[ParamInfo], groups: Sequence[str] = (), why: str = "") -> None:
        """More parameters, whose indices go on where the others end."""
        expect_dense(infos)
        self.infos += infos
        self.states += [_new_state(info.param.detach(), self.precision) for info in infos]
        self.norm_dtype = norm_dtype_of(info.dtype for info in self.infos)
        device = self.infos[0].param.device if self.infos else None
        self.steps = torch.cat([self.steps.to(device), torch.zeros(len(infos), dtype=torch.int64, device=device)])
        self._static_used: list[bool] | None = None
        # Rows of one dtype next to each other: a kernel launch for each run.
        self._order = sorted(range(len(self.infos)), key=lambda i: str(self.infos[i].dtype))
        self._versions += [info.param._version for info in infos]
        self._bind()

    def watch(self, frozen: Sequence[Tensor]) -> None:
        """In one process the gradients of parameters that may be trained later are whole ones."""

    def _bind(self) -> None:
        self._rows = self._new_rows()
        self._pointers = [info.param.data_ptr() for info in self.infos]
        for info, state in ((self.infos[i], self.states[i]) for i in self._order):
            param = info.param.detach()
            self._rows.add(
                info.index,
                info.group,
                param,
                None,
                state["exp_avg"],
                state["exp_avg_sq"],
                state.get("master_param"),
                max_exp_avg_sq=state.get("max_exp_avg_sq"),
                remainder=state.get("remainder"),
            )

    def _new_rows(self) -> Any:
        return AdamRows(self.steps, amsgrad=self.precision.amsgrad)

    def step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self._follow_edits()
        grads = [self._grad(info) for info in self.infos]
        used = [grad is not None for grad in grads]
        self._expect_static(used)
        factors = self._pending_factors()
        self._rows.table.set_grads([grads[i] for i in self._order])
        self._rows.begin_step(param_groups, used, factors)
        self._rows.step()
        self._rows.table.clear_grads()  # zero_grad() is to free their memory
        updated = [info.param for info, grad in zip(self.infos, grads, strict=True) if grad is not None]
        torch.autograd.graph.increment_version(updated)  # D14
        self._versions = [info.param._version for info in self.infos]

    def _expect_static(self, used: list[bool]) -> None:
        """RuntimeError naming a parameter if ``static_graph`` was promised and other parameters have gradients than before."""
        if not self._is_static or not any(used):  # a step without any gradient does nothing
            return
        if self._static_used is None:
            self._static_used = used
        for info, before, now in zip(self.infos, self._static_used, used, strict=True):
            if before != now:
                raise RuntimeError(
                    f"static_graph=True, but parameter {info.name!r} has {'a' if now else 'no'} gradient in this step and had "
                    f"{'one' if before else 'none'} in the first"
                )

    def _pending_factors(self) -> Any:
        """What clipping multiplies each gradient by, in the form that the rows take."""
        return [self._clip_of(info, info.param.grad) for info in self.infos]

    def _grad(self, info: ParamInfo) -> Tensor | None:
        grad = info.param.grad
        if grad is None:
            return None
        if grad.layout != torch.strided:
            raise RuntimeError(f"sparse gradients are not supported (parameter {info.name!r}); use torch's SparseAdam")
        # Kernels read memory, but torch negates some tensors when they are read, and others are zeros without memory. They
        # read 16-bit gradients of float32 parameters as they are.
        dtype = info.dtype if torch.float64 in (grad.dtype, info.dtype) else grad.dtype
        is_readable = grad.dtype == dtype and not grad.is_neg() and not grad._is_zerotensor()
        if grad.stride() != info.param.stride() or not is_readable:
            like = info.param
            grad = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device).copy_(grad)
        return grad.detach()

    def _follow_edits(self) -> None:
        """Parameters that were moved are bound again; masters of parameters that were written to are read again."""
        edited = []
        for i, (info, state) in enumerate(zip(self.infos, self.states, strict=True)):
            expect_same_memory_kind(info, state["exp_avg"].shape, state["exp_avg"].stride())
            is_moved = info.param.data_ptr() != self._pointers[i]
            if info.param._version != self._versions[i] or is_moved:
                edited.append(i)
                if self._on_external_update == "error" and (is_moved or self._versions[i] != _UNKNOWN_VERSION):
                    raise RuntimeError(
                        f"parameter {info.name!r} was modified since the optimizer's last step (on_external_update='error'); call "
                        "optimizer.reload_master_params() if that was meant"
                    )
        if self._on_external_update == "ignore":  # but what follows a loaded state is no edit
            edited = [i for i in edited if self._versions[i] == _UNKNOWN_VERSION]
        self._take_edits(edited)

    def _take_edits(self, edited: Sequence[int], *, whole: bool = False) -> None:
        for i in edited:
            (take_param if whole else follow_param)(self.infos[i].param.detach(), self.states[i])
        if any(info.param.data_ptr() != pointer for info, pointer in zip(self.infos, self._pointers, strict=True)):
            self._bind()

    def reload_masters(self) -> None:
        self._take_edits(range(len(self.infos)), whole=True)
        self._versions = [info.param._version for info in self.infos]

    def follow_loaded_state(self) -> None:
        """The model may be loaded after the optimizer, so masters are compared with the parameters at the next step."""
        self._versions = [_UNKNOWN_VERSION] * len(self.infos)

    # --- clipping ----------------------------------------------------------------------------------------------------

    def total_norm(self, indices: Sequence[int] | None, ord: float) -> Tensor:
        return torch.tensor(self._total_norm(indices, ord), dtype=self.norm_dtype)

    def clip(self, indices: Sequence[int] | None, max_norm: float, ord: float) -> Tensor:
        norm = self.total_norm(indices, ord)
        self.clip_with(indices, clip_coefficient(max_norm, norm))
        return norm

    def clip_with(self, indices: Sequence[int] | None, coefficient: Tensor) -> None:
        factor = float(coefficient)
        if factor != 1.0:
            self._scale(indices, factor)

    def _total_norm(self, indices: Sequence[int] | None, ord: float) -> float:
        grads = [(i, self.infos[i].param.grad) for i in (range(len(self.infos)) if indices is None else indices)]
        held = [(i, grad) for i, grad in grads if grad is not None and grad.numel()]
        if not held:
            return 0.0
        if ord == 2.0 and not self._clips:
            norm = l2_norm([grad.clone() if grad._is_zerotensor() else grad.contiguous() for _, grad in held])
            assert isinstance(norm, Tensor)
            return float(norm)
        norms = torch.stack(
            [
                torch.linalg.vector_norm(grad, ord, dtype=torch.float64) * self._clip_of(self.infos[i], grad)
                for i, grad in held
            ]
        )
        return float(torch.linalg.vector_norm(norms, ord))

    def _scale(self, indices: Sequence[int] | None, factor: float) -> None:
        for i in range(len(self.infos)) if indices is None else indices:
            grad = self.infos[i].param.grad
            if grad is not None:
                before = self._clip_of(self.infos[i], grad)
                self._clips[i] = (grad, grad._version, before * factor)

    def _clip_of(self, info: ParamInfo, grad: Tensor | None) -> float:
        if not self._is_clipped(info, grad):
            return 1.0
        _, _, factor = self._clips[info.index]
        return factor

    def _is_clipped(self, info: ParamInfo, grad: Tensor | None) -> bool:
        """Whether ``grad`` is the gradient that was clipped. RuntimeError if it was written to since."""
        if info.index not in self._clips or grad is None:
            return False
        clipped, version, _ = self._clips[info.index]
        if clipped is not grad:
            return False
        if grad._version != version:
            raise RuntimeError(
                f"the gradient of {info.name!r} changed after clip_grad_norm_; clip after the last backward, right before step, "
                "and drop gradients by optimizer.zero_grad()"
            )
        return True

    # --- what only a sharded optimizer has to do ---------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool) -> None:
        self._clips.clear()
        for info in self.infos:
            if set_to_none:
                info.param.grad = None
            elif info.param.grad is not None:
                info.param.grad = info.param.grad.detach().zero_()

    def close_window(self) -> None:
        """Nothing is pending in one process."""

    def start_window(self, indices: Sequence[int]) -> None:
        """Nor is there anything to start."""

    def no_sync(self) -> nullcontext[None]:
        return nullcontext()

    def param_sync(self, indices: Sequence[int] | None = None) -> None:
        """Parameters are never behind in one process."""

    def prefetch_params(self, model: torch.nn.Module) -> Callable[[], None]:
        return lambda: None

    def full_grad(self, index: int) -> Tensor | None:
        grad = self.infos[index].param.grad
        return None if grad is None else widened(grad, self.infos[index].dtype) * self._clip_of(self.infos[index], grad)

    def owned_ranges(self, index: int) -> list[tuple[int, int]]:
        return [(0, self.infos[index].param.numel())]

    def values_of(self, index: int) -> Tensor:
        return self.infos[index].param.detach()

    def memory(self) -> dict[str, int]:
        return report.memory_of_local(self.infos, self.states, self.steps)

    def describe(self) -> str:
        return report.describe_local(self.infos, self.states, self.precision)

    def abort(self, reason: str) -> None:
        """There is nobody to tell."""

    def close(self) -> None:
        self._clips.clear()


def widened(grad: Tensor, param_dtype: torch.dtype) -> Tensor:
    """``grad`` as `full_grad` shows it: float32, or float64 that of a float64 parameter."""
    return grad.detach().to(torch.float64 if param_dtype == torch.float64 else torch.float32)


def _new_state(param: Tensor, precision: Precision) -> dict[str, Tensor]:
    kept = precision.kept_of(param.dtype)
    state = {name: torch.zeros_like(param, dtype=dtype) for name, dtype in kept.items()}
    follow_param(param, state)
    return state
