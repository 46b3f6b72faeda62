"""Report: what a sharded model says of its units, its record, its memory and its gathers."""

from __future__ import annotations

from typing import Any

from bucketwheel.shard.runtime import Runtime

_KINDS = ("+", "", "-", "end")  # of events: before forward, after it, before backward, the end of backward
_SHOWN = 40


def counts_of(runtime: Runtime) -> dict[str, Any]:
    counts, memory = runtime.native.counts(), runtime.native.memory_counts()
    names = [unit.name for unit in runtime.units]
    in_step = counts["step_gathers"]
    return {
        "gathers": dict(zip(names, counts["gathers"], strict=True)),
        "step_gathers": dict(zip(names, in_step, strict=True)),
        "waited_s": dict(zip(names, runtime.native.waited_s(), strict=True)),
        "regathered_bytes": sum((n - 1) * size for n, size in zip(in_step, runtime.sizes, strict=True) if n > 1),
        "wasted": counts["wasted"],
        "wasted_bytes": memory["wasted"],
        "divergences": runtime.native.divergences,
        **{name: memory[name] for name in ("planned", "load", "live", "peak", "side", "side_peak")},
    }


def text_of(runtime: Runtime) -> str:
    counts = counts_of(runtime)
    rank, world = runtime.comm.rank, runtime.comm.size
    lines = [f"{len(runtime.units)} units over {world} ranks (this is rank {rank}), prefetch {runtime.prefetch}"]
    for unit, homes, size in zip(runtime.units, runtime.homes, runtime.sizes, strict=True):
        kinds = ", ".join(f"{home.name.partition(', ')[2]} {home.packing.numel:,}" for home in homes)
        stays = ", stays after forward" if unit.stays else ""
        lines.append(
            f"  {unit.name}: {len(unit.params)} parameters, {size:,} bytes gathered ({kinds or 'nothing'}){stays}; gathered "
            f"{counts['gathers'][unit.name]} times, waited {counts['waited_s'][unit.name] * 1e3:.2f} ms"
        )
    for regime, name in enumerate(runtime.regimes):
        record = [(kind, unit) for kind, unit in runtime.native.record(regime) if _KINDS[kind]]
        if record:
            order = " ".join(
                f"{_KINDS[kind]}{runtime.units[unit].name if kind != 3 else ''}" for kind, unit in record[:_SHOWN]
            )
            lines.append(f"order of {name!r}: {order}{' ...' if len(record) > _SHOWN else ''}")
    if runtime.plan is None:
        lines.append("memory: no plan yet; it is made at the end of the first step")
    else:
        lines.append(
            f"memory: plan {counts['planned']:,} bytes, lower bound (load) {counts['load']:,}, gap {100 * runtime.plan.gap:.1f} %"
        )
    lines.append(f"peak {counts['peak']:,} bytes, of these outside the plan {counts['side_peak']:,}")
    lines.append(
        f"gathered but not used: {counts['wasted']} ({counts['wasted_bytes']:,} bytes); gathered again in the last step: "
        f"{counts['regathered_bytes']:,} bytes; divergences: {counts['divergences']}"
    )
    return "\n".join(lines)
