"""Local engine: the fused AdamW of one process. No communication, no flat memory; ``p.grad`` stays a plain tensor.

Clipping is folded into the step here too: `clip` only measures, and `step` multiplies. A gradient that was clipped must
not change in between; that is checked by its version counter. On CUDA norms, clip factors and step counts are on the
device, so that nothing waits for it, and every call may be captured in a CUDA graph (``capturable=True``): the replays
measure, clip and step anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from bucketwheel.device import CPU, Uploads, device_index
from bucketwheel.errors import CaptureError
from bucketwheel.grads.reduced import clip_coefficient
from bucketwheel.kernels.adam_rows import AdamRows, GradFactors
from bucketwheel.kernels.ops import l2_norm
from bucketwheel.layout.flat_params import ParamInfo, expect_dense, expect_same_memory_kind
from bucketwheel.layout.masters import follow_param, take_param
from bucketwheel.layout.owners import claim, expect_free, named, release
from bucketwheel.layout.precision import Precision, norm_dtype_of
from bucketwheel.layout.shard_memory import ShardMemory, ShardSpace, StepInputs
from bucketwheel.native import core
from bucketwheel.optim import report
from bucketwheel.optim.external_edits import ExternalEdits
from bucketwheel.optim.param_groups import OptimizerOptions
from bucketwheel.optim.shown_state import StateEdits
from bucketwheel.optim.take_over import take_over


class LocalEngine:
    """States shaped like the parameters, one row of the kernel for each. All parameters are on ``device``."""

    world = 1
    part = (0, 1)
    ranks = (0, 1)
    are_threads = False
    timeout_s = 0.0  # there is nobody to wait for
    _natives: tuple[Any, ...] = ()

    def __init__(self, infos: Sequence[ParamInfo], *, device: torch.device, options: OptimizerOptions) -> None:
        self.options = options
        self.precision = options.precision
        self._torch_device = device
        self._device = device_index(device)
        self._is_static = options.static_graph
        self._is_capturable = options.capturable
        self._uploads = Uploads(self._device)
        self._sums_table = None if self._device == CPU else core.SumsqCudaTable(self._device)
        self._edits = ExternalEdits(options.on_external_update)
        self.follows_params = self._edits.resync
        self.infos: list[ParamInfo] = []
        self.states: list[dict[str, Tensor]] = []
        self.steps = torch.zeros(0, dtype=torch.int64, device=device)
        self.write_observers: list[Callable[[Collection[int] | None], None]] = []  # as of `ShardedEngine`
        self._factors = GradFactors(core.GradTable(self._device, 0), self._device)
        self.step_observers: list[Callable[[StepInputs], Callable[[], None] | None]] = []  # as in `ShardedEngine`
        # Which gradients were clipped: the tensor and its version then; by what says `_factors`. An entry goes with its
        # gradient: when p.grad is another one, by `zero_grad`, and in a capture when that begins and has stepped.
        self._clips: dict[int, tuple[Tensor, int]] = {}
        self._clipped_in = 0  # the capture in which they were clipped, 0: in none
        # The gradients that the last step has used, each with its version then; until the next step.
        self._used: list[tuple[weakref.ref[Tensor], int]] = []
        self.closed = ""  # why calls are refused; from `close`
        expect_dense(infos)
        take_over(infos, None)
        self.change((), infos)

    def expect_changeable(self, new: Sequence[ParamInfo], why: str) -> None:
        expect_dense(new)
        expect_free(named(new))

    def change(
        self, kept: Sequence[ParamInfo], new: Sequence[ParamInfo], groups: Sequence[str] = (), why: str = ""
    ) -> None:
        """Trains these from now on: ``kept`` of those so far, and ``new``."""
        self.announce_write()
        before = {info.param: info.index for info in self.infos}
        indices = [before[info.param] for info in kept]
        release(named(self.infos), self)
        self.infos = [*kept, *new]
        claim(named(self.infos), self)
        self.states = [self.states[i] for i in indices]
        self.states += [_new_state(info.param.detach(), self.precision) for info in new]
        self.norm_dtype = norm_dtype_of(info.dtype for info in self.infos)
        of_kept = self.steps[torch.tensor(indices, dtype=torch.int64, device=self.steps.device)]
        self.steps = torch.cat([of_kept, of_kept.new_zeros(len(new))])
        factors = GradFactors(core.GradTable(self._device, len(self.infos)), self._device)
        factors.carry_over(self._factors, indices)
        self._factors = factors
        self._clips = {after: self._clips[i] for after, i in enumerate(indices) if i in self._clips}
        self._edits.keep(indices)
        # static_graph: which parameters had a gradient in the first step that had any, and have in all others.
        self._static_used: list[bool] | None = None
        # Rows of one dtype next to each other: a kernel launch for each run.
        self._order = sorted(range(len(self.infos)), key=lambda i: str(self.infos[i].dtype))
        self._edits.add(new)
        self._bind()

    def watch(self, frozen: Sequence[Tensor]) -> None:
        """In one process the gradients of parameters that may be trained later are whole ones."""

    def _bind(self) -> None:
        """Makes the rows of the parameters where they are now."""
        self._rows = AdamRows(self.steps, self._device, amsgrad=self.precision.amsgrad, resync=self._edits.resync)
        self._edits.note_bound()
        for info in (self.infos[i] for i in self._order):
            self._rows.add(info.index, info.group, info.param.detach(), None, self.states[info.index])

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, param_groups: Sequence[dict[str, Any]], of_state: StateEdits | None = None, said: str = "") -> None:
        if not self._is_capturable and core.is_capturing(self._device):
            raise CaptureError(
                "step under CUDA graph capture needs an optimizer made with capturable=True and static_graph=True"
            )
        self._follow_edits()
        if of_state:
            if core.is_capturing(self._device):
                raise CaptureError(
                    "optimizer.state was edited, and replays would repeat the edit: call step() before the capture"
                )
            of_state.carry_out(self)
        held = [info.param.grad for info in self.infos]
        grads = [self._grad(info, grad) for info, grad in zip(self.infos, held, strict=True)]
        used = [grad is not None for grad in grads]
        self._expect_static(used)
        self._drop_stale_clips()
        self._rows.table.set_grads([grads[i] for i in self._order])
        factors = self._factors.vector() if self._clips else None
        given = StepInputs(param_groups, used, factors, 1.0, grads)
        observed = [observe(given) for observe in self.step_observers]
        self.announce_write([index for index, is_used in enumerate(used) if is_used])
        self._rows.begin_step(param_groups, used, factors)
        self._rows.step()
        self._rows.table.clear_grads()  # zero_grad() is to free their memory
        updated = [info.param for info, grad in zip(self.infos, grads, strict=True) if grad is not None]
        torch.autograd.graph.increment_version(updated)
        self._edits.note_written()
        self._note_used([grad for grad in held if grad is not None])
        if core.is_capturing(self._device):  # what was captured has clipped nothing yet
            self._clips.clear()
        for note_written in filter(None, observed):
            note_written()

    def _expect_static(self, used: list[bool]) -> None:
        """RuntimeError naming a parameter if ``static_graph`` was promised and other parameters have gradients than before."""
        if not self._is_static or not any(used):  # a step without any gradient does nothing
            return
        if self._static_used is None:
            self._static_used = used
        for info, before, now in zip(self.infos, self._static_used, used, strict=True):
            if before != now:
                raise RuntimeError(
                    f"static_graph=True, but parameter {info.name!r} has {'a' if now else 'no'} gradient in this step, "
                    f"but had {'one' if before else 'none'} in the first step"
                )

    def _grad(self, info: ParamInfo, grad: Tensor | None) -> Tensor | None:
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
        """Parameters that were moved are bound again; masters that were loaded are read again where the kernel does not."""
        self.bind_moved()
        edits = self._edits.find()
        if edits.refused >= 0:
            raise ExternalEdits.refusal(self.infos[edits.refused])
        if edits.follows:
            self.announce_write()
        for info, state in zip(self.infos, self.states, strict=True) if edits.follows else ():
            follow_param(info.param.detach(), state)
        if edits.moved:
            self._bind()

    def bind_moved(self) -> None:
        """Gives parameters that were moved the strides of their states, as over ranks."""
        for info, state in zip(self.infos, self.states, strict=True):
            expect_same_memory_kind(info, state["exp_avg"].shape)
            if (stride := state["exp_avg"].stride()) != info.param.stride():
                if core.is_capturing(self._device):
                    raise CaptureError(f"parameter {info.name!r} has new strides: call step() before the capture")
                own = torch.empty_strided(info.param.shape, stride, dtype=info.dtype, device=info.device)
                info.param.data = own.copy_(info.param.data)

    def announce_write(self, indices: Collection[int] | None = None) -> None:
        for observe in tuple(self.write_observers):
            observe(indices)

    def exchange(self, said: bytes) -> list[bytes]:
        return [said]

    def write_order(self) -> list[int]:
        return self._order

    def reload_masters(self) -> None:
        self.announce_write()
        for info, state in zip(self.infos, self.states, strict=True):
            take_param(info.param.detach(), state)
        if self._edits.find().moved:
            self._bind()
        self._edits.note_written()

    def expect_loaded_model(self) -> None:
        self._edits.expect_loaded_model()

    # --- clipping ----------------------------------------------------------------------------------------------------

    def total_norm(self, indices: Sequence[int] | None, ord: float) -> Tensor:
        self._drop_stale_clips()
        return self._total_norm(self._held(indices), ord)

    def clip(self, indices: Sequence[int] | None, max_norm: float, ord: float) -> Tensor:
        self._begin_clip()
        held = self._held(indices)
        if self._device != CPU and held and ord == 2.0:
            norm = self._norm_on_cuda(held, max_norm)
            self._note_clipped(held)
        else:
            norm = self._total_norm(held, ord)
            self._multiply(held, clip_coefficient(max_norm, norm))
        return norm

    def clip_with(self, indices: Sequence[int] | None, coefficient: Tensor) -> None:
        self._begin_clip()
        self._multiply(self._held(indices), coefficient)

    def _held(self, indices: Iterable[int] | None) -> list[int]:
        """Those of ``indices`` (None: of all parameters) that have a gradient."""
        chosen = range(len(self.infos)) if indices is None else indices
        return [i for i in chosen if self.infos[i].param.grad is not None]

    def _total_norm(self, held: Sequence[int], ord: float) -> Tensor:
        if self._device != CPU and held and ord == 2.0:
            return self._norm_on_cuda(held, None)
        grads = {i: grad for i in held if (grad := self.infos[i].param.grad) is not None and grad.numel()}
        if not grads:
            return torch.zeros((), dtype=self.norm_dtype, device=self._torch_device)
        if ord == 2.0 and not self._clips:
            readable = [grad.clone() if grad._is_zerotensor() else grad.contiguous() for grad in grads.values()]
            norm: Any = l2_norm(readable)
        else:
            norms = [
                torch.linalg.vector_norm(grad, ord, dtype=torch.float64)
                * (self._factors[i] if i in self._clips else 1.0)
                for i, grad in grads.items()
            ]
            norm = torch.linalg.vector_norm(torch.stack(norms), ord)
        return norm.to(self.norm_dtype)

    def _norm_on_cuda(self, held: Sequence[int], max_norm: float | None) -> Tensor:
        """The 2-norm of ``held`` together; their factors times the clip coefficient where ``max_norm`` is given."""
        if not self._clips:
            self._factors.reset_all()
        sums = torch.empty(len(held), dtype=torch.float64, device=self._torch_device)
        core.sumsq_cuda(
            self._device,
            [self._grad(self.infos[i], self.infos[i].param.grad) for i in held],
            sums,
            None,
            self._sums_table,
        )
        if len(held) < len(self.infos):
            sums = sums.new_zeros(len(self.infos)).index_copy_(0, self._uploads.numbers("held", held), sums)
        norm = torch.empty(1, dtype=self.norm_dtype, device=self._torch_device)
        self._factors.clip(held, sums, 1.0, max_norm, norm)
        return norm[0]

    def _multiply(self, held: Sequence[int], coefficient: Tensor) -> None:
        if self._device == CPU and float(coefficient) == 1.0:
            return
        if not self._clips:
            self._factors.reset_all()
        self._factors.scale(held, coefficient)
        self._note_clipped(held)

    def _begin_clip(self) -> None:
        """A clip that is captured starts from gradients that nobody has clipped: each replay brings new ones."""
        capture = core.capture_id(self._device)
        if capture not in (0, self._clipped_in):
            self._clips.clear()
        self._clipped_in = capture
        self._drop_stale_clips()

    def _note_clipped(self, held: Sequence[int]) -> None:
        for i in held:
            grad = self.infos[i].param.grad
            assert grad is not None
            self._clips[i] = (grad, grad._version)

    def _drop_stale_clips(self) -> None:
        """Factors of gradients that are no longer there become 1."""
        stale = [i for i in self._clips if not self._is_clipped(i)]
        for i in stale:
            del self._clips[i]
        for i in stale if self._clips else ():  # else all of them become 1 when they are used next
            self._factors.table.set_factor(i, 1.0)

    def _is_clipped(self, index: int) -> bool:
        """Whether p.grad is the gradient that was clipped. RuntimeError if it was written to since."""
        if index not in self._clips:
            return False
        clipped, version = self._clips[index]
        if clipped is not self.infos[index].param.grad:
            return False
        if clipped._version != version:
            raise RuntimeError(
                f"the gradient of {self.infos[index].name!r} changed after clip_grad_norm_; call that after the "
                "last backward, right before step, and drop gradients by optimizer.zero_grad()"
            )
        return True

    def full_grad(self, index: int) -> Tensor | None:
        """float32, or float64 that of a float64 parameter."""
        grad = self.infos[index].param.grad
        if grad is None:
            return None
        wide = grad.detach().to(torch.float64 if self.infos[index].dtype == torch.float64 else torch.float32)
        factor = self._factors[index] if self._is_clipped(index) else 1.0
        # A factor on the device in their dtype: with a 0-d gradient a float64 one would make the product float64.
        return wide * (factor.to(wide.dtype) if isinstance(factor, Tensor) else factor)

    def shard_memory(self) -> ShardMemory:
        """All parameters. Another one after `change`, and when parameters have moved."""
        spaces: list[ShardSpace] = []
        for dtype in dict.fromkeys(info.dtype for info in self.infos):
            pieces: dict[str, list[Tensor]] = {}
            rows: list[tuple[int, int, int, int]] = []
            at = 0
            for info in (info for info in self.infos if info.dtype == dtype):
                numel = info.param.numel()
                for name, tensor in {"param": info.param.detach(), **self.states[info.index]}.items():
                    pieces.setdefault(name, []).append(tensor.as_strided((numel,), (1,)))
                rows.append((info.index, 0, at, numel))
                at += numel
            grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            spaces.append(ShardSpace(at, pieces, rows, grad_dtype))
        written = [info.param for info in self.infos] + [self.steps]
        written += [tensor for state in self.states for tensor in state.values()]
        return ShardMemory(spaces, self.infos, self.steps, written, self.precision.amsgrad, self._edits.resync)

    def share_params(self) -> None:
        """There is nobody else."""
        torch.autograd.graph.increment_version([info.param for info in self.infos])
        self._edits.note_written()

    # --- what only a sharded optimizer has to do ---------------------------------------------------------------------

    def first_pending(self) -> ParamInfo | None:
        """The first parameter whose gradient no step has used."""
        used = {grad(): version for grad, version in self._used}
        return next((i for i in self.infos if (g := i.param.grad) is not None and used.get(g) != g._version), None)

    def _note_used(self, grads: Sequence[Tensor]) -> None:
        self._used = [*zip(map(weakref.ref, grads), [grad._version for grad in grads], strict=True)]

    def zero_grad(self, set_to_none: bool) -> None:
        self._clips.clear()
        were_used = not set_to_none and self.first_pending() is None
        for info in self.infos:
            if set_to_none:
                info.param.grad = None
            elif info.param.grad is not None:
                info.param.grad = info.param.grad.detach().zero_()
        if were_used:
            self._note_used([info.param.grad for info in self.infos if info.param.grad is not None])

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

    def owned_ranges(self, index: int) -> list[tuple[int, int]]:
        return [(0, self.infos[index].param.numel())]

    def values_of(self, index: int) -> Tensor:
        return self.infos[index].param.detach()

    def value_parts(self, index: int) -> list[Tensor]:
        param, like = self.infos[index].param.detach(), self.states[index]["exp_avg"]
        if param.stride() != like.stride():  # it was moved, and the next step gives it these back
            param = torch.empty_strided(like.shape, like.stride(), dtype=param.dtype, device=like.device).copy_(param)
        return [param.as_strided((param.numel(),), (1,))]

    def memory(self) -> dict[str, int]:
        return report.memory_of_local(self)

    def describe(self) -> str:
        return report.describe_local(self)

    def ranges_of(self, index: int) -> list[list[tuple[int, int]]]:
        return [self.owned_ranges(index)]

    def join(self, part: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        return part

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """There is nobody to tell."""

    broadcast_part = broadcast

    def refuse(self, text: str) -> NoReturn:
        raise RuntimeError(text)

    def expect_done_by_all(self, what: str, error: Exception | None) -> None:
        if error is not None:
            raise error

    def abort(self, reason: str) -> None:
        """There is nobody to tell."""

    def close(self, why: str, *, is_agreed: bool = True) -> None:
        """As of `ShardedEngine`."""
        self.closed = why
        self.announce_write()
        self._clips.clear()
        release(named(self.infos), self)


def _new_state(param: Tensor, precision: Precision) -> dict[str, Tensor]:
    kept = precision.kept_of(param.dtype)
    state = {name: torch.zeros_like(param, dtype=dtype) for name, dtype in kept.items()}
    follow_param(param, state)
    return state
