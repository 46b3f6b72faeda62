"""shard: shards the parameters of a model, and `ShardedModule`, the methods that the model gets."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bucketwheel.checkpoint.tensor_shard import TensorShard
from bucketwheel.comm.backends import LocalRank, LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.equal_lines import expect_equal_lines
from bucketwheel.comm.group_comms import close_all, communicators_for
from bucketwheel.comm.handle import Handle
from bucketwheel.comm.replicas import reducer_of
from bucketwheel.errors import ShardedParamError, expect_int
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.leased_params import LeasedParams, ShardedBy
from bucketwheel.layout.owners import owner_of
from bucketwheel.layout.precision import PARAM_DTYPES
from bucketwheel.residency.absent_param import Sharded, make_sharded, sharded
from bucketwheel.shard import report
from bucketwheel.shard.runtime import Runtime
from bucketwheel.shard.units import Unit, find_units
from bucketwheel.torch_internals import call_of_torch, keep_out_of_graphs

_BUCKET_BYTES = 64 * 2**20  # of gradients that are reduced at once: a unit's, where they are no more

_RUNTIME = "_bucketwheel_runtime"  # of a model


def shard(
    model: nn.Module,
    units: Any = (),
    *,
    group: dist.ProcessGroup | Communicator | LocalRank | None = None,
    replicate: dist.ProcessGroup | Communicator | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    prefetch: int = 1,
    reshard: bool | Mapping[Any, bool] = True,
    ignored: Iterable[nn.Module | nn.Parameter] = (),
    cast_inputs: bool = True,
) -> Any:
    """Shards the parameters of ``model`` over the ranks (ZeRO-3) and returns the model, now a `ShardedModule`. Collective.

    Make ``ShardedAdamW(model.parameters())`` afterwards; it updates the shards. The model is changed in place, and the
    `Parameter` objects stay the same. All ranks receive rank 0's values. During the call each rank has the complete model on
    its device.

    A unit is a set of parameters that are gathered by one all-gather and freed together. A parameter has values only during
    the forward and the backward of its unit. Outside of these it has a shape, a dtype and a device, and code that needs its
    values raises `ShardedParamError`. Each forward of the model or of a unit is collective, evaluations included.

    In the first step each unit is gathered when it is needed, and the order is recorded. From the second step on units are
    gathered ahead in the recorded order, in memory that is planned. docs/sharded_parameters.md lists what is sharded in each
    mode and what a model may do.

    Args:
        model: The model to shard. All its parameters are on the CPU or on one CUDA device and have no gradients. Dtypes
            float32, bfloat16, float16 and float64, also mixed.
        units: Modules of the model, or classes of modules, that are units, such as the blocks of a transformer. Units must not
            overlap. The root unit has all other parameters, and parameters that several units share. The root unit is gathered
            at the start of each forward of the model and freed at the end of its backward (of the forward, if no backward
            follows), once for each micro-batch.
        group: The ranks to shard over, as ``process_group`` of `ShardedAdamW`.
        replicate: The ranks that hold the same shards (HSDP), as ``replicate_group`` of `ShardedAdamW`.
        param_dtype: The dtype in which parameters are gathered and used. The shards in the original dtype become the
            optimizer's master weights. None means the original dtype.
        reduce_dtype: The dtype in which gradients are reduced. None means the default of ``reduce_dtype`` of `ShardedAdamW`.
        output_dtype: The dtype to which floating-point outputs of the model are cast. None means no cast.
        prefetch: Maximum number of units that are gathered ahead and not yet waited for. 0 gathers each unit when it is
            needed.
        reshard: True frees a unit after its forward, unless the unit is needed next. False keeps all units from forward to
            backward. A dict sets this for some units: the keys are modules, classes or names of units, the values bool.
        ignored: Parameters, or modules, that are not sharded. `ShardedAdamW` trains them as it trains the parameters of a
            model without `shard`.
        cast_inputs: Cast floating-point inputs of the model and of units to ``param_dtype``.

    Raises:
        ValueError: A parameter that cannot be sharded, units that overlap, or an option that is wrong or has no effect.
            Nothing has been moved.
        TypeError: An argument of the wrong type, or a parameter that is not a plain `torch.nn.Parameter`. Nothing has been
            moved.
        RuntimeError: Ranks disagree on the model or on the options. Raised on all ranks; nothing has been moved."""
    if expect_int(prefetch, "prefetch") < 0:
        raise ValueError(f"prefetch must be at least 0, got {prefetch}")
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype), ("output_dtype", output_dtype)):
        if dtype is not None and dtype not in PARAM_DTYPES:
            raise ValueError(f"{name} is {dtype}, expected None or one of {', '.join(map(str, PARAM_DTYPES))}")
    found = find_units(model, units, ignored=ignored, reshard=reshard)
    infos = [info for unit in found for info in unit.params]
    if not infos:
        raise ValueError("the model has no parameters to shard")
    if param_dtype is not None and all(info.dtype == param_dtype for info in infos):
        raise ValueError(f"param_dtype={param_dtype} has no effect: all parameters are {param_dtype}; leave it out")
    if reduce_dtype is not None and not any(info.param.requires_grad for info in infos):
        raise ValueError(f"reduce_dtype={reduce_dtype} has no effect: no parameter requires a gradient; leave it out")
    if reshard is not True and len(found) == 1:
        raise ValueError(f"reshard={reshard} has no effect: the model has no units but the root; pass units=")
    device = infos[0].device
    comm, replicas = communicators_for(group, replicate, device, None, "shard")
    comm = comm or Communicator(LocalWorld(1).rank(0), name="shard", device=device)
    owned = [made for made in (comm, replicas) if made is not None and made not in (group, replicate)]
    try:
        reducer = reducer_of(comm, replicas)
        options = (
            f"param_dtype={param_dtype}, reduce_dtype={reduce_dtype}, prefetch={prefetch}, reshard={reshard!r:.80}"
        )
        lines = [f"the options of bw.shard: {options}"] + [
            f"unit {unit.name!r}, stays {unit.stays}: {info.name!r} {tuple(info.param.shape)} {info.dtype} "
            f"{info.param.requires_grad}"
            for unit in found
            for info in unit.params
        ]
        expect_equal_lines(reducer, lines, "; every rank must shard the same model with the same options")
        # A dropped optimizer may have been collected on some ranks only, so all ranks hear of it.
        trained = [info.name for info in infos if owner_of(info.param) is not None]
        if any(reducer.exchange(b"trained" if trained else b"")):
            name = f"parameter {trained[0]!r}" if trained else "on another rank a parameter"
            raise ValueError(
                f"{name} has an optimizer already: close() it on all ranks, call bw.shard, then make the optimizer"
            )
        reducer._release()
    except BaseException:
        close_all(owned, 0.0)
        raise
    order = {id(param): place for place, param in enumerate(model.parameters())}
    keep_out_of_graphs()
    homes = [_homes_of(unit, comm, order, param_dtype, reduce_dtype) for unit in found]
    cast = param_dtype if cast_inputs else None
    runtime = Runtime(comm, found, homes, natives=reducer._natives, prefetch=prefetch, cast=(cast, output_dtype))
    by = ShardedBy(comm, replicas, (group, replicate), weakref.ref(runtime), weakref.WeakSet())
    for home in (home for of_unit in homes for home in of_unit):
        _take(home, comm, replicas, runtime)
        home.sharded_by = by
    runtime.by, runtime.owned = by, owned
    model.__class__ = type(f"Sharded{type(model).__name__}", (ShardedModule, type(model)), {})
    for module in model.modules():
        if any(sharded(p) is not None for p in module.parameters(recurse=False)):
            module.__dict__[_RUNTIME] = weakref.ref(runtime)
            module.register_state_dict_post_hook(_after_state_dict)
            module.register_load_state_dict_pre_hook(_before_load)
    model.__dict__[_RUNTIME] = runtime
    return model


def _homes_of(
    unit: Unit,
    comm: Communicator,
    order: Mapping[int, int],
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> list[LeasedParams]:
    """The parameters of a unit, by dtype and whether they are trained."""
    kinds: dict[tuple[torch.dtype, bool], list[ParamInfo]] = {}
    for info in unit.params:
        kinds.setdefault((info.dtype, info.param.requires_grad), []).append(info)
    return [
        LeasedParams(
            some,
            rank=comm.rank,
            world=comm.size,
            dtype=param_dtype or dtype,
            bucket_cap_bytes=_BUCKET_BYTES,
            reduce_dtype=reduce_dtype,
            pool=comm.gathers.pool,
            name=f"{unit.name}, {dtype}{'' if is_trained else ', frozen'}",
            order=order,
        )
        for (dtype, is_trained), some in kinds.items()
    ]


@torch.no_grad()
def _take(home: LeasedParams, comm: Communicator, replicas: Communicator | None, runtime: Runtime) -> None:
    """Takes rank 0's values of parameters apart, and their memory away."""
    flat = torch.zeros(home.packing.numel, dtype=home.kept_dtype, device=runtime.device)
    for begin, info in zip(home.packing.begins, home.infos, strict=True):
        flat.narrow(0, begin, info.param.numel()).as_strided(info.param.shape, info.stride).copy_(info.param)
    for each in (replicas, comm):
        if each is not None:
            each.broadcast(flat, 0).wait()
    home.take(flat)
    for packed, info in enumerate(home.infos):
        part = _Part(home, packed, runtime)
        make_sharded(info.param, Sharded(info.name, part.detached, part.write), runtime.blanks[id(info.param)])


class _Part:
    """This rank's part of a parameter, for what may be asked of it while it is absent. The parameter has this object, so it
    knows the others weakly."""

    def __init__(self, home: LeasedParams, packed: int, runtime: Runtime) -> None:
        self._home, self._packed, self._runtime = weakref.ref(home), packed, weakref.ref(runtime)
        self._name, self._stride = home.infos[packed].name, home.infos[packed].stride
        self._ranges = home.packing.ranges(packed, home.rank)

    def _alive(self) -> LeasedParams:
        home = self._home()
        if home is None:
            raise ShardedParamError(f"parameter {self._name!r} has no values: its sharded model was deleted")
        return home

    def detached(self, param: Tensor) -> Tensor:
        """A copy, as `state_dict` has it."""
        home = self._alive()
        piece = home.parts_of(self._packed, home.masters).clone()
        return TensorShard(piece, param.shape, self._stride, self._ranges, (home.rank, home.packing.world), self._name)

    @torch.no_grad()
    def write(self, param: Tensor, source: Tensor) -> None:
        """``param.copy_(source)``: of a whole tensor, or of a `TensorShard` of the same ranges. Local."""
        home = self._alive()
        if isinstance(source, TensorShard):
            if source.ranges != tuple(self._ranges) or source.shape != param.shape:
                raise ValueError(
                    f"parameter {self._name!r}: this rank has elements {self._ranges}, but the given part has "
                    f"{source.ranges}; use torch.distributed.checkpoint or bw.checkpoint.load, for any world size"
                )
            part = source.piece
        else:
            whole = torch.empty_strided(param.shape, self._stride, dtype=source.dtype, device=home.values.device)
            flat = whole.copy_(source).as_strided((param.numel(),), (1,))
            part = torch.cat([flat[:0], *(flat[begin:end] for begin, end in self._ranges)])
        if (runtime := self._runtime()) is not None:
            runtime.before_write()
        for kept in (home.values, home.masters):
            if kept is not None:
                home.parts_of(self._packed, kept).copy_(part)
        torch.autograd.graph.increment_version(param)


def _runtime_at(module: nn.Module) -> Runtime | None:
    found = module.__dict__.get(_RUNTIME)
    return found() if isinstance(found, weakref.ref) else found


def _before_load(module: nn.Module, _: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError("load_state_dict(assign=True) would replace sharded parameters: call it without assign")
    if (runtime := _runtime_at(module)) is not None and not runtime.is_held:
        runtime.before_write()


def _after_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Parameters that are gathered are copies in full_params(), and else this rank's parts as the others: their memory is
    leased."""
    runtime = _runtime_at(module)
    is_held = runtime is not None and runtime.is_held
    options = (call_of_torch("_get_model_state_dict") or {}).get("info")
    for name, param in module.named_parameters(prefix=prefix[:-1], recurse=False, remove_duplicate=False):
        value, says = state_dict.get(name), sharded(param)
        if says is None or not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            continue
        if not is_held and getattr(options, "full_state_dict", False):
            raise ValueError(
                f"get_model_state_dict(full_state_dict=True): parameter {name!r} is sharded; call it inside "
                "`with model.full_params():`"
            )
        if not isinstance(value, TensorShard):
            state_dict[name] = value.clone() if is_held else says.detached(param)


def runtime_of(model: nn.Module) -> Runtime:
    """TypeError for a model that `shard` has not returned."""
    runtime = model.__dict__.get(_RUNTIME)
    if not isinstance(runtime, Runtime):
        raise TypeError(f"{type(model).__name__} is not sharded: pass the model that you gave to bw.shard")
    return runtime


class ShardedModule(nn.Module):
    """Methods that `shard` adds to a model. The class of a sharded model is a subclass of its former class and of this one.

    A unit is named by its module or by the module's name in ``model.named_modules()``. The root unit is named by the model or
    by ``"root"``. A sharded model cannot be copied: ``copy.deepcopy`` raises TypeError."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context in which backward accumulates gradients on this rank without reducing them. Local.

        Enters `ShardedAdamW.no_sync` of all optimizers that train the model's parameters."""
        stack = ExitStack()
        for engine in list(runtime_of(self).by.engines):
            stack.enter_context(engine.no_sync())
        return stack

    def unshard(self, unit: Any, stream: Any = None) -> Handle:
        """Starts the gather of a unit and returns its handle. Collective.

        Call `Handle.wait` before you use the parameters. The unit stays gathered until the end of its next forward with
        gradients, its next backward, or the next step. Use it before you call a method of a module other than its forward.

        Args:
            unit: A module that is a unit, or the name of a unit.
            stream: The native stream for the gather. None means the communicator's stream.

        Returns:
            The handle of the gather.

        Raises:
            ValueError: ``unit`` is not a unit of this model.
            RuntimeError: Before the order of the units is recorded: the ranks called it for different units. Raised on all
                ranks."""
        runtime = runtime_of(self)
        number = _number_of(runtime, unit)
        with runtime.unshards:
            native = runtime.native.hold(number, stream)
        runtime.native.let_go(number, keeps=True)
        return Handle(native, runtime.comm.gathers)

    def unshard_all(self) -> None:
        """Gathers all units and waits for them, as `unshard` does for one. Collective.

        Call it before you generate many tokens, so that no token waits for a gather."""
        handles = [self.unshard(unit.name) for unit in runtime_of(self).units]
        for handle in handles:
            handle.wait()

    @contextlib.contextmanager
    def full_params(self) -> Iterator[None]:
        """Context in which all parameters have their values on every rank. Collective, at its start and at its end.

        Writes to parameters inside are kept; write the same values on all ranks. With ``param_dtype`` the parameters have that
        dtype inside: a value that you write is rounded to it, and elements that you do not change keep their master weights.
        ``model.state_dict()`` returns copies of the full tensors inside.

        Raises:
            RuntimeError: A step, a load into the optimizer, or `bw.checkpoint.load`, inside the context.
                ``model.load_state_dict`` with full tensors works.
            ShardedParamError: At its end: a parameter was given a tensor of another dtype or shape."""
        runtime = runtime_of(self)
        with runtime.held(range(len(runtime.units))):
            yield

    @contextlib.contextmanager
    def regime(self, name: str) -> Iterator[None]:
        """Context in which forwards have a recorded order, and a memory plan, of their own. Local; all ranks must use it alike.

        Use it for forwards that run the units in another order than training. Without it, forwards with gradients belong to
        the regime ``"train"`` and forwards without gradients to ``"eval"``.

        Args:
            name: The name of the regime. The order is recorded in its first pass and used from the second one on."""
        with runtime_of(self).regime(name):
            yield

    def plan_report(self) -> str:
        """Returns a readable text: units, bytes, the recorded orders, the memory plan with its lower bound, peaks and counters.
        Local."""
        return report.text_of(runtime_of(self))

    def residency_counts(self) -> dict[str, Any]:
        """Returns counters since `shard`. Local.

        - ``gathers``: number of gathers, by unit
        - ``waited_s``: seconds that the host has waited for gathers, by unit
        - ``step_gathers``: number of gathers since the last step, by unit; if there was none since, gathers in the last step
        - ``regathered_bytes``: bytes of the repeated gathers among ``step_gathers``
        - ``wasted``, ``wasted_bytes``: number and bytes of gathers that no module has waited for
        - ``divergences``: number of times that a unit was needed out of the recorded order
        - ``planned``, ``load``: bytes of the plan for gathered parameters, and the lower bound of any plan
        - ``live``, ``peak``: bytes of gathered parameters now, and the most since the plan was made
        - ``side``, ``side_peak``: the part of ``live`` that has no planned place, and the most since the plan was made"""
        return report.counts_of(runtime_of(self))

    def close(self) -> None:
        """Closes the communicators that `shard` has made. Collective; the model cannot be used afterwards.

        Call `ShardedAdamW.close` first. Communicators that you passed to `shard` stay open."""
        runtime_of(self).before_write()
        runtime_of(self).close()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a sharded model cannot be copied: save its state_dict(), or copy it before bw.shard")


def _number_of(runtime: Runtime, unit: Any) -> int:
    for number, one in enumerate(runtime.units):
        if unit == one.name or any(unit is module() for module in runtime.modules[number]):
            return number
    names = ", ".join(repr(one.name) for one in runtime.units[:8])
    raise ValueError(f"{unit!r:.80} is not a unit; units are {names}{', ...' if len(runtime.units) > 8 else ''}")
