"""What tests of captured steps run on each rank: a trainer whose plan says which steps are eager, captured or replayed.

Ranks are processes over the fake NCCL; graphs are those of the simulated device, whose replays do the work of other
streams as late as the captured edges allow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.support.bits import assert_bitwise_equal
from tests.support.replica_ranks import torch_groups
from tests.support.simulated_cuda import Graph, load
from tests.support.simulated_nccl import simulated

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(33, 5), (64,), (), (3, 0), (700,), (40, 7), (500,)]
SMALL_BUCKETS = 0.001  # MiB: some parameters lie in several buckets
RATES = [1e-2, 3e-3, 2e-2, 5e-3]


class Trainer:
    """One rank: a model, an optimizer, and static memory for what changes from step to step."""

    def __init__(self, rank: int, dtypes: list[torch.dtype], opt_of: Callable[..., bw.ShardedAdamW]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rank = rank
        self.params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]))
            for i, shape in enumerate(SHAPES)
        ]
        self.given = [torch.zeros_like(p) for p in self.params]
        self.rate = torch.tensor(RATES[0])
        self.opt = opt_of(self.params, lr=self.rate)
        self.graphs: dict[str, Graph] = {}
        self.norms: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []
        self.steps = 0

    def feed(self) -> None:
        """What the next step has: other gradients, another learning rate."""
        generator = torch.Generator().manual_seed(100 * self.steps + self.rank)
        for into in self.given:
            into.copy_(torch.randn(into.shape, generator=generator).mul_(10.0 ** (self.steps % 3 - 1)))
        self.rate.fill_(RATES[self.steps % len(RATES)])
        self.steps += 1

    def backward(self, scale: float = 1.0) -> None:
        torch.stack([(p * g).sum().float() for p, g in zip(self.params, self.given, strict=True)]).sum().mul(
            scale
        ).backward()

    def iteration(self, kind: str) -> Tensor:
        """Everything of a step. ``kind``: how it clips, or in which windows it accumulates."""
        opt = self.opt
        opt.zero_grad()
        if kind == "no_sync":
            with opt.no_sync():
                self.backward(0.5)
        elif kind == "windows":
            self.backward(0.5)
            opt.grad_sync()
        self.backward()
        if kind == "stock":
            norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        elif kind == "inf":
            norm = opt.clip_grad_norm_(0.5, float("inf"))
        elif kind == "plain":
            norm = self.rate
        else:
            norm = opt.clip_grad_norm_(1.0)
        opt.step()
        return norm

    def play(self, plan: str, *, captures: bool) -> list[Tensor]:
        """``plan``: words ``eager``, ``capture`` and ``replay`` with a kind behind a colon, "clip" without. Without ``captures``
        replays are eager steps and captures nothing. Norms, parameters, states and step counts."""
        for word in plan.split():
            what, _, kind = word.partition(":")
            if what == "capture":
                if captures:
                    self.capture(kind)
                continue
            self.feed()
            if what == "replay" and captures:
                self.graphs[kind].replay()
                self.seen.append(self.norms[kind].detach().clone())
            else:
                self.seen.append(self.iteration(kind).detach().clone())
        return self.result()

    def capture(self, kind: str) -> None:
        before = [x.clone() for x in self.state()]
        graph = self.graphs[kind] = Graph(load()[1])
        with graph:
            self.norms[kind] = self.iteration(kind)
        for x, old in zip(self.state(), before, strict=True):
            assert_bitwise_equal(x, old, "capturing must not run anything")

    def state(self) -> list[Tensor]:
        kept = [state[name] for p in self.params for state in [self.opt.state[p]] for name in sorted(state)]
        return [p.detach() for p in self.params] + kept

    def result(self) -> list[Tensor]:
        assert all(torch.isfinite(x.float()).all() for x in self.state())
        return self.seen + [x.clone() for x in self.state()]

    def end(self) -> None:
        self.opt.close()
        for graph in self.graphs.values():  # before the communicators go
            if graph._graph is not None:
                load()[1].fake_cuda_free_graph(graph._graph)


@dataclass(frozen=True)
class Setup:
    registered: bool = False
    shards: int = 0  # of HSDP, 0: no replicas
    timeout_s: float = 20.0


@contextlib.contextmanager
def trainers(
    rank: int, world: int, setup: Setup
) -> Iterator[Callable[..., contextlib.AbstractContextManager[Trainer]]]:
    """What makes trainers, one after the other, on the same communicators."""
    options: dict[str, Any] = {"static_graph": True, "capturable": True, "bucket_cap_mb": SMALL_BUCKETS}
    options |= {"weight_decay": 0.1}
    with simulated() as script, contextlib.ExitStack() as stack:
        groups = torch_groups(rank, world, setup.shards) if setup.shards else {"process_group": None}
        for name, group in groups.items():
            gathers, reduces = Communicator.pair(group, timeout_s=setup.timeout_s, registered=setup.registered)
            stack.enter_context(gathers)
            stack.enter_context(reduces)
            options[name] = reduces

        @contextlib.contextmanager
        def trainer(**more: Any) -> Iterator[Trainer]:
            chosen = {**options, **more}
            dtypes = chosen.pop("dtypes", [F32])
            one = Trainer(rank, dtypes, lambda params, lr: bw.ShardedAdamW(params, lr=lr, **chosen))
            yield one
            one.end()
            options["process_group"].pool.check()
            assert script.fake_nccl_open_groups() == 0

        yield trainer


@contextlib.contextmanager
def trainer(rank: int, world: int, setup: Setup, **more: Any) -> Iterator[Trainer]:
    with trainers(rank, world, setup) as make, make(**more) as one:
        yield one


Body = Callable[[Trainer, bool], list[Tensor]]


def compare(rank: int, world: int, setup: Setup, *bodies: Body, optimizers: Sequence[dict[str, Any]] = ({},)) -> None:
    """Each ``body(trainer, captures)`` leaves the same with captures as without."""
    with trainers(rank, world, setup) as make:
        for options in optimizers:
            for number, body in enumerate(bodies):
                results = []
                for captures in (False, True):
                    with make(**options) as one:
                        results.append(body(one, captures))
                assert_bitwise_equal(results[1], results[0], f"rank {rank}, {options or number}")


def played(rank: int, world: int, setup: Setup, plans: list[str], optimizers: list[dict[str, Any]]) -> None:
    plays = [partial(Trainer.play, plan=plan) for plan in plans]
    compare(
        rank,
        world,
        setup,
        *(lambda one, captures, play=play: play(one, captures=captures) for play in plays),
        optimizers=optimizers,
    )
