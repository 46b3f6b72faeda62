"""shard: makes a model's parameters sharded ones, and what the model then can do."""

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
    """Shards the parameters of ``model`` over the ranks (ZeRO-3) and returns the model, as a `ShardedModule`. Collective.

    Then make ``ShardedAdamW(model.parameters())``; it steps the shards. The `Parameter` objects stay. Outside of the forward
    and backward of its unit a parameter has no values: its shape, dtype and device answer, `ShardedParamError` is raised where
    values are needed. All ranks take rank 0's values.

    In the first step units are gathered when they are needed, and the order is recorded; from the second step on they are
    gathered ahead, in memory that is planned. docs/parallelism.md has tables of what is sharded when, and of what a model
    may do.

    Args:
        units: modules, or classes of modules, whose parameters come and go together: the blocks of a transformer. They must
            not overlap. Parameters outside of them, and those that several of them have, are one unit, the *root*, which is
            gathered from the begin of the model's forward to the end of backward.
        group: the ranks to shard over, as ``process_group`` of `ShardedAdamW`.
        replicate: the ranks that have the same shards (HSDP), as ``replicate_group`` of `ShardedAdamW`.
        param_dtype: in which parameters are gathered and used. The given ones stay beside as the optimizer's master weights.
            None: as they are.
        reduce_dtype: in which gradients are reduced; None: as `ShardedAdamW` says.
        output_dtype: of floating outputs of the model; None: as they are.
        prefetch: how many units are at most gathered and not yet waited for.
        reshard: False keeps units between forward and backward. A dict says so by unit: modules, classes or names.
        ignored: parameters, or modules, that stay whole on all ranks; an optimizer treats them as ever.
        cast_inputs: floating inputs of the model and of units get ``param_dtype``.

    Raises:
        ValueError, TypeError: naming the parameter, unit or option; nothing has been moved.
        RuntimeError: ranks disagree on the model or the options.
    """
    if expect_int(prefetch, "prefetch") < 0:
        raise ValueError(f"prefetch must be at least 0, got {prefetch}")
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype), ("output_dtype", output_dtype)):
        if dtype is not None and dtype not in PARAM_DTYPES:
            raise ValueError(f"{name}={dtype}: None or one of {', '.join(map(str, PARAM_DTYPES))} is expected")
    found = find_units(model, units, ignored=ignored, reshard=reshard)
    infos = [info for unit in found for info in unit.params]
    if not infos:
        raise ValueError("the model has no parameters to shard")
    if param_dtype is not None and all(info.dtype == param_dtype for info in infos):
        raise ValueError(f"param_dtype={param_dtype} has no effect: all parameters are {param_dtype}; leave it out")
    if reduce_dtype is not None and not any(info.param.requires_grad for info in infos):
        raise ValueError(f"reduce_dtype={reduce_dtype} has no effect: no parameter requires a gradient; leave it out")
    if reshard is not True and len(found) == 1:
        raise ValueError(f"reshard={reshard} has no effect: there are no units beside the root; give units")
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
        expect_equal_lines(reducer, lines, "; every rank must shard the same model alike")
        reducer._release()
    except BaseException:
        close_all(owned, 0.0)
        raise
    order = {id(param): place for place, param in enumerate(model.parameters())}
    keep_out_of_graphs()
    homes = [_homes_of(unit, comm, order, param_dtype, reduce_dtype) for unit in found]
    cast = param_dtype if cast_inputs else None
    runtime = Runtime(comm, found, homes, prefetch=prefetch, cast=(cast, output_dtype))
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
            raise ShardedParamError(f"the sharded model of parameter {self._name!r} is gone, and its values with it")
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
                    f"parameter {self._name!r}: this rank has {self._ranges} of it, and the given part is {source.ranges}; "
                    "load it with torch.distributed.checkpoint or bw.checkpoint.load, which read any world size"
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
        raise ValueError("load_state_dict(assign=True) would replace sharded parameters: leave assign out")
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
        raise TypeError(f"{type(model).__name__} is not sharded: give the model that bw.shard was called with")
    return runtime


class ShardedModule(nn.Module):
    """What `shard` adds to a model. Units are named by a module of theirs, or as in ``model.named_modules()``."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """`ShardedAdamW.no_sync` of the optimizers of its parameters."""
        stack = ExitStack()
        for engine in list(runtime_of(self).by.engines):
            stack.enter_context(engine.no_sync())
        return stack

    def unshard(self, unit: Any, stream: Any = None) -> Handle:
        """Starts the gather of a unit, which stays until the end of its next training forward or backward, or the next
        step. Its parameters are the gathered ones at once, and have their values when the handle says so. Collective."""
        runtime = runtime_of(self)
        number = _number_of(runtime, unit)
        native = runtime.native.hold(number, stream)
        runtime.native.let_go(number, keeps=True)
        return Handle(native, runtime.comm.gathers)

    def unshard_all(self) -> None:
        """`unshard` of all units, and waits: for a generation of many tokens. Collective."""
        handles = [self.unshard(unit.name) for unit in runtime_of(self).units]
        for handle in handles:
            handle.wait()

    @contextlib.contextmanager
    def full_params(self) -> Iterator[None]:
        """All parameters are whole inside, on every rank. What is written to them there counts; write the same on all ranks.
        With master weights (``param_dtype``) writes are rounded to the parameters' dtype. Collective, also at its end."""
        runtime = runtime_of(self)
        with runtime.held(range(len(runtime.units))):
            yield

    @contextlib.contextmanager
    def regime(self, name: str) -> Iterator[None]:
        """Forwards inside have a record, and a plan, of their own: for an order that is not that of training. Without it
        forwards with gradients are in the regime "train" and others in "eval"."""
        with runtime_of(self).regime(name):
            yield

    def plan_report(self) -> str:
        """Units, bytes, the recorded order, the memory plan with its lower bound, peaks and counters, as text. Local."""
        return report.text_of(runtime_of(self))

    def residency_counts(self) -> dict[str, Any]:
        """Counters since `shard`. Local.

        - ``gathers``, ``waited_s``: by unit, how often it was gathered and how long the host waited for that
        - ``wasted``, ``wasted_bytes``: gathers that nobody waited for
        - ``step_gathers``: by unit, gathers since the last step, or in it if nothing has been gathered since
        - ``regathered_bytes``: of units that were gathered more than once there
        - ``divergences``: events that the record did not have next
        - ``planned``, ``load``: bytes of the plan of gathered parameters, and its lower bound
        - ``live``, ``peak``, ``side``, ``side_peak``: bytes of gathered parameters now and at most since the plan was made, and
          of these beside the plan
        """
        return report.counts_of(runtime_of(self))

    def close(self) -> None:
        """Ends the communicators that `shard` has made, after `ShardedAdamW.close`; the model is of no use afterwards.
        Collective."""
        runtime_of(self).before_write()
        runtime_of(self).close()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a sharded model cannot be copied: save its state_dict(), or copy it before bw.shard")


def _number_of(runtime: Runtime, unit: Any) -> int:
    for number, one in enumerate(runtime.units):
        if unit == one.name or any(unit is module() for module in runtime.modules[number]):
            return number
    names = ", ".join(repr(one.name) for one in runtime.units[:8])
    raise ValueError(f"{unit!r:.80} is no unit; units are {names}{', ...' if len(runtime.units) > 8 else ''}")
