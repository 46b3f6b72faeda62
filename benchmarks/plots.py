"""Draws the pictures of docs/performance.md from benchmarks/results/*.jsonl.

python benchmarks/plots.py [FOLDER]     # docs/assets if none is given
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
OURS, PEER, LIMIT = "#3f51b5", "#9e9e9e", "#e0a030"
NAMES = {"bare loops": "bare loops (same bytes)", "ddp": "DDP", "zero": "ZeroRedundancyOptimizer", "fsdp2": "FSDP2"}
NAMES |= {"ddp keep": "DDP, set_to_none=False", "fsdp2 keep": "FSDP2, no reshard\nafter forward"}
NAMES |= {"zero view": "ZeroRedundancyOptimizer,\nparameters_as_bucket_view"}
CONFIGS = {"A": "fp32", "G": "fp32,\nbf16 states", "C": "bf16,\nfp32 master", "E": "bf16,\nremainder"}
CONFIGS |= {"F": "remainder,\nbf16 states", "H": "all bf16"}


def rows(name: str, bench: str) -> list[dict[str, Any]]:
    lines = (ROOT / f"benchmarks/results/{name}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["bench"] == bench]


def gpt_step(axes: Any) -> str:
    found = [r for r in rows("epyc-2cores-1bb0dd2e5940", "optim") if r["case"].startswith("gpt step")]
    first = found[0]
    bars = [("bucketwheel", first["ours_s"], first["spread"], OURS)]
    for r in found:
        bars.append((NAMES[r["peer"]], r["peer_s"], r["peer_spread"], LIMIT if "bare" in r["peer"] else PEER))
    bars.sort(key=lambda bar: -bar[1])
    for at, (_, seconds, spread, colour) in enumerate(bars):
        axes.barh(at, 1e3 * seconds, color=colour)
        axes.text(1e3 * seconds + 8, at, f"{1e3 * seconds:.0f} ms (spread {spread:.0%})", va="center")
    axes.set(yticks=range(len(bars)), yticklabels=[bar[0] for bar in bars], xlim=(0, 860))
    axes.set_xlabel("step time minus forward and backward of the plain model, ms")
    return f"Overhead of a GPT step, 35 M parameters, 2 ranks\n{first['machine']}, commit {first['commit']}"


def collectives(axes: Any) -> str:
    found = [r for r in rows("epyc-2cores-559d6f9d92aa", "comm") if r.get("backend") == "shm" and r["world"] == 2]
    for operation, style in (("all-gather, pool, in place", "-o"), ("reduce-scatter, pool", "--s")):
        some, name = [r for r in found if r["operation"] == operation], operation.split(",")[0]
        sizes = [r["size_bytes"] / 2**20 for r in some]
        for key, colour, who in (("ours_s", OURS, "bucketwheel, pool memory"), ("peer_s", PEER, "gloo")):
            rates = [r["size_bytes"] / r[key] / 1e9 for r in some]
            axes.plot(sizes, rates, style, color=colour, label=f"{name}: {who}")
    axes.set(xscale="log", yscale="log", xticks=sizes, ylim=(0.03, 150))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks([], minor=True)
    axes.set_xticklabels([f"{s:.0f}" if s >= 1 else f"1/{1 / s:.0f}" for s in sizes])
    axes.set(xlabel="size of the full buffer, MiB", ylabel="full buffer / time, GB/s")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=10)
    return f"Collectives of 2 ranks on one host\n{found[0]['machine']}, commit {found[0]['commit']}"


def adam(axes: Any) -> str:
    found = [r for r in rows("h200-7d25797e6937", "adam") if r["config"] in CONFIGS and r["numel"] == 2**30]
    for at, config in enumerate(CONFIGS):
        some = {r["peer"]: r for r in found if r["config"] == config}
        mine = next(iter(some.values()))
        bars = [(at - 0.2, mine["of_copy"], OURS, "bucketwheel")]
        if fused := some.get("torch fused") or some.get("torch fused + casts"):
            share = fused["of_copy"] * fused["ms"] / fused["peer_ms"]
            bars.append((at + 0.2, share, PEER, "torch fused AdamW (and casts)"))
        for x, share, colour, who in bars:
            axes.bar(x, 100 * share, 0.38, color=colour, label=None if at else who)
            axes.text(x, 100 * share + 1, f"{100 * share:.0f}", ha="center")
    axes.set(xticks=range(len(CONFIGS)), xticklabels=CONFIGS.values(), ylim=(0, 118))
    axes.set_ylabel("% of the rate of a device copy")
    axes.axhline(100, color=LIMIT, label="copy of 4 GB in the device")
    axes.legend(loc="upper center", ncols=3, fontsize=9, frameon=False)
    return f"Adam step of 2³⁰ parameters\n{mine['machine']}, commit {mine['commit']}"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/assets"
    pyplot.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    for draw in (gpt_step, collectives, adam):
        figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
        figure.suptitle(draw(axes), fontsize=11)
        figure.savefig(folder / f"{draw.__name__}.png", dpi=150)
