"""torch.amp.GradScaler, unmodified, on the gradients of the sharded optimizer: rows A6 to A10 of the semantics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support import optim_twins
from tests.support.optim_twins import dyadic, loss_of, run_local, share
from tests.support.requirements import slow_case
from tests.support.stock_flows import SHAPES, Run, expect_equal_to_unsharded, make_params, run_flow


def grad_scaler(init_scale: float = 8.0, growth_interval: int = 2, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval, **options)


def test_grad_scaler_disabled() -> None:
    def flow(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(run.loss()).backward()
        scaler.unscale_(run.opt)
        scaler.step(run.opt)
        scaler.update()

    def plain(run: Run) -> None:
        run.loss().backward()
        run.opt.step()

    assert_bitwise_equal(expect_equal_to_unsharded(flow, (2,)), run_flow(None, plain))


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


def test_grad_scaler_on_gradients_kept_from_no_sync() -> None:
    def flow(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with run.opt.no_sync():
            scaler.scale(run.loss()).backward()
        scaler.scale(run.loss(lambda i: i % 2 == 0)).backward()
        scaler.step(run.opt)
        scaler.update()

    expect_equal_to_unsharded(flow)


# --- every legal order of calls ---------------------------------------------------------------------------------------


def overflowing_loss(run: Run) -> Tensor:
    """In the third step one element of one parameter is infinite on the last rank."""
    loss = run.loss()
    if run.step == 2 and run.rank == run.world - 1:
        loss = loss + run.params[3][32, 11] * math.inf
    return loss


def backward(run: Run, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(overflowing_loss(run)).backward()


def see_norm(run: Run, *unused: Any) -> None:
    run.seen.append(get_total_norm(run.grads))


# What is called between the last update() and the next, after one backward; "backward" is one more.
CALLS: dict[str, Callable[[Run, torch.amp.GradScaler], Any]] = {
    "backward": backward,
    "sync": lambda run, scaler: run.opt.grad_sync(),
    "unscale": lambda run, scaler: scaler.unscale_(run.opt),
    "clip": lambda run, scaler: run.seen.append(clip_grad_norm_(run.params, 0.25)),
    "clip own": lambda run, scaler: run.seen.append(run.opt.clip_grad_norm_(0.25)),
    "clip values": lambda run, scaler: clip_grad_value_(run.params, 0.25),
    "clip a part": lambda run, scaler: run.seen.append(clip_grad_norm_(run.params[2:5], 0.25)),
    "norm": see_norm,
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
    "backward, unscale, clip, step",
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
@optim_twins.over_worlds(2)
def test_every_legal_order_does_what_it_does_unsharded(worlds: list[int], order: str) -> None:  # A7
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
    for world in worlds:
        results = run_local(world, flow)
        for rank, result in enumerate(results):
            assert_bitwise_equal(result, results[0], f"rank {rank} of {world}: ")
        if order in ORDERS and world != 3:
            assert_bitwise_equal(results[0], expected, f"world {world}: ")
        else:
            torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("world", [None, 2])
def test_orders_that_torch_refuses_are_refused_by_torch(world: int | None) -> None:  # A7, A9
    def body(comm: Communicator | None) -> list[Tensor]:
        run, scaler = Run(comm), grad_scaler()
        with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
            scaler.step(run.opt)
        backward(run, scaler)
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(run.opt, closure=lambda: None)
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.update()
        scaler.unscale_(run.opt)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
            scaler.unscale_(run.opt)
        scaler.step(run.opt)
        with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
            scaler.step(run.opt)
        with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step"):
            scaler.unscale_(run.opt)
        scaler.update()
        run.opt.zero_grad()
        run.opt.grad_sync()
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            scaler.step(run.opt)  # there is no gradient on any rank
        return [p.detach().clone() for p in run.params]

    def plain(run: Run) -> None:
        run.loss().backward()
        run.opt.step()

    _, expected, _ = run_flow(None, plain, steps=1)
    for params in [body(None)] if world is None else run_local(world, body):
        assert_bitwise_equal(params, expected)


# --- overflows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("bad", [math.inf, slow_case(-math.inf), math.nan])
def test_one_bad_element_on_any_rank_in_a_shard_of_any_other_stops_all(world: int | None, bad: float) -> None:  # A6
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
def test_float64_gradients_whose_squares_overflow_are_no_overflow(bad: float | None) -> None:  # A6
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
    for result in run_local(2, flow):
        assert_bitwise_equal(result, expected)


def train_under_a_scaler(rank: int, world: int) -> Any:
    """20 steps of DDP with AdamW, and of ours, each with a scaler that grows every third step; four steps overflow."""
    left = []
    for is_ours in (False, True):
        torch.manual_seed(2)
        model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        params = list(model.parameters())
        if is_ours:
            opt: Any = ShardedAdamW(params, lr=0.01, process_group=Communicator(timeout_s=30))
        else:
            opt, model = torch.optim.AdamW(params, lr=0.01), DistributedDataParallel(model)
        scaler, norms, scales = grad_scaler(init_scale=16.0, growth_interval=3), [], []
        for step in range(20):
            for micro in range(2):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
                loss = model(x).square().mean()
                if step in (4, 5, 11, 17) and micro == step % 2 and rank == step // 2 % world:
                    loss = loss + params[0][3, 2] * math.inf
                scaler.scale(loss).backward()
            if step % 3:
                scaler.unscale_(opt)
                norms.append(clip_grad_norm_(params, 0.05))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            scales.append(scaler.get_scale())
        left.append((scales, norms, [p.detach().clone() for p in params]))
        if is_ours:
            opt.close()
    return left


def test_twenty_steps_grow_and_back_off_as_ddp_does(rank_pool: Any) -> None:  # A7
    everyone = rank_pool(2).run(train_under_a_scaler, timeout_s=60)
    for theirs, ours in everyone:
        scales = [16, 16, 32, 32, 16, 8, 8, 8, 16, 16, 16, 8, 8, 8, 16, 16, 16, 8, 8, 8]
        assert ours[0] == theirs[0] == scales
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=0.0, equal_nan=True)
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-5, atol=1e-6)
    assert_bitwise_equal(everyone[1][1], everyone[0][1])


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
    for world in (1, 2, 4):
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


# --- bfloat16, which needs no scaler ----------------------------------------------------------------------------------
