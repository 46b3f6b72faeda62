"""ShardedAdamW captured in CUDA graphs on several ranks: replays are eager steps, bit for bit, with eager steps before,
between and after them. Ranks are processes over the fake NCCL; graphs are those of the simulated device, whose replays
do the work of other streams as late as the captured edges allow."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from dist.test_grid import torch_groups
from dist.test_optim_nccl import simulated
from torch import Tensor

import bucketwheel as bw
from bucketwheel import handle
from bucketwheel.comm import Communicator
from bucketwheel.errors import CaptureError, CommError, CommTimeout
from bucketwheel.testing import assert_bitwise_equal
from tests.simulated_cuda import Calls, Graph, load

pytestmark = pytest.mark.dist

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
    shards: int = 0  # of a grid, 0: no grid
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


def expect_eager(
    rank_pool: Any, world: int, setup: Setup, *plans: str, optimizers: Sequence[dict[str, Any]] = ({},)
) -> None:
    plans = tuple(re.sub(r"(eager|capture|replay)(?!:)", r"\1:clip", plan) for plan in plans)
    rank_pool(world).run(played, setup, list(plans), list(optimizers), timeout_s=50)


LONG = "eager eager capture replay replay eager replay eager eager replay"
OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"dtypes": [BF16, F32], "reduce_dtype": F32},
    {"dtypes": [BF16], "master_weights": "bf16_remainder", "amsgrad": True},
    {"dtypes": [torch.float64], "overlap_grad_sync": False, "gradient_average": False},
    {"dtypes": [BF16], "on_external_update": "ignore", "max_inflight_buckets": 1},
]


def test_replays_are_eager_steps(rank_pool):
    """Gradients and rates change between them; step counts go on."""
    expect_eager(rank_pool, 2, Setup(), LONG, optimizers=OPTIMIZERS)


@pytest.mark.parametrize("world", [1, 3])
def test_over_other_worlds(rank_pool, world):
    expect_eager(rank_pool, world, Setup(), LONG, optimizers=OPTIMIZERS[1:2])


def test_in_registered_memory(rank_pool):
    expect_eager(rank_pool, 2, Setup(registered=True), LONG, optimizers=OPTIMIZERS[:2])


def test_over_a_grid(rank_pool):
    """Partial sums too are memory that graphs write: those of the replicas."""
    expect_eager(rank_pool, 4, Setup(shards=2), LONG)


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


def test_clipping_in_graphs(rank_pool):
    expect_eager(rank_pool, 2, Setup(), *KINDS)


def test_accumulation_in_a_graph(rank_pool):
    """Of micro-batches, within one window and over several."""
    plan = "eager:{0} eager:{0} capture:{0} replay:{0} replay:{0} eager:{0} replay:{0}"
    expect_eager(rank_pool, 2, Setup(), *map(plan.format, ("no_sync", "windows")))


# ---- what is captured in part


def backward_alone(rank: int, world: int, scales: bool) -> None:
    """The graph ends with `grad_sync`; clipping, perhaps a `GradScaler`, and step follow eagerly."""

    def body(one: Trainer, captures: bool) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=scales)

        def reduced() -> None:
            one.opt.zero_grad()
            scaled = torch.stack([(p * g).sum() for p, g in zip(one.params, one.given, strict=True)]).sum() * scale
            scaled.backward()
            one.opt.grad_sync()

        graph = Graph(load()[1])
        for step in range(6):
            one.feed()
            if scales and step == 4 and rank == 1:
                one.given[1][3] = float("inf")
            scale = torch.tensor(8.0 if scales else 1.0)
            if step < 2 or not captures:
                reduced()
            else:
                if step == 2:
                    with graph:
                        reduced()
                graph.replay()
            if scales:
                scaler.scale(torch.ones(()))  # has it made
                scaler._scale.fill_(8.0)
                scaler.unscale_(one.opt)
            one.seen.append(one.opt.clip_grad_norm_(1.0).clone())
            one.seen.append(one.opt.local_grad_norm().clone())
            scaler.step(one.opt)
            if scales:
                scaler.update(8.0)
            one.seen.append(one.opt.full_grad(one.params[0]).clone())
        one.graphs["reduced"] = graph
        return one.result()

    compare(rank, world, Setup(), body)


@pytest.mark.parametrize("scales", [False, True])
def test_backward_is_captured_and_the_step_is_not(rank_pool, scales):
    rank_pool(2).run(backward_alone, scales, timeout_s=30)


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
        one.opt.reload_master_params()
        return one.play("replay:clip eager:clip ", captures=captures)

    compare(rank, world, Setup(), body, optimizers=[{"dtypes": [BF16]}])


def test_loading_and_edits_between_replays(rank_pool):
    rank_pool(2).run(restored, timeout_s=30)


# ---- memory


def memory_of_graphs(rank: int, world: int, registered: bool) -> None:
    with trainer(rank, world, Setup(registered=registered)) as one:
        pool = one.opt._engine.comm.pool
        one.play("eager:clip eager:clip ", captures=True)
        rest, before = pool.stats(), one.opt.memory_summary()
        assert before["captured"] == 0
        one.capture("clip")
        found = one.opt.memory_summary()
        largest = max(bucket.grads.nbytes for bucket in one.opt._engine._buckets)
        assert found["captured"] == (0 if registered else 2 * largest), "as many as max_inflight_buckets"
        one.capture("plain")
        one.play("replay:clip eager:clip replay:plain ", captures=True)
        assert one.opt.memory_summary()["captured"] == found["captured"], "graphs of one optimizer share"
        assert {name: found[name] for name in found if name not in ("captured", "buckets_peak")} == {
            name: before[name] for name in found if name not in ("captured", "buckets_peak")
        }
        after = pool.stats()
        assert (after.live_leases, after.reserved_bytes) == (rest.live_leases, rest.reserved_bytes)
        held = one.opt._made_engine.grads.launcher
        one.opt.close()
        assert held.memory()["captured"] == 0


@pytest.mark.parametrize("registered", [False, True])
def test_graphs_have_memory_of_their_own(rank_pool, registered):
    """None of the pool's: an eager step takes what it always took."""
    rank_pool(2).run(memory_of_graphs, registered, timeout_s=30)


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


def test_a_capture_waits_for_nothing(rank_pool):
    rank_pool(2).run(waits_for_nothing, timeout_s=30)


# ---- what is refused


def expect_refused(one: Trainer, message: str, body: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match=message), Graph(load()[1]):
        body()


def refused(one: Trainer, captures: bool) -> list[Tensor]:
    """Nothing has changed after each; without ``captures`` only what is done between them."""
    opt = one.opt
    expect = partial(expect_refused, one) if captures else lambda message, body: None
    one.feed()
    expect("run a whole step before it", lambda: one.iteration("clip"))
    opt.zero_grad()
    one.play("eager:clip eager:clip", captures=captures)

    # Gradients that no replay would bring.
    expect("the gradients came before the CUDA graph capture", opt.step)
    expect("the gradients came before the CUDA graph capture", one.backward)
    opt.zero_grad()
    with opt.no_sync():
        one.backward()
    expect("the gradients came before the CUDA graph capture", one.backward)
    opt.zero_grad()
    one.backward()
    expect("are still being reduced", lambda: opt.clip_grad_norm_(1.0))
    opt.step()

    # A scaler decides on the host.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))

    def scaled() -> None:
        opt.zero_grad()
        one.backward()
        scaler.unscale_(opt)

    expect("torch's GradScaler decides on the host", scaled)
    opt.zero_grad()

    # Edits would be taken in again by every replay.
    with torch.no_grad():
        one.params[1].mul_(2.0)
    expect("'group 0 parameter 1' was written to since the last step", lambda: one.iteration("clip"))
    opt.zero_grad()
    opt.reload_master_params()
    one.play("capture:clip eager:clip replay:clip", captures=captures)
    if captures:
        with pytest.raises(RuntimeError, match="graphs hold the addresses"):
            opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        assert len(opt.param_groups) == 1
    return one.play("replay:clip eager:clip", captures=captures)


def refusals(rank: int, world: int) -> None:
    compare(rank, world, Setup(), refused, optimizers=[{"dtypes": [BF16]}])


def test_what_a_graph_cannot_have_is_refused(rank_pool):
    rank_pool(2).run(refusals, timeout_s=30)


def not_capturable(rank: int, world: int) -> None:
    with trainer(rank, world, Setup(), capturable=False) as one:
        one.play("eager:clip ", captures=True)
        one.feed()
        expect_refused(one, "needs an optimizer made with capturable=True", one.opt.step)
        one.opt.zero_grad()
        expect_refused(one, "needs an optimizer made with capturable=True", one.backward)
        one.opt.zero_grad()
        one.play("eager:clip ", captures=True)


def test_a_capture_needs_capturable(rank_pool):
    rank_pool(2).run(not_capturable, timeout_s=30)


def bad_options(rank: int, world: int) -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    with simulated():
        gathers, reduces = Communicator.pair(timeout_s=20)
        with gathers, reduces:
            options: dict[str, Any] = {"process_group": reduces, "static_graph": True}
            with pytest.raises(ValueError, match="overlap_param_sync=True exclude each other"):
                bw.ShardedAdamW(params, capturable=True, overlap_param_sync=True, **options)
            with pytest.raises(RuntimeError, match="ranks disagree on the optimizer's options"):
                bw.ShardedAdamW(params, capturable=rank == 0, **options)
            opt = bw.ShardedAdamW(params, capturable=True, **options)
            assert "capturable=True" in opt.describe()
            opt.close()


def test_options_that_exclude_capturable(rank_pool):
    rank_pool(2).run(bad_options, timeout_s=30)


# ---- captures that come to nothing


class Broken(Exception):
    pass


def failing(rank: int, world: int, setup: Setup, where: str) -> None:
    """A capture that raises: nothing of it has run, and `zero_grad` forgets it."""

    def fail(*_: Any) -> None:
        raise Broken

    def body(one: Trainer, captures: bool) -> list[Tensor]:
        one.play("eager:clip eager:clip ", captures=captures)
        if captures:
            try_one(one)
        return one.play("eager:clip capture:clip replay:clip eager:clip replay:clip ", captures=captures)

    def try_one(one: Trainer) -> None:
        with pytest.raises(Broken), Graph(load()[1]):
            one.opt.zero_grad()
            if where == "backward":
                hook = one.params[2].register_hook(fail)
            one.backward()
            one.opt.clip_grad_norm_(1.0)
            with pytest.MonkeyPatch.context() as patch:
                if where == "gathers":  # as if CUDA had ended the capture: nothing can be waited for
                    patch.setattr(handle, "wait_all", fail)
                    one.opt.step()
            fail()
        if where == "backward":
            hook.remove()
            for ask in (one.opt.step, one.backward, lambda: one.opt.clip_grad_norm_(1.0)):
                with pytest.raises(CaptureError, match="call zero_grad on all ranks to forget them"):
                    ask()
        one.opt.zero_grad()
        assert one.opt.full_grad(one.params[0]) is None

    compare(rank, world, setup, body, optimizers=[{"dtypes": [F32, BF16]}])


@pytest.mark.parametrize("where", ["backward", "gathers"])
@pytest.mark.parametrize(("registered", "shards"), [(False, 0), (True, 0), (False, 2)])
def test_a_capture_that_fails_is_forgotten(rank_pool, registered, shards, where):
    setup = Setup(registered=registered, shards=shards)
    rank_pool(4 if shards else 2).run(failing, setup, where, timeout_s=30)


def closed_after_a_failure(rank: int, world: int) -> None:
    with trainer(rank, world, Setup()) as one:
        one.play("eager:clip ", captures=True)
        one.feed()
        with pytest.raises(Broken), Graph(load()[1]):
            one.opt.zero_grad()
            one.backward()
            raise Broken
        one.opt.close()
        assert all(p.grad is None for p in one.params)


def test_an_optimizer_closes_after_a_capture_that_failed(rank_pool):
    rank_pool(2).run(closed_after_a_failure, timeout_s=30)


def one_of_two(rank: int, world: int) -> tuple[str, str]:
    """Rank 0 captures its step, rank 1 does not."""
    setup, outcome = Setup(timeout_s=1.0), ("nothing", "")
    with contextlib.suppress(CommError, RuntimeError), trainer(rank, world, setup) as one:
        one.play("eager:clip ", captures=True)
        one.feed()
        try:
            if rank == 0:
                one.capture("clip")
            else:
                one.iteration("clip")
                one.iteration("clip")
                one.opt._engine.comm.exchange(b"after")
        except CommError as error:
            outcome = type(error).__name__, str(error)
    return outcome


def test_a_rank_that_does_not_capture_is_named(rank_pool):
    (kind, text), (other, _) = rank_pool(2).run(one_of_two, timeout_s=30)
    assert kind == CommTimeout.__name__ and "rank 1" in text, text
    assert other != "nothing"


def apart(rank: int, world: int) -> str:
    """Ranks that capture different things."""
    with trainer(rank, world, Setup()) as one:
        one.play("eager:clip ", captures=True)
        one.feed()
        with pytest.raises(RuntimeError, match="captured norm.*captured step") as caught, Graph(load()[1]):
            one.iteration("clip" if rank == 0 else "plain")
        one.opt.zero_grad()
        one.play("eager:clip ", captures=True)
        return str(caught.value)


def test_ranks_that_capture_different_steps_are_told(rank_pool):
    first, second = rank_pool(2).run(apart, timeout_s=30)
    assert first == second
