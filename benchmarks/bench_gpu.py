#!/usr/bin/env python3
"""The GPU kernels, the optimizer's cost and a GPT-2-medium step against torch's, with this run's ceilings.

    python benchmarks/bench_gpu.py --section adam|norm|layouts|host|sweep|gpt|nccl|shard|all [--quick] [--json PATH]

`make gpu` runs it; benchmarks/README.md holds what an H200 measured. --quick: tiny sizes, to see that it works (with
BW_GPU_SIMULATE=1 without a GPU).
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import hooks
import torch
import torch.distributed as dist
from gpu_adam import BF16, CONFIGS, F32, FOR_LOOP, Config, Tensors, fused, omitted_peers, peers_of
from gpu_nccl import nccl
from gpu_shard import shard
from gpu_systems import (
    GPT_MEDIUM,
    GPT_TINY,
    OURS,
    OVER_NCCL,
    SHARDED,
    SYSTEMS,
    TORCH,
    TrainingStep,
    make_systems,
)
from gpu_timing import Bench, random
from harness import Timing, parse_args

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels import ops
from bucketwheel.native.modules import native
from tests.gpu.device import DEVICE, Calls

# Seconds that a section may take; run_all.py ends it a little later.
LIMITS_S = {
    "adam": 58.0,
    "norm": 30.0,
    "layouts": 21.0,
    "host": 50.0,
    "sweep": 50.0,
    "gpt": 34.0,
    "nccl": 50.0,
    "shard": 31.0,
}
SIZES = {"256 M": 256 << 20, "16 M": 16 << 20, "1 G": 1 << 30}
QUICK_NUMEL = 20_000
FOR_LOOP_REPEATS, GPT_REPEATS = 8, 20
SWEEP_MB = (16, 32, 64, 128)  # bucket_cap_mb


# ---- adam


def check_adam() -> None:
    """The systems agree: a step of ours is torch's, in tolerance."""
    for config in (CONFIGS[0], CONFIGS[-1]):
        ours = Tensors.make(config, [10_000])
        theirs = [[x.clone() for x in one] for one in (ours.p, ours.g, ours.m, ours.v)]
        for step in (ours.ours(), fused(*theirs)):
            for _ in range(10):
                step()
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if config.p == F32 else {"rtol": 2e-2, "atol": 5e-2}
        torch.testing.assert_close(ours.p[0].float(), theirs[0][0].float(), **tolerance)


def supported(bench: Bench, config: str, cases: dict[str, Callable[[], None]]) -> dict[str, Callable[[], None]]:
    """Without those that torch refuses for these dtypes or has no memory for; there is a line that says so."""
    kept = {}
    for name, call in cases.items():
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            if name == "ours":
                raise
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            bench.omit(f"{config}: {name}", str(error).splitlines()[0][:120])
        else:
            kept[name] = call
    return kept


def adam(bench: Bench) -> None:
    check_adam()
    for label, numel in SIZES.items():
        if bench.quick:
            numel = QUICK_NUMEL if label == "16 M" else QUICK_NUMEL // 4
        for config in CONFIGS:
            if bench.time_left() < 4.0 or DEVICE.free_bytes() < 2 * config.bytes_per * numel:
                bench.omit(f"{config.name} {label}", "no time or memory left")
                continue
            tensors = Tensors.make(config, [numel])
            for name, reason in omitted_peers(config).items():
                bench.omit(f"{config.name} {label}: {name}", reason)
            cases = supported(bench, f"{config.name} {label}", {"ours": tensors.ours(), **peers_of(tensors)})
            # The for-loop takes many passes, one by one: it is measured apart, in fewer repeats, beside ours.
            few = {name: case for name, case in cases.items() if FOR_LOOP in name}
            most = {name: case for name, case in cases.items() if name not in few}
            bench.add_peers(config.name, numel, bench.measure(most), tensors.size_bytes)
            if few:
                timings = bench.measure({"ours": cases["ours"], **few}, repeats=FOR_LOOP_REPEATS)
                bench.add_peers(config.name, numel, timings, tensors.size_bytes)
            if label == "256 M" and config.name in "AH":
                for name, timing in bench.measure({f"{config.name} by op": tensors.by_op()}).items():
                    bench.add(name, numel, timing, size_bytes=tensors.size_bytes)
            del tensors, cases, few, most


# ---- norm


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def norm(bench: Bench) -> None:
    for label, numel in SIZES.items():
        for dtype in (F32, BF16):
            numel = QUICK_NUMEL if bench.quick else numel
            # Small ones from several places, so that they do not come from the cache.
            sets = max(1, min(16, (200 << 20) // (numel * dtype.itemsize)))
            many = [[x] for x in (random(numel, dtype) for _ in range(sets))]
            turn = iter(range(1 << 62))

            def next_of(many: list[Any] = many, turn: Any = turn) -> Any:
                return many[next(turn) % len(many)]

            def foreach(next_of: Callable[[], Any] = next_of) -> None:
                torch.linalg.vector_norm(torch.stack(torch._foreach_norm(next_of())))

            timings = bench.measure({"ours": lambda next_of=next_of: ops.l2_norm(next_of()), "_foreach_norm": foreach})
            bench.add_peers(f"norm {name_of(dtype)}, {label}", numel, timings, numel * dtype.itemsize)
            del many
    clip_and_step(bench)
    arrival(bench)


def check_clip_and_step() -> None:
    """The systems agree on two steps with gradients whose norm is more than `MAX_NORM`."""
    systems = make_systems([20_000, 1_000, 64], F32)
    for system in systems.values():
        for _ in range(2):
            system.refresh()
            system.clip_and_step()
    for name in (OURS, SHARDED):
        torch.testing.assert_close(systems[name].values(), systems[TORCH].values(), rtol=1e-4, atol=1e-5)
        systems[name].close()


def clip_and_step(bench: Bench) -> None:
    """The whole of what training does with gradients, and clipping alone; 64 tensors. Sharded ones have been reduced before."""
    check_clip_and_step()
    numel = bench.size(4 << 20, 2_000)
    for dtype in (F32, BF16):
        systems = make_systems([numel] * bench.size(64, 8), dtype)
        cases: dict[str, Callable[[], None]] = {}
        for name, system in systems.items():
            cases |= {f"{name}/both": system.clip_and_step, f"{name}/clip": system.clip, f"{name}/step": system.step}
        timings = bench.measure(cases, before=lambda case, systems=systems: systems[case.split("/")[0]].refresh())
        added_us = {
            name: round(1e6 * timings[f"{name}/both"].minus(timings[f"{name}/step"]).median_s, 1) for name in SYSTEMS
        }
        for name in (OURS, SHARDED):
            system = systems[name]
            config = f"{name_of(dtype)}{name.removeprefix(OURS)}"
            bench.add(
                f"clip + step {config}", system.numel, timings[f"{name}/both"], peer=TORCH, peer_timing=timings[f"{TORCH}/both"],
                size_bytes=system.step_bytes + system.clip_bytes,
                clipping_adds_us=added_us[name], peers_clipping_adds_us=added_us[TORCH],
            )  # fmt: skip
            system.refresh()
            calls = Calls()
            system.clip()
            kernels = {call: count for call, count in calls.since().items() if call.startswith("launch_")}
            bench.add(
                f"clip {config}", system.numel, timings[f"{name}/clip"],
                peer="clip_grad_norm_", peer_timing=timings[f"{TORCH}/clip"],
                size_bytes=system.clip_bytes or None, kernels=kernels,
            )  # fmt: skip
            system.close()


def arrival(bench: Bench) -> None:
    """What the norm adds to the kernel that takes a reduced gradient into the shard; the gradient just copied, or not
    in the cache.

    The kernel squares what nobody asks the norm of too, so `copy_ms` tells what moving the same bytes takes.
    """
    flush = random(bench.size(128 << 20, 1_000), F32)
    spill = torch.empty_like(flush)
    with Communicator(LocalWorld(1).rank(0), device="cuda") as comm:
        for size_mb in (4, 8, 16, 32, 64, 128):
            numel = bench.size(size_mb << 18, 5_000)
            source, full = random(numel, F32), torch.empty(numel, device=DEVICE.tensors)
            sinks = [_sink(numel, [(0, numel)]), _sink(numel, [])]
            target = torch.empty_like(source)

            def take(sink: Any, full: Any = full) -> None:
                sink.start(False)
                comm._native.reduce_scatter_to_sink(full, sink).wait()

            ways = {
                "with norm": lambda take=take, sink=sinks[0]: take(sink),
                "without": lambda take=take, sink=sinks[1]: take(sink),
                "copy_": lambda full=full, target=target: target.copy_(full),
            }
            cases = {f"{place} {what}": way for place in ("hot", "cold") for what, way in ways.items()}

            def before(name: str, full: Any = full, source: Any = source) -> None:
                full.copy_(source)
                if name.startswith("cold"):
                    spill.copy_(flush)

            timings = bench.measure(cases, before=before)
            for place in ("hot", "cold"):
                ours, bare = timings[f"{place} with norm"], timings[f"{place} without"]
                added_us = round(1e6 * (ours.median_s - bare.median_s), 2)
                bench.add(
                    f"norm on arrival, {place}, {size_mb} MB", numel, ours, size_bytes=8 * numel, peer="the same without norm",
                    peer_timing=bare, norm_adds_us=added_us, copy_ms=float(f"{1e3 * timings[f'{place} copy_'].median_s:.4g}"),
                )  # fmt: skip


def _sink(numel: int, segments: list[tuple[int, int]]) -> Any:
    module = native()
    shard = torch.empty(numel, device=DEVICE.tensors)
    sums = torch.empty(module.ShardAccumulatorCuda.max_spans(len(segments)), dtype=torch.float64, device=DEVICE.tensors)
    return module.ShardAccumulatorCuda(shard, segments, sums)


# ---- layouts


def llama_7b() -> list[int]:
    width, hidden, vocabulary = 4096, 11008, 32000
    layer = [width * width] * 4 + [width * hidden] * 3 + [width] * 2
    return [vocabulary * width, *layer * 32, width, vocabulary * width]


def layouts(bench: Bench) -> None:
    scale = bench.size(1, 20_000)
    shapes = [max(8, n // scale) for n in llama_7b()]
    assert len(shapes) == 291
    by_name = {config.name: config for config in CONFIGS}
    cases: list[tuple[str, Config, list[int], int]] = [
        ("291 Llama-7B shapes", by_name["H"], shapes, 0),
        ("10,000 x 64", by_name["A"], [64] * bench.size(10_000, 300), 0),
        ("10,000 x 64", by_name["C"], [64] * bench.size(10_000, 300), 0),
        ("3 misaligned", by_name["A"], [bench.size(32 << 20, 5_000)] * 3, 1),
        ("3 misaligned", by_name["H"], [bench.size(32 << 20, 5_000)] * 3, 1),
        ("291 quarter-width Llama-7B shapes", by_name["A"], [max(8, n // 16) for n in shapes], 0),
    ]
    for label, config, numels, offset in cases:
        if DEVICE.free_bytes() < 1.2 * config.bytes_per * sum(numels):
            bench.omit(f"{label}, {config.name}", "not enough memory")
            continue
        tensors = Tensors.make(config, numels, offset=offset)
        peers = {name: call for name, call in peers_of(tensors).items() if "fused" in name}
        calls = Calls()
        tensors.by_op()()
        launches = calls.since().get("launch_adam", 0)
        cases_now = {"ours": tensors.ours(), "by op": tensors.by_op(), **peers}
        timings = bench.measure(supported(bench, f"{label}, {config.name}", cases_now))
        by_op = timings.pop("by op")
        bench.add_peers(f"{label}, {config.name}", tensors.numel, timings, tensors.size_bytes, launches=launches)
        bench.add(f"{label}, {config.name} by op", tensors.numel, by_op, size_bytes=tensors.size_bytes)
        del tensors, peers, cases_now


# ---- host


def host(bench: Bench) -> None:
    hook_rows(bench)
    clip_and_step_on_the_host(bench)


def hook_rows(bench: Bench) -> None:
    """What gradients cost the host during backward (hooks.py), over NCCL with one rank. The simulated device and NCCL count
    what they are given and do none of it."""
    dist.init_process_group(
        "gloo" if DEVICE.is_simulated else "nccl", store=dist.HashStore(), rank=0, world_size=1
    )  # for the wrapper
    found = []
    with Communicator(backend="nccl", device="cuda", name="hooks") as comm, DEVICE.host_alone():
        where = hooks.Where(comm, DEVICE.tensors, "cuda", DEVICE.synchronize, works=not DEVICE.is_simulated)
        for row in hooks.ROWS:
            if bench.time_left() < 6.0:
                bench.omit(f"hooks, {row.name}", "no time left")
                continue
            one = hooks.measure_row(row, where, repeats=bench.size(10, 5), steps=bench.size(5, 2))
            found.append(one)
            bench.add(f"hooks, {row.name}", row.count, one.ours, peer=hooks.PEER, peer_timing=one.peer, **one.facts())
        if {hooks.ONE, hooks.BUCKETS} <= {one.row for one in found}:
            issued = hooks.issue(where, repeats=bench.size(20, 2))
            bench.add("hooks, issue of a bucket", hooks.BUCKETS.count, issued, **hooks.bucket_facts(found))
    DEVICE.synchronize()
    dist.destroy_process_group()


def clip_and_step_on_the_host(bench: Bench) -> None:
    """Time of the calling thread in clip and step, without backward; the device is idle before each sample."""
    for count in (300, 3_000):
        systems = make_systems([1_000] * bench.size(count, count // 30), F32)
        samples: dict[str, list[float]] = {name: [] for name in systems}
        gc.collect()
        gc.disable()  # else every few samples have the whole process's garbage in them
        for repeat in range(bench.size(43, 4)):
            for name, system in systems.items():
                system.refresh()
                DEVICE.synchronize()
                start = time.perf_counter()
                system.clip_and_step()
                if repeat >= bench.size(3, 1):
                    samples[name].append(time.perf_counter() - start)
        gc.enable()
        timings = {name: Timing(tuple(values)) for name, values in samples.items()}
        for name in (OURS, SHARDED):
            system = systems[name]
            system.refresh()
            calls = Calls()
            system.clip_and_step()
            made = calls.since()
            launches = sum(times for call, times in made.items() if call.startswith("launch_"))
            bench.add(
                f"host time, {count} parameters{name.removeprefix(OURS)}", count, timings[name], peer=TORCH,
                peer_timing=timings[TORCH], launches=launches, calls=sum(made.values()),
            )  # fmt: skip
            system.close()


# ---- gpt


def gpt(bench: Bench) -> None:
    """Forward, backward, clip and step; the same model, data and order for all systems."""
    for weights in ("float32, autocast", "bfloat16"):
        gpt_systems(bench, weights)
        DEVICE.free_bytes()


def gpt_systems(bench: Bench, weights: str) -> None:
    config, batch = (GPT_TINY, 2) if bench.quick else (GPT_MEDIUM, 4)
    systems = {name: TrainingStep(name, weights, config, batch) for name in SYSTEMS}
    losses = {name: torch.stack([system.train() for _ in range(3)]).float().cpu() for name, system in systems.items()}
    for name in (OURS, SHARDED):
        torch.testing.assert_close(losses[name], losses[TORCH], rtol=3e-2, atol=3e-2)
    whole = bench.measure({name: system.train for name, system in systems.items()}, repeats=GPT_REPEATS)
    ends = bench.measure(
        {name: system.finish for name, system in systems.items()},
        before=lambda name: systems[name].backward(),
        repeats=GPT_REPEATS,
    )
    for name in (OURS, SHARDED):
        system = systems[name]
        for what, timings in (("step", whole), ("clip + step", ends)):
            bench.add(
                f"GPT-2 medium {what}, {weights}{name.removeprefix(OURS)}", system.numel, timings[name], peer=TORCH,
                peer_timing=timings[TORCH],
                size_bytes=system.step_bytes + system.clip_bytes if what == "clip + step" else None,
            )  # fmt: skip
    for system in systems.values():
        system.close()


# ---- sweep


def sweep(bench: Bench) -> None:
    """GPT-2 medium sharded over one rank by `bucket_cap_mb`, and over NCCL with its whole step in a CUDA graph.

    `in_turn_ms`: `TrainingStep.in_turn_s`.
    """
    config, batch = (GPT_TINY, 2) if bench.quick else (GPT_MEDIUM, 4)
    for weights in ("float32, autocast", "bfloat16"):
        make = functools.partial(TrainingStep, weights=weights, config=config, batch=batch)
        sharded = {f"bucket_cap_mb {mb}": make(SHARDED, bucket_cap_mb=mb / bench.size(1, 10_000)) for mb in SWEEP_MB}
        captured = make(OVER_NCCL, capturable=True, static_graph=True)
        systems = {TORCH: make(TORCH), **sharded, "captured": captured}
        losses = {
            name: [system.train() for _ in range(3)] for name, system in systems.items() if system is not captured
        }
        losses["captured"] = captured.capture()
        for name, system in systems.items():
            losses[name].append(system.train().clone())
            torch.testing.assert_close(*(torch.stack(losses[n]).float() for n in (name, TORCH)), rtol=3e-2, atol=3e-2)
        timings = bench.measure({name: system.train for name, system in systems.items()}, repeats=GPT_REPEATS)
        in_turn = {name: round(1e3 * system.in_turn_s(bench.size(4, 1)), 3) for name, system in systems.items()}
        for name in (*sharded, "captured"):
            bench.add(
                f"GPT-2 medium step, {weights}, {name}", systems[name].numel, timings[name], peer=TORCH,
                peer_timing=timings[TORCH], in_turn_ms=in_turn[name], peer_in_turn_ms=in_turn[TORCH],
            )  # fmt: skip
        for system in systems.values():
            system.close()
        del systems, sharded, captured, system
        DEVICE.free_bytes()


SECTIONS = {
    "adam": adam,
    "norm": norm,
    "layouts": layouts,
    "host": host,
    "sweep": sweep,
    "gpt": gpt,
    "nccl": nccl,
    "shard": shard,
}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--section", required=True, choices=[*SECTIONS, "all"])


def main() -> int:
    options = parse_args(__doc__ or "", configure)
    with DEVICE.opened():
        for name in SECTIONS if options.section == "all" else [options.section]:
            bench = Bench(name, quick=options.quick, path=options.json, deadline_s=LIMITS_S[name])
            bench.ceilings()
            SECTIONS[name](bench)
            DEVICE.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
