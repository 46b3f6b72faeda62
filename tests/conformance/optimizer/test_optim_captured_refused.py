"""What a CUDA graph of ShardedAdamW on several ranks cannot have, and captures that come to nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import bucketwheel as bw
from bucketwheel.comm import handle
from bucketwheel.comm.communicator import Communicator
from bucketwheel.device import CPU
from bucketwheel.errors import CaptureError
from bucketwheel.kernels import adam_rows
from tests.support.captured_ranks import BF16, F32, Setup, Trainer, compare, trainer
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import Graph, load
from tests.support.simulated_nccl import simulated

pytestmark = pytest.mark.dist

# ---- what is refused


def expect_refused(one: Trainer, message: str, body: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match=message), Graph(load()[1]):
        body()


def kept_alone(one: Trainer, then: Callable[[], Any]) -> Callable[[], None]:
    """`no_sync` adds to what there is."""

    def body() -> None:
        with one.opt.no_sync():
            one.backward()
        then()

    return body


def refused(one: Trainer, captures: bool) -> list[Tensor]:
    """Nothing has changed after each; without ``captures`` only what is done between them."""
    opt = one.opt
    expect = partial(expect_refused, one) if captures else lambda message, body: None
    one.feed()
    expect("run a whole step before the capture", lambda: one.iteration("clip"))
    opt.zero_grad()
    one.play("eager:clip eager:clip", captures=captures)

    # Gradients that no replay would bring.
    expect("the gradients came before the CUDA graph capture", opt.step)
    expect("the gradients came before the CUDA graph capture", one.backward)
    expect("the gradients came before the CUDA graph capture", lambda: one.params[0].grad.mul_(0.5))
    opt.zero_grad()
    with opt.no_sync():
        one.backward()
    expect("the gradients came before the CUDA graph capture", one.backward)
    expect_later = partial(expect, "the gradients came before the CUDA graph capture")
    expect_later(kept_alone(one, opt.step))
    opt.zero_grad()
    for p in one.params:
        p.grad = torch.full_like(p, 0.25)
    expect_later(opt.step)
    expect_later(one.backward)
    expect_later(kept_alone(one, opt.step))
    opt.zero_grad()
    one.backward()
    expect("are still being reduced", lambda: opt.clip_grad_norm_(1.0))
    expect("are still being reduced", kept_alone(one, opt.step))
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

    # Every replay would take in again what has moved; what is written to stays where it is.
    one.params[1].data = one.params[1].data * 2.0
    expect("'group 0 parameter 1' on rank 0 has new memory since the last step", lambda: one.iteration("clip"))
    opt.zero_grad()
    opt.reload_master_params()
    with torch.no_grad():
        one.params[1].mul_(2.0)
    one.play("capture:clip eager:clip replay:clip", captures=captures)
    if captures:
        with pytest.raises(RuntimeError, match="graph uses the addresses"):
            opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        assert len(opt.param_groups) == 1
    return one.play("replay:clip eager:clip", captures=captures)


def refusals(rank: int, world: int) -> None:
    compare(rank, world, Setup(), refused, optimizers=[{"dtypes": [BF16]}])


def dropped_outside(rank: int, world: int) -> None:
    """`zero_grad` is in the graph, and also after the step: a replay does not put ``p.grad`` back."""

    def body(one: Trainer, captures: bool) -> list[Tensor]:
        def reduced() -> None:
            one.opt.zero_grad()
            one.backward()
            one.opt.grad_sync()

        one.play("eager:clip eager:clip ", captures=captures)
        graph = one.graphs["reduced"] = Graph(load()[1])
        if captures:
            with graph:
                reduced()
        one.opt.zero_grad()
        if captures:
            graph.replay()
            for ask in (one.opt.step, lambda: one.opt.clip_grad_norm_(1.0), one.opt.grad_sync):
                with pytest.raises(CaptureError, match="found no gradients: p.grad was dropped outside"):
                    ask()
        one.play("eager:clip ", captures=captures)
        one.feed()
        graph.replay() if captures else reduced()
        one.opt.step()
        return one.result()

    compare(rank, world, Setup(), body)


def rate_on_the_host(rank: int, world: int) -> None:
    with trainer(rank, world, Setup()) as one:
        one.play("eager:clip ", captures=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adam_rows, "index_of", lambda _: CPU)  # or it would pose as CUDA's
            one.play("eager:clip ", captures=True)
            expect_refused(one, "a learning rate is a tensor on the CPU", lambda: one.iteration("plain"))
        one.opt.zero_grad()
        one.play("capture:clip replay:clip ", captures=True)


def not_capturable(rank: int, world: int) -> None:
    with trainer(rank, world, Setup(), capturable=False) as one:
        one.play("eager:clip ", captures=True)
        one.feed()
        expect_refused(one, "needs an optimizer made with capturable=True", one.opt.step)
        one.opt.zero_grad()
        expect_refused(one, "needs an optimizer made with capturable=True", one.backward)
        one.opt.zero_grad()
        one.play("eager:clip ", captures=True)


def bad_options(rank: int, world: int) -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    with simulated():
        gathers, reduces = Communicator.pair(timeout_s=20)
        with gathers, reduces:
            options: dict[str, Any] = {"process_group": reduces, "static_graph": True}
            with pytest.raises(ValueError, match="overlap_param_sync=True exclude each other"):
                bw.ShardedAdamW(params, capturable=True, overlap_param_sync=True, **options)
            with pytest.raises(RuntimeError, match="ranks disagree on .*: rank 0 has the optimizer's options"):
                bw.ShardedAdamW(params, capturable=rank == 0, **options)
            opt = bw.ShardedAdamW(params, capturable=True, **options)
            assert "capturable=True" in opt.describe()
            opt.close()


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
            if where == "no_sync":
                with one.opt.no_sync():
                    one.backward()
                fail()
            one.backward()
            one.opt.clip_grad_norm_(1.0)
            with pytest.MonkeyPatch.context() as patch:
                if where == "gathers":  # as if CUDA had ended the capture: nothing can be waited for
                    patch.setattr(handle, "wait_all", fail)
                    one.opt.step()
            fail()
        if where != "gathers":
            if where == "backward":
                hook.remove()
            for ask in (
                one.opt.step,
                one.backward,
                lambda: one.opt.clip_grad_norm_(1.0),
                lambda: one.params[-1].grad.mul_(0.5),
                kept_alone(one, one.opt.step),
            ):
                for graph in (contextlib.nullcontext(), Graph(load()[1])):
                    with pytest.raises(CaptureError, match="call zero_grad on all ranks"), graph:
                        ask()
        one.opt.zero_grad()
        assert one.opt.full_grad(one.params[0]) is None

    compare(rank, world, setup, body, optimizers=[{"dtypes": [F32, BF16]}])


@pytest.mark.parametrize("where", ["backward", "no_sync", "gathers"])
@pytest.mark.parametrize(("registered", "shards"), [(False, 0), slow_case(True, 0), (False, 2)])
def test_a_capture_that_fails_is_forgotten(rank_pool, registered, shards, where):
    setup = Setup(registered=registered, shards=shards)
    rank_pool(4 if shards else 2).run(failing, setup, where, timeout_s=30)


@pytest.mark.parametrize("body", [refusals, dropped_outside, rate_on_the_host, not_capturable, bad_options])
def test_on_two_ranks(rank_pool: Any, body: Callable[[int, int], None]) -> None:
    rank_pool(2).run(body, timeout_s=50)


def apart(rank: int, world: int) -> list[str]:
    """Ranks that capture different things, or of which one has edited its parameters."""

    def scaled() -> None:
        one.opt.zero_grad()
        one.backward()
        one.opt.grad_sync()
        torch._foreach_mul_([p.grad for p in one.params], 0.5 if rank == 0 else 0.25)

    told = []
    with trainer(rank, world, Setup(), dtypes=[BF16]) as one:
        one.play("eager:clip ", captures=True)
        for message, body, is_edited in (
            ("captured norm.*captured step", lambda: one.iteration("clip" if rank == 0 else "plain"), False),
            (r"captured scale by 0\.5, captured scale by 0\.25", scaled, False),
            ("'group 0 parameter 0' on rank 1 has new memory", lambda: one.iteration("clip"), True),
        ):
            one.feed()
            if is_edited and rank == 1:
                with torch.no_grad():
                    one.params[2].mul_(0.5)
                one.params[0].data = one.params[0].data.clone()  # has moved, too
            with pytest.raises(RuntimeError, match=message) as caught, Graph(load()[1]):
                body()
            one.opt.zero_grad()
            one.opt.reload_master_params()
            one.play("eager:clip ", captures=True)
            told.append(str(caught.value))
        one.play("capture:clip replay:clip eager:clip replay:clip", captures=True)
    return told


def test_ranks_that_capture_different_steps_are_told(rank_pool):
    first, second = rank_pool(2).run(apart, timeout_s=50)
    assert first == second
