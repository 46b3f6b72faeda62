"""What a step costs the host, by the number of parameters: the third part of bench_optim.py.

A model of many tiny parameters: nearly all of a step is bookkeeping. Two ranks, one thread each, clipping on. A sample is
a step (zero_grad, forward, backward, clip, step) minus zero_grad, forward and backward of the same model without an
optimizer, taken next to it; "cpu" is the same difference in CPU time of the rank's threads, which does not count waiting
for the other rank.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from clip_step import Inject
from gpt_systems import BETAS, EPS, LR, MAX_NORM, WEIGHT_DECAY, adamw
from harness import Rank, Results, Timing, rotation, run_ranks, slowest
from torch import Tensor, nn

PEER = "DDP + clip_grad_norm_ + AdamW(fused=True)"
COUNTS = (300, 3000)
NUMEL = 16
TOLERANCE = 1e-5  # relative L2 of some steps' update against the peer's


class Many(nn.Module):
    """``count`` parameters that get a given gradient each, which differs between ranks."""

    def __init__(self, count: int, rank: int) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(NUMEL, generator=values) for _ in range(count))
        generator = torch.Generator().manual_seed(1 + rank)
        self.grads = [torch.randn(NUMEL, generator=generator) for _ in range(count)]

    def forward(self) -> Tensor:
        loss: Tensor = Inject.apply(self.grads, *self.weights)
        return loss


class Plain:
    def __init__(self, count: int, rank: int) -> None:
        self.model = Many(count, rank)
        self.parameters = list(self.model.parameters())
        self.runner: nn.Module = self.model

    def train_step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.runner().backward()

    def close(self) -> None: ...


class Ddp(Plain):
    def __init__(self, count: int, rank: int) -> None:
        super().__init__(count, rank)
        self.runner = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = adamw(self.parameters)

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.runner().backward()
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()


class Ours(Plain):
    def __init__(self, count: int, rank: int) -> None:
        from bucketwheel import ShardedAdamW

        super().__init__(count, rank)
        self.optimizer = ShardedAdamW(self.parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.runner().backward()
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()

    def close(self) -> None:
        self.optimizer.close()


def flatten(system: Plain) -> Tensor:
    return torch.cat([p.detach().flatten() for p in system.parameters])


def check(ours: Ours, peer: Ddp) -> None:
    """RuntimeError unless three steps of both give the same update."""
    start = flatten(peer)
    for _ in range(3):
        ours.train_step()
        peer.train_step()
    got, want = flatten(ours) - start, flatten(peer) - start
    error = ((got - want).norm() / want.norm()).item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"host step: the update differs from the peer's by {error:.2e} relative")


def job(rank: Rank, count: int, repeats: int) -> dict[str, list[Timing]]:
    """One rank: by system the wall and the CPU time of steps, less those of forward and backward alone."""
    plain, systems = Plain(count, rank.rank), {"ours": Ours(count, rank.rank), "peer": Ddp(count, rank.rank)}
    check(systems["ours"], systems["peer"])  # type: ignore[arg-type]
    for _ in range(3):
        plain.train_step()
    samples: dict[str, list[list[float]]] = {name: [[], []] for name in systems}
    gc.collect()
    gc.disable()
    for repeat in range(repeats):
        for name in rotation(list(systems), repeat):
            took = []
            for system in (plain, systems[name]):
                rank.barrier()
                begin, begin_cpu = time.perf_counter(), time.process_time()
                system.train_step()
                took.append((time.perf_counter() - begin, time.process_time() - begin_cpu))
            for into, base, step in zip(samples[name], *took, strict=True):
                into.append(step - base)
    gc.enable()
    for system in systems.values():
        system.close()
    return {name: [Timing(tuple(v)) for v in lists] for name, lists in samples.items()}


def run(results: Results, *, repeats: int) -> None:
    """Adds two lines for each number of parameters: wall time and CPU time."""
    for count in COUNTS:
        ranks: list[Any] = run_ranks(2, job, count, repeats).values
        for place, what in enumerate(("wall", "cpu")):
            timings = {name: slowest([rank[name][place] for rank in ranks]) for name in ("ours", "peer")}
            results.add(
                f"host time of a step, {count} parameters, {what}",
                timings["ours"],
                peer=PEER,
                peer_timing=timings["peer"],
                ours_per_parameter_s=timings["ours"].median_s / count,
            )
