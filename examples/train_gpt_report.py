"""What train_gpt.py prints and draws: memory, tokens/s and losses of each system.

- *Memory* is in bytes a parameter: how much a rank's memory grew, from before the model was made to the peak, divided by
  the parameters of the whole model; the mean over the ranks (train_gpt_processes.py). Parameters, gradients, optimizer
  states and buffers are the tensors and pools that rank 0 holds after the last backward. The rest is the peak less these:
  activations, temporaries, what gloo and malloc take; for FSDP2 also gathered parameters and what it reduces.
- *Time* is rank 0's, medians over the second half of the steps, in which memory is not watched. Communication is part of
  the phase that waits for it.

    python examples/train_gpt_report.py FOLDER...    # memory_by_ranks.png in the first, with the points of all
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memory_formula import Sizes, bytes_per_parameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from train_gpt import Record

REST = "rest at the peak"
MEMORY = {"params": "parameters", "grads": "gradients", "states": "optimizer states", "pool": "buffers", REST: REST}
DEMO, BY_RANKS, POINTS = "demo.png", "memory_by_ranks.png", "demo.json"
LABELS = {
    "ddp": "DDP",
    "zero": "ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "bw.ShardedAdamW": "bw.ShardedAdamW",
    "bw.shard": "bw.shard",
}
SHARDED = {"ddp": "-", "zero": "ZeRO-1", "fsdp2": "ZeRO-3", "bw.ShardedAdamW": "ZeRO-2", "bw.shard": "ZeRO-3"}
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#c9c9c9"
COLORS = {"ddp": GREY, "zero": PURPLE, "fsdp2": ORANGE, "bw.ShardedAdamW": BLUE, "bw.shard": GREEN}
MEASURED = (
    "bytes a parameter of the whole model on a rank; the peak is the growth of the rank's memory (PSS without files)"
    "\nsince before the model was made, in a fresh process for each system"
)
NOTE = (
    "Memory: growth of a rank's memory (PSS without files) since before the model was made, divided by the parameters of the"
    " whole model; fresh processes for each system.\n"
    "Rest: activations, temporaries, what gloo and malloc take, FSDP2's gathered parameters (bw.shard's lie in buffers)."
    " Communication is in the phase that waits for it."
)
LEAST = 1e-9  # of a relative difference on the logarithmic axis


def phases(record: Record) -> dict[str, float]:
    """Medians in milliseconds."""
    steps = record.seconds[len(record.seconds) // 2 :]
    return {phase: 1e3 * statistics.median(step[phase] for step in steps) for phase in steps[0]}


def memory(record: Record, parameters: int) -> dict[str, float]:
    """Bytes a parameter by part; with the rest where the process was watched."""
    parts = {part: record.memory[part] for part in MEMORY if part in record.memory}
    if record.peak_bytes:
        parts[REST] = record.peak_bytes - sum(parts.values())
    return {MEMORY[part]: size_bytes / parameters for part, size_bytes in parts.items()}


def table(records: list[Record], parameters: int, tokens: int) -> str:
    """``tokens`` are those of a step of all ranks."""
    rows = [("system", "shards", "params", "grads", "states", "buffers", "rest", "peak")]
    rows[0] += ("tokens/s", "step, ms", "first loss", "last loss")
    for record in records:
        parts, step_ms = memory(record, parameters), sum(phases(record).values())
        peak = sum(parts.values()) if REST in parts else None
        cells = [parts.get(name) for name in MEMORY.values()] + [peak]
        rows.append(
            (
                LABELS[record.name],
                SHARDED[record.name],
                *("-" if cell is None else f"{cell:.2f}" for cell in cells),
                f"{1e3 * tokens / step_ms:,.0f}",
                f"{step_ms:,.1f}",
                *(f"{loss:.6f}" for loss in (record.losses[0], record.losses[-1])),
            )
        )
    widths = (24, 8, 8, 7, 8, 9, 7, 7, 11, 11, 12, 12)
    lines = [
        f"{row[0]:<{widths[0]}}" + "".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    measured = [f"\nFrom params to peak: {MEASURED}."] if records[0].peak_bytes else []
    return "\n".join(("", *lines, *measured, "Losses: nats per byte.", ""))


def stack(
    axes: Axes, records: list[Record], parts: list[dict[str, float]], colors: list[str], says: Callable[[float], str]
) -> None:
    """A bar for each system, of its parts from bottom to top, and what ``says`` makes of their sum above."""
    names = [LABELS[record.name].replace("yOpt", "y\nOpt").replace("dAdam", "d\nAdam") for record in records]
    tops = [0.0] * len(records)
    for part, color in zip(max(parts, key=len), colors, strict=True):
        heights = [of_record.get(part, 0.0) for of_record in parts]
        axes.bar(names, heights, bottom=tops, label=part, color=color, width=0.6)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    for index, top in enumerate(tops):
        axes.text(index, top, says(top), ha="center", va="bottom")
    axes.set_ylim(0, 1.15 * max(tops))
    axes.tick_params(axis="x", labelsize="small")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)


def draw_losses(axes: Axes, below: Axes, records: list[Record]) -> None:
    """The losses, and below their relative difference from those of the first system."""
    reference = records[0]
    for record, style in zip(records, ("-", (0, (6, 4)), (3, (4, 4)), (0, (2, 3)), (1, (1, 3))), strict=False):
        color, steps = COLORS[record.name], range(1, len(record.losses) + 1)
        axes.plot(steps, record.losses, color=color, linestyle=style, linewidth=2, label=LABELS[record.name])
        if record is not reference:
            differences = [abs(a - b) / b for a, b in zip(record.losses, reference.losses, strict=True)]
            below.plot(steps, [max(d, LEAST) for d in differences], ".", color=color)
    axes.set(title="training loss", ylabel="nats per byte")
    axes.legend(frameon=False, fontsize="small")
    below.axhline(1e-5, color=RED, linewidth=1)
    below.set(yscale="log", ylim=(LEAST / 2, 1e-3), xlabel="step")
    below.set_title(f"relative difference from {LABELS[reference.name]}", fontsize="medium")
    below.text(1, 1.5e-5, "allowed: 1e-5", color=RED, va="bottom", fontsize="small")


def draw(records: list[Record], sizes: Sizes, ranks: int, tokens: int, folder: Path) -> None:
    """``tokens`` as in `table`. demo.png, memory_by_ranks.png, and the points of the latter as demo.json."""
    import matplotlib.pyplot as plt  # here, as the processes that only train need none

    figure, axes = plt.subplot_mosaic(
        [["memory", "time", "loss"], ["memory", "time", "difference"]],
        figsize=(16, 6.5),
        height_ratios=[2, 1],
        layout="constrained",
    )
    parts = [memory(record, sizes.parameters) for record in records]
    stack(axes["memory"], records, parts, [BLUE, ORANGE, GREEN, RED, GREY], "{:.1f}".format)
    axes["memory"].set(title=f"memory of a rank at its peak, {ranks} ranks", ylabel="bytes a parameter")
    times = [phases(record) for record in records]
    stack(axes["time"], records, times, [GREY, RED, ORANGE, GREEN], lambda ms: f"{1e3 * tokens / ms:,.0f}")
    axes["time"].set(title="time of a step (medians), with tokens/s above", ylabel="ms")
    draw_losses(axes["loss"], axes["difference"], records)
    figure.supxlabel(NOTE, fontsize="small", color="#555555")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / DEMO, dpi=110)
    points = {record.name: sum(part.values()) for record, part in zip(records, parts, strict=True)}
    (folder / POINTS).write_text(json.dumps({"sizes": vars(sizes), "ranks": ranks, "bytes_per_parameter": points}))
    draw_by_ranks([folder])


def draw_by_ranks(folders: list[Path]) -> None:
    """The formula's lines for 1 to 512 ranks, and the measured points of all folders."""
    import matplotlib.pyplot as plt

    found = [json.loads((folder / POINTS).read_text()) for folder in folders]
    sizes = Sizes(**found[0]["sizes"])
    figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
    counts = [2**power for power in range(10)]
    for system, label in LABELS.items():
        totals = [sum(bytes_per_parameter(system, ranks, sizes).values()) for ranks in counts]
        style = (0, (4, 3)) if system == "bw.shard" else "-"  # FSDP2's line lies below
        axes.plot(
            counts, totals, color=COLORS[system], linestyle=style, linewidth=2, label=f"{label}: {totals[-1]:.1f}"
        )
        measured = [(one["ranks"], one["bytes_per_parameter"].get(system)) for one in found]
        axes.plot(*zip(*measured, strict=True), "o", color=COLORS[system], markeredgecolor="black", zorder=3)
    axes.plot([], [], "o", color="white", markeredgecolor="black", label="measured (with activations, gloo and malloc)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(ylim=(0, 25), xlabel="ranks", ylabel="bytes a parameter on each rank")
    axes.set_title(
        f"fp32 AdamW, {sizes.parameters / 1e6:.0f} M parameters: formula (lines) and measured peaks (points)"
    )
    axes.legend(title="system: bytes a parameter on 512 ranks", frameon=False, loc="upper right", ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(folders[0] / BY_RANKS, dpi=110)


if __name__ == "__main__":
    draw_by_ranks([Path(folder) for folder in sys.argv[1:]])
