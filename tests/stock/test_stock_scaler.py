"""torch.amp.GradScaler, unmodified, on the gradients of the sharded optimizer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.conformance.optimizer.test_optim_cuda import batch, in_world, model_of
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import dyadic, loss_of, run_local, share
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import HostReads, posing
from tests.support.stock_flows import SHAPES, Run, make_params, run_flow


def grad_scaler(init_scale: float = 8.0, growth_interval: int = 2, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval, **options)


def test_grad_scaler_with_parameters_of_two_dtypes() -> None:
    """The scaler makes one call per dtype, and each gradient is unscaled once."""

    def flow(comm: Communicator | None) -> Any:
        rank, world = (comm.rank, comm.size) if comm else (0, 1)
        params = [Parameter(torch.ones(6, 5)), Parameter(torch.ones(9, dtype=torch.bfloat16)), Parameter(torch.ones(4))]
        opt = ShardedAdamW(params, lr=0.1, process_group=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        scaler.scale(loss_of(params, share(dyadic(params, 0), rank, world))).backward()
        scaler.unscale_(opt)
        grads = [opt.full_grad(p).float() for p in params]
        scaler.step(opt)
        return grads, [p.detach() for p in params]

    expected = flow(None)
    for world in (2, 4):
        for result in run_local(world, flow):
            assert_bitwise_equal(result, expected)


# --- every legal order of calls ---------------------------------------------------------------------------------------


def overflowing_loss(run: Run) -> Tensor:
    """In the third step one element of one parameter is infinite on the last rank."""
    loss = run.loss()
    if run.step == 2 and run.rank == run.world - 1:
        loss = loss + run.params[3][32, 11] * math.inf
    return loss


def backward(run: Run, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(overflowing_loss(run)).backward()


def kept(run: Run, scaler: torch.amp.GradScaler) -> None:
    with run.opt.no_sync():
        backward(run, scaler)


# What is called between the last update() and the next, after one backward; "backward" is one more.
CALLS: dict[str, Callable[[Run, torch.amp.GradScaler], Any]] = {
    "backward": backward,
    "sync": lambda run, scaler: run.opt.grad_sync(),
    "unscale": lambda run, scaler: scaler.unscale_(run.opt),
    "clip": lambda run, scaler: run.seen.append(clip_grad_norm_(run.params, 0.25)),
    "clip own": lambda run, scaler: run.seen.append(run.opt.clip_grad_norm_(0.25)),
    "clip values": lambda run, scaler: clip_grad_value_(run.params, 0.25),
    "clip a part": lambda run, scaler: run.seen.append(clip_grad_norm_(run.params[2:5], 0.25)),
    "kept": kept,
    "norm": lambda run, scaler: run.seen.append(get_total_norm(run.grads)),
    "half": lambda run, scaler: torch._foreach_mul_(run.grads, 0.5),
    "zero": lambda run, scaler: run.opt.zero_grad(),
    "step": lambda run, scaler: scaler.step(run.opt),
    "new scale": lambda run, scaler: scaler.update(4.0),
}
ORDERS = [
    "step",
    "unscale, step",
    "unscale, norm, clip, step",
    "unscale, clip own, clip own, step",
    "unscale, clip values, step",
    "unscale, half, step",
    "clip, step",  # of scaled gradients
    "half, unscale, step",
    "sync, unscale, clip, step",
    "backward, backward, step",  # accumulation
    "kept, backward, unscale, clip, step",
    "sync, backward, sync, unscale, clip own, step",
    "unscale, zero, step",  # nothing is left to step with
    "unscale",  # and no step
    "unscale, step, new scale",
]
# Two factors that are no powers of two: torch rounds each product to the gradient, we round both together.
ROUNDED_ORDERS = [
    "unscale, clip a part, clip, step",
    "clip values, clip, unscale, norm, clip, step",
    "clip, backward, unscale, step",
]


@pytest.mark.parametrize("order", ORDERS + ROUNDED_ORDERS)
@pytest.mark.parametrize("world", [2, slow_case(3)])
def test_every_legal_order_does_what_it_does_unsharded(world: int, order: str) -> None:
    def flow(comm: Communicator | None) -> Any:
        run, scaler = Run(comm), grad_scaler()
        for run.step in range(5):
            backward(run, scaler)
            for call in order.split(", "):
                CALLS[call](run, scaler)
            if "new scale" not in order:
                scaler.update()
            run.opt.zero_grad()
            run.seen.append(scaler.get_scale())
        return run.result()

    expected = flow(None)
    scales = [seen for seen in expected[0] if not isinstance(seen, Tensor)]
    if order.startswith("clip values"):  # limits the infinite one before it can be found
        assert scales == [8.0, 16.0, 16.0, 32.0, 32.0] and expected[2] == 5
    else:
        assert scales == ([4.0] * 5 if "new scale" in order else [8.0, 16.0, 8.0, 8.0, 16.0])
        assert expected[2] == (0 if "zero" in order or order == "unscale" else 4)
    results = run_local(world, flow)
    for rank, result in enumerate(results):
        assert_bitwise_equal(result, results[0], f"rank {rank}: ")
    if order in ORDERS and world != 3:
        assert_bitwise_equal(results[0], expected)
    else:
        torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-7, equal_nan=True)


# --- overflows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "bad"), [(None, math.inf), (2, math.nan), (3, -math.inf), *map(slow_case, (1, 4), (math.inf, math.nan))]
)
def test_one_bad_element_on_any_rank_in_a_shard_of_any_other_stops_all(world: int | None, bad: float) -> None:
    """First and last element of every parameter, on every rank: nobody steps, nothing changes, and the scale is halved."""

    def body(comm: Communicator | None) -> list[Any]:
        run = Run(comm)
        scaler = grad_scaler(init_scale=2.0**60, growth_interval=1000)
        saved, scales, foreign = run.opt.state_dict, [], 0
        for place, param in enumerate(run.params):
            for source in range(run.world):
                for element in (0, param.numel() - 1):
                    owned = run.opt._engine.owned_ranges(place)
                    owns = any(begin <= element < end for begin, end in owned)
                    foreign += run.rank == source and not owns
                    before = [p.detach().clone() for p in run.params], saved()["state"]
                    poison = torch.zeros(param.numel())
                    if run.rank == source:
                        poison[element] = bad
                    loss = run.loss() * 2.0**-60 + torch.where(poison != 0, param.flatten() * poison, 0.0).sum()
                    scaler.scale(loss).backward()
                    scaler.step(run.opt)
                    scaler.update()
                    run.opt.zero_grad()
                    assert_bitwise_equal(([p.detach() for p in run.params], saved()["state"]), before)
                    scales.append(scaler.get_scale())
        scaler.scale(run.loss()).backward()  # and the next step is as if nothing had been
        scaler.step(run.opt)
        scaler.update()
        return [scales, foreign, [p.detach().clone() for p in run.params]]

    def plain(run: Run) -> None:
        run.loss().backward()
        run.opt.step()

    results = [body(None)] if world is None else run_local(world, body)
    size = world or 1
    scales = [2.0 ** (59 - i) for i in range(2 * len(SHAPES) * size)]
    _, expected, _ = run_flow(None, plain, steps=1)
    for found, _, params in results:
        assert found == scales
        if size == 3:
            torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-7)
        else:
            assert_bitwise_equal(params, expected)
    assert size == 1 or sum(foreign for _, foreign, _ in results) > len(SHAPES)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_float64_gradients_whose_squares_overflow_are_no_overflow(bad: float | None) -> None:
    """As torch has it, which looks at elements."""

    def flow(comm: Communicator | None) -> Any:
        rank, world = (comm.rank, comm.size) if comm else (0, 1)
        params = [Parameter(torch.ones(7, dtype=torch.float64)), Parameter(torch.ones(5))]
        opt = ShardedAdamW(params, lr=0.1, process_group=comm)
        scaler = grad_scaler(init_scale=4.0)
        large = torch.full((7,), 1e200, dtype=torch.float64)
        if bad is not None and rank == world - 1:
            large[2] = bad
        scaler.scale((params[0] * large).sum() + params[1].sum()).backward()
        scaler.step(opt)
        scaler.update()
        return scaler.get_scale(), [p.detach() for p in params]

    expected = flow(None)
    assert expected[0] == (4.0 if bad is None else 2.0)
    for device in (None, "cuda"):
        with posing() if device else contextlib.nullcontext():
            for result in run_local(2, flow, device=device):
                assert_bitwise_equal(result, expected)


# --- several optimizers, uneven ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overflows", ["first", "second", "stock", "none"])
def test_optimizers_under_one_scaler_skip_each_for_itself(overflows: str) -> None:
    """Two of ours and one of torch: who overflows is skipped, the others step, and the scale backs off, as in torch."""

    def body(comm: Communicator | None) -> Any:
        rank, world = (comm.rank, comm.size) if comm else (0, 1)
        groups = {name: make_params() for name in ("first", "second", "stock")}
        comms = {"first": comm, "second": comm.split(0) if comm else None}
        opts: dict[str, Any] = {
            name: ShardedAdamW(groups[name], lr=0.01, process_group=one, bucket_cap_mb=1e-3)
            for name, one in comms.items()
        }
        opts["stock"] = torch.optim.AdamW(groups["stock"], lr=0.01)
        scaler, scales = grad_scaler(), []
        for step in range(3):
            before = {name: [p.detach().clone() for p in params] for name, params in groups.items()}
            loss = torch.zeros(())
            for seed, (name, params) in enumerate(groups.items()):
                grads = dyadic(params, 10 * step + seed)
                loss = loss + loss_of(params, grads if name == "stock" else share(grads, rank, world))
                if step == 1 and name == overflows and (rank == world - 1 or name == "stock"):
                    loss = loss + params[5][200] * math.inf
            scaler.scale(loss).backward()
            scaler.unscale_(opts["second"])
            clip_grad_norm_(groups["second"], 0.25)
            for name, opt in opts.items():
                scaler.step(opt)
                opt.zero_grad()
                is_skipped = all(map(torch.equal, groups[name], before[name]))
                assert is_skipped == (step == 1 and name == overflows), name
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, {name: [p.detach().clone() for p in params] for name, params in groups.items()}

    expected = body(None)
    assert expected[0] == ([8.0, 16.0, 16.0] if overflows == "none" else [8.0, 4.0, 4.0])
    for world in (1, 2):
        for result in run_local(world, body):
            assert_bitwise_equal(result, expected)


def test_a_rank_without_gradients_takes_part_after_grad_sync() -> None:
    """A rank that skipped backward has nothing to list for the scaler; grad_sync gives it placeholders. Overflow included."""

    def flow(comm: Communicator | None) -> Any:
        run, scaler = Run(comm), grad_scaler()
        for run.step in range(4):
            loss = loss_of(run.params, dyadic(run.params, run.step)) * run.world
            if run.step == 2:
                loss = loss + run.params[5][100] * math.inf
            scaler.scale(loss)  # makes the scale, on every rank
            if run.rank == 0:
                scaler.scale(loss).backward()
            run.opt.grad_sync()
            scaler.step(run.opt)
            scaler.update()
            run.opt.zero_grad()
            run.seen.append(scaler.get_scale())
        return run.result()

    expected = flow(None)
    assert expected[0] == [8.0, 16.0, 8.0, 8.0]
    for world in (2, 4):
        for result in run_local(world, flow):
            assert_bitwise_equal(result, expected)


# --- on CUDA, simulated -----------------------------------------------------------------------------------------------


CLIPS: dict[str, Callable[[Any, list[torch.nn.Parameter]], Any]] = {
    "own": lambda opt, params: [opt.clip_grad_norm_(0.3, norm) for norm in (2.0, float("inf"), 1.0, 3.0)],
    "own, a part": lambda opt, params: opt.clip_grad_norm_(0.3, parameters=params[:2]),
    "stock": lambda opt, params: [
        torch.nn.utils.clip_grad_norm_(params, 0.3, n) for n in (2.0, float("inf"), 1.0, 3.0)
    ],
    "stock, one by one": lambda opt, params: torch.nn.utils.clip_grad_norm_(params, 0.3, foreach=False),
    "values": lambda opt, params: torch.nn.utils.clip_grad_value_(params, 1e-3),
}


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_unscale_clip_and_step_read_no_value(world: int | None, clip: Callable[..., Any]) -> None:
    """The one value that is read is the scaler's own, before it steps."""

    def body(rank: int, comm: Communicator | None) -> list[str]:
        model = model_of()
        params = list(model.parameters())
        opt = ShardedAdamW(params, lr=1e-2, process_group=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        with HostReads() as reads:
            for step in range(4):
                loss = model(batch(rank, step, torch.float32)).square().mean()
                scaler.scale(loss * float("inf") if step == 1 and rank == 0 else loss).backward()
                scaler.unscale_(opt)
                clip(opt, params)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        opt.close()
        return reads.callers

    if world is None:
        with posing():
            everyone = [body(0, None)]
    else:
        everyone = in_world(world, True, body)
    for callers in everyone:
        assert len(callers) == 4 and all("grad_scaler.py" in caller for caller in callers), callers
