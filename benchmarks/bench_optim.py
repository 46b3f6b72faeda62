"""Clip + step on the CPU, and the whole step of a GPT on two CPU ranks, against every stock way to train it.

    python benchmarks/bench_optim.py [--quick] [--json PATH] [--part clip|gpt|host|all] [--systems ours,ddp,...]
    python benchmarks/bench_optim.py --profile ours

clip + step: ours and `clip_grad_norm_` + `torch.optim.AdamW(fused=True)` on the tensors of the GPT, in one process and
as two ranks with one thread each (ours sharded, gradients already reduced). Limit: one thread's plain loops over the
same values.

GPT step: batch 1 x 64 tokens, fp32, one thread per rank. Overhead = time of a step (zero_grad, forward, backward, clip,
step) minus the time of forward + backward alone of the same model without hooks, taken next to each other; all systems
interleaved in one job. "cpu" is the same difference in CPU time of a rank's threads, which other work on the machine
disturbs less. No system pays for what glibc gives back and takes again (keep_freed_memory). Limit: the bare loops, which
pack, sum, step and copy the same bytes (bare_loops.cpp). Memory: the peak over some steps of the proportional set size,
summed over the ranks, one fresh job per system.

Host time: of each parameter's hook and each bucket during backward (hooks.py); of a step of models of 300 and 3,000 tiny
parameters, where nearly all of it is bookkeeping (host_step.py).
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
import time
from argparse import ArgumentParser
from typing import Any

import clip_step
import hooks
import host_step
import torch
from gpt_systems import PEERS, SYSTEMS, Gpt, GptConfig, Plain, build, token_batches
from harness import Memory, Rank, Results, Timing, keep_freed_memory, parse_args, rotation, run_ranks, slowest

WORLD = 2
CHECKED_STEPS = 4
LOSS_TOLERANCE = 1e-5
UPDATE_TOLERANCE = (
    1e-2  # relative L2 of the whole update: where a gradient is near 0, Adam's first steps follow its sign
)
REFERENCE = "ddp"
PAIR = ("base", "base cpu", "step", "step cpu")  # wall and CPU time (all threads) of one rank


def timing_job(rank: Rank, names: list[str], config: GptConfig, repeats: int) -> dict[str, Any]:
    """One rank of the timing job: check that the systems agree, then time pairs of (plain forward + backward, step)."""
    keep_freed_memory()
    plain, systems = Plain(config), {name: build(name, config) for name in names}
    batches = checked_batches(rank, config, plain, systems, repeats)
    samples: dict[str, list[list[float]]] = {name: [[] for _ in PAIR] for name in names}
    gc.collect()
    gc.disable()
    for repeat, tokens in enumerate(batches):
        for name in rotation(names, repeat):
            for system, into in zip((plain, systems[name]), (samples[name][:2], samples[name][2:]), strict=True):
                plain.zero_grad()
                rank.barrier()
                begin, begin_cpu = time.perf_counter(), time.process_time()
                system.train_step(tokens)
                into[0].append(time.perf_counter() - begin)
                into[1].append(time.process_time() - begin_cpu)
    gc.enable()
    for system in systems.values():
        system.close()
    return {n: {what: Timing(tuple(v)) for what, v in zip(PAIR, lists, strict=True)} for n, lists in samples.items()}


def checked_batches(rank: Rank, config: GptConfig, plain: Plain, systems: dict[str, Any], repeats: int) -> list[Any]:
    """Takes the first steps of all systems, which must agree, and returns a batch for each repeat."""
    batches = token_batches(rank.rank, config, CHECKED_STEPS + repeats)
    start = plain.full_parameters()
    losses = {n: [s.train_step(t).item() for t in batches[:CHECKED_STEPS]] for n, s in systems.items()}
    updates = {n: s.full_parameters() - start for n, s in systems.items()}
    for name in systems:
        check_agreement(name, losses, updates)
    return list(batches[CHECKED_STEPS:])


def check_agreement(name: str, losses: dict[str, list[float]], updates: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless the system's losses and parameter updates equal the reference's (DDP, or the first given)."""
    reference = REFERENCE if REFERENCE in losses else next(iter(losses))
    for step, (got, want) in enumerate(zip(losses[name], losses[reference], strict=True)):
        if not abs(got - want) <= LOSS_TOLERANCE * abs(want):
            raise RuntimeError(f"{name}: loss {got!r} at step {step}, {reference} has {want!r}")
    error = ((updates[name] - updates[reference]).norm() / updates[reference].norm()).item()
    if not error <= UPDATE_TOLERANCE:
        raise RuntimeError(
            f"{name}: update differs from {reference}'s by {error:.2e} relative after {len(losses[name])} steps"
        )


def memory_job(rank: Rank, name: str | None, config: GptConfig, steps: int) -> None:
    """One rank of a memory job: nothing but this system (None: nothing at all) is alive while memory is sampled."""
    system = build(name, config) if name else None
    batches = token_batches(rank.rank, config, 2 + steps)
    if system is not None:
        for tokens in batches[:2]:
            system.train_step(tokens)
    gc.collect()
    with rank.memory_window():
        if system is None:
            time.sleep(0.3)
        else:
            for tokens in batches[2:]:
                system.train_step(tokens)
    if system is not None:
        system.close()


def profile_job(rank: Rank, name: str, config: GptConfig, steps: int) -> dict[str, Any]:
    """One rank of a profile: seconds per phase for the system and for the plain model, then a cProfile of further steps."""
    keep_freed_memory()
    batches = token_batches(rank.rank, config, 3 + steps)
    plain, system = Plain(config), build(name, config)
    phases: dict[str, dict[str, list[float]]] = {"plain": {}, name: {}}
    for index, tokens in enumerate(batches):
        for label, each in (("plain", plain), (name, system)):
            plain.zero_grad()
            rank.barrier()
            last = [time.perf_counter()]

            def mark(phase: str, label: str = label, last: list[float] = last, counted: bool = index >= 3) -> None:
                now = time.perf_counter()
                if counted:
                    phases[label].setdefault(phase, []).append(now - last[0])
                last[0] = now

            each.train_step(tokens, mark)
    profiler = cProfile.Profile()
    for tokens in batches[3:]:
        rank.barrier()
        profiler.runcall(system.train_step, tokens)
    if rank.rank == 0:
        print(
            f"cProfile of rank 0, {steps} steps (hooks run inside run_backward; the profiler itself adds to small calls)"
        )
        pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(25)
        sys.stdout.flush()
    system.close()
    return {label: {phase: Timing(tuple(v)) for phase, v in table.items()} for label, table in phases.items()}


def run_profile(name: str, config: GptConfig, steps: int) -> None:
    ranks = run_ranks(WORLD, profile_job, name, config, steps).values
    print(f"{name}: median ms per phase, slowest rank; extra = over plain forward + backward")
    for phase in ranks[0][name]:
        ours, plain = (slowest([r[label][phase] for r in ranks]).median_s * 1e3 for label in (name, "plain"))
        print(f"  {phase:10s} {ours:9.2f}  plain {plain:9.2f}  extra {ours - plain:9.2f}")


def run_gpt(results: Results, names: list[str], config: GptConfig, *, repeats: int, memory_steps: int) -> None:
    """The timing job, then one memory job per system (none if `memory_steps` is 0); adds one line per system but ours."""
    ranks = run_ranks(WORLD, timing_job, names, config, repeats, timeout_s=1800).values
    base, step, base_cpu, step_cpu = (
        {name: slowest([rank[name][what] for rank in ranks]) for name in names}
        for what in ("base", "step", "base cpu", "step cpu")
    )
    overhead = {name: step[name].minus(base[name]) for name in names}
    cpu = {name: step_cpu[name].minus(base_cpu[name]) for name in names}
    memory: dict[str, Memory] = {}
    if memory_steps:
        watched = ["plain", *(n for n in names if n != "bare loops")]
        memory[""] = run_ranks(WORLD, memory_job, None, config, 0).peak
        memory |= {name: run_ranks(WORLD, memory_job, name, config, memory_steps).peak for name in watched}
    print_gpt(names, base, step, overhead, cpu, memory)
    limit_s = overhead["bare loops"].median_s if "bare loops" in names else None
    for name in names:
        if name == "ours" and len(names) > 1:
            continue
        results.add(
            "gpt step overhead, 2 ranks",
            overhead.get("ours"),
            peer=name,
            peer_timing=overhead[name],
            limit_s=limit_s,
            peer_step_s=step[name].median_s,
            peer_forward_backward_s=base[name].median_s,
            ours_step_s=step["ours"].median_s if "ours" in names else None,
            ours_peak_pss_bytes=memory["ours"].total_bytes if "ours" in memory else None,
            peer_peak_pss_bytes=memory[name].total_bytes if name in memory else None,
            idle_pss_bytes=memory[""].total_bytes if memory else None,
            ours_cpu_overhead_s=cpu["ours"].median_s if "ours" in names else None,
            peer_cpu_overhead_s=cpu[name].median_s,
        )


def print_gpt(
    names: list[str],
    base: dict[str, Timing],
    step: dict[str, Timing],
    overhead: dict[str, Timing],
    cpu: dict[str, Timing],
    memory: dict[str, Memory],
) -> None:
    def mib(size_bytes: int) -> str:
        return f"{size_bytes / 2**20:8.0f}"

    print(
        "system          fwd+bwd ms   step ms  overhead ms  spread     cpu ms    peak PSS MiB     anon    shmem   "
        "(summed over ranks)"
    )
    for name in names:
        row = f"{name:14s}  {base[name].median_s * 1e3:10.1f}  {step[name].median_s * 1e3:8.1f}"
        row += f"  {overhead[name].median_s * 1e3:11.1f}  {overhead[name].spread * 100:4.0f} %  {cpu[name].median_s * 1e3:9.1f}"
        if name in memory:
            peak = memory[name]
            row += f"     {mib(peak.total_bytes)}     {mib(peak.anon_bytes)} {mib(peak.shmem_bytes)}"
        print(row)
    for name, label in (("", "(torch + gloo)"), ("plain", "(plain model)")):
        if name in memory:
            peak = memory[name]
            print(f"{label:70s}  {mib(peak.total_bytes)}     {mib(peak.anon_bytes)} {mib(peak.shmem_bytes)}")
    sys.stdout.flush()


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--part", choices=("all", "clip", "gpt", "host"), default="all")
    parser.add_argument("--systems", help=f"comma-separated, of: {', '.join(SYSTEMS)}", type=lambda s: s.split(","))
    parser.add_argument("--repeats", type=int, help="pairs per system in the timing job")
    parser.add_argument("--profile", metavar="SYSTEM", choices=SYSTEMS, help="where a system's step spends its time")


def main() -> None:
    options: Any = parse_args(__doc__ or "", configure)
    config = GptConfig()
    if options.profile:
        run_profile(options.profile, config, steps=8 if options.quick else 20)
        return
    names = options.systems or (["ours", "ddp", "bare loops"] if options.quick else ["ours", *PEERS, "bare loops"])
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"unknown systems {unknown}, expected some of {list(SYSTEMS)}")
    results = Results("optim", options.json)
    shapes = [tuple(p.shape) for p in Gpt(config).parameters()]
    print(f"GPT: {sum(torch.Size(s).numel() for s in shapes):,} parameters in {len(shapes)} tensors, {config}")
    if options.part in ("all", "clip"):
        clip_step.run(results, shapes, repeats=7 if options.quick else 21)
    if options.part in ("all", "gpt"):
        repeats = options.repeats or (8 if options.quick else 31)
        run_gpt(results, names, config, repeats=repeats, memory_steps=0 if options.quick else 4)
    if options.part in ("all", "host"):
        hooks.run(results, repeats=5 if options.quick else 21, steps=5 if options.quick else 50)
        host_step.run(results, repeats=11 if options.quick else 41)
    results.print_table()


if __name__ == "__main__":
    main()
