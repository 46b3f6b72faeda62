"""ShardedAdamW: `torch.optim.AdamW` whose gradients and states are sharded over the ranks of a process group."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler
from torch.nn import Parameter
from torch.optim import Optimizer

from bucketwheel.checkpoint.plain_values import as_plain
from bucketwheel.comm.backends import LocalRank
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.group_comms import close_all, communicators_for
from bucketwheel.comm.public_call import name_methods
from bucketwheel.errors import ClosedError, failing_together
from bucketwheel.grads.agreement import NO_JOIN
from bucketwheel.grads.reduced import clip_coefficient
from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.layout.precision import Precision
from bucketwheel.native import core
from bucketwheel.optim import full_state
from bucketwheel.optim import state_dict as states
from bucketwheel.optim.foreign_steps import refuse_foreign_steps
from bucketwheel.optim.local_engine import LocalEngine
from bucketwheel.optim.param_groups import (
    OptimizerOptions,
    expect_group_keys,
    expect_hyperparameters,
    frozen_in,
    group_texts,
    of_sharded,
)
from bucketwheel.optim.sharded_engine import ShardedEngine
from bucketwheel.optim.shown_state import ShownState, StateEdits
from bucketwheel.optim.trained_params import TrainedParams
from bucketwheel.torch_internals import keep_out_of_graphs, override_stale_capture_stream

_Self = TypeVar("_Self", bound="ShardedAdamW")


_COLLECTIVE = (
    "step grad_sync clip_grad_norm_ local_grad_norm clip_grads_with_norm_ full_grad full_state full_state_dict state_dict "
    "load_state_dict load_full_state_dict add_param_group close"
)


@name_methods("optimizer.", *_COLLECTIVE.split())
class ShardedAdamW(Optimizer):
    r"""AdamW with sharded gradients and optimizer states (ZeRO-2), a drop-in for `torch.optim.AdamW`.

    Each rank keeps the gradients and the optimizer states of its own shard. Gradients are reduced during backward and averaged
    over the ranks, as `DistributedDataParallel` does; do not wrap the model in DDP too. `step` updates the rank's shard and
    gathers the parameters. The update follows Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2,
    with the order of operations of ``torch.optim.AdamW(fused=True)``. Without a process group, or with a group of one rank,
    the optimizer is a local fused AdamW.

    The constructor moves all trainable parameters into flat memory of the communicator. The `Parameter` objects stay the same.
    By default all ranks receive rank 0's values. After backward ``p.grad`` is a placeholder: torch's `clip_grad_norm_`,
    `GradScaler` and in-place scaling work on it, and reading its values raises `ShardedGradError`. Use `full_grad` to read
    values. Backward may run in any thread. Two backwards that reach the same parameter must not run at the same time.

    You may edit ``param_groups`` and ``state`` between steps, in the same way on all ranks. The next collective call applies
    the edit, or raises on all ranks. ``state`` shows this rank's part; see `full_state` and `reset_state`.

    These calls are collective. All ranks must make them in the same order: the constructor, `step`, `grad_sync`,
    `clip_grad_norm_`, `local_grad_norm`, `clip_grads_with_norm_`, `full_grad`, `full_state`, `full_state_dict`,
    `load_state_dict`, `load_full_state_dict`, `add_param_group`, `close`, and torch's functions that need gradient values.

    Args:
        params: Parameters, (name, parameter) pairs or parameter groups, as for any torch optimizer. Dtypes float32, bfloat16,
            float16 and float64, also mixed. All parameters are on the CPU or on one CUDA device. Parameters with
            ``requires_grad=False`` are ignored until you set it to True. A group may have the key ``"granularity"``, which
            says where shard boundaries fall: on rows of parameters where the padding stays below 1 % of a bucket (None, the
            default), always on rows (``"row"``), or anywhere (``"element"``). A row is a slice of the outermost dimension in
            memory; see docs/saving.md, "Row cuts". The optimizer keeps keys of your own in groups.
        lr: As in `torch.optim.AdamW`; a float or a tensor.
        betas: As in `torch.optim.AdamW`.
        eps: As in `torch.optim.AdamW`.
        weight_decay: As in `torch.optim.AdamW`.
        amsgrad: As in `torch.optim.AdamW`. All groups have the same value, which cannot change later.
        maximize: As in `torch.optim.AdamW`. All groups have the same value.
        foreach: Accepted and ignored. The update is always fused.
        fused: Accepted and ignored. The update is always fused.
        capturable: Allow steps in CUDA graphs. Replays advance the step count and read learning rates that are tensors on the
            device. Requires ``static_graph=True`` and CUDA; over several ranks also the nccl backend,
            ``overlap_param_sync=False``, and all calls from `zero_grad` to `step` in one graph, after one eager step. See
            docs/developers/ordering.md, "A whole step in a graph". The option sets
            `torch.autograd.graph.set_override_stale_capture_stream` for the process, or warns if torch does not have it.
        differentiable: Must be False.
        decoupled_weight_decay: False adds weight decay to the gradient (L2), as `torch.optim.Adam` does. All groups have the
            same value.
        process_group: The ranks to shard over: a torch process group, a `Communicator` (on GPUs the second one of
            `Communicator.pair`, so that gathers and reductions overlap) or a `LocalRank`. None means all ranks if
            ``torch.distributed`` is initialised, else this process alone. ``LocalWorld(1).rank(0)`` always means this process
            alone.
        replicate_group: The ranks that hold the same shard (HSDP). Gradients are reduced over ``process_group`` first, then
            this rank's part over ``replicate_group``. Parameters are gathered within ``process_group``. All ranks of both
            groups make the collective calls. Groups that do not fit are a ValueError on all ranks.
        gradient_average: True averages gradients over all ranks, False sums them.
        broadcast_params: Give all ranks rank 0's parameters in the constructor. With replicas, rank 0 is the first rank of all
            groups.
        timeout_s: Seconds that a rank waits for the others in any collective call before it raises `CommTimeout`. None means
            the process group's timeout. Not allowed with a `Communicator` or a model of `shard`, which have a time limit.
        master_weights: How bfloat16 and float16 parameters keep full precision. ``"auto"`` and ``"fp32"`` keep a float32 copy
            of the rank's shard. ``"bf16_remainder"`` keeps the 16 bits that a bfloat16 parameter lacks, which saves 2 of 12
            bytes; all 16-bit parameters must be bfloat16. ``"none"`` keeps nothing: parameters are rounded in every step, and
            small updates are lost.
        state_dtype: Dtype of ``exp_avg`` and ``exp_avg_sq``: float32 (None) or bfloat16. A bfloat16 ``exp_avg_sq`` is rounded
            stochastically, with the same bits at any world size.
        reduce_dtype: Dtype of gradients in buckets: float32, bfloat16 or float16. None means the parameter's dtype, and
            float32 for float16 parameters, whose sums could overflow. On one host sums over ranks are computed in float32;
            NCCL adds in ``reduce_dtype``.
        accum_dtype: Dtype of the gradient shards, in which several `grad_sync` calls add up: float32 (None) or bfloat16. The
            four dtype options do not apply to float64 parameters. See docs/numerics.md.
        bucket_cap_mb: Size of a bucket in MiB. None means 16 on the CPU. On CUDA None means a sixteenth of the parameters'
            bytes, at least 16 MiB and at most 128 MiB. With row cuts a bucket may be up to 4 times as large.
        overlap_grad_sync: Reduce buckets during backward.
        overlap_param_sync: Let `step` return while parameters are still gathered. Every torch function that uses a parameter
            waits for its gather first; see `param_sync` for the exceptions. Call `prefetch_params` once.
        max_inflight_buckets: Number of buckets that may have memory at the same time if gradients come in bucket order. A soft
            limit: backward takes more memory rather than wait for another rank without end (docs/memory.md). With a
            communicator that has ``registered=True``, the number of buckets with registered memory.
        static_graph: Your promise that the same parameters have gradients in every step, and that no rank drops a gradient, or
            scales one that it does not have, between backward and `step`. Ranks then compare these facts in the first step
            only: later differences in learning rates are not noticed, and an edit of groups or ``state`` on one rank alone
            ends in `CommTimeout`. If a rank breaks the promise, it raises RuntimeError with the
            parameter's name, and the other ranks raise `PeerError` with the same text.
        on_external_update: Effect of a write to a parameter between two steps (by the model's ``load_state_dict``, a moving
            average, ``p.data.clamp_()``, a broadcast). All ranks must write the same values. ``"resync"`` continues from the
            written values, element by element. ``"error"`` raises RuntimeError on all ranks before anything is updated, if the
            parameter's version counter or address shows the write; other writes count as with ``"resync"``. ``"ignore"``
            continues from the master weight, if there is one. See docs/numerics.md, "Writes by others".
        full_state_dict: Make `state_dict` collective after the first step, with the result of `full_state_dict` on rank 0.
            Frameworks that save rank 0's ``state_dict()`` need this (docs/frameworks.md, "Checkpoints").

    Raises:
        ValueError: A bad argument, or a parameter of another `ShardedAdamW` that has gradients which no step has used.
            Parameters have not moved.
        TypeError: An argument of the wrong type. Parameters have not moved.
        RuntimeError: Ranks disagree on the parameters, their order or the options (names are compared if ``named_parameters()``
            gave them, else values), or ``WORLD_SIZE`` says that there are other ranks but there is no process group.

    If other `ShardedAdamW` optimizers train some of the parameters, the new one replaces them; their next call raises
    `ClosedError`. The constructor warns if frozen parameters differ between ranks. It does not look at buffers; use
    `sync_module` for them."""

    steps_sharded_grads = True  # optim/foreign_steps.py refuses any other
    _host_rows = AdamRows  # for checkpoints
    _natives: tuple[Any, ...] = ()  # of `core.PublicCall`; the constructor calls add_param_group before it has any

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        process_group: dist.ProcessGroup | Communicator | LocalRank | None = None,
        replicate_group: dist.ProcessGroup | Communicator | None = None,
        gradient_average: bool = True,
        broadcast_params: bool = True,
        timeout_s: float | None = None,
        master_weights: str = "auto",
        state_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        accum_dtype: torch.dtype | None = None,
        bucket_cap_mb: float | None = None,
        overlap_grad_sync: bool = True,
        overlap_param_sync: bool = False,
        max_inflight_buckets: int = 2,
        static_graph: bool = False,
        on_external_update: str = "resync",
        full_state_dict: bool = False,
    ) -> None:
        if hasattr(self, "_made_engine"):
            raise RuntimeError(f"{type(self).__name__}.__init__ was called a second time; make a new optimizer instead")
        expect_hyperparameters(lr, betas, eps, weight_decay, differentiable)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            granularity=None,  # torch's checkpoints look for the keys of one optimizer's groups in another's
        )
        super().__init__(params, defaults)
        keep_out_of_graphs()
        refuse_foreign_steps()
        trained = self._trained = TrainedParams(self.param_groups)
        precision = Precision(
            master_weights, state_dtype, reduce_dtype, accum_dtype, bool(self.param_groups[0]["amsgrad"])
        )
        precision.expect_fits({info.dtype for info in trained.infos})
        options = OptimizerOptions(
            gradient_average=gradient_average,
            broadcast_params=broadcast_params,
            precision=precision,
            bucket_cap_mb=bucket_cap_mb,
            overlap_grad_sync=overlap_grad_sync,
            overlap_param_sync=overlap_param_sync,
            max_inflight_buckets=max_inflight_buckets,
            static_graph=static_graph,
            capturable=capturable,
            on_external_update=on_external_update,
            full_state_dict=not not full_state_dict,
        )
        groups = (process_group, replicate_group)
        self._made_engine = _make_engine(trained, self.param_groups, options, groups, timeout_s)
        self._natives = self._made_engine._natives
        self._made_engine.watch(trained.frozen)
        if capturable:
            override_stale_capture_stream()
        self._shown = ShownState()
        self.state = self._shown.dict
        self._shown.publish(self.state, self._made_engine)

    @property
    def _engine(self) -> LocalEngine | ShardedEngine:
        if self._made_engine.closed:  # its memory may be somebody else's by now
            raise ClosedError(self._made_engine.closed)
        return self._made_engine

    # --- what others change between two steps ------------------------------------------------------------------------

    def _follow_groups(self) -> None:
        """Takes in what is in the groups now and was not, or was frozen; lets go what is not any longer. Collective."""
        if not self._trained.are_those_of(self.param_groups):
            self._take_in("a change of param_groups")
        elif any(p.requires_grad for p in self._trained.frozen):
            self._take_in("taking in what was frozen")

    def _take_in(self, why: str) -> None:
        """All or none, on all ranks."""
        engine, trained = self._engine, self._trained
        with failing_together(engine.expect_done_by_all, why):
            groups = trained.regrouping(self.param_groups)
            engine.precision.expect_fits({info.dtype for info in (*groups.kept, *groups.new)})
            engine.expect_changeable(groups.new, why)
            edits = self._shown.find(self.state, engine, groups)
        what = "; ".join(text for text in (groups.text, self._shown.text(edits)) if text)
        engine.change(groups.kept, groups.new, group_texts(self.param_groups), f"{why} ({what.replace(':', ' ')})")
        trained.note(engine.infos, self.param_groups)
        engine.watch(trained.frozen)
        edits.carry_out(engine)
        states.load_taken_in(self)
        self._shown.said.clear()
        self._shown.publish(self.state, engine, edits)

    def _state_edits(self) -> StateEdits | None:
        """What others have done to ``self.state``, if anything. ValueError or TypeError if it cannot be followed."""
        if not self._shown.edited.is_set and self.state is self._shown.dict:
            return None
        edits = self._shown.find(self.state, self._engine)
        return edits if edits.said else None

    def _follow_state(self) -> None:
        """Local: the next step compares what was done."""
        if (edits := self._state_edits()) is not None:
            edits.carry_out(self._engine)
            self._shown.said.update(edits.said)
            self._shown.publish(self.state, self._engine)

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient on any rank; returns the closure's value. Collective.

        `step` reduces the gradients that are not reduced yet, applies averaging and clipping inside the update, and gathers
        the parameters. Gradients stay until `zero_grad`. A parameter without a gradient on any rank is neither updated nor
        decayed.

        If a launch on CUDA fails, the state of the device is unknown: the step may have been applied in part. Load a
        checkpoint into a new optimizer. Without ``capturable=True``, `CaptureError` is raised during CUDA graph capture.

        Raises:
            RuntimeError: Hyperparameters differ between ranks. Raised on all ranks; nothing has been updated."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_groups()
        try:
            edits = self._state_edits()
        except Exception as error:  # noqa: BLE001 (whatever it is, the other ranks hear of it)
            self._engine.refuse(str(error))
        said = self._shown.text(edits) if edits or self._shown.said else ""
        self._engine.step(self.param_groups, edits, said)
        self._shown.said.clear()
        if edits:
            self._shown.publish(self.state, self._engine)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets gradients to None, or to zero with ``set_to_none=False``. Local."""
        is_profiled = profiler._is_profiler_enabled  # else a range costs microseconds for nothing
        with profiler.record_function(self._zero_grad_profile_name) if is_profiled else nullcontext():
            self._engine.zero_grad(set_to_none)
            if not self._trained.are_those_of(self.param_groups):  # the next collective call takes them in
                self._trained.note_waiting(self.param_groups)
                self._engine.watch(self._trained.frozen)
            self._trained.zero_unfrozen(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward accumulates gradients on this rank without reducing them. Local.

        The next backward outside, or `step`, reduces the sum. Put it around forward and backward, as DDP's: the optimizer reads
        it in backward, and ``sync_module(model, buffers="forward")`` in forward. Contexts nest."""
        return self._engine.no_sync()

    def grad_sync(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Reduces all gradients now and adds them to the gradient shards. Collective.

        Call it after each micro-batch to keep gradient memory sharded during accumulation. With ``parameters`` the call is
        local and only starts reductions: it says that these parameters get no more gradients before the step, as a pipeline
        schedule's ``grad_sync_func`` does. Complete buckets are launched in the order that is the same on all ranks, and the
        next collective call finishes them.

        Raises:
            RuntimeError: Inside `no_sync`."""
        if parameters is None:
            self._follow_groups()
            self._engine.close_window()
        else:
            self._engine.start_window(self._trained.indices(parameters) or ())

    def param_sync(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Waits until all parameters, or ``parameters``, have the values of the last step. Local.

        Does nothing without ``overlap_param_sync``. A pipeline schedule can use it as ``param_sync_func``. Call it before code
        that reads or writes a parameter's memory without torch's Python functions, outside of the forwards that
        `prefetch_params` covers. docs/developers/ordering.md, "Reading parameters while they are gathered", has a list."""
        self._engine.param_sync(self._trained.indices(parameters))

    def prefetch_params(self, model: torch.nn.Module) -> Callable[[], None]:
        """Makes each module of ``model`` wait for its own parameters just before its forward, with ``overlap_param_sync``. Local.

        `step` then gathers parameters in the order of the forwards. Does nothing without ``overlap_param_sync``. Call it once
        for each model, or for each part of a model, that the optimizer trains. For a compiled model pass the object that
        Python calls: ``torch.compile(model)``, or the model whose blocks are compiled.

        Returns:
            A function that removes the hooks. `close` removes them too."""
        return self._engine.prefetch_params(model)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        parameters: Iterable[Parameter] | None = None,
    ) -> Tensor:
        """Clips the norm of all gradients, or of those of ``parameters``; returns the norm before clipping. Collective.

        As `torch.nn.utils.clip_grad_norm_`, the factor is ``max_norm / (norm + 1e-6)``, at most 1. `step` applies it, so
        clipping does not read the gradients again. The result is a 0-d tensor on the parameters' device, float32 (float64 if a
        parameter is float64), the same on all ranks. On CUDA the host does not wait for the device.

        Raises:
            RuntimeError: The norm is inf or NaN and ``error_if_nonfinite`` is True. Raised on all ranks; nothing is clipped."""
        self._follow_groups()
        indices = self._trained.indices(parameters)
        if error_if_nonfinite:  # asked of the host, so it waits for the device
            norm = float(self._engine.total_norm(indices, float(norm_type)))
            if not math.isfinite(norm):
                raise RuntimeError(
                    f"The total norm of order {norm_type} for gradients is non-finite ({norm}), so it cannot be "
                    "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                    "error_if_nonfinite=False"
                )
        return self._engine.clip(indices, float(max_norm), float(norm_type))

    def local_grad_norm(self, norm_type: float = 2.0, *, parameters: Iterable[Parameter] | None = None) -> Tensor:
        """Returns the norm that `clip_grad_norm_` would return, without clipping. Collective.

        The norm is that of this optimizer's gradients (or of the gradients of ``parameters``), averaged over the data-parallel
        ranks, with each element counted once. It is the same on all ranks of the optimizer. If a model is spread over several
        optimizers, as with tensor parallelism, compute the 2-norm of their norms (for ``inf`` the maximum) over the ranks that
        hold the parts, and pass the result to `clip_grads_with_norm_`. Leave a parameter that several parts hold out of
        ``parameters`` in all parts but one."""
        self._follow_groups()
        return self._engine.total_norm(self._trained.indices(parameters), float(norm_type))

    def clip_grads_with_norm_(
        self,
        max_norm: float,
        total_norm: float | Tensor,
        foreach: bool | None = None,
        *,
        parameters: Iterable[Parameter] | None = None,
    ) -> None:
        """Clips all gradients, or the gradients of ``parameters``, as if ``total_norm`` were their norm. Collective.

        As `torch.nn.utils.clip_grads_with_norm_`, the factor is ``max_norm / (total_norm + 1e-6)``, at most 1. `step` applies
        it. All ranks must pass the same norm: a number or a tensor of one element. If the tensor is on the parameters' CUDA
        device, the host does not wait for it."""
        if isinstance(total_norm, Tensor) and total_norm.numel() != 1:
            raise ValueError(
                f"total_norm must be a number or a tensor of one element, got shape {tuple(total_norm.shape)}"
            )
        self._follow_groups()
        if isinstance(total_norm, Tensor):
            norm = total_norm.detach().reshape(())
        else:
            norm = torch.tensor(float(total_norm), dtype=torch.float64, device="cpu")
        self._engine.clip_with(self._trained.indices(parameters), clip_coefficient(float(max_norm), norm))

    def full_grad(self, param: Parameter) -> Tensor | None:
        """Returns the averaged and clipped gradient of ``param`` in the parameter's shape, on all ranks. Collective.

        The dtype is float32, or float64 for a float64 parameter. Returns None if no rank has a gradient or if the parameter is
        frozen."""
        if not isinstance(param, Tensor):
            raise TypeError(f"param is {param!r}, expected a parameter")
        self._follow_groups()
        if any(param is frozen for frozen in self._trained.frozen):
            return None
        return self._engine.full_grad(self._trained.index_known(param, "full_grad"))

    # --- the rest of torch.optim.Optimizer ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of the state. Local, but collective with ``full_state_dict=True``.

        ``state[i]`` holds ``step`` (float32, 0-d), ``exp_avg`` and ``exp_avg_sq``; with ``amsgrad`` also ``max_exp_avg_sq``;
        for bfloat16 and float16 parameters also ``master_param`` (float32, also for remainders), unless
        ``master_weights="none"``. Over several ranks the values are `bucketwheel.checkpoint.TensorShard` objects:
        `torch.distributed.checkpoint` saves them from all ranks together and loads them at any number of ranks. On one rank
        they are tensors of the parameter's shape. All are copies. If torch's ``get_optimizer_state_dict`` asks for full
        states, the call is collective and returns full tensors."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._engine.param_sync()
        self._follow_state()
        saved = full_state.save_for_torch(self) or states.save(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict on all ranks or on none. Collective.

        Accepts this rank's `state_dict`, also after `torch.distributed.checkpoint` has loaded into it, or a full state dict:
        that of `torch.optim.AdamW` or of one rank. Load the model first. States are converted to the optimizer's dtypes, from
        any ``master_weights`` and ``state_dtype`` (docs/numerics.md says which conversions are exact). Entries are matched by
        ``param_names`` if both sides have names, else by their order in ``param_groups``, as in torch.

        Raises:
            ValueError: Groups, parameters, ``amsgrad`` or this rank's ranges do not match, here or on another rank.
            KeyError: An entry is missing.
            RuntimeError: There are gradients that no step has used. Call `step` or `zero_grad` first."""
        self._load("load_state_dict", lambda: state_dict)

    def _load(
        self, what: str, find: Callable[[], dict[str, Any]], load_model: Callable[[], None] | None = None
    ) -> None:
        """Loads what ``find`` returns. ``load_model`` loads this rank's part of the parameters before. Collective."""
        self._follow_groups()
        with failing_together(self._engine.expect_done_by_all, what):
            state_dict = dict(find())  # hooks may write to it
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before(self, state_dict) or state_dict
            load = states.plan_load(self, state_dict)
        if load_model is None:
            load()
        else:
            states.load_with_model(self._engine, what, load_model, load)
        self._note_loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _waiting_states(self) -> dict[Tensor, dict[str, Any]]:
        return self._trained.waiting((p for group in self.param_groups for p in group["params"]), self.state)

    def _note_loaded(self) -> None:
        self._shown.said.clear()
        self._shown.publish(self.state, self._engine)

    def full_state_dict(
        self,
        dst: int | None = 0,
        *,
        path: str | os.PathLike[str] | None = None,
        chunk_bytes: int = full_state.CHUNK_BYTES,
        masters: bool = True,
        model: torch.nn.Module | None = None,
    ) -> dict[str, Any]:
        """Returns the full state on rank ``dst``, in the format of `torch.optim.AdamW.state_dict`, and {} elsewhere. Collective.

        Tensors are on the CPU, each in the dtype of the state. Other ranks need ``chunk_bytes`` of memory beside their states.
        State dict hooks are not called.

        Args:
            dst: The rank that receives the dict; None means all ranks.
            path: File that rank ``dst`` writes the dict to; it then returns {} too. ``torch.load(path, weights_only=True)``
                reads the file. The file appears under this name once it is complete. If it cannot be written, rank ``dst``
                raises OSError and the other ranks ValueError.
            chunk_bytes: Bytes that are sent at a time.
            masters: Include ``master_param``, which this optimizer needs to continue with the same bits. `torch.optim.AdamW`
                accepts the entry and does not use it.
            model: Use this model's parameter names as keys, as `torch.distributed.checkpoint.state_dict` does. None means
                numbers, as in torch."""
        self._follow_groups()
        self._follow_state()
        return full_state.save(self, dst, path=path, chunk_bytes=chunk_bytes, masters=masters, model=model)

    def load_full_state_dict(
        self,
        state_dict: dict[str, Any] | str | os.PathLike[str] | None,
        src: int | None = 0,
        *,
        chunk_bytes: int = full_state.CHUNK_BYTES,
    ) -> None:
        """Loads a full state that rank ``src`` has; other ranks pass None. Collective.

        Raises as `load_state_dict` does. Other ranks need ``chunk_bytes`` of memory beside their states. State dict hooks are
        not called.

        Args:
            state_dict: A dict returned by `full_state_dict`, `torch.optim.AdamW`, `ZeroRedundancyOptimizer` (consolidated) or
                ``get_optimizer_state_dict`` with ``full_state_dict=True`` (not flattened), or the path of a ``torch.save``
                file of such a dict.
            src: The rank that has it; None means that all ranks have it.
            chunk_bytes: Bytes that are sent at a time."""
        self._follow_groups()
        given = full_state.spread(self, state_dict, src, chunk_bytes)
        with failing_together(self._engine.expect_done_by_all, "load_full_state_dict"):
            load = states.plan_load(self, given)
        load()
        self._note_loaded()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, at any time. Collective once the optimizer is made.

        The parameters move into flat memory, get new states and are broadcast from rank 0. Pending gradients are reduced and
        stay. If the call fails, nothing has been added.

        Raises:
            ValueError: A parameter that cannot be trained, or a misspelt option.
            TypeError: A parameter or option of the wrong type.
            RuntimeError: Ranks passed different parameters. Raised on all ranks."""
        if isinstance(param_group, dict):  # else torch says so
            expect_group_keys(param_group, self.defaults, _OPTIONS)
        super().add_param_group(param_group)
        taken = self.param_groups[-1]
        taken.update({key: as_plain(taken[key]) for key in ("lr", "betas", "eps", "weight_decay")})  # numbers of numpy
        if not hasattr(self, "_made_engine"):  # called by the constructor
            return
        try:
            self._take_in("add_param_group")
        except BaseException:
            self.param_groups.pop()
            raise

    # --- states of single parameters ---------------------------------------------------------------------------------

    def full_state(self, param: Parameter) -> dict[str, Tensor]:
        """Returns the state of ``param`` in the parameter's shape, on all ranks. Collective. The dict holds copies of the entries
        that `state_dict` has. To change moments, assign tensors of the parameter's shape to ``optimizer.state[param]``; the
        next step takes this rank's part of them."""
        self._follow_groups()
        self._follow_state()
        return full_state.whole_entry(self._engine, self._engine.infos[self._trained.index_known(param, "full_state")])

    def reset_state(self, parameters: Iterable[Parameter] | None = None, rows: Any = None) -> None:
        """Sets moments and step counts of all parameters, or of ``parameters``, to zero. Local; all ranks must call it alike.
        Weights do not change. If the calls differ between ranks, the next `step` raises RuntimeError on all ranks.

        Args:
            parameters: The parameters to reset; None means all.
            rows: Index of the first dimension (indices, a mask or a slice). Only these rows of the moments are set to zero,
                and step counts stay.

        Raises:
            ValueError: A parameter that this optimizer does not train, or ``rows`` without ``parameters``."""
        states.reset_chosen(self, parameters, rows)

    def reload_master_params(self) -> None:
        """Makes the parameters' present values the weights that are trained. Local; all ranks must have the same values.

        Call it after an edit that ``on_external_update`` "error" or "ignore" would not accept, and after an edit of bfloat16
        parameters with remainders, whose extra bits would be added to the new values. Masters that round to the parameter
        stay."""
        self._engine.reload_masters()

    def describe(self) -> str:
        """Returns a readable text: ranks, options, one line for each bucket, and totals. Local, the same on all ranks.

        The expected peak holds if gradients come in bucket order (docs/memory.md)."""
        return self._engine.describe()

    def memory_summary(self) -> dict[str, int]:
        """Returns bytes on this rank, by kind. Local. docs/memory.md has the formulas.

        - ``params``: flat memory, including ``params_padding``
        - ``grads``: gradient shards; without other ranks the present gradients
        - ``states``: all optimizer states, and each state by its name, such as ``exp_avg``
        - ``pool``: reserved by the communicators' pools beside ``params``: ``planned`` for buckets, of which ``load`` are in
          use at the same time; ``side`` for buckets without a planned place (``side_peak``: the most so far); ``partial_sums``
          with a ``replicate_group``
        - ``buckets``, ``buckets_peak``: buckets that have memory now, and the most so far
        - ``held``, ``held_peak``: gradients on CUDA that wait to be packed into a bucket
        - ``bookkeeping``: step counts, factors, flags and sums of squares"""
        return self._engine.memory()

    # [Note: wrappers of optimizers] Lightning and Fabric make a class of their own and ours and call our methods with an
    # object of it as ``self``: attributes are read from the optimizer then, but would be set on the wrapper. So none is
    # set after construction; what changes lies in objects that both see.

    def close(self) -> None:
        """Removes the hooks and gives parameters memory of their own. Collective; further calls do nothing.

        Pending gradients are dropped. If the communicator has failed, `close` raises its error after all of this is done. A
        ``with`` statement calls `close`. If an exception leaves the ``with`` block, the communicator fails, so that the other
        ranks raise `PeerError`."""
        if not self._made_engine.closed:
            self._made_engine.close("the optimizer is closed; make a new one for these parameters")

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Closes. If an exception is on its way, the other ranks may never call `close`: the communicator is aborted instead."""
        if kind is None:
            self.close()
            return
        if not self._made_engine.closed:
            self._made_engine.abort(f"{kind.__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # of the communicator, or of gradients that were left half done
            self.close()

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Raises TypeError: `torch.distributed.algorithms.join.Join` is not supported."""
        raise TypeError(f"torch's Join was given a {type(self).__name__}. {NO_JOIN}")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied: its memory is shared with other ranks. Use state_dict()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its memory is shared with other ranks. Save state_dict()"
        )


_OPTIONS = tuple(ShardedAdamW.__init__.__kwdefaults__ or ())


# --- what it is made of ----------------------------------------------------------------------------------------------


def _make_engine(
    trained: TrainedParams,
    param_groups: Any,
    options: OptimizerOptions,
    groups: tuple[Any, Any],
    timeout_s: float | None,
) -> LocalEngine | ShardedEngine:
    """The engine for the parameters, with the communicators that were made for it. Collective."""
    options.expect_capturable_on(trained.device, None)
    of_model = of_sharded(trained.infos, groups, options, timeout_s)
    comm, replicate = of_model or communicators_for(*groups, trained.device, timeout_s)
    owned = [made for made in (comm, replicate) if made is not None and made not in (*groups, *(of_model or ()))]
    try:
        options.expect_capturable_on(trained.device, comm)
        if comm is None:
            return LocalEngine(trained.infos, device=trained.device, options=options)
        with core.PublicCall(comm._natives, "ShardedAdamW"):
            frozen = frozen_in(param_groups)
            return ShardedEngine(comm, trained.infos, group_texts(param_groups), options, replicate, frozen, owned)
    except BaseException:
        close_all(owned, 0.0)
        raise
