"""Memory traces of sharded training steps, computed from the sizes of models: 8 shapes x prefetch depth x bytes of a gradient.

    python benchmarks/traces/shapes.py [FOLDER]     # writes one CSV of intervals for each case

A step is a palindrome: units 0 to n - 1 forward, n - 1 to 0 backward, one unit a time step. A unit's weights are gathered
``depth`` steps before they are used, and dropped behind each use; the last unit keeps them for its backward. Its gradients are
there from its backward until the end of the next step, in which they are reduced.
"""

from __future__ import annotations

import csv
import random
import sys
from dataclasses import dataclass
from pathlib import Path

Interval = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """``sizes`` in bytes, ``intervals`` in steps and ``keys`` (role, unit, position, dtype) of the buffers of one step."""

    name: str
    sizes: dict[str, int]
    intervals: dict[str, list[Interval]]
    keys: dict[str, tuple[str, int, int, str]]


Bucket = tuple[int, str]  # elements, dtype of the weights
Unit = list[Bucket]

_BYTES = {"fp8": 1, "bf16": 2, "fp32": 4}


def llama_block(hidden: int, heads: int, kv_heads: int, ffn: int) -> int:
    """Parameters of a decoder block: query and output, key and value, three matrices of the MLP, two norms."""
    head = hidden // heads
    return 2 * hidden * hidden + 2 * hidden * kv_heads * head + 3 * hidden * ffn + 2 * hidden


def llama_70b() -> list[Unit]:
    return [[(llama_block(8192, 64, 8, 28672), "bf16")] for _ in range(80)]


def llama_70b_with_embeddings() -> list[Unit]:
    return [[(128256 * 8192, "bf16")], *llama_70b(), [(128256 * 8192 + 8192, "bf16")]]


def hybrid() -> list[Unit]:
    """Mamba, MLP and attention layers in turn, as Nemotron-H 47B has them: 120 units."""
    hidden, ffn, state = 8192, 30720, 256
    inner = 2 * hidden
    mamba = hidden * (2 * inner + 2 * 8 * state + inner // 64) + inner * hidden + 4 * (inner + 2 * 8 * state)
    mlp, attention = 2 * hidden * ffn, 2 * hidden * hidden + 2 * hidden * 8 * 128
    pattern = [mamba, mlp] * 60
    for at in range(12, 120, 24):
        pattern[at] = attention
    return [[(numel, "bf16")] for numel in pattern]


def deepseek_v3(expert_dtype: str, world_of_experts: int = 64) -> list[Unit]:
    """3 dense and 58 expert layers. The experts of a layer are spread over ``world_of_experts`` ranks, and have a bucket."""
    hidden = 7168
    attention = hidden * 1536 + 1536 * 128 * 192 + hidden * 576 + 512 * 128 * 256 + 128 * 128 * hidden
    shared, routed = 3 * hidden * 2048, 256 * 3 * hidden * 2048 // world_of_experts
    dense = [[(attention + 3 * hidden * 18432, "bf16")] for _ in range(3)]
    layer = [(attention + shared + 256 * hidden, "bf16"), (routed, expert_dtype)]
    if expert_dtype == "fp8":  # and the dense layers' matrices too
        dense = [[(attention, "bf16"), (3 * hidden * 18432, "fp8")] for _ in range(3)]
    return [*dense, *(list(layer) for _ in range(58))]


def vision_language() -> list[Unit]:
    """The vision tower (26 blocks and a projector) and 47 blocks of a language model."""
    tower = [[(4 * 1152 * 1152 + 2 * 1152 * 4304, "bf16")] for _ in range(26)]
    return [*tower, [(4608 * 5120, "bf16")], *([(llama_block(5120, 40, 8, 27648), "bf16")] for _ in range(47))]


def alternating() -> list[Unit]:
    return [[(100_000_000, "bf16")], [(40_000_000, "bf16")] * 3] * 24


def irregular() -> list[Unit]:
    chosen = random.Random(7)
    return [[(int(10 ** chosen.uniform(6.5, 9.0)), "bf16")] for _ in range(94)]


SHAPES = {
    "llama 70B": llama_70b,
    "llama 70B, embeddings": llama_70b_with_embeddings,
    "hybrid": hybrid,
    "DeepSeek-V3 bf16": lambda: deepseek_v3("bf16"),
    "DeepSeek-V3 fp8": lambda: deepseek_v3("fp8"),
    "ViT and LLM": vision_language,
    "alternating": alternating,
    "irregular": irregular,
}


def case_of(shape: str, depth: int, grad_bytes: int) -> Case:
    units = SHAPES[shape]()
    sizes: dict[str, int] = {}
    intervals: dict[str, list[Interval]] = {}
    keys: dict[str, tuple[str, int, int, str]] = {}
    count = len(units)
    for unit, buckets in enumerate(units):
        forward, backward = unit, 2 * count - 1 - unit
        gathered = [(max(forward - depth, 0), forward + 1), (max(backward - depth, forward + 1), backward + 1)]
        if gathered[0][1] == gathered[1][0]:
            gathered = [(gathered[0][0], gathered[1][1])]
        for position, (numel, dtype) in enumerate(buckets):
            weight, grad = f"weight/{unit}/{position}", f"grad/{unit}/{position}"
            sizes[weight], sizes[grad] = numel * _BYTES[dtype], numel * grad_bytes
            intervals[weight], intervals[grad] = gathered, [(backward, backward + 2)]
            keys[weight] = ("weight", unit, position, dtype)
            keys[grad] = ("grad", unit, position, {2: "bf16", 4: "fp32"}[grad_bytes])
    return Case(f"{shape}, depth {depth}, gradients of {grad_bytes} bytes", sizes, intervals, keys)


def all_cases() -> list[Case]:
    return [case_of(shape, depth, grad) for shape in SHAPES for depth in (1, 2) for grad in (2, 4)]


def random_keys(count: int) -> tuple[dict[str, int], dict[str, list[Interval]]]:
    """Sizes and intervals without a shape: up to three intervals each, somewhere in 2 x ``count`` steps."""
    chosen = random.Random(count)
    sizes: dict[str, int] = {}
    intervals: dict[str, list[Interval]] = {}
    for key in map("random/{}".format, range(count)):
        sizes[key], intervals[key] = int(10 ** chosen.uniform(3, 7)), []
        start = chosen.randrange(2 * count)
        for _ in range(chosen.randint(1, 3)):
            stop = start + chosen.randint(1, 20)
            intervals[key].append((start, stop))
            start = stop + chosen.randint(1, count // 2)
    return sizes, intervals


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    folder.mkdir(parents=True, exist_ok=True)
    for case in all_cases():
        with (folder / (case.name.replace(", ", "-").replace(" ", "_") + ".csv")).open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("key", "nbytes", "start", "stop", "role", "unit", "position", "dtype"))
            for key, nbytes in case.sizes.items():
                rows.writerows((key, nbytes, *interval, *case.keys[key]) for interval in case.intervals[key])


if __name__ == "__main__":
    main()
