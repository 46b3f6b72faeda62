"""The section `shard` of bench_gpu.py: parameters sharded over one rank (ZeRO-3).

The gather of one layer of 9,834,560 float16 elements a rank, which is that of DeepSpeed's pull request 1188: the host's time,
the device's, and what the device does for it. Then GPT-2 medium with its blocks as units, beside FSDP2 over one rank of
NCCL, and beside whole parameters with torch's clipping and fused AdamW: time of a step, and peak memory.

Over one rank FSDP2 gathers nothing: it copies each parameter (torch 2.13).
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_nccl import why_not_torch
from gpu_systems import FSDP2, GPT_MEDIUM, GPT_TINY, MIXED, TORCH, ZERO3, TrainingStep, fully_sharded
from gpu_timing import Bench
from harness import Timing, collectives_of_torch, rotation
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bucketwheel as bw
from bucketwheel.comm.collectives import AllGatherRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather
from bucketwheel.shard.module import runtime_of
from tests.gpu.device import DEVICE, Calls

__all__ = ["shard"]

WIDTH, NUMEL = 2560, 9_834_560
HOST_REPEATS, GPT_REPEATS = 200, 8
LEAST_S = 8.0  # for one kind of weights
UNSHARD, REQUEST, CALL = "unshard", "request", "all_gather"
TORCH_GATHER, COPY = "torch all_gather_into_tensor", "copy_"


def shard(bench: Bench) -> None:
    backend = "gloo" if DEVICE.is_simulated else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for backend in ("local", "nccl"):
        gather_of_a_layer(bench, backend)
    for weights in ("bfloat16", "float32, autocast", MIXED):
        if bench.time_left() < LEAST_S:
            bench.omit(f"GPT-2 medium, {weights}", "no time left")
        else:
            gpt(bench, weights)
    DEVICE.synchronize()
    dist.destroy_process_group()


# ---- the gather of a layer


class Layer(nn.Module):
    """The 12 tensors of a `gpt_systems.Block`, each an eighth: what one rank of 8 has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        part = width // 8
        vectors = [part] * 4 + [3 * part, part, 4 * part, part]
        matrices = [(3 * width, part), (width, part), (4 * width, part), (width, 4 * part)]
        shapes = [*((n,) for n in vectors), *matrices]
        new = lambda shape: torch.empty(shape, dtype=torch.float16, device=DEVICE.tensors).normal_()  # noqa: E731
        self.params = nn.ParameterList(nn.Parameter(new(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p.flatten()[0] * x for p in self.params]).sum()


class OneLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = Layer(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@dataclass(frozen=True)
class Gather:
    """``start`` returns a handle; ``undo`` comes before the next, and is not timed."""

    start: Callable[[], Any]
    undo: Callable[[], object] = lambda: None

    def whole(self) -> None:
        self.start().wait()


class _Now:
    def wait(self) -> None: ...


@contextlib.contextmanager
def ways_of(bench: Bench, backend: str) -> Iterator[tuple[dict[str, Gather], int, Callable[[], bool]]]:
    """Of gathering the layer, its elements, and whether `UNSHARD` has gathered the given values."""
    width = bench.size(WIDTH, 64)
    made: list[Communicator] = []
    if backend == "nccl":
        made += Communicator.pair(device="cuda", name="layer")
    comm = made[-1] if made else Communicator(bw.LocalWorld(1).rank(0), device="cuda", name="layer")
    made = made or [comm]
    given = OneLayer(width)
    values = [p.detach().clone() for p in given.parameters()]
    model: Any = bw.shard(given, (Layer,), group=comm)
    params, layer = list(model.parameters()), model.layer
    with bw.ShardedAdamW(params, lr=0.0, weight_decay=0.0) as optimizer:
        for _ in range(2):  # the first is recorded, and the memory planned
            model(torch.ones((), dtype=torch.float16, device=DEVICE.tensors)).backward()
            optimizer.step()
            optimizer.zero_grad()
        own = runtime_of(model).homes[1][0].values
        if not bench.quick and own.numel() != NUMEL:
            raise RuntimeError(f"the layer has {own.numel()} elements instead of {NUMEL}")
        full = torch.empty_like(own)
        request = AllGatherRequest([full], [own], comm.gathers)
        peer = fully_sharded(OneLayer(width), [])
        ways = {
            UNSHARD: Gather(lambda: model.unshard(layer), runtime_of(model).before_write),
            REQUEST: Gather(request.start),
            CALL: Gather(lambda: all_gather([full], [own], comm.gathers)),
            "FSDP2": Gather(lambda: peer.unshard(async_op=True), peer.reshard),
        }
        if not why_not_torch():
            gather = collectives_of_torch()[0]
            ways[TORCH_GATHER] = Gather(lambda: gather(full, own, async_op=True))

        def is_right() -> bool:
            ways[UNSHARD].whole()
            found = all(torch.equal(p, value) for p, value in zip(params, values, strict=True))
            found = found and not model.residency_counts()["side"]
            ways[UNSHARD].undo()
            return found

        def copy() -> _Now:
            full.copy_(own)
            return _Now()

        yield ways | {COPY: Gather(copy)}, own.numel(), is_right
        for way in ways.values():
            way.undo()
    model.close()
    for one in reversed(made):
        one.close()


def gather_of_a_layer(bench: Bench, backend: str) -> None:
    if reason := why_not_torch():
        bench.omit(f"layer: {TORCH_GATHER}, {backend}", reason)
    with ways_of(bench, backend) as (ways, numel, is_right):
        if not is_right():
            raise RuntimeError("a gathered layer does not have the values that were given, or lies beside the plan")
        peers = [name for name in ("FSDP2", TORCH_GATHER) if name in ways]
        done = {name: done_by(way) for name, way in ways.items()}
        with DEVICE.host_alone():
            issue, whole = host_times(bench, {name: way for name, way in ways.items() if name != COPY})
        for name in (UNSHARD, REQUEST, CALL):
            for peer in peers:
                bench.add(
                    f"layer, host time, {name}, {backend}", numel, whole[name], peer=peer, peer_timing=whole[peer],
                    us=us(whole[name]), issue_us=us(issue[name]), peer_us=us(whole[peer]), peer_issue_us=us(issue[peer]),
                    done=done[name], peer_done=done[peer],
                )  # fmt: skip
        cases = {name: way.whole for name, way in ways.items()}
        times = bench.measure(cases, before=lambda name: ways[name].undo())
        for name in (UNSHARD, REQUEST):
            for peer in (*peers, COPY):
                bench.add(
                    f"layer, device time, {name}, {backend}", numel, times[name], size_bytes=4 * numel, peer=peer,
                    peer_timing=times[peer],
                )  # fmt: skip


def us(timing: Timing) -> float:
    return round(1e6 * timing.median_s, 2)


def host_times(bench: Bench, ways: Mapping[str, Gather]) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Of the calling thread to start a gather; and to start it and let the current stream wait. The device is idle before."""
    issues: dict[str, list[float]] = {name: [] for name in ways}
    wholes: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for repeat in range(-5, bench.size(HOST_REPEATS, 5)):
        for name in rotation(list(ways), abs(repeat)):
            ways[name].undo()
            DEVICE.synchronize()
            begin = time.perf_counter()
            handle = ways[name].start()
            issued = time.perf_counter()
            handle.wait()
            end = time.perf_counter()
            if repeat >= 0:
                issues[name].append(issued - begin)
                wholes[name].append(end - begin)
    gc.enable()
    for way in ways.values():
        way.undo()
    DEVICE.synchronize()
    issue, whole = ({name: Timing(tuple(found)) for name, found in of.items()} for of in (issues, wholes))
    return issue, whole


# ---- what the device does


class _Operations(TorchDispatchMode):
    """The operations of torch inside that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def done_by(way: Gather) -> dict[str, Any]:
    """For one gather: our CUDA calls, torch's operations, and what the profiler saw the device do, with the bytes it copied."""
    for _ in range(2):
        way.undo()
        way.whole()
    way.undo()
    DEVICE.synchronize()
    calls, operations = Calls(), _Operations()
    with operations:
        way.whole()
    found = {"calls": calls.since(), "operations": counted(operations.names)}
    DEVICE.synchronize()
    way.undo()
    DEVICE.synchronize()
    return found if DEVICE.is_simulated else found | profiled(way)


def profiled(way: Gather) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        way.whole()
        DEVICE.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return device_work(json.loads(path.read_text())["traceEvents"])


def device_work(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels, copies and fills of a trace of torch's profiler. An empty ``device``: the profiler sees none of this device's."""
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    copied = sum(int(e.get("args", {}).get("bytes", 0)) for e in found if e["cat"] == "gpu_memcpy")
    return {"device": counted([e["name"][:60] for e in found]), "copied_bytes": copied}


def counted(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


# ---- GPT-2 medium


def gpt(bench: Bench, weights: str) -> None:
    """Peak memory of each system alone, then the time of steps, all in turn."""
    config, batch = (GPT_TINY, 2) if bench.quick else (GPT_MEDIUM, 4)
    names = (ZERO3, FSDP2, TORCH)
    losses: dict[str, Tensor] = {}
    memory: dict[str, dict[str, float]] = {}
    for name in names:
        memory[name], losses[name] = alone(name, weights, config, batch)
    for name in names:
        torch.testing.assert_close(losses[name], losses[TORCH], rtol=3e-2, atol=3e-2)
    systems = {name: TrainingStep(name, weights, config, batch) for name in names}
    timings = bench.measure({name: system.train for name, system in systems.items()}, repeats=GPT_REPEATS)
    in_turn = {name: round(1e3 * system.in_turn_s(bench.size(4, 1)), 3) for name, system in systems.items()}
    for peer in (FSDP2, TORCH):
        bench.add(
            f"GPT-2 medium step, {weights}, sharded", systems[ZERO3].numel, timings[ZERO3], peer=peer,
            peer_timing=timings[peer], in_turn_ms=in_turn[ZERO3], peer_in_turn_ms=in_turn[peer],
            **memory[ZERO3], **{f"peer_{name}": mb for name, mb in memory[peer].items()},
        )  # fmt: skip
    for system in systems.values():
        system.close()
    del systems, system
    DEVICE.free_bytes()


def alone(name: str, weights: str, config: Any, batch: int) -> tuple[dict[str, float], Tensor]:
    """MB of torch's allocator in which the system's steps peak, beside what was there before: allocated, reserved; and those of
    parameters, states and all else that stays. The simulated device has those of our pools alone."""
    gc.collect()
    DEVICE.free_bytes()
    before = Taken.now()
    system = TrainingStep(name, weights, config, batch)
    losses = [system.train() for _ in range(3)]
    DEVICE.synchronize()
    DEVICE.free_bytes()  # of the first step, which sharded parameters do not plan
    stays = Taken.now()
    if not DEVICE.is_simulated:
        torch.cuda.reset_peak_memory_stats()
    losses += [system.train() for _ in range(3)]
    DEVICE.synchronize()
    peak = Taken.peak()
    found = {
        "peak_mb": _mb(peak.allocated - before.allocated),
        "peak_reserved_mb": _mb(peak.reserved - before.reserved),
        "between_steps_mb": _mb(stays.allocated - before.allocated),
    }
    system.close()
    return found, torch.stack(losses).float().cpu()


@dataclass(frozen=True)
class Taken:
    """Bytes of torch's allocator, of which our pools on a GPU take theirs."""

    allocated: int
    reserved: int

    @classmethod
    def now(cls) -> Taken:
        if DEVICE.is_simulated:
            ours = DEVICE.total_bytes() - DEVICE.free_bytes()
            return cls(ours, ours)
        return cls(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

    @classmethod
    def peak(cls) -> Taken:
        if DEVICE.is_simulated:
            return cls.now()
        return cls(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def _mb(size_bytes: int) -> float:
    return round(size_bytes / 2**20, 1)
