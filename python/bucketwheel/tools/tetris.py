"""The Tetris view of a replay: offsets over steps, a rectangle for each interval of a key, coloured by role.

A line marks the lower bound, a bar the step in which most bytes are live. Needs matplotlib
(``pip install bucketwheel[plot]``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketwheel.tools.plan import Replay

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def drawn(replay: Replay, policy: str) -> Any:
    """The figure. Its axes have one collection for each role, with a polygon for each interval."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    from bucketwheel.pool.placement import aligned

    plan, lifetimes = replay.plan, replay.lifetimes
    found = replay.placement(policy)
    power = min(max(found.total_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    scale = 1 << 10 * power
    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    for key, intervals in lifetimes.intervals.items():
        low = found.offsets[key] / scale
        high = low + aligned(plan.sizes[key], plan.align) / scale
        role = lifetimes.keys[key].role if lifetimes.keys else "blocks"
        for start, stop in intervals:
            boxes.setdefault(role, []).append([(start, low), (stop, low), (stop, high), (start, high)])
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots()
    for number, (role, polygons) in enumerate(boxes.items()):
        axes.add_collection(
            PolyCollection(polygons, facecolor=f"C{number % 10}", edgecolor="white", linewidth=0.3, label=role)
        )
    load, step = plan.load_bytes / scale, plan.peak()[0]
    axes.axhline(load, color="black", linewidth=1, label="lower bound")
    axes.axvspan(step, step + 1, color="black", alpha=0.25, label=f"peak: step {step:,}")
    axes.set(xlim=(0, max(lifetimes.steps, 1)), ylim=(0, max(found.total_bytes / scale * 1.05, 1)))
    axes.set(xlabel="step", ylabel=f"offset, {_UNITS[power]}")
    axes.set_title(f"{plan.name}, {policy}: {found.total_bytes:,} bytes for a load of {plan.load_bytes:,}")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure
