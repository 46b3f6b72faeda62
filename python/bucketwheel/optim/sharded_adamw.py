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

    The update is AdamW's (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2), with the order
    of operations of ``torch.optim.AdamW(fused=True)``. Gradients are averaged over the group as
    `DistributedDataParallel` does; do not wrap the model in it. With no process group (or a group of one) this is a
    local fused AdamW.

    Construction moves every trainable parameter into flat memory of the communicator (the `Parameter` objects stay)
    and, by default, broadcasts rank 0's values. During backward each gradient goes into a bucket and ``p.grad`` becomes
    a placeholder that answers stock torch code (`bucketwheel.grads.placeholder`); values are available from `full_grad`.
    Backward may run in any thread, but no two at once that reach the same parameter.

    ``param_groups`` and ``state`` may be edited between steps, as with torch, on all ranks alike: the next collective call
    follows, or raises on all ranks (`bucketwheel.optim.shown_state` has a table). ``state`` shows this rank's part; see
    `full_state` and `reset_state`. Hyperparameters that differ between ranks raise RuntimeError on all in `step`.

    Collective, to be called by all ranks in the same order: the constructor, `step`, `grad_sync`, `clip_grad_norm_`,
    `local_grad_norm`, `full_grad`, `full_state`, `full_state_dict`, `load_state_dict`, `load_full_state_dict`, `close`, and
    what stock code asks of placeholders.

    Args:
        params: parameters, (name, parameter) pairs or group dicts, as for any torch optimizer; float32, bfloat16, float16
            and float64, also mixed, on the CPU or all on one CUDA device. Frozen ones (``requires_grad=False``) are left
            alone; once they are trained the next collective call takes them in. A group may have ``"granularity"``: None
            (default), shard boundaries fall on rows of the parameters in every bucket where that takes at most 1 % of it,
            and `describe` names the buckets where it does not; ``"row"``, they never split a row, whatever
            padding that takes; ``"element"``, they fall anywhere. A row is a slice of the outermost
            dimension in memory. docs/checkpoints.md, "Row cuts", says what needs them. Keys of your own are kept; ValueError for
            options of all groups and for misspelt ones, also in `add_param_group`.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.AdamW`. ``amsgrad`` and ``maximize`` are the same
            in all groups; ``amsgrad`` stays what it is.
        decoupled_weight_decay: False adds weight decay to the gradient (L2), as `torch.optim.Adam` does. The same in all groups.
        foreach, fused: accepted and ignored; the update is always fused.

    Which ranks:
        process_group: the ranks to shard over: a torch process group, or a `Communicator` (on GPUs the second of
            `Communicator.pair`, so that gathers and reductions overlap), or a `LocalRank`. None: all ranks if
            ``torch.distributed`` is initialised, else this process alone: RuntimeError where a launcher's ``WORLD_SIZE``
            says that there are others. ``LocalWorld(1).rank(0)``: alone in any case.
        replicate_group: replicates what the ``process_group`` shards (HSDP): the ranks that are at this rank's place in
            theirs. Gradients are reduced over the ``process_group`` first, then this rank's part over the
            ``replicate_group``; parameters are gathered within the ``process_group``. Collective calls are those of all
            ranks of both. ValueError on all ranks unless the groups fit.
        gradient_average: mean over all ranks (True) or sum.
        broadcast_params: take rank 0's parameters at construction; with replicas, those of the first rank of all.
        timeout_s: how long ranks wait for each other, here and in every collective call, before they raise `CommTimeout`.
            None: the process group's timeout. Not with a `Communicator`, which has its own.

    How precise (docs/numerics.md has a table; float64 parameters are float64 throughout):
        master_weights: where the precise weights of bfloat16 and float16 parameters are. ``"auto"``, ``"fp32"``: in an fp32
            master shard. ``"bf16_remainder"``: as 16 bits more beside each bfloat16 parameter, which saves 2 of 12 bytes;
            ValueError without bfloat16 or with float16 parameters. ``"none"``: parameters are their own weights, rounded to
            nearest at every step, so small updates are lost.
        state_dtype: of the moments: float32 (None) or bfloat16, whose ``exp_avg_sq`` is rounded stochastically, with the
            same bits at any world size.
        reduce_dtype: of gradients in buckets: float32, bfloat16 or float16. None: the parameter's, but float32 for
            float16, whose sums would overflow. On one host sums over ranks are float32 in any case; NCCL adds in it.
        accum_dtype: of the gradient shards, in which sync windows add up: float32 (None) or bfloat16.

    What overlaps, in how much memory:
        bucket_cap_mb: size of a bucket in MiB. None: 16 on the CPU; on CUDA a sixteenth of the parameters' bytes, at least 16
            and at most 128 (docs/memory.md says why). With row cuts buckets are near this size, and at
            most 4 times as large; with ``"granularity": "element"`` no larger.
        max_inflight_buckets: how many buckets may have memory at once where gradients come in their order. A soft bound:
            backward waits for no peer without end (docs/memory.md has the formula). With ``registered=True`` of the
            communicator: how many buckets' worth of registered memory there is, all the time.
        overlap_grad_sync: reduce buckets during backward.
        overlap_param_sync: leave the parameter gather running when `step` returns. Whatever torch does with a parameter
            waits for it first; see `param_sync` for what torch does not see. Call `prefetch_params(model)` once.

    What stays the same:
        static_graph: a promise that every step has gradients of the same parameters, on each rank its own, and that none is
            dropped (or scaled, where a rank has none) between a backward and its step. Ranks then agree in the first step
            only, so learning rates that differ later are not noticed. Nor are edits of ``param_groups`` and ``state``
            compared: a rank that alone edits them ends in `CommTimeout`. If a rank breaks the promise, it raises
            RuntimeError naming the parameter, in backward or at the end of the window, and aborts the communicator, so
            that the others raise `PeerError` with the same text.
        capturable: steps can be captured in CUDA graphs; replays count steps on and read learning rates that are tensors on
            the device. Needs ``static_graph=True`` and CUDA; over several ranks the nccl backend, no
            ``overlap_param_sync``, and `zero_grad` to `step` in one graph on all of them, after an eager step
            (docs/ordering.md, "A whole step in a graph"). For the whole process it sets
            `torch.autograd.graph.set_override_stale_capture_stream`, or warns where torch has none.
        on_external_update: what `step` does if a parameter was written to since the last one (``load_state_dict`` of the
            model, a moving average, ``p.data.clamp_()``, ``dist.broadcast(p.data, 0)``), the same on all ranks.
            ``"resync"`` goes on from what was written, element by element; ``"error"`` raises RuntimeError on all ranks,
            naming it, before anything is updated, if its version counter or address shows the write (``p.data``, NumPy and
            collectives raise no version: such writes are taken as by ``"resync"``); ``"ignore"`` goes on from the master
            weight, if there is one. docs/numerics.md, "Writes by others". See `reload_master_params`.
        full_state_dict: from the first step on `state_dict` is collective, and on rank 0 it is `full_state_dict`: for
            frameworks, which save that of rank 0 (docs/frameworks.md, "Checkpoints").

    Raises:
        ValueError, TypeError: bad arguments, naming the parameter or option; nothing has been moved.
        RuntimeError: ranks disagree on the parameters, their order or the options. Names are compared where
            ``named_parameters()`` gave them; of parameters without, values.

    Replaces optimizers that train some of the parameters; their next call raises `ClosedError`. ValueError on all ranks while
    one of them has gradients that no step has used.

    Warns where frozen parameters that it is given differ between ranks. It sees no buffers: `sync_module`.
    """

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
            raise RuntimeError(f"{type(self).__name__}.__init__ again: this optimizer is made already; make a new one")
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
        """Updates the parameters that have a gradient on any rank, as torch would; returns the closure's value.
        Collective.

        Reduces what is left of the gradients, applies averaging and clipping inside the update, and gathers the
        parameters. Gradients stay until `zero_grad`. Parameters without a gradient anywhere are neither stepped nor
        decayed.

        On CUDA, after a failed launch the state of the device is unknown: the step may be counted already, and
        parameters updated in part. Make a new optimizer from a checkpoint. `CaptureError` under CUDA graph capture
        unless ``capturable``.
        """
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
        """Drops the gradients (``p.grad = None``), or makes them zero. Local."""
        is_profiled = profiler._is_profiler_enabled  # else a range costs microseconds for nothing
        with profiler.record_function(self._zero_grad_profile_name) if is_profiled else nullcontext():
            self._engine.zero_grad(set_to_none)
            if not self._trained.are_those_of(self.param_groups):  # the next collective call takes them in
                self._trained.note_waiting(self.param_groups)
                self._engine.watch(self._trained.frozen)
            self._trained.zero_unfrozen(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward accumulates in ``p.grad`` on this rank alone; the next backward outside, or `step`, reduces
        the sum.

        Nests, and is left by exceptions too. It is read when a gradient is produced (during backward), not at forward.
        """
        return self._engine.no_sync()

    def grad_sync(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Reduces all gradients now and adds them to the shards. After each micro-batch it bounds memory as ZeRO-2 should.
        Collective.

        With ``parameters`` it only starts, and is local: these have all the gradients that the window will bring, kept
        by `no_sync` so far, so buckets that are complete are launched, in the order that is the same on all ranks. The
        next collective call finishes. That is what pipeline schedules expect of a ``grad_sync_func``. RuntimeError
        inside `no_sync`.
        """
        if parameters is None:
            self._follow_groups()
            self._engine.close_window()
        else:
            self._engine.start_window(self._trained.indices(parameters) or ())

    def param_sync(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Waits until the parameters (or ``parameters``) are those of the last step. Does nothing unless
        ``overlap_param_sync``. Can be a pipeline schedule's ``param_sync_func``: `step` has started the gathers.

        Needed only before something reads or writes a parameter's memory behind torch's Python functions, outside of the
        forwards that `prefetch_params` knows: docs/ordering.md, "Reading parameters while they are gathered", has the list.
        """
        self._engine.param_sync(self._trained.indices(parameters))

    def prefetch_params(self, model: torch.nn.Module) -> Callable[[], None]:
        """With ``overlap_param_sync``: every module waits for its own parameters just before its forward, and `step`
        gathers them in the order of these forwards. Does nothing otherwise.

        ``model`` may be a part of what is trained; call it for each of several. Of compiled models pass what is called
        from Python: ``torch.compile(model)``, or a model whose blocks are compiled; otherwise `step` waits.

        Returns a function that removes the hooks again; `close` does too.
        """
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
        """Clips the norm of all gradients (or of ``parameters``') together; returns the norm before. Collective.

        As `torch.nn.utils.clip_grad_norm_`: the factor is ``max_norm / (norm + 1e-6)``, at most 1. It is applied inside
        the next `step`, so it costs no pass over the gradients. The result is a 0-d tensor on the parameters' device,
        float32 (float64 if a parameter is), equal on all ranks; on CUDA nothing waits for the device. RuntimeError on all
        ranks if ``error_if_nonfinite`` and the norm is inf or NaN; nothing is clipped then.
        """
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
        """The norm that `clip_grad_norm_` would return, without clipping. Collective.

        Of this optimizer's gradients (or ``parameters``') alone, each element counted once: whole gradients, averaged
        over the data-parallel ranks, and equal on all of them. Where a model is spread over several optimizers, as its
        parts are with tensor parallelism, take the 2-norm of their norms (the maximum, for inf) over the ranks that
        hold the parts, and give the result to `clip_grads_with_norm_`. A parameter that several parts have a copy of
        must be left out of ``parameters`` in all but one of them.
        """
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
        """Clips all gradients (or ``parameters``') as if ``total_norm`` were their norm. Collective.

        As `torch.nn.utils.clip_grads_with_norm_`: the factor is ``max_norm / (total_norm + 1e-6)``, at most 1, applied
        inside the next `step`. Ranks must give the same norm: a number, or a tensor of one element; on the parameters'
        CUDA device nothing waits for it.
        """
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
        """The whole averaged (and clipped) gradient of ``param`` on every rank, fp32 (fp64 for a float64 parameter); None if
        no rank has one, and of a frozen parameter. Collective.
        """
        if not isinstance(param, Tensor):
            raise TypeError(f"param is {param!r}, expected a parameter")
        self._follow_groups()
        if any(param is frozen for frozen in self._trained.frozen):
            return None
        return self._engine.full_grad(self._trained.index_known(param, "full_grad"))

    # --- the rest of torch.optim.Optimizer ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, without communication (but with ``full_state_dict=True``): of sharded parameters this rank's part.

        ``state[i]`` holds ``step`` (float32, 0-d), ``exp_avg``, ``exp_avg_sq``, with ``amsgrad`` ``max_exp_avg_sq``, and,
        for bfloat16 and float16 parameters, ``master_param`` (fp32, also where it is kept as a remainder; not with
        ``master_weights="none"``). Over several ranks they are `bucketwheel.checkpoint.TensorShard`, which
        `torch.distributed.checkpoint` saves from all ranks together and loads at any other number of ranks; at world
        size 1 plain tensors of the parameter's shape. All are copies.

        For torch's ``get_optimizer_state_dict`` with ``full_state_dict=True``, which is collective, whole tensors.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._engine.param_sync()
        self._follow_state()
        saved = full_state.save_for_torch(self) or states.save(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned on this rank, or `torch.distributed.checkpoint` has loaded into that, or a full
        one: `torch.optim.AdamW`'s, or one of world size 1.

        The dict is not changed and states keep their dtype, whatever the parameter's and the dict's are. A dict of any
        ``master_weights`` and ``state_dtype`` will do (docs/numerics.md says what is exact); load the model first. States and
        settings follow ``param_names`` where both sides have them, else the order in ``param_groups``, as with torch.
        Collective: if it fails on one rank it fails on all, and nothing has been loaded anywhere. ValueError if groups,
        parameters, ``amsgrad`` or this rank's ranges do not match, or on another rank; KeyError if something is missing;
        RuntimeError while gradients are pending, which no step has used (call `step` or `zero_grad` first). Others stay.
        """
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
        """The whole state on rank ``dst`` of all ranks (None: on every one), as `torch.optim.AdamW.state_dict` returns it; {}
        on the others. On the CPU, each state in its own dtype. Others need ``chunk_bytes`` beside their states. Collective.
        Hooks of `state_dict` are not called.

        Args:
            path: rank ``dst`` writes the dict to this file, and returns {} too. ``torch.load(path, weights_only=True)`` reads
                it. It has this name once it is complete and synced; OSError where it cannot be written, on other ranks
                ValueError with its text.
            masters: with ``master_param``, which this optimizer needs to go on bitwise. `torch.optim.AdamW` loads one,
                rounded to the parameter's dtype, and never uses it.
            model: call parameters what it calls them, for `torch.distributed.checkpoint.state_dict`; else they are numbered.
        """
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
        """`load_state_dict` of a whole state that rank ``src`` of all ranks has (the others give None), or, with ``src`` None,
        every rank. Others need ``chunk_bytes`` beside their states. Collective, with the errors of `load_state_dict`; no hooks.

        ``state_dict``: what `full_state_dict`, `torch.optim.AdamW`, `ZeroRedundancyOptimizer` (consolidated) or
        ``get_optimizer_state_dict`` with ``full_state_dict=True`` returned (not flattened), or the path of a torch.save file
        of one. Where both sides have names, states and settings follow these; else the order in ``param_groups`` counts.
        """
        self._follow_groups()
        given = full_state.spread(self, state_dict, src, chunk_bytes)
        with failing_together(self._engine.expect_done_by_all, "load_full_state_dict"):
            load = states.plan_load(self, given)
        load()
        self._note_loaded()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does; at any time. Collective once the optimizer is made.

        The parameters are moved into flat memory of their own, with new states, and broadcast; buckets are formed anew.
        Gradients that there are stay, reduced by now. If it fails nothing has been added: ValueError or TypeError for
        parameters that cannot be trained and keys that look like an option, RuntimeError on all ranks where they were given
        different ones.
        """
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
        """The state of ``param`` as `torch.optim.AdamW` has it, on every rank: copies of ``step`` (float32, 0-d) and, in its
        shape, what else `state_dict` has. ``optimizer.state`` shows this rank's part alone. Collective.

        To go on with changed moments assign them to ``optimizer.state[param]``, or to that of a parameter that takes its
        place in the groups: the next step takes this rank's part of them.
        """
        self._follow_groups()
        self._follow_state()
        return full_state.whole_entry(self._engine, self._engine.infos[self._trained.index_known(param, "full_state")])

    def reset_state(self, parameters: Iterable[Parameter] | None = None, rows: Any = None) -> None:
        """Zeroes the moments and the step of all parameters, or of ``parameters``; with ``rows`` the moments of these alone: what
        indexes the first dimension of each (indices, a mask, a slice). Weights stay. Local, to be called alike by all ranks:
        RuntimeError on all in the next `step` if they have not.

        A parameter that is new in the groups starts anew. ValueError for one that is not trained by this optimizer, and for
        ``rows`` of a new one whose state was assigned: the next `step` takes it in.
        """
        states.reset_chosen(self, parameters, rows)

    def reload_master_params(self) -> None:
        """Takes the parameters as they are for the weights. Local.

        For edits that ``on_external_update`` "error" or "ignore" would not take, and where a remainder would add to what
        was written. Masters that round to the parameter stay. All ranks must have made the same edit.
        """
        self._engine.reload_masters()

    def describe(self) -> str:
        """A readable text: ranks, options, a line for each bucket (locally for each dtype), and totals. Local, the same on all
        ranks. The expected peak is that of docs/memory.md where gradients come in the order of the buckets."""
        return self._engine.describe()

    def memory_summary(self) -> dict[str, int]:
        """Bytes on this rank, exactly. Local. docs/memory.md has the formula of each.

        - ``params``: flat memory, of which ``params_padding`` belong to no parameter
        - ``grads``: gradient shards; locally the gradients there are
        - ``states``: all, and each that there is by its name, such as ``exp_avg``
        - ``pool``: reserved by the communicators' pools beside ``params``: ``planned`` for buckets, of which ``load`` are in use
          at once, what is on the ``side`` (``side_peak``: at most), and ``partial_sums`` with a ``replicate_group``
        - ``buckets``, ``buckets_peak``: those that have memory now, the most so far; ``held``, ``held_peak``: gradients that
          buckets on CUDA keep by reference until they are packed
        - ``bookkeeping``: step counts, factors, flags, sums of squares
        """
        return self._engine.memory()

    # [Note: wrappers of optimizers] Lightning and Fabric make a class of their own and ours and call our methods with an
    # object of it as ``self``: attributes are read from the optimizer then, but would be set on the wrapper. So none is
    # set after construction; what changes lies in objects that both see.

    def close(self) -> None:
        """Removes the hooks and gives parameters memory of their own again; the optimizer is of no use afterwards.
        Collective. Gradients that there are are dropped, whatever the ranks have done to theirs.

        If the communicator has failed its error is raised, after all of this has been done. Idempotent. A ``with``
        statement closes too; an exception that leaves it, SystemExit included, fails the communicator, which tells the
        other ranks.
        """
        if not self._made_engine.closed:
            self._made_engine.close("the optimizer is closed; make a new one for these parameters")

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """`close`. With an exception on its way the other ranks may never come to that, so they are told, and what it says
        is not hidden."""
        if kind is None:
            self.close()
            return
        if not self._made_engine.closed:
            self._made_engine.abort(f"{kind.__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # of the communicator, or of gradients that were left half done
            self.close()

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Asked for by `torch.distributed.algorithms.join.Join`: TypeError."""
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
    of_model = of_sharded(trained.infos, groups, options)
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
