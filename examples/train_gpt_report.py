"""What train_gpt.py measures, prints and draws: a rank's memory, the time of a step, losses.

How it is measured:

- *Memory* is rank 0's at its peak in the last step. Parameters, gradients, states and communication buffers are the bytes
  of the tensors (and pools, in which bw.shard gathers parameters) that the rank holds after the last backward. The rest is how much more torch's allocator has
  handed out at the step's peak than at that moment: activations and temporaries; for FSDP2 also gathered parameters and
  what it reduces. Memory that gloo takes for itself is not counted.
- *Time* is rank 0's, medians over the steps without the first three and the last. Forward and backward are those of a model
  that nothing wraps, measured beside the others; all that forward, backward and the waits after them take beyond that
  is communication.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import torch

if TYPE_CHECKING:
    from train_gpt import Run

REST = "rest"
MEMORY = {
    "params": "parameters",
    "grads": "gradients",
    "states": "optimizer states",
    "pool": "communication buffers",
    REST: "rest at the peak",
}
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#c9c9c9"
NOTE = (
    "Memory: what a rank holds after backward; the rest is what torch's allocator has handed out beyond that at the peak"
    " (activations, temporaries, FSDP2's gathered parameters; bw.shard's lie in communication buffers).\n"
    "Time: forward and backward are those of a model without wrapper and optimizer; communication is what they and the"
    " waits after them take beyond that."
)
LEAST = 1e-9  # of a relative difference on the logarithmic axis


@contextlib.contextmanager
def peak_of_step(memory: dict[str, int], grads_are_kept: bool) -> Iterator[None]:
    """Adds the rest to ``memory``, where the step inside counts the other parts.

    Gradients that are kept have their memory from one step to the next, the others are part of what the step allocates.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports its start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    peak = max(itertools.accumulate(event["args"]["Bytes"] for event in events))
    memory[REST] = peak - (0 if grads_are_kept else memory["grads"])


def phases(run: Run, plain_s: list[float]) -> dict[str, float]:
    """Medians in milliseconds."""
    # All of them where a resumed run has no other.
    steps = (
        run.seconds[min(3, max(len(run.seconds) - 2, 0)) : -1] or run.seconds
    )  # the first ones warm up, the last one is profiled
    found = {phase: 1e3 * statistics.median(step[phase] for step in steps) for phase in steps[0]}
    if plain_s:
        computes = min(1e3 * statistics.median(plain_s), found["forward and backward"])
        waits = found.pop("forward and backward") - computes + found.pop("gather of parameters")
        found = {"forward and backward": computes, "communication": waits, **found}
    return found


def table(runs: list[Run], plain_s: list[float], tokens: int) -> str:
    """``tokens`` are those of a step of all ranks."""
    times = [phases(run, plain_s) for run in runs]
    steps_ms = [sum(time.values()) for time in times]
    rows = {"tokens/s": [f"{1e3 * tokens / ms:,.0f}" for ms in steps_ms], "step, ms": [f"{ms:.1f}" for ms in steps_ms]}
    for phase in times[0]:
        rows[f"  {phase}"] = [f"{time[phase]:.1f}" for time in times]
    rows["MB per rank at the peak"] = [
        f"{sum(run.memory[part] for part in MEMORY if part in run.memory) / 1e6:.2f}" for run in runs
    ]
    for part, name in MEMORY.items():
        rows[f"  {name}"] = [f"{run.memory[part] / 1e6:.2f}" if part in run.memory else "-" for run in runs]
    for name, index in (("first", 0), ("last", -1)):
        rows[f"validation loss, {name}"] = [f"{run.validation[index][1]:.4f}" for run in runs]
    lines = ["", f"{'':<26}" + "".join(f"{run.name:>14}" for run in runs)]
    return "\n".join(
        lines + [f"{label:<26}" + "".join(f"{cell:>14}" for cell in cells) for label, cells in rows.items()]
    )


def stack(axes: plt.Axes, runs: list[Run], parts: list[dict[str, float]], colors: list[str], unit: str) -> None:
    """A bar for each run, of its parts from bottom to top, with their sum above."""
    names = [run.name for run in runs]
    tops = [0.0] * len(runs)
    for part, color in zip(parts[0], colors, strict=True):
        heights = [of_run[part] for of_run in parts]
        axes.bar(names, heights, bottom=tops, label=part, color=color, width=0.6)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    for index, top in enumerate(tops):
        axes.text(index, top, f"{top:.0f} {unit}", ha="center", va="bottom")
    axes.set_ylim(0, 1.12 * max(tops))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2, frameon=False)


def draw(runs: list[Run], plain_s: list[float], path: str) -> plt.Figure:
    """Memory, time, and losses with their relative difference to the first peer's."""
    figure, axes = plt.subplot_mosaic(
        [["memory", "time", "loss"], ["memory", "time", "difference"]],
        figsize=(15, 6),
        height_ratios=[2, 1],
        layout="constrained",
    )
    memory = [{name: run.memory.get(part, 0) / 1e6 for part, name in MEMORY.items()} for run in runs]
    stack(axes["memory"], runs, memory, [BLUE, ORANGE, GREEN, RED, GREY], "MB")
    axes["memory"].set(title="memory of a rank at its peak", ylabel="MB")
    stack(axes["time"], runs, [phases(run, plain_s) for run in runs], [GREY, RED, ORANGE, GREEN], "ms")
    axes["time"].set(title="time of a step (medians)", ylabel="ms")

    peer = runs[1]
    for run, color, style in zip(runs, (BLUE, ORANGE, GREEN, PURPLE), ("-", "--", ":", "-."), strict=False):
        steps = range(1, len(run.losses) + 1)
        axes["loss"].plot(steps, run.losses, style, color=color, label=f"{run.name}, training")
        axes["loss"].plot(*zip(*run.validation, strict=True), "o", color=color, fillstyle="none", label="validation")
        if run is not peer:
            differences = [abs(a - b) / b for a, b in zip(run.losses, peer.losses, strict=True)]
            axes["difference"].plot(steps, [max(d, LEAST) for d in differences], ".", color=color, label=run.name)
    axes["loss"].set(title="loss", ylabel="nats per byte")
    axes["loss"].legend(ncols=2, frameon=False)
    axes["difference"].axhline(1e-5, color=RED, linewidth=1)
    axes["difference"].set(yscale="log", ylim=(LEAST / 2, 1e-4), xlabel="step", ylabel=f"relative to {peer.name}")
    axes["difference"].text(1, 1.2e-5, "allowed: 1e-5", color=RED, va="bottom")
    axes["difference"].legend(ncols=2, frameon=False, loc="upper right")
    figure.supxlabel(NOTE, fontsize="small", color="#555555")
    figure.savefig(path, dpi=110)
    return figure
