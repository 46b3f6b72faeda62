"""Report: what an optimizer says of itself. Its table of buckets, and its bytes by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.precision import Precision

if TYPE_CHECKING:
    from bucketwheel.optim.local_engine import LocalEngine
    from bucketwheel.optim.sharded_engine import ShardedEngine

# --- bytes -----------------------------------------------------------------------------------------------------------


def memory_of(engine: ShardedEngine) -> dict[str, int]:
    """`ShardedAdamW.memory_summary` of a sharded optimizer."""
    found = Counter[str](dict.fromkeys(("params", "params_padding", "grads", "states"), 0))
    for space in engine.spaces:
        found["params"] += space.whole.nbytes
        found["params_padding"] += space.packing.padding * space.dtype.itemsize
        found["grads"] += space.grad.nbytes
        for name, shard in space.states.items():
            found["states"] += shard.nbytes
            found[name] += shard.nbytes
    found.update(engine.grads.memory())
    # Two of one pair have one pool, unless each registers its own.
    given = (engine.comm, engine.reducer._replicate)
    comms = [each for comm in given if comm is not None for each in (comm, comm.gathers)]
    pools = {pool._native: pool for pool in (engine.grads.side_pool, *(comm.pool for comm in comms))}.values()
    found["pool"] = sum(pool.stats().reserved_bytes for pool in pools) - found["params"]
    found["bookkeeping"] = engine.steps.nbytes + engine.reduced.bookkeeping_bytes
    return dict(found)


def memory_of_local(engine: LocalEngine) -> dict[str, int]:
    """`ShardedAdamW.memory_summary` of an optimizer of one process."""
    of_windows = (
        "planned",
        "load",
        "buckets",
        "buckets_peak",
        "side",
        "side_peak",
        "held",
        "held_peak",
        "partial_sums",
    )
    found = Counter[str](dict.fromkeys(("params_padding", "states", *of_windows, "pool"), 0))
    found["params"] = _bytes_of(info.param for info in engine.infos)
    found["grads"] = _bytes_of(info.param.grad for info in engine.infos if info.param.grad is not None)
    for name, state in ((name, tensor) for of_param in engine.states for name, tensor in of_param.items()):
        found["states"] += _bytes_of([state])
        found[name] += _bytes_of([state])
    found["bookkeeping"] = engine.steps.nbytes
    return dict(found)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _expected_peak(engine: ShardedEngine) -> dict[str, int]:
    """docs/memory.md: a rank's bytes at their most, by kind, where gradients come in the order of the buckets."""
    now = memory_of(engine)
    kinds = {name: now[name] for name in ("params", "grads", "states", "partial_sums")}
    kinds["buckets"] = now["planned"]
    kinds["autograd"] = max((_bytes_of([info.param]) for info in engine.infos), default=0)
    return {name: nbytes for name, nbytes in kinds.items() if nbytes}


# --- text ------------------------------------------------------------------------------------------------------------


def describe(engine: ShardedEngine) -> str:
    """`ShardedAdamW.describe` of a sharded optimizer; the same on all ranks."""
    comm, replicate, options = engine.comm, engine.reducer._replicate, engine.options
    ranks = f"sharded over {comm.size} {'rank' if comm.size == 1 else 'ranks'} ({comm.backend})"
    if replicate is not None:
        ranks += f", replicated {replicate.size} times ({replicate.backend})"
    usual = {field.name: field.default for field in fields(options) if field.default is not MISSING}
    said = [f"{name}={getattr(options, name)}" for name, value in usual.items() if getattr(options, name) != value]
    said.append(f"max_inflight_buckets={options.max_inflight_buckets}")
    said.append(f"buckets of {_size(engine.bucket_cap_bytes)}" if engine._flats else "buckets of sharded units")
    if comm.is_registered:
        said.append("registered memory")
    rows: list[Sequence[str]] = [("bucket", "wire", "MiB", "params", "padding", "cuts", "shard bytes", "from, to")]
    for bucket, by_rows in ((each.grads, each.by_rows) for each in engine._assembly.buckets):
        mib, used = f"{bucket.nbytes / 2**20:.3f}", sum(part.numel for part in bucket.parts)
        numbers = (
            str(len(bucket.parts)),
            f"{100 * (1 - used / bucket.numel):.1f} %",
            "rows" if by_rows else "elements",
            f"{bucket.nbytes // comm.size:,}",
        )
        names = _ends(engine.infos[index] for index in bucket.params)
        rows.append((str(bucket.index), _name(bucket.dtype), mib, *numbers, names))
    numel = sum(space.packing.numel for space in engine.spaces)
    padding = sum(space.packing.padding for space in engine.spaces)
    in_one_box = sum(space.packing.has_one_box(at) for space in engine.spaces for at in space.packed_at.values())
    peak, plan = _expected_peak(engine), engine.grads.plan
    kinds = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in peak.items())
    lines = [
        ranks,
        _precision_line(engine.infos, options.precision),
        ", ".join(said),
        *_table(rows),
        f"total: {len(engine.infos)} parameters, {in_one_box} in one box a rank, {numel - padding:,} elements, "
        f"{100 * padding / max(numel, 1):.1f} % padding, {len(engine._assembly.buckets)} buckets",
        f"expected peak of a rank: {_size(sum(peak.values()))} ({kinds}); buckets by plan: {_size(plan.total_bytes)}, "
        f"load {_size(plan.load_bytes)}",
    ]
    return "\n".join(lines)


def describe_local(engine: LocalEngine) -> str:
    """`ShardedAdamW.describe` of an optimizer of one process."""
    rows: list[Sequence[str]] = [("dtype", "params", "elements", "param bytes", "state bytes", "from, to")]
    for dtype in dict.fromkeys(info.dtype for info in engine.infos):
        chosen = [info for info in engine.infos if info.dtype == dtype]
        kept = sum(_bytes_of(engine.states[info.index].values()) for info in chosen)
        params = [info.param for info in chosen]
        numbers = (sum(param.numel() for param in params), _bytes_of(params), kept)
        rows.append((_name(dtype), str(len(chosen)), *(f"{number:,}" for number in numbers), _ends(chosen)))
    now = memory_of_local(engine)
    total = 2 * now["params"] + now["states"]
    lines = [
        f"local: one process, {len(engine.infos)} parameters, nothing is sharded",
        _precision_line(engine.infos, engine.precision),
        *_table(rows),
        f"expected peak: {_size(total)} ({total:,} bytes: parameters, as much for their gradients, states)",
    ]
    return "\n".join(lines)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.2f} KiB"


def _ends(infos: Iterable[ParamInfo]) -> str:
    """The names of the first and the last."""
    names = [info.name for info in infos]
    return ", ".join(dict.fromkeys([*names[:1], *names[-1:]]))


def _precision_line(infos: Sequence[ParamInfo], precision: Precision) -> str:
    """The parameters' dtypes, and the options of their precision that are not the usual ones."""
    dtypes = list(dict.fromkeys(_name(info.dtype) for info in infos))
    line = f"parameters: {', '.join(dtypes) or 'none'}"
    for name in ("state_dtype", "reduce_dtype", "accum_dtype"):
        dtype = getattr(precision, name)
        line += f"; {name}={_name(dtype)}" if dtype is not None else ""
    if precision.master_weights != "auto":
        line += f"; master_weights={precision.master_weights!r}"
    return line + ("; amsgrad" if precision.amsgrad else "")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns to the right, but for the last."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
