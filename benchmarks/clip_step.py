"""Clip + step alone, on the tensors of a model: the first part of bench_optim.py.

One process: ours is the local `ShardedAdamW`, the peer `clip_grad_norm_` + `torch.optim.AdamW(fused=True)`, with all
threads. Two ranks, one thread each: ours is sharded and its gradients are reduced already; every rank of the peer clips
and steps all parameters, as under DDP. Limit: norm, Adam and (sharded) the copy of the own half by the loops of
bare_loops.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpt_systems import BETAS, EPS, LR, MAX_NORM, WEIGHT_DECAY, AdamScalars, adamw, pointer
from harness import Rank, Results, Timing, load_native, measure, on_threads, run_ranks, slowest
from torch import Tensor, nn

PEER = "clip_grad_norm_ + AdamW(fused=True)"
TOLERANCE = 1e-5  # relative L2 of two steps' update against the peer's


class Inject(torch.autograd.Function):
    """A backward pass that delivers given gradients: Inject.apply(gradients, *parameters).backward()."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Any, ...]:
        return (None, *(grad.clone() for grad in ctx.grads))


def make_tensors(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]


def make_parameters(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in make_tensors(shapes, seed=0)]


def flatten(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


class Peer:
    """Stock clip and step on all parameters."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], grads: Sequence[Tensor]) -> None:
        self.parameters = make_parameters(shapes)
        self.grads = [grad.clone() for grad in grads]  # stock clipping scales them in place
        self.optimizer = adamw(self.parameters)

    def give_gradients(self) -> None:
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad

    def clip_and_step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()


class Ours:
    """bucketwheel.ShardedAdamW: sharded when a process group is up, else local."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], grads: Sequence[Tensor]) -> None:
        from bucketwheel import ShardedAdamW

        self.parameters = make_parameters(shapes)
        self.grads = grads
        self.optimizer = ShardedAdamW(self.parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def give_gradients(self) -> None:
        self.optimizer.zero_grad()
        Inject.apply(self.grads, *self.parameters).backward()
        self.optimizer.grad_sync()

    def clip_and_step(self) -> None:
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.param_sync()


def check(ours: Ours, peer: Peer) -> None:
    """Two steps of both from the same values; raise RuntimeError unless the updates agree."""
    start = flatten(peer.parameters)
    for system in (ours, peer):
        for _ in range(2):
            system.give_gradients()
            system.clip_and_step()
    got, want = flatten(ours.parameters) - start, flatten(peer.parameters) - start
    error = ((got - want).norm() / want.norm()).item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"clip + step: the update differs from torch's by {error:.2e} relative")


def bare_limit(numel: int, threads: int, *, copies: bool) -> Callable[[], None]:
    """Norm, Adam and, if asked, a copy of the new values, over `numel` floats split over `threads` threads."""
    loops = load_native("bare_loops.cpp")
    part = -(-numel // threads)
    p, m, v, g, target = (torch.full((part * threads,), 1e-3) for _ in range(5))
    scalars = AdamScalars.at_step(10, 1.0)

    def run(index: int) -> None:
        mine = slice(index * part, (index + 1) * part)
        loops.bare_sum_squares(pointer(g[mine]), ctypes.c_int64(part))
        loops.bare_adam(*(pointer(t[mine]) for t in (p, m, v, g)), ctypes.c_int64(part), ctypes.byref(scalars))
        if copies:
            ctypes.memmove(target[mine].data_ptr(), p[mine].data_ptr(), 4 * part)

    return lambda: on_threads(run, threads)


def compare(
    ours: Ours, peer: Peer, limit: Callable[[], None], repeats: int, align: Callable[[], None]
) -> dict[str, Timing]:
    systems: dict[str, Ours | Peer] = {"ours": ours, "peer": peer}

    def before(name: str) -> None:
        if name in systems:
            systems[name].give_gradients()
        align()

    cases = {"ours": ours.clip_and_step, "peer": peer.clip_and_step, "limit": limit}
    return measure(cases, repeats=repeats, warmup=2, before=before)


def sharded_job(rank: Rank, shapes: Sequence[tuple[int, ...]], repeats: int) -> dict[str, Timing]:
    """One rank: its own gradients for ours, the mean over the ranks for the peer."""
    all_grads = [make_tensors(shapes, seed=1 + r) for r in range(rank.world)]
    mean = [sum(parts) / rank.world for parts in zip(*all_grads, strict=True)]
    ours, peer = Ours(shapes, all_grads[rank.rank]), Peer(shapes, mean)
    check(ours, peer)
    numel = sum(p.numel() for p in peer.parameters)
    limit = bare_limit(-(-numel // rank.world), 1, copies=True)
    timings = compare(ours, peer, limit, repeats, rank.barrier)
    ours.optimizer.close()
    return timings


def run(results: Results, shapes: Sequence[tuple[int, ...]], *, repeats: int) -> None:
    """Adds one line for one process and one for two ranks."""
    grads = make_tensors(shapes, seed=1)
    ours, peer = Ours(shapes, grads), Peer(shapes, grads)
    check(ours, peer)
    numel, threads = sum(g.numel() for g in grads), torch.get_num_threads()
    timings = compare(ours, peer, bare_limit(numel, threads, copies=False), repeats, lambda: None)
    add(results, f"clip + step, 1 process, {threads} threads", timings, numel)
    ours.optimizer.close()
    ranks = run_ranks(2, sharded_job, shapes, repeats).values
    add(results, "clip + step, 2 ranks, 1 thread", {n: slowest([r[n] for r in ranks]) for n in ranks[0]}, numel)


def add(results: Results, case: str, timings: dict[str, Timing], numel: int) -> None:
    limit_s = timings["limit"].median_s
    results.add(case, timings["ours"], peer=PEER, peer_timing=timings["peer"], limit_s=limit_s, numel=numel)
