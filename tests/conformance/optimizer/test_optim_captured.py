"""ShardedAdamW captured in CUDA graphs on several ranks: replays are eager steps, bit for bit, with eager steps before,
between and after them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.captured_ranks import BF16, F32, Setup, Trainer, compare, played, trainer
from tests.support.simulated_cuda import Calls, Graph, load

pytestmark = pytest.mark.dist

LONG = "eager eager capture replay replay eager replay eager eager replay"
OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"dtypes": [BF16, F32], "reduce_dtype": F32},
    {"dtypes": [BF16], "master_weights": "bf16_remainder", "amsgrad": True},
    {"dtypes": [torch.float64], "overlap_grad_sync": False, "gradient_average": False},
    {"dtypes": [BF16], "on_external_update": "ignore", "max_inflight_buckets": 1},
]


KINDS = [
    # A pending factor of the step before belongs to no other, whichever of them a graph has.
    "eager eager:plain capture replay replay eager:plain replay eager:plain",
    "eager capture:plain eager:plain replay:plain eager replay:plain replay:plain",
    "eager:plain capture eager replay eager",
    "eager:stock eager:stock capture:stock replay:stock eager:stock replay:stock",
    "eager:inf capture:inf replay:inf replay:inf eager replay:inf",
    # Several graphs.
    "eager eager:inf capture capture:plain replay:plain replay eager capture:inf replay replay:inf replay:plain eager",
]
# Of micro-batches, within one window and over several.
ACCUMULATED = "eager:{0} eager:{0} capture:{0} replay:{0} replay:{0} eager:{0} replay:{0}"
CASES: dict[str, tuple[int, Setup, list[str], list[dict[str, Any]]]] = {
    "two ranks": (2, Setup(), [LONG], OPTIMIZERS),
    "three ranks": (3, Setup(), [LONG], OPTIMIZERS[1:2]),
    "registered memory": (2, Setup(registered=True), [LONG], OPTIMIZERS[:2]),
    "replicas": (4, Setup(shards=2), [LONG], [{}]),  # partial sums too are memory that graphs write
    "clipping": (2, Setup(), KINDS, [{}]),
    "accumulation": (2, Setup(), [ACCUMULATED.format(kind) for kind in ("no_sync", "windows")], [{}]),
}


@pytest.mark.parametrize("world, setup, plans, optimizers", CASES.values(), ids=CASES)
def test_replays_are_eager_steps(
    rank_pool: Any, world: int, setup: Setup, plans: list[str], optimizers: list[dict[str, Any]]
) -> None:
    """Gradients and rates change between them; step counts go on."""
    plans = [re.sub(r"(eager|capture|replay)(?!:)", r"\1:clip", plan) for plan in plans]
    rank_pool(world).run(played, setup, plans, optimizers, timeout_s=50)


# ---- what is captured in part


def part(one: Trainer, captures: bool, name: str, body: Callable[[], None]) -> None:
    """``body``, as a graph of its own from the first time on."""
    if not captures:
        body()
        return
    if name not in one.graphs:
        one.graphs[name] = Graph(load()[1])
        with one.graphs[name]:
            body()
    one.graphs[name].replay()


def reduced(one: Trainer, edit: str = "") -> None:
    """Gradients as stock code leaves them, with factors that the host knows."""
    opt = one.opt
    opt.zero_grad()
    one.backward()
    if edit == "before":
        torch._foreach_mul_([p.grad for p in one.params], 0.5)
    opt.grad_sync()
    apply(one, edit)


def apply(one: Trainer, edit: str) -> None:
    """What the host does to gradients that are reduced."""
    if edit == "after":
        torch._foreach_mul_([p.grad for p in one.params], 0.5)
    elif edit == "value":
        torch.nn.utils.clip_grad_value_(one.params, 0.3)
    elif edit == "zero":
        one.params[4].grad.mul_(0.0)
        one.params[1].grad.mul_(0.5)
        one.params[1].grad.zero_()
    elif edit == "unscale":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(one.opt)
    elif edit == "more":
        one.backward(0.5)
        one.opt.grad_sync()


def edited(one: Trainer, captures: bool, edit: str) -> list[Tensor]:
    """Each replay has the edit, whatever was eager before it."""
    one.play("eager:clip eager:clip ", captures=captures)
    for step in range(6):
        one.feed()
        part(one, captures, "reduced", lambda: reduced(one, edit))
        one.seen += [one.opt.full_grad(p).clone() for p in one.params]
        if step in (1, 4):
            one.backward(0.5)  # adds to it
        elif step == 3:
            reduced(one)  # in the place of it
        one.seen.append(one.opt.clip_grad_norm_(10.0).clone())
        one.opt.step()
        if step in (2, 3):
            one.play("eager:clip eager:plain ", captures=captures)
    return one.result()


def edited_between(one: Trainer, captures: bool, edit: str) -> list[Tensor]:
    """The edit is eager, between the replay that brings gradients and the one that clips and steps. One step is left out: the
    next replay brings gradients without it."""

    def update() -> None:
        one.norms["both"] = one.opt.clip_grad_norm_(10.0)
        one.opt.step()

    one.play("eager:clip eager:clip ", captures=captures)
    for step in range(6):
        one.feed()
        part(one, captures, "reduced", lambda: reduced(one))
        if step % 2:
            apply(one, edit)
        if step != 3:
            part(one, captures, "update", update)
            one.seen.append(one.norms["both"].clone())
        one.seen += [one.opt.full_grad(p).clone() for p in one.params]
    return one.result()


def in_parts(rank: int, world: int) -> None:
    edits = ("after", "value", "zero")
    compare(
        rank,
        world,
        Setup(),
        *(partial(edited, edit=edit) for edit in ("before", *edits)),
        *(partial(edited_between, edit=edit) for edit in (*edits, "more", "unscale")),
    )


# ---- state between replays


def restored(rank: int, world: int) -> None:
    """Weights and states are loaded, and weights edited, between replays: they stay where the graph finds them."""

    def body(one: Trainer, captures: bool) -> list[Tensor]:
        one.play("eager:clip capture:clip replay:clip ", captures=captures)
        weights, states = [p.detach().clone() for p in one.params], one.opt.state_dict()
        one.play("replay:clip eager:clip ", captures=captures)
        with torch.no_grad():
            for p, old in zip(one.params, weights, strict=True):
                p.copy_(old)
        one.opt.zero_grad()  # which the graph begins with
        one.opt.load_state_dict(states)
        one.opt.reload_master_params()
        one.play("replay:clip ", captures=captures)
        with torch.no_grad():
            one.params[0].mul_(0.5)
        one.params[1].data.mul_(0.5)
        return one.play("replay:clip eager:clip ", captures=captures)

    compare(rank, world, Setup(), body, optimizers=[{"dtypes": [BF16]}])


def waits_for_nothing(rank: int, world: int) -> None:
    with trainer(rank, world, Setup()) as one:
        one.play("eager:clip eager:clip ", captures=True)
        calls = Calls()
        one.capture("clip")
        found = calls.since()
        for name in ("stream_synchronize", "event_synchronize", "memcpy_blocking", "malloc_device", "stream_create"):
            assert name not in found, found
        calls = Calls()
        one.graphs["clip"].replay()
        assert not calls.since(), "a replay calls nothing of ours"


@pytest.mark.parametrize("body", [in_parts, restored, waits_for_nothing])
def test_on_two_ranks(rank_pool: Any, body: Callable[..., None]) -> None:
    rank_pool(2).run(body, timeout_s=50)
