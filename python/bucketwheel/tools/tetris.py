"""The Tetris view of a replay: offsets over events, a rectangle for each interval of a key, coloured by role.

A policy of others is drawn beside ours. A line marks the lower bound, a bar the event at which most bytes are live. Needs
matplotlib (``pip install bucketwheel[plot]``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketwheel.tools.plan import Replay

_MIB = 2**20
_FONT_PT = 6.0


def drawn(replay: Replay, policy: str) -> Any:
    """The figure. Its axes, of ``place`` and of another policy, have one collection for each role, with a polygon for each
    interval."""
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(["place", policy]))
    figure = Figure(figsize=(8 * len(policies) + 2, 7), layout="constrained")
    panels = figure.subplots(1, len(policies), sharey=True, squeeze=False)[0]
    highest = max(replay.placement(name).total_bytes for name in policies) / _MIB
    for axes, name in zip(panels, policies, strict=True):
        axes.set(xlim=(0, max(replay.lifetimes.steps, 1)), ylim=(0, 1.05 * highest or 1), xlabel="event of the trace")
        _draw(axes, replay, name)
    panels[0].set(ylabel="offset, MiB")
    figure.suptitle(replay.plan.name)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def _draw(axes: Any, replay: Replay, policy: str) -> None:
    from matplotlib.collections import PolyCollection

    from bucketwheel.pool.placement import aligned

    plan, lifetimes, found = replay.plan, replay.lifetimes, replay.placement(policy)
    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    for key, intervals in lifetimes.intervals.items():
        low = found.offsets[key] / _MIB
        high = low + aligned(plan.sizes[key], plan.align) / _MIB
        role = lifetimes.keys[key].role if lifetimes.keys else "blocks"
        for start, stop in intervals:
            boxes.setdefault(role, []).append([(start, low), (stop, low), (stop, high), (start, high)])
            _label(axes, key, (start, stop), (low, high))
    for number, (role, polygons) in enumerate(boxes.items()):
        axes.add_collection(
            PolyCollection(polygons, facecolor=f"C{number % 10}", edgecolor="white", linewidth=0.3, label=role)
        )
    load, event = plan.load_bytes / _MIB, plan.peak()[0]
    axes.axhline(load, color="black", linewidth=1, label="lower bound")
    axes.axvspan(event, event + 1, color="black", alpha=0.25, label=f"peak: event {event:,}")
    over = 100 * (found.total_bytes / plan.load_bytes - 1) if plan.load_bytes else 0.0
    axes.set_title(f"{policy}: {found.total_bytes / _MIB:,.2f} MiB, {over:.1f} % above the lower bound")


def _label(axes: Any, key: str, events: tuple[int, int], offsets: tuple[float, float]) -> None:
    """Write the key into its rectangle, along or upright, if it has room for it."""
    (left, right), (low, high) = events, offsets
    width_pt, height_pt = 540 * (right - left) / axes.get_xlim()[1], 430 * (high - low) / axes.get_ylim()[1]
    needed_pt = 0.6 * _FONT_PT * len(key)
    if min(max(width_pt, height_pt) - needed_pt, min(width_pt, height_pt) - _FONT_PT) > 0:
        axes.text(
            *((left + right) / 2, (low + high) / 2, key),
            **{"ha": "center", "va": "center", "fontsize": _FONT_PT, "color": "white", "clip_on": True},
            rotation=0 if width_pt > needed_pt else 90,
        )
