"""Report: what an optimizer says of itself. Its table of buckets, its bytes by kind, and a warning of padding."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.replicas import Reducer
from bucketwheel.grads.bucket import GradBucket
from bucketwheel.grads.window import GradWindow
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.precision import Precision
from bucketwheel.layout.shards import Space

__all__ = ["ShardedParts", "describe", "describe_local", "memory_of", "memory_of_local", "warn_of_padding"]

LEAST_UTILISATION = 0.7
_WORTH_A_WARNING_BYTES = 1 << 20
_warned = False

# Options of the sharded optimizer that a description names where they are another value.
_USUAL = {
    "gradient_average": True,
    "broadcast_params": True,
    "overlap_grad_sync": True,
    "overlap_param_sync": False,
    "static_graph": False,
    "capturable": False,
    "on_external_update": "resync",
}


@dataclass(frozen=True)
class ShardedParts:
    """What a sharded engine is made of. ``options``: `ShardedOptions`."""

    comm: Communicator
    reducer: Reducer
    options: Any
    infos: Sequence[ParamInfo]
    spaces: Sequence[Space]
    grads: GradWindow
    steps: Tensor
    bucket_cap_bytes: int

    @property
    def buckets(self) -> Sequence[GradBucket]:
        return self.grads.buckets

    @property
    def replicas(self) -> int:
        return 1 if self.reducer.replicate is None else self.reducer.replicate.size


# --- bytes -----------------------------------------------------------------------------------------------------------


def memory_of(parts: ShardedParts) -> dict[str, int]:
    """`ShardedAdamW.memory_summary` of a sharded optimizer."""
    found = Counter[str]()
    for space in parts.spaces:
        found["params"] += space.flat.lease.nbytes
        found["params_padding"] += space.packing.padding * space.dtype.itemsize
        found["grads"] += space.grad.nbytes
        for name, shard in space.states.items():
            found["states"] += shard.nbytes
            found[name] += shard.nbytes
    found.update(parts.grads.launcher.memory())
    found["partial_sums"] = parts.reducer.partial_bytes
    # Two of one pair have one pool, unless each registers its own.
    comms = [each for comm in parts.reducer.comms for each in (comm, comm.gathers)]
    pools = {pool._native: pool for pool in (parts.grads.launcher.pool, *(comm.pool for comm in comms))}.values()
    found["pool"] = sum(pool.stats().reserved_bytes for pool in pools) - found["params"]
    found["bookkeeping"] = parts.steps.nbytes + parts.grads.reduced.bookkeeping_bytes
    return dict(found)


def memory_of_local(infos: Sequence[ParamInfo], states: Sequence[dict[str, Tensor]], steps: Tensor) -> dict[str, int]:
    """`ShardedAdamW.memory_summary` of an optimizer of one process."""
    found = Counter[str]()
    found["params"] = _bytes_of(info.param for info in infos)
    found["grads"] = _bytes_of(info.param.grad for info in infos if info.param.grad is not None)
    for name, state in ((name, tensor) for of_param in states for name, tensor in of_param.items()):
        found["states"] += _bytes_of([state])
        found[name] += _bytes_of([state])
    for name in ("params_padding", "states", "buckets", "buckets_peak", "slots", "captured", "partial_sums", "pool"):
        found[name] += 0
    found["bookkeeping"] = steps.nbytes
    return dict(found)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def expected_peak(parts: ShardedParts) -> dict[str, int]:
    """docs/memory.md: a rank's bytes at their most, by kind, where gradients come in the order of the buckets."""
    options, now = parts.options, memory_of(parts)
    kinds = {name: now[name] for name in ("params", "grads", "states", "slots", "partial_sums")}
    kinds["buckets"] = bucket_bound(
        [bucket.nbytes for bucket in parts.buckets],
        options.max_inflight_buckets,
        len(parts.spaces),
        overlap=options.overlap_grad_sync,
        has_slots=now["slots"] > 0,
    )
    kinds["autograd"] = max((_bytes_of([info.param]) for info in parts.infos), default=0)
    return {name: nbytes for name, nbytes in kinds.items() if nbytes}


def bucket_bound(sizes: Sequence[int], limit: int, dtypes: int, *, overlap: bool, has_slots: bool) -> int:
    """The most bytes that buckets of these ``sizes`` have at once where gradients come in their order, beside slots.

    ``limit`` - 1 are being reduced, while one of each dtype gathers; without ``overlap`` all gather. Slots have as many as
    ``limit`` says; only what is too early for its slot has other memory.
    """
    alive = limit - 1 + dtypes if overlap else len(sizes)
    return sum(sorted(sizes, reverse=True)[: max(alive - limit, 0) if has_slots else alive])


def wire_bytes(buckets: int, params: int, partial_sums: int, ranks: int, replicas: int) -> int:
    """What a rank sends in a step with one window: its part of all reduce-scatters and all-gathers, of these bytes.

    ``partial_sums``: bytes of a rank's shards of all buckets, as they go through the replicas.
    """
    among_ranks = (buckets + params) // ranks * (ranks - 1)
    return among_ranks + 2 * partial_sums * (replicas - 1) // replicas


# --- text ------------------------------------------------------------------------------------------------------------


def describe(parts: ShardedParts) -> str:
    """`ShardedAdamW.describe` of a sharded optimizer; the same on all ranks."""
    comm, replicate, options = parts.comm, parts.reducer.replicate, parts.options
    ranks = f"sharded over {comm.size} {'rank' if comm.size == 1 else 'ranks'} ({comm.backend})"
    if replicate is not None:
        ranks += f", replicated {replicate.size} times ({replicate.backend})"
    said = [f"{name}={getattr(options, name)}" for name, usual in _USUAL.items() if getattr(options, name) != usual]
    said += [f"max_inflight_buckets={options.max_inflight_buckets}", f"buckets of {_size(parts.bucket_cap_bytes)}"]
    if comm.is_registered:
        said.append("registered memory")
    rows = [
        (
            str(bucket.index),
            _name(bucket.dtype),
            f"{bucket.nbytes / 2**20:.3f}",
            str(len(bucket.parts)),
            f"{100 * (1 - _used(bucket) / bucket.numel):.1f} %",
            f"{bucket.nbytes // comm.size:,}",
            *_ends([parts.infos[index].name for index in bucket.parts]),
        )
        for bucket in parts.buckets
    ]
    titles = ("bucket", "wire", "MiB", "params", "padding", "shard bytes", "first", "last")
    return "\n".join(
        [
            ranks,
            _precision_line(parts.infos, options.precision),
            ", ".join(said),
            *_table(titles, rows),
            *_totals(parts),
        ]
    )


def _totals(parts: ShardedParts) -> list[str]:
    numel = sum(space.packing.numel for space in parts.spaces)
    padding = sum(space.packing.padding for space in parts.spaces)
    size = parts.comm.size
    sums = sum(b.numel // size * (8 if b.dtype == torch.float64 else 4) for b in parts.buckets)
    sent = wire_bytes(
        sum(bucket.nbytes for bucket in parts.buckets),
        sum(space.flat.lease.nbytes for space in parts.spaces),
        sums if parts.replicas > 1 else 0,
        size,
        parts.replicas,
    )
    peak = expected_peak(parts)
    kinds = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in peak.items())
    return [
        f"total: {len(parts.infos)} parameters, {numel - padding:,} elements, {100 * padding / max(numel, 1):.1f} % padding, "
        f"{len(parts.buckets)} buckets",
        f"sent by a rank in a step: {_size(sent)} ({sent:,} bytes)",
        f"expected peak of a rank: {_size(sum(peak.values()))} ({kinds})",
    ]


def describe_local(infos: Sequence[ParamInfo], states: Sequence[dict[str, Tensor]], precision: Precision) -> str:
    """`ShardedAdamW.describe` of an optimizer of one process."""
    rows = []
    total = 0
    for dtype in dict.fromkeys(info.dtype for info in infos):
        chosen = [info for info in infos if info.dtype == dtype]
        params = _bytes_of(info.param for info in chosen)
        kept = sum(_bytes_of(states[info.index].values()) for info in chosen)
        total += 2 * params + kept
        numel = f"{sum(info.param.numel() for info in chosen):,}"
        names = _ends([info.name for info in chosen])
        rows.append((_name(dtype), str(len(chosen)), numel, f"{params:,}", f"{kept:,}", *names))
    titles = ("dtype", "params", "elements", "param bytes", "state bytes", "first", "last")
    return "\n".join(
        [
            f"local: one process, {len(infos)} parameters, nothing is sharded",
            _precision_line(infos, precision),
            *_table(titles, rows),
            f"expected peak: {_size(total)} ({total:,} bytes: parameters, as much for their gradients, states)",
        ]
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.2f} KiB"


def _used(bucket: GradBucket) -> int:
    return sum(part.numel for part in bucket.parts.values())


def _ends(names: Sequence[str]) -> tuple[str, str]:
    """The first and the last of ``names``; the last is empty where that is the same."""
    return (names[0] if names else "", names[-1] if len(names) > 1 else "")


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


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns; numbers to the right, names to the left."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    is_name = [title in ("wire", "dtype", "first", "last") for title in titles]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_name, strict=True)
        ).rstrip()
        for row in (titles, *rows)
    ]


# --- padding ---------------------------------------------------------------------------------------------------------


def warn_of_padding(spaces: Sequence[Space]) -> None:
    """Warns, once in a process, where less than 70 % of the buckets are parameters and a MiB or more is lost."""
    global _warned
    numel = sum(space.packing.numel for space in spaces)
    padding = sum(space.packing.padding for space in spaces)
    lost = sum(space.packing.padding * space.dtype.itemsize for space in spaces)
    if _warned or lost < _WORTH_A_WARNING_BYTES or numel - padding >= LEAST_UTILISATION * numel:
        return
    _warned = True
    strictest = max((item.granularity for space in spaces for item in space.packing.items), default=1)
    why = (
        f"parameters may be cut only at multiples of up to {strictest} elements ('granularity'): use a smaller one, or a "
        "larger bucket_cap_mb"
        if strictest > 1
        else "every parameter begins at a multiple of 64 elements: join small ones, or leave them to another optimizer"
    )
    warnings.warn(
        f"{100 * (numel - padding) / numel:.0f} % of the optimizer's buckets are parameters, the rest ({_size(lost)} of "
        f"parameter memory, and as many elements of gradients and states over all ranks) is padding; {why}",
        stacklevel=5,
    )
