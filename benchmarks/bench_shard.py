"""Sharded parameters (ZeRO-3) on two CPU ranks: the step of a GPT and its memory, against FSDP2, and the host time of a boundary.

    python benchmarks/bench_shard.py [--quick] [--json PATH] [--part step|memory|boundary|all] [--blocks 8,24,48]
                                     [--repeats N] [--systems ours,fsdp2,...] [--millions 34]

Step: GPTs of about 34 M parameters with 8, 24 and 48 blocks, batch 1 x 64 tokens, fp32, one thread per rank; units are the
blocks (shard_systems.py). Overhead = time of a step (zero_grad, forward, backward, clip, step) minus the time of forward +
backward alone of the same model without hooks ("compute"), taken next to each other; all systems interleaved in one job,
after their losses and updates have been compared. FSDP2 comes in two configurations, both with reshard_after_forward=True;
the ratio to FSDP2 is that to the faster one. Limit: the bare loops, which move the same bytes. Beside: DDP, and ShardedAdamW
without bw.shard (ZeRO-2). Phases are differences of the same pairs; a system that works ahead does so in an earlier phase.

Memory: of rank 0 over two steps after three, in a job of its own for each system. Counted once each:

- *tensors*: by torch's MemTracker, storages that are alive in a step: activations, gradients that autograd has made; of FSDP2
  also its shards, states, gathered parameters and buffers. Storages that are not torch's (`resizable()` is false) are left
  out: they are memory of our pools, often several storages over the same bytes.
- *pools*, ours alone, by our counters. Always there: parts of parameters, gradients, states (`memory_summary`: params, grads,
  states, bookkeeping). *live*: gathered units and gradient buckets that are in use (`residency_counts`: live;
  `memory_summary`: buckets). *held*: what the communicators' pools have reserved (`memory_summary`: pool), in use or not; the
  plans' places of units and buckets among it.

The peak of *live* is that of the sum after every torch operation; of *held* the peak of tensors, and all that pools hold.
FSDP2's peak is MemTracker's. Memory of gloo, and of shared memory that ranks talk through, is in neither; it is in PSS, the
proportional set size at its peak, summed over both ranks, of processes that do nothing else (torch alone has `idle`). PSS also
has what malloc keeps of buffers that FSDP2 has freed.

Boundary: a chain of 48 tiny blocks, of 1 and of 12 tensors each, in one rank and in two. Its time less that of the same chain
with empty Python hooks (before and after forward, and before the output's node in backward), by unit: 48 blocks and the root.
Nothing is trained but a scale of the root, so that backward has no hook but these. A unit has two boundaries in forward and
one in backward. `waited`: how long the host waited for gathers, which is in ours; `cpu`: the same difference in CPU time of the
thread that trains. Counted in a pass that is not timed: calls of native code, and of Python functions of the package, by unit.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_optim import PAIR, checked_batches
from gpt_systems import LR, GptConfig, Plain, token_batches
from harness import Memory, Rank, Results, Timing, keep_freed_memory, parse_args, rotation, run_ranks, slowest
from shard_systems import FSDP2, SYSTEMS
from torch import Tensor, nn
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mem_tracker import MemTracker

import bucketwheel as bw

WORLD = 2
PHASES = ("zero_grad", "forward", "backward", "clip", "update")  # of `System.train_step`, which calls the last "step"
MIB = 2**20


def config_of(blocks: int, parameters: float) -> GptConfig:
    """The width, a multiple of 8 heads, with which a GPT of so many blocks has about so many parameters."""
    plain = GptConfig()
    linear = 13 * blocks + 2 * plain.vocabulary + plain.context + 2
    width = ((linear**2 + 48 * blocks * parameters) ** 0.5 - linear) / (24 * blocks)
    return GptConfig(layers=blocks, width=max(1, round(width / plain.heads)) * plain.heads)


# ------------------------------------------------------------------------------------------------------------ step


def step_job(rank: Rank, names: list[str], config: GptConfig, repeats: int) -> dict[str, dict[str, Timing]]:
    """One rank: checks that the systems agree, then times pairs of (forward + backward, step), and the step's phases."""
    keep_freed_memory()
    plain, systems = Plain(config), {name: SYSTEMS[name](config) for name in names}
    batches = checked_batches(rank, config, plain, systems, repeats)
    samples: dict[str, dict[str, list[float]]] = {n: {what: [] for what in (*PAIR, *PHASES)} for n in names}
    gc.collect()
    gc.disable()
    for repeat, tokens in enumerate(batches):
        for name in rotation(names, repeat):
            took: dict[str, list[float]] = {}
            for what, system in (("base", plain), ("step", systems[name])):
                plain.zero_grad()
                rank.barrier()
                begin, begin_cpu = time.perf_counter(), time.process_time()
                ends: list[float] = []
                system.train_step(tokens, lambda _, ends=ends: ends.append(time.perf_counter()))  # type: ignore[misc]
                samples[name][what].append(ends[-1] - begin)
                samples[name][f"{what} cpu"].append(time.process_time() - begin_cpu)
                took[what] = [end - start_s for start_s, end in zip([begin, *ends[:-1]], ends, strict=True)]
            for phase, base_s, step_s in zip(PHASES, took["base"], took["step"], strict=True):
                samples[name][phase].append(step_s - base_s)
    gc.enable()
    for system in systems.values():
        system.close()
    return {n: {what: Timing(tuple(v)) for what, v in lists.items()} for n, lists in samples.items()}


def run_step(results: Results, names: list[str], config: GptConfig, repeats: int) -> None:
    """Adds a line for each system but ours, and prints a table."""
    ranks = run_ranks(WORLD, step_job, names, config, repeats, timeout_s=3600).values
    found = {n: {what: slowest([rank[n][what] for rank in ranks]) for what in ranks[0][n]} for n in names}
    overhead = {n: found[n]["step"].minus(found[n]["base"]) for n in names}
    fsdp2 = min((n for n in names if n in FSDP2), key=lambda n: overhead[n].median_s, default=None)
    ours = overhead.get("ours")
    print(
        f"{config.layers} blocks of width {config.width}: ms, medians of {repeats} pairs; phases: over forward + backward alone"
    )
    print(
        "system           compute      step  overhead  spread       cpu  ours/it   "
        + "".join(f"{p:>10s}" for p in PHASES)
    )
    for name in names:
        of = found[name]
        cpu_s = of["step cpu"].minus(of["base cpu"]).median_s
        ratio = f"{ours.median_s / overhead[name].median_s:8.2f}" if ours else "       -"
        row = f"{name:14s} {of['base'].median_s * 1e3:9.1f} {of['step'].median_s * 1e3:9.1f} {overhead[name].median_s * 1e3:9.1f}"
        row += f" {overhead[name].spread * 100:5.0f} % {cpu_s * 1e3:9.1f} {ratio}   "
        print(row + "".join(f"{of[phase].median_s * 1e3:10.1f}" for phase in PHASES))
    if ours:
        for label, name in (("fsdp2", fsdp2), ("bare loops", "bare loops")):
            if name in overhead:
                print(
                    f"ours / {label}: {ours.median_s / overhead[name].median_s:.2f}"
                    + (f" ({name}: {FSDP2[name]})" if name in FSDP2 else "")
                )
    sys.stdout.flush()
    for name in names:
        if name == "ours" and len(names) > 1:
            continue
        results.add(
            f"gpt step overhead, {config.layers} blocks, 2 ranks",
            ours,
            peer=name,
            peer_timing=overhead[name],
            limit_s=overhead["bare loops"].median_s if "bare loops" in overhead else None,
            peer_is=FSDP2.get(name),
            is_fastest_fsdp2=name == fsdp2,
            width=config.width,
            compute_s=found[name]["base"].median_s,
            peer_step_s=found[name]["step"].median_s,
            ours_step_s=found["ours"]["step"].median_s if ours else None,
            peer_cpu_overhead_s=found[name]["step cpu"].minus(found[name]["base cpu"]).median_s,
            ours_phases_s={p: found["ours"][p].median_s for p in PHASES} if ours else None,
            peer_phases_s={p: found[name][p].median_s for p in PHASES},
        )


# ---------------------------------------------------------------------------------------------------------- memory


class TorchMemory(MemTracker):
    """MemTracker of storages that torch has allocated. ``peak``: the most of their bytes and of what ``more()`` says, together,
    after an operation; from when ``more`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.more: Callable[[], int] | None = None
        self.peak = 0

    @staticmethod
    def is_of_torch(tensor: Tensor) -> bool:
        return all(storage.resizable() for storage in get_untyped_storages(tensor))

    def _track(self, reftype: Any, t: Tensor) -> None:
        if self.is_of_torch(t):
            super()._track(reftype, t)

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        if self.more is not None:
            tensors = sum(of_device["Total"] for of_device in self._curr_mem_snap.values())
            self.peak = max(self.peak, tensors + self.more())

    # What belongs to modules and optimizers is in pools, and parameters that are not gathered have no storage.

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        return 0, 0

    def _track_inputs_or_outputs(self, args: Any) -> int:
        return 0

    def _track_optimizer_states(self, reftype: Any, optimizer: Any) -> None: ...


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank at their most: see the top of the file. ``parts``: of ours."""

    live: int
    held: int
    tensors: int
    parts: dict[str, int]


def tracked_job(rank: Rank, name: str, config: GptConfig) -> Peak:
    batches = token_batches(rank.rank, config, 5)
    tracker = TorchMemory() if name == "ours" else MemTracker()
    with tracker:
        system = SYSTEMS[name](config)
        for tokens in batches[:3]:
            system.train_step(tokens)
            tracker.reset_mod_stats()
    model: Any = system.model

    def pools() -> int:
        memory = system.optimizer.memory_summary()
        live: int = memory["buckets"] + model.residency_counts()["live"]
        return live + sum(memory[kind] for kind in ("params", "grads", "states", "bookkeeping"))

    if isinstance(tracker, TorchMemory):
        tracker.more = pools
    with tracker:  # its peak begins anew
        for tokens in batches[3:]:
            system.train_step(tokens)
            tracker.reset_mod_stats()
    tensors = sum(of_device["Total"] for of_device in tracker.get_tracker_snapshot("peak").values())
    parts: dict[str, int] = {}
    live = held = tensors
    if isinstance(tracker, TorchMemory):
        memory, counts = system.optimizer.memory_summary(), model.residency_counts()
        parts = {kind: memory[kind] for kind in ("params", "grads", "states", "bookkeeping", "pool", "buckets_peak")}
        parts |= {
            "units_peak": counts["peak"],
            "units_planned": counts["planned"],
            "buckets_planned": memory["planned"],
        }
        live = tracker.peak
        held = tensors + sum(parts[kind] for kind in ("params", "grads", "states", "bookkeeping", "pool"))
    system.close()
    return Peak(live, held, tensors, parts)


def pss_job(rank: Rank, name: str | None, config: GptConfig) -> None:
    """Nothing but this system (None: nothing at all) is alive while memory is sampled."""
    system = SYSTEMS[name](config) if name else None
    batches = token_batches(rank.rank, config, 6)
    for tokens in batches[:3] if system else []:
        system.train_step(tokens)  # type: ignore[union-attr]
    gc.collect()
    with rank.memory_window():
        for tokens in batches[3:]:
            time.sleep(0.1) if system is None else system.train_step(tokens)
    if system is not None:
        system.close()


def run_memory(results: Results, names: list[str], config: GptConfig) -> None:
    """Adds a line for each configuration of FSDP2 among ``names``."""
    names = [n for n in names if n == "ours" or n in FSDP2]
    peaks: dict[str, Peak] = {n: run_ranks(WORLD, tracked_job, n, config).values[0] for n in names}
    resident: dict[str, Memory] = {n: run_ranks(WORLD, pss_job, n or None, config).peak for n in ("", *names)}
    print(
        f"{config.layers} blocks of width {config.width}: peak MiB of rank 0; PSS of both ranks; idle PSS "
        f"{resident[''].total_bytes / MIB:.1f}"
    )
    for name in names:
        peak = peaks[name]
        row = f"{name:14s} live {peak.live / MIB:7.1f}  held {peak.held / MIB:7.1f}  tensors {peak.tensors / MIB:7.1f}"
        row += f"  PSS {resident[name].total_bytes / MIB:7.1f}   "
        print(row + "  ".join(f"{kind} {value / MIB:.1f}" for kind, value in peak.parts.items()))
    for name in names:
        if name == "ours" or "ours" not in peaks:
            continue
        ours, peer = peaks["ours"], peaks[name]
        is_less = {
            "live": ours.live <= peer.live,
            "held": ours.held <= peer.held,
            "PSS": resident["ours"].total_bytes <= resident[name].total_bytes,
        }
        print(f"ours <= {name}: " + ", ".join(f"{what} {'yes' if yes else 'NO'}" for what, yes in is_less.items()))
        results.add(
            f"gpt step memory, {config.layers} blocks, 2 ranks",
            None,
            peer=name,
            width=config.width,
            ours_live_bytes=ours.live,
            ours_held_bytes=ours.held,
            ours_tensor_bytes=ours.tensors,
            ours_parts_bytes=ours.parts,
            peer_live_bytes=peer.live,
            ours_peak_pss_bytes=resident["ours"].total_bytes,
            peer_peak_pss_bytes=resident[name].total_bytes,
            idle_pss_bytes=resident[""].total_bytes,
        )
    sys.stdout.flush()


# -------------------------------------------------------------------------------------------------------- boundary

BOUNDARY = ("forward, no grad", "forward", "backward")
UNITS = 49  # 48 blocks and the root
HOOKS = "empty Python hooks"


class Tiny(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(8), requires_grad=False)
        self.others = nn.ParameterList(nn.Parameter(torch.ones(8), requires_grad=False) for _ in range(tensors - 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first


class Chain(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tiny(tensors) for _ in range(UNITS - 1))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).sum()


def with_empty_hooks(model: Chain) -> Chain:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None: ...
    def before_backward(grads: Any) -> None: ...
    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(before_backward)

    for module in (model, *model.blocks):
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    return model


class Calls:
    """Counts calls while it is entered: of native code of the package, and of Python functions of the package. A native
    attribute that is read or set is no call here."""

    def __init__(self) -> None:
        self.native = self.python = 0
        self._package = str(Path(bw.__file__).parent)

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if event == "c_call":
            self.native += str(getattr(arg, "__module__", "")).startswith("bucketwheel")
        elif event == "call":
            self.python += frame.f_code.co_filename.startswith(self._package)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)


def boundary_job(rank: Rank, tensors: int, repeats: int) -> dict[str, Any]:
    """One rank. By phase and system the time of a unit; and by phase what has been counted."""
    group = bw.LocalWorld(1).rank(0) if rank.world == 1 else None
    sharded = bw.shard(Chain(tensors), (Tiny,), group=group, prefetch=1)
    optimizer = bw.ShardedAdamW([sharded.scale], lr=LR)
    models: dict[str, Any] = {"ours": sharded, HOOKS: with_empty_hooks(Chain(tensors)), "no hooks": Chain(tensors)}
    x = torch.ones(8, requires_grad=True)
    samples: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in models} for phase in BOUNDARY}
    cpu: dict[str, dict[str, list[float]]] = {phase: {name: [] for name in models} for phase in BOUNDARY}
    waited: dict[str, list[float]] = {phase: [] for phase in BOUNDARY}
    counts: dict[str, dict[str, float]] = {}

    def waited_s() -> float:
        return sum(sharded.residency_counts()["waited_s"].values())

    def run(name: str, around: Callable[[str, str, Callable[[], Any]], Any]) -> float:
        with torch.no_grad():
            around(BOUNDARY[0], name, lambda: models[name](x))
        loss = around(BOUNDARY[1], name, lambda: models[name](x))
        around(BOUNDARY[2], name, loss.backward)
        value = float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        models[name].zero_grad()
        x.grad = None
        return value

    def timed(phase: str, name: str, call: Callable[[], Any]) -> Any:
        rank.barrier()
        before_s = waited_s()
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        result = call()
        end, end_cpu = time.perf_counter(), time.thread_time()
        samples[phase][name].append((end - begin) / UNITS)
        cpu[phase][name].append((end_cpu - begin_cpu) / UNITS)
        if name == "ours":
            waited[phase].append((waited_s() - before_s) / UNITS)
        return result

    def counted(phase: str, name: str, call: Callable[[], Any]) -> Any:
        calls = Calls()
        with calls.counting():
            result = call()
        counts[phase] = {"native_calls": calls.native / UNITS, "python_calls": calls.python / UNITS}
        return result

    values = [run(name, lambda phase, name, call: call()) for name in models]
    if len(set(values)) != 1:
        raise RuntimeError(f"boundary: the chains' results differ: {dict(zip(models, values, strict=True))}")
    for _ in range(5):
        run("ours", lambda phase, name, call: call())
    gc.collect()
    gc.disable()
    for repeat in range(repeats):
        for name in rotation(list(models), repeat):
            run(name, timed)
    gc.enable()
    run("ours", counted)
    optimizer.close()
    wall, processor = (
        {phase: {name: Timing(tuple(v)) for name, v in of.items()} for phase, of in found.items()}
        for found in (samples, cpu)
    )
    waits = {phase: Timing(tuple(v)) for phase, v in waited.items()}
    return {"wall": wall, "cpu": processor, "waited": waits, "counts": counts}


def run_boundary(results: Results, repeats: int) -> None:
    """Adds a line for each phase, number of tensors and world size; ``ours_s`` is ours less the empty hooks, for a unit."""
    print("us for a unit, medians; ours and cpu: less the empty hooks; hooks: these, less none")
    for world in (1, WORLD):
        for tensors in (1, 12):
            ranks = run_ranks(world, boundary_job, tensors, repeats).values
            for phase in BOUNDARY:
                of, cpu = (
                    {n: slowest([rank[what][phase][n] for rank in ranks]) for n in ranks[0][what][phase]}
                    for what in ("wall", "cpu")
                )
                ours, hooks = of["ours"].minus(of[HOOKS]), of[HOOKS].minus(of["no hooks"])
                ours_cpu = cpu["ours"].minus(cpu[HOOKS])
                waited = slowest([rank["waited"][phase] for rank in ranks])
                counts = ranks[0]["counts"][phase]
                row = f"{phase:16s} world {world}, {tensors:2d} tensors: ours {ours.median_s * 1e6:6.1f} "
                row += f"(spread {ours.spread * 100:.0f} %), waited {waited.median_s * 1e6:5.1f}, "
                row += f"cpu {ours_cpu.median_s * 1e6:5.1f}; hooks {hooks.median_s * 1e6:4.1f}; "
                print(row + ", ".join(f"{name} {value:.2f}" for name, value in counts.items()))
                results.add(
                    f"boundary, {phase}, world {world}, {tensors} tensors",
                    ours,
                    peer=HOOKS,
                    peer_timing=hooks,
                    ours_cpu_s=ours_cpu.median_s,
                    ours_waited_s=waited.median_s,
                    chain_s=of["ours"].median_s,
                    chain_without_hooks_s=of["no hooks"].median_s,
                    **counts,
                )
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------------------------


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--part", choices=("all", "step", "memory", "boundary"), default="all")
    parser.add_argument(
        "--blocks", help="comma-separated numbers of blocks", type=lambda s: [int(n) for n in s.split(",")]
    )
    parser.add_argument("--millions", type=float, default=34, help="parameters of each GPT")
    parser.add_argument("--repeats", type=int, help="pairs per system; samples of a boundary")
    parser.add_argument("--systems", help=f"comma-separated, of: {', '.join(SYSTEMS)}", type=lambda s: s.split(","))


def main() -> None:
    options: Any = parse_args(__doc__ or "", configure)
    names = options.systems or (["ours", "fsdp2", "bare loops"] if options.quick else list(SYSTEMS))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"unknown systems {unknown}, expected some of {list(SYSTEMS)}")
    results = Results("shard", options.json)
    for blocks in options.blocks or ([8] if options.quick else [8, 24, 48]):
        config = config_of(blocks, options.millions * 1e6)
        if options.part in ("all", "step"):
            run_step(results, names, config, options.repeats or (5 if options.quick else 25))
        if options.part == "memory" or (options.part == "all" and not options.quick):
            run_memory(results, options.systems or ["ours", "fsdp2"], config)
    if options.part in ("all", "boundary"):
        run_boundary(results, options.repeats or (11 if options.quick else 101))
    results.print_table()


if __name__ == "__main__":
    main()
