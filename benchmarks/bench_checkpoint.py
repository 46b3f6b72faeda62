"""Checkpoints of two ranks: saving and loading, what training loses to a save in the background, and to snapshots.

    python benchmarks/bench_checkpoint.py [--quick] [--json PATH] [--part save|stall|stock|snapshots] [--mib N] [--dir DIR]

A GPT of bench_optim.py, wider, whose fp32 parameters, exp_avg and exp_avg_sq have `--mib` MiB together (default 1024). One
thread a rank. Files lie in a temporary folder in DIR (default: build/ of the checkout), on a file system whose name is
printed. All writers fsync, and each replaces the checkpoint that it wrote before. Reads find the files in the page cache, but
for "load from the disk".

save: save and load of the rank's parameters and states ("load": into a new job's optimizer, as a resume does; "load again":
    into one that has stepped, whose values a damaged file must not change) against
    bare: one file a rank, written from and read into the same live memory in the same chunks, with one fsync of the file
        and one of its folder, then renamed over the last one; no checksums, no metadata.
    fsdp2: the same model under FSDP2 with fused AdamW; stock dcp.save with FileSystemWriter(sync_files=True), and dcp.load
        in place. Its state dicts are made before, which favours it.
    limit: what a load has to do at least, `BareFiles.load_checked`.
  A time is that of the job: from the first rank's begin to the last rank's end.
stall: the call of `async_save`, plus what 10 steps (batch 1 x 64 tokens) that begin right after it take longer than 10 steps
    without a save, against our synchronous save, and against the processor time that both add to a rank, since both cores
    train. A stall of 0 or less was lost in the noise.
stock: `optimizer.state_dict()` and `dcp.async_save` of it until that returns, with a stager that is kept, against a memcpy of
    the rank's states into buffers that are kept; "state_dict_s" and "call_s" are the two parts.
snapshots: what `bw.Snapshots` does within `step`, against a memcpy of the rank's gradient shard; and a training step of the
    GPT of 34 M parameters with snapshots and without, batch 4 x 256 and 1 x 64 tokens, in blocks of steps in turn.

cpu_s: CPU time of a rank's threads in the call (stall: and in the steps, less that of the steps alone), median of the
    slower rank; other work on the machine disturbs it less.
extra_mib: the most that a rank's resident memory grew in a call (VmHWM, reset before; what malloc had kept is given back).
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tempfile
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from gpt_systems import Fsdp2, GptConfig, Ours, System, token_batches
from harness import Rank, Results, Timing, keep_freed_memory, measure, of_job, parse_args, rotation, run_ranks, slowest
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

import bucketwheel as bw
from bucketwheel.checkpoint.writer import CHUNK_BYTES
from bucketwheel.native import core

WORLD = 2
STATES = 3  # of each parameter: itself and two moments
STALL_STEPS = 10
GOALS = {  # ratio peer / ours, at least
    ("save", "bare"): 1 / 1.1,
    ("load", "limit"): 1 / 1.6,
    ("save", "fsdp2"): 1.0,
    ("load", "fsdp2"): 1.0,
    ("load again", "fsdp2"): 1.0,
    ("load from the disk", "fsdp2"): 1.0,
    ("async_save: stall", "its processor time"): 1.0,
    ("stock dcp.async_save: call", "memcpy"): 1 / 2.2,  # two copies
    ("snapshots: in step", "memcpy"): 1 / 1.5,
    ("snapshots: step of 4 x 256 tokens", "without"): 1 / 1.05,
}


def config_of(mib: int) -> GptConfig:
    """The GPT whose parameters and states have about so many MiB."""
    width = 1024 if mib >= 512 else 256
    layers = round(mib * 2**20 / (STATES * 4) / (12 * width**2 + 13 * width))
    return GptConfig(layers=max(1, layers), width=width)


def live_tensors(optimizer: bw.ShardedAdamW) -> list[Tensor]:
    """The rank's own parameters and states where they lie, each 1-D."""
    engine = optimizer._engine
    found = [t for info in engine.infos for t in (*engine.value_parts(info.index), *engine.states[info.index].values())]
    return [tensor.detach().view(-1) for tensor in found if tensor.numel()]


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def grown_bytes(call: Callable[[], object]) -> int:
    """How far the resident memory went up in the call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


class WithCpu:
    """A call, and the CPU time that this rank's threads, and the system for them, have taken in each one."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.samples_s: list[float] = []

    def __call__(self) -> None:
        begin = time.process_time()
        self.call()
        self.samples_s.append(time.process_time() - begin)


# --- save and load ----------------------------------------------------------------------------------------------------


class OurFiles:
    def __init__(self, system: Ours, folder: Path) -> None:
        self.system, self.folder = system, folder

    def renew(self, config: GptConfig) -> None:
        """Be a job that has just begun, in memory that the system has given already, as the others' is."""
        self.system.close()
        self.system = Ours(config)
        self.system.optimizer._engine.share_params()  # of the communicator

    def tensors(self) -> list[Tensor]:
        return [*live_tensors(self.system.optimizer), *(p.detach() for p in self.system.model.parameters())]

    def save(self) -> None:
        bw.checkpoint.save(self.folder, self.system.model, self.system.optimizer)

    def load(self) -> None:
        bw.checkpoint.load(self.folder, self.system.model, self.system.optimizer)


class BareFiles:
    """[Note: what is bare] Of the memory of ours: nothing is decided, checked or told to anyone."""

    def __init__(self, system: Ours, folder: Path, rank: Rank) -> None:
        self.system, self.rank = system, rank
        self.path = folder / f"{rank.rank}.bin"
        self.views = [memoryview(t.numpy()).cast("B") for t in self.tensors()]
        folder.mkdir(exist_ok=True)

    def tensors(self) -> list[Tensor]:
        return live_tensors(self.system.optimizer)

    def save(self) -> None:
        draft = self.path.with_suffix(".draft")
        with draft.open("wb", buffering=0) as file:
            for view in self.views:
                for at in range(0, len(view), CHUNK_BYTES):
                    file.write(view[at : at + CHUNK_BYTES])
            os.fsync(file.fileno())
        draft.replace(self.path)
        names = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(names)
        os.close(names)
        self.rank.barrier()

    def load(self) -> None:
        self._read(CHUNK_BYTES, lambda chunk: None)
        self.rank.barrier()

    def load_checked(self) -> None:
        """The least that a load with checksums does, if it may have loaded some of a damaged file: CRC32C of what was just
        read, then an all-gather of the parameters, of which a rank has read its part."""
        self._read(CHUNK_BYTES // 4, core.crc32c)
        self.system.optimizer._engine.share_params()
        self.rank.barrier()

    def _read(self, size: int, use: Callable[[memoryview], object]) -> None:
        with self.path.open("rb", buffering=0) as file:
            for view in self.views:
                for at in range(0, len(view), size):
                    chunk = view[at : at + size]
                    file.readinto(chunk)
                    use(chunk)


class Fsdp2Files:
    def __init__(self, system: Fsdp2, folder: Path) -> None:
        self.system, self.folder = system, folder
        model, optimizer = get_state_dict(system.model, system.optimizer)
        self.state = {"model": model, "optimizer": optimizer}

    def tensors(self) -> list[Tensor]:
        states = [value for state in self.system.optimizer.state.values() for value in state.values()]
        every = [*self.system.model.parameters(), *states]
        return [t.to_local().detach() if hasattr(t, "to_local") else t for t in every]

    def save(self) -> None:
        writer = dcp.FileSystemWriter(self.folder, sync_files=True)
        dcp.save(self.state, storage_writer=writer)

    def load(self) -> None:
        dcp.load(self.state, storage_reader=dcp.FileSystemReader(self.folder))


def drop_from_cache(folder: Path) -> None:
    """What has been written to the disk of these files is read from there again."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def expect_restored(name: str, files: Any, system: System, tokens: Tensor) -> None:
    """RuntimeError unless a load brings back the bits that a save found, after a step that changed them."""
    system.zero_grad()
    files.save()
    saved = [tensor.clone() for tensor in files.tensors()]
    system.train_step(tokens)
    system.zero_grad()
    if all(torch.equal(a, b) for a, b in zip(saved, files.tensors(), strict=True)):
        raise RuntimeError(f"{name}: a training step has changed nothing")
    files.load()
    for index, (a, b) in enumerate(zip(saved, files.tensors(), strict=True)):
        if not torch.equal(a, b):
            raise RuntimeError(f"{name}: tensor {index} of {len(saved)} is not what was saved")


def save_job(rank: Rank, config: GptConfig, folder: Path, repeats: int) -> dict[str, Any]:
    keep_freed_memory()
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    ours, fsdp2 = Ours(config), Fsdp2(config)
    batches = token_batches(rank.rank, config, 2)
    for system in (ours, fsdp2):
        system.train_step(batches[0])
    nbytes = sum(tensor.nbytes for tensor in live_tensors(ours.optimizer))
    files = {
        "ours": OurFiles(ours, folder / "ours"),
        "bare": BareFiles(ours, folder / "bare", rank),
        "fsdp2": Fsdp2Files(fsdp2, folder / "fsdp2"),
    }
    for name, each in files.items():
        expect_restored(name, each, each.system, batches[1])
    new_job = OurFiles(Ours(config), folder / "ours")

    def before(name: str) -> None:
        if name == "new":
            new_job.renew(config)
        if what == "load from the disk" and rank.rank == 0:
            drop_from_cache(folder)
        rank.barrier()

    saves = {name: each.save for name, each in files.items()}
    loads = {"new": new_job.load, **{name: each.load for name, each in files.items()}}
    loads["limit"] = files["bare"].load_checked
    out: dict[str, Any] = {"bytes": nbytes}
    for what, cases in (("save", saves), ("load", loads), ("load from the disk", loads)):
        calls = {name: WithCpu(call) for name, call in cases.items()}
        times = measure(calls, repeats=repeats, warmup=1, before=before)
        cpu_s = {name: Timing(tuple(call.samples_s[1:])).median_s for name, call in calls.items()}
        grown = {name: (before(name), grown_bytes(call))[1] for name, call in calls.items()}
        out[what] = {name: (times[name], cpu_s[name], grown[name]) for name in calls}
    new_job.system.close()
    ours.close()
    return out


def run_save(results: Results, config: GptConfig, folder: Path, repeats: int) -> None:
    ranks = run_ranks(WORLD, save_job, config, folder, repeats, timeout_s=1800).values
    for case, what, ours in (
        ("save", "save", "ours"),
        ("load", "load", "new"),
        ("load again", "load", "ours"),
        ("load from the disk", "load from the disk", "new"),
    ):
        times = {name: of_job([rank[what][name][0] for rank in ranks]) for name in ranks[0][what]}
        cpu_s = {name: max(rank[what][name][1] for rank in ranks) for name in times}
        extra = {name: max(rank[what][name][2] for rank in ranks) for name in times}
        for peer in [name for name in ("bare", "fsdp2", "limit") if name in times]:
            add(
                results,
                case,
                times[ours],
                peer,
                times[peer],
                bytes=sum(rank["bytes"] for rank in ranks),
                ours_cpu_s=cpu_s[ours],
                peer_cpu_s=cpu_s[peer],
                ours_extra_mib=extra[ours] / 2**20,
                peer_extra_mib=extra[peer] / 2**20,
            )


# --- a save while training goes on ------------------------------------------------------------------------------------


def stall_job(rank: Rank, config: GptConfig, folder: Path, repeats: int) -> dict[str, Any]:
    keep_freed_memory()
    ours = Ours(config)
    batches = token_batches(rank.rank, config, STALL_STEPS)
    handles: list[Any] = []

    def save() -> None:
        ours.zero_grad()
        bw.checkpoint.save(folder / "stall", ours.model, ours.optimizer)

    def steps() -> None:
        for tokens in batches:
            ours.train_step(tokens)
        rank.barrier()

    def save_and_steps() -> None:
        ours.zero_grad()
        begin = time.perf_counter()
        handles.append(bw.checkpoint.async_save(folder / "stall", ours.model, ours.optimizer))
        calls.append(time.perf_counter() - begin)
        steps()

    calls: list[float] = []
    staged: list[int] = []
    cases = {name: WithCpu(call) for name, call in (("save", save), ("steps", steps), ("stalled", save_and_steps))}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name in rotation(list(cases), repeat):
            rank.barrier()
            begin = time.perf_counter()
            cases[name]()
            samples[name].append(time.perf_counter() - begin)
            if handles:
                handles[0].wait()
                staged.append(handles.pop().stats.staged_bytes)
    grown = grown_bytes(lambda: (save_and_steps(), handles.pop().wait())) - grown_bytes(steps)
    ours.close()
    timings = {name: Timing(tuple(values[1:])) for name, values in {**samples, "call": calls[:-1]}.items()}
    cpu_s = {name: Timing(tuple(call.samples_s[1 : repeats + 1])) for name, call in cases.items()}
    return {**timings, "cpu": cpu_s, "grown": grown, "staged": max(staged)}


def run_stall(results: Results, config: GptConfig, folder: Path, repeats: int) -> None:
    ranks = run_ranks(WORLD, stall_job, config, folder, repeats, timeout_s=3600).values
    times = {name: slowest([rank[name] for rank in ranks]) for name in ("save", "steps", "stalled", "call")}
    stall = times["stalled"].minus(times["steps"])
    cpu = slowest([rank["cpu"]["stalled"].minus(rank["cpu"]["steps"]) for rank in ranks])
    add(results, "async_save: stall", stall, "its processor time", cpu)
    add(
        results,
        "async_save: stall",
        stall,
        "save",
        times["save"],
        call_s=times["call"].median_s,
        steps_s=times["steps"].median_s,
        ours_cpu_s=cpu.median_s,
        peer_cpu_s=max(rank["cpu"]["save"].median_s for rank in ranks),
        staged_mib=max(rank["staged"] for rank in ranks) / 2**20,
        ours_extra_mib=max(rank["grown"] for rank in ranks) / 2**20,
    )


def stock_job(rank: Rank, config: GptConfig, folder: Path, repeats: int) -> dict[str, Timing]:
    keep_freed_memory()
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    ours = Ours(config)
    ours.train_step(token_batches(rank.rank, config, 1)[0])
    ours.zero_grad()
    engine = ours.optimizer._engine
    sources = [tensor for info in engine.infos for tensor in engine.states[info.index].values()]
    targets = [torch.empty_like(tensor) for tensor in sources]
    stager = DefaultStager(StagingOptions(False, False, False, False))
    pending: list[Any] = []
    exported: list[float] = []

    def stage() -> None:
        begin = time.perf_counter()
        state = {"optimizer": ours.optimizer.state_dict()}
        exported.append(time.perf_counter() - begin)
        writer = dcp.FileSystemWriter(folder / "stock")
        pending.append(dcp.async_save(state, storage_writer=writer, async_stager=stager))

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    def finish(name: str) -> None:
        while pending:
            pending.pop().result()
        rank.barrier()

    calls = {"ours": WithCpu(stage), "memcpy": WithCpu(copy)}
    times = measure(calls, repeats=repeats, warmup=2, before=finish)
    finish("")
    stager.close()
    ours.close()
    cpu_s = {f"{name} cpu": Timing(tuple(call.samples_s[2:])) for name, call in calls.items()}
    return {**times, **cpu_s, "export": Timing(tuple(exported[2:]))}


def run_stock(results: Results, config: GptConfig, folder: Path, repeats: int) -> None:
    ranks = run_ranks(WORLD, stock_job, config, folder, repeats, timeout_s=1800).values
    times = {name: slowest([rank[name] for rank in ranks]) for name in ranks[0]}
    add(
        results,
        "stock dcp.async_save: call",
        times["ours"],
        "memcpy",
        times["memcpy"],
        state_dict_s=times["export"].median_s,
        call_s=times["ours"].minus(times["export"]).median_s,
        ours_cpu_s=times["ours cpu"].median_s,
        peer_cpu_s=times["memcpy cpu"].median_s,
    )


# --- snapshots --------------------------------------------------------------------------------------------------------


def snapshots_job(rank: Rank, config: GptConfig, batch: int, blocks: int, block: int) -> dict[str, Timing]:
    """Blocks of steps without snapshots and with them, in turn; the first step of a block is not timed: replays overlap the
    step that follows them."""
    keep_freed_memory()
    ours = Ours(config)
    rows = token_batches(rank.rank, config, batch * (1 + block))
    batches = [torch.cat(rows[at : at + batch]) for at in range(0, len(rows), batch)]
    for tokens in batches[:2]:
        ours.train_step(tokens)
    samples: dict[str, list[float]] = {name: [] for name in ("off", "on", "in step", "memcpy")}
    for repeat in range(blocks + 1):
        for name in rotation(["off", "on"], repeat):
            snapshots = bw.Snapshots(ours.optimizer, every=2) if name == "on" else None
            if snapshots is not None:
                time_observer(ours.optimizer._engine, samples)
            ours.train_step(batches[0])
            rank.barrier()
            begin = time.perf_counter()
            for tokens in batches[1:]:
                ours.train_step(tokens)
            samples[name].append((time.perf_counter() - begin) / block)
            if snapshots is not None:
                snapshots.verify()  # bit for bit
                ours.optimizer._engine.step_observers.clear()
                snapshots.close()
    ours.close()
    skipped = {"off": 1, "on": 1, "in step": block + 1, "memcpy": block + 1}
    return {name: Timing(tuple(values[skipped[name] :])) for name, values in samples.items()}


def time_observer(engine: Any, samples: dict[str, list[float]]) -> None:
    """Times what snapshots do within the step and, before or behind it in turn, a memcpy of the gradient shard."""
    observe = engine.step_observers.pop()
    sources = [space.grad for space in engine.shard_memory().spaces]
    targets = [torch.zeros_like(source) for source in sources]

    def copy(_: object) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    cases = {"in step": observe, "memcpy": copy}

    def both(given: object) -> Any:
        noted = None  # what the engine calls behind the step
        for name in rotation(list(cases), len(samples["memcpy"])):
            begin = time.perf_counter()
            noted = cases[name](given) or noted
            samples[name].append(time.perf_counter() - begin)
        return noted

    engine.step_observers.append(both)


def run_snapshots(results: Results, quick: bool, repeats: int) -> None:
    cases = [(GptConfig(context=256), 4, repeats, 5), (GptConfig(), 1, 2 * repeats, 20)]
    if quick:
        cases = [(GptConfig(layers=2, width=128), 1, repeats, 3)]
    for config, batch, blocks, block in cases:
        ranks = run_ranks(WORLD, snapshots_job, config, batch, blocks, block, timeout_s=1800).values
        times = {name: slowest([rank[name] for rank in ranks]) for name in ranks[0]}
        tokens = f"{batch} x {config.context} tokens"
        add(results, f"snapshots: in step, {tokens}", times["in step"], "memcpy", times["memcpy"])
        add(results, f"snapshots: step of {tokens}", times["on"], "without", times["off"])


# --- the whole --------------------------------------------------------------------------------------------------------


def add(
    results: Results,
    case: str,
    ours: Timing,
    peer: str,
    peer_timing: Timing,
    **extra: Any,
) -> None:
    goal = GOALS.get((case.split(",")[0], peer))
    line = results.add(case, ours, peer=peer, peer_timing=peer_timing, goal=goal, **extra)
    facts = {**extra, "goal": goal, "reached": None if goal is None else line["ratio"] >= goal or line["ours_s"] <= 0}
    told = ", ".join(f"{key} {value:.4g}" for key, value in facts.items() if value is not None)
    print(f"{case} / {peer}: ratio {line['ratio']:.3f}, {told}", flush=True)


def file_system(folder: Path) -> str:
    """Type and mount point of the file system that holds a folder."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [words for words in mounts if folder.resolve().is_relative_to(words[1])]
    device, place, kind = max(holding, key=lambda words: len(words[1]))[:3]
    return f"{kind} ({device} on {place})"


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--part", choices=("all", "save", "stall", "stock", "snapshots"), default="all")
    parser.add_argument("--mib", type=int, help="of parameters and states, in all ranks together (1024; --quick: 24)")
    parser.add_argument("--dir", type=Path, help="where the files lie (default: build/ of the checkout)")
    parser.add_argument("--repeats", type=int, help="samples of each case (7; --quick: 3)")


def main() -> None:
    options: Any = parse_args(__doc__ or "", configure)
    config = config_of(options.mib or (24 if options.quick else 1024))
    repeats = options.repeats or (3 if options.quick else 7)
    parent = options.dir or Path(__file__).resolve().parents[1] / "build"
    parent.mkdir(parents=True, exist_ok=True)
    results = Results("checkpoint", options.json)
    with tempfile.TemporaryDirectory(prefix="bw-bench-checkpoint-", dir=parent) as folder:
        print(f"{config}, {repeats} samples, chunks of {CHUNK_BYTES >> 10} KiB, files on {file_system(Path(folder))}")
        parts: dict[str, Callable[[], None]] = {
            "save": lambda: run_save(results, config, Path(folder), repeats),
            "stall": lambda: run_stall(results, config, Path(folder), repeats),
            "stock": lambda: run_stock(results, config, Path(folder), repeats),
            "snapshots": lambda: run_snapshots(results, options.quick, repeats),
        }
        for name, run in parts.items():
            if options.part in ("all", name):
                run()
    results.print_table()


if __name__ == "__main__":
    main()
